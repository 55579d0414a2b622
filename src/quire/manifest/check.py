"""Check the whole manifest: read every row, yield every problem, and stop at none.

Rules, by number (cited in problems, tests and reviews):
  K1  every row has the checksum of its bytes, and decodes
  D1  `db_names` names exactly the live databases
  D2  rows belong to a database that exists; every database has a WAL state
  D3  every id in use is below its watermark
  S1  a held leaf exists
  S2  what leaves, databases and snapshots refer to is in the catalogs
  S3  `snapshot_names` names exactly the named snapshots
  S4  a leaf's chains are one base and rising deltas
  R1  `in_use` of every artifact is the number of its holders
  R2  `pending_upload` of every artifact is the number of its outstanding upload jobs
  R3  `gc_zero` names exactly the artifacts at zero
  R4  an artifact's row has a holder (otherwise it is a leak: bytes that are never read or deleted)
  W1  a tracked WAL segment has its origin's row
  W2  marks of a WAL agree with each other
  J1  `job_pending_index` names exactly the outstanding exclusive jobs; `jobs_by_state` every job; leases only running ones
  M1  rows about a mirror's databases and batches belong to a mirror that exists
  P1  a page's head is its newest version in the index
  P2  a version's predecessor (`prev_lsn`) is older than it, and no version in the index lies between the two
  F1  the change log is contiguous from the oldest retained sequence to the head
  F2  live cursors are inside the log; `cursor_names` names exactly the named ones. Repaired whenever a store is opened
  G1  a component's watermark is the generation of the last change that touched it, if the log still has it

A problem of one database or counter closes only that one (`closed_subjects`); any other problem keeps the store
from opening, unless it is a leak or contained.

Used by open, by `quire manifest check`, and by the teardown of every test that has a manifest. Audits skip the rules
that they check elsewhere, and the work those rules need.

Works on one snapshot. Memory is about 170 bytes per artifact (measured); the rest is streamed. Without R1, R4 and S2
nothing is held per artifact: memory is one step of rows, and the small tables from which indexes are derived.
"""

from __future__ import annotations

import struct
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from itertools import groupby
from typing import Any, Literal, Protocol

import lmdb
import msgspec

from quire.core.errors import ManifestDamaged, QuireError
from quire.core.timeline import following, preceding
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.ops.base import LOCAL_COUNTERS, Counter, Op, ReserveIds, ReserveLocalIds
from quire.manifest.ops.corrections import CorrectIndex, CorrectRefcount, RestoreRow
from quire.manifest.ops.cursors import ClampCursor
from quire.manifest.reads import ReadTxn
from quire.manifest.records import (
    EXCLUSIVE_JOBS,
    TERMINAL_JOB_STATES,
    CursorState,
    DbStatus,
    IndexRecord,
    JobState,
    SnapshotKind,
)

Rule = Literal[
    "K1", "D1", "D2", "D3", "S1", "S2", "S3", "S4", "R1", "R2", "R3", "R4", "W1", "W2", "J1", "M1", "P1", "P2", "F1", "F2", "G1"
]  # fmt: skip
"""The number of a rule: the type checker knows which exist."""

DAMAGED = "damaged"
"""Placeholder for the value of an index row that cannot be decoded."""


class Problem(msgspec.Struct, frozen=True):
    """One broken rule. `fix`, if present, is the operation that repairs it."""

    rule: Rule
    what: str
    where: dict[str, Any] = msgspec.field(default_factory=dict)
    fix: Op | None = None
    leak: bool = False
    """Whether it costs space but endangers nothing: it does not keep a store from opening."""
    contained: bool = False
    """Whether the damage affects only what the row controls (reading it raises): the store opens all the same."""

    def __str__(self) -> str:
        place = ", ".join(f"{name}={value}" for name, value in self.where.items())
        return f"{self.rule}: {self.what}" + (f" ({place})" if place else "")


Subject = tuple[str, int]
"""("database" or "counter", its id)."""


