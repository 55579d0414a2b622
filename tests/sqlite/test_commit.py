"""A transaction is applied completely or not at all: rollbacks of every kind, and commits that fail at every step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import DiskFull, QuotaExceeded, StoreUnusable
from quire.durable.files import OsDisk
from quire.pages.wal import Wal
from quire.sqlite import live
from quire.sqlite.vfs import apsw_error
from quire.store.store import Store
from quire.testing.faults import Fault, FaultyDisk
from tests.sqlite.conftest import SETTINGS, Connect, count


# ── rolling back ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_rollback_after_the_cache_spilled(shop: apsw.Connection, connect: Connect) -> None:
    shop.pragma("cache_size", 10)
    before, epoch = checksum(shop), shop.pragma("quire_epoch")
    shop.execute("begin")
    shop.executemany("insert into t values (?, ?)", ((number, "x" * 900) for number in range(1_000, 2_000)))
    shop.execute("update t set b = 'gone'")
    assert count(connect()) == 10, "the rows are not visible to others"
    shop.execute("rollback")
    assert checksum(shop) == before == checksum(connect())
    assert shop.pragma("quire_epoch") == epoch, "nothing was committed"
    assert shop.pragma("integrity_check") == "ok"


def test_rollback_of_the_first_transaction_leaves_an_empty_database(connect: Connect) -> None:
    connection = connect("fresh")
    connection.pragma("cache_size", 5)
    connection.execute("begin; create table t(a)")
    connection.executemany("insert into t values (?)", (("x" * 3_000,) for _ in range(100)))
    connection.execute("rollback")
    assert connection.execute("select count(*) from sqlite_schema").get == 0
    connection.execute("create table u(a)")
    assert connect("fresh").execute("select name from sqlite_schema").get == "u"


def test_savepoints_roll_back(shop: apsw.Connection, connect: Connect) -> None:
    shop.pragma("cache_size", 10)
    shop.execute("begin; delete from t where id = 0; savepoint a")
    shop.executemany("insert into t values (?, ?)", ((number, "x" * 900) for number in range(1_000, 1_500)))
    shop.execute("savepoint b; delete from t; rollback to b")
    assert count(shop) == 509
    shop.execute("rollback to a; insert into t values (50, 'kept'); release a; commit")
    assert count(connect()) == 10


def test_a_statement_that_fails_in_the_middle_is_undone_alone(shop: apsw.Connection, connect: Connect) -> None:
    shop.execute("begin; insert into t values (50, 'kept')")
    with pytest.raises(apsw.ConstraintError):
        shop.execute("insert into t select 100 - id * 10, 'x' from t order by id")
    shop.execute("commit")
    assert count(connect()) == 11


def test_a_connection_closed_or_dropped_in_a_transaction_releases_the_writer_slot(
    store: Store, shop: apsw.Connection, connect: Connect
) -> None:
    other = store.sqlite("shop")
    other.execute("begin immediate; delete from t")
    other.close()
    shop.execute("insert into t values (50, 'next')")
    forgotten = store.sqlite("shop")
    forgotten.execute("begin immediate; delete from t")
    del forgotten
    shop.execute("insert into t values (51, 'next')")
    assert count(connect()) == 12


def test_a_transaction_that_changes_nothing_commits_nothing(shop: apsw.Connection) -> None:
    before = shop.pragma("quire_epoch")
    shop.execute("begin immediate; commit; begin exclusive; rollback; begin; select * from t; commit").fetchall()
    shop.execute("delete from t where id = -1")
    assert shop.pragma("quire_epoch") == before


# ── synchronous ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_full_waits_for_the_disk_and_normal_does_not(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    wal = store.pages.open("shop").wal
    assert shop.pragma("synchronous") == 2
    for level, waits in (("full", True), ("normal", False), ("off", False), ("extra", True), ("2", True)):
        shop.pragma("synchronous", level)
        before = wal.syncs
        shop.execute("update t set b = ?", (level,))
        assert (wal.syncs > before) is waits or (not waits and wal.durable is wal.written), level
        assert connect().execute("select distinct b from t").get == level, "other connections see it at once"


def test_the_level_is_unchanged_where_sqlite_refuses_to_change_it(store: Store, shop: apsw.Connection) -> None:
    wal = store.pages.open("shop").wal
    shop.execute("begin")
    with pytest.raises(apsw.SQLError, match="inside a transaction"):
        shop.pragma("synchronous", "off")
    shop.execute("delete from t where id = 1")
    with pytest.raises(apsw.SQLError, match="inside a transaction"):
        shop.pragma("synchronous", "off")
    shop.execute("commit")
    assert wal.durable is wal.written


def test_commits_without_a_wait_are_synced_within_about_a_second(store: Store, shop: apsw.Connection) -> None:
    wal = store.pages.open("shop").wal
    shop.pragma("synchronous", "off")
    shop.execute("delete from t")
    deadline = time.monotonic() + 60
    while wal.durable.lsn < wal.written.lsn and time.monotonic() < deadline:
        time.sleep(0.02)
    assert wal.durable.lsn == wal.written.lsn


# ── failing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def faulty(root: Path) -> Iterator[tuple[Store, FaultyDisk]]:
    """A store on a disk that can be made to fail with `arm`."""
    disk = FaultyDisk(OsDisk(), Fault.ENOSPC, operation="none")
    with suppress(StoreUnusable), quire.open(root, settings=SETTINGS, disk=disk) as store:
        yield store, disk


def arm(disk: FaultyDisk, fault: Fault, operation: str, fail_at: int) -> None:
    """Make the n-th such call on a WAL segment fail."""
    disk.arm(fault, fail_at=fail_at, operation=operation, path="*.seg*")


def test_disk_full_in_the_middle_of_a_commit(faulty: tuple[Store, FaultyDisk]) -> None:
    """A large transaction needs new segments; each call that creates one fails once. Nothing is lost or there in part."""
    store, disk = faulty
    connection, other = store.sqlite("shop", create=True), store.sqlite("shop")
    connection.execute("create table t(id integer primary key, b text)")
    connection.execute("insert into t values (0, 'kept')")
    failed = 0
    for fail_at in range(1, 60):
        error = large_transaction(connection, disk, fail_at)
        if error is None:
            break
        failed += 1
        assert isinstance(error.__cause__, DiskFull)
        assert "rolled back" in str(error)
        assert count(connection) == count(other) == 1
        assert connection.pragma("integrity_check") == "ok"
    assert failed >= 1, "the fault never occurred"
    assert count(connection) == count(other) == 801
    connection.close()
    other.close()


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_transaction_that_was_refused_for_space_is_not_written_later(
    faulty: tuple[Store, FaultyDisk], root: Path, fault: Fault
) -> None:
    """SQLITE_FULL means not done, also after the next commit and after reopening; a retry causes no duplicate."""
    store, disk = faulty
    connection = store.sqlite("shop", create=True)
    connection.execute("create table t(id integer primary key, b blob)")
    outcomes: dict[int, str] = {}
    while not outcomes or disk.fired:
        number = len(outcomes) + 1
        store.pages.open("shop").wal.seal()
        arm(disk, fault, "*", number)
        outcomes[number] = _insert_once(connection, number)
        fired = disk.fired
        arm(disk, fault, "none", 0)
        while _insert_once(connection, 1000 + number, "null") == "unknown":  # the fault may have hit the ticker instead
            connection.close()
            connection = store.sqlite("shop")
        row_count = connection.execute("select count(*) from t where id = ?", (number,)).get
        assert row_count in {"refused": [0], "done": [1], "unknown": [0, 1]}[outcomes[number]]
        outcomes[number] = ["refused", "done"][row_count]
        disk.fired = fired
    connection.close()
    assert list(outcomes.values()).count("refused") > 1, "nothing was refused: the test proves nothing"
    store.close()
    with quire.open(root, settings=SETTINGS) as again, again.sqlite("shop") as connection:
        rows = {number for (number,) in connection.execute("select id from t where id < 1000")}
    assert rows == {number for number, outcome in outcomes.items() if outcome == "done"}


def _insert_once(connection: apsw.Connection, number: int, value: str = "randomblob(400000)") -> str:
    """Insert a row, by default one that needs a segment or two, and return the outcome."""
    try:
        connection.execute(f"insert or replace into t values (?, {value})", (number,))
    except apsw.FullError:
        return "refused"
    except apsw.IOError:
        return "unknown"
    return "done"


def large_transaction(connection: apsw.Connection, disk: FaultyDisk, fail_at: int) -> apsw.FullError | None:
    """Write more than fits into the open segment while the n-th creation of a segment fails. Returns the error, if it
    occurred.
    """
    arm(disk, Fault.ENOSPC, "open", fail_at)
    try:
        connection.execute("begin")
        connection.executemany("insert into t(b) values (?)", (("x" * 3_000,) for _ in range(800)))
        connection.execute("commit")
    except apsw.FullError as error:
        return error
    finally:
        arm(disk, Fault.ENOSPC, "none", 0)
    return None


def test_a_failed_sync_stops_writes_until_a_new_connection(faulty: tuple[Store, FaultyDisk]) -> None:
    store, disk = faulty
    connection, reader = store.sqlite("shop", create=True), store.sqlite("shop")
    connection.execute("create table t(a); insert into t values (1)")
    arm(disk, Fault.EIO, "sync", 1)
    with pytest.raises(apsw.IOError, match="it is unknown") as caught:
        connection.execute("insert into t values (2)")
    assert caught.value.__cause__ is not None
    assert disk.fired
    for db in (connection, reader):
        with pytest.raises(apsw.IOError, match="WAL failed") as caught:
            db.execute("insert into t values (3)")
        assert isinstance(caught.value.__cause__, StoreUnusable)
    arm(disk, Fault.EIO, "none", 0)
    fresh = store.sqlite("shop")
    row_count = count(fresh)
    assert row_count in (1, 2), "the outcome is unknown"
    fresh.execute("insert into t values (3)")
    for db in (connection, reader, fresh):  # the older ones use the new engine
        assert count(db) == row_count + 1
        db.close()


def test_an_interrupt_in_the_commit_rolls_back(
    shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Wal, "_write", interrupted)
        patch.setattr(Wal, "_poison", lambda *_: None)
        with pytest.raises(apsw.IOError, match="rolled back") as caught:
            shop.execute("delete from t")
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert count(shop) == count(connect()) == 10
    shop.execute("delete from t where id = 1")
    assert count(shop) == count(connect()) == 9


def test_an_exhausted_budget_is_sqlite_full(
    store: Store, shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = store.pages.open("shop")
    timeouts: list[float] = []

    def no_room(_: object, timeout: float) -> None:
        timeouts.append(timeout)
        raise QuotaExceeded("the WAL budget is used up", hint="checkpoint", db_id=1)

    monkeypatch.setattr(pages, "room_until", 0)
    monkeypatch.setattr(pages, "_wait_for_room", no_room)
    with pytest.raises(apsw.FullError, match="budget is used up"):
        shop.execute("delete from t")
    assert timeouts == [0, live.ROOM_SECONDS], "a checkpoint gets time to finish"
    monkeypatch.setattr(pages, "_wait_for_room", lambda *_: None)
    shop.execute("delete from t where id = 1")
    assert count(connect()) == 9


def test_a_failed_commit_of_one_of_two_databases_leaves_the_other_committed(
    store: Store, shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each database is atomic; a transaction across two databases is not (docs/sqlite.md)."""
    connect("other").execute("create table u(a)")
    shop.execute("attach 'other' as o")
    wal = store.pages.open("other").wal

    def full(*_: object) -> None:
        raise DiskFull("no space left", path="somewhere")

    monkeypatch.setattr(wal, "append", full)
    with pytest.raises(apsw.FullError):
        shop.execute("begin; delete from t; insert into o.u values (1); commit")
    monkeypatch.undo()
    assert shop.in_transaction is False
    assert (count(shop), count(shop, "o.u")) == (0, 0)
    assert (count(connect()), count(connect("other"), "u")) == (0, 0)


@pytest.mark.usefixtures("python_vfs")  # with the shim, no sync reaches Python
def test_a_failure_before_the_commit_rolls_back_all_attached_databases(
    shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite syncs all files first and commits then: a synced file may still be rolled back (Q1)."""
    connect("other").execute("create table u(a)")
    shop.execute("attach 'other' as o")
    synced: list[live.LiveFile] = []

    def fail_the_second(file: live.LiveFile, _: int) -> None:
        synced.append(file)
        if len(synced) == 2:
            raise apsw_error(apsw.SQLITE_IOERR_FSYNC, "not this one")

    monkeypatch.setattr(live.LiveFile, "xSync", fail_the_second)
    with pytest.raises(apsw.IOError, match="not this one"):
        shop.execute("begin; delete from t; insert into o.u values (1); commit")
    monkeypatch.undo()
    assert (count(shop), count(shop, "o.u")) == (10, 0)
    assert (count(connect()), count(connect("other"), "u")) == (10, 0)


def checksum(connection: apsw.Connection) -> object:
    """A checksum of the table."""
    return connection.execute("select count(*), sum(id), group_concat(b) from t").get
