"""An owner's maintenance over simulated time: the snapshots that should be there are, and the bytes of the others go."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

import quire
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.names import object_key
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
    """A database that is checkpointed now and then, and what its snapshots must be."""

    store: Store
    clock: ManualClock
    generation: int = 0
    made: list[tuple[int, str, int]] = field(default_factory=list)
    """(moment, name, generation) of every scheduled snapshot, in the order in which they are made."""

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
        """What a round should make, then the round."""
        now = self.clock.now_ms()
        moment = datetime.fromtimestamp(now / 1000, UTC)
        last = {schedule: period(self.made[-1][0]) if self.made else -1 for schedule, period in PERIODS.items()}
        for schedule, name in (
            ("hourly", f"{moment:hourly-%Y-%m-%dT%H}"),
            ("daily", f"{moment:daily-%Y-%m-%d}"),
            ("weekly", f"{moment:weekly-%G-W%V}"),
        ):
            if PERIODS[schedule](now) > last[schedule]:
                self.made.append((now, name, self.generation))
        self.store.maintain()

    def kept(self) -> dict[str, int]:
        """Name → generation of the snapshots that the policy keeps: of each bucket the one that was made for it."""
        found: dict[str, int] = {}
        for schedule, period in PERIODS.items():
            own = [each for each in self.made if each[1].startswith(schedule)]
            newest = {period(at): (name, generation) for at, name, generation in [*self.made, *own]}
            found |= dict(newest[each] for each in sorted(newest)[-getattr(POLICY, schedule) :])
        return found

    def objects(self) -> set[str]:
        return {info.key for info in list_objects(self.store.objects)}


def test_after_a_month_exactly_the_right_snapshots_and_objects_are_there(tmp_path: Path, clock: ManualClock) -> None:
    """Around a New Year, with a restart, and with an owner that was away for two days."""
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
    found = {info.name: info.generation for info in manifest.snapshots.of("shop")}
    assert found == {**shop.kept(), "before-christmas": 1}
    # By hand: the oldest day, the week of New Year, which ended when the owner went away, and the oldest week.
    assert {"daily-2025-01-10", "weekly-2025-W01", "weekly-2024-W52"} < found.keys()
    held = {shop.name(generation) for generation in {*found.values(), shop.generation}}
    assert held <= shop.objects(), "what was let go just now may still be there too"
    clock.advance(61)
    shop.store.maintain()
    assert shop.objects() == held
    told = [entry.action for entry in manifest.audit("shop")]
    created, dropped = told.count(AuditAction.SNAPSHOT_CREATED), told.count(AuditAction.SNAPSHOT_DROPPED)
    assert created - dropped == len(found)
    assert created == len(shop.made) + 1, "none twice, not even after a restart"
    assert told.count(AuditAction.DELETED) == shop.generation - len(held)
    assert manifest.check() == []
    assert "pyspark" not in sys.modules.keys() - loaded, "all that without Spark"
    shop.store.close()


def test_bytes_of_dropped_snapshots_go_after_the_grace_and_not_before(path: Path, clock: ManualClock) -> None:
    with quire.open(path, settings=QUIET, clock=clock) as store:
        store.create("shop", "pages")
        shop = Shop(store, clock)
        shop.checkpoint()
        store.manifest.snapshots.publish("shop", "s")
        shop.checkpoint()
        clock.advance(1)
        plan = store.manifest.retention.plan("shop", RetentionRecord(keep_seconds=1, keep_named=False))
        store.manifest.retention.apply(plan, force=True)
        for seconds, there in ((0, 2), (59, 2), (1, 1)):
            clock.advance(seconds)
            store.maintain()
            assert len(shop.objects()) == there


def test_upkeep_does_not_take_the_last_snapshots(path: Path, clock: ManualClock) -> None:
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


def test_a_round_takes_back_lost_leases_and_runs_what_is_pending(path: Path, clock: ManualClock) -> None:
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


def test_the_audit_reaches_back_as_far_as_it_should(path: Path, clock: ManualClock) -> None:
    with quire.open(path, settings=QUIET, clock=clock) as store:
        store.create("shop", "pages")
        store.manifest.snapshots.publish("shop", "old")
        clock.advance(399 * 86_400)
        store.manifest.snapshots.publish("shop", "young")
        assert store.maintain().audit_pruned == 0
        clock.advance(86_401)
        assert store.maintain().audit_pruned == 1
        assert [entry.subject for entry in store.manifest.audit("shop")] == ["young"]


def test_the_background_does_all_that_by_itself(path: Path) -> None:
    busy = StoreSettings(maintenance=MaintenanceSettings(interval_seconds=0.02, delete_grace_seconds=0))
    with quire.open(path, settings=busy) as store:
        store.create("shop", "pages")
        store.create("old", "pages")
        store.manifest.retention.set("shop", RetentionRecord(schedules=["daily"]))
        store.drop("old")
        assert eventually(lambda: len(store.manifest.snapshots.of("shop")) >= 1)
        assert eventually(lambda: store.info().dropped == 0)


def test_what_has_expired_goes_even_where_the_policy_is_refused(path: Path, clock: ManualClock) -> None:
    """Hazard: a policy that would take the last snapshots kept those of the time-travel window for ever."""
    with quire.open(path, settings=QUIET, clock=clock) as store:
        store.create("shop", "pages")
        kept = store.manifest.snapshots.publish("shop")
        store.manifest.snapshots.publish("shop", expires_at_ms=clock.now_ms() + 1000)
        store.manifest.retention.set("shop", RetentionRecord(keep_seconds=1))
        clock.advance(3600)
        store.maintain()
        assert [info.snapshot_id for info in store.manifest.snapshots.of("shop")] == [kept.snapshot_id]


def test_an_hour_that_has_its_snapshot_gets_no_other_from_the_next_owner(path: Path, clock: ManualClock) -> None:
    """Hazard: retention drops all but the newest of a bucket, and each new owner makes again what was dropped."""
    for number in range(4):
        with quire.open(path, settings=QUIET, clock=clock) as store:
            if number == 0:
                store.create("shop", "pages")
                store.manifest.retention.set("shop", RetentionRecord(hourly=24, daily=7, schedules=["hourly", "daily"]))
            made = store.maintain().snapshots
            assert (made > 0) == (number == 0)
        clock.advance(60)
