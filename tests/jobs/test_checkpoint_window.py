"""The window of time travel: every version in it is there, across checkpoints and truncation; beyond it nothing (P14)."""

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
from tests.pages.world import GRACE_SECONDS, Model, Version, assert_reads, image, small_segments, write

WINDOW = 600.0
WINDOWED = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS, time_travel_seconds=WINDOW)


@dataclass
class Traveller:
    """A database with a window of time travel, and when each of its versions was made."""

    owner: Owner
    model: Model = field(default_factory=Model)
    times: dict[int, int] = field(default_factory=dict)
    """lsn → ms."""
    readers: list[tuple[Snapshot, Version]] = field(default_factory=list)

    @property
    def now_ms(self) -> int:
        return self.owner.clock.now_ms()

    def write(self, pages: dict[int, bytes], truncate: int | None = None) -> Version:
        made = write(self.owner.database(), self.model, pages, truncate=truncate)
        self.times[made.lsn] = self.now_ms
        return made

    def run(self, kind: JobKind, *, sealed_only: bool = False) -> None:
        with suppress(JobAlreadyPending):
            self.owner.manifest.jobs.enqueue(kind, 1, {"sealed_only": True} if sealed_only else None)
        self.owner.worker().drain()

    def upkeep(self) -> None:
        """A round of retention, and what follows from it."""
        Upkeep(self.owner.context(), self.owner.worker()).run_once()

    def close_readers(self) -> None:
        for reader, _ in self.readers:
            reader.close()
        self.readers.clear()

    def look(self) -> int:
        """Every version that was current within the window is there, by lsn and by time; how many there are."""
        store, versions, found = self.owner.database(), self.model.versions[1:], 0
        for version, following in zip_longest(versions, versions[1:]):
            until = self.times[following.lsn] if following is not None else self.now_ms + 1
            begins = max(self.times[version.lsn], self.now_ms - int(WINDOW * 1000))
            if until <= begins:
                continue
            found += 1
            for at in (version.lsn, _moment(begins), _moment(until - 1)):
                with store.open_snapshot(at=at) as reader:
                    assert reader.lsn == version.lsn, f"asked for {at}"
                    assert_reads(reader, version)
        for reader, version in self.readers:
            assert_reads(reader, version)
        return found

    def windows(self) -> list[int]:
        """The anchors that are kept."""
        return [each.anchor_lsn for each in self.owner.manifest.snapshots.of(1) if "time-travel" in each.tags]


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=ms)


@pytest.fixture
def traveller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Traveller:
    small_segments(monkeypatch, frames=6)
    owner = Owner(tmp_path, maintenance=WINDOWED)
    owner.database()
    return Traveller(owner)


def test_within_the_window_every_version_is_there_across_checkpoints_merges_and_truncation(
    traveller: Traveller,
) -> None:
    for number in range(12):
        traveller.write({page: image() for page in range(number % 5, number % 5 + 4)})
        traveller.owner.clock.advance(20)
        if number % 3 == 2:
            traveller.run(JobKind.CHECKPOINT)
        if number == 8:
            traveller.run(JobKind.MERGE)
        traveller.look()
    assert traveller.look() == 12
    assert len(traveller.windows()) == 4
    traveller.owner.reopen()
    assert traveller.look() == 12
    traveller.owner.stop()


def test_beyond_the_window_a_version_is_gone_and_its_bytes_are_given_back(traveller: Traveller) -> None:
    owner = traveller.owner
    versions = []
    for _ in range(6):
        versions.append(traveller.write({page: image() for page in range(10)}))
        traveller.run(JobKind.CHECKPOINT)
        owner.clock.advance(30)
    before = len(owner.promised())
    owner.clock.advance(WINDOW)
    traveller.upkeep()
    owner.settle()
    assert traveller.windows() == []
    for version in versions[:-1]:
        with pytest.raises(SnapshotGone):
            owner.database().open_snapshot(at=version.lsn)
    assert traveller.look() == 1
    assert len(owner.promised()) < before
    chains = sum(len(owner.chain(slot)) for slot in range(2))
    assert len(owner.promised()) == chains, "only what the live database consists of"
    with owner.manifest.read() as txn:
        rows = [row for _, row in txn.scan(t.WAL_CATALOG, 1) if row.state is not WalState.TRUNCATED]
    assert len(rows) <= 1, "the segment that the last checkpoint ended in"
    owner.stop()


