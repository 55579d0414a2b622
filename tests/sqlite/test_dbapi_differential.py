"""The same steps on `sqlite3` of the standard library and on `quire.sqlite.dbapi` give the same answers.

The oracle writes a file in WAL mode, where readers have snapshots as here. A dropped cursor kept its snapshot, one
behind a comment wrote outside a transaction, counts included what triggers did, several statements of one call were run.
"""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.sqlite import dbapi
from quire.store.store import Store

Pair = tuple[Any, Any]
"""Two connections to one database."""
Steps = Callable[[Any, Any], list[Any]]

SCHEMA = """
create table parent(id integer primary key, name text);
create table child(id integer primary key, parent integer references parent(id) on delete cascade);
create table log(what text);
create trigger told after update on parent begin insert into log values ('a'), ('b'); end;
insert into parent values (1, 'one'), (2, 'two'), (3, 'three');
insert into child values (1, 1), (2, 1), (3, 2), (4, 3);
"""


@pytest.fixture
def native(tmp_path: Path) -> Iterator[Pair]:
    first, second = (sqlite3.connect(tmp_path / "native.db", timeout=0) for _ in range(2))
    first.execute("pragma journal_mode=wal")
    yield first, second
    first.close()
    second.close()


@pytest.fixture
def ours(store: Store) -> Iterator[Pair]:
    first, second = (dbapi.wrap(store.sqlite("shop", create=True, timeout=0)) for _ in range(2))
    yield first, second
    first.close()
    second.close()


def outcome(step: Callable[[], Any]) -> Any:
    """What a step returns, or the name of the error it raises."""
    try:
        return step()
    except Exception as error:
        return type(error).__name__


def told(cursor: Any) -> tuple[Any, ...]:
    """What a cursor tells about its statement."""
    return cursor.rowcount, cursor.lastrowid, cursor.description


def prepared(pair: Pair) -> Pair:
    for connection in pair:
        connection.execute("pragma foreign_keys=on")
    pair[0].cursor().executescript(SCHEMA)
    return pair


def assert_same(native: Pair, ours: Pair, steps: Steps) -> list[Any]:
    gc.disable()  # what a cycle keeps must not be let go of by luck
    try:
        expected = steps(*prepared(native))
        assert steps(*prepared(ours)) == expected
    finally:
        gc.enable()
    return expected


# ── cursors that are dropped, or have no more rows ────────────────────────────────────────────────────────────────────────
def drop_a_cursor(one: Any, other: Any) -> list[Any]:
    one.execute("select id from parent").fetchone()
    other.execute("insert into parent values (10, 'ten')")
    other.commit()
    return [one.execute("select count(*) from parent").fetchone(), one.execute("drop table log").rowcount]


def fetch_the_only_row(one: Any, other: Any) -> list[Any]:
    cursor = one.cursor()
    row = cursor.execute("select count(*) from parent").fetchone()
    other.execute("insert into parent values (10, 'ten')")
    other.commit()
    second = one.cursor()
    fresh = second.execute("select count(*) from parent").fetchone()
    one.execute("insert into parent values (11, 'eleven')")
    one.commit()
    one.execute("drop table log")
    return [row, fresh, cursor.fetchone(), second.fetchall()]


def fetch_exactly_what_is_there(one: Any, other: Any) -> list[Any]:
    cursor = one.execute("select id from parent")
    rows = cursor.fetchmany(3)
    other.execute("insert into parent values (10, 'ten')")
    other.commit()
    return [rows, one.execute("select count(*) from parent").fetchone(), outcome(lambda: write(one)), cursor.fetchone()]


def hold_a_cursor_with_rows_left(one: Any, other: Any) -> list[Any]:
    cursor = one.execute("select id from parent")
    row = cursor.fetchone()
    other.execute("insert into parent values (10, 'ten')")
    other.commit()
    held = one.execute("select count(*) from parent").fetchone()
    refused = outcome(lambda: write(one))
    cursor.close()
    one.rollback()
    return [row, held, refused, one.execute("select count(*) from parent").fetchone(), outcome(lambda: write(one))]


