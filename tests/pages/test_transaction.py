"""Write transactions: what they see, what they refuse, and that the next writer is never blocked by an ended one."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from quire.core.errors import DatabaseTombstoned, InvalidInput, OutOfRange, ReadOnly, TimedOut
from quire.core.settings import PagesSettings
from quire.manifest.records import DbStatus
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, image, write


def test_only_the_transaction_itself_sees_its_writes(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image("old")})
    with store.begin() as txn, store.open_snapshot() as reader:
        txn.write_page(0, image("new"))
        txn.write_page(3, image("far"))
        assert [txn.read_page(page) for page in range(4)] == [image("new"), bytes(PAGE), bytes(PAGE), image("far")]
        assert reader.read_page(0) == image("old")
        with pytest.raises(OutOfRange):
            txn.read_page(4)
        txn.rollback()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_pages_truncated_and_grown_again_within_a_transaction_are_zeros(pages: Pages) -> None:
    """Otherwise the old contents would reappear (P15)."""
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(8)})
    with store.begin() as txn:
        txn.write_page(6, image("soon gone"))
        txn.truncate(3)
        with pytest.raises(OutOfRange):
            txn.read_page(3)
        txn.write_page(7, image("new"))
        assert txn.read_page(6) == bytes(PAGE)
        assert txn.read_page(2) == model.newest.page(2)
        guard = txn.commit()
    guard.result()
    model.commit(guard.lsn, 8, {7: image("new")}, cut_to=3)
    for _ in range(2):
        with store.open_snapshot() as reader:
            assert_reads(reader, model.newest)
        pages.reopen()
        store = pages.database()


def test_a_shrinking_transaction_without_pages_commits_its_size(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(8)})
    write(store, model, {}, truncate=3)
    pages.crash()
    store = pages.database()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    write(store, model, {5: image()})
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_a_transaction_without_changes_creates_no_version(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    with store.begin() as txn:
        guard = txn.commit()
    assert guard.result() == model.newest.lsn
    assert guard.done()
    with store.begin() as txn:
        txn.truncate(1)
        assert txn.commit().lsn == model.newest.lsn


def test_the_first_transaction_may_be_empty(pages: Pages) -> None:
    store = pages.database()
    with store.begin() as txn:
        assert txn.commit().result() == 0
    with store.open_snapshot() as reader:
        assert reader.size_pages == 0
        assert reader.read_pages([]) == {}


def test_a_second_writer_waits_and_gets_the_name_of_the_first(pages: Pages) -> None:
    store = pages.database()
    with store.begin():
        with pytest.raises(TimedOut) as caught:
            store.begin(timeout=0.01)
        assert caught.value.where["writer"] == threading.current_thread().name
        with pytest.raises(TimedOut):
            store.begin(timeout=0)
        with pytest.raises(InvalidInput):
            store.begin(timeout=-1)
    store.begin().rollback()


def test_many_databases_are_written_in_parallel(pages: Pages) -> None:
    first, second = pages.database("one"), pages.database("two")
    with first.begin() as one, second.begin(timeout=0) as two:
        one.write_page(0, image())
        two.write_page(0, image())


def test_after_its_end_a_transaction_refuses_everything(pages: Pages) -> None:
    store = pages.database()
    txn = store.begin()
    txn.write_page(0, image())
    txn.commit()
    txn.rollback()
    for call in (txn.commit, lambda: txn.write_page(0, image()), lambda: txn.read_page(0), lambda: txn.truncate(1)):
        with pytest.raises(InvalidInput, match="ended"):
            call()


def test_an_exception_rolls_back(pages: Pages) -> None:
    store = pages.database()

    def fail() -> None:
        with store.begin() as txn:
            txn.write_page(0, image())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.durable_version() == (0, 0)
    store.begin(timeout=0).rollback()


def test_a_garbage_collected_transaction_does_not_block_the_next(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread that dies, or a reference that is dropped, would block the database forever."""
    store = pages.database()

    def forget() -> None:
        store.begin().write_page(0, image())

    thread = threading.Thread(target=forget)
    thread.start()
    thread.join()
    gc.collect()
    assert "transaction.forgotten" in capsys.readouterr().err
    store.begin(timeout=0).rollback()


def test_a_database_that_was_set_read_only_or_dropped_takes_no_writes(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    txn = store.begin()
    txn.write_page(0, image())
    pages.manifest.update_db_status(store.db_id, DbStatus.READ_ONLY).result()
    with pytest.raises(ReadOnly):
        txn.commit()
    with pytest.raises(ReadOnly):
        store.begin()
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.manifest.update_db_status(store.db_id, DbStatus.ACTIVE).result()
    write(store, model, {0: image()})
    pages.manifest.drop_db(store.db_id).result()
    with pytest.raises(DatabaseTombstoned):
        store.begin()
    with pytest.raises(DatabaseTombstoned):
        pages.engine.open(store.db_id)
    pages.engine.tick(store)
    assert pages.engine.stores() == []


def test_a_large_transaction_goes_through_a_scratch_file(tmp_path: Path) -> None:
    """P6: neither all its pages nor all its frames are in memory at once."""
    pages, model = Pages(tmp_path, settings=PagesSettings(page_size=PAGE, spill_bytes=16 * PAGE)), Model()
    store = pages.database()
    write(store, model, {page: image() for page in range(300)})
    with store.begin() as txn:
        writes = {page: image() for page in range(50, 400)}
        for page, data in writes.items():
            txn.write_page(page, data)
        txn.write_page(60, image("twice"))
        writes[60] = image("twice")
        assert txn.read_page(51) == writes[51]
        assert txn.read_page(3) == model.newest.page(3)
        guard = txn.commit()
    guard.result()
    model.commit(guard.lsn, 400, writes)
    for _ in range(2):
        with store.open_snapshot() as reader:
            assert_reads(reader, model.newest)
        pages.reopen()
        store = pages.database()
    pages.stop()
