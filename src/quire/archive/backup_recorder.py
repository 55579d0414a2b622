"""Records the changes of a store while a backup is made, and nothing otherwise.

It is a recorder of files and a log of commits whose queue is closed until a backup opens it. Every owner has one, whatever
`archive.mode` is: a store can be backed up while it is in use, and files that were opened before the backup are still written.
While the queue is closed, each write costs the check of a flag.

The queue is opened between two commits of the manifest. Otherwise a commit without a slot in the queue that becomes visible
after the base was read would be in neither.

Threads: any. Raises the errors of disk and manifest, and `Conflict` if a backup is already being made.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from quire.archive.format import ArtifactEvent, CommitEvent
from quire.archive.queue import EventQueue, PendingArtifact
from quire.archive.recorder import Recorder
from quire.archive.remote_files import number_of, remote_at
from quire.core.errors import Conflict
from quire.durable import names
from quire.durable.files import Disk
from quire.manifest.overlay import TableRows
from quire.manifest.writer import CommitLog, ManifestWriter

KEPT = os.path.join(names.SCRATCH, "backup")
"""In a store's directory: hard links to files that a backup has yet to copy. Removed when it ends, or when the store is opened
after a kill."""


class BackupRecorder:
    """The recorder of an owner's backups."""

    def __init__(self, disk: Disk, root: str, below: Disk) -> None:
        """Create the recorder. `disk`: the disk that the store would otherwise use; `below`: the same without an archive's
        recorder."""
        # constant after construction
        self.queue = EventQueue(is_open=False)
        self.recorder = Recorder(disk, root, self.queue, self._artifact_complete)
        self.below = below
        self._kept = os.path.join(root, KEPT)
        self._numbers = count()
        self._next: CommitLog | None = None
        self._between_commits = threading.Lock()
        """Held by the manifest's writer from the reservation of a commit's slots until they are filled or cancelled."""
        self._in_use = threading.Lock()

    def attach(self, writer: ManifestWriter) -> None:
        """Receive the rows of commits from now on, and pass them on to the archive, if there is one."""
        self._next = writer.archive
        writer.record_rows()
        writer.archive = self

    # ── the manifest's writer (`manifest.writer.CommitLog`) ───────────────────────────────────────────────────────────
    def reserve(self) -> _CommitPlaces:
        self._between_commits.acquire()
        following = self._next.reserve() if self._next is not None else None
        return _CommitPlaces(self, self.queue.reserve() if self.queue.is_open else None, following)

    def fill(self, places: _CommitPlaces, written: list[TableRows]) -> None:
        if self._next is not None:
            self._next.fill(places.following, written)
        if places.own is not None:
            places.own.fill(CommitEvent(tuple(written)))
        self._between_commits.release()

    def cancelled(self, places: _CommitPlaces) -> None:
        """Cancel the slots of a commit. Called by `_CommitPlaces`."""
        for place in (places.own, places.following):
            if place is not None:
                place.cancel()
        self._between_commits.release()

    # ── a backup ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Refuse other backups during the block, which lasts until the backup is complete: two that overlap would continue the
        log of one target at the same number, and overwrite each other's base."""
        if not self._in_use.acquire(blocking=False):
            raise Conflict("a backup of this store is already running", hint="wait until it finishes")
        try:
            yield
        finally:
            self._in_use.release()

    @contextmanager
    def recording(self) -> Iterator[EventQueue]:
        """Record every change during the block. REQUIRES `reserved`."""
        try:
            self.recorder.watch_renames()
            with self._between_commits:
                self.queue.open()
            yield self.queue
        finally:
            self.queue.close()
            self.recorder.end_watch()
            self._remove_kept()

    def _remove_kept(self) -> None:
        """Remove the links of a backup that failed: each one keeps the blocks of a file that may be removed meanwhile."""
        if self.below.exists(self._kept):
            for name in self.below.names(self._kept):
                self.below.remove(os.path.join(self._kept, name))

    def _artifact_complete(self, path: str, relative: str) -> None:
        """Queue a table or compressed segment that has its final name. It gets a hard link, because it may be removed before
        it is copied."""
        if (remote := remote_at(self.below, path)) is not None:
            self.queue.append(ArtifactEvent(number_of(remote), relative, remote.key, remote.size, remote.sha256))
            return
        status = os.stat(path)
        kept = os.path.join(self._kept, f"{next(self._numbers):x}.file")
        self.below.make_dirs(self._kept)
        self.below.link(path, kept)
        self.queue.append(PendingArtifact(relative, kept, (status.st_ino, status.st_size, status.st_mtime_ns)))


class _CommitPlaces:
    """The slots of one commit: in the backup's own queue, if that is open, and in the archive's."""

    __slots__ = ("_recorder", "following", "own")

    def __init__(self, recorder: BackupRecorder, own: Any, following: Any) -> None:
        self._recorder = recorder
        self.own = own
        self.following = following

    def cancel(self) -> None:
        """Cancel both slots: nothing was committed."""
        self._recorder.cancelled(self)
