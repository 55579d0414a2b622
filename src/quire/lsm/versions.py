"""A key-value database as it is now, kept under a second name: links to its tables and a copy of its manifest.

Terms
  copy     a directory with the layout of a database: tables (the same files, by another name) and a manifest that names them
  frozen   a copy that is only read: a snapshot of the database

Rules
  1. A copy holds everything that was written before it was asked for: the memtables are flushed first.
  2. Tables never change, so a second name for the file is as good as a second file, and the file system counts the names:
     bytes go with the last of them (as RocksDB's checkpoints do it).
  3. A copy is whole when its manifest is there: that is written last, everything before it is synced. What a crash leaves is a
     directory that nobody names; the engine sweeps it.

Threads: any. Raises what the disk raises, `Corruption`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from quire.durable.failpoints import hit
from quire.durable.files import Disk, write_atomic
from quire.durable.log_writer import LogWriter
from quire.durable.lsm_names import LsmHome
from quire.durable.trees import remove_tree
from quire.lsm.cache import BlockCache
from quire.lsm.levels import Levels
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import ManifestData, ManifestSstEntry
from quire.lsm.manifest_format import LOG_NEXT, encode_snapshot
from quire.lsm.memtable import Memtable
from quire.lsm.reading import Reader
from quire.lsm.view import LSN_MAX, View

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.kv import Kv
    from quire.lsm.sst_reader import Block, Table


def copy_live(kv: Kv, target: str) -> int:
    """Make a copy of an open database in `target`, a directory that is not there; the last lsn it holds."""
    lsn = kv.last_lsn
    kv.flush()
    with kv.upkeep.held():  # the tables that the manifest names stay where they are
        state = kv.manifest.state()
        link_tables(kv.disk, kv.home.path, target, state)
        write_manifest(kv.disk, target, state, max(lsn, kv.view.levels.lsn_max))
    return max(lsn, kv.view.levels.lsn_max)


def copy_frozen(disk: Disk, source: str, target: str) -> None:
    """Make a copy of a copy."""
    with Manifest.open(disk, LsmHome(source)) as manifest:
        state = manifest.state()
    link_tables(disk, source, target, state)
    write_manifest(disk, target, state, state.last_lsn)


def link_tables(disk: Disk, source: str, target: str, state: ManifestData) -> None:
    """Give the tables of a database second names (rule 2)."""
    for part in ("sst", "wal", "manifest"):
        disk.make_dirs(f"{target}/{part}")
    for entry in state.sstables:
        disk.link(f"{source}/{entry.path}", f"{target}/{entry.path}")
    hit("lsm.copy.linked")
    disk.sync_dir(f"{target}/sst")


def write_manifest(disk: Disk, target: str, state: ManifestData, last_lsn: int) -> None:
    """The manifest of a copy: the tables, and no WAL (rule 3)."""
    home = LsmHome(target)
    tables = {entry.id: ManifestSstEntry(entry.id, entry.path) for entry in state.sstables}
    data = ManifestData(version=1, last_lsn=last_lsn, tables=tables, next_sst_id=state.next_sst_id)
    LogWriter.create(disk, home.manifest_log, kind=LOG_NEXT, replace=True).close()
    hit("lsm.copy.logged")
    write_atomic(disk, home.manifest_snapshot, encode_snapshot(data, 0))


class FrozenKv(Reader):
    """A copy, opened for reading. Use it as a context manager."""

    def __init__(self, disk: Disk, path: str, cache: BlockCache[Block] | None = None) -> None:
        from quire.lsm.sst_reader import Table

        home = LsmHome(path)
        with Manifest.open(disk, home) as manifest:
            self.state = manifest.state()
        tables = [Table.open(disk, f"{path}/{entry.path}", entry.id, cache) for entry in self.state.sstables]
        self._view = View(Memtable(), (), Levels(tables))

    @property
    def tables(self) -> list[Table]:
        """What it consists of."""
        return list(self._view.levels)

    def get(self, key: bytes) -> bytes | None:
        """The value that a key had."""
        return self._view.get(key, LSN_MAX)

    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        return self._view.scan(low, high, LSN_MAX, reverse=reverse)

    def close(self) -> None:
        """Close the files."""
        for table in self._view.levels:
            table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_home(disk: Disk, path: str) -> None:
    """Remove a directory and what is in it. Its manifest first: from then on it is not a copy any more."""
    with suppress(FileNotFoundError):
        disk.remove(LsmHome(path).manifest_snapshot)
    remove_tree(disk, path)
