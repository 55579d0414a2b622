"""More steps of the state machine: snapshots, forks, retention, time, and the collector with and without failures."""

from __future__ import annotations

from random import Random

from quire.durable.failpoints import armed
from quire.manifest.jobqueue import LEASE_SECONDS
from quire.manifest.records import AuditAction, JobKind, JobState, RetentionRecord
from quire.manifest.retention import scheduled
from quire.manifest.schedules import bucket
from tests.machine.model import Database, Snapshot, StoreModel
from tests.machine.steps import DATABASES_MAX, NAMES, one_of, some_database

SNAPSHOTS_MAX = 5
POINTS = ("delete.planned", "delete.files_gone", "delete.objects_gone", "delete.published", "worker.worked")
STOPS = ("worker.worked", "delete.published")
SECONDS = (1, 30, 61, 3600, 86_400)


class WorkerDied(BaseException):
    """Raised in a worker to simulate the end of its process: no error handler of the job runs."""


# ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────────────
def snapshot(model: StoreModel, rng: Random) -> None:
    db = some_database(model, rng, "snapshot")
    if db is None or len(db.snapshots) >= SNAPSHOTS_MAX:
        return
    name = rng.choice(("", *NAMES))
    if name and any(existing.name == name for existing in db.snapshots.values()):
        return
    expires = model.clock.now_ms() + 3_600_000 if model.with_expiry and not rng.randint(0, 3) else 0
    info = model.store.manifest.snapshots.publish(db.name, name, expires_at_ms=expires)
    db.snapshots[info.snapshot_id] = Snapshot(name, db.current_version, info.created_at_ms, expires)
    model.events[AuditAction.SNAPSHOT_CREATED] += 1


def drop_snapshot(model: StoreModel, rng: Random) -> None:
    db = some_database(model, rng, "drop_snapshot")
    snapshot_id = one_of(rng, sorted(db.snapshots)) if db else None
    if db is not None and snapshot_id is not None:
        model.store.manifest.snapshots.drop(db.db_id, snapshot_id)
        del db.snapshots[snapshot_id]
        model.events[AuditAction.SNAPSHOT_DROPPED] += 1


def fork(model: StoreModel, rng: Random) -> None:
    """Fork the current state of a database or a snapshot. The database may itself be a fork."""
    db = some_database(model, rng, "fork")
    name = rng.choice(NAMES)
    if db is None or len(model.databases) >= DATABASES_MAX or model.is_name_taken(name):
        return
    at = one_of(rng, [None, *sorted(db.snapshots)])
    db_id = model.store.manifest.snapshots.fork(db.name, name, at=at)
    version = db.current_version if at is None else db.snapshots[at].version
    segments = dict.fromkeys(sorted(version.pins), False)
    model.databases[db_id] = Database(db_id, name, db.db_id, dict(version.chains), segments)
    model.events[AuditAction.FORKED] += 1
    model.events[AuditAction.FORKED_FROM] += 1


# ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def set_policy(model: StoreModel, rng: Random) -> None:
    """Set or remove the retention policy that maintenance applies."""
    db = some_database(model, rng, "set_policy")
    if db is not None:
        schedules = rng.choice(([], ["hourly"], ["hourly", "daily"]))
        policy = RetentionRecord(keep_last=rng.randint(0, 3), keep_named=False, schedules=schedules)
        db.policy = policy if rng.randint(0, 3) else None
        model.store.manifest.retention.set(db.db_id, db.policy)


def apply_retention(model: StoreModel, rng: Random) -> None:
    """Apply a policy that is not stored."""
    db = some_database(model, rng, "apply_retention")
    if db is not None:
        retention, policy = model.store.manifest.retention, RetentionRecord(rng.randint(1, 3), keep_named=False)
        dropped = retention.apply(retention.plan(db.db_id, policy))
        _drop_from_model(model, db, _must_be_dropped(model, db, policy), {snapshot.snapshot_id for snapshot in dropped})


def _must_be_dropped(model: StoreModel, db: Database, policy: RetentionRecord | None) -> set[int]:
    """The snapshots that must be dropped: those that have expired, and all but the newest `keep_last`."""
    now = model.clock.now_ms()
    living = [number for number, snapshot in db.snapshots.items() if not 0 < snapshot.expires_at_ms <= now]
    living.sort(key=lambda number: (db.snapshots[number].created_at_ms, number))
    snapshot = living[-policy.keep_last :] if policy is not None and policy.keep_last else living
    return set(db.snapshots) - set(snapshot)


