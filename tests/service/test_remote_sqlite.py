"""SQL connections of clients: the class, results and errors of local connections, over both carriers; transactions,
lost answers, vanished clients, many writers."""

from __future__ import annotations

import datetime as dt
import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.durable.failpoints import armed
from quire.service import client_holdings
from quire.service.client import Client
from quire.service.frames import FrameReader
from quire.service.handlers_sql import SQL
from quire.sqlite import dbapi, statements
from quire.store.store import Store
from tests.service.owners import OWNER, BrokenConnection, end, line, losing_answers, process, served

Connect = Callable[..., dbapi.Connection]


@pytest.fixture(params=["local", "frames", "flight", "http"])
def open_shop(request: pytest.FixtureRequest, path: Path) -> Iterator[Connect]:
    """Opens connections to `shop`, in this process or through a client."""
    if request.param == "local":
        with quire.open(path) as store:
            yield lambda **options: dbapi.wrap(store.sqlite("shop", create="at" not in options, **options))
        return
    address = {"frames": None, "flight": "grpc://127.0.0.1:0", "http": "http://127.0.0.1:0"}[request.param]
    token = str(path / "admin.token") if address else ""
    with served(path, address) as (_, server), quire.connect(server.address, token_file=token) as client:
        yield lambda **options: client.sqlite("shop", create="at" not in options, check_same_thread=False, **options)


@pytest.fixture
def shop(open_shop: Connect) -> Iterator[dbapi.Connection]:
    connection = open_shop()
    connection.execute("create table t(a integer primary key, b)")
    yield connection
    connection.close()


# ── same behaviour as a local connection ──────────────────────────────────────────────────────────────────────────────
VALUES = [None, 0, -(2**63), 2**63 - 1, 1.5, float("inf"), "", "täg", "a\0b", b"", b"\0\xff", True]


def test_values_round_trip(shop: dbapi.Connection) -> None:
    assert type(shop) is dbapi.Connection
    shop.executemany("insert into t(b) values (?)", [(value,) for value in VALUES])
    assert [row[0] for row in shop.execute("select b from t order by a")] == VALUES
    (row,) = shop.execute("select :x, :y", {"x": bytearray(b"ab"), "y": dt.date(2026, 1, 31)}).fetchall()
    assert row == (b"ab", "2026-01-31")


def test_transactions_begin_with_a_write_and_end_with_commit_or_rollback(
    shop: dbapi.Connection, open_shop: Connect
) -> None:
    other = open_shop()
    cursor = shop.execute("insert into t values (1, 'x')")
    assert (shop.in_transaction, cursor.rowcount, cursor.lastrowid) == (True, 1, 1)
    assert other.execute("select count(*) from t").fetchone() == (0,)
    shop.rollback()
    assert not shop.in_transaction
    with shop:
        shop.execute("insert into t values (1, 'x')")
    with pytest.raises(dbapi.IntegrityError), shop:
        shop.executemany("insert into t values (?, 'y')", [(2,), (1,)])
    assert other.execute("select * from t").fetchall() == [(1, "x")]
    cursor = shop.executemany("update t set b = ? where a = ?", [("z", 1), ("none", 9)])
    assert cursor.rowcount == 1
    shop.commit()
    other.close()


def test_rows_are_fetched_in_batches_and_cursors_are_independent(shop: dbapi.Connection) -> None:
    shop.executemany("insert into t values (?, ?)", ((number, "v" * 50) for number in range(5_000)))
    shop.commit()
    one, two = shop.execute("select a from t order by a"), shop.execute("select a from t order by a desc")
    assert one.fetchone() == (0,)
    assert two.fetchmany(3) == [(4_999,), (4_998,), (4_997,)]
    assert [column[0] for column in one.description] == ["a"]
    assert len(one.fetchall()) == 4_999
    two.close()
    assert [row[0] for row in shop.execute("select a from t order by a")] == list(range(5_000))
    assert shop.execute("delete from t where a > 10 returning a").fetchone() == (11,)


@pytest.mark.parametrize(
    ("sql", "values"),
    [
        ("selec 1", ()),
        ("select * from nothing", ()),
        ("insert into t values (1, 2), (1, 3)", ()),
        ("insert into t values (?, ?)", (1,)),
        ("select :a", {"b": 1}),
        ("select ?", (2**63,)),
        ("select ?", (object(),)),
        ("select 1; select 2", ()),
        ("select zeroblob(10000000000)", ()),
        ("select 'a' || x'ff'", ()),
    ],
)
def test_errors_are_those_of_sqlite3(shop: dbapi.Connection, sql: str, values: Any) -> None:
    """The class, the code, its name, and the text equal those of the standard library."""
    plain_connection = sqlite3.connect(":memory:")
    plain_connection.execute("create table t(a integer primary key, b)")
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever it is
        plain_connection.execute(sql, values).fetchall()
    with pytest.raises(Exception) as raised:  # noqa: PT011 - as above
        shop.execute(sql, values).fetchall()
    assert type(raised.value).__name__ == type(expected.value).__name__
    wanted = getattr(expected.value, "sqlite_errorname", None)
    assert getattr(raised.value, "sqlite_errorname", None) == wanted
    plain_connection.close()


