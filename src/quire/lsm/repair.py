"""Repairs a key-value database whose files are inconsistent: a survey reads everything, `apply_repair` performs the repair.

If the manifest is not intact (its witnesses contradict it), the live tables are determined as follows
  - If the manifest is sound and has higher ids and lsns than LMDB (e.g. LMDB was restored from a copy): the tables it names.
  - Otherwise: the tables with rows in LMDB, except those that a readable event removes; the tables that readable events add and
    LMDB does not list yet; and an unnamed table whose rows are all newer than those of every other table, which is what a flush
    leaves whose event was lost.
A table that is missing or damaged is replaced by a copy: its hard link in a snapshot or a fork, or its object in a backup.

What is on disk after each step. The database is refused until the last one, and a repair can be restarted after any of them
  new tables, the new WAL      files that no manifest names
  the old manifest moves       to quarantine
  the new snapshot             names the live tables; without a log it cannot be opened
  leftovers move               damaged tables, logs whose batches are now in a table, unnamed files
  the new log                  the database is complete

Nothing is removed: `quire quarantine` lists the files that were moved.

Threads: one; no other thread may use the database. Raises `FormatTooNew`, `Corruption` for a copy that is damaged too, and the
disk's errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.core.errors import Corruption, FormatTooNew, QuireError, StorageFault
from quire.durable.failpoints import hit
from quire.durable.files import Disk, read_all, write_atomic, write_new
from quire.durable.log_format import LogHeader, decode_header
from quire.durable.log_reader import find_frames, scan
from quire.durable.log_writer import LogWriter
from quire.durable.names import TEMPORARY, LsmHome, lsm_number, sst_entry_path
from quire.lsm.manifest import recorded_end
from quire.lsm.manifest_data import AddSst, Compaction, ManifestData, ManifestSstEntry, RemoveSst
from quire.lsm.manifest_format import LOG_NEXT, ManifestSnapshot, decode_event, decode_snapshot, encode_snapshot
from quire.lsm.memtable import Memtable
from quire.lsm.projection import is_row_of
from quire.lsm.recovery import names_in, refuse_stale_manifest, set_aside
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter
from quire.lsm.table_options import TableOptions
from quire.lsm.wal import LOG_KIND, Items, KvWal, decode_batch
from quire.lsm.witnesses import StoreFacts
from quire.manifest.records import LsmTableRecord

if TYPE_CHECKING:
    import pyarrow as pa

Fetch = Callable[[int, LsmTableRecord], tuple[str, Callable[[], bytes]] | None]
"""Finds a table in backups: returns a description of the place, and a function that reads it."""


class RepairReport(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a repair, and the changes that it makes if it is applied."""

    reason: str
    """Why the database cannot be opened; empty if it can."""
    applied: bool
    kept: int
    """Number of sound tables, which are kept."""
    brought_back: tuple[str, ...]
    """Tables that are replaced by a copy."""
    rewritten: tuple[str, ...]
    """Damaged tables, and how many rows of them are recovered."""
    batches: int
    """Number of batches in logs that are in no table."""
    lost: tuple[str, ...]
    """Descriptions of data that cannot be recovered."""
    doubts: tuple[str, ...]
    """Descriptions of data that may be wrong after the repair."""
    moved: tuple[tuple[str, str], ...]
    """Files that are moved to quarantine, relative to the database, and why."""

    @property
    def is_needed(self) -> bool:
        """Whether a repair is needed."""
        return bool(self.reason or self.lost or self.brought_back or self.rewritten)


@dataclass(slots=True)
class _History:
    """The readable parts of the manifest."""

    state: ManifestData = field(default_factory=ManifestData)
    removed: set[int] = field(default_factory=set)
    reason: str = ""
    """Why the manifest is not intact; empty if it is."""
    is_newer: bool = False
    """Whether it is sound and ahead of an LMDB that was restored from a copy: then the live tables are those it names."""
    is_empty: bool = True