def _drop_from_model(model: StoreModel, db: Database, expected: set[int], dropped: set[int]) -> None:
    assert dropped == expected, "retention must drop exactly what its rules require"
    for snapshot_id in dropped:
        del db.snapshots[snapshot_id]
        model.events[AuditAction.SNAPSHOT_DROPPED] += 1


# ── the collector ─────────────────────────────────────────────────────────────────────────────────────────────────────
def maintain(model: StoreModel, _rng: Random) -> None:
    """A complete round: schedules, retention, and jobs until none is due."""
    model.on_step("maintain", 0)
    model.maintain()
    _apply_schedules_and_policies(model)
    jobs = model.store.manifest.jobs
    outstanding = [*jobs.jobs(JobState.PENDING), *jobs.jobs(JobState.IN_FLIGHT)]
    model.is_settled = not any(job.kind is JobKind.DELETE for job in outstanding)


def one_job(model: StoreModel, rng: Random) -> None:
    """A worker that is stopped after its first job, or in the middle of it."""
    model.on_step("one_job", 0)
    worker = model.worker()
    with armed(f"jobs.{rng.choice(STOPS)}", lambda _: worker.stop()):
        worker.drain()


def round_with_failing_job(model: StoreModel, rng: Random) -> None:
    """A complete round in which a delete job fails at some step."""
    model.on_step("round_with_failing_job", 0)
    with armed(f"jobs.{rng.choice(POINTS)}", f"{rng.randint(0, 2)}*off->1*raise:EIO"):
        model.maintain()
    _apply_schedules_and_policies(model)


def round_with_dying_worker(model: StoreModel, rng: Random) -> None:
    """A complete round in which the worker dies after it has claimed a job, so that its lease remains."""
    model.on_step("round_with_dying_worker", 0)
    remaining = rng.randint(0, 2)

    def die(_point: str) -> None:
        nonlocal remaining
        remaining -= 1
        if remaining < 0:
            raise WorkerDied

    try:
        with armed(f"jobs.{rng.choice(('worker.claimed', *POINTS))}", die):
            model.maintain()
    except WorkerDied:
        pass  # the round ends here
    _apply_schedules_and_policies(model)


def _apply_schedules_and_policies(model: StoreModel) -> None:
    """Change the model as schedules and policies require."""
    now = model.clock.now_ms()
    for db in model.databases.values():
        for due in scheduled(db.policy, now_ms=now) if db.policy else ():
            schedule, name = due.schedule, due.name
            if model.scheduled_snapshots.get((db.db_id, schedule)) == name:
                continue
            model.scheduled_snapshots[db.db_id, schedule] = name
            if not _has_current_snapshot(db, schedule, now) and not any(
                snapshot.name == name for snapshot in db.snapshots.values()
            ):
                # Retention may already have dropped it again, so its number and time are taken from the audit.
                entries = [entry for entry in model.store.manifest.audit(db.db_id) if entry.subject == name]
                created = [entry for entry in entries if entry.action is AuditAction.SNAPSHOT_CREATED]
                assert created, f"{name} of database {db.db_id} was not created"
                db.snapshots[created[-1].number] = Snapshot(
                    name, db.current_version, created[-1].at_ms, schedule=schedule
                )
                model.events[AuditAction.SNAPSHOT_CREATED] += 1
        existing = {info.snapshot_id for info in model.store.manifest.snapshots.of(db.db_id)}
        _drop_from_model(model, db, _must_be_dropped(model, db, db.policy), set(db.snapshots) - existing)


def _has_current_snapshot(db: Database, schedule: str, now_ms: int) -> bool:
    """Whether the schedule has created a snapshot in the current bucket, or in a later one if the clock was set back
    since. The search ends at the first snapshot of an earlier bucket."""
    for number in sorted(db.snapshots, reverse=True):
        snapshot = db.snapshots[number]
        if bucket(schedule, snapshot.created_at_ms) < bucket(schedule, now_ms):
            return False
        if snapshot.schedule == schedule:
            return True
    return False


# ── time and reopening ────────────────────────────────────────────────────────────────────────────────────────────────
def pass_time(model: StoreModel, rng: Random) -> None:
    model.on_step("pass_time", 0)
    model.clock.advance(rng.choice((*SECONDS, LEASE_SECONDS + 1)))


def set_clock_back(model: StoreModel, rng: Random) -> None:
    """As an administrator might: nothing may be deleted earlier because of it."""
    model.on_step("set_clock_back", 0)
    model.clock.jump(-rng.choice(SECONDS))


def reopen(model: StoreModel, _rng: Random) -> None:
    model.on_step("reopen", 0)
    model.store.close()
    model.open()
