"""The delete job: plans, deletes and publishes, step by step, until nothing of its database is at zero (M8).

A deletion is an intent in the manifest (zero) before a byte goes, and bytes go before their row. They go no sooner than the
grace after zero, by the owner's clock, and not before their row's `purge_after_ms`; what a lent version may need stays for as
long as it is lent (`manifest/leases.py`). Leaves have no bytes and go at once. Steps are bounded: others write between two
commits.

An artifact goes only if its row in `gc_zero`, its counts and its catalog row are intact and agree. What cannot be deleted now
keeps nothing else from being deleted; the attempt fails at its end, and the job, which is never given up, tries again.

What is there after each durable step, and what a crash behind it leads to:
  remove files, sync    rows at zero; objects                  planned again; files that are gone are a success
  delete objects        rows at zero                           the same
  publish               no rows                                the next step, or the next attempt, finds others
  complete              no row at zero, the gate is open       for a dropped database its tombstone goes in the same transaction

The tombstone of a dropped database goes when nothing of it is left, and no other job of it is outstanding; its directories go
before, with files of ours that no row names (`jobs/leftovers.py`).
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

OTHER_JOBS_MS = 60_000
"""How long the tombstone of a dropped database waits before it looks again whether its last jobs have ended."""


def delete_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Delete what is at zero, and the tombstone of a dropped database when nothing is left of it."""
    manifest, db_id = ctx.manifest, job.db_id
    manifest.recount.finish()  # counts that decide what goes must have been looked at since the open (N3)
    artifacts = freed = 0
    trouble = AttemptFailures()
    while True:
        progress(artifacts, 0)
        with manifest.read() as txn:
            plan = plan_deletion(ctx, txn, db_id, trouble)
            origins = next_origins(txn, plan, db_id)
            bare, busy = is_bare(txn, db_id), has_other_jobs(txn, db_id)
        if plan.empty:
            trouble.settle()
            if plan.due_at_ms:
                return Deferred(plan.due_at_ms)
            if bare and busy:
                return Deferred(ctx.clock.now_ms() + OTHER_JOBS_MS)
            result = {"artifacts": artifacts, "freed_bytes": freed}
            return _end_of(ctx, db_id, result) if bare else Completed(result)
        hit("jobs.delete.planned")
        done = delete(plan.places, disk=ctx.disk, collector=ctx.collector)
        for place, error in done.failed:
            trouble.add(place, error)
        if ops := deletion_ops(plan, done.gone, db_id):
            commit_step(ctx, job, [*ops, *manifest.jobs.deletions(origins - {db_id})])
            hit("jobs.delete.published")
        artifacts += len(done.gone)
        freed += done.freed_bytes


def _end_of(ctx: JobContext, db_id: int, result: dict[str, int]) -> Completed:
    """Nothing is left of a dropped database: its directories go, then its tombstone, which may have held a namespace."""
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
    """Artifacts whose bytes are to go."""
    rowless: tuple[ArtifactKey, ...]
    """Counts at zero that no bytes belong to: only rows go. Namespaces are such, and chunks whose bytes are a stream's."""
    orphans: tuple[ArtifactKey, ...]
    """Rows of a dropped database that nothing ever referred to: they get a count of zero, and are due later."""
    stale_pages: bool
    """The page index of a dropped database is still there."""
    plans: tuple[int, ...]
    """Generations of a dropped database's checkpoint plans, which nobody will publish: what they wrote is garbage (P10)."""
    due_at_ms: int
    """When the earliest of what is too young now may go; 0 if nothing is left."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do now."""
        return not any((self.leaves, self.places, self.rowless, self.orphans, self.stale_pages, self.plans))


def plan_deletion(ctx: JobContext, txn: ReadTxn, db_id: int, trouble: AttemptFailures) -> DeletePlan:
    """The next step for a database (0: for the namespaces), less what this attempt has found that it cannot delete."""
    txn.check_sound(db_id)  # what its rows say is wrong somewhere
    now, grace = ctx.clock.now_ms(), int(ctx.settings.delete_grace_seconds * 1000)
    leaves: list[ArtifactKey] = []
    places: list[ArtifactLocation] = []
    rowless: list[ArtifactKey] = []
    due_at = 0
    damaged: ManifestDamaged | None = None
    kept = ctx.manifest.leases.kept_since(db_id)
    for raw, value in txn.raw_scan(t.GC_ZERO, db_id):
        try:
            since = t.GC_ZERO.rows.decode(raw, value).value  # first: it looks at the key too
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
                if not trouble.spares(place):
                    places.append(place)
        if len(leaves) >= STEP_LEAVES or len(places) + len(rowless) >= STEP_ARTIFACTS:
            break
    if damaged is not None and not (leaves or places or rowless or due_at):
        raise damaged  # everything else is done: the job says what is in its way
    orphans: list[ArtifactKey] = []
    plans: list[int] = []
    stale_pages = False
    if not (leaves or places or rowless or due_at) and _is_dropped(txn, db_id):
        orphans = list(islice(_orphans(txn, db_id), STEP_ARTIFACTS))
        stale_pages = _any(txn, t.PAGE_VERSION_INDEX, db_id) or _any(txn, t.PAGE_VERSION_HEAD, db_id)
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
    """The catalog row of an artifact that is to go; `ManifestDamaged` unless its counts are provably at zero."""
    counts = txn.refcount(key)
    if counts is not None and (counts.in_use or counts.pending_upload):
        raise ManifestDamaged(
            "gc_zero names an artifact that is in use", hint="`quire manifest check --repair` mends it", artifact=key
        )
    return txn.artifact(key)


def is_bare(txn: ReadTxn, db_id: int) -> bool:
    """Whether nothing of a dropped database is left but its tombstone, and what its last jobs may have stored."""
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
    """Whether jobs of other exclusive kinds are outstanding for a database: their gates keep its tombstone."""
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
    """What was removed, and what could not be."""

    gone: tuple[ArtifactKey, ...]
    freed_bytes: int
    failed: tuple[tuple[ArtifactLocation, QuireError], ...] = ()


def delete(places: Sequence[ArtifactLocation], *, disk: Disk, collector: Collector) -> Deleted:
    """Remove the bytes at these places; those of `gone` are, on return.

    What is gone already is a success. Objects go where a row promises one, and where an upload has announced one. Files go
    in any case: a move that was given up may have left one that the row does not promise.
    """
    failed: dict[ArtifactKey, QuireError] = {}
    # A name that came back after a crash, when its row has left the manifest, would never be looked for again: it is synced.
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
"""Rows of a dropped database's page index that go in one commit: a few milliseconds."""


def deletion_ops(plan: DeletePlan, gone: Iterable[ArtifactKey], db_id: int) -> list[Op]:
    """The rows that go now: those of artifacts whose bytes are gone, and those that have none."""
    ops: list[Op] = [CollectLeaf(leaf.origin_db_id, leaf.id, leaf.generation) for leaf in plan.leaves]
    for key in (*gone, *plan.rowless):
        ops.append(RemoveArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id))
    ops += [CorrectRefcount(artifact_key(key), 0, 0) for key in plan.orphans]
    ops += [AbandonPlan(db_id, generation) for generation in plan.plans]
    if plan.stale_pages:
        ops.append(ForgetPages(db_id, STEP_PAGE_ROWS))
    return ops


def next_origins(txn: ReadTxn, plan: DeletePlan, db_id: int) -> set[int]:
    """The databases whose delete jobs may have work after this step: those whose artifacts the leaves held, and namespaces."""
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