def test_a_version_that_was_current_for_longer_than_the_window_is_in_it_until_a_window_after_its_end(
    traveller: Traveller,
) -> None:
    """It is in no WAL any more when it is replaced: the chunks and the segment that they end in show it."""
    owner = traveller.owner
    traveller.write({0: image(), 9: image()})
    old = traveller.write({page: image() for page in range(4)}, truncate=6)
    traveller.run(JobKind.CHECKPOINT)
    for _ in range(5):
        owner.clock.advance(WINDOW)
        traveller.upkeep()
    assert traveller.windows() == []
    traveller.write({1: image()})
    owner.clock.advance(5)
    assert traveller.look() == 2
    traveller.run(JobKind.CHECKPOINT)
    owner.clock.advance(WINDOW - 10)
    traveller.upkeep()
    assert traveller.look() == 2
    owner.clock.advance(60)
    traveller.upkeep()
    assert traveller.look() == 1
    with pytest.raises(SnapshotGone):
        owner.database().open_snapshot(at=old.lsn)
    owner.stop()


def test_a_checkpoint_after_the_window_keeps_nothing(traveller: Traveller) -> None:
    traveller.write({0: image()})
    traveller.write({0: image()})
    traveller.owner.clock.advance(WINDOW + 1)
    traveller.run(JobKind.CHECKPOINT)
    assert traveller.windows() == []
    assert traveller.look() == 1
    traveller.owner.stop()


def test_versions_that_a_reader_keeps_from_being_absorbed_are_there_though_the_floor_was_given_out(
    traveller: Traveller,
) -> None:
    owner = traveller.owner
    for number in range(8):
        traveller.write({page: image() for page in range(4)})
        owner.clock.advance(5)
        if number == 3:
            reader = owner.database().open_snapshot(ttl_seconds=None)
            traveller.readers.append((reader, traveller.model.newest))
    for sealed_only in (False, True, True):
        traveller.run(JobKind.CHECKPOINT, sealed_only=sealed_only)
        assert traveller.look() == 8
    assert len(traveller.windows()) == 1, "one that is there already is not made again"
    traveller.close_readers()
    traveller.run(JobKind.CHECKPOINT)
    assert traveller.look() == 8
    owner.stop()


def test_a_policy_neither_drops_what_is_kept_for_the_window_nor_counts_it(traveller: Traveller) -> None:
    owner = traveller.owner
    owner.manifest.retention.set(1, RetentionRecord(keep_last=1, keep_named=False))
    for number in range(4):
        traveller.write({0: image()})
        if number % 2:
            owner.engine.snapshot("shop", f"named-{number}")
        traveller.run(JobKind.CHECKPOINT)
        owner.clock.advance(10)
    traveller.upkeep()
    assert [each.name for each in owner.manifest.snapshots.of(1) if each.name] == ["named-3"]
    assert len(traveller.windows()) == 4
    assert traveller.look() == 4
    owner.clock.advance(100)
    plan = owner.manifest.retention.plan(1, RetentionRecord(keep_seconds=1, keep_named=False))
    assert [each.name for each in plan.dropped] == ["named-3"]
    assert plan.drops_everything, "what is kept for the window is nobody's snapshot"
    with pytest.raises(WouldDropEverything):
        owner.manifest.retention.apply(plan)
    owner.clock.advance(WINDOW)
    assert len(owner.manifest.retention.apply(owner.manifest.retention.plan(1))) == 4
    assert [each.name for each in owner.manifest.snapshots.of(1)] == ["named-3"]
    owner.stop()


