"""The delete job: plans, deletes and publishes, step by step, until nothing of its database is at zero (M8).

A deletion is an intent in the manifest (zero) before a byte is deleted, and bytes are deleted before their row. They are kept
for the grace period after zero, by the owner's clock, and until their row's `purge_after_ms`; an artifact that a lent version
may need stays while the version is lent (`manifest/leases.py`). Leaves have no bytes and are removed at once. Steps are
bounded, so that other batches commit in between.

An artifact is deleted only if its row in `gc_zero`, its counts and its catalog row are intact and agree. An artifact that
cannot be deleted now does not prevent other deletions; the attempt fails at its end, and the job, which is never given up,
tries again.

The state after each durable step, and what follows a crash there:
  remove files, sync    rows at zero; objects                  planned again; a missing file is a success
  delete objects        rows at zero                           the same
  publish               no rows                                the next step, or the next attempt, finds others
  complete              no row at zero, the gate is open       the tombstone of a dropped database goes in the same transaction

The tombstone of a dropped database is removed when nothing else of it is left, no other job of it is outstanding and none of
its versions is lent: the rows of leases go with it, and a restarted owner would not know of a fork's lease on artifacts of
other databases. Its directories are removed before, with files of ours that no row names (`jobs/leftovers.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quire.core.errors import ManifestDamaged, QuireError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable import names
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.jobs.context import JobContext
from quire.jobs.copies import remove_files
from quire.jobs.handler import Completed, Deferred, Outcome, Progress, commit_step
from quire.jobs.leftovers import remove_empty, remove_home
from quire.jobs.locations import ArtifactLocation, AttemptFailures
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.namespaces import NAMESPACES
from quire.manifest.ops.base import Op
from quire.manifest.ops.corrections import CorrectRefcount
from quire.manifest.ops.databases import RemoveDb
from quire.manifest.ops.pageindex import ForgetPages
from quire.manifest.ops.plans import AbandonPlan
from quire.manifest.ops.refs import RemoveArtifact, artifact_key, unpack_artifact
from quire.manifest.ops.slots import CollectLeaf
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbStatus, JobKind
from quire.manifest.slots import artifacts, unpack_leaf
from quire.manifest.verification import shares_bytes
from quire.objects.collector import Collector

DELAY_SECONDS_MAX = 3_600.0
"""How long the job is deferred at most while artifacts are too young, lent, or kept until a time."""

OTHER_JOBS_MS = 60_000
"""How long the job is deferred while other jobs, or leases, of a dropped database are outstanding."""


def delete_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Delete artifacts at zero, and the tombstone of a dropped database when nothing else of it is left."""
    manifest, db_id = ctx.manifest, job.db_id
    manifest.recount.finish()  # counts decide what is deleted, so they must be verified since the open (N3)
    artifacts = freed = 0
    trouble = AttemptFailures()
    while True:
        progress(artifacts, 0)
        with manifest.read() as txn:
            plan = plan_deletion(ctx, txn, db_id, trouble)
            origins = next_origins(txn, plan, db_id)
            bare = is_bare(txn, db_id)
            busy = has_other_jobs(txn, db_id) or manifest.leases.is_lent(db_id)
        if plan.empty:
            trouble.settle()
            if plan.due_at_ms:
                # It is the only delete job of the database: what reaches zero meanwhile may be due before this.
                return Deferred(min(plan.due_at_ms, ctx.clock.now_ms() + int(DELAY_SECONDS_MAX * 1000)))
            if bare and busy:
                return Deferred(ctx.clock.now_ms() + OTHER_JOBS_MS)
            result = {"artifacts": artifacts, "freed_bytes": freed}
            return _end_of(ctx, db_id, result) if bare else Completed(result)
        hit("jobs.delete.planned")
        # Bytes before rows: after a crash the rows at zero still name what is left.
        done = delete(plan.places, disk=ctx.disk, collector=ctx.collector)
        for place, error in done.failed:
            trouble.add(place, error)
        if ops := deletion_ops(plan, done.gone, db_id):
            # One batch: collecting a leaf may release artifacts of other databases, whose delete jobs would otherwise
            # wait for maintenance to find them.
            commit_step(ctx, job, [*ops, *manifest.jobs.deletions(origins - {db_id})])
            hit("jobs.delete.published")
        artifacts += len(done.gone)
        freed += done.freed_bytes


def _end_of(ctx: JobContext, db_id: int, result: dict[str, int]) -> Completed:
    """Remove the directories of a dropped database of which nothing is left, then its tombstone, which may hold a namespace."""
    remove_home(ctx.disk, ctx.root, db_id)
    for part in (names.stream_dir(db_id, "hot"), names.lsm_dir(db_id, "wal")):
        remove_empty(os.path.join(ctx.root, os.path.dirname(part)), ctx.disk)
    hit("jobs.delete.emptied")
    return Completed(result, after=(RemoveDb(db_id), *ctx.manifest.jobs.deletions({NAMESPACES})))


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
STEP_ARTIFACTS = 512
"""Artifacts deleted between two commits."""

