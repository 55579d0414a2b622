"""Copies of a key-value database for snapshots and forks: hard links to its tables, and a manifest of their own.

Tables are immutable, so a hard link serves as a copy: the bytes are freed with the last link (as in RocksDB's checkpoints). A
copy contains everything written before it was requested. Its manifest is written last, and makes the copy complete. A copy that
is missing, or does not match the snapshot's row, is an error and never reads as empty.

Threads: any. Raises the disk's errors and `Corruption`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from quire.core.closing import ClosedOnExit
from quire.core.errors import Corruption, StoreClosed
from quire.durable.failpoints import hit
from quire.durable.files import Disk, remove_if_exists, remove_tree, write_atomic
from quire.durable.log_writer import LogWriter
from quire.durable.names import LsmHome
from quire.lsm.manifest import read_manifest
from quire.lsm.manifest_data import ManifestData, ManifestSstEntry
from quire.lsm.manifest_format import LOG_NEXT, encode_snapshot
from quire.lsm.memtable import Memtable
from quire.lsm.reading import KvRanges
from quire.lsm.short_scan import Pair
from quire.lsm.view import LSN_MAX, KvView, Levels, open_table
from quire.lsm.wal import Buffer, as_bytes
from quire.lsm.witnesses import REPAIR, Owner

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.block_cache import BlockCache
    from quire.lsm.kv import Kv
    from quire.lsm.sst_reader import SSTable


def copy_live(kv: Kv, target: str, owner: Owner, number: int = 0) -> int:
    """Copy an open database to `target`, a directory that does not exist. Return the last lsn of the copy.

    `owner`: the database that the copy belongs to. `number`: the number of a snapshot, 0 for a fork.
    """
    lsn = kv.last_lsn
    kv.flush()
    with kv.upkeep.paused():  # keeps the tables that the manifest names in place
        state = kv.manifest.state()
        lsn = max(lsn, kv.view.levels.lsn_max)
        link_tables(kv.disk, kv.home.path, target, state)
        write_manifest(kv.disk, target, state, lsn, owner, number)
    return lsn


def copy_frozen(disk: Disk, source: FrozenCopy, target: str, owner: Owner) -> None:
    """Copy a snapshot to `target` as a database."""
    state = source.state(disk)
    link_tables(disk, source.path, target, state)
    write_manifest(disk, target, state, state.last_lsn, owner)


def link_tables(disk: Disk, source: str, target: str, state: ManifestData) -> None:
    """Hard-link the tables of a database into the directory `target`, and make the links durable."""
    for part in ("sst", "wal", "manifest"):
        disk.make_dirs(f"{target}/{part}")
    for entry in state.sstables:
        try:
            disk.link(f"{source}/{entry.path}", f"{target}/{entry.path}")
        except FileNotFoundError:
            raise Corruption("a table is missing", hint=REPAIR, path=f"{source}/{entry.path}") from None
    hit("lsm.copy.linked")
    # The links are durable before a manifest names them.
    disk.sync_dir(f"{target}/sst")


def write_manifest(
    disk: Disk, target: str, state: ManifestData, last_lsn: int, owner: Owner | None = None, number: int = 0
) -> None:
    """Write the manifest of a copy, with the tables of `state` and no WAL."""
    home = LsmHome(target)
    tables = {entry.id: ManifestSstEntry(entry.id, entry.path) for entry in state.sstables}
    data = ManifestData(version=state.version + 1, last_lsn=last_lsn, tables=tables, next_sst_id=state.next_sst_id)
    identity = (owner or Owner()).identity(number)
    LogWriter.create(disk, home.manifest_log, kind=LOG_NEXT, identity=identity, replace=True).close()
    hit("lsm.copy.logged")
    # Last: a log of this kind without a snapshot is refused, so an incomplete copy never opens as an empty database.
    write_atomic(disk, home.manifest_snapshot, encode_snapshot(data, 0))


class FrozenCopy(msgspec.Struct, frozen=True):
    """The path of a snapshot's copy, with its owner, number and lsn in the store's manifest."""

    path: str
    owner: Owner
    number: int
    lsn: int

    def state(self, disk: Disk) -> ManifestData:
        """Return the state of the copy's manifest. Raises if it is missing or does not match this snapshot."""
        hint = "drop the snapshot, or restore its directory from a copy of the store"
        if not disk.exists(self.path):
            raise Corruption("the snapshot's files are missing", hint=hint, path=self.path)
        try:
            manifest = read_manifest(disk, LsmHome(self.path), self.owner, number=self.number)
        except Corruption as error:
            error.hint = hint
            raise
        if manifest.header is None:
            raise Corruption("the manifest is missing", hint=hint, path=self.path)
        state = manifest.data
        if state.last_lsn != self.lsn:
            text = "the snapshot's files do not match its record"
            raise Corruption(text, hint=hint, path=self.path, lsn=state.last_lsn, expected=self.lsn)
        return state


class FrozenKv(KvRanges, ClosedOnExit):
    """A copy, opened for reading. Use it as a context manager."""

    def __init__(self, disk: Disk, copy: FrozenCopy, cache: BlockCache | None = None) -> None:
        self.state = copy.state(disk)
        tables = [open_table(disk, f"{copy.path}/{entry.path}", entry.id, cache) for entry in self.state.sstables]
        self._view = KvView(Memtable(), (), Levels(tables))
        self.failure: StoreClosed | None = None

    def _require(self) -> None:
        if (why := self.failure) is not None:
            raise StoreClosed(why.what, hint=why.hint)

    @property
    def tables(self) -> list[SSTable]:
        """The tables of the copy."""
        return list(self._view.levels)

    def get(self, key: Buffer) -> bytes | None:
        """Return the value of a key, or `None`."""
        if self.failure is not None:
            self._require()
        return self._view.get(as_bytes(key), LSN_MAX)

    def get_many(self, keys: Sequence[Buffer]) -> list[bytes | None]:
        """Return the values of keys, in their order."""
        self._require()
        return self._view.get_many(keys, LSN_MAX)

    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        self._require()
        return self._view.scan(low, high, LSN_MAX, reverse=reverse)

    def pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        self._require()
        return self._view.pairs(low, high, LSN_MAX, reverse=reverse)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.failure = self.failure or StoreClosed("the snapshot is closed", hint="open it again")
        for table in self._view.levels:
            table.close()


def remove_home(disk: Disk, path: str) -> None:
    """Remove the directory of a copy or database, its manifest snapshot first: without that a copy is incomplete."""
    remove_if_exists(disk, LsmHome(path).manifest_snapshot)
    remove_tree(disk, path)
