"""Retention: what each rule keeps, what a policy would do, and what is refused."""

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

from quire.core.errors import DatabaseTombstoned, InvalidInput, UnknownDatabase, UnknownSnapshot, WouldDropEverything
from quire.manifest import tables as t
from quire.manifest.ops.databases import SetRetention
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.ops.snapshots import DropSnapshot
from quire.manifest.records import LENT_TAGS, SCHEDULE_TAG, AuditAction, DbKind, RetentionRecord, SnapshotKind
from quire.manifest.retention import EXPIRED, LENT, RetentionPlan, decide, scheduled
from quire.manifest.schedules import BUCKETS, bucket
from quire.manifest.snapshots import SnapshotInfo
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from tests.manifest.batches import outcome
from tests.manifest.helpers import together
from tests.manifest.test_snapshots import last_change, refused

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


def test_what_is_lent_goes_by_its_own_time_and_counts_for_no_rule() -> None:
    """Else a query that reads takes a place among the last, or loses what it reads."""
    mine = [info(1, NOW - HOUR), info(2, NOW - HOUR + 1)]
    lent = [msgspec.structs.replace(info(n, NOW - n, expires=NOW + HOUR), tags=dict(LENT_TAGS)) for n in (3, 4)]
    policy = RetentionRecord(keep_last=1)
    made = {each.snapshot.snapshot_id: (each.keep, each.why) for each in decide([*mine, *lent], policy, now_ms=NOW)}
    assert made == {
        1: (False, "no rule keeps it"), 2: (True, "among the last 1"), 3: (True, LENT), 4: (True, LENT),
    }  # fmt: skip
    over = decide(lent, policy, now_ms=NOW + HOUR)
    assert [(each.keep, each.why) for each in over] == [(False, EXPIRED)] * 2
    alone = RetentionPlan(7, policy, tuple(decide([*mine, *lent], RetentionRecord(keep_seconds=1), now_ms=NOW)))
    assert alone.needs_force, "what is lent is no reason to take the last ones"


