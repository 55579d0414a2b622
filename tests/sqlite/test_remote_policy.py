"""SQL of remote users cannot leave its database. Every refused statement is shown to work without the policy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.clock import SystemClock
from quire.sqlite import remote_policy
from quire.sqlite.remote_policy import RemoteLimits, RemotePolicy, limit_heap, remote_runner, restrict
from quire.sqlite.served import ServedConnection
from quire.sqlite.statements import ROW_BYTES_MAX, SqlValue, StatementRunner
from quire.store.store import Store

Connection = apsw.Connection


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store") as store:
        with closing(store.sqlite("shop", create=True)) as shop:
            shop.execute("create table item(id integer primary key, name text); insert into item values (1, 'apple')")
        with closing(store.sqlite("other", create=True)) as other:
            other.execute("create table secret(a); insert into secret values ('theirs')")
        yield store


@pytest.fixture
def stock(store: Store) -> Iterator[Connection]:
    """A connection without the policy."""
    with closing(store.sqlite("shop")) as connection:
        yield connection


@pytest.fixture
def both(store: Store) -> Iterator[tuple[Connection, RemotePolicy]]:
    with closing(store.sqlite("shop")) as connection:
        yield connection, restrict(connection, SystemClock())


def rows(connection: Connection, sql: str, bindings: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    return list(connection.execute(sql, bindings))


# ── access outside the database ───────────────────────────────────────────────────────────────────────────────────────
def _attached(connection: Connection) -> bool:
    return bool({row[1] for row in rows(connection, "pragma database_list")} - {"main", "temp"})


ESCAPES: list[tuple[str, Callable[[Connection, Path], bool]]] = [
    ("ATTACH '{file}' AS x", lambda connection, _: rows(connection, "select * from x.t") == [("a file",)]),
    ("ATTACH 'other' AS x", lambda connection, _: rows(connection, "select * from x.secret") == [("theirs",)]),
    ("ATTACH 'file:other?immutable=1' AS x", lambda connection, _: _attached(connection)),
    ("ATTACH ':memory:' AS x", lambda connection, _: _attached(connection)),
    ("ATTACH 'o' || 'ther' AS x", lambda connection, _: _attached(connection)),
    ("ATTACH (SELECT 'other') AS x", lambda connection, _: _attached(connection)),
    ("VACUUM INTO '{dir}/copy.db'", lambda _, folder: (folder / "copy.db").exists()),
    ("VACUUM INTO 'stolen'", lambda connection, _: bool(rows(connection, "ATTACH 'stolen' AS x") == [])),
    ("VACUUM main INTO '{dir}/again.db'", lambda _, folder: (folder / "again.db").exists()),
]


@pytest.mark.parametrize(("sql", "worked"), ESCAPES, ids=lambda value: value if isinstance(value, str) else "")
def test_statements_that_reach_outside_the_database_are_refused(
    stock: Connection,
    both: tuple[Connection, RemotePolicy],
    store: Store,
    tmp_path: Path,
    sql: str,
    worked: Callable[[Connection, Path], bool],
) -> None:
    connection, _ = both
    folder, file = tmp_path / "elsewhere", tmp_path / "file.db"
    folder.mkdir()
    with closing(apsw.Connection(str(file))) as ordinary:
        ordinary.execute("create table t(a); insert into t values ('a file')")
    before = {info.name for info in store.databases()}
    with pytest.raises(apsw.AuthError, match="or VACUUM INTO, is refused"):
        connection.execute(sql.format(dir=folder, file=file))
    assert os.listdir(folder) == []
    assert not _attached(connection)
    assert {info.name for info in store.databases()} == before
    stock.execute(sql.format(dir=folder, file=file))
    assert worked(stock, folder), "the statement works without the policy"


def test_a_granted_database_is_attached_read_only(both: tuple[Connection, RemotePolicy], store: Store) -> None:
    connection, policy = both
    policy.may_attach = {"other", "new"}.__contains__
    connection.execute("ATTACH 'other' AS x")
    assert policy.touched
    assert rows(connection, "select name, a from item, x.secret") == [("apple", "theirs")]
    for sql in (
        "insert into x.secret values (1)",
        "create table x.t(a)",
        "drop table x.secret",
        "pragma x.user_version=3",
    ):
        with pytest.raises(apsw.ReadOnlyError):
            connection.execute(sql)
    connection.execute("begin immediate; insert into item values (2, 'pear')")
    with closing(store.sqlite("other", timeout=0)) as other:  # its lock is not held
        other.execute("insert into secret values ('more')")
    connection.execute("commit")
    assert rows(connection, "select count(*) from x.secret") == [(2,)]
    with pytest.raises(apsw.CantOpenError):
        connection.execute("ATTACH 'new' AS y")  # it is not created
    with pytest.raises(apsw.SQLError, match="output file already exists"):
        connection.execute("VACUUM INTO 'other'")
    with pytest.raises(apsw.AuthError):
        connection.execute("ATTACH 'third' AS y")


def test_the_database_that_vacuum_attaches_cannot_be_written(both: tuple[Connection, RemotePolicy]) -> None:
    connection, _ = both
    connection.execute("ATTACH '' AS x")
    with pytest.raises(apsw.ReadOnlyError):
        connection.execute("create table x.t(a)")
    connection.execute("detach x; vacuum")


def test_the_name_of_an_attached_database_cannot_be_a_parameter(
    stock: Connection, both: tuple[Connection, RemotePolicy]
) -> None:
    with pytest.raises(apsw.AuthError):
        both[0].execute("ATTACH ? AS x", ("other",))
    stock.execute("ATTACH ? AS x", ("other",))
    assert _attached(stock)


def test_extensions_cannot_be_loaded(stock: Connection, both: tuple[Connection, RemotePolicy]) -> None:
    stock.enable_load_extension(True)
    both[0].enable_load_extension(True)  # even then
    with pytest.raises(apsw.SQLError, match="cannot open shared object"):  # it tries to open the file
        stock.execute("select load_extension('/nowhere/x')")
    for sql in ("select load_extension('/nowhere/x')", "select LOAD_EXTENSION('/nowhere/x', 'entry')"):
        with pytest.raises(apsw.AuthError, match=r"load_extension\(\) is refused"):
            both[0].execute(sql)
    stock.execute("create trigger t after insert on item begin select load_extension('/nowhere/x'); end")
    with pytest.raises(apsw.AuthError):
        both[0].execute("insert into item values (9, 'trap')")


def test_a_function_that_writes_the_log_is_refused(stock: Connection, both: tuple[Connection, RemotePolicy]) -> None:
    stock.execute("select sqlite_log(27, 'noise')")
    with pytest.raises(apsw.AuthError):
        both[0].execute("select sqlite_log(27, 'noise')")


def test_unlisted_modules_cannot_create_tables(stock: Connection, both: tuple[Connection, RemotePolicy]) -> None:
    class Module:
        def Create(self, *_: object) -> tuple[str, object]:  # noqa: N802 - apsw's name
            return "create table x(a)", object()

        Connect = Create

    for connection in (stock, both[0]):
        connection.create_module("files", Module())  # type: ignore[arg-type]
    with pytest.raises(apsw.AuthError, match="virtual table of the module files"):
        both[0].execute("create virtual table f using files()")
    stock.execute("create virtual table temp.f using files()")
    both[0].execute("create virtual table words using fts5(text)")
    both[0].execute("insert into words values ('red apple')")
    assert rows(both[0], "select * from words('apple')") == [("red apple",)]


# ── pragmas ───────────────────────────────────────────────────────────────────────────────────────────────────────────
SETTINGS = [
    ("synchronous", "0"),
    ("synchronous", "off"),
    ("busy_timeout", "60000"),
    ("cache_size", "-1000000"),
    ("writable_schema", "1"),
    ("writable_schema", "on"),
    ("temp_store", "2"),
    ("mmap_size", "1000000"),
    ("max_page_count", "5000"),
    ("journal_size_limit", "5"),
    ("locking_mode", "exclusive"),
    ("trusted_schema", "1"),
    ("query_only", "1"),
    ("secure_delete", "1"),
    ("threads", "4"),
    ("cache_spill", "0"),
    ("ignore_check_constraints", "1"),
    ("soft_heap_limit", "1000"),
    ("hard_heap_limit", "1000000000"),
    ("schema_version", "77"),
    ("wal_autocheckpoint", "5"),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_pragmas_that_change_the_connection_or_the_process_cannot_be_set(
    stock: Connection, both: tuple[Connection, RemotePolicy], name: str, value: str
) -> None:
    try:
        stock.execute(f"PRAGMA {name}={value}")  # does not raise
        for form in ("PRAGMA {}={}", "PRAGMA main.{}={}", "PRAGMA {}({})", "pragma  {} = '{}'"):
            with pytest.raises(apsw.AuthError, match=f"setting PRAGMA {name} is refused"):
                both[0].execute(form.format(name, value))
    finally:
        apsw.soft_heap_limit(0)
        apsw.hard_heap_limit(0)


def test_the_pragma_for_the_temporary_directory_is_refused(both: tuple[Connection, RemotePolicy]) -> None:
    """SQLite without OMIT_DEPRECATED accepts it; the policy refuses it before SQLite evaluates it."""
    for sql in (
        "PRAGMA temp_store_directory='/tmp'",
        "PRAGMA data_store_directory='/tmp'",
        "PRAGMA temp_store_directory",
    ):
        with pytest.raises(apsw.AuthError):
            both[0].execute(sql)


def test_an_unlisted_pragma_is_refused(both: tuple[Connection, RemotePolicy]) -> None:
    for sql in ("PRAGMA not_known_yet", "PRAGMA not_known_yet=1", "PRAGMA shrink_memory", "PRAGMA key='x'"):
        with pytest.raises(apsw.AuthError):
            both[0].execute(sql)


def test_the_schema_cannot_be_written(stock: Connection, both: tuple[Connection, RemotePolicy]) -> None:
    change = "update sqlite_master set sql = replace(sql, 'name', 'title') where name = 'item'"
    for connection in (both[0],):
        with pytest.raises(apsw.AuthError):
            connection.execute("pragma writable_schema=on")
        with pytest.raises(apsw.SQLError, match="may not be modified"):
            connection.execute(change)
    stock.execute("pragma writable_schema=on")
    stock.execute(change)
    assert "title" in rows(stock, "select sql from sqlite_master where name = 'item'")[0][0]  # type: ignore[operator]


def test_shadow_tables_cannot_be_written(stock: Connection, both: tuple[Connection, RemotePolicy]) -> None:
    """DEFENSIVE: otherwise a crafted index would be read by code that trusts it."""
    stock.execute("create virtual table words using fts5(text)")
    with pytest.raises(apsw.SQLError, match="may not be modified"):
        both[0].execute("delete from words_data")
    stock.execute("delete from words_data")


def test_pragmas_that_programs_need_work(both: tuple[Connection, RemotePolicy]) -> None:
    connection, policy = both
    assert rows(connection, "pragma table_info(item)")[0][1] == "id"
    assert rows(connection, "select name from pragma_table_info('item')") == [("id",), ("name",)]
    for sql in (
        "pragma foreign_key_list(item)", "pragma index_list('item')", "pragma main.table_xinfo(item)", "pragma quick_check",
        "pragma foreign_key_check", "pragma database_list", "pragma synchronous", "pragma busy_timeout", "pragma cache_size",
        "pragma user_version=5", "pragma journal_mode=wal", "pragma compile_options", "pragma quire_epoch", "pragma optimize",
    ):  # fmt: skip
        rows(connection, sql)
    assert rows(connection, "pragma user_version") == [(5,)]
    assert not policy.touched


# ── the rest of SQL ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_everything_inside_the_database_works(both: tuple[Connection, RemotePolicy]) -> None:
    connection, policy = both
    for sql in (
        "create table a(x integer primary key, y text unique)", "create index i on a(y)", "create view v as select * from a",
        "create trigger t after insert on a begin update a set y = upper(y) where x = new.x; end",
        "insert into a values (1, 'one')", "alter table a add column z", "savepoint s", "update a set z = json('[1]')",
        "rollback to s", "release s", "analyze", "reindex", "drop trigger t", "delete from a", "begin immediate", "commit",
        "with recursive r(n) as (select 1 union all select n + 1 from r where n < 9) insert into a(x) select n from r",
    ):  # fmt: skip
        rows(connection, sql)
    assert rows(connection, "select count(*) from v") == [(9,)]
    assert not policy.touched
    connection.execute("vacuum")
    assert rows(connection, "select count(*) from v") == [(9,)]


@pytest.mark.parametrize(
    "sql",
    [
        "create temp table t(a)",
        "create temporary view t as select 1",
        "create temp trigger t after insert on item begin select 1; end",
        "create table temp.t(a)",
        "pragma foreign_keys=on",
        "pragma case_sensitive_like=1",
        "pragma recursive_triggers(1)",
        "ATTACH '' AS x",
        "vacuum",
        "create virtual table temp.words using fts5(text)",
    ],
)
def test_state_that_remains_in_the_connection_is_detected(both: tuple[Connection, RemotePolicy], sql: str) -> None:
    connection, policy = both
    rows(connection, "select * from item")
    assert not policy.touched
    connection.execute(sql)
    assert policy.touched


def test_a_reader_neither_writes_nor_takes_the_lock(both: tuple[Connection, RemotePolicy]) -> None:
    connection, policy = both
    policy.read_only = True
    for sql in (
        "insert into item values (2, 'x')",
        "begin immediate",
        "create table a(b)",
        "pragma user_version=9",
    ):
        with pytest.raises(apsw.ReadOnlyError):
            connection.execute(sql)
    with pytest.raises(apsw.AuthError):
        connection.execute("pragma query_only=0")
    assert rows(connection, "select name from item") == [("apple",)]
    policy.read_only = False
    connection.execute("insert into item values (2, 'pear')")
    assert not policy.touched


# ── limits ────────────────────────────────────────────────────────────────────────────────────────────────────────────
ENDLESS = "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) from r"


def test_a_statement_is_interrupted_at_its_time_limit(both: tuple[Connection, RemotePolicy]) -> None:
    connection, policy = both
    with policy.deadline(0.05), pytest.raises(apsw.InterruptError):
        rows(connection, ENDLESS)
    assert rows(connection, "select 1") == [(1,)]
    with policy.deadline(60.0):
        assert rows(connection, "select 1") == [(1,)]
        assert not policy.is_overdue


def test_values_and_statements_and_patterns_are_bounded(store: Store, stock: Connection) -> None:
    limits = RemoteLimits(value_bytes=10_000, sql_bytes=2_000, pattern_bytes=50, temporary_pages=20)
    with closing(store.sqlite("shop")) as connection:
        restrict(connection, SystemClock(), limits)
        big = "insert into filled select randomblob(1000) from (values (1),(2),(3),(4),(5),(6),(7),(8),(9),(10))"
        for sql, error in (
            ("select zeroblob(20000)", apsw.TooBigError),
            ("select hex(randomblob(9000))", apsw.TooBigError),
            ("select " + " + ".join(["1"] * 600), apsw.TooBigError),
            (f"select 'a' like '{'%' * 60}'", apsw.SQLError),
            (f"create temp table filled(a); {'; '.join([big] * 12)}", apsw.FullError),
        ):
            with pytest.raises(error):
                rows(connection, sql)
            rows(stock, sql)


def test_many_named_parameters_take_linear_time() -> None:
    """Hazard: the text was searched once per parameter, and all parameters once per value: a statement of 16 MiB could keep a
    thread of the server busy for hours, without a deadline."""
    runner = StatementRunner(apsw.Connection(":memory:"))
    count = 12_000
    sql = f"select /* {'.' * 300_000} */ 1 in ({', '.join(f'${number}' for number in range(count))})"
    description = runner.describe(sql)
    started = time.process_time()
    assert runner.parameter_names(description) == [f"${number}" for number in range(count)]
    values: dict[str, SqlValue] = {f"{'$' * (number % 2)}{number}": number for number in range(count)}
    assert runner.bindings(sql, [], values) == list(range(count))
    assert time.process_time() - started < 2


@pytest.fixture
def served(store: Store) -> Iterator[tuple[ServedConnection, StatementRunner]]:
    """A connection of a Python program on another machine."""
    runner, _ = remote_runner(
        store.sqlite("shop"),
        SystemClock(),
        may_write=True,
        is_version=False,
        may_attach=remote_policy.nothing_attached,
        statement_seconds=60,
    )
    connection = ServedConnection(runner, 60)
    yield connection, runner
    connection.close()


def test_the_limit_for_wide_rows_does_not_outlive_its_statement(
    served: tuple[ServedConnection, StatementRunner],
) -> None:
    """Hazard: after a SELECT of many columns, which lowers the limit of its values, larger values could be neither inserted
    nor used as parameters, until a statement without any had run."""
    connection, runner = served
    runner.run("create table large(value)")
    size = ROW_BYTES_MAX // 16 + 1
    insert = "insert into large values (?)"
    for number, run in enumerate(
        (
            lambda: connection.execute(1, insert, [bytes(size)], "", ()),
            lambda: connection.many(insert, [[bytes(size)]], "", ()),
            lambda: connection.script(f"insert into large values (zeroblob({size}))", ()),
        ),
        1,
    ):
        assert runner.run(f"select {'1, ' * 15} 1").rows(1) == [(1,) * 16]
        assert connection.answered(number, run).error is None


def test_rows_that_are_dropped_are_bounded_too(served: tuple[ServedConnection, StatementRunner]) -> None:
    """Hazard: a script, or the RETURNING of `executemany`, could assemble a row of 2,000 values of 64 MiB in the server."""
    connection, _ = served
    wide = ", ".join(["zeroblob(60000000)"] * 20)
    scripted = connection.answered(1, lambda: connection.script(f"select 1; select {wide}", ()))
    assert scripted.error is not None
    assert scripted.error.message == "string or blob too big"
    returning = f"insert into item(name) values (?) returning {wide}"
    many = connection.answered(2, lambda: connection.many(returning, [["a"], ["b"]], "", ()))
    assert many.error is not None
    assert many.error.message == "string or blob too big"


def test_the_soft_limit_is_set_and_the_hard_one_is_not() -> None:
    before = apsw.soft_heap_limit(-1)
    try:
        limit_heap(1 << 30)
        assert apsw.soft_heap_limit(-1) == 1 << 30
        assert apsw.hard_heap_limit(-1) == 0
    finally:
        apsw.soft_heap_limit(before)


def test_no_pragma_is_in_two_lists() -> None:
    assert not remote_policy.OF_DATABASE & remote_policy.OF_CONNECTION
    assert not remote_policy.ASKING & (remote_policy.OF_DATABASE | remote_policy.OF_CONNECTION)


def test_large_rows_are_read_a_few_at_a_time() -> None:
    numbers = "with recursive n(x) as (select 1 union all select x + 1 from n limit 600)"
    with closing(apsw.Connection(":memory:")) as connection:
        statement = StatementRunner(connection).run(f"{numbers} select zeroblob(iif(x < 300, 1, 1000000)) from n")
        counts = []
        while rows := statement.rows(512):
            assert sum(len(value) for (value,) in rows if isinstance(value, bytes)) < 10 << 20
            counts.append(len(rows))
    assert sum(counts) == 600
    assert statement.is_over


@pytest.mark.parametrize("schema", ["temp", "TEMP"])
def test_temporary_pages_cannot_be_made_larger(schema: str) -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        restrict(connection, SystemClock())
        with pytest.raises(apsw.AuthError, match="page_size"):
            connection.execute(f"pragma {schema}.page_size = 65536")
        connection.execute("pragma main.page_size = 8192; pragma page_size = 4096")
