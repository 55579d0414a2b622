"""The engine: opening, ticking, flushing, closing, and many databases at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.core.errors import (
    ConfigMismatch,
    Corruption,
    InvalidInput,
    StoreClosed,
    UnknownDatabase,
    WrongKind,
)
from quire.core.settings import PagesSettings
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.ops.databases import SetDbPageSize
from quire.manifest.ops.local import PutReader
from quire.manifest.records import DbKind, DbStatus, WalState
from quire.pages.pagestore import PageStore
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, image, write
from tests.pages.test_wal import index, rows


def test_a_database_is_opened_once(pages: Pages) -> None:
    store = pages.database()
    assert pages.engine.open("shop") is store
    assert pages.engine.open(store.db_id) is store
    assert [opened.wal for opened in pages.engine.stores()] == [store.wal]


def test_databases_of_other_kinds_are_refused(pages: Pages) -> None:
    pages.manifest.register_db("log", DbKind.STREAM)
    with pytest.raises(WrongKind):
        pages.engine.open("log")
    with pytest.raises(UnknownDatabase):
        pages.engine.open("nobody")
    with pytest.raises(UnknownDatabase):
        pages.engine.open(99)


def test_the_page_size_is_fixed_by_the_first_opening(pages: Pages) -> None:
    pages.manifest.register_db("fresh", DbKind.PAGES)
    for invalid_size in (500, 256, 131072, -512):
        with pytest.raises(InvalidInput):
            pages.engine.open("fresh", page_size=invalid_size)
    assert pages.engine.open("fresh", page_size=8192).page_size == 8192
    assert pages.engine.open("fresh").page_size == 8192
    with pytest.raises(InvalidInput):
        pages.engine.open("fresh", page_size=4096)
    pages.reopen()
    with pytest.raises(InvalidInput):
        pages.engine.open("fresh", page_size=4096)
    assert pages.engine.open("fresh").pages_per_chunk == 8192


def test_a_shape_that_does_not_match_its_hash_is_refused(pages: Pages) -> None:
    store = pages.database()
    pages.engine.close_database("shop")
    pages.manifest.submit([SetDbPageSize(store.db_id, PAGE, 99, b"another")]).result()
    with pytest.raises(ConfigMismatch):
        pages.engine.open("shop")


def test_a_read_only_database_opens_and_recovers(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    pages.manifest.update_db_status(store.db_id, DbStatus.READ_ONLY).result()
    pages.crash()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_opening_one_database_does_not_block_another(pages: Pages) -> None:
    """Recovering a gigabyte takes a while; the ticker and other databases must not wait for it."""
    pages.database("slow")
    pages.crash()
    entered, resume = threading.Event(), threading.Event()

    def wait_in_recovery(_: str) -> None:
        entered.set()
        assert resume.wait(30)

    model = Model()
    write(pages.database("slow"), model, {0: image()})
    pages.crash()
    with armed("pages.recovery.sealing", wait_in_recovery):
        opener = threading.Thread(target=lambda: pages.database("slow"))
        opener.start()
        assert entered.wait(30)
        other = pages.database("quick")
        write(other, Model(), {0: image()})
        assert [opened.wal for opened in pages.engine.stores()] == [other.wal]
        resume.set()
        opener.join()
    assert len(pages.engine.stores()) == 2


def test_threads_that_open_one_database_get_the_same_store(pages: Pages) -> None:
    pages.database()
    pages.reopen()
    barrier, stores = threading.Barrier(8), list[PageStore]()

    def work() -> None:
        barrier.wait()
        stores.append(pages.engine.open("shop"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(store) for store in stores}) == 1


def test_a_tick_syncs_publishes_and_seals_when_due(pages: Pages) -> None:
    store = pages.database()
    pages.clock.advance(10)
    with store.begin() as txn:
        txn.write_page(0, image())
        guard = txn.commit()
    pages.engine.tick(store)
    assert guard.done(), "commits without a waiter are synced within a second (Q2)"
    assert index(pages) == [(0, 1)]
    assert rows(pages)[1].state is WalState.OPEN
    pages.clock.advance(0.5)
    write(store, Model(), {0: image()})
    pages.engine.tick(store)
    assert index(pages) == [(0, 1)], "a tick publishes only when it is due"
    pages.clock.advance(60)
    pages.engine.tick(store)
    assert rows(pages)[1].state is WalState.INDEXED


def test_the_ticker_works_by_itself_and_survives_a_database_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = PagesSettings(page_size=PAGE, publish_seconds=0.01)
    pages = Pages(tmp_path, settings=settings, ticking=True)
    failing, other = pages.database("bad"), pages.database("good")

    def fail() -> Iterator[int]:
        raise ZeroDivisionError("a bug")

    failing.wal.publishing = fail  # type: ignore[method-assign]
    for store in (failing, other):
        write(store, Model(), {0: image()})
    deadline = time.monotonic() + 60
    while not index(pages, other.db_id) and time.monotonic() < deadline:
        pages.clock.advance(1.0)
        time.sleep(0.02)
    assert index(pages, other.db_id)
    assert pages.engine._ticker is not None
    assert pages.engine._ticker.is_alive()
    assert capsys.readouterr().err.count("pages.tick_failed") == 1, "the failure is logged once"
    del failing.wal.publishing
    pages.stop()


def test_the_ticker_survives_a_database_that_cannot_be_closed_and_a_failure_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: an idle database whose segment file was missing raised `FileNotFoundError` when it was closed, and the ticker of
    the whole store ended."""
    pages = Pages(tmp_path, settings=PagesSettings(page_size=PAGE, idle_seconds=60))
    write(pages.database("bad"), Model(), {0: image()})
    pages.database("bad").wal.publish()
    pages.database("good")
    (path,) = Path(pages.root).rglob("*.seg")
    path.unlink()
    pages.clock.advance(61)
    assert pages.engine.close_idle() == 2
    assert "pages.close_failed" in capsys.readouterr().err

    calls: list[int] = []

    def fail_once() -> None:
        calls.append(1)
        if len(calls) < 3:
            raise ZeroDivisionError("a bug")
        pages.engine._stopping.set()

    monkeypatch.setattr(pages.engine.quota, "tick", fail_once)
    pages.engine._run()
    assert len(calls) == 3
    assert capsys.readouterr().err.count("pages.ticker_failed") == 1, "the failure is logged once"
    pages.die()