@dataclass(slots=True)
class KvSurvey:
    """What remains of a damaged database, and where each part can be recovered from."""

    disk: Disk
    home: LsmHome
    facts: StoreFacts
    reason: str = ""
    sound: dict[int, SSTable] = field(default_factory=dict)
    copies: dict[int, tuple[str, Callable[[], bytes]]] = field(default_factory=dict)
    damaged: dict[int, int] = field(default_factory=dict)
    """Tables of which some blocks can be read: the number of rows in those blocks, by id."""
    batches: dict[int, Items] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    last_lsn: int = 0
    next_sst_id: int = 1
    version: int = 0
    """The newest version in the readable parts of the manifest."""
    next_wal: int = 1

    def report(self, *, applied: bool) -> RepairReport:
        """Return the findings as a value."""
        return RepairReport(
            reason=self.reason,
            applied=applied,
            kept=len(self.sound),
            brought_back=tuple(f"table {sst_id} from {self.copies[sst_id][0]}" for sst_id in sorted(self.copies)),
            rewritten=tuple(f"{rows} rows of table {sst_id}" for sst_id, rows in sorted(self.damaged.items())),
            batches=len(self.batches),
            lost=tuple(self.lost),
            doubts=tuple(self.doubts),
            moved=tuple((os.path.relpath(path, self.home.path), why) for path, why in sorted(self.moved.items())),
        )

    def close(self) -> None:
        """Close the tables."""
        for table in self.sound.values():
            table.close()


# ── the survey ────────────────────────────────────────────────────────────────────────────────────────────────────────
def survey(disk: Disk, home: LsmHome, facts: StoreFacts, fetch: Fetch | None = None) -> KvSurvey:
    """Read all files of a database and determine what can be recovered. Changes nothing."""
    history = _history(disk, home, facts)
    survey = KvSurvey(disk, home, facts, history.reason)
    ids = {number for name in names_in(disk, f"{home.path}/sst") if (number := lsm_number(name, ".sst")) is not None}
    wals = {number for name in names_in(disk, f"{home.path}/wal") if (number := lsm_number(name, ".log")) is not None}
    live = _live(history, facts, ids)
    lost_ranges = [_survey_table(survey, sst_id, fetch) for sst_id in sorted(live)]
    if history.reason or facts.ends is None:  # else the manifest is known to cover every acknowledged write
        _survey_unnamed(survey, sorted(ids - live - history.removed))
    _survey_logs(survey, history, sorted(wals), [lost for lost in lost_ranges if lost is not None])
    for sst_id in sorted(ids - survey.sound.keys() - survey.copies.keys()):
        survey.moved.setdefault(home.sst(sst_id), "no manifest record says that this table is live")
    recorded = [end.number for end in facts.ends.wals] if facts.ends is not None else []
    state = history.state
    survey.next_sst_id = max(state.next_sst_id, *(number + 1 for number in (0, *ids, *facts.rows)))
    survey.version = state.version
    survey.next_wal = 1 + max(state.active_wal, 0, *wals, *recorded)
    lsns = [table.meta.lsn_max for table in survey.sound.values()] + [row.lsn_max for row in facts.rows.values()]
    acknowledged = facts.ends.last_lsn if facts.ends is not None else 0
    survey.last_lsn = max(state.last_lsn, acknowledged, *lsns, *survey.batches, 0)
    return survey


def _history(disk: Disk, home: LsmHome, facts: StoreFacts) -> _History:
    history, snapshot = _History(), None
    try:
        snapshot = decode_snapshot(read_all(disk, home.manifest_snapshot), home.manifest_snapshot)
        history.state, history.is_empty = snapshot.manifest_data, False
    except FileNotFoundError:
        pass
    except Corruption as error:
        history.reason = _error_text(error)
    try:
        raw = read_all(disk, home.manifest_log)
        header = decode_header(raw, home.manifest_log)
    except FileNotFoundError:
        history.reason = history.reason or "the manifest's log is missing"
        return history
    except Corruption as error:
        history.reason = history.reason or _error_text(error)
        return history
    if snapshot is None or snapshot.covered_salt != header.salt:
        _replay(history, raw, header, home)
    if not history.reason:
        history.reason = _disagreement(disk, home, facts, history.state, snapshot, raw, header)
        alone = msgspec.structs.replace(facts, ends=None)
        if history.reason and not _disagreement(disk, home, alone, history.state, snapshot, raw, header):
            # Ids and lsns only rise, and both are allocated before they are used.
            ends, state = facts.ends, history.state
            newest_id = max(facts.rows, default=0)
            history.is_newer = ends is not None and state.last_lsn > ends.last_lsn and state.next_sst_id > newest_id + 1
    return history


