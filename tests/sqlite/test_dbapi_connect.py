"""`dbapi.connect`: what it opens, shares and refuses; and cases that sqlite3's own tests do not cover."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import apsw
import pytest

import quire
from quire.sqlite import dbapi
from quire.sqlite.pep249.driver import DriverCursor, LocalDriver, Prepared
from tests.programs import Program


def filled(path: Path) -> None:
    with dbapi.connect(f"{path}/shop") as connection:
        connection.execute("create table t(a)")
        connection.execute("insert into t values ('monday')")
    connection.close()
    with quire.open(path) as store:
        store.snapshot("shop", "monday")
    with dbapi.connect(path / "shop") as connection:
        connection.execute("update t set a = 'tuesday'")
    connection.close()


def read(database: str, **options: Any) -> object:
    connection = dbapi.connect(database, **options)
    try:
        return connection.execute("select a from t").fetchone()
    finally:
        connection.close()


def test_a_path_a_url_and_a_uri_name_the_same_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    for database in ("store/shop", "quire:///store/shop", f"quire:///{tmp_path}/store/shop", f"{tmp_path}/store/shop"):
        assert read(database) == ("tuesday",), database
    assert read("file:store/shop?mode=ro", uri=True) == ("tuesday",)
    assert read("quire:///store/shop?at=monday") == ("monday",)


def test_a_read_only_connection_cannot_write(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    for database in ("quire:///{}/shop?at=monday", "quire:///{}/shop?mode=ro"):
        connection = dbapi.connect(database.format(tmp_path / "store"))
        with pytest.raises(dbapi.OperationalError, match="readonly") as caught:
            connection.execute("delete from t")
        assert caught.value.sqlite_errorname.startswith("SQLITE_READONLY")
        connection.close()


def test_no_pragma_makes_a_read_only_connection_writable(tmp_path: Path) -> None:
    """Hazard: `mode=ro` was a pragma, which `PRAGMA query_only = 0` took back; SQLite opens the file read-only."""
    filled(tmp_path / "store")
    connection = dbapi.connect(f"quire:///{tmp_path}/store/shop?mode=ro")
    connection.execute("pragma query_only = 0")
    with pytest.raises(dbapi.OperationalError, match="readonly"):
        connection.execute("insert into t values ('wednesday')")
    other = dbapi.connect(tmp_path / "store" / "shop")
    other.execute("update t set a = 'wednesday'")
    other.commit()
    assert connection.execute("select a from t").fetchall() == [("wednesday",)]
    connection.execute("create temp table seen as select a from t")  # as with SQLite: only the database is read-only
    connection.close()
    other.close()
    with pytest.raises(dbapi.OperationalError, match="unable to open"):
        dbapi.connect(f"quire:///{tmp_path}/store/missing?mode=ro")


@pytest.mark.parametrize("mode", ["readonly", "RO", ""])
def test_an_unknown_access_mode_is_refused(tmp_path: Path, mode: str) -> None:
    """Hazard: SQLite refuses a misspelt `mode=ro`; here it opened the database for writing."""
    dbapi.connect(tmp_path / "store" / "shop").close()
    for url in (f"quire:///{tmp_path}/store/shop?mode={mode}", f"http://127.0.0.1:9/shop?mode={mode}"):
        with pytest.raises(dbapi.OperationalError, match="no such access mode"):
            dbapi.connect(url)


def test_a_store_is_opened_once_and_closed_with_its_last_connection(tmp_path: Path) -> None:
    first = dbapi.connect(tmp_path / "store" / "shop")
    second = dbapi.connect(tmp_path / "store" / "other")
    first.execute("create table t(a)")
    first.close()
    second.execute("attach 'shop' as s")
    assert second.execute("select count(*) from s.t").fetchone() == (0,)
    del second  # dropped without close(): the store is closed as well
    with quire.open(tmp_path / "store") as store:
        assert sorted(info.name for info in store.databases()) == ["other", "shop"]
        shared = dbapi.connect(tmp_path / "store" / "shop")  # the program's own store
        shared.execute("insert into t values (1)")
        shared.commit()
        shared.close()
        assert store.is_open


def test_a_failure_to_open_is_an_operational_error_with_a_code(tmp_path: Path) -> None:
    plain = tmp_path / "plain.db"
    apsw.Connection(str(plain)).execute("create table t(a)")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("no store")
    for database, reason in (
        (str(plain), "ordinary SQLite file"),
        (str(tmp_path), "directory"),
        (f"{tmp_path}/full/shop", "store"),
        (f"{tmp_path}/nowhere/at/all/shop", "does not exist"),
        (f"quire:///{tmp_path}/store/shop?mode=rw", ""),
        (f"quire:///{tmp_path}/store/shop?at=a&epoch=4", "one version"),
        (f"quire:///{tmp_path}/store/shop?epoch=x", "cannot be read"),
    ):
        with pytest.raises(dbapi.OperationalError, match=f"unable to open database file.*{reason}") as caught:
            dbapi.connect(database)
        assert caught.value.sqlite_errorname == "SQLITE_CANTOPEN"
    assert not (tmp_path / "store").exists()


OWNER = (
    "import quire, sys; store = quire.open(sys.argv[1]); print('owner', flush=True); sys.stdin.read(); store.close()"
)


def test_beside_another_owner_snapshots_can_be_read_and_writing_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    command = ["-c", OWNER, str(tmp_path / "store")]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owner\n"
        with pytest.raises(dbapi.OperationalError, match="database is locked") as caught:
            dbapi.connect(tmp_path / "store" / "shop", timeout=0)
        assert caught.value.sqlite_errorname == "SQLITE_BUSY"
        assert read(f"quire:///{tmp_path}/store/shop?at=monday") == ("monday",)
        owner.communicate()


STARTING = (
    "import quire, sys; store = quire.open(sys.argv[1]); print('owner', flush=True); sys.stdin.readline()\n"
    "with store, store.serve(): sys.stdin.read()"
)


def test_connect_waits_for_an_owner_that_is_starting_to_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "store")
    command = ["-c", STARTING, str(tmp_path / "store")]
    with Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owner\n"
        sleeps: list[float] = []

        def sleep(seconds: float) -> None:
            if not sleeps:  # it has found an owner that does not serve yet
                assert owner.stdin is not None
                owner.stdin.write("serve\n")
                owner.stdin.flush()
            sleeps.append(seconds)
            threading.Event().wait(seconds)

        monkeypatch.setattr("quire.store.sqlite_urls.time.sleep", sleep)
        connection = dbapi.connect(tmp_path / "store" / "shop", timeout=120)
        assert sleeps
        assert connection.execute("select count(*) from t").fetchone()[0] >= 1
        connection.close()
        owner.communicate()


def test_memory_databases_are_those_of_sqlite() -> None:
    first = dbapi.connect("file:m?mode=memory&cache=shared", uri=True)
    other = dbapi.connect("file:m?mode=memory&cache=shared", uri=True)
    first.execute("create table t(a)")
    assert other.execute("select count(*) from t").fetchone() == (0,)
    assert dbapi.connect(":memory:").execute("select 1").fetchall() == [(1,)]


def test_pragmas_answered_by_the_store_have_column_names(tmp_path: Path) -> None:
    connection = dbapi.connect(tmp_path / "store" / "shop")
    for pragma in ("journal_mode=WAL", "main.journal_mode = delete", "locking_mode=exclusive", "mmap_size=4096"):
        cursor = connection.execute(f"/* as programs do */ PRAGMA {pragma}")
        assert [column[0] for column in cursor.description] == [pragma.partition("=")[0].split(".")[-1].strip()]
    connection.close()


def test_columns_follow_the_schema(tmp_path: Path) -> None:
    connection = dbapi.connect(tmp_path / "store" / "shop")
    other = dbapi.connect(tmp_path / "store" / "shop")
    connection.execute("create table t(a)")
    connection.execute("insert into t values (1)")
    connection.commit()
    for names in (["a"], ["a", "b"], ["a", "c"]):
        assert [column[0] for column in connection.execute(f"select * from t -- {names}").description] == names
        cursor = connection.execute("select * from t")
        assert [column[0] for column in cursor.description] == names
        assert len(cursor.fetchall()[0]) == len(names)
        if names != ["a", "c"]:
            other.execute("alter table t add column b" if names == ["a"] else "alter table t rename column b to c")
    connection.close()
    other.close()


def test_a_description_follows_the_schema_inside_and_outside_of_transactions(tmp_path: Path) -> None:
    """The columns of a cached statement are read again only where they may have changed."""
    first, second = dbapi.connect(tmp_path / "store" / "shop"), dbapi.connect(tmp_path / "store" / "shop")
    query = "select * from item limit 1"

    def names(connection: dbapi.Connection) -> list[str]:
        return [column[0] for column in connection.execute(query).description]

    first.execute("create table item(a, b)")
    first.execute("insert into item values (1, 2)")
    first.commit()
    assert names(first) == names(second) == ["a", "b"]
    second.execute("alter table item rename column b to c")
    assert names(first) == ["a", "c"], "another connection's change, outside of a transaction"
    first.execute("insert into item values (3, 4)")
    assert names(first) == names(first) == ["a", "c"]
    first.execute("alter table item rename column c to d")
    assert names(first) == ["a", "d"], "its own change, inside of one"
    with pytest.raises(dbapi.OperationalError):
        first.executescript("alter table item rename column d to e; select * from nothing")
    assert names(first) == ["a", "e"], "a script that failed half way"
    first.execute("savepoint one")
    first.execute("alter table item rename column e to f")
    assert names(first) == ["a", "f"]
    first.execute("rollback to one")
    assert names(first) == ["a", "e"]
    first.execute("release one")
    assert names(second) == ["a", "e"]
    second.execute("alter table item rename column e to g")
    first.execute("insert into item values (5, 6)")
    assert names(first) == ["a", "g"], "changed before the transaction began"
    first.commit()
    second.execute("alter table item rename column g to h")
    first.execute("begin")
    assert names(first) == ["a", "h"]
    first.rollback()
    first.close()
    second.close()


# ── autocommit, as Python 3.12 has it ─────────────────────────────────────────────────────────────────────────────────
def in_transaction(connection: dbapi.Connection) -> bool:
    return connection.in_transaction


def test_with_autocommit_off_there_is_always_a_transaction() -> None:
    connection = dbapi.connect(":memory:", autocommit=False)
    assert in_transaction(connection)
    connection.execute("create table t(a)")
    connection.rollback()
    assert in_transaction(connection)
    with pytest.raises(dbapi.OperationalError, match="no such table"):
        connection.execute("select * from t")
    connection.execute("create table t(a)")
    connection.commit()
    connection.executescript("insert into t values (1)")
    assert in_transaction(connection)
    connection.autocommit = True
    assert not in_transaction(connection)
    assert connection.execute("select * from t").fetchall() == [(1,)]


def test_with_autocommit_on_only_sql_begins_a_transaction() -> None:
    connection = dbapi.connect(":memory:", autocommit=True)
    connection.execute("create table t(a)")
    connection.execute("insert into t values (1)")
    assert not in_transaction(connection)
    connection.execute("begin")
    connection.commit()  # has no effect, as in sqlite3
    assert in_transaction(connection)
    with pytest.raises(ValueError, match="autocommit must be"):
        connection.autocommit = 7


# ── a driver that is not local ────────────────────────────────────────────────────────────────────────────────────────
class RemoteDriver:
    """A driver of a client: SQLite runs in another process."""

    local: apsw.Connection | None = None

    def __init__(self) -> None:
        below = LocalDriver(apsw.Connection(""))
        self.cursor, self.get_autocommit = below.cursor, below.get_autocommit
        self.changes, self.total_changes = below.changes, below.total_changes
        self.last_insert_rowid, self.interrupt = below.last_insert_rowid, below.interrupt
        self.script, self.close = below.script, below.close
        self._below = below

    def examine(
        self, cursor: DriverCursor, sql: str, bindings: Any, prepared: Callable[[Prepared], None], *, many: bool = False
    ) -> None:
        self._below.examine(cursor, sql, bindings, prepared, many=many)


def test_a_remote_connection_has_the_same_class_and_reports_unsupported_operations() -> None:
    connection = dbapi.Connection(RemoteDriver())
    connection.execute("create table t(a)")
    assert connection.executemany("insert into t values (?)", [(1,), (2,)]).rowcount == 2
    assert list(connection.execute("select a from t")) == [(1,), (2,)]
    connection.rollback()
    attempts: Iterable[Callable[[], object]] = (
        lambda: connection.create_function("f", 0, lambda: 1),
        lambda: connection.blobopen("t", "a", 1),
        lambda: connection.backup(dbapi.connect(":memory:")),
        lambda: connection.set_trace_callback(print),
        connection.serialize,
    )
    for attempt in attempts:
        with pytest.raises(dbapi.NotSupportedError, match="goes to a server"):
            attempt()
    connection.close()


def test_a_connection_that_allows_it_can_be_used_by_any_thread() -> None:
    connection = dbapi.connect(":memory:", check_same_thread=False)
    rows: list[object] = []
    thread = threading.Thread(target=lambda: rows.extend(connection.execute("select 1")))
    thread.start()
    thread.join()
    assert rows == [(1,)]


def test_a_child_of_a_fork_gets_an_error(tmp_path: Path) -> None:
    filled(tmp_path / "store")
    connection = dbapi.connect(tmp_path / "store" / "shop")
    child = os.fork()
    if child == 0:
        try:
            dbapi.connect(f"{tmp_path}/store/shop", timeout=0)
        except dbapi.OperationalError as error:
            os._exit(0 if "locked" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    connection.close()
