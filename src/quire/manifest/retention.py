"""Retention: decides which snapshots are kept, and which are made automatically.

Terms
  rule       one reason to keep a snapshot; a snapshot is dropped only if no rule keeps it
  bucket     an hour, a day or an ISO week, in the zone of its schedule, otherwise in UTC; the newest snapshot of each
             counts, with preference for those of this schedule
  schedule   the owner makes a snapshot in every period that has none yet, named after its bucket (`schedules.py`)

A database without a policy, or with a policy without rules, loses nothing. Snapshots with an expiry are dropped when it
is reached. Snapshots that a checkpoint keeps for time travel (P14), and those lent to a reader, follow only their own
expiry and count for no rule. Deciding is a pure function of the snapshots, the policy and one clock, the owner's.
Applying is one batch of ordinary drops, with the delete job; a policy never drops the last snapshots unless forced.

    >>> from quire.manifest.records import RetentionRecord
    >>> policy = RetentionRecord(keep_last=1)
    >>> ages = [SnapshotInfo(1, n, "", SnapshotKind.ANONYMOUS, n * 1000, 1, 0, 0, 0, 0, 0, 0, 0, {}) for n in (1, 2)]
    >>> [(row.snapshot.snapshot_id, row.keep, row.why) for row in decide(ages, policy, now_ms=5000)]
    [(1, False, 'no rule keeps it'), (2, True, 'among the last 1')]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import UTC, tzinfo
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from quire.core.barrier import changes
from quire.core.errors import InvalidInput, ManifestDamaged, WouldDropEverything
from quire.core.events import emit
from quire.core.ids import U32_MAX
from quire.manifest import tables as t
from quire.manifest.ops.databases import SetRetention
from quire.manifest.ops.snapshots import DropSnapshot, is_dropped
from quire.manifest.records import FORKS_TAGS, LENT_TAGS, SCHEDULE_TAG, WINDOW_TAG, RetentionRecord, SnapshotKind
from quire.manifest.schedules import BUCKETS, bucket, parse_schedule
from quire.manifest.snapshots import SnapshotInfo

if TYPE_CHECKING:
    from quire.manifest.ops.base import Op
    from quire.manifest.reads import ReadTxn
    from quire.manifest.store import ManifestStore

EXPIRED = "expired"
"""Reason to drop a snapshot that had its own expiry."""

WINDOW = "for time travel"
"""Reason to keep a snapshot that a checkpoint keeps for the window of time travel."""

LENT = "held for a reader"
"""Reason to keep a snapshot that the service made for a reader, until it expires."""

FORKS = "forks are made from it"
"""Reason to keep the snapshot from which many forks are being made."""

DROPPED = "dropped, can be restored"
"""Reason to keep a snapshot that a user dropped, until it expires."""

OWN_TIME = (WINDOW, LENT, FORKS, DROPPED)


class ScheduledSnapshot(msgspec.Struct, frozen=True):
    """A snapshot that should exist by now."""

    schedule: str
    """hourly, daily or weekly."""
    name: str
    since_ms: int
    """When its period began."""


class Decision(msgspec.Struct, frozen=True):
    """Whether a snapshot is kept, and why."""

    snapshot: SnapshotInfo
    keep: bool
    why: str


class RetentionPlan(msgspec.Struct, frozen=True):
    """What a policy would do to a database now."""

    db_id: int
    policy: RetentionRecord | None
    decisions: tuple[Decision, ...]

    @property
    def dropped(self) -> list[SnapshotInfo]:
        return [decision.snapshot for decision in self.decisions if not decision.keep]

    def expired_only(self) -> RetentionPlan:
        """Return the plan without the drops of the policy: only expired snapshots are dropped."""
        kept = (Decision(decision.snapshot, decision.why != EXPIRED, decision.why) for decision in self.decisions)
        return RetentionPlan(self.db_id, self.policy, tuple(kept))

    def only(self, snapshot_ids: Collection[int]) -> RetentionPlan:
        """Return the plan limited to these snapshots: of those it would drop, only these are dropped."""
        kept = (
            Decision(
                decision.snapshot, decision.keep or decision.snapshot.snapshot_id not in snapshot_ids, decision.why
            )
            for decision in self.decisions
        )
        return RetentionPlan(self.db_id, self.policy, tuple(kept))

    @property
    def drops_everything(self) -> bool:
        """Whether no snapshot would be left, apart from those that follow their own expiry."""
        counted = [decision for decision in self.decisions if decision.why not in OWN_TIME]
        return bool(counted) and not any(decision.keep for decision in counted)

    @property
    def needs_force(self) -> bool:
        """Whether it is refused unless forced: expired snapshots are dropped in any case."""
        return self.drops_everything and any(decision.why not in (EXPIRED, *OWN_TIME) for decision in self.decisions)


def check_policy(policy: RetentionRecord) -> RetentionRecord:
    """Return the policy if it is valid."""
    every = [parse_schedule(schedule).every for schedule in policy.schedules]
    if len(set(every)) < len(every):
        raise InvalidInput(
            "two schedules are of the same kind",
            hint="give at most one each of hourly, daily and weekly",
            schedules=every,
        )
    for name in ("keep_last", "keep_generations", "keep_seconds", *BUCKETS):
        value = getattr(policy, name)
        if type(value) is not int or value < 0:
            raise InvalidInput("a retention rule must be a whole number; 0 turns it off", rule=name, value=value)
    if type(policy.keep_named) is not bool:
        raise InvalidInput("keep_named must be True or False", rule="keep_named", value=policy.keep_named)
    return policy


def has_rules(policy: RetentionRecord) -> bool:
    """Return whether the policy can drop anything."""
    return any((policy.keep_last, policy.keep_generations, policy.keep_seconds, *(getattr(policy, b) for b in BUCKETS)))


def decide(snapshots: Iterable[SnapshotInfo], policy: RetentionRecord | None, *, now_ms: int) -> list[Decision]:
    """Return the decision on each snapshot, in the order given."""
    snapshots = list(snapshots)
    expired = {s.snapshot_id for s in snapshots if 0 < s.expires_at_ms <= now_ms}
    why = {info.snapshot_id: WINDOW for info in snapshots if is_window(info)}
    why |= {info.snapshot_id: LENT for info in snapshots if is_lent(info)}
    why |= {info.snapshot_id: FORKS for info in snapshots if is_for_forks(info)}
    why |= {info.snapshot_id: DROPPED for info in snapshots if is_dropped(info)}
    # These count for no rule: snapshots for time travel alone would use up `keep_last`.
    out = expired | why.keys()
    living = sorted((s for s in snapshots if s.snapshot_id not in out), key=_age, reverse=True)
    if policy is None or not has_rules(policy):
        why |= {info.snapshot_id: "there are no rules" for info in living}
    else:
        for keeps, reason in _rules(living, policy, now_ms):
            why.setdefault(keeps, reason)
    return [
        Decision(info, False, EXPIRED)
        if info.snapshot_id in expired
        else Decision(info, info.snapshot_id in why, why.get(info.snapshot_id, "no rule keeps it"))
        for info in snapshots
    ]


def _age(snapshot: SnapshotInfo) -> tuple[int, int]:
    return snapshot.created_at_ms, snapshot.snapshot_id


def _rules(newest_first: list[SnapshotInfo], policy: RetentionRecord, now_ms: int) -> Iterable[tuple[int, str]]:
    """Yield (snapshot id, reason) for every rule that keeps a snapshot."""
    for info in newest_first:
        if policy.keep_named and is_personal(info):
            yield info.snapshot_id, "named"
        if policy.keep_seconds and now_ms - info.created_at_ms < policy.keep_seconds * 1000:
            yield info.snapshot_id, f"younger than {policy.keep_seconds:,} s"
    for info in newest_first[: policy.keep_last]:
        yield info.snapshot_id, f"among the last {policy.keep_last}"
    generations = sorted({info.generation for info in newest_first}, reverse=True)[: policy.keep_generations]
    for info in newest_first:
        if info.generation in generations:
            yield info.snapshot_id, f"among the last {policy.keep_generations} generations"
    zones = {schedule.every: schedule.zone for schedule in map(parse_schedule, policy.schedules)}
    for schedule in BUCKETS:
        buckets = _by_bucket(newest_first, schedule, zones.get(schedule, UTC))
        # Buckets are in the order in which they were entered, newest first.
        for place, members in islice(buckets.items(), getattr(policy, schedule)):
            own = [info for info in members if info.tags.get(SCHEDULE_TAG) == schedule]
            yield (own or members)[0].snapshot_id, f"{schedule}: the newest of {place}"


def _by_bucket(newest_first: list[SnapshotInfo], schedule: str, zone: tzinfo) -> dict[str, list[SnapshotInfo]]:
    buckets: dict[str, list[SnapshotInfo]] = {}
    for info in newest_first:
        buckets.setdefault(bucket(schedule, info.created_at_ms, zone), []).append(info)
    return buckets


def is_window(snapshot: SnapshotInfo) -> bool:
    """Return whether a checkpoint keeps it for time travel."""
    return snapshot.kind is SnapshotKind.ANONYMOUS and snapshot.expires_at_ms > 0 and WINDOW_TAG in snapshot.tags


def is_lent(snapshot: SnapshotInfo) -> bool:
    """Return whether the service has lent it to a reader."""
    return snapshot.kind is SnapshotKind.ANONYMOUS and snapshot.expires_at_ms > 0 and snapshot.tags == LENT_TAGS


def is_for_forks(snapshot: SnapshotInfo) -> bool:
    """Return whether many forks are being made from it."""
    return snapshot.kind is SnapshotKind.ANONYMOUS and snapshot.expires_at_ms > 0 and snapshot.tags == FORKS_TAGS


def is_personal(snapshot: SnapshotInfo) -> bool:
    """Return whether a user named it."""
    return snapshot.kind is SnapshotKind.NAMED and SCHEDULE_TAG not in snapshot.tags


def scheduled(policy: RetentionRecord, *, now_ms: int) -> list[ScheduledSnapshot]:
    """Return the snapshots that should exist by now.

    >>> policy = RetentionRecord(schedules=["hourly", "daily at 03:00 Europe/Zurich"])
    >>> [snapshot.name for snapshot in scheduled(policy, now_ms=1_700_000_000_000)]
    ['hourly-2023-11-14T22', 'daily-2023-11-14']
    """
    parsed = map(parse_schedule, policy.schedules)
    return [ScheduledSnapshot(schedule.every, schedule.name(now_ms), schedule.begins_ms(now_ms)) for schedule in parsed]


def has_scheduled(txn: ReadTxn, db_id: int, schedule: str, since_ms: int) -> bool:
    """Return whether a schedule has made a snapshot since its period began. Looks back no further than that."""
    snapshot_id = U32_MAX
    while (row := txn.at_or_below(t.SNAPSHOT_INDEX, db_id, snapshot_id)) is not None:
        (_, snapshot_id), record = row
        # Ids and commit times rise together, so no earlier snapshot is of this period.
        if record.created_at_ms < since_ms:
            return False
        if record.tags.get(SCHEDULE_TAG) == schedule:
            return True
        snapshot_id -= 1
    return False


class SnapshotRetention:
    """Policies of one manifest: `manifest.retention`."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest

    def get(self, db: int | str) -> RetentionRecord | None:
        """Return the policy of a database; `None` if it has none."""
        with self._manifest.read() as txn:
            return txn.get(t.RETENTION, txn.require_database(db)[0])

    @changes
    def set(self, db: int | str, policy: RetentionRecord | None) -> None:
        """Set or remove the policy of a database. Nothing is dropped before it is applied."""
        if policy is not None:
            check_policy(policy)
        with self._manifest.read() as txn:
            db_id = db if isinstance(db, int) else txn.database_id(db)
        self._manifest.submit([SetRetention(db_id, policy)]).result()

    def plan(self, db: int | str, policy: RetentionRecord | None = None) -> RetentionPlan:
        """Return what the database's policy (or another one) would do now: the dry run."""
        chosen = self.get(db) if policy is None else check_policy(policy)
        with self._manifest.read() as txn:
            db_id = db if isinstance(db, int) else txn.database_id(db)
        decisions = decide(self._manifest.snapshots.of(db_id), chosen, now_ms=self._manifest.clock.now_ms())
        return RetentionPlan(db_id, chosen, tuple(decisions))

    @changes
    def apply(self, plan: RetentionPlan, *, force: bool = False) -> list[SnapshotInfo]:
        """Drop the snapshots of the plan in one batch; return them.

        A snapshot that was dropped or undropped meanwhile, or whose expiry was postponed, fails the batch.
        """
        if batch := self.drops(plan, force=force):
            self._manifest.submit(batch).result()
        return plan.dropped

    def drops(self, plan: RetentionPlan, *, force: bool = False) -> list[Op]:
        """Return the operations that carry out the plan; none if nothing is dropped.

        Raises `WouldDropEverything` if no snapshot would be left, unless forced.
        """
        dropped = plan.dropped
        if plan.needs_force and not force:
            raise WouldDropEverything(
                "the retention policy would drop every snapshot of the database",
                hint="keep more, or use `--force` (force=True)",
                db_id=plan.db_id,
                snapshots=len(dropped),
            )
        if not dropped:
            return []

        ops: list[Op] = [DropSnapshot(plan.db_id, snapshot.snapshot_id, snapshot.expires_at_ms) for snapshot in dropped]
        # Read now: the drops remove the rows that name them.
        origins = self._manifest.snapshots.origins(plan.db_id, [snapshot.snapshot_id for snapshot in dropped])
        return [*ops, *self._manifest.jobs.deletions(origins)]

    def policies(self, db_ids: Iterable[int]) -> list[tuple[int, RetentionRecord]]:
        """Return (database, policy) of the databases that have one.

        A policy whose row is damaged is left out and reported: nothing is made or dropped because of it.
        """
        policies = []
        with self._manifest.read() as txn:
            for db_id in db_ids:
                try:
                    policy = txn.get(t.RETENTION, db_id)
                except ManifestDamaged as error:
                    emit("error", "retention.damaged", error=str(error))
                    continue
                if policy is not None:
                    policies.append((db_id, policy))
        return policies

    def databases(self) -> list[tuple[int, RetentionRecord]]:
        """Return (database, policy) of every database that has one."""
        with self._manifest.read() as txn:
            db_ids = list(txn.owners(t.RETENTION))
        return self.policies(db_ids)