def test_dropping_a_database_during_publication_is_not_a_failure(
    pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    store = pages.database()
    write(store, Model(), {0: image()})
    publishing = store.wal.publishing

    def drop_and_publish() -> Iterator[int]:
        pages.manifest.drop_db(store.db_id).result()
        return publishing()

    store.wal.publishing = drop_and_publish  # type: ignore[method-assign]
    pages.clock.advance(10.0)
    pages.engine.tick_all(include_quiescent=False)
    store.wal.publishing = publishing  # type: ignore[method-assign]
    assert [opened.db_id for opened in pages.engine.stores()] == [store.db_id]
    pages.engine.tick_all(include_quiescent=False)
    assert not pages.engine.stores(), "the next tick closes it"
    assert "tick_failed" not in capsys.readouterr().err


def test_flushing_leaves_nothing_open(pages: Pages) -> None:
    store = pages.database()
    with store.begin() as txn:
        txn.write_page(0, image())
        txn.commit()
    pages.engine.flush(store.db_id)
    assert rows(pages)[1].state is WalState.INDEXED
    pages.engine.flush(99)


def test_the_floor_of_a_closed_database_is_its_applied_lsn(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    with store.open_snapshot() as reader:
        write(store, model, {0: image()})
        assert pages.engine.floor(store.db_id) == reader.lsn
    pages.engine.close_database("shop")
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    pages.manifest.record_metric(1, 1, 1.0).result()  # queued after it
    with pages.manifest.read() as txn:
        floor = txn.get(t.SNAPSHOT_FLOOR, store.db_id)
    assert floor is not None
    assert floor.min_snapshot_lsn == floor.writer_high_lsn == model.newest.lsn, "the row has the floor too"


def test_a_database_that_is_opened_while_the_engine_closes_is_closed_too(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    pages.crash()
    closers: list[threading.Thread] = []

    def close_meanwhile(_: str) -> None:
        closers.append(threading.Thread(target=pages.engine.close))
        closers[0].start()
        closers[0].join(60)

    with armed("pages.recovery.sealing", close_meanwhile), pytest.raises(StoreClosed):
        pages.database()
    assert pages.engine.stores() == []
    pages.manifest.close()
    pages.start()
    with pages.database().open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_remote_readers_hold_the_floor_and_get_a_lease_after_a_restart(pages: Pages) -> None:
    """M10. Leases kept only in memory would be lost at a restart."""
    store, model = pages.database(), Model()
    first = write(store, model, {0: image()}).lsn
    write(store, model, {0: image()})
    expires = pages.clock.now_ms() + 30_000
    pages.manifest.submit([PutReader(store.db_id, 1, first, expires)]).result()
    assert pages.engine.floor(store.db_id) == first
    pages.clock.advance(31)
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    pages.manifest.submit([PutReader(store.db_id, 1, first, pages.clock.now_ms() + 1)]).result()
    pages.reopen()
    pages.clock.advance(20)
    store = pages.database()
    assert pages.engine.floor(store.db_id) == first, "the reader may not have been able to renew yet"
    pages.clock.advance(11)
    assert pages.engine.floor(store.db_id) == model.newest.lsn


def test_closing_retires_readers_and_refuses_everything_after(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    reader = store.open_snapshot()
    pages.engine.close()
    pages.engine.close()
    with pytest.raises(StoreClosed):
        store.begin()
    with pytest.raises(StoreClosed):
        pages.engine.open("shop")
    assert not reader.is_open
    pages.manifest.close()
    pages.start()
    with pages.database().open_snapshot() as reader_after_restart:
        assert_reads(reader_after_restart, model.newest)


def test_a_database_can_be_closed_and_opened_again(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    pages.engine.close_database("shop")
    pages.engine.close_database("shop")
    assert pages.engine.stores() == []
    again = pages.database()
    write(again, model, {1: image()})
    with again.open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_damage_of_one_database_does_not_affect_another(pages: Pages) -> None:
    store, model = pages.database("bad"), Model()
    write(store, model, {0: image(), 1: image()})
    good, good_model = pages.database("good"), Model()
    write(good, good_model, {0: image()})
    path = Path(pages.root) / "pages/00000001/wal/00000001.seg"
    data = bytearray(path.read_bytes())
    data[-600:] = b"x" * 600  # beyond the used part: no effect
    path.write_bytes(bytes(data))
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    data[8] ^= 1  # the header
    pages.crash()
    path.write_bytes(bytes(data))
    with pytest.raises(Corruption):
        pages.database("bad")
    with pages.database("good").open_snapshot() as reader:
        assert_reads(reader, good_model.newest)
    data[8] ^= 1
    path.write_bytes(bytes(data))
    with pages.database("bad").open_snapshot() as reader:
        assert_reads(reader, model.newest)