STEP_LEAVES = 16
"""Leaves collected in one commit: each may release 256 chains."""


@dataclass(frozen=True, slots=True)
class DeletePlan:
    """One step of a delete job."""

    leaves: tuple[ArtifactKey, ...]
    places: tuple[ArtifactLocation, ...]
    """Artifacts whose bytes are deleted."""
    rowless: tuple[ArtifactKey, ...]
    """Artifacts at zero without bytes, of which only rows are removed: namespaces, and chunks that borrow a stream's bytes."""
    orphans: tuple[ArtifactKey, ...]
    """Rows of a dropped database that nothing ever referred to: they get a count of zero, and are due later."""
    stale_pages: bool
    """Whether the page index of a dropped database still has rows."""
    plans: tuple[int, ...]
    """Generations of a dropped database's checkpoint plans, which will never be published: their objects are garbage (P10)."""
    due_at_ms: int
    """When the first artifact that is too young now may be deleted; 0 if there is none."""

    @property
    def empty(self) -> bool:
        """Whether nothing can be done now."""
        return not any((self.leaves, self.places, self.rowless, self.orphans, self.stale_pages, self.plans))


def plan_deletion(ctx: JobContext, txn: ReadTxn, db_id: int, trouble: AttemptFailures) -> DeletePlan:
    """Plan the next step for a database (0: for the namespaces), without the artifacts that this attempt failed to delete."""
    txn.require_not_refused(db_id)  # raises if rows of the database are known to be wrong
    now, grace = ctx.clock.now_ms(), int(ctx.settings.delete_grace_seconds * 1000)
    leaves: list[ArtifactKey] = []
    places: list[ArtifactLocation] = []
    rowless: list[ArtifactKey] = []
    due_at = 0
    damaged: ManifestDamaged | None = None
    # After the transaction has begun. A lease that is taken later needs only what is referenced at that time, and
    # what is at zero in this transaction never gets a reference again (decision 014).
    kept = ctx.manifest.leases.kept_since(db_id)
    for raw, value in txn.raw_scan(t.GC_ZERO, db_id):
        try:
            since = t.GC_ZERO.rows.decode(raw, value).value  # first: it also verifies the key
            key = unpack_artifact(raw)
            row = _doomed_row(txn, key)
        except ManifestDamaged as error:
            damaged = damaged or error
            continue
        if key.kind is ArtifactKind.LEAF:
            leaves.append(key)
        else:
            due = max(since + grace, getattr(row, "purge_after_ms", 0))
            if kept is not None and since >= kept[0]:
                due = max(due, kept[1])
            if due > now:
                due_at = min(due_at or due, due)
            elif row is None or shares_bytes(key, row):
                rowless.append(key)
            else:
                place = ctx.place_of(txn, key, row)
                if not trouble.should_skip(place):
                    places.append(place)
        if len(leaves) >= STEP_LEAVES or len(places) + len(rowless) >= STEP_ARTIFACTS:
            break
    if damaged is not None and not (leaves or places or rowless or due_at):
        raise damaged  # everything else is done: report the damage that blocks the job
    orphans: list[ArtifactKey] = []
    plans: list[int] = []
    stale_pages = False
    if not (leaves or places or rowless or due_at) and _is_dropped(txn, db_id):
        orphans = list(islice(_orphans(txn, db_id), STEP_ARTIFACTS))
        stale_pages = _any(txn, t.PAGE_VERSION_INDEX, db_id) or _any(txn, t.PAGE_VERSION_HEAD, db_id)
        # A checkpoint that has not ended may still put objects of its plan. If the plan were abandoned now, they
        # could appear after the collector has deleted that name.
        if not has_other_jobs(txn, db_id):
            plans = [key[1] for key, _ in txn.scan(t.CHECKPOINT_PLAN, db_id)]
    return DeletePlan(
        leaves=tuple(leaves),
        places=tuple(places),
        rowless=tuple(rowless),
        orphans=tuple(orphans),
        stale_pages=stale_pages,
        plans=tuple(plans),
        due_at_ms=due_at,
    )


def _doomed_row(txn: ReadTxn, key: ArtifactKey) -> Any:
    """Return the catalog row of an artifact to delete; `ManifestDamaged` unless its counts are provably at zero."""
    counts = txn.refcount(key)
    if counts is not None and (counts.in_use or counts.pending_upload):
        raise ManifestDamaged(
            "gc_zero names an artifact that is in use", hint="run `quire manifest check --repair`", artifact=key
        )
    return txn.artifact(key)


