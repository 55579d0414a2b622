"""Immutable files that wait to be uploaded: each is uploaded once, however many names it has (A6).

Terms
  identity   (inode, size, time of last change) of a file: the same for all its names
  kept       a hard link below archive/, because the file may be removed before it is uploaded

Threads: `keep` any; all others the holder of the archiver's `_cutting`, and the thread of a base. Raises the disk's errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count

from quire.archive.format import ArtifactEvent, Position, file_key
from quire.archive.queue import PendingArtifact
from quire.archive.recorder import sha256_of
from quire.archive.remote_files import number_of, remote_at
from quire.durable.files import Disk

Identity = tuple[int, int, int]
Upload = tuple[str, str]
"""(object name, local file)"""


class Artifacts:
    """The files that were handed over, with their object names."""

    def __init__(self, disk: Disk, spool: str) -> None:
        # constant after construction
        self._disk = disk
        self._spool = spool
        self._numbers = count()
        # replaced as a whole, or changed by one key
        self._object_of: dict[Identity, tuple[str, bytes]] = {}
        """(object name, SHA-256) of each file."""

    def sweep(self) -> None:
        """Remove the files that a former life left below archive/."""
        with suppress(FileNotFoundError):
            for name in self._disk.names(self._spool):
                self._disk.remove(os.path.join(self._spool, name))

    def discard(self, path: str) -> None:
        """Remove a file below archive/ that is no longer needed."""
        with suppress(FileNotFoundError):
            self._disk.remove(path)

    def keep(self, path: str, relative: str) -> PendingArtifact | ArtifactEvent:
        """Keep a file that is complete and has its name. Return the entry to hand over."""
        if (event := self._in_bucket(path, relative)) is not None:
            return event
        kept = os.path.join(self._spool, f"{next(self._numbers):x}.file")
        self._disk.make_dirs(self._spool)
        self._disk.link(path, kept)
        return PendingArtifact(relative, kept, _identity(path))

    def taken(self, entry: PendingArtifact, store_id: str, position: Position) -> tuple[ArtifactEvent, Upload | None]:
        """Return an artifact's event, and the upload that must precede the log object with that event; `None` if it is
        uploaded or about to be."""
        target, upload = self._object_of.get(entry.identity), None
        if target is None:
            target = self._object_of[entry.identity] = self._name(store_id, position, entry.identity, entry.kept)
            upload = (target[0], entry.kept)
        inode, size, _ = entry.identity
        return ArtifactEvent(inode, entry.path, target[0], size, target[1]), upload

    def in_base(
        self, path: str, relative: str, store_id: str, first: Position, upload: Callable[[str, str], None]
    ) -> ArtifactEvent:
        """Return the event of a file that a base names, after uploading the file unless it was uploaded before."""
        if (event := self._in_bucket(path, relative)) is not None:
            return event
        identity = _identity(path)
        if (target := self._object_of.get(identity)) is None:
            target = self._name(store_id, first, identity, path)
            upload(target[0], path)
            self._object_of[identity] = target
        return ArtifactEvent(identity[0], relative, target[0], identity[1], target[1])

    def forget(self, lost: Iterable[str]) -> None:
        """Forget objects that were never uploaded, so that the next base uploads them."""
        names = frozenset(lost)
        self._object_of = {identity: target for identity, target in self._object_of.items() if target[0] not in names}

    def forget_all(self) -> None:
        """Forget every object, so that the next base uploads every file again, under a new name."""
        self._object_of = {}

    def _in_bucket(self, path: str, relative: str) -> ArtifactEvent | None:
        """Return the event of a file that a restore left in the bucket, or `None`."""
        if (remote := remote_at(self._disk, path)) is None:
            return None
        return ArtifactEvent(number_of(remote), relative, remote.key, remote.size, remote.sha256)

    def _name(self, store_id: str, position: Position, identity: Identity, path: str) -> tuple[str, bytes]:
        inode, size, changed = identity
        return file_key(store_id, position, f"{inode:x}-{size:x}-{changed:x}"), sha256_of(path)


def _identity(path: str) -> Identity:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns
