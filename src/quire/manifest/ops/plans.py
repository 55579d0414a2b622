"""Operations on checkpoint and merge plans: committed before they run, published only by the current attempt of their
job (P10).

Terms
  plan        which slots get which new artifacts, from which segments; stored with its digest under (database, generation)
  generation  burned by the plan: no other plan ever writes objects of these names

A database has at most one plan at a time. A retry of its job runs the stored plan. A job that finds the plan of another
job waits until that job has ended, then abandons the plan. Publishing requires the plan's row and the running attempt
of its job, so the batch of a zombie fails as a whole. The segments that a plan absorbs are CHECKPOINT_READY while it
runs, CHECKPOINTED when it is published, and INDEXED again when it is abandoned (P6).

Which part of a plan is stored, and why not all of it: docs/decisions/005-plans-by-digest.md.
"""

from msgspec.structs import replace

from quire.core.errors import IllegalTransition, StalePlan
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.metrics import MetricKind, observe
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.databases import burn_generation
from quire.manifest.ops.jobs import job_of
from quire.manifest.ops.refs import artifact_key, mark_unreferenced, retain_namespace
from quire.manifest.overlay import Overlay
from quire.manifest.records import (
    ChunkRecord,
    DeltaRecord,
    JobState,
    PlanRecord,
    Residency,
    UInt,
    WalState,
)


def _require_attempt(tables: Overlay, job_id: int, attempt: int) -> None:
    """Refuse a batch that does not come from the running attempt of the plan's job."""
    _, job = job_of(tables, job_id)
    if job.state is not JobState.IN_FLIGHT or job.attempt != attempt:
        raise StalePlan(
            "the job's attempt is over", hint="stop working on it", job_id=job_id, attempt=attempt, running=job.attempt
        )


def _move_segments(
    tables: Overlay, db_id: int, segments: list[int], at: WalState, to: WalState, *, newest_reader_lsn: int = 0
) -> None:
    for segment_id in segments:
        key = t.WAL_CATALOG.key.pack(db_id, segment_id)
        row = tables.wal_catalog.get(key)
        if row is None or row.state is not at:
            raise StalePlan(
                "the state of a segment in the plan has changed",
                hint="plan again",
                db_id=db_id,
                segment_id=segment_id,
                at=row.state.name if row else "gone",
                expected=at.name,
            )
        newest = newest_reader_lsn or row.newest_reader_lsn
        tables.wal_catalog.put(key, replace(row, state=to, newest_reader_lsn=newest))


class BeginPlan(Op, frozen=True, tag=46):
    """Store a plan and burn its generation, before anything is written under it."""

    component = int(Component.SLOT)
    db_id: UInt
    generation: UInt
    record: PlanRecord
    newest_reader_lsn: UInt = 0
    """The newest version that was being read when the plan was made; 0 if none was."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        _require_attempt(tables, self.record.job_id, self.record.attempt)
        if tables.checkpoint_plan.any(t.DB.key.pack(self.db_id)):
            raise IllegalTransition(
                "the database already has a plan", hint="run it or abandon it first", db_id=self.db_id
            )
        burn_generation(tables, self.db_id, self.generation)
        _move_segments(
            tables,
            self.db_id,
            self.record.segments,
            WalState.INDEXED,
            WalState.CHECKPOINT_READY,
            newest_reader_lsn=self.newest_reader_lsn,
        )
        tables.checkpoint_plan.put(t.CHECKPOINT_PLAN.key.pack(self.db_id, self.generation), self.record)


class FinishPlan(Op, frozen=True, tag=47):
    """Finish a plan whose results are part of this batch: remove it, and mark its segments as absorbed."""

    component = int(Component.SLOT)
    db_id: UInt
    generation: UInt
    attempt: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        key, record = _plan_of(tables, self.db_id, self.generation)
        _require_attempt(tables, record.job_id, self.attempt)
        _move_segments(tables, self.db_id, record.segments, WalState.CHECKPOINT_READY, WalState.CHECKPOINTED)
        if record.created_at_ms:
            kind = MetricKind.CHECKPOINT_MS if record.segments else MetricKind.MERGE_MS
            observe(tables, self.db_id, kind, [max(at_ms - record.created_at_ms, 0)], at_ms)
        tables.checkpoint_plan.delete(key)


class AbandonPlan(Op, frozen=True, tag=48):
    """Abandon a plan that will not be published: its segments are free again, and what was written under it is garbage."""

    component = int(Component.SLOT)
    db_id: UInt
    generation: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key, record = _plan_of(tables, self.db_id, self.generation)
        for segment_id in record.segments:
            row_key = t.WAL_CATALOG.key.pack(self.db_id, segment_id)
            row = tables.wal_catalog.get(row_key)
            # Not `_move_segments`, which raises: segments of a dropped database are TRUNCATED or gone.
            if row is not None and row.state is WalState.CHECKPOINT_READY:
                tables.wal_catalog.put(row_key, replace(row, state=WalState.INDEXED))
        for slot, delta_id, is_delta in record.artifacts:
            kind = ArtifactKind.DELTA if is_delta else ArtifactKind.BASE
            name = ArtifactKey(self.db_id, kind, slot, self.generation, delta_id)
            # The names enter the catalogs with zero references, so the collector deletes what was already written.
            if record.namespace_id:
                retain_namespace(tables, record.namespace_id)
            view, row_key = tables.catalog(name)
            where = Residency.REMOTE_ARCHIVED
            unwritten = DeltaRecord(0, where, 0, at_ms) if is_delta else ChunkRecord(where, 0, at_ms)
            view.put(row_key, replace(unwritten, namespace_id=record.namespace_id))
            mark_unreferenced(tables, artifact_key(name), at_ms)
        tables.checkpoint_plan.delete(key)


def _plan_of(tables: Overlay, db_id: int, generation: int) -> tuple[bytes, PlanRecord]:
    key = t.CHECKPOINT_PLAN.key.pack(db_id, generation)
    record = tables.checkpoint_plan.get(key)
    if record is None:
        raise StalePlan("the database has no such plan", hint="plan again", db_id=db_id, generation=generation)
    return key, record