def _replay(history: _History, raw: bytes, header: LogHeader, home: LsmHome) -> None:
    """Apply every event that can be read, including those after damage."""
    for frame in find_frames(raw, header):
        if not frame.payload:
            continue
        try:
            event = decode_event(frame.payload, home.manifest_log, frame.offset)
        except Corruption as error:
            history.reason = history.reason or _error_text(error)
            continue
        history.is_empty = False
        history.state.apply(event)
        if isinstance(event, RemoveSst):
            history.removed.add(event.id)
        elif isinstance(event, Compaction):
            history.removed.update(event.removed)
        elif isinstance(event, AddSst):
            history.removed.discard(event.entry.id)


def _disagreement(
    disk: Disk,
    home: LsmHome,
    facts: StoreFacts,
    state: ManifestData,
    snapshot: ManifestSnapshot | None,
    raw: bytes,
    header: LogHeader,
) -> str:
    """Return why the manifest is not intact, or an empty string."""
    path = home.manifest_log
    try:
        recorded = recorded_end(facts, header, snapshot, path)
        if snapshot is None and header.kind == LOG_NEXT:
            return "the manifest's snapshot is missing"
        if snapshot is None or snapshot.covered_salt != header.salt:
            scan(raw, path, vouched=recorded)
        refuse_stale_manifest(disk, home, state, facts)
    except FormatTooNew:
        raise
    except QuireError as error:
        return _error_text(error)
    return ""


def _error_text(error: QuireError) -> str:
    """Format an error with its file, without its hint, which recommends this repair."""
    path = error.where.get("path", "")
    return f"{error.what} ({'/'.join(str(path).split('/')[-2:])})" if path else error.what


def _live(history: _History, facts: StoreFacts, ids: set[int]) -> set[int]:
    named = set(history.state.tables)
    if not history.reason or history.is_newer:
        return named
    if facts.rows:
        return (facts.rows.keys() - history.removed) | {sst_id for sst_id in named if sst_id > max(facts.rows)}
    return named if not history.is_empty or facts.ends is not None else ids


def _survey_table(survey: KvSurvey, sst_id: int, fetch: Fetch | None) -> tuple[int, int] | None:
    """Keep a live table, a copy of it, or its readable rows. Return the range of lsns that may be lost, or `None`."""
    path, row = survey.home.sst(sst_id), survey.facts.rows.get(sst_id)
    table, damage = checked(survey.disk, path, sst_id, row)
    if table is not None:
        survey.sound[sst_id] = table
        return None
    survey.reason = survey.reason or damage
    copy = _find_copy(survey, sst_id, row, fetch)
    if copy is not None:
        survey.copies[sst_id] = copy
        return None
    rows = _readable_rows(survey.disk, path, sst_id)
    if rows:
        survey.damaged[sst_id] = rows
    described = f", which had {row.rows:,} rows with keys from {row.key_min!r} to {row.key_max!r}" if row else ""
    survey.lost.append(f"{'some rows' if rows else 'all rows'} of table {sst_id}{described}: {damage}")
    survey.doubts.append(f"keys of table {sst_id} may show older values, or be back after they were deleted")
    if survey.disk.exists(path):
        survey.moved[path] = f"the table is damaged: {damage}"
    return (row.lsn_min, row.lsn_max) if row is not None else (0, 0)


def checked(disk: Disk, path: str, sst_id: int, row: LsmTableRecord | None) -> tuple[SSTable | None, str]:
    """Open a table if it is sound and the one that LMDB describes. Return (table, "") or (`None`, why not)."""
    try:
        table = SSTable.open(disk, path, sst_id)
    except QuireError as error:
        return None, error.what
    try:
        if row is not None and not is_row_of(row, table):
            damage = "it is not the table that the store's manifest describes"
        else:
            damage = next(table.verify(), "")
    except QuireError as error:
        damage = error.what
    if damage:
        table.close()
        return None, damage
    return table, ""


def _find_copy(
    survey: KvSurvey, sst_id: int, row: LsmTableRecord | None, fetch: Fetch | None
) -> tuple[str, Callable[[], bytes]] | None:
    disk, home = survey.disk, survey.home
    for folder in _folders(disk, home, own_only=row is None):
        path = f"{folder}/{sst_entry_path(sst_id)}"
        table, _ = checked(disk, path, sst_id, row) if disk.exists(path) else (None, "")
        if table is not None:
            table.close()
            return os.path.relpath(path, os.path.dirname(home.path)), partial(read_all, disk, path)
    return fetch(sst_id, row) if fetch is not None and row is not None else None