@pytest.mark.parametrize("point", ["kept", "begun", "stored", "written"])
def test_a_checkpoint_that_fails_keeps_the_old_live_set_once(traveller: Traveller, point: str) -> None:
    owner = traveller.owner
    for _ in range(3):
        traveller.write({page: image() for page in range(12)})
        owner.clock.advance(5)
    owner.manifest.jobs.enqueue(JobKind.CHECKPOINT, 1)
    with armed(f"jobs.checkpoint.{point}", "2*raise:EIO"):
        for _ in range(4):
            owner.worker().drain()
            owner.reopen()
            assert traveller.look() == 3
            owner.clock.advance(10)
    assert len(traveller.windows()) == 1
    assert owner.chain(0), "it has succeeded at last"
    owner.stop()


def test_a_fork_of_a_kept_snapshot_is_that_version(traveller: Traveller) -> None:
    owner = traveller.owner
    traveller.write({page: image() for page in range(12)})
    traveller.run(JobKind.CHECKPOINT)
    kept = traveller.write({3: image()}, truncate=9)
    traveller.run(JobKind.CHECKPOINT)
    traveller.write({page: image() for page in range(12)})
    traveller.run(JobKind.CHECKPOINT)
    (snapshot,) = [each for each in owner.manifest.snapshots.of(1) if each.anchor_lsn == kept.lsn]
    owner.engine.fork("shop", "branch", at=snapshot.snapshot_id)
    branch, model = owner.database("branch"), Model(versions=[kept])
    for _ in range(2):
        with branch.open_snapshot() as reader:
            assert_reads(reader, model.newest)
        owner.checkpoint(branch)
    write(branch, model, {1: image()})
    owner.checkpoint(branch)
    with branch.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    owner.stop()


def test_a_fork_has_a_window_of_its_own_from_where_it_was_forked(traveller: Traveller) -> None:
    owner = traveller.owner
    traveller.write({page: image() for page in range(12)})
    traveller.run(JobKind.CHECKPOINT)
    at_fork = traveller.write({3: image(), 20: image()})
    branch = owner.engine.open(owner.engine.fork("shop", "branch"))
    versions, model = [at_fork], Model(versions=[at_fork])
    for number in range(6):
        owner.clock.advance(20)
        versions.append(write(branch, model, {page: image() for page in (number, 20)}))
        traveller.write({number: image()})
        if number % 2:
            owner.checkpoint(branch)
            traveller.run(JobKind.CHECKPOINT)
        for version in versions:
            with branch.open_snapshot(at=version.lsn) as reader:
                assert reader.lsn == version.lsn
                assert_reads(reader, version)
        traveller.look()
    owner.clock.advance(WINDOW + 1)
    traveller.upkeep()
    owner.manifest.drop_db(1, snapshots=True).result()
    owner.settle()
    with branch.open_snapshot() as reader:
        assert_reads(reader, versions[-1])
    owner.stop()


def test_commits_that_come_just_before_the_floor_is_given_out_are_kept_too(traveller: Traveller) -> None:
    """They are in a segment that no checkpoint can take yet, and below a floor that nobody gets a lease under."""
    owner = traveller.owner
    real = owner.engine.floor

    def floor(db_id: int) -> int:
        for _ in range(2):
            traveller.write({0: image()})
            owner.clock.advance(1)
        return real(db_id)

    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner.engine, "floor", floor)
            traveller.run(JobKind.CHECKPOINT)
        traveller.look()
    assert traveller.look() == 4
    owner.stop()