def is_bare(txn: ReadTxn, db_id: int) -> bool:
    """Return whether nothing of a dropped database is left except its tombstone, and what its last jobs may have stored."""
    return _is_dropped(txn, db_id) and not any(
        _any(txn, table, db_id)
        for table in (
            t.GC_REFCOUNTS,
            t.SLOT_LEAF,
            t.WAL_CATALOG,
            t.CHUNK_CATALOG,
            t.CHUNK_DELTA_INDEX,
            t.PAGE_VERSION_INDEX,
            t.PAGE_VERSION_HEAD,
        )
    )


def has_other_jobs(txn: ReadTxn, db_id: int) -> bool:
    """Return whether jobs of other exclusive kinds are outstanding for a database: their gates keep its tombstone."""
    return any(key[1] != JobKind.DELETE for key, _ in txn.scan(t.JOB_PENDING_INDEX, db_id))


def _is_dropped(txn: ReadTxn, db_id: int) -> bool:
    record = txn.database(db_id)
    return record is not None and record.status is DbStatus.TOMBSTONED


def _any(txn: ReadTxn, table: t.Table[Any], db_id: int) -> bool:
    return next(iter(txn.raw_scan(table, db_id)), None) is not None


def _orphans(txn: ReadTxn, db_id: int) -> Iterator[ArtifactKey]:
    for (origin, slot, generation), _ in txn.scan(t.CHUNK_CATALOG, db_id):
        key = ArtifactKey(origin, ArtifactKind.BASE, slot, generation)
        if txn.refcount(key) is None:
            yield key
    for (origin, slot, generation, delta), _ in txn.scan(t.CHUNK_DELTA_INDEX, db_id):
        key = ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, delta)
        if txn.refcount(key) is None:
            yield key


# ── deleting bytes ──────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Deleted:
    """The artifacts whose bytes were deleted, and those that failed."""

    gone: tuple[ArtifactKey, ...]
    freed_bytes: int
    failed: tuple[tuple[ArtifactLocation, QuireError], ...] = ()


def delete(places: Sequence[ArtifactLocation], *, disk: Disk, collector: Collector) -> Deleted:
    """Delete the bytes at these places; on return those of `gone` are durably deleted.

    A missing file or object is a success. An object is deleted if a row promises it or an upload has announced it. Files are
    removed in any case: a move that was abandoned may have left one that the row does not promise.
    """
    failed: dict[ArtifactKey, QuireError] = {}
    # Removals are synced: a name that reappeared after a crash, once its row is gone, would never be looked for again.
    faults = remove_files((path for place in places for path in (place.local, place.staged)), disk)
    for place in places:
        if (fault := faults.get(place.local) or faults.get(place.staged)) is not None:
            failed[place.key] = fault
    hit("jobs.delete.files_gone")
    by_url: dict[str, list[ArtifactLocation]] = {}
    for place in places:
        if place.may_have_remote:
            by_url.setdefault(place.url, []).append(place)
    for url, stored in by_url.items():
        try:
            collector.delete(url, [place.object_key for place in stored])
        except QuireError as error:
            for place in stored:
                failed.setdefault(place.key, error)
    hit("jobs.delete.objects_gone")
    gone = [place for place in places if place.key not in failed]
    return Deleted(
        tuple(place.key for place in gone),
        sum(place.size_bytes for place in gone),
        tuple((place, failed[place.key]) for place in places if place.key in failed),
    )


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
STEP_PAGE_ROWS = 4_096
"""Rows of a dropped database's page index that one commit removes: a few milliseconds."""


def deletion_ops(plan: DeletePlan, gone: Iterable[ArtifactKey], db_id: int) -> list[Op]:
    """Return the operations that remove rows: of artifacts whose bytes are gone, and of those without bytes."""
    ops: list[Op] = [CollectLeaf(leaf.origin_db_id, leaf.id, leaf.generation) for leaf in plan.leaves]
    for key in (*gone, *plan.rowless):
        ops.append(RemoveArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id))
    ops += [CorrectRefcount(artifact_key(key), 0, 0) for key in plan.orphans]
    ops += [AbandonPlan(db_id, generation) for generation in plan.plans]
    if plan.stale_pages:
        ops.append(ForgetPages(db_id, STEP_PAGE_ROWS))
    return ops


def next_origins(txn: ReadTxn, plan: DeletePlan, db_id: int) -> set[int]:
    """Return the databases whose delete jobs may have work after this step: origins of artifacts that the leaves held, and the
    namespaces."""
    origins = {db_id}
    if plan.places:
        origins.add(NAMESPACES)
    for leaf in plan.leaves:
        row = txn.get(t.SLOT_LEAF, leaf.origin_db_id, leaf.id, leaf.generation)
        if row is not None:
            origins.update(artifact.origin_db_id for artifact in _held(row.entries, leaf))
    return origins


def _held(entries: bytes, leaf: ArtifactKey) -> list[ArtifactKey]:
    assert leaf.kind is ArtifactKind.LEAF
    return list(artifacts(unpack_leaf(entries), leaf.id))
