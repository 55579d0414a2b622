"""What must hold in the small world after every step, and what must be left of it in the end: nothing.

1. The manifest breaks none of its rules: counts are those recomputed from scratch. Leaks are abandoned checkpoints only.
2. Every live database and every snapshot shows the version that the model remembers.
3. Everything that somebody can ask for is there, byte for byte.
4. What nobody needs stays for the grace, by the owner's clock.
5. Bytes without a row do not exist: nobody would ever delete them. A row without bytes is at zero.
6. After a round of maintenance that left no delete job, exactly what is needed is there, and what abandoned checkpoints of
   dropped databases left, until the last that is held of these is let go.
7. With everything dropped and collected, no bytes are left, and no rows but those that are history.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from quire.durable import names
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import AuditAction, DbStatus, JobKind, JobState
from quire.objects.api import list_objects
from quire.testing.manifest import assert_clean, assert_replays
from tests.machine.world import LOCAL, Place, World, body, catalog, live, snapshots

HISTORY = frozenset(
    {
        "audit",
        "change_cursors",
        "change_log",
        "cursor_names",
        "generation_watermarks",
        "id_watermarks",
        "job_queue",
        "jobs_by_state",
        "meta",
        "migrations",
    }
)
"""Tables that remember: what happened, which ids were given, who has read how far."""

ROUNDS_MAX, WEEK_SECONDS = 20, 7 * 86_400


def verify(world: World) -> None:
    """All that holds between two steps."""
    needed = world.needed()
    problems = world.store.manifest.check()
    broken = [problem for problem in problems if not problem.leak or problem.where["artifact"] in needed]
    assert not broken, "; ".join(map(str, broken))
    with world.store.manifest.read() as txn:
        _verify_versions(world, txn)
        _verify_bytes(world, txn)


def _verify_versions(world: World, txn: ReadTxn) -> None:
    found = {db_id: row for db_id, row in txn.databases() if row.status is not DbStatus.TOMBSTONED}
    assert found.keys() == world.databases.keys()
    for db_id, db in world.databases.items():
        assert (found[db_id].name, found[db_id].parent_db_id) == (db.name, db.parent)
        assert live(txn, db_id) == (db.chains, db.segments), f"database {db_id} is not what it was"
        kept = snapshots(txn, db_id)
        assert {n: (k.name, k.version) for n, k in kept.items()} == {
            n: (k.name, k.version) for n, k in db.snapshots.items()
        }, f"a snapshot of database {db_id} is not what it was"
        assert txn.get(t.RETENTION, db_id) == db.policy


def _verify_bytes(world: World, txn: ReadTxn) -> None:
    now, needed, present, listed = world.clock.now_ms(), world.needed(), dict(bytes_of(world)), catalog(txn)
    homes = {place: key for key in world.artifacts for place in world.places(key)}
    for place in present:
        assert place in homes, f"{place} is there, and nothing knows of it"
    for place, key in homes.items():
        if key in needed or key in world.orphans:
            assert key in listed, f"{key} is needed and has no row"
            assert present.get(place) == body(key), f"{place} is needed and is not there, or is not what it was"
    for key, artifact in list(world.artifacts.items()):
        if key in needed or key in world.orphans:
            artifact.idle_since_ms = None
            continue
        there = [place in present for place in world.places(key)]
        if artifact.idle_since_ms is None:
            artifact.idle_since_ms = now
        if not all(there) and not artifact.is_going:
            assert now - artifact.idle_since_ms >= world.grace_ms, f"{key} went before its time"
            artifact.is_going = True
        if key not in listed:
            assert not any(there), f"{key} has bytes and no row"
            del world.artifacts[key]
        elif not all(there):
            count = txn.refcount(key)
            assert count is not None, f"{key} has lost its bytes and has no count"
            assert (count.in_use, count.pending_upload) == (0, 0), f"{key} has lost its bytes and is counted on"
    if world.is_quiet:
        alone = {key for key in world.lingering if next(txn.raw_scan(t.GC_REFCOUNTS, key.origin_db_id), None) is None}
        idle = world.artifacts.keys() - needed - world.orphans - (world.lingering - alone)
        assert not idle, f"nobody needs these, and nobody will delete them: {idle}"
        assert txn.count(t.GC_ZERO) == 0


def bytes_of(world: World) -> Iterator[tuple[Place, bytes]]:
    """Everything in the object stores and under pages/."""
    for url in (world.store.objects_url, world.other_url):
        store = world.objects(url)
        for info in list_objects(store):
            yield (url, info.key), store.get(info.key)
    for folder, _, files in os.walk(os.path.join(world.path, names.PAGES)):
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield (LOCAL, os.path.relpath(path, world.path)), file.read()


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def settle(world: World) -> None:
    """Collect until nothing is left to do. Time passes: for the grace, for leases, for jobs that wait after a failure."""
    jobs = world.store.manifest.jobs
    for _ in range(ROUNDS_MAX):
        world.maintain()
        outstanding = [*jobs.jobs(JobState.PENDING), *jobs.jobs(JobState.IN_FLIGHT)]
        if not any(job.kind is JobKind.DELETE for job in outstanding):
            return
        world.clock.advance(WEEK_SECONDS)
    raise AssertionError(f"the collector does not come to an end: {outstanding}")


def drop_everything(world: World) -> None:
    """Every database with its snapshots, and whatever still holds bytes."""
    manifest = world.store.manifest
    for db in world.databases.values():
        manifest.retention.set(db.db_id, None)
        manifest.drop_db(db.db_id, snapshots=True).result()
        world.events[AuditAction.SNAPSHOT_DROPPED] += len(db.snapshots)
        world.events[AuditAction.DATABASE_DROPPED] += 1
    for job_id in world.held:
        manifest.jobs.cancel(job_id)
    world.is_quiet = False
    world.databases.clear()
    world.held.clear()
    world.lingering |= world.orphans
    world.orphans.clear()


def nothing_is_left(world: World, *, but: frozenset[str] = frozenset()) -> None:
    """Promise 7, when everything was dropped; `but` tables that may have more than history."""
    verify(world)  # what is idle is so from now on
    settle(world)
    verify(world)
    assert dict(bytes_of(world)) == {}
    with world.store.manifest.read() as txn:
        left = {name for name, table in t.TABLES.items() if txn.count(table)} - HISTORY - but
    assert not left, f"rows are left: {left}"
    assert_clean(world.store.manifest)
    assert_replays(world.store.manifest)


def audit_tells(world: World) -> None:
    """The audit has everything that was done, once: each artifact that was ever written was deleted."""
    told = dict.fromkeys(AuditAction, 0)
    for entry in world.store.manifest.audit():
        told[entry.action] += 1
    done = {**dict.fromkeys(AuditAction, 0), **world.events, AuditAction.DELETED: len(world.written)}
    assert told == done
