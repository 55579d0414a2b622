"""The C part of the VFS gives the same answers as Python, and is not used where it is unavailable."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest

import quire
from quire.sqlite import c_extensions as library_module
from quire.sqlite import connect as connect_module
from quire.sqlite import vfs_shim
from quire.sqlite.c_extensions import LIBRARY, SWITCH, shim_build
from quire.sqlite.databases import ReadPin
from quire.sqlite.live import LiveFile
from quire.sqlite.vfs_shim import KEEPER, OLD, PARKED, PLAIN, READING, shim_library
from quire.store.store import Store
from tests.sqlite.conftest import SETTINGS, Connect, count
from tests.sqlite.follow_helpers import SqlProgram, follower

built = pytest.mark.skipif(not LIBRARY.exists(), reason="no C compiler, or no sqlite3ext.h, where quire was installed")


@pytest.fixture(params=["python", pytest.param("shim", marks=built)])
def store(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv(SWITCH, "1" if request.param == "python" else "0")
    with quire.open(root, settings=SETTINGS) as store:
        yield store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that reached Python."""
    monkeypatch.setenv(SWITCH, "0")
    recorded_calls: list[str] = []
    for name in ("xLock", "xUnlock", "xRead", "xFileSize", "xFileControl"):
        _record(monkeypatch, name, recorded_calls)
    return recorded_calls


def _record(monkeypatch: pytest.MonkeyPatch, name: str, recorded_calls: list[str]) -> None:
    original = getattr(LiveFile, name)

    def recorded(file: LiveFile, *arguments: int) -> object:
        recorded_calls.append(name)
        return original(file, *arguments)

    monkeypatch.setattr(LiveFile, name, recorded)


def live_file(connection: apsw.Connection) -> LiveFile:
    return connect_module._live_files[connection]


def state(connection: apsw.Connection) -> int:
    cell = live_file(connection)._cell
    assert cell is not None
    return cell.state


# ── both ways ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_commit_of_another_connection_is_visible_to_the_next_statement(
    shop: apsw.Connection, connect: Connect
) -> None:
    reader = connect()
    for number in range(100, 150):
        assert count(reader) == count(reader)
        shop.execute("insert into t values (?, 'x')", (number,))
        assert count(reader) == number - 89


def test_writes_outside_of_sqlite_are_visible_to_the_next_statement(store: Store, shop: apsw.Connection) -> None:
    """The header's user version, written without a new change counter."""
    for number in range(1, 20):
        with store.pages.open("shop").begin() as txn:
            header = txn.read_page(0)
            txn.write_page(0, header[:60] + number.to_bytes(4, "big") + header[64:])
        assert shop.pragma("user_version") == number
        assert shop.pragma("user_version") == number


def test_copies_of_a_follower_are_visible_to_the_next_statement(store: Store, tmp_path: Path, connect: Connect) -> None:
    with SqlProgram(tmp_path / "app.db") as program:
        program.run_sql("create table t(a)", "insert into t values (0)")
        file_follower = follower(store, program.path)
        file_follower.look()
        reader = connect("copy")
        for number in range(1, 6):
            assert count(reader) == count(reader) == number
            program.run_sql(f"insert into t values ({number})")
            file_follower.look()
            assert count(reader) == number + 1


def test_a_fork_and_its_origin_do_not_see_each_other(shop: apsw.Connection, connect: Connect) -> None:
    fork = connect("copy", fork_of="shop")
    for number in range(100, 110):
        assert count(fork) == count(fork) == number - 90
        shop.execute("insert into t values (?, 'x')", (number,))
        assert (count(fork), count(shop)) == (number - 90, number - 89)
        fork.execute("insert into t values (?, 'y')", (number,))
    assert fork.execute("select distinct b from t where id >= 100").get == "y"