def test_an_earlier_version_is_read_and_not_written(shop: dbapi.Connection, open_shop: Connect, path: Path) -> None:
    shop.execute("insert into t values (1, 'old')")
    shop.commit()
    epoch = shop.execute("pragma quire_epoch").fetchone()[0]
    shop.execute("update t set b = 'new'")
    shop.commit()
    old = open_shop(at=int(epoch))
    assert old.execute("select b from t").fetchone() == ("old",)
    with pytest.raises(dbapi.OperationalError, match="readonly"):
        old.execute("delete from t")
    old.close()


def test_features_that_need_sqlite_in_this_process_are_refused(client: Client) -> None:
    connection = client.sqlite("shop", create=True)
    with pytest.raises(dbapi.NotSupportedError, match="goes to a server"):
        connection.create_function("f", 1, abs)
    connection.create_function("regexp", 2, lambda *_: None)
    assert connection.execute("select 'tea' regexp '^t', floor(1.5)").fetchone() == (1, 1.0)
    with pytest.raises(quire.UnknownDatabase):
        client.sqlite("nothing")


# ── permissions ───────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("address", ["grpc://127.0.0.1:0", "http://127.0.0.1:0"])
def test_over_the_network_sql_stays_in_its_database_and_readers_only_read(path: Path, address: str) -> None:
    with served(path, address) as (store, server):
        with quire.connect(server.address, token_file=str(path / "admin.token")) as admin:
            writer = admin.sqlite("shop", create=True)
            writer.execute("create table t(a)")
            with pytest.raises(dbapi.DatabaseError, match="refused"):
                writer.execute("attach '/etc/passwd' as x")
            with pytest.raises(dbapi.DatabaseError, match="refused"):
                writer.execute("vacuum into '/tmp/x'")
        with quire.connect(server.address, token_file=str(path / "read.token")) as reader:
            assert reader.sqlite("shop").execute("select count(*) from t").fetchone() == (0,)
            with pytest.raises(dbapi.OperationalError, match=r"readonly.*quire token create"):
                reader.sqlite("shop").execute("insert into t values (1)")
            assert reader.sqlite("shop").execute("pragma cache_size").fetchone() == (-4096,), (
                "a server has hundreds of connections"
            )
            with pytest.raises(quire.AccessDenied):
                reader.sqlite("other", create=True)
        assert [info.name for info in store.databases()] == ["shop"]


def test_over_the_network_the_size_of_a_row_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "ROW_BYTES_MAX", 1 << 20)
    token = str(path / "admin.token")
    with served(path, "http://127.0.0.1:0") as (_, server), quire.connect(server.address, token_file=token) as client:
        shop = client.sqlite("shop", create=True)
        values = "select 1, 2 union all select randomblob(400000), randomblob(400000)"
        assert len(shop.execute(values).fetchall()) == 2
        series = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 200)"
        rows = shop.execute(f"{series} select i, iif(i > 100, zeroblob(600000), '') from n")
        assert rows.fetchone() == (1, "")
        assert shop.execute("select length(zeroblob(900000))").fetchone() == (900_000,)
        with pytest.raises(dbapi.DataError, match="values have at most 524,288 bytes in a row of so many columns"):
            rows.fetchall()


def test_through_the_socket_sql_may_do_what_the_owner_may(client: Client) -> None:
    connection = client.sqlite("shop", create=True)
    client.create("other", "pages")
    connection.execute("attach 'other' as o")
    connection.execute("create table o.t(a)")


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_statement_whose_answer_is_lost_is_run_once(client: Client) -> None:
    connection = client.sqlite("shop", create=True, isolation_level=None)
    connection.execute("create table t(a)")
    for statement in ("insert into t values (1)", "insert into t select a + 1 from t", "update t set a = a + 10"):
        with losing_answers(2) as lost:
            connection.execute(statement)
        assert len(lost) == 2
    with losing_answers(1):
        connection.executemany("insert into t values (?)", [(100,), (200,)])
    assert connection.execute("select a from t order by a").fetchall() == [(11,), (12,), (100,), (200,)]


