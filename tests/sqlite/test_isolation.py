"""Snapshot isolation: readers and the writer do not wait for each other, and a stale transaction cannot write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import apsw
import pytest

from quire.sqlite.databases import WriterSlot
from quire.store.store import Store
from tests.sqlite.conftest import Connect, count, extended


def test_a_read_transaction_sees_one_version(shop: apsw.Connection, connect: Connect) -> None:
    reader = connect()
    with reader:
        assert count(reader) == 10
        shop.execute("delete from t where id < 5")
        assert (count(reader), count(shop)) == (10, 5)
    assert count(reader) == 5


def test_readers_and_the_writer_do_not_block_each_other(shop: apsw.Connection, connect: Connect) -> None:
    reader, late = connect(timeout=0), connect(timeout=0)
    reader.execute("begin")
    assert count(reader) == 10
    shop.execute("begin immediate; delete from t")
    assert (count(reader), count(late)) == (10, 10)
    shop.execute("commit")
    assert (count(reader), count(late)) == (10, 0)
    reader.execute("commit")


def test_a_transaction_that_has_read_an_older_version_cannot_write(shop: apsw.Connection, connect: Connect) -> None:
    stale = connect()
    stale.execute("begin")
    assert count(stale) == 10
    shop.execute("delete from t where id = 1")
    with pytest.raises(apsw.BusyError) as caught:
        stale.execute("delete from t where id = 2")
    assert extended(caught) == apsw.SQLITE_BUSY_SNAPSHOT
    assert count(stale) == 10
    stale.execute("rollback")
    stale.execute("delete from t where id = 2")
    assert count(shop) == 8


def test_a_stale_transaction_fails_at_once_even_while_another_writes(shop: apsw.Connection, connect: Connect) -> None:
    stale, writer = connect(), connect()
    stale.execute("begin")
    count(stale)
    shop.execute("delete from t where id = 1")
    writer.execute("begin immediate")
    started = time.monotonic()
    with pytest.raises(apsw.BusyError) as caught:
        stale.execute("delete from t where id = 2")
    assert extended(caught) == apsw.SQLITE_BUSY_SNAPSHOT
    assert time.monotonic() - started < 2
    stale.execute("rollback")
    writer.execute("rollback")


def test_one_writer_at_a_time_and_the_busy_timeout(shop: apsw.Connection, connect: Connect) -> None:
    impatient, patient = connect(timeout=0), connect(timeout=30)
    shop.execute("begin immediate; delete from t where id = 1")
    with pytest.raises(apsw.BusyError) as caught:
        impatient.execute("begin immediate")
    assert extended(caught) == apsw.SQLITE_BUSY
    brief = connect(timeout=0.05)
    with pytest.raises(apsw.BusyError):
        brief.execute("delete from t")
    join = run(patient.execute, "delete from t where id = 2")
    time.sleep(0.03)
    shop.execute("commit")
    join()
    assert count(shop) == 8


def test_a_busy_handler_is_called(shop: apsw.Connection, connect: Connect) -> None:
    other, attempts = connect(), []

    def handler(times: int) -> bool:
        attempts.append(times)
        if times == 3:
            shop.execute("rollback")
        return times < 10

    other.set_busy_handler(handler)
    shop.execute("begin immediate")
    other.execute("delete from t")
    assert attempts == [0, 1, 2, 3]
    shop.execute("begin immediate")
    other.set_busy_handler(lambda times: times < 2)
    with pytest.raises(apsw.BusyError):
        other.execute("delete from t")
    shop.execute("rollback")


def test_a_writer_that_bypasses_sqlite_is_waited_for_too(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    pages = store.pages.open("shop")
    impatient, patient = connect(timeout=0), connect(timeout=30)
    txn = pages.begin()
    with pytest.raises(apsw.BusyError):
        impatient.execute("delete from t")
    join = run(patient.execute, "delete from t where id = 2")
    time.sleep(0.03)
    txn.rollback()
    join()
    assert count(shop) == 9


def test_pages_changed_outside_of_sqlite_are_visible_without_a_new_change_counter(
    store: Store, shop: apsw.Connection, connect: Connect
) -> None:
    """As with `sqlite follow`: it copies pages, and in WAL mode SQLite does not change the counter."""
    pages = store.pages.open("shop")
    before = {page: pages.open_snapshot().read_page(page) for page in range(2)}
    reader = connect()
    shop.execute("update t set b = 'changed' where id = 3")
    assert [db.execute("select b from t where id = 3").get for db in (reader, shop)] == ["changed"] * 2
    with pages.begin() as txn:
        header = txn.read_page(0)
        txn.write_page(1, before[1])
        assert header == txn.read_page(0)
    assert [db.execute("select b from t where id = 3").get for db in (reader, shop)] == ["row 3"] * 2
    shop.execute("update t set b = 'again' where id = 4")
    assert reader.execute("select group_concat(b) from t where id in (3, 4)").get == "row 3,again"
    shop.execute("update t set b = 'once more' where id = 4")
    with pages.begin() as txn:
        txn.write_page(1, before[1])
    assert shop.execute("select b from t where id = 4").get == "row 4", "also right after its own commit"


def test_a_cursor_that_outlives_its_own_commit_continues_to_read(shop: apsw.Connection, connect: Connect) -> None:
    other = connect()
    shop.pragma("cache_size", 1)
    with shop:
        shop.executemany("insert into t values (?, ?)", ((number, "x" * 1000) for number in range(100, 600)))
    cursor = shop.execute("select id, b from t order by id")
    next(cursor)
    shop.execute("update t set b = 'own' where id >= 500")
    shop.execute("begin; update t set b = 'undone'; rollback")
    other.execute("update t set b = 'other' where id >= 300; delete from t where id >= 550")
    rest = dict(cursor)
    assert {len(str(rest[number])) for number in range(100, 500)} == {1000}
    assert {rest[number] for number in range(500, 600)} == {"own"}
    assert shop.execute("select b from t where id = 500").get == "other"
    assert count(shop) == 460


def test_many_threads_lose_no_update(shop: apsw.Connection, connect: Connect) -> None:
    shop.execute("create table n(v integer); insert into n values (0)")

    def client(connection: apsw.Connection) -> None:
        for _ in range(25):
            connection.execute("begin immediate")
            value = connection.execute("select v from n").get
            assert isinstance(value, int)
            connection.execute("update n set v = ?", (value + 1,))
            connection.execute("commit")

    for join in [run(client, connect(timeout=60)) for _ in range(6)]:
        join()
    assert shop.execute("select v from n").get == 150


def test_concurrent_readers_see_only_complete_transactions(shop: apsw.Connection, connect: Connect) -> None:
    """Money moves between two accounts; the sum is constant in every snapshot."""
    shop.execute("create table a(id integer primary key, v integer); insert into a values (1, 500), (2, 500)")
    stop = threading.Event()

    def writer(connection: apsw.Connection, amount: int) -> None:
        if amount % 2:
            connection.pragma("synchronous", "off")
        for _ in range(40):
            with connection:
                connection.execute("update a set v = v - ? where id = 1", (amount,))
                connection.execute("update a set v = v + ? where id = 2", (amount,))

    def reader(connection: apsw.Connection) -> None:
        while not stop.is_set():
            with connection:
                first = connection.execute("select v from a where id = 1").get
                second = connection.execute("select v from a where id = 2").get
            assert isinstance(first, int)
            assert isinstance(second, int)
            assert first + second == 1000

    def patient() -> apsw.Connection:
        connection = connect(timeout=60)
        connection.transaction_mode = "IMMEDIATE"
        return connection

    readers = [run(reader, connect()) for _ in range(3)]
    writers = [run(writer, patient(), amount) for amount in (3, 4)]
    for join in writers:
        join()
    stop.set()
    for join in readers:
        join()
    assert shop.execute("select v from a where id = 1").get == 500 - 40 * 7


def test_a_long_read_transaction_keeps_its_version_through_checkpoints(
    store: Store, shop: apsw.Connection, connect: Connect
) -> None:
    reader = connect()
    reader.execute("begin")
    reader.execute("select b from t where id = 0").get  # noqa: B018 - takes the snapshot
    for number in range(5):
        shop.execute("update t set b = ?", (f"new {number}",))
        store.checkpoint("shop")
    reader.pragma("cache_size", 0)
    assert reader.execute("select group_concat(b) from t where id in (0, 9)").get == "row 0,row 9"
    reader.execute("commit")
    assert reader.execute("select distinct b from t").get == "new 4"


def test_the_writer_slot_has_one_holder() -> None:
    slot, mine, other = WriterSlot(), object(), object()
    assert slot.try_acquire(mine)
    assert slot.try_acquire(mine), "the holder may acquire it again"
    assert not slot.try_acquire(other)
    slot.release(other)
    assert slot.is_held
    started = time.monotonic()
    assert not slot.wait(0.02)
    assert time.monotonic() - started >= 0.015
    slot.release(mine)
    slot.release(mine)
    assert slot.wait(100), "the slot is free"
    assert slot.try_acquire(other)


def test_releasing_the_writer_slot_wakes_the_longest_waiter() -> None:
    slot, holder, woken = WriterSlot(), object(), []
    assert slot.try_acquire(holder)

    def sleeper(number: int) -> None:
        assert slot.wait(100)
        woken.append(number)
        slot.release(slot)  # not the holder: wakes no waiter

    joins = []
    for number in range(3):
        joins.append(run(sleeper, number))
        wait_until(lambda number=number: len(slot._waiters) == number + 1)  # type: ignore[misc]
    for number in range(3):
        slot.release(holder)
        joins[number]()
        assert woken == list(range(number + 1))
        assert slot.try_acquire(holder)
    assert not slot._waiters


def test_repeated_attempts_sleep_as_long_as_sqlite_requests(
    shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite counts its timeout in sleeps: if each sleep returned at once, the timeout would expire early."""
    waits: list[float] = []

    def return_at_once(_: WriterSlot, seconds: float) -> bool:
        waits.append(seconds)
        return True

    monkeypatch.setattr(WriterSlot, "wait", return_at_once)
    shop.execute("begin immediate")
    other = connect(timeout=0.5)
    for _ in range(2):
        waits.clear()
        started = time.monotonic()
        with pytest.raises(apsw.BusyError):
            other.execute("delete from t")
        assert time.monotonic() - started >= 0.5 - sum(waits) - 0.01
        assert len(waits) == 8
        assert sum(waits) < 0.2
    shop.execute("rollback")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def run(work: Callable[..., object], *arguments: object) -> Callable[[], None]:
    """Start a thread. Returns a function that joins it and raises its error."""
    raised: list[BaseException] = []

    def capture() -> None:
        try:
            work(*arguments)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=capture)
    thread.start()

    def join() -> None:
        thread.join(100)
        assert not thread.is_alive()
        if raised:
            raise raised[0]

    return join