def _folders(disk: Disk, home: LsmHome, *, own_only: bool) -> Iterator[str]:
    """Yield directories that may have a hard link to a table: snapshots of the database, other databases, their snapshots."""
    base = os.path.dirname(home.path)
    homes = [home.path] if own_only else [home.path, *(f"{base}/{name}" for name in names_in(disk, base))]
    for other in homes:
        if other != home.path:
            yield other
        yield from (f"{other}/snapshots/{name}" for name in names_in(disk, f"{other}/snapshots"))


def _readable_rows(disk: Disk, path: str, sst_id: int) -> int:
    return sum(batch.num_rows for batch in readable_blocks(disk, path, sst_id))


def readable_blocks(disk: Disk, path: str, sst_id: int) -> Iterator[pa.RecordBatch]:
    """Yield the readable blocks of a damaged table; none if its index cannot be read."""
    try:
        table = SSTable.open(disk, path, sst_id)
    except QuireError:
        return
    with closing(table):
        for number in range(len(table.meta.blocks)):
            with suppress(Corruption):
                yield table.batch(number)


def _survey_unnamed(survey: KvSurvey, unnamed: Sequence[int]) -> None:
    """Keep unnamed tables of level 0 whose rows are all newer than those of every other table."""
    candidates = []
    for sst_id in unnamed:
        table, _ = checked(survey.disk, survey.home.sst(sst_id), sst_id, None)
        if table is not None:
            candidates.append(table)
    newest = max((table.meta.lsn_max for table in survey.sound.values()), default=0)
    for table in sorted(candidates, key=lambda table: table.meta.lsn_min):
        if table.meta.level == 0 and table.meta.lsn_min > newest:
            survey.sound[table.meta.sst_id] = table
            newest = table.meta.lsn_max
        else:
            table.close()


def _survey_logs(survey: KvSurvey, history: _History, numbers: Sequence[int], lost: Sequence[tuple[int, int]]) -> None:
    """Keep the batches of logs that are in no table, including those after damage."""
    state, home = history.state, survey.home
    named = {number for number in (*state.frozen_wals, state.active_wal) if number}
    in_tables = max((table.meta.lsn_max for table in survey.sound.values()), default=0)
    for number in numbers:
        if not history.reason and number not in named and number < state.active_wal:
            continue  # flushed, but not yet removed
        survey.moved[home.wal(number)] = "its contents are already in a table"
        for lsn, items in _batches(survey, number):
            if lsn > in_tables or any(low <= lsn <= high for low, high in lost):
                survey.batches[lsn] = items
    if not history.reason:
        for number in sorted(named - set(numbers)):
            survey.reason = survey.reason or "a write-ahead log is missing"
            survey.lost.append(f"what write-ahead log {number} held: the file is missing")
    reached = max([in_tables, state.last_lsn, *survey.batches])
    if survey.facts.ends is not None and reached < survey.facts.ends.last_lsn and not survey.lost:
        survey.reason = survey.reason or "acknowledged writes are missing from the database"
        survey.lost.append(f"writes from lsn {reached + 1} to {survey.facts.ends.last_lsn}: no file has them")


def _batches(survey: KvSurvey, number: int) -> Iterator[tuple[int, Items]]:
    path, recorded = survey.home.wal(number), survey.facts.wal_end(number)
    raw = read_all(survey.disk, path)
    try:
        header = decode_header(raw, path, LOG_KIND)
        if recorded is None or recorded.salt != header.salt:
            survey.facts.owner.require(header, number, path)
    except QuireError as error:
        survey.reason = survey.reason or _error_text(error)
        survey.lost.append(f"what write-ahead log {number} held: {error.what}")
        survey.moved[path] = error.what
        return
    try:
        scan(raw, path, vouched=recorded)
    except QuireError as error:
        survey.reason = survey.reason or _error_text(error)
        survey.lost.append(f"writes in log {number} at offset {error.where.get('offset', 0)}: {error.what}")
        survey.moved[path] = f"the log is damaged: {error.what}"
    for frame in find_frames(raw, header):
        if frame.payload:
            try:
                batch = decode_batch(frame.payload, path, frame.offset)
                yield batch.lsn, batch.items
            except Corruption as error:
                survey.lost.append(f"writes in log {number} at offset {frame.offset}: {error.what}")