@pytest.mark.parametrize(
    ("statement", "done_once"),
    [
        ("with n(i) as (select 10) update t set a = a + i from n", [(11,)]),
        ("with n(i) as (select 10) insert into t select i from n", [(1,), (10,)]),
        ("with n(i) as (select max(a) from t) delete from t where a in n", []),
        ("pragma user_version = 7", [(1,)]),
    ],
)
def test_a_write_that_looks_like_a_query_is_not_repeated_on_another_connection(
    server: Any, client: Client, statement: str, done_once: list[tuple[int]]
) -> None:
    connection = client.sqlite("shop", create=True, isolation_level=None)
    connection.executescript("create table t(a); insert into t values (1)")
    with losing_connection(server, passed=1) as lost:
        with pytest.raises(dbapi.OperationalError, match="whether it took effect is unknown"):
            connection.execute(statement)
        assert len(lost) == 1
    assert connection.execute("select a from t order by a").fetchall() == done_once


@pytest.mark.parametrize(
    "query",
    [
        "select a from t",
        "-- a hint\n select a from t",
        "with n(i) as (select a from t) select i from n",
        "values (1)",
        "pragma application_id",
    ],
)
def test_a_query_whose_connection_is_lost_is_repeated_however_it_begins(
    server: Any, client: Client, query: str
) -> None:
    connection = client.sqlite("shop", create=True, isolation_level=None)
    connection.executescript("create table t(a); insert into t values (1); pragma application_id = 1")
    for passed in (1, 0):  # the second time the statement is cached, and not prepared first
        with losing_connection(server, passed=passed) as lost:
            assert connection.execute(query).fetchall() == [(1,)]
        assert len(lost) == 1


@contextmanager
def losing_connection(server: Any, *, passed: int) -> Iterator[list[str]]:
    """The call after `passed` answered ones is executed; then its SQL connection ends at the owner and its answer is
    lost."""
    holdings, answers, lost = server._service.holdings, itertools.count(), list[str]()

    def drop_connection(name: str) -> None:
        if next(answers) == passed:
            lost.append(name)
            for holding in list(holdings._all.values()):
                holdings.release(holding.client, holding.holding_id)
            raise BrokenConnection("the connection broke")

    with armed("service.answer", drop_connection):
        yield lost


def test_a_transaction_of_a_client_that_vanished_is_rolled_back_at_once(path: Path) -> None:
    with served(path, sql_transaction_seconds=3600.0) as (store, server):
        with quire.connect(server.address) as other:
            waiting = other.sqlite("shop", create=True, timeout=60)
            waiting.execute("create table t(a)")
            holder = process(HOLDER, server.address)
            assert line(holder) == "holds"
            end(holder)  # SIGKILL
            waiting.execute("insert into t values (2)")
            waiting.commit()
            assert waiting.execute("select a from t").fetchall() == [(2,)]
        assert store.manifest.check() == []


HOLDER = """
import sys, quire
connection = quire.connect(sys.argv[1]).sqlite("shop")
connection.execute("insert into t values (1)")
print("holds", flush=True)
sys.stdin.read()
"""


ENDLESS = "with recursive n(x) as (select 1 union all select x + 1 from n) select max(x) from n"


def test_a_statement_of_a_client_that_vanished_is_interrupted(path: Path) -> None:
    """Hazard: a killed client, or one that was interrupted, left its statement running at the owner, with the lock."""
    with served(path, sql_transaction_seconds=3600.0) as (_, server), quire.connect(server.address) as other:
        waiting = other.sqlite("shop", create=True, timeout=60)
        waiting.execute("create table t(a)")
        runner = process(RUNNER, server.address, f"insert into t {ENDLESS}")
        assert line(runner) == "begins"
        while not any(holding.lock.locked() for holding in list(server._service.holdings._all.values())):
            time.sleep(0.01)
        time.sleep(0.2)
        end(runner)  # SIGKILL
        waiting.execute("insert into t values (2)")
        waiting.commit()
        assert waiting.execute("select a from t").fetchall() == [(2,)]


RUNNER = """
import sys, quire
connection = quire.connect(sys.argv[1]).sqlite("shop")
connection.execute("begin immediate")
print("begins", flush=True)
connection.execute(sys.argv[2])
"""


