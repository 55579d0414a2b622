"""The jobs that move an artifact's bytes: upload, evict, hydrate.

A row never promises a copy that does not exist: it becomes LOCAL_AND_REMOTE after the copy is complete and durable, and EVICTED
before the file is removed. It accounts for every copy that may exist: an object is announced (by the row's suffix) before its
first byte is sent, and a deletion removes the file whatever the row states. So a job that is abandoned half-way leaks nothing.
The job holds the artifact's `pending_upload`, so the artifact is not deleted during the move (M8).

The state after each durable step, and what follows a crash there. Every job is run again from its start.
  upload   announce       row LOCAL with suffix; file                  sent again to the same name
           put            … and an object that no row promises         found under its name: adopted, if it is ours (P11)
           complete       row LOCAL_AND_REMOTE; file, object           the job is done, in the same transaction
  evict    publish        row EVICTED; file, object                    a stray file: the repeat removes it
           remove, sync   row EVICTED; object                          the repeat finds nothing to remove
           complete       the same                                     the job is done
  hydrate  stage          row EVICTED; object, `<file>.tmp`            overwritten
           rename, sync   row EVICTED; object, a stray file            compared with the row: adopted
           complete       row LOCAL_AND_REMOTE; file, object           the job is done, in the same transaction
If the job is cancelled there instead, the stray file or object stays until the next move or the deletion of the artifact.

A job whose goal is already reached succeeds without work. The row decides that, unless the last verification found a copy
missing or altered: then the move is repeated, which repairs one copy from the other. Segments of streams are moved by their
stream (`stream/tiers.py`), whose log is authoritative about copies (S1).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as with_digest
from typing import Any

from msgspec.structs import replace

from quire.core.errors import AlreadyExists, Corruption, InvalidInput, UnknownArtifact
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import object_key
from quire.jobs.context import JobContext
from quire.jobs.copies import (
    Tick,
    checked_file,
    checked_object,
    damaged,
    difference,
    digest_object,
    fetch,
    remove_files,
)
from quire.jobs.handler import Completed, Deferred, Outcome, Progress, artifact_of, commit_step, options, update
from quire.jobs.locations import ArtifactLocation
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Op
from quire.manifest.reads import ReadTxn
from quire.manifest.records import JobKind, JobState, Residency, VerifyState, WalFormat, WalRecord, WalState
from quire.manifest.verification import shares_bytes
from quire.objects.api import ExistingObject, ObjectStore

WAIT_MS = 1_000
"""How long a move is deferred while another move of the same artifact is in progress."""

_lock = threading.Lock()
_moving: set[tuple[str, ArtifactKey]] = set()
"""(store, artifact) that a thread of this process is moving; guarded by `_lock`."""

MakePlan = Callable[[JobContext, ReadTxn, ArtifactKey], "MovePlan"]
Work = Callable[[JobContext, Job, "MovePlan", Tick], Completed]


def upload_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Upload an artifact's file as its object."""
    options(job)
    ctx.manifest.ensure_owner_epoch()
    return _move(ctx, job, progress, plan_upload, _upload)


def evict_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Remove an artifact's file; its object stays."""
    options(job)
    return _move(ctx, job, progress, plan_eviction, _evict)


def hydrate_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Fetch an artifact's file from its object."""
    options(job)
    return _move(ctx, job, progress, plan_hydration, _hydrate)


def _move(ctx: JobContext, job: Job, progress: Progress, make_plan: MakePlan, work: Work) -> Outcome:
    key = artifact_of(job)
    with _alone(ctx, key) as alone:
        if not alone:
            return Deferred(ctx.clock.now_ms() + WAIT_MS)
        with ctx.manifest.read() as txn:
            plan = make_plan(ctx, txn, key)
        if plan.must_wait:
            return Deferred(ctx.clock.now_ms() + WAIT_MS)
        size = plan.task.place.size_bytes
        progress(0, size)
        return work(ctx, job, plan, lambda done: progress(done, size))


