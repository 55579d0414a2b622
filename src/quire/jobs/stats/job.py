"""The stats job: computes the exclusive and shared bytes, compression and tiers of each database and snapshot.

Terms
  holds       the artifacts that a database, as it is now, or a snapshot consists of: chunks of its leaves, segments of its WAL;
              of a key-value set, its live tables (`manifest/kv_tables.py`), which are added when the sums are described
  exclusive   of a database: artifacts that neither another database nor a snapshot of one holds, the bytes that dropping the
              database with its snapshots would free. Of a snapshot: artifacts without any other holder, its own database
              included, the bytes that dropping the snapshot alone would free
  churn       bytes of artifacts created within the last day

Rows of one transaction are read as numbers, at most `WAVE_ROWS` (80 MB) at a time (`jobs/row_groups.py`), and summed by the
runner, which returns a line of sums for each holder; only these lines (112 bytes each) are kept in memory, and described one
by one. The job changes nothing. Its result has the first `LISTED_MAX` databases and snapshots; `store.heavy.stats()` returns
all.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from quire.core.ids import ArtifactKind
from quire.core.json_values import plain
from quire.durable.space import Space
from quire.jobs.audit.run import RowBlock, piece_of, split_block
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.jobs.row_groups import Waves, cut, part
from quire.jobs.runner import Key
from quire.jobs.stats.run import SUMS, TIER, WHOLE, Shares, added, join_shares
from quire.manifest import tables as t
from quire.manifest.holders import encode, named_by
from quire.manifest.jobqueue import Job
from quire.manifest.kv_tables import Identity, own_tables, table_bytes, table_holders
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus, Residency, WalState
from quire.manifest.slots import ENTRY, ENTRY_FIELDS
from quire.manifest.verification import artifacts

LISTED_MAX = 1_000
BYTES_A_ROW = 256
"""Bytes of work that one row counts as when a runner is chosen: a million rows are worth a cluster."""


def stats_job(
    ctx: JobContext,
    job: Job,
    progress: Progress,
    *,
    into: Callable[[Iterator[Usage]], object] = lambda usages: sum(1 for _ in usages),
) -> Outcome:
    """Compute the usage of all databases and snapshots; `into` reads them, one by one."""
    runner_name = options(job, runner="")["runner"]
    with ctx.manifest.read() as txn:
        groups = waves(txn, ctx.clock.now_ms())
        total, done, sums = max(groups.rows, 1), 0, Totals()
        progress(0, total)
        runner = ctx.choose_runner(runner_name, groups.rows * BYTES_A_ROW, label="quire-stats")
        for wave in groups:
            ends = done + sum(len(block.rows) for block in wave)
            for answer in runner.regroup(split_block, wave, join_shares, tick=part(progress, done, ends, total)):
                sums.add(answer.result())
            done = ends
        first = _FirstRows(described(txn, sums))
        into(iter(first))
    progress(total, total)
    return Completed({"rows": groups.rows, "holders": first.count, "usage": first.listed, "runner": runner.name})


class _FirstRows:
    """Passes usages on, counts them, and keeps the first for the job's result."""

    def __init__(self, usages: Iterable[Usage]) -> None:
        self._usages = usages
        self.count = 0
        self.listed: list[Any] = []

    def __iter__(self) -> Iterator[Usage]:
        for usage in self._usages:
            self.count += 1
            if self.count <= LISTED_MAX:
                self.listed.append(plain(usage))
            yield usage


# ── usage ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
DAY_MS = 86_400_000
STEP_ROWS = 8_192
LEAF_ROWS = 64
"""Held leaves that are read in one step: each has some hundred chunks."""

WAVE_ROWS = 1_500_000

