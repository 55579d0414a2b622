"""LMDB follows the tables of key-value databases, catches up after missed updates, and is compared by verify (S1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import WrongKind
from quire.core.settings import LsmSettings, MaintenanceSettings, StoreSettings
from quire.lsm.kv import Kv
from quire.lsm.projection import KEY_BYTES, KvProjection, record_of
from quire.lsm.verify import problems
from quire.manifest import tables as t
from quire.manifest.ops.databases import FoldLsm
from quire.manifest.records import LsmEndsRecord, LsmTableRecord
from quire.store.store import Store

SETTINGS = StoreSettings(maintenance=MaintenanceSettings(enabled=False), lsm=LsmSettings(level0_tables=20))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with quire.open(path, settings=SETTINGS) as store:
        yield store
        assert store.manifest.check() == []


def rows(store: Store, db_id: int) -> dict[int, LsmTableRecord]:
    with store.manifest.read() as txn:
        return {key[1]: row for key, row in txn.scan(t.LSM_CATALOG, db_id)}


def filled(store: Store, name: str = "cart") -> tuple[Kv, int]:
    kv = store.kv(name, create=True)
    for number in range(3):
        kv.write({b"%d" % i: b"v%d" % number for i in range(50)})
        kv.flush()
    return kv, store.database(name).db_id


def test_rows_follow_flushes_compactions_and_the_drop(store: Store) -> None:
    kv, db_id = filled(store)
    assert rows(store, db_id) == {table.meta.sst_id: record_of(table) for table in kv.view.levels}
    assert len(rows(store, db_id)) == 3
    kv.compact()
    ((sst_id, row),) = rows(store, db_id).items()
    assert (row.level, row.rows, row.key_min, row.key_max) == (1, 50, b"0", b"9")
    assert kv.view.levels.deeper[0][0].meta.sst_id == sst_id
    assert list(problems(kv)) == []
    store.drop("cart")
    assert rows(store, db_id) == {}


def test_recorded_ends_never_go_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: ends from before a checkpoint replaced newer ones; after a crash at the next checkpoint the set was refused."""
    kv, db_id = filled(store)
    projection, ends = kv.projection, kv.ends
    assert projection is not None

    def ends_then_fold() -> LsmEndsRecord:
        reached = ends()
        if not projection._lock.locked():  # then a flush in another thread could fold at this moment
            kv.put(b"more", b"1")
            kv.flush()
            kv.manifest.checkpoint()
            kv.fold()
        return reached

    kv.put(b"other", b"1")
    monkeypatch.setattr(kv, "ends", ends_then_fold)
    store.kvs.record_ends()
    monkeypatch.undo()
    with store.manifest.read() as txn:
        assert txn.get(t.LSM_ENDS, db_id) == kv.ends()


def test_rows_that_lmdb_missed_are_folded_at_the_next_open(path: Path) -> None:
    with quire.open(path, settings=SETTINGS) as store:
        kv, db_id = filled(store)
        kv.projection = None  # as if every process had died between the event and the row
        kv.put(b"more", b"1")
        kv.compact()
        missed = rows(store, db_id)
        live_ids = {table.meta.sst_id for table in kv.view.levels}
        assert missed.keys() != live_ids
    with quire.open(path, settings=SETTINGS) as store:
        kv = store.kv("cart")
        assert rows(store, db_id).keys() == {table.meta.sst_id for table in kv.view.levels} == live_ids
        assert list(problems(kv)) == []


def test_folding_again_changes_nothing(store: Store) -> None:
    kv, db_id = filled(store)
    head = store.manifest.feed.head()
    for _ in range(3):
        KvProjection(store.manifest, db_id).fold(lambda: kv.view.levels, kv.ends)
        kv.fold()
    assert store.manifest.feed.head() == head, "no operation is submitted for equal rows"
    before = rows(store, db_id)
    op = FoldLsm(db_id, list(before.items()), [99])
    store.manifest.submit([op, op]).result()
    assert rows(store, db_id) == before


def test_verify_reports_differences_in_lmdb(store: Store) -> None:
    kv, db_id = filled(store)
    (first, second, _) = rows(store, db_id)
    wrong_row = LsmTableRecord(9, 9, 9, 9, 9, 9)
    store.manifest.submit([FoldLsm(db_id, [(second, wrong_row), (77, wrong_row)], [first])]).result()
    messages = [str(problem) for problem in problems(kv)]
    assert [message.partition(":")[0] for message in messages] == ["V7"] * 3
    assert f"no row for table {first}" in messages[0]
    assert f"table {second} otherwise" in messages[1]
    assert "table 77, which is not live" in messages[2]


def test_a_failed_fold_does_not_prevent_writes(
    store: Store, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kv, db_id = filled(store)

    def refused(*_: object, **__: object) -> None:
        raise quire.StorageFault("LMDB has no space")

    with monkeypatch.context() as patched:
        patched.setattr(store.manifest, "submit", refused)
        kv.put(b"a", b"1")
        kv.flush()
    assert "lsm.projection_failed" in capfd.readouterr().err
    assert len(rows(store, db_id)) == 3
    kv.put(b"b", b"1")
    kv.flush()
    assert len(rows(store, db_id)) == 5, "the next fold includes the missed rows"


def test_long_keys_are_truncated_and_other_kinds_are_refused(store: Store) -> None:
    kv = store.kv("long", create=True)
    kv.put(b"k" * 60_000, b"")
    kv.flush()
    (row,) = rows(store, store.database("long").db_id).values()
    assert row.key_min == row.key_max == b"k" * KEY_BYTES
    store.create("shop", "pages")
    with pytest.raises(WrongKind):
        store.manifest.submit([FoldLsm(store.database("shop").db_id, [])]).result()


def test_a_fork_has_its_own_rows_once_it_is_opened(store: Store) -> None:
    kv, _ = filled(store)
    fork = store.fork("cart", "trial")
    assert len(store.kv("trial").view.levels) == len(rows(store, fork.db_id)) == 3
    kv.compact()
    assert len(rows(store, fork.db_id)) == 3
