"""Snapshots and forks of a database of 1 TiB (16,384 chunks) against one durable commit of raw py-lmdb, in the same run.

It measures what one costs, whether it costs more if there are many, and how large the manifest becomes in a year of hourly
snapshots. The size depends on what changes between two snapshots, so there are three of them: nothing, one slot, or 64 slots in
all leaves, in which case no two snapshots share a slot map.

Sizes are those of a compact copy of the environment, which has all pages in use and no free ones, with the change log trimmed.
"""

from __future__ import annotations

import os
import statistics
import struct
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import quire
from bench.manifest import BLOCK, chunk_op, fresh, raw_env
from bench.report import Report
from quire.manifest.ops.databases import ReserveGeneration
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.records import SCHEDULE_TAG
from quire.manifest.store import ManifestStore
from quire.testing import ManualClock
from tests.manifest.checkpoints import FullChunk, checkpoint_ops

CHUNKS = 16_384
"""Of 64 MiB: 1 TiB."""
SLOTS_PER_LEAF = 256
FORKS = 1_000
YEAR_HOURS = 8_760
DB = 1
STEP = 7_919
"""A prime, so that slots are visited in no order, and all of them once before any is visited again."""


def database(directory: Path, name: str, clock: ManualClock | None = None) -> ManifestStore:
    """Create a manifest with a database of 1 TiB."""
    manifest = ManifestStore.open(fresh(directory, name), clock=clock)
    manifest.register_db("bench", quire.DbKind.PAGES, page_size=4096)
    checkpoint(manifest, range(CHUNKS))
    return manifest


def checkpoint(manifest: ManifestStore, slots: range | list[int]) -> None:
    """Rewrite slots in one batch."""
    with manifest.read() as txn:
        record, wal = txn.database(DB), txn.wal_state(DB)
        assert record is not None
        assert wal is not None
        generation, lsn = record.next_generation, wal.last_applied_lsn + 1
        mutations = [FullChunk(slot=slot, record=chunk_op(slot).record) for slot in slots]
        ops = checkpoint_ops(txn, DB, generation, mutations, lsn)
    manifest.submit([ReserveGeneration(DB, generation), AdvanceWal(DB, 0, lsn, lsn, lsn), *ops]).result()


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class RawCommits:
    """The limit: durable commits of one row, as in `single_commit_vs_lmdb` of the manifest's benchmark."""

    def __init__(self, directory: Path) -> None:
        self._env, self._table, self._log = raw_env(directory, "raw")
        self._number = 0

    def __call__(self) -> None:
        self._number += 1
        with self._env.begin(write=True) as txn:
            txn.put(struct.pack(">III", 1, self._number, 1), b"r" * 80, db=self._table)
            txn.put(struct.pack(">Q", self._number), b"c" * 100, db=self._log)

    def close(self) -> None:
        self._env.close()


def in_turns(count: int, *contenders: Callable[[], object]) -> list[float]:
    """Return the median seconds of each contender, in short turns, because the speed of the disk changes within seconds."""
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(0, count, BLOCK):
        for contender, durations in zip(contenders, times):
            durations.extend(timed(contender) for _ in range(BLOCK))
    return [statistics.median(durations) for durations in times]


# ── one more ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def one_more(report: Report, directory: Path, quick: bool) -> None:
    """Create a snapshot and a fork, and wait until each is durable."""
    raw = RawCommits(directory)
    with database(directory, "ours") as manifest:
        forks = iter(range(10**6))
        commits = manifest.writer.stats.commits
        manifest.snapshots.publish(DB)
        manifest.snapshots.fork(DB, "first")
        if manifest.writer.stats.commits - commits > 2:
            raise AssertionError("a snapshot, or a fork, took more than one transaction")
        snapshot, fork, limit = in_turns(
            200 if quick else 2_000,
            lambda: manifest.snapshots.publish(DB),
            lambda: manifest.snapshots.fork(DB, f"fork-{next(forks)}"),
            raw,
        )
    raw.close()
    for name, seconds in (("snapshot", snapshot), ("fork", fork)):
        detail = f"p50 {seconds * 1e6:.0f} µs against {limit * 1e6:.0f} µs, one transaction"
        report.ratio(f"{name}_vs_lmdb_commit", seconds / limit, 3, "lower", detail)
        report.figure(f"{name}_p50_us", seconds * 1e6)
    report.figure("lmdb_commit_p50_us", limit * 1e6)


