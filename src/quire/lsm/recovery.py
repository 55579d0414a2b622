"""Opens the files of a key-value database after whatever ended its last life.

Steps
  1. the manifest: its snapshot, then its log
  2. every table that it names is opened; one that is missing or altered is an error
  3. every WAL that it names is replayed in order, its torn end cut off; one that is missing is an error
  4. notes about bulk loads that say no end get one: their tables are live, or they are not
  5. files that it does not name are removed: leftovers of flushes, compactions and loads that no event ever named

Rules
  1. A batch whose lsn is not above that of every table is skipped: a flush that was cut off between its two events has
     brought it into a table. If it were replayed, a compaction might drop a tombstone above it and the next flush bring
     it back.
  2. Frozen WALs become frozen memtables, to be flushed; the active one goes on.
  3. Nothing that is named is ever removed, and nothing is removed before everything named has been found.

Threads: one, the opener's.
Raises `Corruption`, `SnapshotChecksumMismatch`, `FormatTooNew`, `StorageFault`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import Corruption
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.lsm_names import LsmHome, lsm_number
from quire.lsm.cache import BlockCache
from quire.lsm.levels import Levels
from quire.lsm.load_notes import settle_notes
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import ManifestData
from quire.lsm.memtable import Memtable
from quire.lsm.view import Frozen, View
from quire.lsm.wal import Wal, batches_of

if TYPE_CHECKING:
    from quire.lsm.sst_reader import Block, Table


class Opened(msgspec.Struct):
    """A database as it was found."""

    manifest: Manifest
    wal: Wal
    view: View
    last_lsn: int


def open_files(disk: Disk, home: LsmHome, cache: BlockCache[Block]) -> Opened:
    """See the steps above. A directory without a database gets an empty one."""
    for part in ("wal", "sst"):
        disk.make_dirs(f"{home.path}/{part}")
    manifest = Manifest.open(disk, home)
    tables: list[Table] = []
    wals: list[Wal] = []
    try:
        state = manifest.state()
        if not state.active_wal:
            _refuse_leftovers(disk, home, state)
            state = _begin(disk, home, manifest)
        hit("lsm.recovery.manifest")
        for entry in state.sstables:
            from quire.lsm.sst_reader import Table  # Arrow: not for a database that is all in its log

            tables.append(Table.open(disk, f"{home.path}/{entry.path}", entry.id, cache))
        levels = Levels(tables)
        hit("lsm.recovery.tables")
        memtables = [_replay(disk, home, number, levels.lsn_max, wals) for number in _numbers(state)]
        active = wals.pop()
        settle_notes(disk, home, state.tables)
        hit("lsm.recovery.settled")
        _sweep(disk, home, state)
    except BaseException:
        for table in tables:
            table.close()
        for wal in wals:
            wal.abandon()
        manifest.abandon()
        raise
    frozen = []
    for memtable, wal in zip(memtables, wals):
        memtable.freeze()
        wal.close()
        frozen.append(Frozen(memtable, wal.number))
    last = max(state.last_lsn, levels.lsn_max, *(memtable.lsn_max for memtable in memtables))
    return Opened(manifest, active, View(memtables[-1], tuple(reversed(frozen)), levels), last)


def _numbers(state: ManifestData) -> list[int]:
    """The WALs in the order of their batches; the active one, which may still be listed as frozen, is the last."""
    return [*(number for number in state.frozen_wals if number != state.active_wal), state.active_wal]


def _begin(disk: Disk, home: LsmHome, manifest: Manifest) -> ManifestData:
    """The first WAL of a new database."""
    Wal.create(disk, home.wal(1), 1).close()
    hit("lsm.recovery.first_wal")
    manifest.set_version(1)
    manifest.set_active_wal(1)
    return manifest.state()


def _refuse_leftovers(disk: Disk, home: LsmHome, state: ManifestData) -> None:
    """A manifest that knows no WAL is new, or was lost; beside tables it was lost."""
    found = [name for name in disk.names(f"{home.path}/sst") if lsm_number(name, ".sst") is not None]
    if found and not state.sstables:
        hint = "restore the database from a backup: `quire kv restore`"
        raise Corruption("there are tables, but the manifest is empty", hint=hint, path=home.path, tables=len(found))


def _replay(disk: Disk, home: LsmHome, number: int, in_tables: int, wals: list[Wal]) -> Memtable:
    """Step 3 for one WAL, which is left open in `wals`."""
    wal, contents = Wal.open(disk, home.wal(number), number)
    wals.append(wal)
    memtable = Memtable()
    for lsn, items, size in batches_of(contents):
        if lsn > in_tables:  # rule 1
            memtable.put_all(lsn, items, size, 0)
    if contents.torn_bytes:
        emit("info", "lsm.wal.torn", path=contents.path, bytes=contents.torn_bytes)
    return memtable


def _sweep(disk: Disk, home: LsmHome, state: ManifestData) -> None:
    """Step 5 (rule 3)."""
    live = {entry.path for entry in state.sstables}
    wals = {*state.frozen_wals, state.active_wal}
    for name in disk.names(f"{home.path}/sst"):
        if f"sst/{name}" not in live and (lsm_number(name, ".sst") is not None or name.endswith(".tmp")):
            _remove(disk, f"{home.path}/sst/{name}")
    for name in disk.names(f"{home.path}/wal"):
        number = lsm_number(name, ".log")
        if (number is not None and number not in wals) or name.endswith(".tmp"):
            _remove(disk, f"{home.path}/wal/{name}")


def _remove(disk: Disk, path: str) -> None:
    disk.remove(path)
    emit("info", "lsm.orphan_removed", path=path, name=os.path.basename(path))
