"""PEP 249 on a connection: what programs written for the standard library's sqlite3 expect."""

from __future__ import annotations

import datetime as dt
import sqlite3
import time
from contextlib import suppress

import apsw
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

from quire.core.errors import DiskFull
from quire.sqlite import dbapi
from quire.sqlite.vfs import CODES, code_of
from quire.store.store import Store
from tests.sqlite.conftest import Connect, count


@pytest.fixture
def wrapped(shop: apsw.Connection) -> dbapi.Connection:
    return dbapi.wrap(shop)


def test_a_transaction_begins_implicitly_before_a_write_and_ends_explicitly(
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


def test_rowcount_and_lastrowid_after_a_write(wrapped: dbapi.Connection) -> None:
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


def test_dates_are_text_and_functions_are_python_callables(wrapped: dbapi.Connection) -> None:
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


def test_names_of_the_standard_library_are_available(wrapped: dbapi.Connection) -> None:
    wrapped.row_factory = sqlite3.Row
    for row in (
        wrapped.execute('select 7 as Id, \'tea\' as "a ""b"').fetchone(),
        wrapped.cursor().execute('select 7 as Id, \'tea\' as "a ""b"').fetchall()[0],
    ):
        assert type(row) is sqlite3.Row
        assert (row["id"], row.keys(), tuple(row)) == (7, ["Id", 'a "b'], (7, "tea"))
    with pytest.raises(sqlite3.IntegrityError) as caught:
        wrapped.execute("insert into t(id) values (1)")
    assert isinstance(caught.value, sqlite3.DatabaseError | dbapi.IntegrityError)
    for name in ("Warning", "Error", "InterfaceError", "DatabaseError", "OperationalError", "ProgrammingError"):
        assert issubclass(getattr(dbapi, name), getattr(sqlite3, name))


def test_a_cursor_that_executes_while_it_is_iterated_continues_with_the_new_statement(
    wrapped: dbapi.Connection,
) -> None:
    """A cursor whose statement has ended leaves its underlying apsw cursor to others."""
    cursor = wrapped.execute("select id from t order by id limit 2")
    values = [next(iter(cursor))[0]]
    assert wrapped.execute("select 8").fetchone() == (8,)
    assert cursor.fetchall() == [(1,)]
    other = wrapped.execute("select 9 union all select 10")
    for (number,) in cursor.execute("select 11 union all select 12"):
        values.append(number)
        if number == 12:
            cursor.execute("select 13 union all select 14")
    assert (values, other.fetchall()) == ([0, 11, 12, 13, 14], [(9,), (10,)])


def test_executemany_without_rows_examines_its_statement(wrapped: dbapi.Connection, connect: Connect) -> None:
    """Hazard: without rows the statement was not even prepared. Mistakes were not reported, and the next `execute` of the same
    text returned no rows and left a statement open, so that the commit failed."""
    insert = "insert into t values (?, ?) returning id"
    assert wrapped.executemany(insert, []).rowcount == 0
    assert wrapped.in_transaction
    assert wrapped.execute(insert, (10, "row 10")).fetchall() == [(10,)]
    wrapped.commit()
    assert count(connect()) == 11
    with pytest.raises(dbapi.OperationalError, match="no such table: nosuch"):
        wrapped.executemany("insert into nosuch values (?)", [])
    with pytest.raises(dbapi.ProgrammingError, match="can only execute DML"):
        wrapped.executemany("select 1", [])
    assert wrapped.execute("select 1").fetchall() == [(1,)]


@pytest.mark.parametrize("is_new", [True, False])
def test_rows_of_executemany_may_come_from_other_statements(wrapped: dbapi.Connection, is_new: bool) -> None:
    """Hazard: a statement that the program ran to get the first row was taken for that of `executemany`. If its text was
    new, no transaction began: each row was committed at once, and `rollback` undid nothing. Otherwise the call failed."""
    lookup = "select id + 100, b from t where id = ?"
    if not is_new:
        wrapped.execute(lookup, (0,)).fetchall()
    rows = (wrapped.execute(lookup, (number,)).fetchone() for number in range(3))
    assert wrapped.executemany("insert into t values (?, ?)", rows).rowcount == 3
    assert wrapped.in_transaction
    wrapped.rollback()
    assert count(wrapped.apsw) == 10


@pytest.mark.parametrize("is_new", [True, False])
def test_adapters_of_parameters_may_run_other_statements(wrapped: dbapi.Connection, is_new: bool) -> None:
    """Hazard: a statement that an adapter ran was taken for the one whose parameter it adapted, as above."""
    lookup = "select id + 100 from t where b = ?"
    if not is_new:
        wrapped.execute(lookup, ("row 0",)).fetchall()

    class Row:
        def __conform__(self, _: object) -> object:
            return wrapped.execute(lookup, ("row 7",)).fetchone()[0]

    assert wrapped.execute("insert into t values (?, 'new') returning id", (Row(),)).fetchall() == [(107,)]
    wrapped.rollback()
    assert count(wrapped.apsw) == 10


@pytest.mark.parametrize("fetch", ["fetchone", "fetchall"])
@pytest.mark.parametrize("fault", ["a text", "a converter"])
def test_a_row_that_cannot_be_converted_ends_its_statement(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch, fetch: str, fault: str
) -> None:
    """Hazard: the statement stayed open at that row, so a transaction began at its version, and no write in it succeeded
    once another connection had committed."""
    connection = dbapi.connect(f"{store.path}/shop", detect_types=dbapi.PARSE_COLNAMES)
    connection.execute("create table t(b)")
    insert = "insert into t values (?)"
    connection.executemany(insert, [("1",), ("2" if fault == "a converter" else "",), ("3",), ("4",)])
    connection.execute("update t set b = cast(x'ff' as text) where b = ''")
    connection.commit()

    def refuse(value: bytes) -> bytes:
        if value == b"2":
            raise LookupError
        return value

    monkeypatch.setitem(dbapi.converters, "ODD", refuse)
    cursor = connection.execute('select b as "b [odd]" from t')
    try:
        while getattr(cursor, fetch)():
            pass
    except (dbapi.OperationalError, LookupError):
        connect().execute("insert into t values (5)")
        cursor.execute(insert, (6,))
        connection.commit()
    connection.close()
    assert count(connect()) == 6


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("in_transaction", [True, False])
def test_a_result_without_rows_has_the_columns_of_the_newest_schema(
    wrapped: dbapi.Connection, connect: Connect, is_own: bool, in_transaction: bool
) -> None:
    """Hazard: the description of a result without rows was the one of the statement's first run."""
    query = "select * from t where id < 0"
    assert [column[0] for column in wrapped.execute(query).description] == ["id", "b"]
    if in_transaction and is_own:
        wrapped.execute("begin")
    changing = wrapped if is_own else connect()
    changing.execute("alter table t add column c")
    if in_transaction and not is_own:
        wrapped.execute("begin")
    assert [column[0] for column in wrapped.execute(query).description] == ["id", "b", "c"]


def test_empty_values_are_not_converted() -> None:
    """Hazard: a row with an empty text in a column of dates could not be fetched; in sqlite3 its value is None."""
    for module in (sqlite3, dbapi):
        connection = module.connect(":memory:", detect_types=module.PARSE_COLNAMES)
        query = """select '' as "a [date]", x'' as "b [date]", null as "c [date]", '2026-01-31' as "d [date]" """
        assert connection.execute(query).fetchall() == [(None, None, None, dt.date(2026, 1, 31))]
        connection.close()


def test_indented_statements_are_examined_in_linear_time(wrapped: dbapi.Connection) -> None:
    """Hazard: the search for the name of a pragma took time exponential in the blanks before a statement: seconds for a
    statement with an indentation of 24, years for 60."""
    started = time.process_time()
    assert wrapped.execute("\n" + " " * 25 + "select count(*) from t").fetchone() == (10,)
    assert time.process_time() - started < 2


def test_literals_with_many_semicolons_are_examined_in_linear_time(wrapped: dbapi.Connection) -> None:
    """Hazard: the text up to each semicolon was examined for a complete statement: minutes for a literal of a megabyte."""
    started = time.process_time()
    literal = "&nbsp; text; " * 50_000
    assert wrapped.execute(f"select '{literal}'; -- a comment;").fetchone() == (literal,)
    assert time.process_time() - started < 2


def test_every_quire_error_has_an_sqlite_code() -> None:
    class Fuller(DiskFull):
        """A subclass that the mapping does not list."""

    assert code_of(Fuller("full")) == apsw.SQLITE_FULL
    assert code_of(ValueError()) == apsw.SQLITE_IOERR
    assert all(code & 0xFF in apsw.mapping_result_codes for code in CODES.values())


class Base(DeclarativeBase):
    """The base of the mapped classes below."""


class Author(Base):
    __tablename__ = "author"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    books: Mapped[list[Book]] = relationship(back_populates="author", passive_deletes=True, cascade="all, delete")


class Book(Base):
    __tablename__ = "book"
    id: Mapped[int] = mapped_column(primary_key=True)
    author_id: Mapped[int] = mapped_column(sa.ForeignKey("author.id", ondelete="CASCADE"))
    author: Mapped[Author] = relationship(back_populates="books")


def test_rowcount_excludes_rows_changed_by_triggers_and_cascades(store: Store) -> None:
    """SQLAlchemy raised StaleDataError, because `rowcount` included rows changed by triggers and cascades."""
    engine = sa.create_engine(
        "sqlite://", module=dbapi, poolclass=sa.QueuePool, creator=lambda: dbapi.wrap(store.sqlite("shop", create=True))
    )
    sa.event.listen(engine, "connect", lambda connection, _: connection.execute("pragma foreign_keys=on"))
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("create table log(what)"))
        log_twice = "begin insert into log values (1), (2); end"
        connection.execute(sa.text(f"create trigger changed after update on author {log_twice}"))
        connection.execute(sa.text(f"create trigger gone after delete on author {log_twice}"))
    with Session(engine) as session, session.begin():
        session.add_all([Author(name=name, books=[Book(), Book(), Book()]) for name in ("Ada", "Bo", "Cy")])
    with Session(engine) as session, session.begin():
        first, second, _ = session.scalars(sa.select(Author).order_by(Author.id))
        first.name = "Ann"
        session.flush()
        session.delete(first)
        second.name = "Ben"
    with Session(engine) as session:
        assert session.scalars(sa.select(Author.name).order_by(Author.id)).all() == ["Ben", "Cy"]
        assert session.scalar(sa.select(sa.func.count(Book.id))) == 6
        assert session.scalar(sa.text("select count(*) from log")) == 6
        # A result of which one row is fetched holds no version: the next query sees commits of other connections.
        with engine.begin() as other:
            other.execute(sa.text("delete from author"))
        session.rollback()
        assert session.scalar(sa.select(sa.func.count(Book.id))) == 0
    engine.dispose()
