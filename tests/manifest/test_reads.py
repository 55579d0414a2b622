"""Reading: typed getters, scans, snapshots, closed transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput, OutOfRange, StoreClosed, UnknownDatabase
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.databases import RenameDb
from quire.manifest.ops.snapshots import PublishSnapshot
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, JobKind, JobRecord, SnapshotKind
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import checkpoint, chunk, commit, register
from tests.manifest.test_ops_wal_and_jobs import enqueue


@pytest.fixture
def filled(manifest: ManifestStore) -> ManifestStore:
    commit(manifest, register(1, "a"), register(2, "b"), register(2**32 - 1, "last"))
    commit(
        manifest, *[chunk(n, db_id=db, generation=g) for db in (1, 2, 2**32 - 1) for n in (1, 2, 300) for g in (1, 2)]
    )
    return manifest


def test_common_lookups_have_typed_results(filled: ManifestStore) -> None:
    namespace_id = filled.put_namespace("memory://", "p")
    generation = checkpoint(filled, 1, 5)
    commit(filled, enqueue(7, JobKind.VERIFY))
    commit(filled, PublishSnapshot(2, 1, SnapshotKind.NAMED, "s"))
    with filled.read() as txn:
        assert txn.database_id("b") == 2
        database = txn.database(2)
        assert database is not None
        assert (database.name, database.kind) == ("b", DbKind.PAGES)
        assert txn.database(3) is None
        assert [db_id for db_id, _ in txn.databases()] == [1, 2, 2**32 - 1]
        assert txn.wal_state(1) is not None
        assert txn.wal_state(1, 5) is None
        count = txn.refcount(ArtifactKey(1, ArtifactKind.BASE, 5, generation))
        assert count is not None
        assert count.in_use == 1
        assert txn.refcount(ArtifactKey(9, ArtifactKind.BASE, 5, 1)) is None
        namespace = txn.namespace(namespace_id)
        assert namespace is not None
        assert namespace.prefix == "p"
        snapshot = txn.snapshot(2, 1)
        assert snapshot is not None
        assert snapshot.name == "s"
        assert txn.snapshot(2, 2) is None
        job = txn.job(7)
        assert isinstance(job, JobRecord)
        assert txn.job(8) is None
        assert len(txn.chain(1, 5)) == 1
        assert txn.chain(1, 6) == ()
        assert txn.chain(9, 6) == ()
        with pytest.raises(UnknownDatabase):
            txn.database_id("nobody")


def test_a_key_that_does_not_fit_is_rejected(filled: ManifestStore) -> None:
    with filled.read() as txn:
        for invalid in (-1, 2**32, "x"):
            with pytest.raises(OutOfRange):
                txn.get(t.DB, invalid)
        with pytest.raises(OutOfRange):
            list(txn.scan(t.CHUNK_CATALOG, 2**32))
        with pytest.raises(OutOfRange):
            list(txn.scan(t.CHUNK_CATALOG, 1, 2, 3, 4))


def test_a_prefix_scan_returns_exactly_its_rows_in_order(filled: ManifestStore) -> None:
    with filled.read() as txn:
        all_keys = [key for key, _ in txn.scan(t.CHUNK_CATALOG)]
        assert all_keys == sorted(all_keys)
        assert len(all_keys) == 18
        for db_id in (0, 1, 2, 3, 2**32 - 1):
            assert [key for key, _ in txn.scan(t.CHUNK_CATALOG, db_id)] == [key for key in all_keys if key[0] == db_id]
            backwards = [t.CHUNK_CATALOG.key.unpack(key) for key, _ in txn.raw_scan_back(t.CHUNK_CATALOG, db_id)]
            assert backwards == [key for key in reversed(all_keys) if key[0] == db_id]
            for number in (1, 300):
                keys = [key for key, _ in txn.scan(t.CHUNK_CATALOG, db_id, number)]
                assert keys == [key for key in all_keys if key[:2] == (db_id, number)]


@given(start=st.tuples(*[st.sampled_from([0, 1, 2, 3, 300, 301, 2**32 - 1])] * 3), prefixed=st.booleans())
def test_a_scan_begins_at_start(start: tuple[int, int, int], prefixed: bool) -> None:
    with _SHARED() as txn:
        all_keys = [key for key, _ in txn.scan(t.CHUNK_CATALOG)]
        if prefixed:
            keys = [key for key, _ in txn.scan(t.CHUNK_CATALOG, 2, start=(2, *start[1:]))]
            assert keys == [key for key in all_keys if key[0] == 2 and key >= (2, *start[1:])]
        else:
            assert [key for key, _ in txn.scan(t.CHUNK_CATALOG, start=start)] == [
                key for key in all_keys if key >= start
            ]


class _Shared:
    """One manifest for all examples of a property test."""

    manifest: ManifestStore | None = None

    def __call__(self) -> ReadTxn:
        assert self.manifest is not None
        return self.manifest.read()


_SHARED = _Shared()


@pytest.fixture(autouse=True, scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ManifestStore.open(str(tmp_path_factory.mktemp("shared") / "m")) as manifest:
        commit(manifest, register(1, "a"), register(2, "b"), register(2**32 - 1, "last"))
        rows = [chunk(n, db_id=db, generation=g) for db in (1, 2, 2**32 - 1) for n in (1, 2, 300) for g in (1, 2)]
        commit(manifest, *rows)
        _SHARED.manifest = manifest
        yield


def test_a_snapshot_does_not_see_later_commits(filled: ManifestStore) -> None:
    with filled.read() as before:
        commit(filled, RenameDb(1, "renamed"), chunk(77))
        assert before.database_id("a") == 1
        assert before.get(t.CHUNK_CATALOG, 1, 77, 1) is None
        with filled.read() as after:
            assert after.database_id("renamed") == 1


def test_records_outlive_their_transaction(filled: ManifestStore) -> None:
    with filled.read() as txn:
        record = txn.database(1)
        rows = list(txn.scan(t.CHUNK_CATALOG))
    assert record is not None
    assert record.name == "a"
    assert rows[0][1].size_bytes == 10


USES: dict[str, Callable[[ReadTxn], object]] = {
    "get": lambda txn: txn.get(t.DB, 1),
    "scan": lambda txn: list(txn.scan(t.DB)),
    "raw_scan": lambda txn: list(txn.raw_scan(t.DB)),
    "count": lambda txn: txn.count(t.DB),
    "refcount": lambda txn: txn.refcount(ArtifactKey(1, ArtifactKind.BASE, 1, 1)),
    "to_arrow": lambda txn: txn.to_arrow("db"),
    "changes": lambda txn: list(txn.changes()),
    "database_id": lambda txn: txn.database_id("a"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_closed_transaction_rejects_use(filled: ManifestStore, use: Callable[[ReadTxn], object]) -> None:
    txn = filled.read()
    use(txn)
    txn.close()
    txn.close()
    with pytest.raises(StoreClosed, match="has ended"):
        use(txn)


def test_changes_begin_at_the_requested_sequence(filled: ManifestStore) -> None:
    with filled.read() as txn:
        assert [change.sequence for change in txn.changes()] == [1, 2]
        assert [change.sequence for change in txn.changes(2)] == [2]
        assert list(txn.changes(3)) == []


def test_an_unknown_table_is_rejected_with_the_names_of_all_tables(filled: ManifestStore) -> None:
    with filled.read() as txn, pytest.raises(InvalidInput, match="chunk_catalog"):
        txn.to_arrow("chunks")


def test_any_number_of_threads_read_at_once(filled: ManifestStore) -> None:
    counts: list[int] = []

    def read() -> None:
        for _ in range(50):
            with filled.read() as txn:
                counts.append(sum(1 for _ in txn.scan(t.CHUNK_CATALOG)))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(counts) == {18}
    assert len(counts) == 300
