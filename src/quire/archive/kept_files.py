"""Keeps WAL segments that the owner has removed while readers of a standby still read them.

The owner does not know a standby's readers: it checkpoints, removes segments and recycles their files. A reader of a standby
holds a lease file and, with it, the rows of one moment (`pages/published.py`). Before a segment is lost on the standby, it gets
a second link in `.kept/`, which stays until the leases that existed at that moment have ended; readers look there first.

No reader is missed: a reader takes its lease, then begins to read rows. The standby commits the rows that release a segment,
then lists the leases. If it does not find a reader's lease, that reader's rows do not name the segment.

Threads: one. Raises the disk's errors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from quire.durable import names
from quire.durable.files import Disk, read_all, remove_if_exists, write_new

Readers = Callable[[], set[str]]
"""Returns the names of the live leases."""


def kept_path(root: str, path: str) -> str:
    """Return where a file is kept, from its path in the store.

    >>> kept_path("/standby", "pages/00000007/wal/0000001f.seg")
    '/standby/.kept/pages+00000007+wal+0000001f.seg'
    """
    return os.path.join(root, names.KEPT, path.replace("/", "+"))


def is_kept_kind(path: str) -> bool:
    """Return whether readers may hold the file at this path: a WAL segment, except the spare, which is never read."""
    file = names.parse_path(path)
    return isinstance(file, names.WalSegmentFile) and bool(file.segment_id)


class KeptFiles:
    """The files that are kept in one standby's directory."""

    def __init__(self, disk: Disk, root: str, readers: Readers) -> None:
        # constant after construction
        self._disk = disk
        self._root = root
        self._folder = os.path.join(root, names.KEPT)
        self._readers = readers
        self._kept: dict[str, set[str]] = {}
        """Path of a kept file → the leases for which it is kept."""
        if disk.exists(self._folder):  # left by an earlier process, when any of the current readers may have begun
            self._kept = {os.path.join(self._folder, name): readers() for name in disk.names(self._folder)}
            self.release()

    def keep(self, path: str, *, copied: bool = False) -> None:
        """Keep the file at this path, which is about to be lost. `copied`: the file remains but will be overwritten, so keep a
        copy. REQUIRES that the rows that release it are committed."""
        target = kept_path(self._root, path)
        if target in self._kept or not is_kept_kind(path) or not (readers := self._readers()):
            return  # a file that is already kept is the one that its readers began with
        source = os.path.join(self._root, path)
        self._disk.make_dirs(self._folder)
        with suppress(FileNotFoundError):
            if copied:
                write_new(self._disk, target + names.TEMPORARY, read_all(self._disk, source), overwrite=True)
                # Readers look in `.kept/` first, and must not find half a copy.
                self._disk.rename(target + names.TEMPORARY, target)
            else:
                self._disk.link(source, target)
            self._kept[target] = readers

    def keep_others(self, staged: str) -> None:
        """Keep the segments that the directory `staged`, which is about to replace this one, does not have."""
        if not self._disk.exists(os.path.join(staged, names.PAGES)) or not self._readers():
            return  # an interrupted process has already exchanged them, or there are no readers
        for folder, _, present in os.walk(os.path.join(self._root, names.PAGES)):
            for name in present:
                path = os.path.relpath(os.path.join(folder, name), self._root)
                if not self._disk.exists(os.path.join(staged, path)):
                    self.keep(path)

    def replace(self, path: str) -> None:
        """Drop the kept file of a path that now belongs to another file: new readers need that one."""
        if (target := kept_path(self._root, path)) in self._kept:
            self._remove(target)

    def release(self) -> None:
        """Remove the kept files that no live lease needs."""
        if self._kept:
            readers = self._readers()
            for target, held_for in list(self._kept.items()):
                held_for &= readers
                if not held_for:
                    self._remove(target)

    def _remove(self, target: str) -> None:
        del self._kept[target]
        remove_if_exists(self._disk, target)
