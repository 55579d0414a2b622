"""Operations on databases, namespaces and ids: what they do and what they reject."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from quire.core.errors import (
    AlreadyExists,
    DatabaseTombstoned,
    IllegalTransition,
    InvalidName,
    NameTaken,
    OutOfRange,
    ReadOnly,
    StillReferenced,
    UnknownDatabase,
    UnknownNamespace,
)
from quire.core.ids import U32_MAX, ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import PutChunk, PutNamespace
from quire.manifest.ops.base import Counter, Op, ReserveIds
from quire.manifest.ops.databases import (
    DropDb,
    RegisterDb,
    RemoveDb,
    RenameDb,
    ReserveGeneration,
    SetDbPageSize,
    SoftDropDb,
    UndropDb,
    UpdateDbStatus,
)
from quire.manifest.ops.refs import RemoveArtifact
from quire.manifest.ops.snapshots import DropSnapshot, ForkDb, PublishSnapshot
from quire.manifest.ops.wal import AdvanceCheckpoint, AdvanceWal, AppendWalChunk, OpenSegment
from quire.manifest.records import DbKind, DbRecord, DbStatus, NamespaceRecord, SnapshotKind, WalFormat
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import assert_rejected, checkpoint, chunk, collect, commit, counts, register

WRITES: list[Op] = [
    RenameDb(1, "other"),
    UpdateDbStatus(1, DbStatus.READ_ONLY),
    ReserveGeneration(1, 9),
    SetDbPageSize(1, 4096, 16, b""),
    DropDb(1),
    chunk(1),
    OpenSegment(1, 9, WalFormat.PAGER, 1, b"", 1),
    AppendWalChunk(1, 0, 9, 1, 1, 2, 3),
    AdvanceWal(1, 0, 1),
    AdvanceCheckpoint(1, 9, 0),
    PublishSnapshot(1, 1, SnapshotKind.ANONYMOUS),
    ForkDb(2, 1, "child"),
]


@pytest.mark.parametrize("op", WRITES, ids=lambda op: type(op).__name__)
def test_an_unknown_database_rejects_writes(manifest: ManifestStore, op: Op) -> None:
    assert_rejected(manifest, UnknownDatabase, op)


@pytest.mark.parametrize("op", WRITES, ids=lambda op: type(op).__name__)
def test_a_tombstoned_database_rejects_writes(manifest: ManifestStore, op: Op) -> None:
    commit(manifest, register(1), chunk(1))
    commit(manifest, DropDb(1))
    assert_rejected(manifest, DatabaseTombstoned, op)


def test_a_read_only_database_accepts_upkeep_but_no_new_data(manifest: ManifestStore) -> None:
    commit(manifest, register(1), UpdateDbStatus(1, DbStatus.READ_ONLY))
    assert_rejected(manifest, ReadOnly, OpenSegment(1, 1, WalFormat.PAGER, 1, b"", 1))
    assert_rejected(manifest, ReadOnly, SetDbPageSize(1, 4096, 16, b""))
    commit(manifest, chunk(1), RenameDb(1, "other"), PublishSnapshot(1, 1, SnapshotKind.ANONYMOUS))
    commit(manifest, UpdateDbStatus(1, DbStatus.ACTIVE), OpenSegment(1, 1, WalFormat.PAGER, 1, b"", 1))


def test_an_id_and_a_name_belong_to_one_database(manifest: ManifestStore) -> None:
    commit(manifest, register(1, "a"))
    assert_rejected(manifest, AlreadyExists, register(1, "b"))
    assert_rejected(manifest, NameTaken, register(2, "a"))
    assert_rejected(manifest, NameTaken, register(2, "b"), RenameDb(2, "a"))
    assert_rejected(manifest, NameTaken, ForkDb(2, 1, "a"))
    assert_rejected(manifest, AlreadyExists, ForkDb(1, 1, "b"))


def test_a_fork_of_a_dropped_database_is_not_dropped(manifest: ManifestStore) -> None:
    """Hazard: such a fork could be restored under its current name, and lost it."""
    commit(manifest, register(1, "a"), SoftDropDb(1), ForkDb(2, 1, "b"))
    with manifest.read() as txn:
        fork = txn.database(2)
    assert fork is not None
    assert (fork.name, fork.is_dropped, fork.dropped_at_ms) == ("b", False, 0)
    assert_rejected(manifest, IllegalTransition, UndropDb(2, "b"))
    assert manifest.check() == []


def test_renaming_frees_the_old_name(manifest: ManifestStore) -> None:
    commit(manifest, register(1, "a"))
    commit(manifest, RenameDb(1, "b"), register(2, "a"), RenameDb(1, "b"))
    with manifest.read() as txn:
        assert (txn.database_id("a"), txn.database_id("b")) == (2, 1)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\x00b", "\ud800"])
def test_an_invalid_name_is_rejected(manifest: ManifestStore, name: str) -> None:
    before = manifest.writer.head
    with pytest.raises(InvalidName):
        manifest.register_db(name, DbKind.PAGES)
    commit(manifest, register(1))
    with pytest.raises(InvalidName):
        manifest.rename_db(1, name).result()
    assert manifest.writer.head == before + 1


@pytest.mark.parametrize("db_id", [0, -1, U32_MAX + 1])
def test_an_id_outside_u32_is_rejected(manifest: ManifestStore, db_id: int) -> None:
    assert_rejected(manifest, OutOfRange, register(db_id, "x"))


def test_status_moves_between_active_and_read_only_and_ends_by_dropping(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    assert_rejected(manifest, IllegalTransition, UpdateDbStatus(1, DbStatus.TOMBSTONED))
    assert_rejected(manifest, IllegalTransition, RemoveDb(1))
    for status in (DbStatus.READ_ONLY, DbStatus.READ_ONLY, DbStatus.ACTIVE):
        commit(manifest, UpdateDbStatus(1, status))
    manifest.update_db_status(1, DbStatus.TOMBSTONED).result()
    with manifest.read() as txn:
        record = txn.database(1)
        assert record is not None
        assert record.status is DbStatus.TOMBSTONED
        assert record.dropped_at_ms > 0


def test_a_database_cannot_be_registered_as_tombstoned(manifest: ManifestStore) -> None:
    """Hazard: its name would belong to a database that does not exist, and the store could not be opened again (D1)."""
    record = DbRecord("x", DbKind.PAGES, 0, status=DbStatus.TOMBSTONED)
    assert_rejected(manifest, IllegalTransition, RegisterDb(1, record))


def test_a_dropped_name_is_free_and_a_dropped_id_is_not(manifest: ManifestStore) -> None:
    first = manifest.register_db("a", DbKind.PAGES)
    commit(manifest, DropDb(first))
    second = manifest.register_db("a", DbKind.PAGES)
    assert second > first
    commit(manifest, RemoveDb(first))
    assert manifest.register_db("b", DbKind.PAGES) > second


def test_ids_are_never_reused_even_if_everything_was_removed(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        ids = [manifest.register_db(f"d{n}", DbKind.PAGES) for n in range(3)]
        for db_id in ids:
            commit(manifest, DropDb(db_id))
            commit(manifest, RemoveDb(db_id))
        jobs = [manifest.reserve_job_id() for _ in range(3)]
    with ManifestStore.open(path) as manifest:
        assert manifest.register_db("fresh", DbKind.PAGES) > max(ids)
        assert manifest.reserve_job_id() > max(jobs)


def test_dropping_waits_for_snapshots(manifest: ManifestStore) -> None:
    commit(manifest, register(1), PublishSnapshot(1, 1, SnapshotKind.NAMED, "s"))
    assert_rejected(manifest, StillReferenced, DropDb(1))
    commit(manifest, DropSnapshot(1, 1), DropDb(1))


def test_a_tombstone_stays_until_no_artifact_remains(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 2, 3))
    checkpoint(manifest, 1, 0, 300)
    commit(manifest, DropDb(1))
    assert_rejected(manifest, StillReferenced, RemoveDb(1))
    collect(manifest)
    commit(manifest, RemoveDb(1))
    with manifest.read() as txn:
        assert txn.database(1) is None
        assert txn.wal_state(1) is None
        assert txn.count(t.GC_REFCOUNTS) == 0


def test_generations_are_reserved_once(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    assert [manifest.reserve_generation(1) for _ in range(3)] == [1, 2, 3]
    assert_rejected(manifest, AlreadyExists, ReserveGeneration(1, 3))
    assert_rejected(manifest, OutOfRange, ReserveGeneration(1, 0))
    commit(manifest, ReserveGeneration(1, 7))
    assert manifest.reserve_generation(1) == 8
    with pytest.raises(UnknownDatabase):
        manifest.reserve_generation(99)


def test_the_page_size_cannot_be_changed_once_it_is_set(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    commit(manifest, SetDbPageSize(1, 4096, 16, b"h"), SetDbPageSize(1, 4096, 16, b"h"))
    assert_rejected(manifest, OutOfRange, SetDbPageSize(1, 8192, 16, b"h"))


def test_reserved_ids_stay_inside_their_width(manifest: ManifestStore) -> None:
    commit(manifest, ReserveIds(Counter.JOB, 2**63))
    for counter in (Counter.DB, Counter.NAMESPACE):
        assert_rejected(manifest, OutOfRange, ReserveIds(counter, 0))
        assert_rejected(manifest, OutOfRange, ReserveIds(counter, 2**32))
    commit(manifest, ReserveIds(Counter.DB, 5), ReserveIds(Counter.DB, 3))
    with manifest.read() as txn:
        assert txn.next_id(Counter.DB) == 6


# ── namespaces ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_namespace_cannot_be_changed_once_it_is_created(manifest: ManifestStore) -> None:
    first = manifest.put_namespace("memory://", "a")
    commit(manifest, *[PutNamespace(first, record) for _, record in _namespaces(manifest)])
    assert_rejected(manifest, AlreadyExists, PutNamespace(first, NamespaceRecord("memory://", "b")))
    assert manifest.put_namespace("memory://", "b") > first


def _namespaces(manifest: ManifestStore) -> list[tuple[tuple[int, ...], NamespaceRecord]]:
    with manifest.read() as txn:
        return list(txn.scan(t.REMOTE_NAMESPACE))


def test_references_to_a_namespace_are_counted(manifest: ManifestStore) -> None:
    namespace_id = manifest.put_namespace("memory://")
    key = ArtifactKey(0, ArtifactKind.NAMESPACE, namespace_id, 0)
    commit(manifest, RegisterDb(1, DbRecord("a", DbKind.PAGES, 0, namespace_id=namespace_id)))
    commit(manifest, PutChunk(1, 1, 1, replace(chunk(1).record, namespace_id=namespace_id)))
    assert counts(manifest)[key] == (2, 0)
    assert_rejected(manifest, StillReferenced, RemoveArtifact(0, ArtifactKind.NAMESPACE, namespace_id, 0))
    unknown = RegisterDb(2, DbRecord("b", DbKind.PAGES, 0, namespace_id=77))
    assert_rejected(manifest, UnknownNamespace, unknown)
