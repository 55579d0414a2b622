"""The same steps on `sqlite3` of the standard library and on `quire.sqlite.dbapi` have the same results.

The reference is a file in WAL mode, where readers have snapshots as here. Bugs that this found: a dropped cursor kept
its snapshot,
a statement after a comment wrote outside a transaction, counts included rows changed by triggers, and one call ran
several statements.
"""

from __future__ import annotations

import gc
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import HealthCheck, example, given, settings
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
    """The result of a step, or the name of the error that it raises."""
    try:
        return step()
    except Exception as error:
        return type(error).__name__


def cursor_state(cursor: Any) -> tuple[Any, ...]:
    """The attributes of a cursor after its statement."""
    return cursor.rowcount, cursor.lastrowid, cursor.description


def prepared(pair: Pair) -> Pair:
    for connection in pair:
        connection.execute("pragma foreign_keys=on")
    pair[0].cursor().executescript(SCHEMA)
    return pair


def assert_same(native: Pair, ours: Pair, steps: Steps) -> list[Any]:
    gc.disable()  # a reference cycle must not be collected by chance
    try:
        expected = steps(*prepared(native))
        assert steps(*prepared(ours)) == expected
    finally:
        gc.enable()
    return expected


# ── cursors that are dropped, or have no more rows ────────────────────────────────────────────────────────────────────────
def drop_a_cursor(first: Any, second: Any) -> list[Any]:
    first.execute("select id from parent").fetchone()
    second.execute("insert into parent values (10, 'ten')")
    second.commit()
    return [first.execute("select count(*) from parent").fetchone(), first.execute("drop table log").rowcount]


def fetch_the_only_row(first: Any, other: Any) -> list[Any]:
    cursor = first.cursor()
    row = cursor.execute("select count(*) from parent").fetchone()
    other.execute("insert into parent values (10, 'ten')")
    other.commit()
    cursor2 = first.cursor()
    fresh = cursor2.execute("select count(*) from parent").fetchone()
    first.execute("insert into parent values (11, 'eleven')")
    first.commit()
    first.execute("drop table log")
    return [row, fresh, cursor.fetchone(), cursor2.fetchall()]


def fetch_exactly_what_is_there(first: Any, second: Any) -> list[Any]:
    cursor = first.execute("select id from parent")
    rows = cursor.fetchmany(3)
    second.execute("insert into parent values (10, 'ten')")
    second.commit()
    return [
        rows,
        first.execute("select count(*) from parent").fetchone(),
        outcome(lambda: write(first)),
        cursor.fetchone(),
    ]


def hold_a_cursor_with_rows_left(first: Any, second: Any) -> list[Any]:
    cursor = first.execute("select id from parent")
    row = cursor.fetchone()
    second.execute("insert into parent values (10, 'ten')")
    second.commit()
    count_before = first.execute("select count(*) from parent").fetchone()
    refused = outcome(lambda: write(first))
    cursor.close()
    first.rollback()
    return [
        row,
        count_before,
        refused,
        first.execute("select count(*) from parent").fetchone(),
        outcome(lambda: write(first)),
    ]


def iterate_and_leave(first: Any, second: Any) -> list[Any]:
    for row in first.execute("select id from parent"):
        assert row == (1,)
        break
    second.execute("insert into parent values (10, 'ten')")
    second.commit()
    return [
        first.execute("select count(*) from parent").fetchone(),
        outcome(lambda: first.execute("drop table log").rowcount),
    ]


