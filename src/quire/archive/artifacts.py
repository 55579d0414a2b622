"""Immutable files and their objects: each file is uploaded once, however many names it has, and keeps its object (A6).

Terms
  identity   (inode, size, time of last change) of a file: the same for all its names
  kept       a hard link below archive/, because the file may be removed before it is uploaded

A standby that follows the log knows the object that the log has named. If a base names another one, the first is trimmed when
the window has passed, and the standby would read nothing in its place. So objects are remembered in archive.json when the store
is closed, and a base that had to give a file a new object begins a new chain, from which standbys start again.

Threads: `keep` any; all others the holder of the archiver's `_cutting`, and the thread of a base. Raises the disk's errors.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count

from quire.archive.format import ArtifactEvent, Position, file_key
from quire.archive.queue import PendingArtifact
from quire.archive.recorder import sha256_of
from quire.archive.remote_files import number_of, remote_at
from quire.archive.state_files import KnownFile
from quire.durable.files import Disk, remove_if_exists

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
        self._lock = threading.Lock()
        # guarded by _lock
        self._object_of: dict[Identity, tuple[str, bytes]] = {}
        """(object name, SHA-256) of each file."""
        self._handed_over: set[Identity] = set()
        """Files that the log has not named yet."""
        self._used: set[Identity] = set()
        """Files that were named since the last base began."""
        self._kept: dict[str, Identity] = {}
        """Links below archive/."""
        self._has_renamed = False
        """Whether a file has been given another object since the last base was completed. A base that fails does not reset it:
        the next attempt finds the new objects, and standbys still know the former ones."""

    def sweep(self) -> None:
        """Remove the files that a former life left below archive/."""
        with suppress(FileNotFoundError):
            for name in self._disk.names(self._spool):
                self._disk.remove(os.path.join(self._spool, name))

    def discard(self, path: str) -> None:
        """Remove a file below archive/ that is no longer needed."""
        remove_if_exists(self._disk, path)
        with self._lock:
            self._kept.pop(path, None)

    def only_kept_bytes(self) -> int:
        """Return the size of the files that have no names left but those below archive/: the space that uploads still need."""
        with self._lock:
            links = Counter(self._kept.values())
            path_of = {identity: path for path, identity in self._kept.items()}
        size = 0
        for identity, path in path_of.items():
            with suppress(FileNotFoundError):  # uploaded meanwhile
                if os.stat(path).st_nlink <= links[identity]:
                    size += identity[1]
        return size

    def keep(self, path: str, relative: str) -> PendingArtifact | ArtifactEvent:
        """Keep a file that is complete and has its name. Return the entry to hand over."""
        if (event := self._in_bucket(path, relative)) is not None:
            return event
        kept = os.path.join(self._spool, f"{next(self._numbers):x}.file")
        self._disk.make_dirs(self._spool)
        self._disk.link(path, kept)
        entry = PendingArtifact(relative, kept, _identity(path))
        with self._lock:
            self._handed_over.add(entry.identity)
            self._kept[kept] = entry.identity
        return entry

    def taken(self, entry: PendingArtifact, store_id: str, position: Position) -> tuple[ArtifactEvent, Upload | None]:
        """Return an artifact's event, and the upload that must precede the log object with that event; `None` if it is
        uploaded or about to be."""
        target, is_new = self._object(entry.identity, store_id, position, entry.kept)
        with self._lock:
            self._handed_over.discard(entry.identity)
        inode, size, _ = entry.identity
        event = ArtifactEvent(inode, entry.path, target[0], size, target[1])
        return event, (target[0], entry.kept) if is_new else None

    def begin_base(self) -> None:
        """Begin a base, which names every file that exists."""
        with self._lock:
            self._used = set()

    def in_base(
        self, path: str, relative: str, store_id: str, first: Position, upload: Callable[[str, str], None]
    ) -> ArtifactEvent:
        """Return the event of a file that a base names, after uploading the file unless it was uploaded before."""
        if (event := self._in_bucket(path, relative)) is not None:
            return event
        identity = _identity(path)
        with self._lock:
            target, is_unnamed = self._object_of.get(identity), identity in self._handed_over
            self._used.add(identity)
        if target is None:
            named = self._name(store_id, first, identity, path)
            # Uploaded before it is remembered: a cut that finds an object here names it without an upload.
            upload(named[0], path)
            with self._lock:  # a cut may have named it meanwhile
                self._has_renamed |= not is_unnamed
                target = self._object_of.setdefault(identity, named)
        return ArtifactEvent(identity[0], relative, target[0], identity[1], target[1])

    def end_base(self) -> bool:
        """Forget files that no longer exist. Return whether the base gave new objects to files that the log may have named."""
        with self._lock:
            # Trimming keeps the files that a base, or the log beside it, names (decision 040). An object that neither
            # names must not be named again.
            used = {identity: target for identity, target in self._object_of.items() if identity in self._used}
            self._object_of = used
            has_renamed, self._has_renamed = self._has_renamed, False
        return has_renamed

    def known(self) -> list[KnownFile]:
        """Return all files with their objects, for the next life (`resume`)."""
        with self._lock:
            return [(*identity, *target) for identity, target in self._object_of.items()]

    def resume(self, known: Iterable[KnownFile]) -> None:
        """Take over the objects that a former life has uploaded."""
        with self._lock:
            self._object_of.update(((inode, size, at), (key, digest)) for inode, size, at, key, digest in known)

    def forget(self, lost: Iterable[str]) -> None:
        """Forget objects that were never uploaded, so that the next base uploads them."""
        names = frozenset(lost)
        with self._lock:
            kept = {identity: target for identity, target in self._object_of.items() if target[0] not in names}
            self._object_of = kept

    def forget_all(self) -> None:
        """Forget every object, so that the next base uploads every file again, under a new name."""
        with self._lock:
            self._object_of = {}
            self._has_renamed = True  # also if a cut, and not the base, gives a file its new object

    def _object(
        self, identity: Identity, store_id: str, position: Position, path: str
    ) -> tuple[tuple[str, bytes], bool]:
        """Return the object of a file, and whether it has just been named."""
        with self._lock:
            self._used.add(identity)
            target = self._object_of.get(identity)
        if target is not None:
            return target, False
        named = self._name(store_id, position, identity, path)  # reads the file
        with self._lock:
            target = self._object_of.setdefault(identity, named)
        return target, target is named

    def _in_bucket(self, path: str, relative: str) -> ArtifactEvent | None:
        """Return the event of a file that a restore left in the bucket, or `None`."""
        if (remote := remote_at(self._disk, path)) is None:
            return None
        return ArtifactEvent(number_of(remote), relative, remote.key, remote.size, remote.sha256)

    def _name(self, store_id: str, position: Position, identity: Identity, path: str) -> tuple[str, bytes]:
        inode, size, changed = identity
        # The name begins with the position because trimming goes by it (`window.plan_trim`).
        return file_key(store_id, position, f"{inode:x}-{size:x}-{changed:x}"), sha256_of(path)


def _identity(path: str) -> Identity:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns
