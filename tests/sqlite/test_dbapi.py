"""PEP 249 over a connection: what programs written for the standard library's sqlite3 expect."""

from __future__ import annotations

import datetime as dt
from contextlib import suppress

import apsw
import pytest

from quire.core.errors import DiskFull
from quire.sqlite import dbapi
from quire.sqlite.trouble import CODES, code_of
from quire.store.store import Store
from tests.sqlite.conftest import Connect, count


@pytest.fixture
def wrapped(shop: apsw.Connection) -> dbapi.Connection:
    return dbapi.wrap(shop)


def test_a_transaction_begins_by_itself_before_a_write_and_ends_when_told(
    wrapped: dbapi.Connection, connect: Connect
) -> None:
    other = connect()
    wrapped.execute("select * from t").fetchall()
    assert wrapped.apsw.in_transaction is False
    wrapped.execute("delete from t where id < 3")
    assert count(other) == 10
    wrapped.rollback()
    wrapped.rollback()
    wrapped.execute("  delete from t where id < 3")
    wrapped.commit()
    wrapped.commit()
    assert count(other) == 7
    wrapped.isolation_level = None
    wrapped.execute("delete from t")
    assert wrapped.in_transaction is False
    assert count(other) == 0


def test_a_with_block_commits_or_rolls_back(wrapped: dbapi.Connection, connect: Connect) -> None:
    with wrapped:
        wrapped.execute("delete from t where id = 0")
    with suppress(LookupError), wrapped:
        wrapped.execute("delete from t")
        raise LookupError
    assert count(connect()) == 9


def test_fetching(wrapped: dbapi.Connection) -> None:
    cursor = wrapped.cursor()
    cursor.execute("select id, b as name from t order by id")
    assert cursor.description is not None
    assert [column[0] for column in cursor.description] == ["id", "name"]
    assert cursor.fetchone() == (0, "row 0")
    assert cursor.fetchmany() == [(1, "row 1")]
    assert [row[0] for row in cursor.fetchmany(3)] == [2, 3, 4]
    assert [row[0] for row in cursor] == [5, 6, 7, 8, 9]
    assert (cursor.fetchone(), cursor.fetchall(), cursor.fetchmany(2)) == (None, [], [])
    cursor.execute("select id from t where id = :id", {"id": -1})
    assert cursor.description is not None, "also without a row"
    assert cursor.fetchall() == []
    cursor.execute("create table u(a)")
    assert cursor.description is None


def test_what_a_write_tells(wrapped: dbapi.Connection) -> None:
    cursor = wrapped.execute("update t set b = 'x' where id < 4")
    assert cursor.rowcount == 4
    cursor = wrapped.execute("insert into t(b) values ('new') returning id")
    assert cursor.lastrowid == 10
    assert cursor.fetchall() == [(10,)]
    assert wrapped.executemany("insert into t(b) values (?)", [("a",), ("b",)]).rowcount == 2
    assert wrapped.execute("select 1").rowcount == -1
    cursor.executescript("create table u(a); insert into u values (1); insert into u values (2)")
    assert wrapped.execute("select count(*) from u").fetchone() == (2,)
    cursor.close()


def test_dates_are_text_and_functions_are_pythons(wrapped: dbapi.Connection) -> None:
    moment = dt.datetime(2026, 1, 31, 12, 30)
    assert wrapped.execute("select ?, ?", (moment, moment.date())).fetchone() == ("2026-01-31 12:30:00", "2026-01-31")
    wrapped.create_function("twice", 1, lambda value: value * 2, deterministic=True)
    assert wrapped.execute("select twice(21)").fetchone() == (42,)
    ticks = moment.timestamp()
    assert (dbapi.DateFromTicks(ticks), dbapi.TimeFromTicks(ticks)) == (moment.date(), moment.time())
    assert dbapi.TimestampFromTicks(ticks) == moment


def test_errors_are_those_of_pep_249(store: Store, wrapped: dbapi.Connection, connect: Connect) -> None:
    with pytest.raises(dbapi.IntegrityError, match="UNIQUE"):
        wrapped.execute("insert into t values (1, 'again')")
    wrapped.rollback()
    with pytest.raises(dbapi.OperationalError, match="no such table"):
        wrapped.execute("select * from nosuch")
    with pytest.raises(dbapi.ProgrammingError):
        wrapped.execute("select ?", ())
    writer = connect()
    writer.execute("begin immediate")
    impatient = dbapi.wrap(connect(timeout=0))
    with pytest.raises(dbapi.OperationalError, match="locked") as caught:
        impatient.execute("delete from t")
    assert isinstance(caught.value.__cause__, apsw.BusyError)
    writer.execute("rollback")
    wrapped.close()
    with pytest.raises(dbapi.ProgrammingError):
        wrapped.execute("select 1")


def test_every_error_of_ours_has_a_code_of_sqlites() -> None:
    class Fuller(DiskFull):
        """A kind that nobody has thought of."""

    assert code_of(Fuller("full")) == apsw.SQLITE_FULL
    assert code_of(ValueError()) == apsw.SQLITE_IOERR
    assert all(code & 0xFF in apsw.mapping_result_codes for code in CODES.values())
