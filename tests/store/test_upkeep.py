"""An owner's maintenance over simulated time: the expected snapshots exist, and the data of the others is deleted."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

import quire
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.names import object_key
from quire.jobs.maintenance import Upkeep
from quire.manifest.jobqueue import LEASE_SECONDS
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.records import AuditAction, ChunkRecord, JobKind, JobState, Residency, RetentionRecord
from quire.objects.api import list_objects
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.manifest.checkpoints import FullChunk, checkpoint_apply
from tests.manifest.helpers import eventually

HOUR, DAY = 3_600_000, 86_400_000
START = int(datetime(2024, 12, 16, tzinfo=UTC).timestamp() * 1000)
"""A Monday, two weeks before a New Year."""
QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
POLICY = RetentionRecord(hourly=24, daily=7, weekly=4, schedules=["hourly", "daily", "weekly"])
PERIODS: dict[str, Callable[[int], int]] = {
    "hourly": lambda at: at // HOUR,
    "daily": lambda at: at // DAY,
    "weekly": lambda at: (at // DAY + 3) // 7,
}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@dataclass
class Shop:
    """A database that is checkpointed now and then, and a model of its snapshots."""

    store: Store
    clock: ManualClock
    generation: int = 0
    scheduled: list[tuple[int, str, int]] = field(default_factory=list)
    """(time, name, generation) of every scheduled snapshot, in order of creation."""

    def checkpoint(self) -> None:
        manifest = self.store.manifest
        with manifest.read() as txn:
            wal = txn.wal_state(1)
        assert wal is not None
        lsn, self.generation = wal.last_applied_lsn + 1, manifest.reserve_generation(1)
        self.store.objects.put(self.name(self.generation), b"chunk")
        manifest.submit([AdvanceWal(1, 0, lsn, lsn, lsn)]).result()
        chunk = FullChunk(slot=0, record=ChunkRecord(Residency.REMOTE_ARCHIVED, 5, self.clock.now_ms()))
        checkpoint_apply(manifest, 1, self.generation, [chunk], covered_lsn=lsn).result()

    @staticmethod
    def name(generation: int) -> str:
        return object_key(ArtifactKey(1, ArtifactKind.BASE, 0, generation))

    def round(self) -> None:
        """Record the snapshots that a round should create, then run the round."""
        now = self.clock.now_ms()
        moment = datetime.fromtimestamp(now / 1000, UTC)
        last = {
            schedule: period(self.scheduled[-1][0]) if self.scheduled else -1 for schedule, period in PERIODS.items()
        }
        for schedule, name in (
            ("hourly", f"{moment:hourly-%Y-%m-%dT%H}"),
            ("daily", f"{moment:daily-%Y-%m-%d}"),
            ("weekly", f"{moment:weekly-%G-W%V}"),
        ):
            if PERIODS[schedule](now) > last[schedule]:
                self.scheduled.append((now, name, self.generation))
        self.store.maintain()

    def expected_snapshots(self) -> dict[str, int]:
        """Name → generation of the snapshots that the policy keeps: for each bucket, the one that was created for
        it."""
        expected: dict[str, int] = {}
        for schedule, period in PERIODS.items():
            of_schedule = [snapshot for snapshot in self.scheduled if snapshot[1].startswith(schedule)]
            newest = {period(at): (name, generation) for at, name, generation in [*self.scheduled, *of_schedule]}
            expected |= dict(newest[bucket] for bucket in sorted(newest)[-getattr(POLICY, schedule) :])
        return expected

    def objects(self) -> set[str]:
        return {info.key for info in list_objects(self.store.objects)}


def test_after_a_month_exactly_the_right_snapshots_and_objects_exist(tmp_path: Path, clock: ManualClock) -> None:
    """Around a New Year, with a restart, and with an owner that was down for two days."""
    loaded = set(sys.modules)
    home = str(tmp_path / "store")
    store = quire.open(home, settings=QUIET, clock=clock)
    store.create("shop", "pages")
    shop = Shop(store, clock)
    shop.checkpoint()
    store.manifest.snapshots.publish("shop", "before-christmas")
    store.manifest.retention.set("shop", POLICY)
    for hour in range(31 * 24):
        if hour % 6 == 0:
            shop.checkpoint()
        if not 20 * 24 <= hour < 22 * 24:
            shop.round()
        if hour in (100, 500):
            shop.store.close()
            shop.store = quire.open(home, settings=QUIET, clock=clock)
        clock.advance(3600)
    shop.round()
    manifest = shop.store.manifest
    generations = {info.name: info.generation for info in manifest.snapshots.of("shop")}
    assert generations == {**shop.expected_snapshots(), "before-christmas": 1}
    # Computed by hand: the oldest day, the week of New Year, which ended when the owner went down, and the oldest week.
    assert {"daily-2025-01-10", "weekly-2025-W01", "weekly-2024-W52"} < generations.keys()
    held = {shop.name(generation) for generation in {*generations.values(), shop.generation}}
    assert held <= shop.objects(), "artifacts released just now may still exist"
    clock.advance(61)
    shop.store.maintain()
    assert shop.objects() == held
    actions = [entry.action for entry in manifest.audit("shop")]
    created, dropped = actions.count(AuditAction.SNAPSHOT_CREATED), actions.count(AuditAction.SNAPSHOT_DROPPED)
    assert created - dropped == len(generations)
    assert created == len(shop.scheduled) + 1, "no snapshot is created twice, not even after a restart"
    assert actions.count(AuditAction.DELETED) == shop.generation - len(held)
    assert manifest.check() == []
    assert "pyspark" not in sys.modules.keys() - loaded, "without Spark"
    shop.store.close()


def test_bytes_of_dropped_snapshots_are_deleted_after_the_grace_period_and_not_before(
    path: Path, clock: ManualClock
) -> None:
    with quire.open(path, settings=QUIET, clock=clock) as store:
        store.create("shop", "pages")
        shop = Shop(store, clock)
        shop.checkpoint()
        store.manifest.snapshots.publish("shop", "s")
        shop.checkpoint()
        clock.advance(1)
        plan = store.manifest.retention.plan("shop", RetentionRecord(keep_seconds=1, keep_named=False))
        store.manifest.retention.apply(plan, force=True)
        for seconds, remaining in ((0, 2), (59, 2), (1, 1)):
            clock.advance(seconds)
            store.maintain()
            assert len(shop.objects()) == remaining


def test_maintenance_does_not_drop_the_last_snapshots(path: Path, clock: ManualClock) -> None:
    with quire.open(path, settings=QUIET, clock=clock) as store:
        for name in ("careful", "normal"):
            store.create(name, "pages")
            for _ in range(3):
                store.manifest.snapshots.publish(name)
        store.manifest.retention.set("careful", RetentionRecord(keep_seconds=60))
        store.manifest.retention.set("normal", RetentionRecord(keep_last=2))
        clock.advance(3600)
        assert store.maintain().dropped == 1
        assert [len(store.manifest.snapshots.of(name)) for name in ("careful", "normal")] == [3, 2]


def test_a_round_recovers_lost_leases_and_runs_pending_jobs(path: Path, clock: ManualClock) -> None:
    with quire.open(path, settings=QUIET, clock=clock) as store:
        store.create("shop", "pages")
        store.drop("shop")
        jobs = store.manifest.jobs
        job = jobs.claim("a worker far away", [JobKind.DELETE])
        assert job is not None
        assert store.maintain().leases_lost == 0
        clock.advance(LEASE_SECONDS)
        assert store.maintain().leases_lost == 1
        clock.advance(LEASE_SECONDS)
        store.maintain()
        assert jobs.get(job.job_id).state is JobState.SUCCEEDED
        assert store.info().dropped == 0


def test_the_audit_covers_its_configured_period(path: Path, clock: ManualClock) -> None:
    with quire.open(path, settings=QUIET, clock=clock) as store:
        store.create("shop", "pages")
        store.manifest.snapshots.publish("shop", "old")
        clock.advance(399 * 86_400)
        store.manifest.snapshots.publish("shop", "young")
        assert store.maintain().audit_pruned == 0
        clock.advance(86_401)
        assert store.maintain().audit_pruned == 1
        assert [entry.subject for entry in store.manifest.audit("shop")] == ["young"]


def test_the_background_thread_does_the_same(path: Path) -> None:
    busy = StoreSettings(maintenance=MaintenanceSettings(interval_seconds=0.02, delete_grace_seconds=0))
    with quire.open(path, settings=busy) as store:
        store.create("shop", "pages")
        store.create("old", "pages")
        store.manifest.retention.set("shop", RetentionRecord(schedules=["daily"]))
        store.drop("old")
        assert eventually(lambda: len(store.manifest.snapshots.of("shop")) >= 1)
        assert eventually(lambda: store.info().dropped == 0)


def test_expired_snapshots_are_dropped_even_if_the_policy_is_refused(path: Path, clock: ManualClock) -> None:
    """Hazard: a policy that would drop the last snapshots kept those of the time-travel window for ever."""
    with quire.open(path, settings=QUIET, clock=clock) as store:
        store.create("shop", "pages")
        manual = store.manifest.snapshots.publish("shop")
        store.manifest.snapshots.publish("shop", expires_at_ms=clock.now_ms() + 1000)
        store.manifest.retention.set("shop", RetentionRecord(keep_seconds=1))
        clock.advance(3600)
        store.maintain()
        assert [info.snapshot_id for info in store.manifest.snapshots.of("shop")] == [manual.snapshot_id]


def test_an_hour_that_has_its_snapshot_gets_no_other_from_the_next_owner(path: Path, clock: ManualClock) -> None:
    """Hazard: retention drops all but the newest of a bucket, and each new owner creates the dropped one again."""
    for number in range(4):
        with quire.open(path, settings=QUIET, clock=clock) as store:
            if number == 0:
                store.create("shop", "pages")
                store.manifest.retention.set("shop", RetentionRecord(hourly=24, daily=7, schedules=["hourly", "daily"]))
            created = store.maintain().snapshots
            assert (created > 0) == (number == 0)
        clock.advance(60)


def test_upkeep_that_could_not_be_started_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: an error in the timer's thread ended it, and the store had no maintenance until it was opened again."""
    start, failures = Upkeep.start, [RuntimeError("can't start new thread")]

    def start_later(upkeep: Upkeep) -> None:
        if failures:
            raise failures.pop()
        start(upkeep)

    monkeypatch.setattr(Upkeep, "start", start_later)
    settings = StoreSettings(maintenance=MaintenanceSettings(interval_seconds=0.02))
    with quire.open(tmp_path / "store", settings=settings):
        assert eventually(lambda: any(thread.name == "quire-upkeep" for thread in threading.enumerate()))
    assert not failures
