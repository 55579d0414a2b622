"""Files that never change, on their way to the bucket: each is uploaded once, whatever names it has (A6).

Terms
  identity   (inode, size, time of change) of a file: the same for all its names
  kept       a second name below archive/, because the file may be removed before it is uploaded

Threads: `keep` any; the rest the archiver's cutting thread and that of a base. Raises what the disk raises.
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
    """Which files were handed over, and under which object names."""

    def __init__(self, disk: Disk, spool: str) -> None:
        # constant after construction
        self._disk = disk
        self._spool = spool
        self._numbers = count()
        # replaced whole, or changed by one key
        self._known: dict[Identity, tuple[str, bytes]] = {}
        """→ (object name, SHA-256)"""

    def sweep(self) -> None:
        """Remove what a former life left below archive/."""
        with suppress(FileNotFoundError):
            for name in self._disk.names(self._spool):
                self._disk.remove(os.path.join(self._spool, name))

    def discard(self, path: str) -> None:
        """Remove what waited below archive/."""
        with suppress(FileNotFoundError):
            self._disk.remove(path)

    def keep(self, path: str, relative: str) -> PendingArtifact | ArtifactEvent:
        """A file is complete and has its name: what is handed over."""
        if (event := self._in_bucket(path, relative)) is not None:
            return event
        kept = os.path.join(self._spool, f"{next(self._numbers):x}.file")
        self._disk.make_dirs(self._spool)
        self._disk.link(path, kept)
        return PendingArtifact(relative, kept, _identity(path))

    def taken(self, entry: PendingArtifact, store_id: str, position: Position) -> tuple[ArtifactEvent, Upload | None]:
        """Its event, and what has to be uploaded before the object that carries it; `None` if that was done or is under way."""
        known, upload = self._known.get(entry.identity), None
        if known is None:
            known = self._known[entry.identity] = self._name(store_id, position, entry.identity, entry.kept)
            upload = (known[0], entry.kept)
        inode, size, _ = entry.identity
        return ArtifactEvent(inode, entry.path, known[0], size, known[1]), upload

    def in_base(
        self, path: str, relative: str, store_id: str, first: Position, upload: Callable[[str, str], None]
    ) -> ArtifactEvent:
        """The event of a file that a base names; it is uploaded now, if it was not."""
        if (event := self._in_bucket(path, relative)) is not None:
            return event
        identity = _identity(path)
        if (known := self._known.get(identity)) is None:
            known = self._name(store_id, first, identity, path)
            upload(known[0], path)
            self._known[identity] = known
        return ArtifactEvent(identity[0], relative, known[0], identity[1], known[1])

    def forget(self, lost: Iterable[str]) -> None:
        """Objects of these names were never uploaded: the next base does it."""
        names = frozenset(lost)
        self._known = {identity: known for identity, known in self._known.items() if known[0] not in names}

    def _in_bucket(self, path: str, relative: str) -> ArtifactEvent | None:
        """The event of a file that a restore left there."""
        if (remote := remote_at(self._disk, path)) is None:
            return None
        return ArtifactEvent(number_of(remote), relative, remote.key, remote.size, remote.sha256)

    def _name(self, store_id: str, position: Position, identity: Identity, path: str) -> tuple[str, bytes]:
        inode, size, changed = identity
        return file_key(store_id, position, f"{inode:x}-{size:x}-{changed:x}"), sha256_of(path)


def _identity(path: str) -> Identity:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns
