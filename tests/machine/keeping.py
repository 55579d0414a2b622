"""More steps of the small world: snapshots, forks, retention, time, and the collector in all its moods."""

from __future__ import annotations

from random import Random

from quire.durable.failpoints import armed
from quire.manifest.jobqueue import LEASE_SECONDS
from quire.manifest.records import AuditAction, JobKind, JobState, RetentionRecord
from quire.manifest.retention import scheduled
from quire.manifest.schedules import bucket
from tests.machine.steps import DATABASES_MAX, NAMES, one_of, some_database
from tests.machine.world import Database, Kept, World

SNAPSHOTS_MAX = 5
POINTS = ("delete.planned", "delete.files_gone", "delete.objects_gone", "delete.published", "worker.worked")
STOPS = ("worker.worked", "delete.published")
SECONDS = (1, 30, 61, 3600, 86_400)


class Death(BaseException):
    """Of a worker, as seen by its job: nothing more happens."""


# ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────────────
def snapshot(world: World, rng: Random) -> None:
    db = some_database(world, rng, "snapshot")
    if db is None or len(db.snapshots) >= SNAPSHOTS_MAX:
        return
    name = rng.choice(("", *NAMES))
    if name and any(kept.name == name for kept in db.snapshots.values()):
        return
    expires = world.clock.now_ms() + 3_600_000 if world.with_expiry and not rng.randint(0, 3) else 0
    info = world.store.manifest.snapshots.publish(db.name, name, expires_at_ms=expires)
    db.snapshots[info.snapshot_id] = Kept(name, db.now, info.created_at_ms, expires)
    world.events[AuditAction.SNAPSHOT_CREATED] += 1


def drop_snapshot(world: World, rng: Random) -> None:
    db = some_database(world, rng, "drop_snapshot")
    snapshot_id = one_of(rng, sorted(db.snapshots)) if db else None
    if db is not None and snapshot_id is not None:
        world.store.manifest.snapshots.drop(db.db_id, snapshot_id)
        del db.snapshots[snapshot_id]
        world.events[AuditAction.SNAPSHOT_DROPPED] += 1


def fork(world: World, rng: Random) -> None:
    """Of what a database is now, or of a snapshot; forks are forked too."""
    db = some_database(world, rng, "fork")
    name = rng.choice(NAMES)
    if db is None or len(world.databases) >= DATABASES_MAX or world.taken(name):
        return
    at = one_of(rng, [None, *sorted(db.snapshots)])
    db_id = world.store.manifest.snapshots.fork(db.name, name, at=at)
    version = db.now if at is None else db.snapshots[at].version
    segments = dict.fromkeys(sorted(version.pins), False)
    world.databases[db_id] = Database(db_id, name, db.db_id, dict(version.chains), segments)
    world.events[AuditAction.FORKED] += 1
    world.events[AuditAction.FORKED_FROM] += 1


# ── retention ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def set_policy(world: World, rng: Random) -> None:
    """For maintenance to follow."""
    db = some_database(world, rng, "set_policy")
    if db is not None:
        schedules = rng.choice(([], ["hourly"], ["hourly", "daily"]))
        policy = RetentionRecord(keep_last=rng.randint(0, 3), keep_named=False, schedules=schedules)
        db.policy = policy if rng.randint(0, 3) else None
        world.store.manifest.retention.set(db.db_id, db.policy)


def apply_retention(world: World, rng: Random) -> None:
    """With a policy of the moment."""
    db = some_database(world, rng, "apply_retention")
    if db is not None:
        retention, policy = world.store.manifest.retention, RetentionRecord(rng.randint(1, 3), keep_named=False)
        dropped = retention.apply(retention.plan(db.db_id, policy))
        _forget(world, db, _doomed(world, db, policy), {each.snapshot_id for each in dropped})


def _doomed(world: World, db: Database, policy: RetentionRecord | None) -> set[int]:
    """What must go: what has expired, and all but the newest."""
    now = world.clock.now_ms()
    living = [number for number, kept in db.snapshots.items() if not 0 < kept.expires_at_ms <= now]
    living.sort(key=lambda number: (db.snapshots[number].created_at_ms, number))
    kept = living[-policy.keep_last :] if policy is not None and policy.keep_last else living
    return set(db.snapshots) - set(kept)


