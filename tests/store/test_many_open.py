"""The cost of an idle database: no file, no thread, hardly any memory; and the cost of many open ones (N1)."""

from __future__ import annotations

import gc
import os
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import quire
from quire.core.settings import LsmSettings, MaintenanceSettings, PagesSettings, StoreSettings, StreamSettings
from quire.testing import ManualClock

FEW = 4
MANY = 12


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    settings = StoreSettings(
        maintenance=MaintenanceSettings(enabled=False),
        pages=PagesSettings(open_max=FEW),
        stream=StreamSettings(open_max=FEW),
        lsm=LsmSettings(open_max=FEW),
    )
    with quire.open(tmp_path / "store", settings=settings) as store:
        yield store


def _write_pages(store: quire.Store, number: int) -> None:
    connection = store.sqlite(f"p{number}", create=True)
    connection.execute("CREATE TABLE IF NOT EXISTS t(x); INSERT INTO t VALUES (1)")
    connection.close()


def _close_idle(store: quire.Store) -> None:
    """Two rounds of the keeper: databases without connections are closed."""
    for _ in range(2):
        store._parts.sqlite.run_keeper_round()
    gc.collect()


def test_page_databases_beyond_the_limit_are_closed_and_reopened_on_use(store: quire.Store) -> None:
    for number in range(MANY):
        _write_pages(store, number)
        _close_idle(store)
    assert len(store.pages.stores()) <= FEW + 1
    for number in range(MANY):
        _write_pages(store, number)
        with store.sqlite(f"p{number}") as connection:
            assert connection.execute("SELECT count(*) FROM t").fetchall() == [(2,)]


def test_streams_beyond_the_limit_are_closed_and_reopened_on_use(store: quire.Store) -> None:
    for number in range(MANY):
        store.stream(f"s{number}", create=True).append(b"a").result()
    assert len(store.streams.streams()) <= FEW
    for number in range(MANY):
        stream = store.stream(f"s{number}")
        stream.append(b"b").result()
        assert [record.payload for record in stream.read()] == [b"a", b"b"]


def test_key_value_sets_beyond_the_limit_are_closed_and_reopened_on_use(store: quire.Store) -> None:
    for number in range(MANY):
        store.kv(f"k{number}", create=True).put(b"a", b"%d" % number)
    assert len(store.kvs.databases()) <= FEW
    for number in range(MANY):
        assert store.kv(f"k{number}").get(b"a") == b"%d" % number


def test_databases_in_use_stay_open_and_work(store: quire.Store) -> None:
    stream, kv, page = store.stream("s", create=True), store.kv("k", create=True), store.sqlite("p", create=True)
    page.execute("CREATE TABLE t(x)")
    for number in range(MANY):
        store.stream(f"s{number}", create=True).append(b"a").result()
        store.kv(f"k{number}", create=True).put(b"a", b"1")
        _write_pages(store, number)
        _close_idle(store)
    stream.append(b"still").result()
    kv.put(b"still", b"there")
    page.execute("INSERT INTO t VALUES (1)")
    assert store.stream("s") is stream
    assert store.kv("k") is kv
    assert [record.payload for record in stream.read()] == [b"still"]
    assert kv.get(b"still") == b"there"


def test_an_iterator_keeps_its_database_open(store: quire.Store) -> None:
    store.stream("s", create=True).append([b"a", b"b"]).result()
    store.kv("k", create=True).write({b"a": b"1", b"b": b"2"})
    records, pairs = store.stream("s").read(), store.kv("k").scan()
    assert next(records).payload == b"a"
    assert next(pairs) == (b"a", b"1")
    for number in range(MANY):
        store.stream(f"s{number}", create=True)
        store.kv(f"k{number}", create=True)
    assert [record.payload for record in records] == [b"b"]
    assert list(pairs) == [(b"b", b"2")]


def test_a_reader_keeps_its_database_open(store: quire.Store) -> None:
    _write_pages(store, 0)
    with store.pages.open("p0").open_snapshot() as snapshot:
        for number in range(1, MANY):
            _write_pages(store, number)
            _close_idle(store)
        assert len(snapshot.read_page(0)) == 4096