def test_closing_a_server_ends_a_running_statement(path: Path) -> None:
    """Hazard: the owner did not end, for as long as a client's statement ran."""
    with served(path, stop_seconds=0.1) as (_, server):
        client = quire.connect(server.address, timeout=1)
        shop = client.sqlite("shop", create=True, check_same_thread=False)
        failures: list[str] = []

        def run() -> None:
            try:
                shop.execute(ENDLESS)
            except dbapi.OperationalError as error:
                failures.append(str(error))

        running = threading.Thread(target=run)
        running.start()
        while not any(holding.lock.locked() for holding in list(server._service.holdings._all.values())):
            time.sleep(0.01)
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        running.join(30)
        assert failures
        client.close()


def test_an_idle_transaction_is_rolled_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_holdings, "SWEEP_SECONDS", 0.02)
    with served(path, sql_transaction_seconds=0.1) as (_, server), quire.connect(server.address) as client:
        idle, other = client.sqlite("shop", create=True), client.sqlite("shop", timeout=60)
        idle.execute("create table t(a)")
        idle.execute("insert into t values (1)")
        other.execute("insert into t values (2)")  # waits until the first transaction is rolled back
        other.commit()
        with pytest.raises(dbapi.OperationalError, match="rolled back: nothing was done"):
            idle.execute("insert into t values (3)")
        assert not idle.in_transaction
        idle.execute("insert into t values (4)")
        idle.commit()
        assert idle.execute("select a from t").fetchall() == [(2,), (4,)]


def test_the_holder_of_the_lock_commits_while_forty_writers_wait(path: Path) -> None:
    """There are more writers than call slots: SQL uses no slot, otherwise the holder could not commit."""
    with served(path, calls_max=4, busy_seconds=0.1) as (store, server), quire.connect(server.address) as client:
        holder = client.sqlite("shop", create=True)
        holder.execute("create table t(a)")
        holder.execute("insert into t values (-1)")
        failures: list[Exception] = []

        def write(number: int) -> None:
            try:
                connection = client.sqlite("shop", timeout=100)
                connection.execute("insert into t values (?)", (number,))
                connection.commit()
                connection.close()
            except Exception as error:
                failures.append(error)

        writers = [threading.Thread(target=write, args=(number,)) for number in range(40)]
        for writer in writers:
            writer.start()
        deadline = time.monotonic() + 60
        while server._frames.connections < 40 and time.monotonic() < deadline:  # each writer waits in its own call
            time.sleep(0.01)
        holder.commit()
        for writer in writers:
            writer.join(120)
        assert failures == []
        assert store.sqlite("shop").execute("select count(*) from t").fetchall() == [(41,)]


def test_a_connection_survives_its_owner(path: Path) -> None:
    """Repeatable statements are repeated; an open transaction is reported as lost."""
    owner = process(OWNER, str(path))
    client = quire.connect(line(owner), timeout=60)
    reading, writing, idle = (client.sqlite("shop", create=True) for _ in range(3))
    reading.execute("create table t(a)")
    writing.execute("insert into t values (1)")
    end(owner)
    owner = process(OWNER, str(path))
    line(owner)
    assert reading.execute("select count(*) from t").fetchone() == (0,)
    with pytest.raises(dbapi.OperationalError, match="the transaction was rolled back"):
        writing.execute("insert into t values (2)")
    writing.execute("insert into t values (3)")
    writing.commit()
    idle.execute("insert into t values (4)")  # the first statement of a transaction: nothing of it was committed
    idle.commit()
    assert reading.execute("select a from t order by a").fetchall() == [(3,), (4,)]
    client.close()
    end(owner)


def test_a_refused_value_leaves_the_transaction_open(open_shop: Connect, shop: dbapi.Connection) -> None:
    """Hazard: a text that cannot be encoded, or a call that is too long, ended the transaction, and COMMIT succeeded
    without it."""
    shop.commit()
    shop.execute("insert into t values (1, 'kept')")
    with pytest.raises(UnicodeEncodeError):
        shop.execute("insert into t values (2, ?)", ("\ud800",))
    assert shop.in_transaction
    shop.commit()
    assert open_shop().execute("select a from t").fetchall() == [(1,)]


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:0"])
def test_a_call_that_is_too_long_leaves_the_transaction_open(path: Path, address: str | None) -> None:
    """Hazard: the owner closed the connection of such a frame, and COMMIT succeeded without the transaction."""
    token = str(path / "admin.token") if address else ""
    with (
        served(path, address, body_bytes_max=1 << 17) as (_, server),
        quire.connect(server.address, token_file=token) as client,
    ):
        shop = client.sqlite("shop", create=True)
        shop.execute("create table t(a)")
        shop.execute("insert into t values ('kept')")
        with pytest.raises(dbapi.OperationalError, match="too long"):
            shop.execute("insert into t values (?)", (b"x" * (1 << 18),))
        shop.commit()
        assert client.sqlite("shop").execute("select a from t").fetchall() == [("kept",)]


