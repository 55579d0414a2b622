"""WAL segments that a standby's owner has removed, and that readers of the standby still read.

The owner knows nothing of a standby's readers: it checkpoints, removes segments and uses their files again. A reader of a
standby holds a lease file and, with it, the rows of one moment (`pages/published.py`). Before a segment is lost here, it gets a
second name in `.kept/`, for as long as a lease lives that was there at that moment; readers look there first.

Why no reader is missed: a reader takes its lease, then begins to read rows. The standby commits the rows that let go of a
segment, then looks for leases. If it does not see a lease, that reader's rows do not name the segment.

Threads: one. Raises what the disk raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from quire.durable import names
from quire.durable.files import Disk, read_all, write_new

Readers = Callable[[], set[str]]
"""The leases that are alive now, by name."""


def kept_path(root: str, path: str) -> str:
    """Where a file of a store is kept, by its path in the store.

    >>> kept_path("/standby", "pages/00000007/wal/0000001f.seg")
    '/standby/.kept/pages+00000007+wal+0000001f.seg'
    """
    return os.path.join(root, names.KEPT, path.replace("/", "+"))


def is_kept_kind(path: str) -> bool:
    """Whether readers hold files of this path: WAL segments, but not the spare, which nobody reads."""
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
        """Path of a kept file → the leases it is kept for."""
        if disk.exists(self._folder):  # of a life before: all who read now may have begun then
            self._kept = {os.path.join(self._folder, name): readers() for name in disk.names(self._folder)}
            self.release()

    def keep(self, path: str, *, copied: bool = False) -> None:
        """The file of this path is about to be lost. `copied`: it stays, and gets other bytes. REQUIRES that the rows which
        let go of it are committed."""
        target = kept_path(self._root, path)
        if target in self._kept or not is_kept_kind(path) or not (readers := self._readers()):
            return  # what is kept already is what its readers had begun with
        source = os.path.join(self._root, path)
        self._disk.make_dirs(self._folder)
        with suppress(FileNotFoundError):
            if copied:
                write_new(self._disk, target + names.TEMPORARY, read_all(self._disk, source), overwrite=True)
                self._disk.rename(target + names.TEMPORARY, target)
            else:
                self._disk.link(source, target)
            self._kept[target] = readers

    def keep_others(self, staged: str) -> None:
        """Keep the segments that the directory `staged`, which is about to replace this one, does not have."""
        if not self._disk.exists(os.path.join(staged, names.PAGES)) or not self._readers():
            return  # they were exchanged already, by a life that was cut off; or nobody reads
        for folder, _, present in os.walk(os.path.join(self._root, names.PAGES)):
            for name in present:
                path = os.path.relpath(os.path.join(folder, name), self._root)
                if not self._disk.exists(os.path.join(staged, path)):
                    self.keep(path)

    def replace(self, path: str) -> None:
        """Another file gets this path: whoever reads from now on wants that one."""
        if (target := kept_path(self._root, path)) in self._kept:
            self._remove(target)

    def release(self) -> None:
        """Remove what nobody reads any more."""
        if self._kept:
            readers = self._readers()
            for target, held_for in list(self._kept.items()):
                held_for &= readers
                if not held_for:
                    self._remove(target)

    def _remove(self, target: str) -> None:
        del self._kept[target]
        with suppress(FileNotFoundError):
            self._disk.remove(target)
