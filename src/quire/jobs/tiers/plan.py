"""What an upload, an eviction or a hydration has to do now.

Rules
  1. A goal that has been reached is a success without work, so repeating a finished job is one: an upload wants an object, a
     hydration wants a file, an eviction wants no file.
  2. That a goal has been reached is believed of the row, unless the last verification found a copy missing or altered: then
     the move is made again, which is how a copy is repaired from the other one.
  3. Impossible are: evicting what has no object; uploading a WAL segment that is still written; moving what has no bytes.
  4. Segments of streams are not moved here: their object is the compressed form, which the stream makes (`stream/tiers.py`),
     and its own log is the truth about where copies are (S1).
  5. An object's place is decided once, when it is announced: the current owner epoch's in the place that its row names, or
     else its database. A repeated upload goes to the same place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from quire.core.errors import Corruption, InvalidInput, UnknownArtifact
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.jobs.context import JobContext, artifact_row
from quire.jobs.tiers.run import MoveTask
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import JobKind, JobState, Residency, VerifyState, WalFormat, WalRecord, WalState
from quire.manifest.verification import borrows

DAMAGED = (VerifyState.MISSING, VerifyState.ALTERED)


@dataclass(frozen=True, slots=True)
class MovePlan:
    """One move."""

    task: MoveTask
    is_done: bool = False
    """Its goal has been reached: a success without work (rule 1)."""
    must_wait: bool = False
    """What has to come first is on its way."""
    announce: tuple[int, str] | None = None
    """(namespace, suffix) to be written into the row before the first byte is sent."""


def plan_upload(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> MovePlan:
    """LOCAL → LOCAL_AND_REMOTE."""
    row = _row(txn, key)
    if key.kind is ArtifactKind.WAL and row.state is WalState.OPEN:
        raise InvalidInput("a WAL segment is uploaded when it is sealed", hint="seal it first", artifact=key)
    task = _task(ctx, txn, key, row)
    if task.place.has_remote and not task.is_suspect:
        return MovePlan(task, is_done=True)
    if not task.place.has_local:
        raise Corruption(
            "the artifact's object is damaged, and there is no file to upload again",
            hint="restore the object from a backup",
            artifact=key,
        )
    if task.place.may_have_remote:
        return MovePlan(task)
    database = txn.database(key.origin_db_id)
    namespace_id, _ = txn.current_namespace(row.namespace_id or (database.namespace_id if database else 0))
    suffix = object_key(key)
    return MovePlan(
        _task(ctx, txn, key, replace(row, namespace_id=namespace_id, suffix=suffix)), announce=(namespace_id, suffix)
    )


def plan_eviction(ctx: JobContext, txn: ReadTxn, key: ArtifactKey) -> MovePlan:
    """LOCAL_AND_REMOTE → EVICTED."""
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
    """EVICTED, REMOTE_ARCHIVED → LOCAL_AND_REMOTE."""
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
    """The error for an artifact with a bad copy, of which nobody knows which."""
    return Corruption(
        "a copy of the artifact is damaged, and no digest says which copy is good",
        hint="compare file and object by hand",
        artifact=key,
    )


def _row(txn: ReadTxn, key: ArtifactKey) -> Any:
    if key.kind not in (ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.WAL):
        raise InvalidInput("only chunks, deltas and WAL segments have bytes", artifact=key)
    row = artifact_row(txn, key)
    if row is None:
        raise UnknownArtifact("no such artifact in the catalog", artifact=key)
    if (isinstance(row, WalRecord) and row.format is WalFormat.APPEND_ONLY) or borrows(key, row):  # rule 4
        hint = "`quire stream tier` moves it, and the stream's upkeep does"
        raise InvalidInput("a stream's segment is moved by its stream", hint=hint, artifact=key)
    return row


def _task(ctx: JobContext, txn: ReadTxn, key: ArtifactKey, row: Any) -> MoveTask:
    return MoveTask(ctx.place_of(txn, key, row), ctx.root, is_suspect=row.verify_state in DAMAGED)


def _is_uploading(txn: ReadTxn, key: ArtifactKey) -> bool:
    """Whether an upload of the artifact is outstanding."""
    named = (key.origin_db_id, key.kind, key.id, key.generation, key.delta_id)
    for state in (JobState.IN_FLIGHT, JobState.PENDING):
        for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, state):
            record = txn.job(job_id)
            if record is not None and record.kind is JobKind.UPLOAD and record.artifact == named:
                return True
    return False