# ── buckets ───────────────────────────────────────────────────────────────────────────────────────────────────────────
PERIODS: dict[str, Callable[[int], int]] = {
    "hourly": lambda at: at // HOUR,
    "daily": lambda at: at // DAY,
    "weekly": lambda at: (at // DAY + 3) // 7,  # the first of January 1970 was a Thursday, ISO weeks begin on Mondays
}
MOMENTS = st.integers(0, ms("2100-01-01"))
NEAR = st.integers(-2 * DAY, 2 * DAY) | st.sampled_from((-1, 0, 1, HOUR, HOUR - 1, DAY, DAY - 1, 7 * DAY))


@given(at=MOMENTS, beside=NEAR, schedule=st.sampled_from(sorted(BUCKETS)))
def test_two_moments_share_a_bucket_exactly_if_they_share_its_period_in_utc(
    at: int, beside: int, schedule: str
) -> None:
    other = max(0, at + beside)
    period = PERIODS[schedule]
    assert (bucket(schedule, at) == bucket(schedule, other)) == (period(at) == period(other))
    if period(at) < period(other):
        assert bucket(schedule, at) < bucket(schedule, other), "names sort as time does"


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
    """A machine whose clock is put forward and back."""
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
        lambda age, generation, name, left, schedule: {
            "at_ms": NOW - age,
            "generation": generation,
            "name": name,
            "expires": left and max(1, NOW + left),
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


def keeps(each: SnapshotInfo, living: list[SnapshotInfo], policy: RetentionRecord) -> bool:
    """The rules again, one snapshot at a time, said as a person would."""
    if not any(getattr(policy, rule) for rule in RULES):
        return True
    age = (each.created_at_ms, each.snapshot_id)
    newer = [other for other in living if (other.created_at_ms, other.snapshot_id) > age]
    if len(newer) < policy.keep_last:
        return True
    if len({other.generation for other in living if other.generation > each.generation}) < policy.keep_generations:
        return True
    if policy.keep_seconds and NOW - each.created_at_ms < policy.keep_seconds * 1000:
        return True
    if policy.keep_named and each.name and not each.tags:
        return True
    for rule, period in PERIODS.items():
        mine = period(each.created_at_ms)
        members = [other for other in living if period(other.created_at_ms) == mine]
        own = [other for other in members if other.tags.get(SCHEDULE_TAG) == rule]
        chosen = max(own or members, key=lambda other: (other.created_at_ms, other.snapshot_id))
        later = {period(other.created_at_ms) for other in living if period(other.created_at_ms) > mine}
        if each is chosen and len(later) < getattr(policy, rule):
            return True
    return False


@given(snapshots=SNAPSHOTS, policy=POLICIES)
def test_a_policy_keeps_exactly_what_its_rules_say(snapshots: list[SnapshotInfo], policy: RetentionRecord) -> None:
    living = [each for each in snapshots if not 0 < each.expires_at_ms <= NOW]
    decisions = decide(snapshots, policy, now_ms=NOW)
    assert [each.snapshot for each in decisions] == snapshots, "in the order given"
    for each in decisions:
        assert each.keep == (each.snapshot in living and keeps(each.snapshot, living, policy))
        assert each.why
        assert (each.why == "expired") == (each.snapshot not in living)


@given(snapshots=SNAPSHOTS, policy=POLICIES, rule=st.sampled_from((*RULES, "keep_named")), more=st.integers(1, 9))
def test_adding_a_rule_never_drops_more(
    snapshots: list[SnapshotInfo], policy: RetentionRecord, rule: str, more: int
) -> None:
    """To a policy that has one: the first rule is what makes a policy drop anything."""
    if not any(getattr(policy, each) for each in RULES):
        return
    added = msgspec.structs.replace(policy, **{rule: getattr(policy, rule) + more if rule in RULES else True})
    before, after = (
        {each.snapshot.snapshot_id for each in decide(snapshots, chosen, now_ms=NOW) if each.keep}
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


def test_without_a_policy_or_a_rule_only_what_expired_goes() -> None:
    snapshots = [info(1, NOW - DAY), info(2, NOW - DAY, expires=NOW), info(3, NOW - DAY, expires=NOW + 1)]
    for policy in (None, RetentionRecord(), RetentionRecord(schedules=["hourly"], keep_named=False)):
        assert [each.why for each in decide(snapshots, policy, now_ms=NOW)] == [
            "there are no rules",
            "expired",
            "there are no rules",
        ]


def test_every_decision_says_why() -> None:
    start = ms("2024-05-06T10:00")
    snapshots = [
        info(1, start, name="release"),
        info(2, start + HOUR, name="hourly-2024-05-06T11", schedule="hourly"),
        info(3, start + 2 * HOUR, generation=2),
        info(4, start + 2 * HOUR + 1, generation=3),
        info(5, start + 26 * HOUR, generation=3),
    ]
    policy = RetentionRecord(keep_last=1, keep_generations=1, daily=2, keep_seconds=1)
    assert [each.why for each in decide(snapshots, policy, now_ms=start + 30 * HOUR)] == [
        "named",
        "no rule keeps it",
        "no rule keeps it",
        "among the last 1 generations",
        "among the last 1",
    ]
    assert decide(snapshots, RetentionRecord(daily=2), now_ms=start)[3].why == "daily: the newest of 2024-05-06"


def test_schedules_name_the_bucket_of_now() -> None:
    policy = RetentionRecord(schedules=["weekly", "daily", "hourly"])
    found = scheduled(policy, now_ms=ms("2021-01-01T05:59:59.999"))
    assert [(snapshot.schedule, snapshot.name, snapshot.since_ms) for snapshot in found] == [
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
def kept(path: str, clock: ManualClock) -> Iterator[ManifestStore]:
    """A database `shop` with a named and three other snapshots, an hour apart."""
    with ManifestStore.open(path, clock=clock) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        for name in ("release", "", "", ""):
            manifest.snapshots.publish("shop", name)
            clock.advance(3600)
        yield manifest
        assert manifest.check() == []


def test_a_plan_shows_what_would_go_and_changes_nothing(kept: ManifestStore) -> None:
    kept.retention.set("shop", RetentionRecord(keep_last=1))
    head = kept.writer.head
    plan = kept.retention.plan("shop")
    assert [(each.snapshot.snapshot_id, each.keep, each.why) for each in plan.decisions] == [
        (1, True, "named"),
        (2, False, "no rule keeps it"),
        (3, False, "no rule keeps it"),
        (4, True, "among the last 1"),
    ]
    assert ([each.snapshot_id for each in plan.dropped], plan.drops_everything) == ([2, 3], False)
    other = kept.retention.plan(1, RetentionRecord(keep_last=2, keep_named=False))
    assert [each.snapshot_id for each in other.dropped] == [1, 2], "any policy can be tried"
    assert kept.writer.head == head


def test_applying_a_plan_is_one_batch_of_ordinary_drops(kept: ManifestStore) -> None:
    plan = kept.retention.plan("shop", RetentionRecord(keep_last=1))
    head = kept.writer.head
    assert [each.snapshot_id for each in kept.retention.apply(plan)] == [2, 3]
    assert (kept.writer.head, last_change(kept)) == (head + 1, [DropSnapshot, DropSnapshot, EnsureJob])
    assert [each.snapshot_id for each in kept.snapshots.of("shop")] == [1, 4]
    dropped = [entry.number for entry in kept.audit("shop") if entry.action is AuditAction.SNAPSHOT_DROPPED]
    assert dropped == [2, 3]
    assert kept.retention.apply(kept.retention.plan("shop", RetentionRecord(keep_last=1))) == []
    assert kept.writer.head == head + 1, "nothing to do is nothing done"


def test_a_plan_that_was_overtaken_does_nothing(kept: ManifestStore) -> None:
    plan = kept.retention.plan("shop", RetentionRecord(keep_last=1))
    kept.snapshots.drop("shop", 3)
    with refused(kept, UnknownSnapshot):
        kept.retention.apply(plan)


def test_the_last_snapshots_are_not_taken_unless_somebody_says_so(kept: ManifestStore) -> None:
    plan = kept.retention.plan("shop", RetentionRecord(keep_seconds=60, keep_named=False))
    assert plan.drops_everything
    with refused(kept, WouldDropEverything):
        kept.retention.apply(plan)
    assert len(kept.retention.apply(plan, force=True)) == 4
    assert kept.snapshots.of("shop") == []
    empty = kept.retention.plan("shop", RetentionRecord(keep_seconds=60))
    assert (empty.drops_everything, kept.retention.apply(empty)) == (False, [])


def test_what_has_expired_goes_without_asking(kept: ManifestStore, clock: ManualClock) -> None:
    kept.register_db("views", DbKind.PAGES)
    for _ in range(2):
        kept.snapshots.publish("views", expires_at_ms=clock.now_ms() + 1000)
    clock.advance(1)
    plan = kept.retention.plan("views")
    assert plan.drops_everything
    assert len(kept.retention.apply(plan)) == 2


def test_a_policy_belongs_to_its_database(kept: ManifestStore) -> None:
    policy = RetentionRecord(keep_last=3, hourly=24, schedules=["hourly"])
    assert kept.retention.get("shop") is None
    kept.retention.set("shop", policy)
    fork = kept.snapshots.fork("shop", "fork")
    assert (kept.retention.get(1), kept.retention.get(fork)) == (policy, None), "a fork begins without one"
    assert kept.retention.databases() == [(1, policy)]
    kept.retention.set("shop", None)
    assert kept.retention.databases() == []
    kept.retention.set("shop", policy)
    kept.drop_db(1, snapshots=True).result()
    with kept.read() as txn:
        assert txn.count(t.RETENTION) == 0, "it goes with it"


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
def test_a_policy_that_makes_no_sense_is_refused(kept: ManifestStore, policy: RetentionRecord) -> None:
    with refused(kept, InvalidInput):
        kept.retention.set("shop", policy)
    with refused(kept, InvalidInput):
        kept.retention.plan("shop", policy)


def test_policies_of_databases_that_are_not_there_are_refused(kept: ManifestStore) -> None:
    gone = kept.register_db("gone", DbKind.PAGES)
    kept.drop_db(gone).result()
    for error, call in (
        (UnknownDatabase, lambda: kept.retention.set("nope", RetentionRecord())),
        (UnknownDatabase, lambda: kept.retention.set(99, RetentionRecord())),
        (DatabaseTombstoned, lambda: kept.retention.set(gone, RetentionRecord())),
        (UnknownDatabase, lambda: kept.retention.get(99)),
        (UnknownDatabase, lambda: kept.retention.plan(99)),
        (UnknownDatabase, lambda: kept.retention.plan(99, RetentionRecord())),
    ):
        with refused(kept, error):
            call()


def test_a_policy_of_the_wrong_type_is_refused_in_a_group_alike_too(path: str) -> None:
    """Hazard: two of them in one group were committed, and the store did not open again."""
    with ManifestStore.open(path) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        wrong = SetRetention(1, RetentionRecord(keep_named=WRONG))
        guards = together(manifest, [[wrong], [wrong]])
        assert [type(outcome(guard)) for guard in guards] == [InvalidInput, InvalidInput]
