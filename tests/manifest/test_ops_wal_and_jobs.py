"""Write-ahead logs, jobs and local tables: state machines, gates, and operations that never enter the feed."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from quire.core.errors import (
    AlreadyExists,
    ArtifactGone,
    IllegalTransition,
    InvalidInput,
    JobAlreadyPending,
    NameTaken,
    OutOfRange,
    UnknownArtifact,
    UnknownCursor,
    UnknownDatabase,
    UnknownJob,
    WrongKind,
)
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.base import Counter, Op, ReserveLocalIds
from quire.manifest.ops.cursors import (
    AcknowledgeChanges,
    ClampCursor,
    DropCursor,
    LoseCursor,
    RegisterCursor,
    ResumeCursor,
    RetainChanges,
    TrimChanges,
)
from quire.manifest.ops.databases import DropDb, RecordLsmEnds, RegisterDb, RemoveDb
from quire.manifest.ops.jobs import CompleteJob, EnqueueJob, ForgetJob, RenewJobLease, RequeueJob, StartJob
from quire.manifest.ops.local import (
    DropReader,
    DropReplicaPositions,
    FollowSqliteFile,
    PruneIdempotency,
    PutReader,
    PutReplicaPosition,
    RecordMetric,
    RecordVerification,
    SetFloor,
    SetObjectPlace,
)
from quire.manifest.ops.registry import OPS, AnyOp
from quire.manifest.ops.wal import NEXT_STATES, AdvanceCheckpoint, AdvanceWal, AppendWalChunk, MoveWalState, OpenSegment
from quire.manifest.records import (
    EXCLUSIVE_JOBS,
    LABEL_TAG,
    TERMINAL_JOB_STATES,
    DbKind,
    DbRecord,
    JobKind,
    JobRecord,
    JobState,
    LsmEndsRecord,
    LsmLogEnd,
    WalFormat,
    WalState,
)
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, difference, dump
from tests.manifest.checkpoints import WalChunkUpdate, append_wal_chunk
from tests.manifest.helpers import assert_rejected, checkpoint, commit, counts, register

# ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_segment_that_overlaps_another_is_rejected(manifest: ManifestStore) -> None:
    """Two segments with the same lsns would give a version two contents; no part of the batch is applied."""
    commit(manifest, register(1))
    commit(manifest, AppendWalChunk(1, 0, 1, 1, 1, 10, 4096))
    for first, last in ((10, 12), (1, 10), (5, 6), (1, 1)):
        assert_rejected(manifest, IllegalTransition, AppendWalChunk(1, 0, 2, 1, first, last, 4096))
    commit(manifest, AppendWalChunk(1, 0, 2, 1, 11, 20, 4096))
    assert_rejected(manifest, IllegalTransition, AppendWalChunk(1, 0, 3, 1, 8, 30, 4096))
    commit(manifest, OpenSegment(1, 3, WalFormat.PAGER, 4096, b"salt", 21))
    assert_rejected(manifest, IllegalTransition, AppendWalChunk(1, 0, 4, 1, 21, 25, 4096))
    commit(manifest, AppendWalChunk(1, 0, 3, 1, 21, 25, 4096))
    assert_clean(manifest)


FORWARD = list(WalState)


def open_segment(segment_id: int, lsn: int = 1) -> OpenSegment:
    return OpenSegment(1, segment_id, WalFormat.PAGER, 4096, b"salt", lsn)


def create_segment_in(manifest: ManifestStore, state: WalState) -> None:
    commit(manifest, register(1), open_segment(1))
    if state >= WalState.SEALED:
        commit(manifest, AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    for step in FORWARD[2 : FORWARD.index(state) + 1]:
        commit(manifest, MoveWalState(1, 1, step))


@pytest.mark.parametrize("target", list(WalState), ids=lambda state: state.name)
@pytest.mark.parametrize("state", list(WalState), ids=lambda state: state.name)
def test_a_segment_moves_one_step_at_a_time_and_back_only_along_one_edge(
    manifest: ManifestStore, state: WalState, target: WalState
) -> None:
    """Exhaustive: every state × every target, against the table of the design document, which is repeated here."""
    allowed = {(FORWARD[index], FORWARD[index + 1]) for index in range(5)}
    allowed.add((WalState.CHECKPOINT_READY, WalState.INDEXED))
    assert {(source, target) for source, targets in NEXT_STATES.items() for target in targets} == allowed
    create_segment_in(manifest, state)
    if (state, target) not in allowed:
        assert_rejected(manifest, IllegalTransition, MoveWalState(1, 1, target))
        return
    commit(manifest, MoveWalState(1, 1, target))
    with manifest.read() as txn:
        row = txn.get(t.WAL_CATALOG, 1, 1)
        assert row is not None
        assert row.state is target


def test_a_truncated_segment_is_released(manifest: ManifestStore) -> None:
    create_segment_in(manifest, WalState.CHECKPOINTED)
    key = ArtifactKey(1, ArtifactKind.WAL, 1, 0)
    assert counts(manifest)[key] == (1, 0)
    commit(manifest, MoveWalState(1, 1, WalState.TRUNCATED))
    assert counts(manifest)[key] == (0, 0)


def test_segment_ids_are_never_reused(manifest: ManifestStore) -> None:
    commit(manifest, register(1), open_segment(3))
    assert_rejected(manifest, AlreadyExists, open_segment(3))
    assert_rejected(manifest, AlreadyExists, open_segment(2))
    assert_rejected(manifest, OutOfRange, OpenSegment(1, 2**32, WalFormat.PAGER, 1, b"", 1))
    commit(manifest, open_segment(4))


def test_a_segment_is_sealed_once(manifest: ManifestStore) -> None:
    commit(manifest, register(1), open_segment(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    assert_rejected(manifest, IllegalTransition, AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    assert_rejected(manifest, InvalidInput, AppendWalChunk(1, 0, 2, 1, 9, 8, 100))
    assert_rejected(manifest, UnknownDatabase, AppendWalChunk(1, 7, 2, 1, 1, 5, 100))
    assert_rejected(manifest, UnknownArtifact, MoveWalState(1, 2, WalState.INDEXED))
    with manifest.read() as txn:
        wal = txn.wal_state(1)
        assert wal is not None
        assert (wal.last_sealed_segment, wal.last_applied_lsn, wal.next_segment_id) == (1, 5, 2)
        assert [key for key, _ in txn.scan(t.WAL_MANIFEST)] == [(1, 1, 1)]


def test_a_sealed_segment_can_be_recorded_with_its_upload(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    update = WalChunkUpdate(segment_id=1, first_lsn=1, last_lsn=5, used_bytes=100, upload=True)
    append_wal_chunk(manifest, 1, update).result()
    assert counts(manifest)[ArtifactKey(1, ArtifactKind.WAL, 1, 0)] == (1, 1)
    with manifest.read() as txn:
        (job,) = [record for _, record in txn.scan(t.JOB_QUEUE)]
    assert (job.kind, job.artifact) == (JobKind.UPLOAD, (1, 2, 1, 0, 0))


def test_marks_only_rise(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AdvanceWal(1, 0, 10, 8, 9, 4))
    commit(manifest, AdvanceWal(1, 0, 5, 3, 2))
    with manifest.read() as txn:
        wal = txn.wal_state(1)
        assert wal is not None
        assert (wal.lsn_reserved, wal.indexed_upto_lsn, wal.last_applied_lsn, wal.size_pages) == (10, 8, 9, 4)
    assert_rejected(manifest, IllegalTransition, AdvanceWal(1, 0, 10, 0, 11))
    assert_rejected(manifest, OutOfRange, AdvanceWal(1, 0, 2**64))
    assert_rejected(manifest, OutOfRange, AdvanceWal(1, 0, -1))


def test_the_time_of_the_last_commit_belongs_to_the_applied_mark(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AdvanceWal(1, 0, 10, 8, 8, 4, 500))

    def last_commit_ms(op: AdvanceWal) -> int:
        commit(manifest, op)
        with manifest.read() as txn:
            wal = txn.wal_state(1)
        assert wal is not None
        return wal.last_commit_ms

    assert last_commit_ms(AdvanceWal(1, 0, 20)) == 500
    assert last_commit_ms(AdvanceWal(1, 0, 0, 7, 7, None, 400)) == 500
    assert last_commit_ms(AdvanceWal(1, 0, 0, 8, 8, None, 500)) == 500
    assert last_commit_ms(AdvanceWal(1, 0, 0, 9, 9, None, 600)) == 600
    assert last_commit_ms(AdvanceWal(1, 0, 0, 10, 10)) == 0, "the time of another commit"


def test_a_checkpoint_never_moves_back_or_beyond_the_wal(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AdvanceWal(1, 0, 9, 9, 9), AdvanceCheckpoint(1, 2, 5))
    for generation, lsn in ((2, 6), (1, 6), (3, 4), (3, 10)):
        assert_rejected(manifest, IllegalTransition, AdvanceCheckpoint(1, generation, lsn))
    commit(manifest, AdvanceCheckpoint(1, 3, 9))


# ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def enqueue(job_id: int, kind: JobKind = JobKind.VERIFY, db_id: int = 1, **fields: object) -> EnqueueJob:
    return EnqueueJob(job_id, JobRecord(kind, db_id, 0, **fields))  # type: ignore[arg-type]  # fields of JobRecord


STEPS_TO: dict[JobState, list[Op]] = {
    JobState.PENDING: [],
    JobState.IN_FLIGHT: [StartJob(1, "w", 9)],
    JobState.SUCCEEDED: [StartJob(1, "w", 9), CompleteJob(1, JobState.SUCCEEDED, 1)],
    JobState.FAILED_PERMANENT: [StartJob(1, "w", 9), CompleteJob(1, JobState.FAILED_PERMANENT, 1, "why")],
    JobState.CANCELLED: [CompleteJob(1, JobState.CANCELLED)],
}
MOVES: dict[str, Op] = {
    "start": StartJob(1, "v", 9),
    "requeue": RequeueJob(1, 1, 50, "later"),
    "requeue of another attempt": RequeueJob(1, 2, 50),
    "renew": RenewJobLease(1, "w", 99, 1, 2),
    "renew by another": RenewJobLease(1, "x", 99),
    "succeed": CompleteJob(1, JobState.SUCCEEDED, 1),
    "succeed without an attempt": CompleteJob(1, JobState.SUCCEEDED),
    "succeed as another attempt": CompleteJob(1, JobState.SUCCEEDED, 2),
    "fail": CompleteJob(1, JobState.FAILED_PERMANENT, 1),
    "cancel from outside": CompleteJob(1, JobState.CANCELLED),
    "cancel by the worker": CompleteJob(1, JobState.CANCELLED, 1),
    "complete as pending": CompleteJob(1, JobState.PENDING, 1),
    "complete as running": CompleteJob(1, JobState.IN_FLIGHT, 1),
    "forget": ForgetJob(1),
}
ALLOWED: dict[JobState, set[str]] = {
    JobState.PENDING: {"start", "cancel from outside"},
    JobState.IN_FLIGHT: {"requeue", "renew", "succeed", "fail", "cancel from outside", "cancel by the worker"},
    JobState.SUCCEEDED: {"forget"},
    JobState.FAILED_PERMANENT: {"forget"},
    JobState.CANCELLED: {"forget"},
}


@pytest.mark.parametrize("state", list(JobState), ids=lambda state: state.name)
def test_a_job_moves_only_as_its_states_allow(tmp_path_factory: pytest.TempPathFactory, state: JobState) -> None:
    """Exhaustive: every state × every move, for an exclusive kind and for one that is not."""
    for kind, (name, move) in itertools.product((JobKind.CHECKPOINT, JobKind.VERIFY), MOVES.items()):
        with ManifestStore.open(str(tmp_path_factory.mktemp("job") / "m")) as manifest:
            commit(manifest, register(1), enqueue(1, kind), *STEPS_TO[state])
            if name in ALLOWED[state]:
                commit(manifest, move)
            else:
                assert_rejected(manifest, IllegalTransition, move)
            assert_clean(manifest)


@pytest.mark.parametrize("move", MOVES.values(), ids=lambda move: type(move).__name__)
def test_an_unknown_job_does_not_move(manifest: ManifestStore, move: Op) -> None:
    assert_rejected(manifest, UnknownJob, move)


def test_a_job_begins_pending_once_and_for_a_database_that_exists(manifest: ManifestStore) -> None:
    commit(manifest, register(1), enqueue(1))
    assert_rejected(manifest, AlreadyExists, enqueue(1))
    assert_rejected(manifest, AlreadyExists, enqueue(0))
    assert_rejected(manifest, UnknownDatabase, enqueue(2, db_id=9))
    assert_rejected(manifest, IllegalTransition, enqueue(2, state=JobState.IN_FLIGHT))
    commit(manifest, enqueue(2, db_id=0))


@pytest.mark.parametrize("kind", list(JobKind), ids=lambda kind: kind.name)
def test_only_exclusive_kinds_have_a_gate(manifest: ManifestStore, kind: JobKind) -> None:
    commit(manifest, register(1), register(2), enqueue(1, kind), enqueue(2, kind, db_id=2))
    if kind in EXCLUSIVE_JOBS:
        assert_rejected(manifest, JobAlreadyPending, enqueue(3, kind))
        commit(manifest, StartJob(1, "w", 9))
        assert_rejected(manifest, JobAlreadyPending, enqueue(3, kind))
        commit(manifest, CompleteJob(1, JobState.SUCCEEDED, 1), enqueue(3, kind))
    else:
        commit(manifest, enqueue(3, kind))


@pytest.mark.parametrize("end", sorted(TERMINAL_JOB_STATES), ids=lambda state: state.name)
def test_an_upload_refers_to_its_artifact_until_the_job_ends_in_any_state(
    manifest: ManifestStore, end: JobState
) -> None:
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    key = ArtifactKey(1, ArtifactKind.WAL, 1, 0)
    commit(manifest, enqueue(1, JobKind.UPLOAD, artifact=(1, 2, 1, 0, 0)))
    assert counts(manifest)[key] == (1, 1)
    commit(manifest, StartJob(1, "w", 9), RequeueJob(1, 1, 5), StartJob(1, "w", 9))
    assert counts(manifest)[key] == (1, 1)
    commit(manifest, DropDb(1))
    assert counts(manifest)[key] == (0, 1), "the upload needs the bytes until it ends"
    commit(manifest, CompleteJob(1, end, 2))
    assert counts(manifest)[key] == (0, 0)
    assert_rejected(manifest, ArtifactGone, enqueue(2, JobKind.UPLOAD, artifact=(1, 2, 1, 0, 0)))
    assert_rejected(manifest, UnknownArtifact, enqueue(2, JobKind.UPLOAD, artifact=(1, 2, 9, 0, 0)))


def test_the_flush_gate_follows_the_checkpoint_job(manifest: ManifestStore) -> None:
    def gate() -> tuple[int, bool, bool]:
        with manifest.read() as txn:
            wal = txn.wal_state(1)
        assert wal is not None
        return wal.active_job_id, wal.last_success_at_ms > 0, wal.errored_since_ms > 0

    commit(manifest, register(1), enqueue(1, JobKind.CHECKPOINT))
    assert gate() == (0, False, False)
    commit(manifest, StartJob(1, "w", 9))
    assert gate() == (1, False, False)
    commit(manifest, RequeueJob(1, 1, 5))
    assert gate() == (0, False, True)
    commit(manifest, StartJob(1, "w", 9), CompleteJob(1, JobState.SUCCEEDED, 2))
    assert gate() == (0, True, False)


def test_job_ids_are_never_reused_by_the_facade(manifest: ManifestStore) -> None:
    job_id = manifest.reserve_job_id()
    commit(manifest, enqueue(job_id, db_id=0), CompleteJob(job_id, JobState.CANCELLED), ForgetJob(job_id))
    assert manifest.reserve_job_id() > job_id


# ── local ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
LOCAL: list[Op] = [
    PutReplicaPosition(1, 1, 1, 5, 0),
    DropReplicaPositions(1, [(1, 1)]),
    RecordMetric(1, 1, [1.0]),
    RegisterCursor(1, 0, "tail"),
    AcknowledgeChanges(1, 1),
    RegisterCursor(2, 0, "gone"),
    LoseCursor(2, "too slow"),
    RetainChanges(1),
    TrimChanges(),
    DropCursor(1),
    PutReader(1, 1, 1, 99),
    DropReader(1, 1),
    SetFloor(1, 1, 2),
    PruneIdempotency(10),
    RenewJobLease(1, "w", 99),
    SetObjectPlace("objects"),
    RecordVerification(["wal 1: torn"]),
    RecordLsmEnds(2, LsmEndsRecord(LsmLogEnd(0, 1, 72, 3))),
    RegisterCursor(8, 0),
    LoseCursor(8, "slow"),
    ResumeCursor(8),
    ClampCursor(8),
    ReserveLocalIds(Counter.READER, 7),
    FollowSqliteFile(1, "/srv/app.db", 250),
]


def test_log_ends_are_recorded_for_key_value_databases_only(manifest: ManifestStore) -> None:
    """Hazard: the operation accepted any database."""
    commit(manifest, register(1))
    with pytest.raises(WrongKind, match="key-value"):
        manifest.submit([RecordLsmEnds(1, LsmEndsRecord(LsmLogEnd(0, 1, 72, 3)))]).result()


def test_a_reserved_job_id_is_enqueued_once(manifest: ManifestStore) -> None:
    """Hazard: an id could be reserved, but no call accepted it."""
    job_id = manifest.reserve_job_id()
    other = manifest.jobs.enqueue(JobKind.VERIFY)
    assert other > job_id
    assert manifest.jobs.enqueue(JobKind.VERIFY, job_id=job_id) == job_id
    assert manifest.jobs.get(job_id).record.state is JobState.PENDING
    for unreserved in (job_id, other, 10**6):
        with pytest.raises(InvalidInput, match="reserved"):
            manifest.jobs.enqueue(JobKind.VERIFY, job_id=unreserved)


def test_local_operations_never_enter_the_feed_or_change_a_logged_table(manifest: ManifestStore) -> None:
    commit(manifest, register(1), RegisterDb(2, DbRecord("cart", DbKind.LSM, 0)), enqueue(1), StartJob(1, "w", 9))
    logged, head = dump(manifest, t.Policy.LOGGED), manifest.writer.head
    for op in LOCAL:
        receipt = manifest.submit([op]).result()
        assert (receipt.sequence, receipt.generations) == (0, {})
        assert not difference(logged, dump(manifest, t.Policy.LOGGED)), op
    assert manifest.writer.head == head
    tested = {type(op) for op in LOCAL}
    assert {op.__name__ for op in OPS.values() if not op.logged} - {op.__name__ for op in tested} == {
        "CorrectIndex",
        "RestoreLocalRow",
    }


def test_a_mixed_batch_logs_only_its_logged_part(manifest: ManifestStore) -> None:
    commit(manifest, RecordMetric(1, 1, [1.0]), register(1), RegisterCursor(1, 0))
    with manifest.read() as txn:
        (change,) = list(txn.changes())
    assert [type(op).__name__ for op in change.operations] == ["RegisterDb"]


def test_tags_are_pinned() -> None:
    """Old change records must stay readable: a tag never changes its meaning."""
    assert {tag: op.__name__ for tag, op in OPS.items() if tag in (1, 10, 20, 30, 40, 50, 60, 70, 80, 90)} == {
        1: "ReserveIds",
        10: "RegisterDb",
        20: "PutChunk",
        30: "SetSlots",
        40: "OpenSegment",
        50: "PublishSnapshot",
        60: "RemoveArtifact",
        70: "EnqueueJob",
        80: "PublishPages",
        90: "RecordMetric",
    }
    assert len(OPS) == len(get_args(AnyOp))


def test_metrics_merge(manifest: ManifestStore) -> None:
    manifest.record_metric(1, 2, [0.5, 3.0]).result()
    manifest.record_metric(1, 2, 8).result()
    with manifest.read() as txn:
        row = txn.get(t.METRICS, 1, 2)
    assert row is not None
    assert (row.sum, row.count, row.min, row.max) == (11.5, 3, 0.5, 8.0)
    assert {index: n for index, n in enumerate(row.buckets) if n} == {0: 1, 2: 1, 4: 1}
    for invalid in ([], [float("nan")], [float("inf")], [1e308, 1e308]):
        assert_rejected(manifest, InvalidInput, RecordMetric(1, 2, invalid))


def test_a_cursor_moves_forward_and_never_beyond_the_head(manifest: ManifestStore) -> None:
    for n in range(1, 6):
        commit(manifest, register(n))
    commit(manifest, RegisterCursor(1, 0, "tail"), RegisterCursor(2, 99))
    assert_rejected(manifest, NameTaken, RegisterCursor(3, 0, "tail"))
    assert_rejected(manifest, AlreadyExists, RegisterCursor(1, 0, "other"))
    assert_rejected(manifest, AlreadyExists, RegisterCursor(0, 0))
    assert_rejected(manifest, OutOfRange, AcknowledgeChanges(1, 6))
    assert_rejected(manifest, UnknownCursor, AcknowledgeChanges(9, 1))
    assert_rejected(manifest, UnknownCursor, DropCursor(9))
    commit(manifest, AcknowledgeChanges(1, 4))
    commit(manifest, AcknowledgeChanges(1, 2))
    with manifest.read() as txn:
        cursors = {key[0]: row.acked_sequence for key, row in txn.scan(t.CHANGE_CURSORS)}
        oldest = txn.get(t.META, "oldest_sequence")
        assert txn.next_id(Counter.CURSOR) == 3
    assert cursors == {1: 4, 2: 5}
    assert oldest is not None
    assert oldest.number == 5
    commit(manifest, DropCursor(1), RegisterCursor(3, 0, "tail"))


def test_readers_and_floors_belong_to_a_database(manifest: ManifestStore) -> None:
    assert_rejected(manifest, UnknownDatabase, PutReader(1, 1, 1, 9))
    assert_rejected(manifest, UnknownDatabase, SetFloor(1, 1, 2))
    commit(manifest, register(1), PutReader(1, 1, 5, 9), SetFloor(1, 1, 2))
    commit(manifest, PutReader(1, 1, 5, 19), DropReader(1, 7))
    commit(manifest, DropReader(1, 1), DropReader(1, 1))


def test_the_mark_of_a_dropped_database_outlives_its_tombstone(manifest: ManifestStore) -> None:
    """Hazard: removing the tombstone removed the marks of holders, and no mark could be made after it."""
    tags = {LABEL_TAG: "shop"}
    commit(
        manifest, register(1), PutReader(1, 1, 0, 9, tags), PutReader(1, 2, 5, 9, {}, b"a view"), PutReader(1, 3, 5, 9)
    )
    manifest.drop_db(1).result()
    manifest.jobs.cancel(manifest.jobs.outstanding(1, JobKind.DELETE))
    commit(manifest, RemoveDb(1))
    commit(manifest, PutReader(1, 4, 0, 9, tags))
    commit(manifest, PutReader(1, 2, 5, 19))  # a renewal
    assert_rejected(manifest, UnknownDatabase, PutReader(1, 5, 5, 9, tags))
    with manifest.read() as txn:
        assert [reader for (_, reader), _ in txn.scan(t.SNAPSHOT_READERS)] == [1, 2, 4]


def test_pruning_looks_at_a_bounded_number_of_answers(path: str) -> None:
    """Hazard: the operation read every answer on the writer thread, and all commits waited for seconds."""
    clock = ManualClock()
    with ManifestStore.open(path, clock=clock) as manifest:
        manifest.submit([RecordMetric(1, 1, [1.0])], key=b"z" * 16).result()
        clock.advance(90_000)
        for n in (1, 2):
            manifest.submit([RecordMetric(1, 1, [1.0])], key=bytes([n]) * 16).result()
        for prune, remaining in ((PruneIdempotency(2), 3), (PruneIdempotency(1, bytes([2]) * 16), 2)):
            commit(manifest, prune)
            with manifest.read() as txn:
                assert txn.count(t.IDEMPOTENCY) == remaining


def test_expired_idempotency_rows_are_pruned_in_bounded_steps(path: str) -> None:
    clock = ManualClock()
    with ManifestStore.open(path, clock=clock) as manifest:
        for n in range(5):
            manifest.submit([RecordMetric(1, 1, [1.0])], key=bytes([n]) * 16).result()
        clock.advance(90_000)
        manifest.submit([RecordMetric(1, 1, [1.0])], key=b"f" * 16).result()
        for remaining in (4, 2, 1, 1):
            commit(manifest, PruneIdempotency(2))
            with manifest.read() as txn:
                assert txn.count(t.IDEMPOTENCY) == remaining
        assert_clean(manifest)


def test_a_checkpoint_is_one_batch(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    head = manifest.writer.head
    checkpoint(manifest, 1, 0, 1, 300)
    assert manifest.writer.head == head + 3, "generation, mark, checkpoint"