def among_many(report: Report, directory: Path, quick: bool) -> None:
    """Create forks in a store with 1,000 forks, against the first forks of another store."""
    with database(directory, "few") as few, database(directory, "many") as many:
        for number in range(FORKS):
            many.snapshots.fork(DB, f"alive-{number}")
        forks = iter(range(10**6))
        first, later = in_turns(
            100 if quick else 200,
            lambda: few.snapshots.fork(DB, f"fork-{next(forks)}"),
            lambda: many.snapshots.fork(DB, f"fork-{next(forks)}"),
        )
    detail = f"p50 {later * 1e6:.0f} µs with {FORKS:,} forks alive against {first * 1e6:.0f} µs"
    report.ratio("fork_among_1000_vs_first", later / first, 1.25, "lower", detail)


# ── a year ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def a_year(report: Report, directory: Path, quick: bool) -> None:
    """Create hourly snapshots, and keep all of them."""
    some = YEAR_HOURS // 10 if quick else YEAR_HOURS
    leaves = CHUNKS // SLOTS_PER_LEAF
    everywhere = [leaf * SLOTS_PER_LEAF for leaf in range(leaves)]
    one = hours(report, directory, "one_slot", some, lambda hour: [hour * STEP % CHUNKS])
    report.ratio("year_one_slot_mb_vs_100", one, 100, "lower", "MB of manifest; one slot rewritten per hour")
    none = hours(report, directory, "unchanged", some, lambda _: [])
    report.ratio("year_unchanged_mb", none, None, "lower", "MB; the database does not change")
    few = 40 if quick else 400
    spread = hours(
        report, directory, "64_slots", few, lambda hour: [slot + hour % SLOTS_PER_LEAF for slot in everywhere]
    )
    detail = f"MB; 64 slots spread over all leaves rewritten per hour, from {few} hours"
    report.ratio("year_64_slots_mb", spread, None, "lower", detail)


def hours(report: Report, directory: Path, name: str, count: int, slots: Callable[[int], list[int]]) -> float:
    """Return the megabytes of a manifest after a year: `count` hours are simulated, the rest is extrapolated."""
    clock = ManualClock()
    with database(directory, name, clock) as manifest:
        before = used_mb(manifest, directory, clock)
        started = time.perf_counter()
        for hour in range(count):
            if changed := slots(hour):
                checkpoint(manifest, changed)
            moment = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
            manifest.snapshots.publish(DB, f"{moment:hourly-%Y-%m-%dT%H}", tags={SCHEDULE_TAG: "hourly"})
            clock.advance(3600)
            if hour % 24 == 0:
                manifest.feed.maintain()
        taken = time.perf_counter() - started
        grown = used_mb(manifest, directory, clock) - before
        report.figure(f"year_{name}_file_mb", manifest.env.info()["file_bytes"] / 1e6)
        report.figure(f"year_{name}_snapshot_bytes", grown * 1e6 / count)
        report.figure(f"year_{name}_hour_ms", taken / count * 1e3)
    return before + grown * YEAR_HOURS / count


def used_mb(manifest: ManifestStore, directory: Path, clock: ManualClock) -> float:
    """Return the size of a compact copy, after the change log has been trimmed by age."""
    clock.advance(30 * 86_400)
    manifest.feed.maintain()
    copy = directory / "compact.lmdb"
    manifest.env.copy(str(copy))
    size = copy.stat().st_size
    os.remove(copy)
    return size / 1e6


PARTS = (one_more, among_many, a_year)