@contextmanager
def _alone(ctx: JobContext, key: ArtifactKey) -> Iterator[bool]:
    """Yield whether no other thread of this process moves the artifact; if so, keep others out for the block."""
    name = (ctx.root, key)
    with _lock:
        # Only the owner moves copies, so a set in memory is enough. Two moves of one artifact at a time would share
        # `<file>.tmp`, or one would remove the file that the other has just fetched.
        is_free = name not in _moving
        if is_free:
            _moving.add(name)
    try:
        yield is_free
    finally:
        if is_free:
            with _lock:
                _moving.discard(name)


def _upload(ctx: JobContext, job: Job, plan: MovePlan, tick: Tick) -> Completed:
    task, place = plan.task, plan.task.place
    if plan.is_done:
        return Completed({"moved_bytes": 0})
    if plan.announce is not None:
        # Before the first byte is sent, so that a deletion finds the object
        commit_step(ctx, job, [announcement(plan)])
        hit("jobs.upload.announced")
    done = upload(task.place, ctx.open_store(place.url), ctx.disk, tick)
    if _is_gone(ctx, place):
        # Its row was removed during the upload: nothing would ever look for the object again.
        ctx.collector.delete(place.url, [place.object_key])
    op = uploaded(task, done, at_ms=ctx.clock.now_ms())
    return Completed({"moved_bytes": 0 if done.was_there else done.size_bytes}, ops=(op,))


def _evict(ctx: JobContext, job: Job, plan: MovePlan, tick: Tick) -> Completed:
    task, place = plan.task, plan.task.place
    if not plan.is_done:
        check_before_eviction(task, ctx.open_store(place.url), tick)
        commit_step(ctx, job, [evicted(task)])  # before the file is removed: a row never promises a missing copy
        hit("jobs.evict.published")
    remove_local(place, ctx.disk)  # even if the plan is done: an earlier attempt may have ended before this step
    return Completed({"moved_bytes": 0 if plan.is_done else place.size_bytes})


def _hydrate(ctx: JobContext, _job: Job, plan: MovePlan, tick: Tick) -> Completed:
    task, place = plan.task, plan.task.place
    if plan.is_done:
        return Completed({"moved_bytes": 0})
    fetched = fetch(place, ctx.root, disk=ctx.disk, store=ctx.open_store(place.url), tick=tick)
    if _is_gone(ctx, place):
        remove_local(place, ctx.disk)
    return Completed({"moved_bytes": place.size_bytes if fetched else 0}, ops=(hydrated(task, fetched=fetched),))


def _is_gone(ctx: JobContext, place: ArtifactLocation) -> bool:
    """Return whether the artifact is deleted or about to be: this job was then cancelled, and its copy belongs to no row."""
    with ctx.manifest.read() as txn:
        counts = txn.refcount(place.key)
    return counts is None or not (counts.in_use or counts.pending_upload)


# ── moving bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Uploaded:
    """The result of an upload."""

    size_bytes: int
    sha256: bytes
    was_there: bool


def upload(place: ArtifactLocation, store: ObjectStore, disk: Disk, tick: Tick) -> Uploaded:
    """Put an artifact's file as its object; on return the object is durable and its size is checked.

    An existing object is adopted if it has the same size and sha256: the response to an earlier put may have been lost (P11).
    Only bytes that match the row are sent.
    """
    copy = checked_file(place, disk, tick)
    hit("jobs.upload.hashed")
    place = with_digest(place, sha256=copy.sha256)
    try:
        was_there = _put(place, store, disk, is_longer=copy.size_bytes > place.size_bytes)
    except AlreadyExists as error:
        raise Corruption(
            "a different object exists under the artifact's key",
            hint="nothing was overwritten; check that object, remove it, and upload again",
            artifact=place.key,
            **error.where,
        ) from error
    hit("jobs.upload.sent")
    check_size(place, store)
    hit("jobs.upload.checked")
    return Uploaded(place.size_bytes, place.sha256, was_there)


