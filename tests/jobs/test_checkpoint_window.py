"""The time-travel window: every version in it can be opened, across checkpoints and truncation; no version beyond it
can (P14)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from pathlib import Path

import pytest

from quire.core.clock import SystemClock
from quire.core.errors import JobAlreadyPending, SnapshotGone, WouldDropEverything
from quire.core.settings import MaintenanceSettings
from quire.durable.failpoints import armed
from quire.jobs.maintenance import Upkeep
from quire.manifest import tables as t
from quire.manifest.records import JobKind, RetentionRecord, WalState
from quire.pages.snapshot import Snapshot
from quire.testing.manifest import assert_clean
from tests.jobs.checkpoint_child import Owner
from tests.pages.engine_harness import GRACE_SECONDS, Model, Version, assert_reads, image, small_segments, write

WINDOW = 600.0
WINDOWED = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, time_travel_seconds=WINDOW)


@dataclass
class WindowedDatabase:
    """A database with a time-travel window, and the commit time of each of its versions."""

    owner: Owner
    model: Model = field(default_factory=Model)
    times: dict[int, int] = field(default_factory=dict)
    """lsn → ms."""
    readers: list[tuple[Snapshot, Version]] = field(default_factory=list)

    @property
    def now_ms(self) -> int:
        return self.owner.clock.now_ms()

    def write(self, pages: dict[int, bytes], truncate: int | None = None) -> Version:
        version = write(self.owner.database(), self.model, pages, truncate=truncate)
        self.times[version.lsn] = self.now_ms
        return version

    def run(self, kind: JobKind, *, sealed_only: bool = False) -> None:
        with suppress(JobAlreadyPending):
            self.owner.manifest.jobs.enqueue(kind, 1, {"sealed_only": True} if sealed_only else None)
        self.owner.worker().drain()

    def upkeep(self) -> None:
        """A round of retention, and the jobs that follow from it."""
        Upkeep(self.owner.context(), self.owner.worker()).run_once()

    def close_readers(self) -> None:
        for reader, _ in self.readers:
            reader.close()
        self.readers.clear()

    def assert_window(self) -> int:
        """Every version that was current within the window can be opened, by lsn and by time. Returns their number."""
        store, versions, count = self.owner.database(), self.model.versions[1:], 0
        for version, following in zip_longest(versions, versions[1:]):
            until = self.times[following.lsn] if following is not None else self.now_ms + 1
            begins = max(self.times[version.lsn], self.now_ms - int(WINDOW * 1000))
            if until <= begins:
                continue
            count += 1
            for at in (version.lsn, _moment(begins), _moment(until - 1)):
                with store.open_snapshot(at=at) as reader:
                    assert reader.lsn == version.lsn, f"opened at {at}"
                    assert_reads(reader, version)
        for reader, version in self.readers:
            assert_reads(reader, version)
        return count

    def anchors(self) -> list[int]:
        """The anchors of the kept snapshots."""
        return [
            snapshot.anchor_lsn for snapshot in self.owner.manifest.snapshots.of(1) if "time-travel" in snapshot.tags
        ]


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


@pytest.fixture
def windowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WindowedDatabase:
    small_segments(monkeypatch, frames=6)
    owner = Owner(tmp_path, maintenance=WINDOWED)
    owner.database()
    return WindowedDatabase(owner)


def test_within_the_window_every_version_can_be_opened_across_checkpoints_merges_and_truncation(
    windowed: WindowedDatabase,
) -> None:
    for number in range(12):
        windowed.write({page: image() for page in range(number % 5, number % 5 + 4)})
        windowed.owner.clock.advance(20)
        if number % 3 == 2:
            windowed.run(JobKind.CHECKPOINT)
        if number == 8:
            windowed.run(JobKind.MERGE)
        windowed.assert_window()
    assert windowed.assert_window() == 12
    assert len(windowed.anchors()) == 4
    windowed.owner.reopen()
    assert windowed.assert_window() == 12
    windowed.owner.stop()


def test_beyond_the_window_a_version_is_gone_and_its_space_is_reclaimed(windowed: WindowedDatabase) -> None:
    owner = windowed.owner
    versions = []
    for _ in range(6):
        versions.append(windowed.write({page: image() for page in range(10)}))
        windowed.run(JobKind.CHECKPOINT)
        owner.clock.advance(30)
    before = len(owner.promised())
    owner.clock.advance(WINDOW)
    windowed.upkeep()
    owner.settle()
    assert windowed.anchors() == []
    for version in versions[:-1]:
        with pytest.raises(SnapshotGone):
            owner.database().open_snapshot(at=version.lsn)
    assert windowed.assert_window() == 1
    assert len(owner.promised()) < before
    chains = sum(len(owner.chain(slot)) for slot in range(2))
    assert len(owner.promised()) == chains, "only the live database's chunks"
    with owner.manifest.read() as txn:
        rows = [row for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is not WalState.TRUNCATED]
    assert len(rows) <= 1, "the segment that the last checkpoint ended in"
    owner.stop()


def test_a_version_that_was_current_for_longer_than_the_window_is_in_it_until_a_window_after_its_end(
    windowed: WindowedDatabase,
) -> None:
    """It is no longer in the WAL when it is replaced: the chunks and the segment in which they end provide it."""
    owner = windowed.owner
    windowed.write({0: image(), 9: image()})
    old = windowed.write({page: image() for page in range(4)}, truncate=6)
    windowed.run(JobKind.CHECKPOINT)
    for _ in range(5):
        owner.clock.advance(WINDOW)
        windowed.upkeep()
    assert windowed.anchors() == []
    windowed.write({1: image()})
    owner.clock.advance(5)
    assert windowed.assert_window() == 2
    windowed.run(JobKind.CHECKPOINT)
    owner.clock.advance(WINDOW - 10)
    windowed.upkeep()
    assert windowed.assert_window() == 2
    owner.clock.advance(60)
    windowed.upkeep()
    assert windowed.assert_window() == 1
    with pytest.raises(SnapshotGone):
        owner.database().open_snapshot(at=old.lsn)
    owner.stop()


def test_a_checkpoint_after_the_window_keeps_nothing(windowed: WindowedDatabase) -> None:
    windowed.write({0: image()})
    windowed.write({0: image()})
    windowed.owner.clock.advance(WINDOW + 1)
    windowed.run(JobKind.CHECKPOINT)
    assert windowed.anchors() == []
    assert windowed.assert_window() == 1
    windowed.owner.stop()


def test_versions_that_a_reader_keeps_from_being_absorbed_can_be_opened_after_the_floor_is_granted(
    windowed: WindowedDatabase,
) -> None:
    owner = windowed.owner
    for number in range(8):
        windowed.write({page: image() for page in range(4)})
        owner.clock.advance(5)
        if number == 3:
            reader = owner.database().open_snapshot(ttl_seconds=None)
            windowed.readers.append((reader, windowed.model.newest))
    for sealed_only in (False, True, True):
        windowed.run(JobKind.CHECKPOINT, sealed_only=sealed_only)
        assert windowed.assert_window() == 8
    assert len(windowed.anchors()) == 1, "an existing snapshot is not created again"
    windowed.close_readers()
    windowed.run(JobKind.CHECKPOINT)
    assert windowed.assert_window() == 8
    owner.stop()


def test_a_policy_neither_drops_what_is_kept_for_the_window_nor_counts_it(windowed: WindowedDatabase) -> None:
    owner = windowed.owner
    owner.manifest.retention.set(1, RetentionRecord(keep_last=1, keep_named=False))
    for number in range(4):
        windowed.write({0: image()})
        if number % 2:
            owner.engine.snapshot("shop", f"named-{number}")
        windowed.run(JobKind.CHECKPOINT)
        owner.clock.advance(10)
    windowed.upkeep()
    assert [snapshot.name for snapshot in owner.manifest.snapshots.of(1) if snapshot.name] == ["named-3"]
    assert len(windowed.anchors()) == 4
    assert windowed.assert_window() == 4
    owner.clock.advance(100)
    plan = owner.manifest.retention.plan(1, RetentionRecord(keep_seconds=1, keep_named=False))
    assert [snapshot.name for snapshot in plan.dropped] == ["named-3"]
    assert plan.drops_everything, "snapshots kept for the window do not count"
    with pytest.raises(WouldDropEverything):
        owner.manifest.retention.apply(plan)
    owner.clock.advance(WINDOW)
    assert len(owner.manifest.retention.apply(owner.manifest.retention.plan(1))) == 4
    assert [snapshot.name for snapshot in owner.manifest.snapshots.of(1)] == ["named-3"]
    owner.stop()


@pytest.mark.parametrize("point", ["kept", "begun", "stored", "written"])
def test_a_checkpoint_that_fails_keeps_the_old_live_set_once(windowed: WindowedDatabase, point: str) -> None:
    owner = windowed.owner
    for _ in range(3):
        windowed.write({page: image() for page in range(12)})
        owner.clock.advance(5)
    owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1)
    with armed(f"jobs.checkpoint.{point}", "2*raise:EIO"):
        for _ in range(4):
            owner.worker().drain()
            owner.reopen()
            assert windowed.assert_window() == 3
            owner.clock.advance(10)
    assert len(windowed.anchors()) == 1
    assert owner.chain(0), "the checkpoint succeeded in the end"
    owner.stop()


def test_a_fork_of_a_kept_snapshot_is_that_version(windowed: WindowedDatabase) -> None:
    owner = windowed.owner
    windowed.write({page: image() for page in range(12)})
    windowed.run(JobKind.CHECKPOINT)
    version = windowed.write({3: image()}, truncate=9)
    windowed.run(JobKind.CHECKPOINT)
    windowed.write({page: image() for page in range(12)})
    windowed.run(JobKind.CHECKPOINT)
    (snapshot,) = [candidate for candidate in owner.manifest.snapshots.of(1) if candidate.anchor_lsn == version.lsn]
    owner.engine.fork("shop", "branch", at=snapshot.snapshot_id)
    branch, model = owner.database("branch"), Model(versions=[version])
    for _ in range(2):
        with branch.open_snapshot() as reader:
            assert_reads(reader, model.newest)
        owner.checkpoint(branch)
    write(branch, model, {1: image()})
    owner.checkpoint(branch)
    with branch.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    owner.stop()


def test_a_fork_has_a_window_of_its_own_from_where_it_was_forked(windowed: WindowedDatabase) -> None:
    owner = windowed.owner
    windowed.write({page: image() for page in range(12)})
    windowed.run(JobKind.CHECKPOINT)
    at_fork = windowed.write({3: image(), 20: image()})
    branch = owner.engine.open(owner.engine.fork("shop", "branch"))
    versions, model = [at_fork], Model(versions=[at_fork])
    for number in range(6):
        owner.clock.advance(20)
        versions.append(write(branch, model, {page: image() for page in (number, 20)}))
        windowed.write({number: image()})
        if number % 2:
            owner.checkpoint(branch)
            windowed.run(JobKind.CHECKPOINT)
        for version in versions:
            with branch.open_snapshot(at=version.lsn) as reader:
                assert reader.lsn == version.lsn
                assert_reads(reader, version)
        windowed.assert_window()
    owner.clock.advance(WINDOW + 1)
    windowed.upkeep()
    owner.manifest.drop_db(1, snapshots=True).result()
    owner.settle()
    with branch.open_snapshot() as reader:
        assert_reads(reader, versions[-1])
    owner.stop()


def test_commits_just_before_the_floor_is_granted_are_kept(windowed: WindowedDatabase) -> None:
    """They are in a segment that no checkpoint can take yet, and below a floor under which no lease is granted."""
    owner = windowed.owner
    original = owner.engine.floor

    def floor(db_id: int) -> int:
        for _ in range(2):
            windowed.write({0: image()})
            owner.clock.advance(1)
        return original(db_id)

    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner.engine, "floor", floor)
            windowed.run(JobKind.CHECKPOINT)
        windowed.assert_window()
    assert windowed.assert_window() == 4
    owner.stop()


def _random_steps(windowed: WindowedDatabase, rng: random.Random, steps: int) -> None:
    """Random steps in any order; after each, every version of the window can be opened."""
    owner = windowed.owner
    for _ in range(steps):
        step = rng.random()
        if step < 0.45:
            owner.clock.advance(rng.choice([0, 0.001, 1, 20, 70]))
            cut = rng.randint(1, 20) if rng.random() < 0.15 else None
            windowed.write({rng.randint(0, 27): image() for _ in range(rng.randint(1, 9))}, truncate=cut)
        elif step < 0.65:
            windowed.run(JobKind.CHECKPOINT)
        elif step < 0.7:
            owner.engine.flush(1)
            windowed.run(JobKind.CHECKPOINT, sealed_only=True)
        elif step < 0.75:
            windowed.run(JobKind.MERGE)
        elif step < 0.8:
            reader = owner.database().open_snapshot(ttl_seconds=None)
            windowed.readers.append((reader, windowed.model.newest))
        elif step < 0.85:
            windowed.close_readers()
        elif step < 0.9:
            owner.clock.advance(rng.choice([30, 200, WINDOW]))
            windowed.upkeep()
        elif step < 0.94:
            windowed.readers.clear()
            owner.reopen()
        elif step < 0.97:
            windowed.readers.clear()
            owner.crash()
        else:
            point = rng.choice(["kept", "begun", "planned", "encoded", "stored", "written"])
            with armed(f"jobs.checkpoint.{point}", "1*raise:EIO"):
                windowed.run(JobKind.CHECKPOINT)
        windowed.assert_window()
    assert_clean(owner.manifest, leaks=True)


def _assert_only_newest_remains(windowed: WindowedDatabase) -> None:
    """After another window only the newest version remains, with the bytes it needs."""
    owner = windowed.owner
    windowed.close_readers()
    windowed.run(JobKind.CHECKPOINT)
    owner.clock.advance(WINDOW + 400)
    windowed.run(JobKind.CHECKPOINT)
    windowed.upkeep()
    owner.settle()
    windowed.assert_window()
    assert windowed.anchors() == []
    assert len(owner.promised()) == sum(len(owner.chain(slot)) for slot in range(8))
    owner.stop()


@pytest.mark.parametrize("seed", range(3))
def test_after_any_steps_the_window_is_complete(windowed: WindowedDatabase, seed: int) -> None:
    _random_steps(windowed, random.Random(seed), 25)
    _assert_only_newest_remains(windowed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_after_any_steps_the_window_is_complete(windowed: WindowedDatabase, seed: int) -> None:
    _random_steps(windowed, random.Random(seed), 100)
    _assert_only_newest_remains(windowed)


@pytest.mark.slow
def test_long_during_writes_and_checkpoints_every_version_of_the_window_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real time and threads. Between the moment a checkpoint gets its floor and the moment it has kept what is
    below, a version is refused for some milliseconds, and the reader retries. It never gets a different version."""
    small_segments(monkeypatch, frames=30)
    owner = Owner(tmp_path, clock=SystemClock(), ticking=True, maintenance=WINDOWED)  # type: ignore[arg-type]
    store, model, deadline, read_count, errors = (
        owner.database(),
        Model(),
        time.monotonic() + 8,
        [0],
        list[BaseException](),
    )

    def writing() -> None:
        while time.monotonic() < deadline:
            write(store, model, {random.randint(0, 40): image() for _ in range(5)})

    def checkpointing() -> None:
        while time.monotonic() < deadline:
            with suppress(JobAlreadyPending):
                owner.manifest.jobs.enqueue(random.choice([JobKind.CHECKPOINT, JobKind.MERGE]), store.db_id)
            owner.worker().drain()
            time.sleep(0.02)

    def reading() -> None:
        while time.monotonic() < deadline:
            if len(model.versions) > 2:
                version = random.choice(model.versions[1:-1])
                with store.open_snapshot(at=version.lsn) as reader:
                    assert reader.lsn == version.lsn
                    assert_reads(reader, version)
                read_count[0] += 1

    def record_errors(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=record_errors, args=(work,)) for work in (writing, checkpointing, reading, reading)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert read_count[0] > 10
    owner.stop()


def test_a_database_is_dropped_with_its_window(windowed: WindowedDatabase) -> None:
    """Versions kept for the window have no name that a user chose: they do not prevent the drop."""
    windowed.write({0: image()})
    windowed.run(JobKind.CHECKPOINT)
    windowed.write({0: image()})
    windowed.run(JobKind.CHECKPOINT)
    assert windowed.anchors()
    windowed.owner.manifest.drop_db(1).result()
    windowed.owner.stop()