def _forget(world: World, db: Database, expected: set[int], dropped: set[int]) -> None:
    assert dropped == expected, "retention drops exactly what its rules say"
    for snapshot_id in dropped:
        del db.snapshots[snapshot_id]
        world.events[AuditAction.SNAPSHOT_DROPPED] += 1


# ── the collector ─────────────────────────────────────────────────────────────────────────────────────────────────────
def maintain(world: World, _rng: Random) -> None:
    """A whole round: schedules, retention, jobs until none is due."""
    world.doing("maintain", 0)
    world.maintain()
    _follow(world)
    jobs = world.store.manifest.jobs
    outstanding = [*jobs.jobs(JobState.PENDING), *jobs.jobs(JobState.IN_FLIGHT)]
    world.is_quiet = not any(job.kind is JobKind.DELETE for job in outstanding)


def one_job(world: World, rng: Random) -> None:
    """A worker that is stopped after its first job, or in the middle of it."""
    world.doing("one_job", 0)
    worker = world.worker()
    with armed(f"jobs.{rng.choice(STOPS)}", lambda _: worker.stop()):
        worker.drain()


def failing_round(world: World, rng: Random) -> None:
    """A whole round, in which a delete job fails at some step."""
    world.doing("failing_round", 0)
    with armed(f"jobs.{rng.choice(POINTS)}", f"{rng.randint(0, 2)}*off->1*raise:EIO"):
        world.maintain()
    _follow(world)


def deadly_round(world: World, rng: Random) -> None:
    """A whole round, in which the worker is gone after it has taken a job: its lease stays."""
    world.doing("deadly_round", 0)
    left = rng.randint(0, 2)

    def die(_point: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Death

    try:
        with armed(f"jobs.{rng.choice(('worker.claimed', *POINTS))}", die):
            world.maintain()
    except Death:
        pass  # that was it
    _follow(world)


def _follow(world: World) -> None:
    """The model does what the schedules and policies say."""
    now = world.clock.now_ms()
    for db in world.databases.values():
        for due in scheduled(db.policy, now_ms=now) if db.policy else ():
            schedule, name = due.schedule, due.name
            if world.made.get((db.db_id, schedule)) == name:
                continue
            world.made[db.db_id, schedule] = name
            if not _is_there(db, schedule, now) and not any(kept.name == name for kept in db.snapshots.values()):
                # It may be gone again, with the rest that was too old: the audit knows its number and its time.
                told = [entry for entry in world.store.manifest.audit(db.db_id) if entry.subject == name]
                created = [entry for entry in told if entry.action is AuditAction.SNAPSHOT_CREATED]
                assert created, f"{name} of database {db.db_id} was not made"
                db.snapshots[created[-1].number] = Kept(name, db.now, created[-1].at_ms, schedule=schedule)
                world.events[AuditAction.SNAPSHOT_CREATED] += 1
        found = {info.snapshot_id for info in world.store.manifest.snapshots.of(db.db_id)}
        _forget(world, db, _doomed(world, db, db.policy), set(db.snapshots) - found)


def _is_there(db: Database, schedule: str, now_ms: int) -> bool:
    """Whether the schedule has made a snapshot in now's bucket, or in a later one if the clock has gone back since; as far as
    the newest snapshots go."""
    for number in sorted(db.snapshots, reverse=True):
        kept = db.snapshots[number]
        if bucket(schedule, kept.created_at_ms) < bucket(schedule, now_ms):
            return False
        if kept.schedule == schedule:
            return True
    return False


# ── time and doors ────────────────────────────────────────────────────────────────────────────────────────────────────
def pass_time(world: World, rng: Random) -> None:
    world.doing("pass_time", 0)
    world.clock.advance(rng.choice((*SECONDS, LEASE_SECONDS + 1)))


def set_clock_back(world: World, rng: Random) -> None:
    """As an administrator would: nothing may go earlier for it."""
    world.doing("set_clock_back", 0)
    world.clock.jump(-rng.choice(SECONDS))


def reopen(world: World, _rng: Random) -> None:
    world.doing("reopen", 0)
    world.store.close()
    world.open()