def _put(place: ArtifactLocation, store: ObjectStore, disk: Disk, *, is_longer: bool) -> bool:
    def is_ours(existing: ExistingObject) -> bool:
        same_size = existing.info.size_bytes == place.size_bytes
        return same_size and not difference(place, digest_object(place, existing.store), is_file=False)

    if not is_longer:
        return store.put_file(place.object_key, place.local, create_only=True, identity=is_ours).adopted
    # The file is a preallocated WAL segment (16 MiB at most, P1); the object has only the used bytes.
    file = disk.open(place.local, write=False)
    try:
        used = file.read_at(place.size_bytes, 0)
    finally:
        file.close()
    return store.put(place.object_key, used, create_only=True, identity=is_ours, sha256=place.sha256).adopted


def check_size(place: ArtifactLocation, store: ObjectStore) -> None:
    """Raise unless the object exists and has the right size."""
    size = store.head(place.object_key).size_bytes
    if size != place.size_bytes:
        what = f"the object has {size} bytes instead of {place.size_bytes}"
        raise damaged(place, what, store=store.url, key=place.object_key)


def check_before_eviction(task: MoveTask, store: ObjectStore, tick: Tick) -> None:
    """Raise unless the object can replace the file: it exists with the right size; if it is suspect, every byte is read."""
    check_size(task.place, store)
    if task.is_suspect:
        checked_object(task.place, store, tick)
    hit("jobs.evict.checked")


def remove_local(place: ArtifactLocation, disk: Disk) -> None:
    """Remove an artifact's file, and the temporary file that a fetch may have left next to it."""
    for fault in remove_files([place.local, place.staged], disk).values():
        raise fault
    hit("jobs.evict.removed")


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
DAMAGED = (VerifyState.MISSING, VerifyState.ALTERED)