def test_with_autocommit_off_a_refused_first_statement_leaves_the_transaction_open(client: Client) -> None:
    """Hazard: its BEGIN was lost, and later statements committed one by one."""
    client.sqlite("shop", create=True, isolation_level=None).execute("create table t(a)")
    shop = client.sqlite("shop", autocommit=False)
    with pytest.raises(UnicodeEncodeError):
        shop.execute("insert into t values (?)", ("\ud800",))
    shop.execute("insert into t values (1)")
    shop.rollback()
    assert shop.execute("select a from t").fetchall() == []


@contextmanager
def interrupting_answers() -> Iterator[None]:
    """The answers of calls of this thread do not arrive before Ctrl-C. Those of the server read frames as usual."""
    caller, frame = threading.get_ident(), FrameReader.frame

    def interrupt(reader: FrameReader, *given: Any) -> Any:
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        return frame(reader, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameReader, "frame", interrupt)
        yield


def test_an_interrupted_transaction_is_not_committed_silently(client: Client) -> None:
    """Hazard: after Ctrl-C in a statement, COMMIT succeeded, although the transaction had been rolled back."""
    shop = client.sqlite("shop", create=True)
    shop.execute("create table t(a)")
    shop.execute("insert into t values (1)")
    with interrupting_answers(), pytest.raises(KeyboardInterrupt):
        shop.execute("insert into t values (2)")
    with pytest.raises(dbapi.OperationalError, match="the transaction was rolled back"):
        shop.commit()
    shop.execute("insert into t values (3)")
    shop.commit()
    with interrupting_answers(), pytest.raises(KeyboardInterrupt), shop:
        shop.execute("insert into t values (4)")
    assert shop.execute("select a from t").fetchall() == [(3,)]


def test_an_interrupted_commit_is_reported_as_unknown(client: Client) -> None:
    """Hazard: a second COMMIT, after one that was interrupted, claimed success."""
    shop = client.sqlite("shop", create=True)
    shop.execute("create table t(a)")
    shop.execute("insert into t values (1)")
    with interrupting_answers(), pytest.raises(KeyboardInterrupt):
        shop.commit()
    with pytest.raises(dbapi.OperationalError, match="whether the transaction was committed is unknown"):
        shop.commit()


def test_a_lost_statement_fails_once_and_later_ones_run(server: Any, client: Client) -> None:
    """Hazard: on a connection without implicit transactions, all later writes failed with `its effect is unknown`, too."""
    shop = client.sqlite("shop", create=True, isolation_level=None)
    shop.execute("create table t(a)")
    shop.execute("insert into t values (1)")
    unknown = pytest.raises(dbapi.OperationalError, match="whether it took effect is unknown")
    with losing_connection(server, passed=0), unknown:
        shop.execute("insert into t values (1)")
    shop.execute("insert into t values (1)")
    assert shop.execute("select count(*) from t").fetchall() == [(3,)]


def test_with_autocommit_off_a_lost_transaction_can_be_rolled_back_and_the_next_begins(
    server: Any, client: Client
) -> None:
    """Hazard: `rollback` failed for want of a transaction, so none began again, and later statements committed one by
    one."""
    shop = client.sqlite("shop", create=True, autocommit=False)
    shop.execute("create table t(a)")
    shop.commit()
    shop.execute("insert into t values (1)")
    with losing_connection(server, passed=0), pytest.raises(dbapi.OperationalError, match="rolled back"):
        shop.execute("insert into t values (1)")
    shop.rollback()
    shop.execute("insert into t values (2)")
    shop.rollback()
    assert shop.execute("select a from t").fetchall() == []


def test_dbapi_connects_through_the_server_of_another_process(path: Path) -> None:
    owner = process(OWNER, str(path))
    line(owner)
    with dbapi.connect(f"{path}/shop") as connection:
        connection.execute("create table t(a)")
        connection.execute("insert into t values (1)")
    connection.close()
    reopened = dbapi.connect(f"quire:///{path}/shop?mode=rw")
    assert reopened.execute("select * from t").fetchall() == [(1,)]
    reopened.close()
    with pytest.raises(dbapi.OperationalError, match="unable to open"):
        dbapi.connect(f"quire:///{path}/nothing?mode=rw")
    end(owner)


def test_nothing_is_left_behind(server: Any, client: Client, store: Store) -> None:
    for _ in range(5):
        connection = client.sqlite("shop", create=True)
        connection.execute("select 1").fetchone()
        connection.close()
    assert len(server._service.holdings) == 0
    assert SQL not in str(store.info())
