"""The declared effects of operations are complete and correct; and the filters that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from random import Random
from typing import Annotated, Any, get_args, get_origin

import msgspec
import pytest

from quire.core.errors import InvalidInput, QuireError, UnknownDatabase
from quire.core.ids import ArtifactKind
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.op_effects import FILTERABLE, TOUCHES, ChangeFilter, Touches
from quire.manifest.ops import cursors
from quire.manifest.ops.artifacts import (
    BeginOwnerEpoch,
    DropNamespace,
    ForgetRetired,
    PutChunk,
    PutDelta,
    PutNamespace,
    RecordUploads,
    RetireObjects,
    UpdateArtifact,
)
from quire.manifest.ops.base import Counter, Op, ReserveIds, ReserveLocalIds
from quire.manifest.ops.corrections import (
    RESTORED,
    RESTORED_LOCAL,
    CorrectIndex,
    CorrectRefcount,
    RestoreLocalRow,
    RestoreRow,
)
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
from quire.manifest.ops.databases import (
    DropDb,
    FoldLsm,
    PruneAudit,
    RecordLsmEnds,
    RecordRollback,
    RegisterDb,
    RemoveDb,
    RenameDb,
    ReserveGeneration,
    SetDbOptions,
    SetDbPageSize,
    SetRetention,
    SoftDropDb,
    UndropDb,
    UpdateDbStatus,
)
from quire.manifest.ops.jobs import CompleteJob, EnqueueJob, EnsureJob, ForgetJob, RenewJobLease, RequeueJob, StartJob
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
from quire.manifest.ops.mirrors import AdoptMirrorBatch, BeginMirrorBatch, DropMirror, MarkMirror, PutMirror
from quire.manifest.ops.pageindex import ROW, VERSION_NAME, DropPageVersions, ForgetPages, PublishPages
from quire.manifest.ops.plans import AbandonPlan, BeginPlan, FinishPlan
from quire.manifest.ops.refs import RemoveArtifact
from quire.manifest.ops.registry import OPS
from quire.manifest.ops.slots import CollectLeaf, SetSlots
from quire.manifest.ops.snapshots import (
    DropSnapshot,
    ExtendSnapshot,
    ForkDb,
    PublishSnapshot,
    SoftDropSnapshot,
    UndropSnapshot,
)
from quire.manifest.ops.timeline import Timeline
from quire.manifest.ops.wal import (
    AdvanceCheckpoint,
    AdvanceWal,
    AppendWalChunk,
    DiscardSegment,
    MoveWalState,
    OpenSegment,
)
from quire.manifest.records import (
    ChunkRecord,
    CursorRecord,
    DbKind,
    DbRecord,
    DbStatus,
    DeltaRecord,
    JobKind,
    JobRecord,
    JobState,
    LsmEndsRecord,
    LsmLogEnd,
    LsmTableRecord,
    MirrorDatabaseRecord,
    MirrorRecord,
    NamespaceRecord,
    Pin,
    PlanRecord,
    Residency,
    RetentionRecord,
    SnapshotKind,
    VerifyState,
    WalFormat,
    WalState,
)
from quire.manifest.slots import Chain, Link, pack_leaf
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from tests.manifest.batches import BatchMaker
from tests.manifest.helpers import chunk, commit, register

BY_THE_WRITER = {CHANGE_LOG.name, t.GENERATION_WATERMARKS.name}
"""Written with every logged batch by the writer, not by an operation."""

OF_A_DATABASE = {
    table.name
    for table in t.TABLES.values()
    if table.key.fields[0][0] in ("db_id", "origin_db_id") and table not in (t.GC_REFCOUNTS, t.GC_ZERO)
}
"""Tables whose rows belong to a database. Counts are excluded: they belong to artifacts, to which any database may refer."""

NAME_ONLY_A_JOB = (StartJob, RequeueJob, CompleteJob, ForgetJob, RenewJobLease)

State = dict[str, dict[bytes, bytes]]


class EffectsRecorder:
    """Commits operations one at a time and compares their changes with their declaration."""

    def __init__(self, manifest: ManifestStore) -> None:
        self.manifest = manifest
        self.written: dict[type[Op], set[str]] = {}
        self._before = self._read_tables()

    def _read_tables(self) -> State:
        with self.manifest.read() as txn:
            state = {name: dict(txn.raw_scan(table)) for name, table in t.TABLES.items() if table is not CHANGE_LOG}
            first = next(txn.raw_scan(CHANGE_LOG), None)
        state[CHANGE_LOG.name] = {b"first": first[0] if first else b""}  # every logged operation extends its end
        return state

    def commit_and_compare(self, op: Op, *, key: bytes | None = None) -> None:
        """Commit the operation and assert that it changes no more than it declares."""
        self.manifest.submit([op], key=key).result(60)
        after = self._read_tables()
        changed = {
            name: {row for row in rows.keys() | after[name].keys() if rows.get(row) != after[name].get(row)}
            for name, rows in self._before.items()
        }
        wrote = {name for name, rows in changed.items() if rows} - (BY_THE_WRITER if op.logged else set())
        wrote -= {t.IDEMPOTENCY.name} if key is not None else set()
        kind = type(op).__name__
        declared = TOUCHES[type(op)]
        assert wrote <= declared.tables, (
            f"{kind} writes {wrote - declared.tables}: declare it in manifest/op_effects.py"
        )
        if not isinstance(op, NAME_ONLY_A_JOB):
            owners = {int.from_bytes(row[:4], "big") for name in OF_A_DATABASE for row in changed[name]}
            unnamed = owners - {*declared.databases(op), 0}
            assert not unnamed, (
                f"{op} changes rows of the databases {unnamed}: declare the field in manifest/op_effects.py"
            )
        self.written.setdefault(type(op), set()).update(wrote)
        self._before = after

    def try_and_compare(self, op: Op) -> None:
        """The operation is rejected, or changes no more than it declares."""
        with suppress(QuireError):
            self.commit_and_compare(op)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def witness(path: str, clock: ManualClock) -> Iterator[EffectsRecorder]:
    with ManifestStore.open(path, clock=clock) as manifest:
        yield EffectsRecorder(manifest)


# ── declarations ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_operation_is_declared() -> None:
    missing = [op.__name__ for op in OPS.values() if op not in TOUCHES]
    assert not missing, (
        f"{', '.join(missing)}: add a line to TOUCHES in manifest/op_effects.py with the tables it may write and the "
        "databases it names, and commit it once in `story` below; until then it passes every filter of the feed"
    )
    obsolete = [op.__name__ for op in TOUCHES if op not in OPS.values()]
    assert not obsolete, f"{', '.join(obsolete)}: no longer in ops/registry.py, so remove it from TOUCHES"


def test_every_field_that_names_a_database_is_declared() -> None:
    """For every field called `…db_id`, set to 77: the declaration returns it."""
    for op in OPS.values():
        for field in op.__struct_fields__:
            if field.endswith("db_id"):
                instance = op(**{name: 77 if name == field else _anything(op, name) for name in op.__struct_fields__})
                assert 77 in TOUCHES[op].databases(instance), (
                    f"{op.__name__}.{field} names a database: declare it in op_effects.py"
                )


class _Placeholder:
    """Stands for any record or list of pins that names no database."""

    db_id = parent_db_id = 0
    artifact = None


def _anything(op: type[Op], field: str) -> object:
    kinds = {info.name: info.type for info in msgspec.structs.fields(op)}
    return [] if field == "pins" else b"" if kinds[field] is bytes else _Placeholder() if field == "record" else 0


def story() -> Iterator[Op]:
    """A sequence in which every logged operation writes every table that it may write. Local operations follow in the
    test."""
    local, both = Residency.LOCAL, Residency.LOCAL_AND_REMOTE
    yield from (PutNamespace(n, NamespaceRecord("memory://", f"p{n}")) for n in (1, 2, 3))
    yield from (ReserveIds(Counter.JOB, 5), ReserveIds(Counter.CURSOR, 9))
    yield from (RegisterDb(n, DbRecord(f"ash-{n}", DbKind.PAGES, 0, namespace_id=2 * n - 1)) for n in (1, 2))
    yield from (UpdateDbStatus(1, DbStatus.READ_ONLY), UpdateDbStatus(1, DbStatus.ACTIVE), RenameDb(1, "oak"))
    yield FollowSqliteFile(2, "/srv/app.db", 250)
    yield from (SoftDropDb(2), UndropDb(2, "elm"), RenameDb(2, "ash-2"))
    yield RecordRollback(1, to_lsn=1, to_ms=2, lsn=9, before_lsn=8, snapshot="s", changed_pages=3)
    yield from (SetDbPageSize(1, 4096, 16384, b""), SetRetention(1, RetentionRecord(keep_last=3)))
    yield from (ReserveGeneration(1, generation) for generation in (1, 2, 3, 4))
    # write-ahead log: three segments, the second referenced by an upload
    yield OpenSegment(1, 1, WalFormat.PAGER, 65536, b"salt", 1)
    yield from (AppendWalChunk(1, 0, n, 1, n * 10, n * 10 + 9, 4096) for n in (1, 2, 3))
    yield from (AdvanceWal(1, 0, 90, 39, 39), PublishPages(1, ROW.pack(1, 1, 5, 0, 7, 1, 1, 0, 0) * 2))
    yield DropPageVersions(1, VERSION_NAME.pack(1, 5))
    yield PublishPages(1, ROW.pack(1, 1, 6, 0, 7, 1, 1, 0, 0))
    yield from (
        EnqueueJob(6, JobRecord(JobKind.UPLOAD, 1, 1, artifact=(1, ArtifactKind.WAL, 2, 0, 0))),
        StartJob(6, "w", 9),
    )
    states = (WalState.INDEXED, WalState.CHECKPOINT_READY, WalState.CHECKPOINTED, WalState.TRUNCATED)
    yield from (MoveWalState(1, segment, state) for segment in (1, 2) for state in states)
    yield CompleteJob(6, JobState.SUCCEEDED, 1)
    yield from (RemoveArtifact(1, ArtifactKind.WAL, segment, 0) for segment in (1, 2))
    yield UpdateArtifact(1, ArtifactKind.WAL, 3, 0, residency=both)
    # chunks, slots, a snapshot that refers to a leaf
    yield from (
        PutChunk(1, 0, 1, ChunkRecord(local, 9, 0, namespace_id=1)),
        PutChunk(1, 1, 1, ChunkRecord(local, 9, 0, namespace_id=2)),
    )
    bases: dict[int, Chain] = {n: (Link(ArtifactKind.BASE, 1, 1, 9),) for n in (0, 1)}
    yield from (SetSlots(1, 0, 1, 0, 0, pack_leaf(bases)), AdvanceCheckpoint(1, 1, 9))
    yield UpdateArtifact(1, ArtifactKind.BASE, 1, 1, residency=both, namespace_id=1)
    yield RemoveArtifact(0, ArtifactKind.NAMESPACE, 2, 0)
    yield from (
        PutChunk(1, 0, 2, ChunkRecord(local, 9, 0)),
        SetSlots(1, 0, 2, 1, 1, pack_leaf({0: (Link(ArtifactKind.BASE, 1, 2, 9),)})),
    )
    yield RemoveArtifact(1, ArtifactKind.BASE, 0, 1)
    yield PublishSnapshot(1, 1, SnapshotKind.NAMED, "first", 39, expires_at_ms=1)
    yield PublishSnapshot(1, 2, SnapshotKind.NAMED, "second", 39)
    yield from (SoftDropSnapshot(1, 2, 9), UndropSnapshot(1, 2, "back"), DropSnapshot(1, 2))
    yield PutDelta(1, 0, 3, 1, 1, DeltaRecord(2, local, 1, 0, namespace_id=1))
    yield UpdateArtifact(1, ArtifactKind.DELTA, 0, 3, 1, verify_state=VerifyState.VERIFIED)
    chain = (Link(ArtifactKind.BASE, 1, 2, 9), Link(ArtifactKind.DELTA, 1, 3, 12, 1))
    yield SetSlots(1, 0, 3, 1, 2, pack_leaf({0: chain}))
    yield RecordUploads(1, [(ArtifactKind.BASE, 0, 2, 0), (ArtifactKind.DELTA, 0, 3, 1)])
    yield from (ExtendSnapshot(1, 1, 9), DropSnapshot(1, 1), CollectLeaf(1, 0, 2), SetSlots(1, 0, 4, 1, 3, b"", b"\0"))
    yield RemoveArtifact(1, ArtifactKind.DELTA, 0, 3, 1)
    yield ForkDb(3, 1, "elm", 0, 39, 3, 8, [Pin(1, 3, 39, 4096)])
    yield from _story_continued()


def _story_continued() -> Iterator[Op]:
    # a key-value database
    yield RegisterDb(4, DbRecord("fir", DbKind.LSM, 0))
    yield from (FoldLsm(4, [(n, LsmTableRecord(0, 9, 0, 100, n, n)) for n in (1, 2)]), FoldLsm(4, [], [1]))
    yield FollowSqliteFile(1, "/srv/app.db", 250)
    yield from (RecordLsmEnds(4, LsmEndsRecord(LsmLogEnd(0, 1, 72, 3))), DropDb(4))
    # jobs
    yield from (EnqueueJob(7, JobRecord(JobKind.CHECKPOINT, 1, 1)), StartJob(7, "w", 9), RequeueJob(7, 1, 5, "again"))
    yield from (StartJob(7, "w", 9), CompleteJob(7, JobState.SUCCEEDED, 2), ForgetJob(7))
    yield from (EnsureJob(8, JobRecord(JobKind.MERGE, 1, 1)), EnsureJob(9, JobRecord(JobKind.MERGE, 1, 1)))
    yield EnsureJob(10, JobRecord(JobKind.UPLOAD, 1, 1, artifact=(1, ArtifactKind.WAL, 3, 0, 0)))
    # plans
    yield from (AppendWalChunk(1, 0, 4, 1, 40, 49, 4096), MoveWalState(1, 4, WalState.INDEXED))
    yield from (EnqueueJob(12, JobRecord(JobKind.CHECKPOINT, 1, 1)), StartJob(12, "w", 9))
    yield BeginPlan(1, 5, PlanRecord(12, 1, 49, 8, b"digest", [4], [(5, 0, False), (6, 1, True)]))
    plan = PlanRecord(12, 1, 49, 8, b"digest", [4], [], 1)
    yield from (AbandonPlan(1, 5), BeginPlan(1, 6, plan), FinishPlan(1, 6, 1))
    yield from (OpenSegment(1, 5, WalFormat.PAGER, 65536, b"salt", 50), DiscardSegment(1, 5))
    yield from (PutNamespace(4, NamespaceRecord("memory://x", name="x")), DropNamespace(4), SetDbOptions(1, {"a": "b"}))
    yield from (BeginOwnerEpoch(n, [(n + 4, NamespaceRecord("", f"e{n}", owner_epoch=n))]) for n in (1, 2))
    yield from (RetireObjects("", [("x/base:00000001", 1)]), ForgetRetired([t.retired_digest("", "x/base:00000001")]))
    # drops and corrections
    yield from (PutReplicaPosition(2, 1, frame, 5, 0) for frame in (1, 2))
    yield DropReplicaPositions(2, [(1, 1)])
    yield from (PutReader(2, 7, 5, 99), SetFloor(2, 1, 9), RecordMetric(2, 1, [1.0]), DropDb(2), RemoveDb(2))
    yield from (DropDb(1), ForgetPages(1), PruneAudit(1, 2**50), DropDb(3))
    count = t.GC_REFCOUNTS.key.pack(3, ArtifactKind.BASE, 99, 1, 0)
    yield from (CorrectRefcount(count, 0, 0), CorrectRefcount(count, 0, 0, remove=True))


NEVER_WRITTEN: dict[tuple[type[Op], str], str] = {}
"""Declared tables that the test never writes, with the reason."""


def _value_of(kind: Any) -> Any:
    """A value of a field's type."""
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return int(next(iter(kind)))
    origin = get_origin(kind)
    if origin is Annotated:
        return _value_of(get_args(kind)[0])
    return (origin or kind)()