@dataclass(frozen=True, slots=True)
class MoveTask:
    """One artifact whose bytes are moved."""

    place: ArtifactLocation
    is_suspect: bool = False
    """Whether a verification found one of its copies missing or altered, so that the row is not relied on."""


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The plan of one move."""

    task: MoveTask
    is_done: bool = False
    """Whether the goal is already reached: a success without work."""
    must_wait: bool = False
    """Whether an upload that must come first is outstanding."""
    announce: tuple[int, str] | None = None
    """(namespace, suffix) to write into the row before the first byte is sent."""


def plan_upload(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> MovePlan:
    """Plan LOCAL → LOCAL_AND_REMOTE."""
    row = _row(txn, key)
    if key.kind is ArtifactKind.WAL and row.state is WalState.OPEN:
        raise InvalidInput("only a sealed WAL segment can be uploaded", hint="seal it first", artifact=key)
    task = _task(ctx, txn, key, row)
    if task.place.has_remote and not task.is_suspect:
        return MovePlan(task, is_done=True)
    if not task.place.has_local:
        raise Corruption(
            "the artifact's object is damaged, and there is no file to upload again",
            hint="restore the object from a backup",
            artifact=key,
        )
    # Announced or uploaded before: the name stays the same, so that an object whose put was not acknowledged is
    # adopted (P11).
    if task.place.may_have_remote:
        return MovePlan(task)
    database = txn.database(key.origin_db_id)
    namespace_id, _ = txn.current_namespace(row.namespace_id or (database.namespace_id if database else 0))
    suffix = object_key(key)
    return MovePlan(
        _task(ctx, txn, key, replace(row, namespace_id=namespace_id, suffix=suffix)), announce=(namespace_id, suffix)
    )


def plan_eviction(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> MovePlan:
    """Plan LOCAL_AND_REMOTE → EVICTED."""
    row = _row(txn, key)
    task = _task(ctx, txn, key, row)
    if row.residency is Residency.LOCAL:
        if _is_uploading(txn, key):
            return MovePlan(task, must_wait=True)
        raise InvalidInput(
            "the artifact has no object: evicting it would lose it", hint="upload it first", artifact=key
        )
    if task.place.has_local and task.is_suspect and not (task.place.sha256 or task.place.crc64):
        raise no_digest(key)
    return MovePlan(task, is_done=not task.place.has_local)


def plan_hydration(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> MovePlan:
    """Plan EVICTED, REMOTE_ARCHIVED → LOCAL_AND_REMOTE."""
    task = _task(ctx, txn, key, _row(txn, key))
    place = task.place
    if not place.has_local:
        return MovePlan(task)
    if not (task.is_suspect and place.has_remote):
        return MovePlan(task, is_done=True)
    if not (place.sha256 or place.crc64):
        raise no_digest(key)  # the file may be the good copy: it is not overwritten
    return MovePlan(task)


def no_digest(key: ArtifactKey) -> Corruption:
    """Return the error for an artifact with a damaged copy when no digest shows which copy it is."""
    return Corruption(
        "a copy of the artifact is damaged, and no digest says which copy is good",
        hint="compare the file and the object by hand",
        artifact=key,
    )


def _row(txn: ReadTxn, key: ArtifactKey) -> Any:
    if key.kind not in (ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.WAL):
        raise InvalidInput("only chunks, deltas and WAL segments have bytes", artifact=key)
    row = txn.artifact(key)
    if row is None:
        raise UnknownArtifact("no such artifact in the catalog", artifact=key)
    if (isinstance(row, WalRecord) and row.format is WalFormat.APPEND_ONLY) or shares_bytes(key, row):
        hint = "use `quire stream tier`"
        raise InvalidInput("stream segments are moved by their stream", hint=hint, artifact=key)
    return row


def _task(ctx: JobContext, txn: ReadTxn, key: ArtifactKey, row: Any) -> MoveTask:
    return MoveTask(ctx.place_of(txn, key, row), is_suspect=row.verify_state in DAMAGED)


def _is_uploading(txn: ReadTxn, key: ArtifactKey) -> bool:
    """Return whether an upload of the artifact is outstanding."""
    named = (key.origin_db_id, key.kind, key.id, key.generation, key.delta_id)
    for state in (JobState.IN_FLIGHT, JobState.PENDING):
        for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, state):
            record = txn.job(job_id)
            if record is not None and record.kind is JobKind.UPLOAD and record.artifact == named:
                return True
    return False


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def announcement(plan: MovePlan) -> Op:
    """Return the operation that announces an object, committed before its first byte is sent."""
    assert plan.announce is not None, "it was announced before"
    namespace_id, suffix = plan.announce
    return update(plan.task.place.key, namespace_id=namespace_id, suffix=suffix)


def uploaded(task: MoveTask, done: Uploaded, *, at_ms: int) -> Op:
    """Return the operation that records an uploaded object."""
    return update(
        task.place.key,
        residency=Residency.LOCAL_AND_REMOTE,
        sha256=done.sha256,
        uploaded_at_ms=at_ms,
        verify_state=_state_after_repair(task),  # the file was read and verified, and the object has the same bytes
    )


def evicted(task: MoveTask) -> Op:
    """Return the operation that records an eviction, committed before the file is removed."""
    return update(task.place.key, residency=Residency.EVICTED)


def hydrated(task: MoveTask, *, fetched: bool) -> Op:
    """Return the operation that records a complete, durable file. A file that already existed proves nothing about the object,
    so a suspicion stays."""
    verify_state = _state_after_repair(task) if fetched else None
    return update(task.place.key, residency=Residency.LOCAL_AND_REMOTE, verify_state=verify_state)


def _state_after_repair(task: MoveTask) -> VerifyState | None:
    """Return the state of a repaired artifact: no longer damaged, but not verified either. Both copies have been seen to be the
    same."""
    return VerifyState.UNVERIFIED if task.is_suspect else None