Numbers = NDArray[np.uint64]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The space that one database or one snapshot uses."""

    db_id: int
    database: str
    snapshot: str = ""
    """Name of the snapshot; empty for the database as it is now, with its snapshots."""
    artifacts: int = 0
    size_bytes: int = 0
    exclusive_bytes: int = 0
    shared_bytes: int = 0
    plain_bytes: int = 0
    """Bytes of its chunks before compression."""
    chunk_bytes: int = 0
    wal_bytes: int = 0
    churn_bytes: int = 0
    """Bytes created within the last day; tables of key-value sets have no time, and are not in it."""
    tiers: dict[str, int] = {}
    """Residency → bytes."""
    disk_bytes: int = 0
    """Bytes that the file system has allocated to the database's files in the store's directory, including snapshots and
    preallocated zeros; 0 for a snapshot, whose files belong to its database."""
    table_bytes: int = 0
    """Bytes of the live tables of a key-value set; 0 for its snapshots, whose tables have no rows."""

    @property
    def compression(self) -> float:
        """Bytes of pages per byte of chunks; 0 if there are no chunks."""
        return self.plain_bytes / self.chunk_bytes if self.chunk_bytes else 0.0


def usage(txn: ReadTxn, now_ms: int) -> Iterator[Usage]:
    """Yield the usage of every live database, each followed by its snapshots, computed in this process."""
    nothing: Any = None  # the tasks of this job use no tools
    total = Totals()
    for wave in waves(txn, now_ms):
        parts: dict[Key, list[tuple[str, Numbers]]] = defaultdict(list)
        for key, piece in chain.from_iterable(split_block(block, nothing) for block in wave):
            parts[key].append(piece)
        for key in list(parts):
            total.add(join_shares(key, None, parts.pop(key), nothing))
    yield from described(txn, total)


def with_disk(usages: Iterable[Usage], space: Space) -> Iterator[Usage]:
    """Yield the usages with `disk_bytes` filled in."""
    given = space.databases
    return (usage if usage.snapshot else replace(usage, disk_bytes=given.get(usage.db_id, 0)) for usage in usages)


class Totals:
    """The sums of all pieces by holder; lines are merged whenever their number exceeds twice the number of holders."""

    def __init__(self) -> None:
        self._lines: list[Shares] = [np.zeros((0, 2 + len(SUMS)), np.int64)]
        self._held, self._limit = 0, STEP_ROWS

    def add(self, shares: Shares) -> None:
        """Add the shares of one more piece."""
        self._lines.append(shares)
        self._held += len(shares)
        if self._held > self._limit:
            self._held = len(self._added())
            self._limit = 2 * self._held + STEP_ROWS

    def by_database(self) -> Callable[[int], dict[int, list[int]]]:
        """Return a lookup: database → snapshot → `SUMS`. It reads the lines: a dictionary would be ten times as large."""
        lines = self._added()
        databases = np.ascontiguousarray(lines[:, 0])

        def sums_of(db_id: int) -> dict[int, list[int]]:
            start, stop = np.searchsorted(databases, (db_id, db_id + 1))
            return {snapshot: sums for _, snapshot, *sums in lines[start:stop].tolist()}

        return sums_of

    def _added(self) -> Shares:
        self._lines = [added(np.concatenate(self._lines))]
        return self._lines[0]


def described(txn: ReadTxn, total: Totals) -> Iterator[Usage]:
    """Yield the sums with the names of their holders: each database, followed by its snapshots."""
    sums_of, holders = total.by_database(), table_holders(txn)
    for db_id, record in txn.databases():
        if record.status is DbStatus.TOMBSTONED:
            continue
        who = {"db_id": db_id, "database": f"{record.former_name} (dropped)" if record.former_name else record.name}
        sums = sums_of(db_id)
        whole = _usage(sums.get(WHOLE, ()), record.page_size, **who)
        yield with_tables(txn, whole, holders) if record.kind is DbKind.LSM else whole
        for (_, number), row in txn.scan(t.SNAPSHOT_INDEX, db_id):
            name = row.name or f"#{number}"
            yield _usage(sums.get(number, ()), record.page_size, snapshot=name, **who)


def with_tables(txn: ReadTxn, usage: Usage, holders: Tally[Identity]) -> Usage:
    """Return the usage of a database with the live tables of a key-value set; `holders` is `table_holders`."""
    if not (size := table_bytes(txn, usage.db_id)):
        return usage
    own = sum(own_tables(txn, usage.db_id, holders))
    local = Residency.LOCAL.name.lower()
    return replace(
        usage,
        artifacts=usage.artifacts + sum(1 for _ in txn.raw_scan(t.LSM_CATALOG, usage.db_id)),
        size_bytes=usage.size_bytes + size,
        exclusive_bytes=usage.exclusive_bytes + own,
        shared_bytes=usage.shared_bytes + size - own,
        tiers={**usage.tiers, local: usage.tiers.get(local, 0) + size},
        table_bytes=size,
    )


def _usage(sums: Iterable[int], page_size: int, **who: Any) -> Usage:
    named: dict[str, Any] = dict(zip(SUMS, sums)) or dict.fromkeys(SUMS, 0)
    tiers = {name.removeprefix(TIER): named.pop(name) for name in SUMS if name.startswith(TIER)}
    plain_bytes = named.pop("plain_pages") * page_size
    return Usage(tiers={name: size for name, size in tiers.items() if size}, plain_bytes=plain_bytes, **named, **who)


# ── rows as numbers ───────────────────────────────────────────────────────────────────────────────────────────────────
def waves(txn: ReadTxn, now_ms: int) -> Waves[RowBlock]:
    """Return every fact and every holding, in waves of bounded memory."""
    return cut(lambda: blocks(txn, now_ms), piece_of, WAVE_ROWS)


def blocks(txn: ReadTxn, now_ms: int) -> Iterator[RowBlock]:
    """Yield every fact and every holding, some thousands at a time."""
    for rows in _facts(txn, now_ms - DAY_MS):
        yield RowBlock("fact", rows)
    for rows in chain(_leaf_holdings(txn), _wal_holdings(txn)):
        for start in range(0, len(rows), STEP_ROWS):
            yield RowBlock("holding", rows[start : start + STEP_ROWS])


def _steps(rows: Iterable[tuple[int, ...]], count: int) -> Iterator[Numbers]:
    rest = iter(rows)
    while step := list(islice(rest, count)):
        yield np.array(step, np.uint64)


def _facts(txn: ReadTxn, young_ms: int) -> Iterator[Numbers]:
    def facts() -> Iterator[tuple[int, ...]]:
        for key, row in artifacts(txn):
            is_wal = key.kind is ArtifactKind.WAL
            size, pages = (row.used_bytes, 0) if is_wal else (row.size_bytes, row.page_count)
            yield (
                key.origin_db_id, key.kind, key.delta_id, key.id, key.generation,
                size, pages, row.created_at_ms > young_ms, row.residency, is_wal,
            )  # fmt: skip

    for rows in _steps(facts(), STEP_ROWS):
        yield np.column_stack([encode(*rows[:, :5].T), rows[:, 5:]])


def _leaf_holdings(txn: ReadTxn) -> Iterator[Numbers]:
    """Yield (code, code, database, snapshot) for the chunks that databases and snapshots hold through their leaves."""
    live = ((row.origin_db_id, leaf, row.generation, db_id, 0) for (db_id, leaf), row in txn.scan(t.LIVE_LEAF))
    kept = (
        (origin, leaf, generation, db_id, snapshot_id)
        for (db_id, snapshot_id), record in txn.scan(t.SNAPSHOT_INDEX)
        for leaf, origin, generation in record.leaves
    )
    for held in _steps(chain(live, kept), LEAF_ROWS):
        rows = [txn.get(t.SLOT_LEAF, *key) for key in held[:, :3].tolist()]
        # A missing leaf is for manifest/check.py (S1)
        bodies = [row.entries if row is not None else b"" for row in rows]
        entries = np.frombuffer(b"".join(bodies), ENTRY_FIELDS)
        owner = np.repeat(np.arange(len(held)), [len(body) // ENTRY.size for body in bodies])
        yield np.column_stack([named_by(held[owner, 1], entries), held[owner, 3:]])


def _wal_holdings(txn: ReadTxn) -> Iterator[Numbers]:
    """Yield the same for segments that a snapshot pins, and for those that a database still needs."""
    pinned = (
        (pin.origin_db_id, pin.segment_id, db_id, snapshot_id)
        for (db_id, snapshot_id), record in txn.scan(t.SNAPSHOT_INDEX)
        for pin in record.pins
    )
    needed = (
        (row.origin_db_id, segment_id, db_id, 0)
        for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG)
        if row.state < WalState.CHECKPOINTED
    )
    for rows in _steps(chain(pinned, needed), STEP_ROWS):
        yield np.column_stack([encode(rows[:, 0], ArtifactKind.WAL, 0, rows[:, 1], 0), rows[:, 2:]])