def closed_subjects(problem: Problem) -> tuple[Subject, ...]:
    """Return the databases and counters that a problem closes; none if it concerns the whole store.

    Leaks and contained problems close nothing: a leak endangers nothing, and reading a contained row raises.
    """
    where = problem.where
    if problem.leak or problem.contained:
        return ()
    if "counter" in where:
        return (("counter", where["counter"]),)
    if "artifact" in where:
        artifact = where["artifact"]  # a hex key if the row does not decode
        return (("database", int(artifact[:8], 16) if isinstance(artifact, str) else artifact.origin_db_id),)
    table, key = where.get("table"), where.get("key")
    if table == t.DB_NAMES.name:
        ids = {where.get("is"), where.get("should_be")}
        return tuple(("database", db_id) for db_id in sorted(number for number in ids if isinstance(number, int)))
    if key and (table == t.ID_WATERMARKS.name or any(owned.name == table for owned in t.OWNED)):
        first = key[0] if isinstance(key, tuple) else int.from_bytes(bytes.fromhex(key)[:4], "big")
        return (("counter" if table == t.ID_WATERMARKS.name else "database", first),)
    numbers: list[int] = [where["db_id"]] if "db_id" in where else []
    numbers += [where[name][0] for name in ("snapshot", "page") if name in where]
    return tuple(("database", db_id) for db_id in [*numbers, *where.get("ids", ())])


class LogPoint(Protocol):
    """A position in the change log up to which it was checked."""

    @property
    def sequence(self) -> int: ...

    @property
    def generations(self) -> Mapping[int, int]:
        """The generation of each component at that position."""


def check(
    txn: ReadTxn,
    *,
    without: Set[Rule] = frozenset(),
    checks: Collection[str] | None = None,
    since: LogPoint | None = None,
) -> Iterator[Problem]:
    """Yield every broken rule of the snapshot except those in `without`; work that only those rules need is skipped.

    `checks`: run only these of `CHECK_NAMES`, `STORE_CHECK_NAMES` and `CHANGED_CHECK_NAMES`. `since`: the change log was
    already checked up to this point.
    """
    is_whole = True
    for function, rules in _CHECKS:
        if rules <= without or (function.__name__ not in (CHECK_NAMES if checks is None else checks)):
            continue
        try:
            if function is _check_holders:
                problems = _check_holders(txn, without)
            elif function is _check_feed:
                problems = _check_feed(txn, since)
            else:
                problems = function(txn)
            for problem in problems:
                is_whole = is_whole and (problem.rule != "K1" or problem.contained)
                if not is_whole and problem.rule in _FROM_HOLDERS:
                    # An unreadable row may hold references: a count without them is too low, and artifacts would be
                    # deleted.
                    problem = msgspec.structs.replace(problem, fix=None, leak=_is_too_high(txn, problem))
                if problem.rule not in without:
                    yield problem
        except (QuireError, lmdb.Error, ValueError, struct.error) as error:
            # A row does not decode; K1 names it. What else this check would have found stays unknown.
            is_whole = False
            yield Problem("K1", f"{function.__name__.removeprefix('_check_')} cannot be checked: {error}")


def _is_too_high(txn: ReadTxn, problem: Problem) -> bool:
    """Return whether an artifact has more references than holders were found: harmless if a holder cannot be read."""
    with suppress(ManifestDamaged):
        counts = txn.refcount(problem.where["artifact"])
        return (
            problem.rule == "R1"
            and counts is not None
            and isinstance(problem.fix, CorrectRefcount)
            and counts.in_use > problem.fix.in_use
        )
    return False


_FROM_HOLDERS: frozenset[Rule] = frozenset({"R1", "R2"})
"""Rules whose fixes are computed by counting other rows."""

CONTAINED = (
    t.RETENTION, t.AUDIT, t.RETIRED, t.CHANGE_CURSORS, t.SNAPSHOT_READERS, t.METRICS, t.IDEMPOTENCY, t.REPLICA_POSITIONS,
    t.MIRROR, t.MIRROR_DATABASE, t.MIRROR_BATCH,
)  # fmt: skip
"""Tables whose damaged rows affect only one database, object, subscriber, reader or mirror."""

_COUNTING: frozenset[Rule] = frozenset({"R1", "R4", "S2"})
"""Rules that require counting every reference."""


def _check_holders(txn: ReadTxn, without: Set[Rule] = frozenset()) -> Iterator[Problem]:
    return _holder_problems(txn, without)


def _holder_problems(txn: ReadTxn, without: Set[Rule] = frozenset(), *, is_view: bool = False) -> Iterator[Problem]:
    # Imported here because it loads numpy, which importing this module must not.
    from quire.manifest.holders import check_held, check_rows, count_holders

    complete = check_rows if without >= _COUNTING else count_holders
    for rule, what, key, fix, leak in check_held(txn) if is_view else complete(txn):
        yield Problem(rule, what, {"artifact": key}, fix, leak)