def iterate_and_leave(one: Any, other: Any) -> list[Any]:
    for row in one.execute("select id from parent"):
        assert row == (1,)
        break
    other.execute("insert into parent values (10, 'ten')")
    other.commit()
    return [
        one.execute("select count(*) from parent").fetchone(),
        outcome(lambda: one.execute("drop table log").rowcount),
    ]


def leave_rows_of_an_insert(one: Any, other: Any) -> list[Any]:
    one.execute("insert into parent(name) values ('x'), ('y') returning id").fetchone()
    one.commit()
    cursor = one.execute("insert into parent(name) values ('z'), ('zz') returning id")
    counts = [cursor.rowcount, cursor.fetchone(), cursor.rowcount]
    refused = outcome(one.commit)
    return [
        *counts,
        refused,
        cursor.fetchall(),
        told(cursor),
        one.commit(),
        other.execute("select * from parent").fetchall(),
    ]


def write(connection: Any) -> int:
    count = connection.execute("insert into parent(name) values ('new')").rowcount
    connection.commit()
    return int(count)


@pytest.mark.parametrize(
    "steps",
    [
        drop_a_cursor,
        fetch_the_only_row,
        fetch_exactly_what_is_there,
        hold_a_cursor_with_rows_left,
        iterate_and_leave,
        leave_rows_of_an_insert,
    ],
)
def test_a_statement_ends_when_its_last_row_is_fetched_or_its_cursor_goes(
    native: Pair, ours: Pair, steps: Steps
) -> None:
    assert_same(native, ours, steps)


def test_a_dropped_cursor_after_an_error_pins_nothing(native: Pair, ours: Pair) -> None:
    def steps(one: Any, other: Any) -> list[Any]:
        failed = outcome(lambda: one.execute("select id, abs(-9223372036854775807 - (id > 2)) from parent").fetchall())
        cursor = one.execute("select id, abs(-9223372036854775807 - (id > 2)) from parent")
        rows = [outcome(cursor.fetchone) for _ in range(4)]
        write(other)
        return [failed, rows, one.execute("select count(*) from parent").fetchone(), outcome(lambda: write(one))]

    assert "OperationalError" in assert_same(native, ours, steps)


# ── when a transaction begins ─────────────────────────────────────────────────────────────────────────────────────────────
BEGINNINGS = [
    "{}",
    "  \t\r\n\f{}",
    "-- hint\n{}",
    "--\n-- two\n  {}",
    "/* hint */{}",
    "/* one *//**/ -- and\n/* insert\n */ {}",
    "-- crlf\r\n{}",
    ";{}",
    "; -- behind\n{}",
    "explain {}",
]
WRITES = [
    "insert into parent values (10, 'ten')",
    "INSERT OR IGNORE into parent values (1, 'one')",
    "Update parent set name = 'x' where id < 3",
    "dElete from parent where id = 1",
    "replace into parent values (1, 'again')",
    "with x(a) as (select 20) insert into parent select a, a from x",
    "with x(a) as (select 2) delete from parent where id in x",
    "values (1)",
    "select 1",
    "create table other(a)",
    "pragma user_version = 3",
    "savepoint s",
    "begin",
    "insert into nosuch values (1)",
    "insert into parent values (1, 'again')",
]


@pytest.mark.parametrize("level", ["", "DEFERRED", "IMMEDIATE", "EXCLUSIVE", None])
def test_a_transaction_begins_before_the_same_statements(native: Pair, ours: Pair, level: str | None) -> None:
    def steps(one: Any, other: Any) -> list[Any]:
        one.isolation_level = level
        seen: list[Any] = []
        for text in (beginning.format(write) for beginning in BEGINNINGS for write in WRITES):
            cursor = one.cursor()
            # What `explain` lists differs between versions of SQLite.
            run = outcome(lambda: cursor.execute(text) and (None if "explain" in text else told(cursor)))  # noqa: B023
            cursor.close()
            seen += [text, run, one.in_transaction]
            one.rollback()
            seen.append(other.execute("select count(*), total(id) from parent").fetchone())
        return seen

    assert_same(native, ours, steps)


