"""What must hold after every step, and what must remain when everything was dropped: nothing.

1. The manifest check reports no problem: reference counts equal those recomputed from scratch. The only leaks are chunks of
   abandoned checkpoints.
2. Every database and every snapshot has the version that the model has.
3. Every artifact that can still be read has its bytes, unchanged.
4. An artifact that nothing needs is kept for the grace period, by the owner's clock.
5. There are no bytes without a row: nothing would ever delete them. A row without bytes is at zero.
6. After a round of maintenance that left no delete job, only needed artifacts exist, and chunks of abandoned checkpoints of
   dropped databases, until the last reference to an artifact of the same database is released.
7. When everything was dropped and collected, no bytes remain, and no rows except history.
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
from tests.machine.model import LOCAL, Location, StoreModel, body, catalog, live, snapshots

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
"""Tables that hold history: what happened, which ids are in use, the positions of cursors."""

ROUNDS_MAX, WEEK_SECONDS = 20, 7 * 86_400


def verify(model: StoreModel) -> None:
    """Everything that holds between two steps."""
    needed = model.needed()
    problems = model.store.manifest.check()
    broken = [problem for problem in problems if not problem.leak or problem.where["artifact"] in needed]
    assert not broken, "; ".join(map(str, broken))
    with model.store.manifest.read() as txn:
        _verify_versions(model, txn)
        _verify_bytes(model, txn)


def _verify_versions(model: StoreModel, txn: ReadTxn) -> None:
    rows = {db_id: row for db_id, row in txn.databases() if row.status is not DbStatus.TOMBSTONED}
    assert rows.keys() == model.databases.keys()
    for db_id, db in model.databases.items():
        assert (rows[db_id].name, rows[db_id].parent_db_id) == (db.name, db.parent)
        assert live(txn, db_id) == (db.chains, db.segments), f"database {db_id} has changed"
        actual = snapshots(txn, db_id)
        assert {n: (snapshot.name, snapshot.version) for n, snapshot in actual.items()} == {
            n: (snapshot.name, snapshot.version) for n, snapshot in db.snapshots.items()
        }, f"a snapshot of database {db_id} has changed"
        assert txn.get(t.RETENTION, db_id) == db.policy


def _verify_bytes(model: StoreModel, txn: ReadTxn) -> None:
    now, needed, present, listed = model.clock.now_ms(), model.needed(), dict(bytes_of(model)), catalog(txn)
    expected = {location: key for key in model.artifacts for location in model.locations(key)}
    for location in present:
        assert location in expected, f"{location} exists, but the model does not know it"
    for location, key in expected.items():
        if key in needed or key in model.orphans:
            assert key in listed, f"{key} is needed but has no row"
            assert present.get(location) == body(key), f"{location} is needed but missing or changed"
    for key, artifact in list(model.artifacts.items()):
        if key in needed or key in model.orphans:
            artifact.unneeded_since_ms = None
            continue
        is_present = [location in present for location in model.locations(key)]
        if artifact.unneeded_since_ms is None:
            artifact.unneeded_since_ms = now
        if not all(is_present) and not artifact.has_lost_bytes:
            assert now - artifact.unneeded_since_ms >= model.grace_ms, (
                f"{key} was deleted before the grace period was over"
            )
            artifact.has_lost_bytes = True
        if key not in listed:
            assert not any(is_present), f"{key} has bytes but no row"
            del model.artifacts[key]
        elif not all(is_present):
            count = txn.refcount(key)
            assert count is not None, f"{key} has lost its bytes but has no reference count"
            assert (count.in_use, count.pending_upload) == (0, 0), f"{key} has lost its bytes but is referenced"
    if model.is_settled:
        unblocked = {
            key for key in model.dropped_orphans if next(txn.raw_scan(t.GC_REFCOUNTS, key.origin_db_id), None) is None
        }
        idle = model.artifacts.keys() - needed - model.orphans - (model.dropped_orphans - unblocked)
        assert not idle, f"nothing needs these artifacts, and nothing will delete them: {idle}"
        assert txn.count(t.GC_ZERO) == 0


def bytes_of(model: StoreModel) -> Iterator[tuple[Location, bytes]]:
    """Every object of the object stores and every file under pages/."""
    for url in (model.store.objects_url, model.namespaces_url):
        store = model.objects(url)
        for info in list_objects(store):
            yield (url, info.key), store.get(info.key)
    for folder, _, files in os.walk(os.path.join(model.path, names.PAGES)):
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                yield (LOCAL, os.path.relpath(path, model.path)), file.read()


# ── teardown ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def settle(model: StoreModel) -> None:
    """Collect until there is no delete job. Time advances past the grace period, leases and the delays after
    failures."""
    jobs = model.store.manifest.jobs
    for _ in range(ROUNDS_MAX):
        model.maintain()
        outstanding = [*jobs.jobs(JobState.PENDING), *jobs.jobs(JobState.IN_FLIGHT)]
        if not any(job.kind is JobKind.DELETE for job in outstanding):
            return
        model.clock.advance(WEEK_SECONDS)
    raise AssertionError(f"the collector does not finish: {outstanding}")


def drop_everything(model: StoreModel) -> None:
    """Drop every database with its snapshots, and cancel every upload."""
    manifest = model.store.manifest
    for db in model.databases.values():
        manifest.retention.set(db.db_id, None)
        manifest.drop_db(db.db_id, snapshots=True).result()
        model.events[AuditAction.SNAPSHOT_DROPPED] += len(db.snapshots)
        model.events[AuditAction.DATABASE_DROPPED] += 1
    for job_id in model.uploads:
        manifest.jobs.cancel(job_id)
    model.is_settled = False
    model.databases.clear()
    model.uploads.clear()
    model.dropped_orphans |= model.orphans
    model.orphans.clear()


def verify_nothing_remains(model: StoreModel, *, except_tables: frozenset[str] = frozenset()) -> None:
    """Verify invariant 7 after everything was dropped; `but` names tables that may have rows besides history."""
    verify(model)  # records since when artifacts are not needed
    settle(model)
    verify(model)
    assert dict(bytes_of(model)) == {}
    with model.store.manifest.read() as txn:
        nonempty = {name for name, table in t.TABLES.items() if txn.count(table)} - HISTORY - except_tables
    assert not nonempty, f"tables are not empty: {nonempty}"
    assert_clean(model.store.manifest)
    assert_replays(model.store.manifest)


def verify_audit(model: StoreModel) -> None:
    """The audit contains every change once, including the deletion of every artifact that was written."""
    recorded = dict.fromkeys(AuditAction, 0)
    for entry in model.store.manifest.audit():
        recorded[entry.action] += 1
    expected = {**dict.fromkeys(AuditAction, 0), **model.events, AuditAction.DELETED: len(model.written)}
    assert recorded == expected