def _check_held(txn: ReadTxn) -> Iterator[Problem]:
    """Check what the rows of a view hold, without counting the other holders (`changed_rows.ChangedRows`)."""
    return _holder_problems(txn, is_view=True)


def _check_decodes(txn: ReadTxn) -> Iterator[Problem]:
    """Check K1, except in tables with millions of rows, which are decoded by the rules that need their contents."""
    tables = t.TABLES.values()
    return _undecodable(txn, [table for table in tables if table.codec.packed is None and table not in _READ_ELSEWHERE])


def _check_store_rows(txn: ReadTxn) -> Iterator[Problem]:
    """Check K1 for the few rows about the store itself, without which nothing can be opened."""
    return _undecodable(txn, _STORE_ROWS)


_STORE_ROWS: tuple[t.Table[Any], ...] = (
    t.META,
    t.ID_WATERMARKS,
    t.GENERATION_WATERMARKS,
    t.REMOTE_NAMESPACE,
    t.TIMELINE,
    t.CHANGE_CURSORS,
)


def _undecodable(txn: ReadTxn, tables: Iterable[t.Table[Any]]) -> Iterator[Problem]:
    problems: list[Problem] = []
    for table in tables:
        for _ in _decoded(txn, table, problems.append):
            pass
    yield from problems


_READ_ELSEWHERE = (t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.SLOT_LEAF, CHANGE_LOG)