def _journey(traveller: Traveller, rng: random.Random, steps: int) -> None:
    """Anything in any order; everything in the window is there at any time."""
    owner = traveller.owner
    for _ in range(steps):
        step = rng.random()
        if step < 0.45:
            owner.clock.advance(rng.choice([0, 0.001, 1, 20, 70]))
            cut = rng.randint(1, 20) if rng.random() < 0.15 else None
            traveller.write({rng.randint(0, 27): image() for _ in range(rng.randint(1, 9))}, truncate=cut)
        elif step < 0.65:
            traveller.run(JobKind.CHECKPOINT)
        elif step < 0.7:
            owner.engine.flush(1)
            traveller.run(JobKind.CHECKPOINT, sealed_only=True)
        elif step < 0.75:
            traveller.run(JobKind.MERGE)
        elif step < 0.8:
            reader = owner.database().open_snapshot(ttl_seconds=None)
            traveller.readers.append((reader, traveller.model.newest))
        elif step < 0.85:
            traveller.close_readers()
        elif step < 0.9:
            owner.clock.advance(rng.choice([30, 200, WINDOW]))
            traveller.upkeep()
        elif step < 0.94:
            traveller.readers.clear()
            owner.reopen()
        elif step < 0.97:
            traveller.readers.clear()
            owner.crash()
        else:
            point = rng.choice(["kept", "begun", "planned", "encoded", "stored", "written"])
            with armed(f"jobs.checkpoint.{point}", "1*raise:EIO"):
                traveller.run(JobKind.CHECKPOINT)
        traveller.look()
    assert_clean(owner.manifest, leaks=True)


def _arrive(traveller: Traveller) -> None:
    """A window later only the newest version is left, and the bytes it needs."""
    owner = traveller.owner
    traveller.close_readers()
    traveller.run(JobKind.CHECKPOINT)
    owner.clock.advance(WINDOW + 400)
    traveller.run(JobKind.CHECKPOINT)
    traveller.upkeep()
    owner.settle()
    traveller.look()
    assert traveller.windows() == []
    assert len(owner.promised()) == sum(len(owner.chain(slot)) for slot in range(8))
    owner.stop()


@pytest.mark.parametrize("seed", range(3))
def test_on_any_journey_the_window_is_whole(traveller: Traveller, seed: int) -> None:
    _journey(traveller, random.Random(seed), 25)
    _arrive(traveller)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_long_on_any_journey_the_window_is_whole(traveller: Traveller, seed: int) -> None:
    _journey(traveller, random.Random(seed), 100)
    _arrive(traveller)


@pytest.mark.slow
def test_long_while_others_write_and_checkpoint_every_version_of_the_window_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real time and real threads. Between the moment a checkpoint is given its floor and the moment it has kept what lies
    below, a version is refused for some milliseconds: then it is asked for again. It is never another one."""
    small_segments(monkeypatch, frames=30)
    owner = Owner(tmp_path, clock=SystemClock(), ticking=True, maintenance=WINDOWED)  # type: ignore[arg-type]
    store, model, ends, seen, faults = owner.database(), Model(), time.monotonic() + 8, [0], list[BaseException]()

    def writing() -> None:
        while time.monotonic() < ends:
            write(store, model, {random.randint(0, 40): image() for _ in range(5)})

    def checkpointing() -> None:
        while time.monotonic() < ends:
            with suppress(JobAlreadyPending):
                owner.manifest.jobs.enqueue(random.choice([JobKind.CHECKPOINT, JobKind.MERGE]), store.db_id)
            owner.worker().drain()
            time.sleep(0.02)

    def reading() -> None:
        while time.monotonic() < ends:
            if len(model.versions) > 2:
                version = random.choice(model.versions[1:-1])
                with store.open_snapshot(at=version.lsn) as reader:
                    assert reader.lsn == version.lsn
                    assert_reads(reader, version)
                seen[0] += 1

    def safely(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=safely, args=(each,)) for each in (writing, checkpointing, reading, reading)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    assert seen[0] > 10
    owner.stop()


def test_a_database_is_dropped_with_its_window(traveller: Traveller) -> None:
    """Nobody asked for those versions to be kept by name: they do not stand in the way."""
    traveller.write({0: image()})
    traveller.run(JobKind.CHECKPOINT)
    traveller.write({0: image()})
    traveller.run(JobKind.CHECKPOINT)
    assert traveller.windows()
    traveller.owner.manifest.drop_db(1).result()
    traveller.owner.stop()
