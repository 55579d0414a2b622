"""Opens the files of a key-value database after whatever ended its last life.

Steps
  1. the manifest: its snapshot, then its log
  2. the witnesses are compared: files and rows that the manifest could not have forgotten say that it is behind, and the
     database is refused. A table's id is logged before its file is made, and a new WAL takes no record before the manifest
     names it
  3. every table that it names is opened; one that is missing, altered, or another one than LMDB knows is an error
  4. every WAL that it names is replayed in order, its torn end cut off; one that is missing is an error. Frozen WALs become
  frozen
     memtables
  5. notes about bulk loads that say no end get one: their tables are live, or they are not
  6. files that it does not name are removed if they are garbage for certain, else moved to quarantine. Nothing is removed
  before
     everything named has been found

Garbage for certain: temporary files; WALs below the active one that are not frozen, because what a manifest once called
flushed stays flushed; an empty WAL just above the active one; and, if the manifest reaches what LMDB has recorded, tables
that it does not name: nothing was acknowledged or removed on the strength of an event before that was recorded
(witnesses.py).

Threads: one, the opener's. Raises `Corruption`, `SnapshotChecksumMismatch`, `FormatTooNew`, `StorageFault`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from quire.core.clock import SystemClock
from quire.core.errors import Corruption, QuireError
from quire.core.events import emit
from quire.core.recent_keys import RecentKeys
from quire.durable import quarantine
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.log_reader import read_log
from quire.durable.names import LsmHome, lsm_number
from quire.lsm.load_notes import settle_notes
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import ManifestData
from quire.lsm.memtable import Memtable
from quire.lsm.projection import is_row_of
from quire.lsm.view import Frozen, KvView, Levels, open_table
from quire.lsm.wal import LOG_KIND, KvWal, batches_of, encode_carried, require_owner
from quire.lsm.witnesses import REPAIR, StoreFacts

if TYPE_CHECKING:
    from quire.lsm.block_cache import BlockCache
    from quire.lsm.sst_reader import SSTable


class RecoveredKv(msgspec.Struct):
    """A database as it was found."""

    manifest: Manifest
    wal: KvWal
    view: KvView
    last_lsn: int
    calls: RecentKeys
    """Idempotency keys of writes in the logs."""


def open_files(disk: Disk, home: LsmHome, cache: BlockCache, facts: StoreFacts | None = None) -> RecoveredKv:
    """Open the files of a database, or create an empty one unless the facts say that there was one."""
    facts = facts or StoreFacts()
    manifest = Manifest.open(disk, home, facts, examine=lambda state: refuse_behind(disk, home, state, facts))
    for part in ("wal", "sst"):
        disk.make_dirs(f"{home.path}/{part}")
    tables: list[SSTable] = []
    wals: list[KvWal] = []
    calls = RecentKeys()
    try:
        state = manifest.state()
        if not state.active_wal:
            state = _begin(disk, home, manifest, facts)
        hit("lsm.recovery.manifest")
        tables.extend(_open_tables(disk, home, state, cache, facts))
        levels = Levels(tables)
        hit("lsm.recovery.tables")
        memtables = [_replay(disk, home, number, levels.lsn_max, wals, facts, calls) for number in wals_in_order(state)]
        last = max(state.last_lsn, levels.lsn_max, *(memtable.lsn_max for memtable in memtables))
        if facts.ends is not None and last < facts.ends.last_lsn:
            text = "acknowledged writes are missing from the database"
            raise Corruption(text, hint=REPAIR, path=home.path, last_lsn=last, acknowledged=facts.ends.last_lsn)
        active = wals.pop()
        if wals and calls:  # the logs that have them go when they are flushed
            active.sync(active.append(encode_carried(last, calls.newest())))
        settle_notes(disk, home, state.tables)
        hit("lsm.recovery.settled")
        _sweep(disk, home, state, facts)
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
        frozen.append(Frozen(memtable, wal.number, wal.durable_end()))
    return RecoveredKv(manifest, active, KvView(memtables[-1], tuple(reversed(frozen)), levels), last, calls)


def wals_in_order(state: ManifestData) -> list[int]:
    """The WALs in the order of their batches; the active one, which may still be listed as frozen, is the last."""
    return [*(number for number in state.frozen_wals if number != state.active_wal), state.active_wal]


def _begin(disk: Disk, home: LsmHome, manifest: Manifest, facts: StoreFacts) -> ManifestData:
    """The first WAL of a new database."""
    KvWal.create(disk, home.wal(1), 1, facts.owner).close()
    hit("lsm.recovery.first_wal")
    manifest.set_active_wal(1)
    return manifest.state()


def refuse_behind(disk: Disk, home: LsmHome, state: ManifestData, facts: StoreFacts) -> None:
    """Step 2."""
    tables = {number for name in names_in(disk, f"{home.path}/sst") if (number := lsm_number(name, ".sst")) is not None}
    later = sorted(number for number in tables | facts.rows.keys() if number >= state.next_sst_id)
    if not later and facts.ends is None:
        # Without a record of how far the manifest came, rows of LMDB are all there is to compare it with.
        later = sorted((facts.rows.keys() & tables) - state.tables.keys())
    if later:
        text = "the manifest is outdated: there are tables that it does not list"
        raise Corruption(text, hint=REPAIR, path=home.path, tables=later[:20], next=state.next_sst_id)
    for name in names_in(disk, f"{home.path}/wal"):
        number = lsm_number(name, ".log")
        if number is None or number <= state.active_wal or _is_foreign(disk, home, number, facts):
            continue
        if number > state.active_wal + 1 or not _is_empty(disk, home.wal(number)):
            text = "the manifest is outdated: there is a write-ahead log that it does not list"
            raise Corruption(text, hint=REPAIR, path=home.wal(number), active=state.active_wal)


def names_in(disk: Disk, path: str) -> list[str]:
    """The names in a directory; none if it is not there."""
    try:
        return disk.names(path)
    except FileNotFoundError:
        return []


def _is_foreign(disk: Disk, home: LsmHome, number: int, facts: StoreFacts) -> bool:
    """Whether a log says itself that it belongs elsewhere."""
    try:
        require_owner(disk, home.wal(number), number, facts.owner, facts.wal_end(number))
    except Corruption as error:
        return "database" in error.where
    return False


def _is_empty(disk: Disk, path: str) -> bool:
    """Whether a log certainly has no record."""
    try:
        return not read_log(disk, path, kind=LOG_KIND).payloads
    except QuireError:
        return False


def _open_tables(disk: Disk, home: LsmHome, state: ManifestData, cache: BlockCache, facts: StoreFacts) -> list[SSTable]:
    """Step 3."""
    opened: list[SSTable] = []
    try:
        for entry in state.sstables:
            table = open_table(disk, f"{home.path}/{entry.path}", entry.id, cache)
            opened.append(table)
            row = facts.rows.get(entry.id)
            if row is not None and not is_row_of(row, table):
                text = "the file is not the table that the store's manifest describes"
                raise Corruption(text, hint=REPAIR, path=table.path, sst_id=entry.id)
    except BaseException:
        for table in opened:
            table.close()
        raise
    return opened


def _replay(
    disk: Disk, home: LsmHome, number: int, in_tables: int, wals: list[KvWal], facts: StoreFacts, calls: RecentKeys
) -> Memtable:
    """Step 4 for one WAL, which is left open in `wals`."""
    wal, contents = KvWal.open(disk, home.wal(number), number, facts.owner, facts.wal_end(number))
    wals.append(wal)
    memtable = Memtable()
    for lsn, items, size, keys in batches_of(contents):
        for key, at in keys:
            calls.add(key, at)
        # Else a flush that was cut off between its two events has brought it into a table. If it were replayed, a compaction
        # might drop a tombstone above it and the next flush bring it back.
        if items and lsn > in_tables:
            memtable.put_all(lsn, items, size, 0)
    if contents.torn_bytes:
        emit("info", "lsm.wal.torn", path=contents.path, bytes=contents.torn_bytes)
    return memtable


def _sweep(disk: Disk, home: LsmHome, state: ManifestData, facts: StoreFacts) -> None:
    """Step 6."""
    live = {entry.path for entry in state.sstables}
    wals = {*state.frozen_wals, state.active_wal}
    for name in disk.names(f"{home.path}/sst"):
        path = f"{home.path}/sst/{name}"
        if name.endswith(".tmp") or (facts.ends is not None and _is_unnamed(name, live)):
            _remove(disk, path)
        elif _is_unnamed(name, live):
            set_aside(
                disk, home, path, "the manifest does not list this table, and its durable end is not recorded", facts
            )
    for name in disk.names(f"{home.path}/wal"):
        number, path = lsm_number(name, ".log"), f"{home.path}/wal/{name}"
        if name.endswith(".tmp"):
            _remove(disk, path)
        elif number is not None and number not in wals:
            if _is_foreign(disk, home, number, facts):
                set_aside(disk, home, path, "the log belongs to another database, or has the wrong number", facts)
            else:
                _remove(disk, path)


def _is_unnamed(name: str, live: set[str]) -> bool:
    return lsm_number(name, ".sst") is not None and f"sst/{name}" not in live


def set_aside(disk: Disk, home: LsmHome, path: str, why: str, facts: StoreFacts) -> None:
    """Move a file to quarantine: the store's, or one beside the files of a database that belongs to none."""
    if facts.quarantine is not None:
        facts.quarantine(path, why)
    else:
        quarantine.move(disk, home.path, os.path.relpath(path, home.path), why=why, at_ms=SystemClock().now_ms())


def _remove(disk: Disk, path: str) -> None:
    disk.remove(path)
    emit("info", "lsm.orphan_removed", path=path, name=os.path.basename(path))