def leave_rows_of_an_insert(first: Any, second: Any) -> list[Any]:
    first.execute("insert into parent(name) values ('x'), ('y') returning id").fetchone()
    first.commit()
    cursor = first.execute("insert into parent(name) values ('z'), ('zz') returning id")
    counts = [cursor.rowcount, cursor.fetchone(), cursor.rowcount]
    refused = outcome(first.commit)
    return [
        *counts,
        refused,
        cursor.fetchall(),
        cursor_state(cursor),
        first.commit(),
        second.execute("select * from parent").fetchall(),
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
def test_a_statement_ends_when_its_last_row_is_fetched_or_its_cursor_is_dropped(
    native: Pair, ours: Pair, steps: Steps
) -> None:
    assert_same(native, ours, steps)


def test_a_dropped_cursor_after_an_error_pins_nothing(native: Pair, ours: Pair) -> None:
    def steps(first: Any, second: Any) -> list[Any]:
        failed = outcome(
            lambda: first.execute("select id, abs(-9223372036854775807 - (id > 2)) from parent").fetchall()
        )
        cursor = first.execute("select id, abs(-9223372036854775807 - (id > 2)) from parent")
        rows = [outcome(cursor.fetchone) for _ in range(4)]
        write(second)
        return [failed, rows, first.execute("select count(*) from parent").fetchone(), outcome(lambda: write(first))]

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
    def steps(first: Any, second: Any) -> list[Any]:
        first.isolation_level = level
        results: list[Any] = []
        for text in (beginning.format(write) for beginning in BEGINNINGS for write in WRITES):
            cursor = first.cursor()
            # The output of `explain` differs between versions of SQLite.
            run = outcome(lambda: cursor.execute(text) and (None if "explain" in text else cursor_state(cursor)))  # noqa: B023
            cursor.close()
            results += [text, run, first.in_transaction]
            first.rollback()
            results.append(second.execute("select count(*), total(id) from parent").fetchone())
        return results

    assert_same(native, ours, steps)


def test_a_write_after_a_comment_can_be_rolled_back(native: Pair, ours: Pair) -> None:
    def steps(first: Any, second: Any) -> list[Any]:
        first.execute("-- hint\ninsert into parent values (10, 'ten')")
        first.rollback()
        return [first.execute("select count(*) from parent").fetchone()]

    assert assert_same(native, ours, steps) == [(3,)]


# ── counts ────────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_counts_exclude_triggers_and_cascades(native: Pair, ours: Pair) -> None:
    def steps(first: Any, second: Any) -> list[Any]:
        cursor = first.cursor()
        results: list[Any] = []
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
            results += [rows, cursor_state(cursor)]
        cursor.executemany("update parent set name = ? where id >= ?", [("p", 2), ("q", 3), ("r", 99)])
        results.append(cursor_state(cursor))
        cursor.executemany("delete from parent where id = ?", iter([(2,), (3,)]))
        results += [cursor_state(cursor), cursor.fetchall()]
        cursor.executemany("delete from parent where id = ?", [])
        return [*results, cursor_state(cursor), first.in_transaction]

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
    def steps(first: Any, second: Any) -> list[Any]:
        results: list[Any] = []
        for tail in TAILS:
            cursor = first.cursor()
            results += [tail, outcome(lambda: cursor.execute(statement + tail).fetchall()), cursor_state(cursor)]  # noqa: B023
            # A refused call has no effect: nothing is locked, and no transaction was begun.
            results += [first.in_transaction, first.in_transaction or outcome(lambda: write(second))]
            for table in ("log", "sqlite_master"):
                results.append(first.execute(f"select count(*) from {table}").fetchone())
            first.rollback()
            first.execute("drop table if exists z")
        return results

    assert_same(native, ours, steps)


def test_executemany_is_for_one_writing_statement(native: Pair, ours: Pair) -> None:
    def steps(first: Any, second: Any) -> list[Any]:
        cursor = first.cursor()
        return [
            outcome(lambda: cursor.executemany("insert into log values (?); insert into log values (?)", [("a",)])),
            outcome(lambda: cursor.executemany("select ?", [(1,)])),
            outcome(lambda: cursor.executemany("-- x\ninsert into log values (?); -- y", [("a",), ("b",)]).rowcount),
            outcome(
                lambda: cursor.executemany("with x(a) as (select ?) insert into log select a from x", [(1,)]).rowcount
            ),
            first.in_transaction,
            cursor.executemany("insert into log values (?) returning what", [("c",), ("d",)]).fetchall(),
            first.execute("select what from log").fetchall(),
        ]

    assert_same(native, ours, steps)


def test_a_closed_cursor_raises(native: Pair, ours: Pair) -> None:
    def steps(first: Any, second: Any) -> list[Any]:
        cursor = first.execute("select id from parent")
        cursor.close()
        cursor.close()
        return [
            outcome(action)
            for action in (cursor.fetchone, cursor.fetchall, cursor.fetchmany, lambda: cursor.execute("select 1"))
        ]

    assert assert_same(native, ours, steps) == ["ProgrammingError"] * 4


def test_a_reused_cursor_releases_its_version_first(native: Pair, ours: Pair) -> None:
    """A statement that begins a transaction must not begin it on the version that the same cursor was reading."""

    def steps(first: Any, second: Any) -> list[Any]:
        cursor = first.execute("select id, name from parent order by id")
        write(second)
        return [
            outcome(lambda: cursor.execute("insert into parent(name) values ('new')") and None),
            outcome(cursor.fetchone),
            first.in_transaction,
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


def play(steps: list[tuple[str, int, str]], first: Any, second: Any) -> list[Any]:
    """Run steps with three cursors, and record the visible state after each."""
    cursors = [first.cursor() for _ in range(3)]
    results: list[Any] = []
    for action, number, statement in steps:
        cursor = cursors[number]
        match action:
            case "execute":
                results.append(outcome(lambda: cursor.execute(statement) and None))  # noqa: B023
            case "fetchone" | "fetchall":
                results.append(outcome(getattr(cursor, action)))
            case "new":
                cursors[number] = cursor = first.cursor()
            case "drop":
                cursors[number] = cursor = first.execute("select count(*) from log")
            case "write beside":
                results.append(outcome(lambda: write(second)))
                second.rollback()
            case _:
                results.append(outcome(getattr(first, action)))
        results += [action, statement, cursor_state(cursor), first.in_transaction]
        results.append(second.execute("select count(*), group_concat(name) from parent").fetchone())
    return results


# Hazard: the error of the first step kept the cursor of the second one, and the version that it reads, after it was dropped.
@example(
    steps=[
        ("execute", 1, "select 1; select 2"),
        ("execute", 1, "select id, name from parent order by id"),
        ("drop", 1, ""),
        ("write beside", 0, ""),
        ("execute", 1, "insert into parent(name) values ('new')"),
    ]
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(steps=st.lists(step, min_size=1, max_size=25))
def test_any_steps_have_the_same_results(store: Store, tmp_path: Path, steps: list[tuple[str, int, str]]) -> None:
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
        assert play(steps, *ours) == play(steps, *native)
    finally:
        gc.enable()
        for connection in (*native, *ours):
            connection.close()


def apsw_cursors() -> int:
    # type() instead of isinstance(), which dereferences foreign weak proxies and raises if their object is gone.
    return sum(issubclass(type(obj), apsw.Cursor) for obj in gc.get_objects())


def test_a_dropped_cursor_is_freed_without_the_garbage_collector(store: Store) -> None:
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