def test_operations_change_what_they_declare_and_nothing_else(
    witness: EffectsRecorder, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in story():
        witness.commit_and_compare(op)
    job = EnqueueJob(11, JobRecord(JobKind.VERIFY, 3, 1))
    for op in (job, StartJob(11, "w", 9), RenewJobLease(11, "w", 100, 1, 2), RecordMetric(1, 1, [1.0])):
        witness.commit_and_compare(op)
    for op in (
        PutReader(3, 1, 5, 99),
        SetFloor(3, 1, 9),
        DropReader(3, 1),
        SetObjectPlace("objects"),
        RecordVerification([]),
    ):
        witness.commit_and_compare(op)
    rows = [(3, MirrorDatabaseRecord("c", 5)), (4, MirrorDatabaseRecord("d", 5))]
    for op in (
        PutMirror(7, MirrorRecord("lake", ["c*"], "orders", "parquet:/lake", 1)),
        MarkMirror(7),
        BeginMirrorBatch(7, 1, rows),
        AdoptMirrorBatch(7, 1),
        BeginMirrorBatch(7, 2, rows),
        DropMirror(7),
    ):
        witness.commit_and_compare(op)
    for table in (table for table in t.TABLES.values() if table.policy is t.Policy.DERIVED):
        key = bytes(table.key.width) if table.key.width else b"\0\0\0\0name"
        witness.commit_and_compare(CorrectIndex(table.name, key, 1))
        witness.commit_and_compare(CorrectIndex(table.name, key, None))
    witness.commit_and_compare(SetFloor(3, 1, 10), key=b"k" * 16)
    clock.advance(10**6)
    witness.commit_and_compare(PruneIdempotency(9))
    monkeypatch.setattr(cursors, "TRIM_ROWS", 1)  # so that rows remain to be trimmed
    for op in (RegisterCursor(20, 0, "slow"), RegisterCursor(21, 0, "slower"), RegisterCursor(22, 0)):
        witness.commit_and_compare(op)
    for op in (AcknowledgeChanges(20, 9), AcknowledgeChanges(22, 5), AcknowledgeChanges(21, 2), TrimChanges()):
        witness.commit_and_compare(op)
    for op in (LoseCursor(21, "too slow"), DropCursor(22), DropCursor(20), RetainChanges(20)):
        witness.commit_and_compare(op)
    row_beyond_head = t.CHANGE_CURSORS.codec.encode(CursorRecord(10**6, 0, 0))
    witness.commit_and_compare(RestoreLocalRow("change_cursors", t.CHANGE_CURSORS.key.pack(30), row_beyond_head))
    for op in (ClampCursor(30), LoseCursor(30, "too slow"), ResumeCursor(30), ReserveLocalIds(Counter.CURSOR, 99)):
        witness.commit_and_compare(op)
    witness.commit_and_compare(Timeline(3, 2, 0, 5, witness.manifest.feed.head(), 3 << 40))
    for table in (*RESTORED, *RESTORED_LOCAL):
        kind = RestoreRow if table in RESTORED else RestoreLocalRow
        required = [field.type for field in msgspec.structs.fields(table.codec.record_type) if field.required]
        row = table.codec.encode(
            msgspec.convert([_value_of(field_type) for field_type in required], table.codec.record_type)
        )
        key = (b"\0\0\0\x03" + b"\xfe" * 40)[: table.key.width]
        witness.commit_and_compare(kind(table.name, key, row))
        witness.commit_and_compare(kind(table.name, key, None))
    unwritten = {
        (op.__name__, table)
        for op, declared in TOUCHES.items()
        for table in declared.tables - witness.written.get(op, set())
        if (op, table) not in NEVER_WRITTEN
    }
    assert not unwritten, (
        f"declared but never written: {sorted(unwritten)}. Remove them from TOUCHES (manifest/op_effects.py), "
        "write them in `story`, or give the reason in NEVER"
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_random_operations_stay_within_their_declarations(path: str, seed: int) -> None:
    with ManifestStore.open(path) as manifest:
        maker, witness = BatchMaker(Random(seed)), EffectsRecorder(manifest)
        for _ in range(250):
            with manifest.read() as txn:
                planned = maker.story(txn)
            for op in planned:
                witness.try_and_compare(op)
        assert len(witness.written) > 20


def test_a_declaration_that_lacks_a_table_or_a_database_is_detected(
    witness: EffectsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness.commit_and_compare(register(1))
    kind: type[Op] = PutChunk
    declared = TOUCHES[kind]
    monkeypatch.setitem(TOUCHES, kind, Touches(frozenset({"db"}), declared.databases))
    with pytest.raises(AssertionError, match=r"PutChunk writes \{'chunk_catalog'\}"):
        witness.commit_and_compare(chunk(1))
    monkeypatch.setitem(TOUCHES, kind, Touches(declared.tables, lambda _: ()))
    with pytest.raises(AssertionError, match=r"rows of the databases \{1\}"):
        witness.commit_and_compare(chunk(2))


# ── filters ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def resolve_filter(manifest: ManifestStore, databases: object = None, tables: object = None) -> ChangeFilter:
    with manifest.read() as txn:
        change_filter = ChangeFilter.resolve(txn, databases, tables)  # type: ignore[arg-type]  # some are intentionally wrong
    assert change_filter is not None
    return change_filter


def test_a_filtered_change_keeps_its_identity_and_only_matching_operations(manifest: ManifestStore) -> None:
    commit(manifest, register(1, "one"), register(2, "two"))
    record = ChangeRecord(9, 8, (chunk(1), chunk(2, db_id=2), RenameDb(1, "x")), ((1, 5), (3, 7)), "trace")
    assert resolve_filter(manifest, ["two"]).of(record) == ChangeRecord(
        9, 8, (chunk(2, db_id=2),), ((1, 5), (3, 7)), "trace"
    )
    assert resolve_filter(manifest, [1], ["chunk_catalog"]).of(record) == ChangeRecord(
        9, 8, (chunk(1),), ((1, 5), (3, 7)), "trace"
    )
    assert resolve_filter(manifest, 1, "snapshot_index").of(record) is None
    assert resolve_filter(manifest, ["one", 2]).of(record) is record, "there is nothing to remove"


def test_an_operation_without_a_database_passes_only_filters_by_table(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    assert not resolve_filter(manifest, [1]).passes(StartJob(1, "w", 9))
    assert resolve_filter(manifest, tables=["job_queue"]).passes(StartJob(1, "w", 9))


def test_an_undeclared_operation_passes_every_filter(manifest: ManifestStore) -> None:
    class Later(Op, frozen=True, tag=60_000):
        pass

    commit(manifest, register(1))
    assert resolve_filter(manifest, [1], ["db"]).passes(Later())


def test_a_filter_keeps_the_database_that_a_name_meant_at_first(manifest: ManifestStore) -> None:
    commit(manifest, register(1, "shop"))
    change_filter = resolve_filter(manifest, ["shop"])
    commit(manifest, RenameDb(1, "old-shop"))
    commit(manifest, register(2, "shop"))
    assert change_filter.passes(chunk(1))
    assert not change_filter.passes(chunk(1, db_id=2))


def test_a_dropped_database_can_be_given_by_its_id(manifest: ManifestStore) -> None:
    commit(manifest, register(1, "shop"))
    commit(manifest, DropDb(1))
    assert resolve_filter(manifest, [1]).passes(DropDb(1))
    with pytest.raises(UnknownDatabase):
        resolve_filter(manifest, ["shop"])


@pytest.mark.parametrize("database", ["nobody", 0, 7, -1])
def test_an_unknown_database_is_rejected(manifest: ManifestStore, database: str | int) -> None:
    with pytest.raises(UnknownDatabase):
        resolve_filter(manifest, [database])


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (["nothing"], "no such table"),
        (["idempotency"], "no change in the feed writes this table"),
        (["db", "change_log"], "no change in the feed writes this table"),
        ([], "at least one"),
    ],
)
def test_a_table_that_is_never_in_the_feed_is_rejected(manifest: ManifestStore, tables: list[str], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        resolve_filter(manifest, tables=tables)


def test_every_logged_table_but_the_watermarks_can_be_filtered_by() -> None:
    logged = {table.name for table in t.TABLES.values() if table.policy is t.Policy.LOGGED}
    assert logged - FILTERABLE == {t.GENERATION_WATERMARKS.name}