# ── the repair ────────────────────────────────────────────────────────────────────────────────────────────────────────
def apply_repair(survey: KvSurvey, options: TableOptions) -> None:
    """Repair the database as surveyed. It can be opened afterwards."""
    disk, home = survey.disk, survey.home
    for part in ("sst", "wal", "manifest"):
        disk.make_dirs(f"{home.path}/{part}")
    live = {sst_id: ManifestSstEntry(sst_id, sst_entry_path(sst_id)) for sst_id in (*survey.sound, *survey.copies)}
    for sst_id in survey.copies:
        _restore_table(survey, sst_id)
    fresh = iter(range(survey.next_sst_id, survey.next_sst_id + len(survey.damaged) + 1))
    for sst_id in survey.damaged:
        blocks = readable_blocks(disk, home.sst(sst_id), sst_id)
        _add(live, _write(survey, next(fresh), blocks, options))
    _add(live, _write(survey, next(fresh), _rows(survey.batches), options))
    KvWal.create(disk, home.wal(survey.next_wal), survey.next_wal, survey.facts.owner).close()
    hit("lsm.repair.written")
    _replace_manifest(survey, live)


def _restore_table(survey: KvSurvey, sst_id: int) -> None:
    """Install the copy of a table under its name. The old file is quarantined after the copy is complete and checked."""
    disk, path = survey.disk, survey.home.sst(sst_id)
    write_new(disk, path + TEMPORARY, survey.copies[sst_id][1](), overwrite=True)
    table, damage = checked(disk, path + TEMPORARY, sst_id, survey.facts.rows.get(sst_id))
    if table is None:
        text = "the copy of a table is damaged too"
        raise Corruption(text, hint="remove that copy, then repair again", path=path, cause=damage)
    table.close()
    if disk.exists(path):
        set_aside(disk, survey.home, path, "this table was replaced by a copy", survey.facts)
    disk.rename(path + TEMPORARY, path)
    disk.sync_dir(os.path.dirname(path))
    survey.moved.pop(path, None)


def _rows(batches: Mapping[int, Items]) -> Iterator[pa.RecordBatch]:
    memtable = Memtable()
    for lsn in sorted(batches):
        memtable.put_all(lsn, batches[lsn], 0, 0)
    yield from memtable.rows_between(b"", None)


def _write(survey: KvSurvey, sst_id: int, blocks: Iterator[pa.RecordBatch], options: TableOptions) -> int:
    """Write a table of these rows. Return its id, or 0 if there are no rows."""
    writer = TableWriter(sst_id, 0, options)
    for batch in blocks:
        writer.add(batch)
    if not writer.rows:
        return 0
    writer.write(survey.disk, survey.home.sst(sst_id))
    return sst_id


def _add(live: dict[int, ManifestSstEntry], sst_id: int) -> None:
    if sst_id:
        live[sst_id] = ManifestSstEntry(sst_id, sst_entry_path(sst_id))


def _replace_manifest(survey: KvSurvey, live: dict[int, ManifestSstEntry]) -> None:
    disk, home, facts = survey.disk, survey.home, survey.facts
    # The log first: in every state from here to the new log, the database has no log and is refused.
    for path in (home.manifest_log, home.manifest_snapshot):
        if disk.exists(path):
            set_aside(disk, home, path, "the database was repaired", facts)
    state = ManifestData(
        version=survey.version + 1,
        last_lsn=survey.last_lsn,
        active_wal=survey.next_wal,
        tables=live,
        next_sst_id=max([survey.next_sst_id, *(sst_id + 1 for sst_id in live)]),
    )
    # Cover the recorded log, as a checkpoint would: the next open accepts no other successor (`recorded_end`).
    covered = facts.ends.manifest.salt if facts.ends is not None else 0
    write_atomic(disk, home.manifest_snapshot, encode_snapshot(state, covered))
    hit("lsm.repair.named")
    for path, why in sorted(survey.moved.items()):
        with suppress(FileNotFoundError, StorageFault):
            set_aside(disk, home, path, why, facts)
    hit("lsm.repair.moved")
    LogWriter.create(disk, home.manifest_log, kind=LOG_NEXT, identity=facts.owner.identity(0), replace=True).close()
