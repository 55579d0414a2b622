"""Retention: which snapshots each rule keeps, what a plan shows, and which policies are rejected."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import (
    DatabaseTombstoned,
    InvalidInput,
    StalePlan,
    UnknownDatabase,
    UnknownSnapshot,
    WouldDropEverything,
)
from quire.manifest import tables as t
from quire.manifest.ops.databases import SetRetention
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.ops.snapshots import DropSnapshot, ExtendSnapshot
from quire.manifest.records import LENT_TAGS, SCHEDULE_TAG, AuditAction, DbKind, RetentionRecord, SnapshotKind
from quire.manifest.retention import EXPIRED, LENT, RetentionPlan, decide, scheduled
from quire.manifest.schedules import BUCKETS, bucket
from quire.manifest.snapshots import SnapshotInfo
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from tests.manifest.batches import outcome
from tests.manifest.helpers import submit_as_group
from tests.manifest.test_snapshots import assert_rejected, last_change

HOUR, DAY = 3_600_000, 86_400_000
NOW = 1_750_000_000_000


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def info(
    number: int, at_ms: int, *, generation: int = 1, name: str = "", expires: int = 0, schedule: str = ""
) -> SnapshotInfo:
    tags = {SCHEDULE_TAG: schedule} if schedule else {}
    kind = SnapshotKind.NAMED if name else SnapshotKind.ANONYMOUS
    return SnapshotInfo(7, number, name, kind, at_ms, generation, 0, 0, 0, 0, 0, expires, at_ms, tags)


def test_lent_snapshots_expire_at_their_own_time_and_count_for_no_rule() -> None:
    """Otherwise a running query would use up one of the last places, or lose the snapshot that it reads."""
    own = [info(1, NOW - HOUR), info(2, NOW - HOUR + 1)]
    lent = [msgspec.structs.replace(info(n, NOW - n, expires=NOW + HOUR), tags=dict(LENT_TAGS)) for n in (3, 4)]
    policy = RetentionRecord(keep_last=1)
    decisions = {
        decision.snapshot.snapshot_id: (decision.keep, decision.why)
        for decision in decide([*own, *lent], policy, now_ms=NOW)
    }
    assert decisions == {
        1: (False, "no rule keeps it"), 2: (True, "among the last 1"), 3: (True, LENT), 4: (True, LENT),
    }  # fmt: skip
    expired = decide(lent, policy, now_ms=NOW + HOUR)
    assert [(decision.keep, decision.why) for decision in expired] == [(False, EXPIRED)] * 2
    plan = RetentionPlan(7, policy, tuple(decide([*own, *lent], RetentionRecord(keep_seconds=1), now_ms=NOW)))
    assert plan.needs_force, "lent snapshots do not count as remaining ones"


# ── buckets ───────────────────────────────────────────────────────────────────────────────────────────────────────────
PERIODS: dict[str, Callable[[int], int]] = {
    "hourly": lambda at: at // HOUR,
    "daily": lambda at: at // DAY,
    "weekly": lambda at: (at // DAY + 3) // 7,  # 1970-01-01 was a Thursday; ISO weeks begin on Monday
}
MOMENTS = st.integers(0, ms("2100-01-01"))
NEAR = st.integers(-2 * DAY, 2 * DAY) | st.sampled_from((-1, 0, 1, HOUR, HOUR - 1, DAY, DAY - 1, 7 * DAY))


@given(at=MOMENTS, distance=NEAR, schedule=st.sampled_from(sorted(BUCKETS)))
def test_two_times_share_a_bucket_exactly_if_they_share_its_period_in_utc(
    at: int, distance: int, schedule: str
) -> None:
    other = max(0, at + distance)
    period = PERIODS[schedule]
    assert (bucket(schedule, at) == bucket(schedule, other)) == (period(at) == period(other))
    if period(at) < period(other):
        assert bucket(schedule, at) < bucket(schedule, other), "names sort in order of time"


@pytest.mark.parametrize(
    ("moment", "week"),
    [
        ("2018-12-30T23:59:59.999", "2018-W52"),
        ("2018-12-31T00:00", "2019-W01"),
        ("2019-01-06T23:59", "2019-W01"),
        ("2020-12-31T12:00", "2020-W53"),
        ("2021-01-03T23:59:59.999", "2020-W53"),
        ("2021-01-04T00:00", "2021-W01"),
        ("2023-01-01T00:00", "2022-W52"),
        ("2024-12-30T00:00", "2025-W01"),
    ],
)
def test_weeks_around_new_year_are_iso_weeks(moment: str, week: str) -> None:
    assert bucket("weekly", ms(moment)) == week


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A time zone with daylight saving time."""
    monkeypatch.setitem(os.environ, "TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("night", ["2024-03-31", "2024-10-27"])
def test_summer_time_makes_no_hour_longer_or_shorter(berlin: None, night: str) -> None:
    names = [bucket("hourly", ms(night) + n * HOUR // 2) for n in range(48)]
    assert names == [f"{night}T{n // 2:02}" for n in range(48)]
    assert {bucket("daily", ms(night) + n * HOUR) for n in range(24)} == {night}


# ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────────
SNAPSHOTS = st.lists(
    st.builds(
        lambda age, generation, name, expires_in, schedule: {
            "at_ms": NOW - age,
            "generation": generation,
            "name": name,
            "expires": expires_in and max(1, NOW + expires_in),
            "schedule": schedule if name else "",
        },
        st.integers(0, 20 * DAY) | st.integers(0, 4 * HOUR),
        st.integers(1, 4),
        st.sampled_from(("", "", "mine")),
        st.sampled_from((0, 0, 0, -HOUR, HOUR)),
        st.sampled_from(("", "hourly", "daily", "weekly")),
    ),
    max_size=12,
).map(lambda rows: [info(number, **row) for number, row in enumerate(rows, 1)])
SMALL = st.integers(0, 4)
POLICIES = st.builds(
    RetentionRecord,
    keep_last=SMALL,
    keep_generations=SMALL,
    hourly=SMALL,
    daily=SMALL,
    weekly=SMALL,
    keep_seconds=st.sampled_from((0, 0, 3600, 86_400)),
    keep_named=st.booleans(),
)
RULES = ("keep_last", "keep_generations", "keep_seconds", *BUCKETS)


def keeps(snapshot: SnapshotInfo, living: list[SnapshotInfo], policy: RetentionRecord) -> bool:
    """A second implementation of the rules, for one snapshot at a time."""
    if not any(getattr(policy, rule) for rule in RULES):
        return True
    age = (snapshot.created_at_ms, snapshot.snapshot_id)
    newer = [other for other in living if (other.created_at_ms, other.snapshot_id) > age]
    if len(newer) < policy.keep_last:
        return True
    if len({other.generation for other in living if other.generation > snapshot.generation}) < policy.keep_generations:
        return True
    if policy.keep_seconds and NOW - snapshot.created_at_ms < policy.keep_seconds * 1000:
        return True
    if policy.keep_named and snapshot.name and not snapshot.tags:
        return True
    for rule, period in PERIODS.items():
        current = period(snapshot.created_at_ms)
        members = [other for other in living if period(other.created_at_ms) == current]
        own = [other for other in members if other.tags.get(SCHEDULE_TAG) == rule]
        chosen = max(own or members, key=lambda other: (other.created_at_ms, other.snapshot_id))
        later = {period(other.created_at_ms) for other in living if period(other.created_at_ms) > current}
        if snapshot is chosen and len(later) < getattr(policy, rule):
            return True
    return False


@given(snapshots=SNAPSHOTS, policy=POLICIES)
def test_a_policy_keeps_exactly_what_its_rules_say(snapshots: list[SnapshotInfo], policy: RetentionRecord) -> None:
    living = [snapshot for snapshot in snapshots if not 0 < snapshot.expires_at_ms <= NOW]
    decisions = decide(snapshots, policy, now_ms=NOW)
    assert [decision.snapshot for decision in decisions] == snapshots, "decisions are in the order of the input"
    for decision in decisions:
        assert decision.keep == (decision.snapshot in living and keeps(decision.snapshot, living, policy))
        assert decision.why
        assert (decision.why == "expired") == (decision.snapshot not in living)


@given(snapshots=SNAPSHOTS, policy=POLICIES, rule=st.sampled_from((*RULES, "keep_named")), more=st.integers(1, 9))
def test_adding_a_rule_never_drops_more(
    snapshots: list[SnapshotInfo], policy: RetentionRecord, rule: str, more: int
) -> None:
    """If the policy has a rule already: a policy without rules drops nothing."""
    if not any(getattr(policy, name) for name in RULES):
        return
    added = msgspec.structs.replace(policy, **{rule: getattr(policy, rule) + more if rule in RULES else True})
    before, after = (
        {decision.snapshot.snapshot_id for decision in decide(snapshots, chosen, now_ms=NOW) if decision.keep}
        for chosen in (policy, added)
    )
    assert before <= after


@given(snapshots=SNAPSHOTS, policy=POLICIES, rng=st.randoms(use_true_random=False))
def test_the_order_of_the_list_does_not_matter(
    snapshots: list[SnapshotInfo], policy: RetentionRecord, rng: Any
) -> None:
    shuffled = list(snapshots)
    rng.shuffle(shuffled)
    assert sorted(decide(snapshots, policy, now_ms=NOW), key=_number) == sorted(
        decide(shuffled, policy, now_ms=NOW), key=_number
    )


def _number(decision: Any) -> int:
    return int(decision.snapshot.snapshot_id)


def test_without_a_policy_or_a_rule_only_expired_snapshots_are_dropped() -> None:
    snapshots = [info(1, NOW - DAY), info(2, NOW - DAY, expires=NOW), info(3, NOW - DAY, expires=NOW + 1)]
    for policy in (None, RetentionRecord(), RetentionRecord(schedules=["hourly"], keep_named=False)):
        assert [decision.why for decision in decide(snapshots, policy, now_ms=NOW)] == [
            "there are no rules",
            "expired",
            "there are no rules",
        ]


def test_every_decision_has_a_reason() -> None:
    start = ms("2024-05-06T10:00")
    snapshots = [
        info(1, start, name="release"),
        info(2, start + HOUR, name="hourly-2024-05-06T11", schedule="hourly"),
        info(3, start + 2 * HOUR, generation=2),
        info(4, start + 2 * HOUR + 1, generation=3),
        info(5, start + 26 * HOUR, generation=3),
    ]
    policy = RetentionRecord(keep_last=1, keep_generations=1, daily=2, keep_seconds=1)
    assert [decision.why for decision in decide(snapshots, policy, now_ms=start + 30 * HOUR)] == [
        "named",
        "no rule keeps it",
        "no rule keeps it",
        "among the last 1 generations",
        "among the last 1",
    ]
    assert decide(snapshots, RetentionRecord(daily=2), now_ms=start)[3].why == "daily: the newest of 2024-05-06"


def test_schedules_name_the_current_bucket() -> None:
    policy = RetentionRecord(schedules=["weekly", "daily", "hourly"])
    due = scheduled(policy, now_ms=ms("2021-01-01T05:59:59.999"))
    assert [(snapshot.schedule, snapshot.name, snapshot.since_ms) for snapshot in due] == [
        ("weekly", "weekly-2020-W53", ms("2020-12-28")),
        ("daily", "daily-2021-01-01", ms("2021-01-01")),
        ("hourly", "hourly-2021-01-01T05", ms("2021-01-01T05")),
    ]
    assert scheduled(RetentionRecord(), now_ms=NOW) == []


# ── policies of a manifest ────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def manifest(path: str, clock: ManualClock) -> Iterator[ManifestStore]:
    """A database `shop` with a named snapshot and three others, an hour apart."""
    with ManifestStore.open(path, clock=clock) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        for name in ("release", "", "", ""):
            manifest.snapshots.publish("shop", name)
            clock.advance(3600)
        yield manifest
        assert manifest.check() == []


def test_a_plan_shows_what_would_be_dropped_and_changes_nothing(manifest: ManifestStore) -> None:
    manifest.retention.set("shop", RetentionRecord(keep_last=1))
    head = manifest.writer.head
    plan = manifest.retention.plan("shop")
    assert [(decision.snapshot.snapshot_id, decision.keep, decision.why) for decision in plan.decisions] == [
        (1, True, "named"),
        (2, False, "no rule keeps it"),
        (3, False, "no rule keeps it"),
        (4, True, "among the last 1"),
    ]
    assert ([snapshot.snapshot_id for snapshot in plan.dropped], plan.drops_everything) == ([2, 3], False)
    other = manifest.retention.plan(1, RetentionRecord(keep_last=2, keep_named=False))
    assert [snapshot.snapshot_id for snapshot in other.dropped] == [1, 2], "a plan can be made for any policy"
    assert manifest.writer.head == head


def test_applying_a_plan_is_one_batch_of_ordinary_drops(manifest: ManifestStore) -> None:
    plan = manifest.retention.plan("shop", RetentionRecord(keep_last=1))
    head = manifest.writer.head
    assert [snapshot.snapshot_id for snapshot in manifest.retention.apply(plan)] == [2, 3]
    assert (manifest.writer.head, last_change(manifest)) == (head + 1, [DropSnapshot, DropSnapshot, EnsureJob])
    assert [snapshot.snapshot_id for snapshot in manifest.snapshots.of("shop")] == [1, 4]
    dropped = [entry.number for entry in manifest.audit("shop") if entry.action is AuditAction.SNAPSHOT_DROPPED]
    assert dropped == [2, 3]
    assert manifest.retention.apply(manifest.retention.plan("shop", RetentionRecord(keep_last=1))) == []
    assert manifest.writer.head == head + 1, "an empty plan commits nothing"


def test_a_plan_that_is_out_of_date_does_nothing(manifest: ManifestStore) -> None:
    plan = manifest.retention.plan("shop", RetentionRecord(keep_last=1))
    manifest.snapshots.drop("shop", 3)
    with assert_rejected(manifest, UnknownSnapshot):
        manifest.retention.apply(plan)


def test_a_snapshot_undropped_after_the_plan_is_kept(manifest: ManifestStore, clock: ManualClock) -> None:
    manifest.snapshots.soft_drop("shop", "release", until_ms=clock.now_ms() + 1000)
    clock.advance(1)
    plan = manifest.retention.plan("shop")
    assert [snapshot.snapshot_id for snapshot in plan.dropped] == [1]
    manifest.snapshots.undrop("shop", "release")
    with assert_rejected(manifest, StalePlan):
        manifest.retention.apply(plan)
    assert manifest.snapshots.get("shop", "release").snapshot_id == 1


def test_a_snapshot_dropped_undoably_after_the_plan_can_still_be_undropped(
    manifest: ManifestStore, clock: ManualClock
) -> None:
    plan = manifest.retention.plan("shop", RetentionRecord(keep_last=1, keep_named=False))
    manifest.snapshots.soft_drop("shop", "release", until_ms=clock.now_ms() + 1000)
    with assert_rejected(manifest, StalePlan):
        manifest.retention.apply(plan)
    assert manifest.snapshots.undrop("shop", "release").snapshot_id == 1


def test_a_snapshot_whose_expiry_is_postponed_after_the_plan_is_kept(
    manifest: ManifestStore, clock: ManualClock
) -> None:
    lent = manifest.snapshots.publish("shop", expires_at_ms=clock.now_ms() + 1000).snapshot_id
    clock.advance(1)
    plan = manifest.retention.plan("shop")
    manifest.submit([ExtendSnapshot(1, lent, clock.now_ms() + 1000)]).result()
    with assert_rejected(manifest, StalePlan):
        manifest.retention.apply(plan)
    clock.advance(1)
    assert [snapshot.snapshot_id for snapshot in manifest.retention.apply(manifest.retention.plan("shop"))] == [lent]


def test_the_last_snapshots_are_not_dropped_without_force(manifest: ManifestStore) -> None:
    plan = manifest.retention.plan("shop", RetentionRecord(keep_seconds=60, keep_named=False))
    assert plan.drops_everything
    with assert_rejected(manifest, WouldDropEverything):
        manifest.retention.apply(plan)
    assert len(manifest.retention.apply(plan, force=True)) == 4
    assert manifest.snapshots.of("shop") == []
    empty = manifest.retention.plan("shop", RetentionRecord(keep_seconds=60))
    assert (empty.drops_everything, manifest.retention.apply(empty)) == (False, [])


def test_expired_snapshots_are_dropped_without_force(manifest: ManifestStore, clock: ManualClock) -> None:
    manifest.register_db("views", DbKind.PAGES)
    for _ in range(2):
        manifest.snapshots.publish("views", expires_at_ms=clock.now_ms() + 1000)
    clock.advance(1)
    plan = manifest.retention.plan("views")
    assert plan.drops_everything
    assert len(manifest.retention.apply(plan)) == 2


def test_a_policy_belongs_to_its_database(manifest: ManifestStore) -> None:
    policy = RetentionRecord(keep_last=3, hourly=24, schedules=["hourly"])
    assert manifest.retention.get("shop") is None
    manifest.retention.set("shop", policy)
    fork = manifest.snapshots.fork("shop", "fork")
    assert (manifest.retention.get(1), manifest.retention.get(fork)) == (policy, None), "a fork begins without a policy"
    assert manifest.retention.databases() == [(1, policy)]
    manifest.retention.set("shop", None)
    assert manifest.retention.databases() == []
    manifest.retention.set("shop", policy)
    manifest.drop_db(1, snapshots=True).result()
    with manifest.read() as txn:
        assert txn.count(t.RETENTION) == 0, "the policy is deleted with its database"


WRONG: Any = "yes"


@pytest.mark.parametrize(
    "policy",
    [
        RetentionRecord(schedules=["minutely"]),
        RetentionRecord(schedules=[WRONG, "x"]),
        RetentionRecord(schedules=[[]]),  # type: ignore[list-item]  # on purpose
        RetentionRecord(keep_last=-1),
        RetentionRecord(hourly=WRONG),
        RetentionRecord(daily=True),
        RetentionRecord(keep_seconds=1.5),  # type: ignore[arg-type]  # on purpose
        RetentionRecord(keep_named=WRONG),
    ],
    ids=str,
)
def test_an_invalid_policy_is_rejected(manifest: ManifestStore, policy: RetentionRecord) -> None:
    with assert_rejected(manifest, InvalidInput):
        manifest.retention.set("shop", policy)
    with assert_rejected(manifest, InvalidInput):
        manifest.retention.plan("shop", policy)


def test_policies_of_missing_databases_are_rejected(manifest: ManifestStore) -> None:
    dropped_id = manifest.register_db("gone", DbKind.PAGES)
    manifest.drop_db(dropped_id).result()
    for error, call in (
        (UnknownDatabase, lambda: manifest.retention.set("nope", RetentionRecord())),
        (UnknownDatabase, lambda: manifest.retention.set(99, RetentionRecord())),
        (DatabaseTombstoned, lambda: manifest.retention.set(dropped_id, RetentionRecord())),
        (UnknownDatabase, lambda: manifest.retention.get(99)),
        (UnknownDatabase, lambda: manifest.retention.plan(99)),
        (UnknownDatabase, lambda: manifest.retention.plan(99, RetentionRecord())),
    ):
        with assert_rejected(manifest, error):
            call()


def test_a_policy_with_a_wrong_type_is_rejected_in_a_group_too(path: str) -> None:
    """Hazard: two such policies in one group were committed, and the store could not be opened again."""
    with ManifestStore.open(path) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        wrong = SetRetention(1, RetentionRecord(keep_named=WRONG))
        guards = submit_as_group(manifest, [[wrong], [wrong]])
        assert [type(outcome(guard)) for guard in guards] == [InvalidInput, InvalidInput]