def test_what_is_written_behind_a_comment_can_be_rolled_back(native: Pair, ours: Pair) -> None:
    def steps(one: Any, other: Any) -> list[Any]:
        one.execute("-- hint\ninsert into parent values (10, 'ten')")
        one.rollback()
        return [one.execute("select count(*) from parent").fetchone()]

    assert assert_same(native, ours, steps) == [(3,)]


# ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_counts_leave_out_what_triggers_and_cascades_do(native: Pair, ours: Pair) -> None:
    def steps(one: Any, other: Any) -> list[Any]:
        cursor = one.cursor()
        seen: list[Any] = []
        for statement in (
            "update parent set name = 'x' where id < 3",
            "delete from parent where id = 1",
            "update parent set name = 'y' where id = 99",
            "insert or ignore into parent values (2, 'two')",
            "select 1",
            "delete from log",
            "update parent set name = 'z' returning id",
        ):
            rows = cursor.execute(statement).fetchall()
            seen += [rows, told(cursor)]
        cursor.executemany("update parent set name = ? where id >= ?", [("p", 2), ("q", 3), ("r", 99)])
        seen.append(told(cursor))
        cursor.executemany("delete from parent where id = ?", iter([(2,), (3,)]))
        seen += [told(cursor), cursor.fetchall()]
        cursor.executemany("delete from parent where id = ?", [])
        return [*seen, told(cursor), one.in_transaction]

    expected = assert_same(native, ours, steps)
    assert [entry[0] for entry in expected[1:4:2]] == [2, 1]


# ── one statement ─────────────────────────────────────────────────────────────────────────────────────────────────────────
TAILS = [
    "",
    ";",
    " ; ",
    "; -- end",
    "; /* end */ \n",
    "; /* open",
    "; -- a\n ;",
    "; select 2",
    "; x",
    ";\n\n-- a\nselect 2",
]


@pytest.mark.parametrize("statement", ["insert into log values ('x')", "select 'é' || '…'", "create table z(a)"])
def test_one_call_runs_one_statement(native: Pair, ours: Pair, statement: str) -> None:
    def steps(one: Any, other: Any) -> list[Any]:
        seen: list[Any] = []
        for tail in TAILS:
            cursor = one.cursor()
            seen += [tail, outcome(lambda: cursor.execute(statement + tail).fetchall()), told(cursor)]  # noqa: B023
            # Nothing is left of a refused one: nothing is locked, nothing has begun.
            seen += [one.in_transaction, one.in_transaction or outcome(lambda: write(other))]
            for table in ("log", "sqlite_master"):
                seen.append(one.execute(f"select count(*) from {table}").fetchone())
            one.rollback()
            one.execute("drop table if exists z")
        return seen

    assert_same(native, ours, steps)


def test_several_rows_of_parameters_are_for_one_statement_that_writes(native: Pair, ours: Pair) -> None:
    def steps(one: Any, other: Any) -> list[Any]:
        cursor = one.cursor()
        return [
            outcome(lambda: cursor.executemany("insert into log values (?); insert into log values (?)", [("a",)])),
            outcome(lambda: cursor.executemany("select ?", [(1,)])),
            outcome(lambda: cursor.executemany("-- x\ninsert into log values (?); -- y", [("a",), ("b",)]).rowcount),
            outcome(
                lambda: cursor.executemany("with x(a) as (select ?) insert into log select a from x", [(1,)]).rowcount
            ),
            one.in_transaction,
            cursor.executemany("insert into log values (?) returning what", [("c",), ("d",)]).fetchall(),
            one.execute("select what from log").fetchall(),
        ]

    assert_same(native, ours, steps)


def test_a_closed_cursor_says_so(native: Pair, ours: Pair) -> None:
    def steps(one: Any, other: Any) -> list[Any]:
        cursor = one.execute("select id from parent")
        cursor.close()
        cursor.close()
        return [
            outcome(action)
            for action in (cursor.fetchone, cursor.fetchall, cursor.fetchmany, lambda: cursor.execute("select 1"))
        ]

    assert assert_same(native, ours, steps) == ["ProgrammingError"] * 4


