"""Recovery: opens the files of a key-value database after a clean close or a crash.

Steps
  1. The manifest is read: its snapshot, then its log.
  2. The witnesses are compared with it. Files or rows that an up-to-date manifest would name show that it is outdated, and the
     database is refused: a table's id is logged before its file is created, and a new WAL gets no record before the manifest
     names it.
  3. Every table that the manifest names is opened. A table that is missing, damaged, or not the one that LMDB describes is an
     error.
  4. Every WAL that the manifest names is replayed in order and its torn tail cut; a missing WAL is an error. Frozen WALs become
     frozen memtables.
  5. Undecided records of bulk loads are resolved: their tables are live, or they are not.
  6. Files that the manifest does not name are removed if they are provably garbage, otherwise moved to quarantine. Nothing is
     removed before every named file has been found.

Provable garbage: temporary files; WALs below the active one that are not frozen, because a WAL that has been flushed stays
flushed; an empty WAL just above the active one; and, if the manifest reaches the end recorded in LMDB, tables that it does
not name, because nothing is acknowledged or removed on the basis of an event that is not recorded yet (witnesses.py).

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
from quire.lsm.load_records import resolve_load_records
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
    """The state of a database after recovery."""

    manifest: Manifest
    wal: KvWal
    view: KvView
    last_lsn: int
    calls: RecentKeys
    """Idempotency keys of writes in the logs."""


def open_files(disk: Disk, home: LsmHome, cache: BlockCache, facts: StoreFacts | None = None) -> RecoveredKv:
    """Open the files of a database, or create an empty one unless `facts` state that it had files before."""
    facts = facts or StoreFacts()
    manifest = Manifest.open(disk, home, facts, examine=lambda state: refuse_stale_manifest(disk, home, state, facts))
    tables: list[SSTable] = []
    wals: list[KvWal] = []
    calls = RecentKeys()
    try:
        for part in ("wal", "sst"):
            disk.make_dirs(f"{home.path}/{part}")
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
        *older, active = wals
        if older and calls:  # the frozen WALs with these keys are removed when they are flushed
            active.sync(active.append(encode_carried(last, calls.newest())))
        resolve_load_records(disk, home, state.tables)
        hit("lsm.recovery.settled")
        _sweep(disk, home, state, facts)
        frozen = []
        for memtable, wal in zip(memtables, older):
            # Nothing is appended to a frozen WAL any more: close it with a mark, and keep its final end for LMDB.
            memtable.freeze()
            wal.close()
            frozen.append(Frozen(memtable, wal.number, wal.durable_end()))
    except BaseException:
        for table in tables:
            table.close()
        for wal in wals:
            wal.abandon()
        manifest.abandon()
        raise
    return RecoveredKv(manifest, active, KvView(memtables[-1], tuple(reversed(frozen)), levels), last, calls)


def wals_in_order(state: ManifestData) -> list[int]:
    """Return the WALs in the order of their batches. The active one is last, even if it is still listed as frozen."""
    return [*(number for number in state.frozen_wals if number != state.active_wal), state.active_wal]


def _begin(disk: Disk, home: LsmHome, manifest: Manifest, facts: StoreFacts) -> ManifestData:
    """Create the first WAL of a new database."""
    KvWal.create(disk, home.wal(1), 1, facts.owner).close()
    hit("lsm.recovery.first_wal")
    manifest.set_active_wal(1)
    return manifest.state()


def refuse_stale_manifest(disk: Disk, home: LsmHome, state: ManifestData, facts: StoreFacts) -> None:
    """Refuse a manifest that is older than the files or rows that should be named in it (step 2)."""
    tables = {number for name in names_in(disk, f"{home.path}/sst") if (number := lsm_number(name, ".sst")) is not None}
    later = sorted(number for number in tables | facts.rows.keys() if number >= state.next_sst_id)
    if not later and facts.ends is None:
        # Without a recorded end of the manifest, rows in LMDB are the only witness to compare it with.
        later = sorted((facts.rows.keys() & tables) - state.tables.keys())
    if later:
        text = "the manifest is outdated: there are tables that it does not list"
        raise Corruption(text, hint=REPAIR, path=home.path, tables=later[:20], next=state.next_sst_id)
    for name in names_in(disk, f"{home.path}/wal"):
        number = lsm_number(name, ".log")
        if number is None or number <= state.active_wal or _is_foreign(disk, home, number, facts):
            continue
        # An empty one just above is what a rotation leaves if the process dies before the manifest names the log.
        if number > state.active_wal + 1 or not _is_empty(disk, home.wal(number)):
            text = "the manifest is outdated: there is a write-ahead log that it does not list"
            raise Corruption(text, hint=REPAIR, path=home.wal(number), active=state.active_wal)


def names_in(disk: Disk, path: str) -> list[str]:
    """Return the names in a directory; none if it does not exist."""
    try:
        return disk.names(path)
    except FileNotFoundError:
        return []


def _is_foreign(disk: Disk, home: LsmHome, number: int, facts: StoreFacts) -> bool:
    """Return whether a log's header states another database or number."""
    try:
        require_owner(disk, home.wal(number), number, facts.owner, facts.wal_end(number))
    except Corruption as error:
        return "database" in error.where
    return False


def _is_empty(disk: Disk, path: str) -> bool:
    """Return whether a log certainly has no record."""
    try:
        return not read_log(disk, path, kind=LOG_KIND).payloads
    except QuireError:
        return False


def _open_tables(disk: Disk, home: LsmHome, state: ManifestData, cache: BlockCache, facts: StoreFacts) -> list[SSTable]:
    """Open every table that the manifest names, and compare it with its row in LMDB (step 3)."""
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
    """Replay one WAL into a memtable (step 4), and leave it open in `wals`."""
    wal, contents = KvWal.open(disk, home.wal(number), number, facts.owner, facts.wal_end(number))
    wals.append(wal)
    memtable = Memtable()
    for lsn, items, size, keys in batches_of(contents):
        for key, at in keys:
            calls.add(key, at)
        # Skip batches that a flush, interrupted between its two events, has already written to a table. If one were replayed,
        # a compaction might drop a newer tombstone of its keys, and the next flush would resurrect them.
        if items and lsn > in_tables:
            memtable.put_all(lsn, items, size, 0)
    if contents.torn_bytes:
        emit("info", "lsm.wal.torn", path=contents.path, bytes=contents.torn_bytes)
    return memtable


def _sweep(disk: Disk, home: LsmHome, state: ManifestData, facts: StoreFacts) -> None:
    """Remove or quarantine the files that the manifest does not name (step 6)."""
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
    """Move a file to the store's quarantine, or to one in the directory of a database that belongs to no store."""
    if facts.quarantine is not None:
        facts.quarantine(path, why)
    else:
        quarantine.move(disk, home.path, os.path.relpath(path, home.path), why=why, at_ms=SystemClock().now_ms())


def _remove(disk: Disk, path: str) -> None:
    disk.remove(path)
    emit("info", "lsm.orphan_removed", path=path, name=os.path.basename(path))