def test_a_rollback_is_visible_to_the_next_statement(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    reader = connect()
    store.snapshot("shop", "monday")
    for _ in range(5):
        shop.execute("delete from t where id < 5")
        assert count(reader) == count(reader) == 5
        store.rollback("shop", to="monday")
        assert (count(reader), count(shop)) == (10, 10)


def test_a_read_transaction_keeps_its_version_also_for_pages_it_has_not_read(
    shop: apsw.Connection, connect: Connect
) -> None:
    shop.execute("create table large(id integer primary key, b blob)")
    shop.executemany("insert into large values (?, zeroblob(3000))", ((number,) for number in range(50)))
    reader = connect()
    for _ in range(3):
        assert reader.execute("select length(b) from large where id = 1").get == 3000
    reader.execute("begin")
    assert reader.execute("select length(b) from large where id = 1").get == 3000
    shop.execute("update large set b = zeroblob(10)")
    assert reader.execute("select sum(length(b)) from large").get == 150_000
    epoch = int(str(reader.pragma("quire_epoch")))
    reader.execute("commit")
    assert reader.execute("select sum(length(b)) from large").get == 500
    assert int(str(reader.pragma("quire_epoch"))) > epoch


def test_readers_see_complete_transactions_while_others_write_and_versions_are_released(
    store: Store, shop: apsw.Connection, connect: Connect
) -> None:
    shop.execute("create table pair(id integer primary key, n integer); insert into pair values (1, 0), (2, 0)")
    readers = [connect() for _ in range(3)]
    stop = threading.Event()
    failures: list[object] = []

    def read(connection: apsw.Connection) -> None:
        last = 0
        while not stop.is_set():
            first, second = (int(str(n)) for n in connection.execute("select min(n), max(n) from pair").fetchall()[0])
            if first != second or first < last:
                failures.append((first, second, last))
            last = first

    threads = [threading.Thread(target=read, args=(connection,)) for connection in readers]
    for thread in threads:
        thread.start()
    for number in range(1, 101):
        shop.execute("update pair set n = ?", (number,))
        store._parts.sqlite.run_keeper_round()
    stop.set()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert [connection.execute("select n from pair").fetchall() for connection in readers] == [[(100,), (100,)]] * 3


# ── the shim ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@built
def test_a_warm_read_does_not_call_python(calls: list[str], root: Path) -> None:
    with quire.open(root, settings=SETTINGS) as store, store.sqlite("shop", create=True) as connection:
        connection.execute("create table t(id integer primary key, b text); insert into t values (1, 'one')")
        for _ in range(2):
            assert connection.execute("select b from t where id = 1").get == "one"
        calls.clear()
        for _ in range(10):
            assert connection.execute("select b from t where id = 1").get == "one"
    assert "xLock" not in calls[:-1], calls
    connection.close()


@built
def test_the_keeper_releases_parked_versions_and_renews_used_ones(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr("quire.sqlite.connect.KEEPER_SECONDS", 3600.0)
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table t(a); insert into t values (1)")
        assert count(connection) == count(connection) == 1
        pages, keeper = store.pages.open("shop"), store._parts.sqlite
        assert (state(connection), len(pages.readers)) == (PARKED, 1)
        keeper.run_keeper_round()
        assert (state(connection), len(pages.readers)) == (PLAIN, 0), "an idle connection holds back checkpoints"
        assert count(connection) == count(connection) == 1
        connection.execute("begin")
        assert count(connection) == 1
        assert state(connection) == READING
        before = pages.readers.peek()[0].expires_at
        keeper.run_keeper_round(renew=True)
        assert (state(connection), len(pages.readers)) == (OLD, 1)
        after = pages.readers.peek()[0].expires_at
        assert before is not None
        assert after is not None
        assert after > before, "the lease of a long transaction was not renewed"
        assert count(connection) == 1
        connection.execute("commit")
        assert (state(connection), len(pages.readers)) == (PLAIN, 0)
        assert count(connection) == 1
        connection.close()


@built
def test_a_version_that_the_keeper_takes_while_it_is_parked_is_not_parked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table t(a)")
        park = vfs_shim.Cell.park

        def raced(cell: vfs_shim.Cell, lsn: int, size_bytes: int, stamp: bytes) -> bool:
            live_file(connection).release_idle()
            return park(cell, lsn, size_bytes, stamp)

        with monkeypatch.context() as patch:
            patch.setattr(vfs_shim.Cell, "park", raced)
            connection.execute("insert into t values (1)")
        assert state(connection) == PLAIN
        assert count(connection) == 1
        connection.close()


@built
def test_closing_a_connection_while_the_keeper_closes_its_versions_keeps_the_claim(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr("quire.sqlite.connect.KEEPER_SECONDS", 3600.0)
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table t(a)")
        assert count(connection) == count(connection) == 0
        pages, file = store.pages.open("shop"), live_file(connection)
        cell = file._cell
        assert cell is not None
        closed: list[ReadPin] = []
        states: list[int] = []
        close = ReadPin.close

        def raced(pin: ReadPin) -> None:
            closed.append(pin)
            if len(closed) == 1:  # the keeper has taken the version; meanwhile another one is parked
                file._idle.append(ReadPin(pages, file._database.newest))
                connection.close()
                states.append(cell.state)
            close(pin)

        monkeypatch.setattr(ReadPin, "close", raced)
        file.release_idle()
        assert states == [KEEPER]
        assert cell.state == PLAIN
        assert len(pages.readers) == 0
        assert len(closed) == len(set(map(id, closed))) == 2


@built
def test_a_failed_log_is_reported_by_the_next_statement(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table t(a)")
        assert count(connection) == count(connection) == 0
        store.pages.open("shop").wal._poison(OSError("the disk is gone"))
        with pytest.raises(apsw.IOError, match="the disk is gone"):
            count(connection)
        connection.close()


@built
def test_a_connection_to_a_version_outlives_its_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim passes file names to the Python VFS, which must still exist."""
    monkeypatch.setenv(SWITCH, "0")
    store = quire.open(root, settings=SETTINGS)
    with store.sqlite("shop", create=True) as connection:
        connection.execute("create table t(a)")
    connection.close()
    store.snapshot("shop", "monday")
    old = store.sqlite("shop", at="monday")
    store.close()
    del store, connection
    gc.collect()
    with pytest.raises(apsw.CantOpenError, match="closed"):
        old.execute("attach 'other' as o")
    old.close()


@built
def test_ordinary_files_can_be_attached(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in WAL mode: the file belongs to the default VFS."""
    monkeypatch.setenv(SWITCH, "0")
    path = tmp_path / "ordinary.db"
    ordinary = apsw.Connection(str(path))
    ordinary.execute("pragma journal_mode=wal; create table o(a); insert into o values (7)").fetchall()
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table t(a); attach ? as o", (str(path),))
        connection.execute("begin; insert into t select a from o; insert into o.o values (8); commit")
        assert (count(connection), count(ordinary, "o")) == (1, 2)
        connection.close()
    ordinary.close()


# ── with and without ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_environment_variable_disables_the_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    assert shim_library() is None
    assert SWITCH in shim_build().reason


def test_without_the_library_or_with_another_one_the_python_vfs_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "")
    monkeypatch.setattr(library_module, "LIBRARY", tmp_path / "absent.so")
    assert "not built" in shim_build().reason
    (tmp_path / "garbage.so").write_bytes(b"no library")
    monkeypatch.setattr(library_module, "LIBRARY", tmp_path / "garbage.so")
    assert "cannot be loaded" in shim_build().reason
    assert shim_library() is None
    with quire.open(tmp_path / "store", settings=SETTINGS) as store, store.sqlite("shop", create=True) as connection:
        connection.execute("create table t(a)")
        assert count(connection) == 0
    connection.close()


@built
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "")
    monkeypatch.setattr(library_module, "VERSION", library_module.VERSION + 1)
    library_module._examine.cache_clear()
    try:
        assert "another version" in shim_build().reason
        assert shim_library() is None
    finally:
        library_module._examine.cache_clear()