def test_a_cursor_that_is_used_again_forgets_its_version_first(native: Pair, ours: Pair) -> None:
    """A statement that begins a transaction must not begin it on the version that the same cursor was reading."""

    def steps(one: Any, other: Any) -> list[Any]:
        cursor = one.execute("select id, name from parent order by id")
        write(other)
        return [
            outcome(lambda: cursor.execute("insert into parent(name) values ('new')") and None),
            outcome(cursor.fetchone),
            one.in_transaction,
        ]

    assert assert_same(native, ours, steps) == [None, None, True]


# ── any steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
STATEMENTS = [
    "select id, name from parent order by id",
    "select count(*) from parent",
    "select * from log where 0",
    "insert into parent(name) values ('new')",
    "-- hint\ninsert into parent(name) values ('a'), ('b') returning id",
    "update parent set name = name || '.' where id < 3",
    "delete from parent where id = 2",
    "/* */ replace into parent values (1, 'again')",
    "insert into parent values (1, 'taken')",
    "with x(a) as (select 'w') insert into parent(name) select a from x",
    "create table if not exists extra(a)",
    "drop table if exists extra",
    "select 1; select 2",
    "select * from nosuch",
    "savepoint s",
    "rollback",
    "commit",
]
slot = st.integers(0, 2)
step = st.one_of(
    st.tuples(st.just("execute"), slot, st.sampled_from(STATEMENTS)),
    st.tuples(st.sampled_from(["fetchone", "fetchall", "drop", "new"]), slot, st.just("")),
    st.tuples(st.sampled_from(["commit", "rollback", "write beside"]), st.just(0), st.just("")),
)


def play(chosen: list[tuple[str, int, str]], one: Any, other: Any) -> list[Any]:
    """Steps with three cursors, and after each of them what can be seen."""
    cursors = [one.cursor() for _ in range(3)]
    seen: list[Any] = []
    for what, number, statement in chosen:
        cursor = cursors[number]
        match what:
            case "execute":
                seen.append(outcome(lambda: cursor.execute(statement) and None))  # noqa: B023
            case "fetchone" | "fetchall":
                seen.append(outcome(getattr(cursor, what)))
            case "new":
                cursors[number] = cursor = one.cursor()
            case "drop":
                cursors[number] = cursor = one.execute("select count(*) from log")
            case "write beside":
                seen.append(outcome(lambda: write(other)))
                other.rollback()
            case _:
                seen.append(outcome(getattr(one, what)))
        seen += [what, statement, told(cursor), one.in_transaction]
        seen.append(other.execute("select count(*), group_concat(name) from parent").fetchone())
    return seen


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chosen=st.lists(step, min_size=1, max_size=25))
def test_any_steps_are_answered_alike(store: Store, tmp_path: Path, chosen: list[tuple[str, int, str]]) -> None:
    native: list[Any] = [sqlite3.connect(tmp_path / "native.db", timeout=0) for _ in range(2)]
    ours: list[Any] = [dbapi.wrap(store.sqlite("shop", create=True, timeout=0)) for _ in range(2)]
    try:
        for pair in (native, ours):
            for connection in pair:
                connection.execute("pragma foreign_keys=on")
            pair[0].execute("pragma journal_mode=wal")
            pair[0].cursor().executescript(
                "drop table if exists child; drop table if exists parent; drop table if exists log;"
                f"drop table if exists extra; {SCHEMA}"
            )
        gc.disable()
        assert play(chosen, *ours) == play(chosen, *native)
    finally:
        gc.enable()
        for connection in (*native, *ours):
            connection.close()


def apsw_cursors() -> int:
    # By type(): isinstance() asks a weak proxy of somebody else for its class, and raises if what it stood for is gone.
    return sum(issubclass(type(kept), apsw.Cursor) for kept in gc.get_objects())


def test_a_dropped_cursor_of_ours_is_gone_without_the_garbage_collector(store: Store) -> None:
    connection = dbapi.wrap(store.sqlite("shop", create=True))
    gc.disable()
    try:
        cursor = connection.execute("values (1), (2)")
        cursor.fetchone()
        count = apsw_cursors()
        del cursor
        assert apsw_cursors() == count - 1
    finally:
        gc.enable()
        connection.close()