def test_idle_databases_are_closed_after_a_while(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path / "store", settings=settings, clock=clock) as store:
        _write_pages(store, 0)
        store.stream("s", create=True).append(b"a").result()
        store.kv("k", create=True).put(b"a", b"1")
        _close_idle(store)
        for engine in (store.pages, store.streams, store.kvs):
            engine.close_idle()
        assert all((store.pages.stores(), store.streams.streams(), store.kvs.databases())), "they were just used"
        clock.advance(120.0)
        for engine in (store.pages, store.streams, store.kvs):
            engine.close_idle()
        assert not (store.pages.stores())
        assert not (store.streams.streams())
        assert not (store.kvs.databases())


def test_threads_do_not_grow_with_the_number_of_open_databases(tmp_path: Path) -> None:
    others = set(threading.enumerate())  # left by earlier tests in this process
    with quire.open(tmp_path / "store") as store:
        held: list[object] = []
        for number in range(MANY):
            stream, kv = store.stream(f"s{number}", create=True), store.kv(f"k{number}", create=True)
            stream.append(b"a").result()
            kv.put(b"a", b"1")
            held += [stream, kv]
        bound = store.settings.stream.threads + 2 * store.settings.lsm.threads + 8
        assert len(set(threading.enumerate()) - others) <= bound


def test_descriptors_do_not_grow_with_the_number_of_databases(store: quire.Store) -> None:
    """Only the store's own files count: other tests leave descriptors in this process, too."""
    counts = []
    for number in range(MANY):
        _write_pages(store, number)
        store.stream(f"s{number}", create=True).append(b"a").result()
        store.kv(f"k{number}", create=True).put(b"a", b"1")
        _close_idle(store)
        counts.append(len(_descriptors(store)))
    # The manifest twice, and two locks; a WAL of pages, two files of a stream, two of key-value sets.
    of_store, of_each = 4, 5
    assert max(counts) <= of_store + (FEW + 1) * of_each, _descriptors(store)


def _descriptors(store: quire.Store) -> list[str]:
    """The files below the store's directory that this process has open."""
    segments = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed in the meantime
            segments.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(path for path in segments if path.startswith(f"{store.path}/"))


def test_the_disk_of_an_idle_database_is_small(store: quire.Store) -> None:
    """At most 64 KiB beyond its data, for every kind."""
    for number in range(FEW):
        _write_pages(store, number)
        store.stream(f"s{number}", create=True).append(b"a").result()
        store.kv(f"k{number}", create=True).put(b"a", b"1")
    _close_idle(store)
    store.close()
    for kind in ("pages", "streams", "lsm"):
        below = Path(store.path) / kind
        allocated_bytes = sum(path.stat().st_blocks * 512 for path in below.rglob("*"))
        assert allocated_bytes / FEW <= 64 * 1024, kind


def test_the_memory_of_an_idle_database_is_small(tmp_path: Path) -> None:
    """At most 8 KiB for every kind, after it was used."""
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    clock = ManualClock()
    with quire.open(tmp_path / "store", settings=settings, clock=clock) as store:

        def used(numbers: range) -> int:
            """Allocated bytes when the databases are idle again."""
            for number in numbers:
                _write_pages(store, number)
                store.stream(f"s{number}", create=True).append(b"a").result()
                store.kv(f"k{number}", create=True).put(b"a", b"1")
            _close_idle(store)
            clock.advance(120.0)
            for engine in (store.pages, store.streams, store.kvs):
                engine.close_idle()
            assert not any((store.pages.stores(), store.streams.streams(), store.kvs.databases()))
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        used(range(FEW))
        tracemalloc.start()
        try:
            before = used(range(FEW, 2 * FEW))
            many = range(2 * FEW, 2 * FEW + 10 * FEW)
            after = used(many)
        finally:
            tracemalloc.stop()
    assert (after - before) / (3 * len(many)) <= 8 * 1024


def test_a_fork_that_was_never_written_is_not_checkpointed_for_its_age(tmp_path: Path) -> None:
    """Hazard: 100,000 of them would get a chunk each."""
    clock = ManualClock()
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path / "store", settings=settings, clock=clock) as store:
        _write_pages(store, 0)
        store.fork_many("p0", ["fork-1", "fork-2"])
        with store.sqlite("fork-2") as connection:
            connection.execute("INSERT INTO t VALUES (2)")
        store.pages.flush(store.database("fork-2").db_id)
        clock.advance(3600.0)
        assert store.upkeep.round(everything=True).checkpoints == 2, (
            "the template's chunk, and that of the fork with its own rows"
        )


def test_an_idle_page_database_keeps_no_gate(store: quire.Store) -> None:
    """A lock per database that was ever opened would be memory that grows with their number."""
    for number in range(FEW):
        _write_pages(store, number)
    assert not store.pages._gates