def _decoded(
    txn: ReadTxn, table: t.Table[Any], report: Callable[[Problem], None]
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for raw_key, raw in txn.raw_scan(table):
        try:
            yield table.key.unpack(raw_key), table.rows.decode(raw_key, raw)
        except (QuireError, ValueError, struct.error) as error:
            where = {"table": table.name, "key": raw_key.hex()}
            report(
                Problem("K1", f"a row of {table.name} does not decode: {error}", where, contained=table in CONTAINED)
            )


def _compare_index(txn: ReadTxn, table: t.Table[Any], expected: dict[bytes, int], rule: Rule) -> Iterator[Problem]:
    """Report every difference between an index and its expected rows; a damaged row counts as one."""
    actual: dict[bytes, int | str] = {}
    for key, raw in txn.raw_scan(table):
        try:
            actual[key] = table.rows.decode(key, raw).value
        except ManifestDamaged:
            actual[key] = DAMAGED
    for key in sorted(expected.keys() | actual.keys()):
        if expected.get(key) != actual.get(key):
            yield Problem(
                rule,
                f"{table.name} is wrong",
                {
                    "table": table.name,
                    "key": table.rows.key_of(key),
                    "is": actual.get(key),
                    "should_be": expected.get(key),
                },
                _index_fix(table, key, expected.get(key), is_damaged=actual.get(key) == DAMAGED),
            )


def _index_fix(table: t.Table[Any], key: bytes, value: int | None, *, is_damaged: bool) -> Op | None:
    """Return the fix of an index row. A logged one is restored only if damaged: a wrong value has another cause."""
    if table.policy is t.Policy.DERIVED:
        return CorrectIndex(table.name, key, value)
    row = None if value is None else table.codec.encode(IndexRecord(value))
    return RestoreRow(table.name, key, row) if is_damaged else None


def _check_databases(txn: ReadTxn) -> Iterator[Problem]:
    names: dict[bytes, int] = {}
    for db_id, record in txn.every_database():
        if record.status is not DbStatus.TOMBSTONED:
            key = t.DB_NAMES.key.pack(record.name)
            if key in names:
                yield Problem(
                    "D1", "two databases have the same name", {"name": record.name, "ids": [names[key], db_id]}
                )
            names[key] = db_id
    for db_id, name in txn.damaged_databases().items():
        if name:  # known from the index only: a damaged row cannot contradict it
            names.setdefault(t.DB_NAMES.key.pack(name), db_id)
    yield from _compare_index(txn, t.DB_NAMES, names, "D1")


def _check_owners(txn: ReadTxn) -> Iterator[Problem]:
    """Report rows that belong to no database, and databases without a WAL state (D2)."""
    databases = set(_owners(txn, t.DB))
    states = {key[0] for key, _ in txn.scan(t.WAL_STATE)}
    for db_id in databases - states:
        yield Problem("D2", "a database has no WAL state", {"db_id": db_id})
    for table in (
        t.WAL_STATE,
        t.WAL_CATALOG,
        t.WAL_MANIFEST,
        t.CHUNK_CATALOG,
        t.CHUNK_DELTA_INDEX,
        t.SLOT_LEAF,
        t.LIVE_LEAF,
        t.SNAPSHOT_INDEX,
        t.LSM_CATALOG,
        t.LSM_ENDS,
        t.FOLLOWED_FILES,
        t.REPLICA_POSITIONS,
        t.PAGE_VERSION_INDEX,
        t.PAGE_VERSION_HEAD,
    ):
        for owner in _owners(txn, table, few=20 * len(databases)):
            if owner not in databases:
                yield Problem("D2", f"rows of {table.name} belong to no database", {"db_id": owner})


def _owners(txn: ReadTxn, table: t.Table[Any], few: int = 0) -> Iterator[int]:
    """Yield the databases that have rows in a table: by one seek per database, or by scanning the keys if rows are few."""
    if txn.count(table) <= few:
        yield from sorted({int.from_bytes(key[:4], "big") for key, _ in txn.raw_scan(table)})
    else:
        yield from txn.owners(table)


_COUNTED: dict[Counter, t.Table[Any]] = {
    Counter.DB: t.DB,
    Counter.JOB: t.JOB_QUEUE,
    Counter.NAMESPACE: t.REMOTE_NAMESPACE,
    Counter.CURSOR: t.CHANGE_CURSORS,
}
"""The table whose keys begin with the ids of each counter."""


def highest_id(txn: ReadTxn, counter: Counter) -> int:
    """Return the highest id of a counter in any row. Rows of the audit outlive dropped databases, so all tables count."""
    tables: tuple[t.Table[Any], ...] = (_COUNTED[counter], *(t.OWNED if counter is Counter.DB else ()))
    width = 8 if counter in (Counter.JOB, Counter.CURSOR) else 4
    last = (next(txn.raw_scan_back(table), None) for table in tables)
    return max((int.from_bytes(row[0][:width], "big") for row in last if row is not None), default=0)


def _check_watermarks(txn: ReadTxn) -> Iterator[Problem]:
    for counter, table in _COUNTED.items():
        last = next(txn.raw_scan_back(table), None)
        highest = 0 if last is None else table.key.unpack(last[0])[0]
        try:
            next_id = txn.next_id(counter)
        except ManifestDamaged:
            continue  # K1 names the row
        if next_id <= highest:
            reserve = ReserveLocalIds if counter in LOCAL_COUNTERS else ReserveIds
            yield Problem(
                "D3",
                f"the {counter.name} watermark is not above the ids in use",
                {"counter": int(counter), "highest": highest, "next_id": next_id},
                reserve(counter, highest_id(txn, counter)),
            )


def _check_snapshots(txn: ReadTxn) -> Iterator[Problem]:
    names: dict[bytes, int] = {}
    newest: dict[int, int] = {}
    for (db_id, snapshot_id), record in txn.scan(t.SNAPSHOT_INDEX):
        newest[db_id] = snapshot_id
        if record.kind is SnapshotKind.NAMED:
            names[t.SNAPSHOT_NAMES.key.pack(db_id, record.name)] = snapshot_id
        for leaf, origin, generation in record.leaves:
            if txn.get(t.SLOT_LEAF, origin, leaf, generation) is None:
                yield Problem(
                    "S1",
                    "a snapshot holds a leaf that does not exist",
                    {"snapshot": (db_id, snapshot_id), "leaf": leaf},
                )
        for pin in record.pins:
            if txn.get(t.WAL_CATALOG, pin.origin_db_id, pin.segment_id) is None:
                yield Problem(
                    "W1",
                    "a snapshot pins a segment that does not exist",
                    {"snapshot": (db_id, snapshot_id), "pin": pin},
                )
    for (db_id, leaf), held in txn.scan(t.LIVE_LEAF):
        if txn.get(t.SLOT_LEAF, held.origin_db_id, leaf, held.generation) is None:
            yield Problem("S1", "a database holds a leaf that does not exist", {"db_id": db_id, "leaf": leaf})
    for db_id, snapshot_id in newest.items():
        try:
            db = txn.database(db_id)
        except ManifestDamaged:
            continue  # K1 names the row
        if db is not None and db.next_snapshot_id <= snapshot_id:
            raised = t.DB.codec.encode(msgspec.structs.replace(db, next_snapshot_id=snapshot_id + 1))
            fix = RestoreRow(t.DB.name, t.DB.key.pack(db_id), raised)
            yield Problem("D3", "the snapshot watermark is not above the ids in use", {"db_id": db_id}, fix)
    yield from _compare_index(txn, t.SNAPSHOT_NAMES, names, "S3")


def _check_wal(txn: ReadTxn) -> Iterator[Problem]:
    for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
        if row.origin_db_id != db_id and txn.get(t.WAL_CATALOG, row.origin_db_id, segment_id) is None:
            yield Problem(
                "W1", "an inherited segment has no row at its origin", {"db_id": db_id, "segment_id": segment_id}
            )
        state = txn.wal_state(db_id)
        if state is not None and state.next_segment_id <= segment_id:
            yield Problem("W2", "a segment's id is not below the mark", {"db_id": db_id, "segment_id": segment_id})
    for (db_id, shard), state in txn.scan(t.WAL_STATE):
        if not state.checkpointed_lsn <= state.last_applied_lsn <= state.lsn_reserved:
            yield Problem(
                "W2",
                "checkpointed, applied and reserved lsns are out of order",
                {
                    "db_id": db_id,
                    "shard": shard,
                    "lsns": (state.checkpointed_lsn, state.last_applied_lsn, state.lsn_reserved),
                },
            )


def _check_jobs(txn: ReadTxn) -> Iterator[Problem]:
    gates: dict[bytes, int] = {}
    states: dict[bytes, int] = {}
    running: set[int] = set()
    for (job_id,), job in txn.scan(t.JOB_QUEUE):
        states[t.JOBS_BY_STATE.key.pack(job.state, job_id)] = job_id
        if job.state is JobState.IN_FLIGHT:
            running.add(job_id)
        if job.state not in TERMINAL_JOB_STATES and job.kind in EXCLUSIVE_JOBS:
            gates[t.JOB_PENDING_INDEX.key.pack(job.db_id, job.kind)] = job_id
    yield from _compare_index(txn, t.JOB_PENDING_INDEX, gates, "J1")
    yield from _compare_index(txn, t.JOBS_BY_STATE, states, "J1")
    for (job_id,), _ in txn.scan(t.JOB_LEASES):
        if job_id not in running:
            yield Problem("J1", "a lease belongs to no running job", {"job_id": job_id})


def _check_mirrors(txn: ReadTxn) -> Iterator[Problem]:
    mirrors = {t.MIRROR.key.unpack(key)[0] for key, _ in txn.raw_scan(t.MIRROR)}
    for table in (t.MIRROR_DATABASE, t.MIRROR_BATCH):
        for key, _ in txn.raw_scan(table):
            if table.key.unpack(key)[0] not in mirrors:
                where = {"table": table.name, "key": key.hex()}
                fix = RestoreRow(table.name, key, None)
                yield Problem("M1", "a row belongs to no mirror", where, fix, contained=True)


def _check_heads(txn: ReadTxn) -> Iterator[Problem]:
    """Check P1 and P2. Both tables are ordered by page, so one merged walk suffices."""
    heads = txn.scan(t.PAGE_VERSION_HEAD)
    head = next(heads, None)
    unlinked: list[Problem] = []
    for page, newest in _newest_versions(txn, unlinked):
        yield from unlinked
        unlinked.clear()
        while head is not None and head[0] < page:
            yield Problem("P1", "a page has a head but no version", {"page": head[0]})
            head = next(heads, None)
        if head is None or head[0] != page or (head[1].lsn, head[1].segment_id) != newest:
            yield Problem("P1", "a page's head is not its newest version", {"page": page})
        if head is not None and head[0] == page:
            head = next(heads, None)
    while head is not None:
        yield Problem("P1", "a page has a head but no version", {"page": head[0]})
        head = next(heads, None)


def _newest_versions(txn: ReadTxn, unlinked: list[Problem]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield ((db_id, page), (lsn, segment_id)) of the newest version of every indexed page; add P2 problems to `unlinked`."""
    for page, versions in groupby(txn.scan(t.PAGE_VERSION_INDEX), key=lambda version: version[0][:2]):
        older, newest = 0, (0, 0)
        for (_, _, lsn), row in versions:
            if row.prev_lsn and not older <= row.prev_lsn < lsn:
                # Readers seek by lsn and do not follow `prev_lsn`: nothing needs to be closed.
                where = {"page": page, "lsn": lsn, "prev_lsn": row.prev_lsn}
                what = "a version of a page does not follow the one before it"
                unlinked.append(Problem("P2", what, where, contained=True))
            older, newest = lsn, (lsn, row.segment_id)
        yield (page[0], page[1]), newest


def _check_feed(txn: ReadTxn, since: LogPoint | None = None) -> Iterator[Problem]:
    """Check F1, G1 and F2. With `since`, read the log from there; if that shows a problem, read it from its beginning."""
    if since is not None:
        problems = list(_check_log(txn, since))
        yield from _check_log(txn) if problems else ()
    else:
        yield from _check_log(txn)
    yield from _check_cursors(txn)


def _check_log(txn: ReadTxn, since: LogPoint | None = None) -> Iterator[Problem]:
    oldest, head = txn.feed_bounds()
    gaps = txn.gaps()
    start = oldest if since is None else max(oldest, since.sequence + 1)
    expected = following(gaps, start - 1)
    promised: Tally[int] = Tally(dict(since.generations) if since is not None else {})
    for (sequence,), record in txn.scan(CHANGE_LOG, start=(start,)):
        if sequence != expected or record.sequence != sequence:
            yield Problem("F1", "the change log has a gap", {"expected": expected, "found": sequence})
        expected = following(gaps, sequence)
        for component, generation in record.generation_updates:
            promised[component] = max(promised[component], generation)
    if preceding(gaps, expected) != head:
        where = {"ends": preceding(gaps, expected), "head": head}
        yield Problem("F1", "the change log does not reach its head", where)
    marks = {component: row.generation for (component,), row in txn.scan(t.GENERATION_WATERMARKS)}
    is_known = oldest == 1 or since is not None  # whether `promised` has every component
    for component in sorted(promised.keys() | (marks.keys() if is_known else set())):
        if marks.get(component, 0) != promised[component]:
            where = {"component": component, "is": marks.get(component, 0), "log": promised[component]}
            # The writer continues from the log, so a watermark behind it catches up. A watermark ahead of it means that
            # the log has lost its end, whose sequences must not be assigned again.
            is_behind = marks.get(component, 0) < promised[component]
            yield Problem("G1", "a watermark differs from the change log", where, contained=is_behind)


def _check_cursors(txn: ReadTxn) -> Iterator[Problem]:
    oldest, head = txn.feed_bounds()
    names: dict[bytes, int] = {}
    for (cursor_id,), cursor in txn.scan(t.CHANGE_CURSORS):
        if cursor.name:
            names[t.CURSOR_NAMES.key.pack(cursor.name)] = cursor_id
        if cursor.state is CursorState.LIVE and not oldest - 1 <= cursor.acked_sequence <= head:
            where = {"cursor_id": cursor_id, "acked": cursor.acked_sequence, "oldest": oldest, "head": head}
            yield Problem("F2", "a cursor is outside the change log", where, ClampCursor(cursor_id))
    yield from _compare_index(txn, t.CURSOR_NAMES, names, "F2")


_CHECKS: tuple[tuple[Callable[[ReadTxn], Iterator[Problem]], frozenset[Rule]], ...] = (
    (_check_store_rows, frozenset({"K1"})),
    (_check_decodes, frozenset({"K1"})),
    (_check_databases, frozenset({"D1"})),
    (_check_owners, frozenset({"D2"})),
    (_check_watermarks, frozenset({"D3"})),
    (_check_snapshots, frozenset({"S1", "S3", "W1", "D3"})),
    (_check_wal, frozenset({"W1", "W2"})),
    (_check_jobs, frozenset({"J1"})),
    (_check_mirrors, frozenset({"M1"})),
    (_check_heads, frozenset({"P1", "P2"})),
    (_check_feed, frozenset({"F1", "F2", "G1"})),
    (_check_holders, frozenset({"K1", "R1", "R2", "R3", "R4", "S2", "S4"})),
    (_check_held, frozenset({"K1", "R1", "R2", "R3", "S2", "S4"})),
)
"""The checks, each with the rules that it may report."""

STORE_CHECK_NAMES = frozenset(check.__name__ for check in (_check_store_rows, _check_watermarks, _check_feed))
"""Checks of rows about the store itself, whose number does not depend on the number of databases."""

CHECK_NAMES = tuple(function.__name__ for function, _ in _CHECKS if function not in (_check_store_rows, _check_held))
"""Checks that together cover the whole manifest."""

FEED_CHECK_NAMES = (_check_feed.__name__,)
"""The check of the change log."""

CHANGED_CHECK_NAMES = frozenset(
    check.__name__
    for check in (
        _check_decodes,
        _check_databases,
        _check_owners,
        _check_snapshots,
        _check_wal,
        _check_jobs,
        _check_heads,
        _check_held,
    )
)
"""Checks of the databases and jobs that a view of changed rows has."""
