"""Connecting: the newest version, earlier ones, forks, other databases and files; and every way in which it can fail."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import (
    ChecksumMismatch,
    InvalidInput,
    NameTaken,
    ReadOnly,
    SnapshotGone,
    StoreClosed,
    UnknownDatabase,
    UnknownSnapshot,
    WrongKind,
)
from quire.core.ids import Epoch
from quire.core.settings import PagesSettings, StoreSettings
from quire.sqlite.connect import SqliteDatabases
from quire.sqlite.databases import ReadPin
from quire.store.store import Store
from tests.sqlite.conftest import SETTINGS, Connect, count, extended


# ── the newest version ────────────────────────────────────────────────────────────────────────────────────────────────
def test_commits_are_visible_to_other_connections(shop: apsw.Connection, connect: Connect) -> None:
    assert count(connect()) == 10


def test_commits_survive_reopening(root: Path) -> None:
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table t(a); insert into t values (1), (2)")
        connection.close()
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop")
        assert count(connection) == 2
        connection.close()


def test_a_database_is_created_only_on_request(store: Store) -> None:
    with pytest.raises(UnknownDatabase, match="no database has this name"):
        store.sqlite("shop")
    store.sqlite("shop", create=True).close()
    store.sqlite("shop", create=True).close()
    assert [info.name for info in store.databases()] == ["shop"]


def test_other_kinds_of_databases_are_refused(store: Store) -> None:
    store.create("log", "stream")
    with pytest.raises(WrongKind):
        store.sqlite("log")


def test_names_with_uri_characters_are_plain_names(connect: Connect) -> None:
    for name in ("größe 1", "a?at=b", "50%", "a&b=c#d", "x-journal", "x-wal"):
        connection = connect(name)
        connection.execute("create table t(a); insert into t values (1)")
        assert count(connect(name)) == 1
    with pytest.raises(InvalidInput, match="in memory"):
        connect(":memory:")


def test_a_with_block_is_a_transaction_and_leaves_the_connection_open(shop: apsw.Connection, connect: Connect) -> None:
    with shop:
        shop.execute("delete from t where id = 0")
        assert count(connect()) == 10, "nothing is committed yet"
    assert count(connect()) == 9
    with pytest.raises(apsw.SQLError), shop:
        shop.execute("delete from t; delete from nosuch")
    assert count(shop) == 9, "the connection stays usable"


def test_renaming_leaves_connections_alone(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    store.rename("shop", "store")
    shop.execute("insert into t values (100, 'after')")
    assert count(connect("store", create=False)) == 11


# ── earlier versions ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_does_not_change(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    store.snapshot("shop", "monday")
    old = connect(at="monday")
    shop.execute("delete from t where id < 5")
    assert (count(old), count(shop)) == (10, 5)
    store.checkpoint("shop")
    assert (count(old), count(shop)) == (10, 5)
    assert old.readonly("main")
    with pytest.raises(apsw.ReadOnlyError):
        old.execute("delete from t")


def test_any_commit_can_be_read_by_its_epoch(shop: apsw.Connection, connect: Connect) -> None:
    epoch = int(str(shop.pragma("quire_epoch")))
    shop.execute("delete from t")
    assert count(connect(at=epoch)) == 10
    assert count(connect(at=Epoch(epoch, 1))) == 10
    assert count(connect(at=int(str(shop.pragma("quire_epoch"))))) == 0
    assert connect(at=epoch).pragma("quire_epoch") == str(epoch)


def test_a_commit_that_is_not_on_disk_yet_can_be_read_by_its_epoch(shop: apsw.Connection, connect: Connect) -> None:
    shop.pragma("synchronous", "off")
    shop.execute("delete from t where id = 1")
    assert count(connect(at=int(str(shop.pragma("quire_epoch"))))) == 9


def test_any_point_in_time_can_be_read(shop: apsw.Connection, connect: Connect) -> None:
    time.sleep(0.01)
    before = datetime.now(UTC)
    time.sleep(0.01)
    shop.execute("delete from t")
    assert count(connect(at=before)) == 10
    assert count(connect(at=datetime.now(UTC) + timedelta(days=1))) == 0


def test_missing_versions_are_refused(shop: apsw.Connection, connect: Connect) -> None:
    with pytest.raises(UnknownSnapshot):
        connect(at="monday")
    with pytest.raises(InvalidInput, match="does not exist yet"):
        connect(at=10_000_000)
    with pytest.raises(SnapshotGone):
        connect(at=datetime(2001, 1, 1, tzinfo=UTC))
    with pytest.raises(InvalidInput, match="zone"):
        connect(at=datetime(2001, 1, 1))
    with pytest.raises(InvalidInput, match="unknown way"):
        connect(at=1.5)
    with pytest.raises(InvalidInput, match="unknown way"):
        connect(at=True)
    with pytest.raises(ReadOnly):
        connect(at=1, create=True)


# ── forks ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_fork_and_open_in_one_call(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    store.snapshot("shop", "monday")
    shop.execute("delete from t where id < 5")
    now, then = connect("now", fork_of="shop"), connect("then", fork_of="shop", fork_at="monday")
    assert (count(now), count(then)) == (5, 10)
    now.execute("delete from t")
    assert (count(now), count(then), count(shop)) == (0, 10, 5)


def test_fork_at_accepts_the_same_values_as_at(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    epoch = int(str(shop.pragma("quire_epoch")))
    time.sleep(0.01)
    moment = datetime.now(UTC)
    time.sleep(0.01)
    shop.execute("delete from t")
    for number, at in enumerate((epoch, Epoch(epoch, 1), moment)):
        assert count(connect(f"fork-{number}", fork_of="shop", fork_at=at)) == 10


def test_a_fork_of_a_fork_and_a_name_that_is_taken(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    connect("a", fork_of="shop").execute("delete from t where id = 0")
    assert count(connect("b", fork_of="a")) == 9
    with pytest.raises(NameTaken):
        connect("a", fork_of="shop")
    with pytest.raises(InvalidInput, match="needs `fork_of`"):
        connect("c", fork_at="monday")


# ── other databases and files ─────────────────────────────────────────────────────────────────────────────────────────
def test_attach_a_database_an_earlier_version_and_a_file(
    store: Store, shop: apsw.Connection, connect: Connect, tmp_path: Path
) -> None:
    store.snapshot("shop", "monday")
    shop.execute("delete from t where id < 9")
    connect("other").execute("create table u(a); insert into u values (1), (2)")
    file = tmp_path / "plain.db"
    plain = apsw.Connection(str(file))
    plain.execute("create table v(a); insert into v values (1), (2), (3)")
    plain.close()
    shop.execute("attach 'other' as o")
    shop.execute("attach 'file:shop?at=monday' as old")
    shop.execute(f"attach '{file}' as f")
    assert [count(shop, table) for table in ("t", "o.u", "old.t", "f.v")] == [1, 2, 10, 3]
    shop.execute("begin; delete from t; insert into o.u select a from f.v; delete from f.v; commit")
    assert [count(shop, table) for table in ("t", "o.u", "old.t", "f.v")] == [0, 5, 10, 0]
    assert [row[2] for row in shop.execute("pragma database_list")][1:3] == ["other", "shop"]
    with pytest.raises(apsw.ReadOnlyError):
        shop.execute("delete from old.t")
    shop.execute("begin; insert into o.u values (9); insert into f.v values (9); rollback")
    assert [count(shop, table) for table in ("o.u", "f.v")] == [5, 0]


def test_attach_creates_a_database_as_sqlite_creates_a_file(store: Store, shop: apsw.Connection) -> None:
    shop.execute("attach 'archive' as a; create table a.t(x); insert into a.t values (1)")
    with contextlib.closing(store.sqlite("archive")) as archive:
        assert count(archive, "t") == 1
    with pytest.raises(apsw.CantOpenError):
        shop.execute("attach 'file:nosuch?mode=rw' as n")
    with pytest.raises(UnknownDatabase):
        store.sqlite("nosuch")
    assert "nosuch" not in [info.name for info in store.databases()]


def test_a_setting_refuses_to_attach_missing_databases(tmp_path: Path) -> None:
    settings = StoreSettings(pages=PagesSettings(attach_creates=False))
    with quire.open(tmp_path / "strict", settings=settings) as store:
        with contextlib.closing(store.sqlite("shop", create=True)) as shop:
            with pytest.raises(apsw.CantOpenError, match="no database has this name") as caught:
                shop.execute("attach 'nosuch' as n")
            assert isinstance(caught.value.__cause__, UnknownDatabase)
            shop.execute("create table t(x); vacuum into 'copy'")
        assert sorted(info.name for info in store.databases()) == ["copy", "shop"]


def test_attaching_a_missing_version_is_refused(shop: apsw.Connection) -> None:
    for uri in ("file:shop?at=nosuch", "file:shop?epoch=x", "file:shop?time=x", "file:shop?at=a&epoch=1"):
        with pytest.raises(apsw.CantOpenError):
            shop.execute("attach ? as n", (uri,))


def test_attach_from_a_connection_to_a_file(store: Store, shop: apsw.Connection, tmp_path: Path) -> None:
    flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    plain = apsw.Connection(str(tmp_path / "plain.db"), flags=flags)
    plain.execute(f"attach 'file:shop?vfs={store.sqlite_vfs}' as shop")
    plain.execute("create table copy as select * from shop.t")
    assert plain.execute("pragma shop.locking_mode=exclusive").get == "normal"
    plain.execute("delete from shop.t")
    assert (count(plain, "copy"), count(plain, "shop.t"), count(shop)) == (10, 0, 0)
    plain.close()


def test_exclusive_locking_mode_does_not_prevent_commits(
    store: Store, shop: apsw.Connection, connect: Connect, tmp_path: Path
) -> None:
    """`locking_mode=exclusive` of another main database also applies to databases that are attached later."""
    flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    plain = apsw.Connection(str(tmp_path / "plain.db"), flags=flags)
    plain.execute("pragma locking_mode=exclusive; create table x(a)")
    plain.execute(f"attach 'file:shop?vfs={store.sqlite_vfs}' as shop")
    for number in range(3):
        plain.execute("insert into shop.t values (?, 'more')", (100 + number,))
    assert count(connect()) == 13
    plain.close()
    shop.execute("insert into t values (200, 'after')")
    assert count(connect()) == 14


def test_vacuum_into_a_file_and_into_a_new_database(
    shop: apsw.Connection, connect: Connect, store: Store, tmp_path: Path
) -> None:
    shop.execute("vacuum into ?", (str(tmp_path / "copy.db"),))
    plain = apsw.Connection(str(tmp_path / "copy.db"))
    assert count(plain) == 10
    plain.close()
    shop.execute("vacuum into 'copy'")
    assert count(connect("copy", create=False)) == 10
    connect("other").execute("create table unlike(x)")
    for target in ("copy", "other", "shop"):
        with pytest.raises(apsw.SQLError, match="output file already exists"):
            shop.execute(f"vacuum into '{target}'")


def test_damage_is_reported_with_its_page(
    shop: apsw.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: object, page: int) -> bytes:
        raise ChecksumMismatch("a page is not what was written", hint="run `quire doctor`", page=page)

    reader = connect()
    with monkeypatch.context() as patch:
        patch.setattr(ReadPin, "read_page", damaged)
        with pytest.raises(apsw.CorruptError, match="page=1") as caught:  # `connect` has read the schema
            reader.execute("select * from t").fetchall()
    assert isinstance(caught.value.__cause__, ChecksumMismatch)
    assert count(reader) == 10


MALFORMED = """
create index by_b on t(b); create view v as select b from t;
pragma writable_schema=on; update sqlite_master set sql = 'create tabel t(a)' where name = 't'; pragma writable_schema=off
"""


def test_a_malformed_schema_can_be_connected_to_and_repaired(
    store: Store, shop: apsw.Connection, connect: Connect
) -> None:
    """`connect` itself read the schema and failed; with native SQLite the connection succeeds and the first statement
    fails.
    """
    shop.execute(MALFORMED)
    shop.close()
    store.snapshot("shop", "broken")
    for options in ({}, {"at": "broken"}):
        with pytest.raises(apsw.CorruptError, match=r"malformed database schema \(t\)"):
            connect(**options).execute("select * from t")
    broken = connect()
    broken.execute("pragma writable_schema=on")
    repaired = "create table t(id integer primary key, b text)"
    broken.execute("update sqlite_master set sql = ? where name = 't'", (repaired,))
    broken.execute("pragma writable_schema=reset")
    assert broken.pragma("integrity_check") == "ok"
    assert count(broken) == count(connect(), "v") == 10
    assert connect().execute("select b from t where b = 'row 7'").get == "row 7"


# ── endings ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_connections_that_outlive_the_store_fail_with_a_reason(root: Path) -> None:
    store = quire.open(root, settings=SETTINGS)
    connection, writer = store.sqlite("shop", create=True), store.sqlite("shop")
    connection.execute("create table t(a)")
    store.snapshot("shop", "monday")
    old = store.sqlite("shop", at="monday")
    fresh = store.sqlite("unborn", create=True)
    cursor = connection.execute("with recursive n(i) as (select 1 union all select i + 1 from n) select i from n, t")
    writer.execute("begin immediate; insert into t values (1)")
    store.close()
    for db in (connection, fresh):
        with pytest.raises(apsw.IOError, match="closed"):
            db.execute("select * from sqlite_schema").fetchall()
    with pytest.raises(apsw.IOError, match="closed"):
        writer.execute("commit")
    with pytest.raises(apsw.IOError, match="closed"):
        writer.execute("select * from t").fetchall()
    with pytest.raises(apsw.IOError, match="closed"):
        old.execute("select * from t").fetchall()
    cursor.close()
    for db in (connection, writer, old, fresh):
        db.close()
    with pytest.raises(StoreClosed):
        store.sqlite("shop")


def test_closing_under_threads_that_read_and_write_ends_them_with_an_error(root: Path) -> None:
    store = quire.open(root, settings=SETTINGS)
    first = store.sqlite("shop", create=True)
    first.execute("create table t(id integer primary key, b text)")
    first.close()
    started, errors = threading.Barrier(5), []

    def work(statement: str) -> None:
        connection = store.sqlite("shop")
        connection.pragma("cache_size", 5)
        started.wait()
        try:
            while True:
                connection.execute(statement).fetchall()
        except apsw.Error as error:
            errors.append(error)
        connection.close()

    statements = ["insert into t(b) values (hex(randomblob(500)))"] * 2 + ["select sum(length(b)) from t"] * 2
    threads = [threading.Thread(target=work, args=(statement,)) for statement in statements]
    for thread in threads:
        thread.start()
    started.wait()
    time.sleep(0.3)
    store.close()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 4
    assert all(isinstance(error, apsw.IOError) for error in errors), errors


def test_connections_outlive_everything_else(root: Path) -> None:
    """Nothing else refers to the VFS and the store; the connection keeps what it needs."""
    store = quire.open(root, settings=SETTINGS)
    connection = store.sqlite("shop", create=True)
    connection.execute("create table t(a)")
    store.close()
    del store
    gc.collect()
    with pytest.raises(apsw.IOError, match="closed"):
        connection.execute("select * from t").fetchall()
    connection.close()


def test_a_database_that_is_dropped_while_it_is_open(store: Store, shop: apsw.Connection, connect: Connect) -> None:
    reader = connect()
    reader.execute("begin; select * from t").fetchall()
    store.drop("shop")
    # The engine checks every quarter of a second: until then the manifest refuses the write, afterwards the log does.
    with pytest.raises((apsw.ReadOnlyError, apsw.IOError), match="dropped") as caught:
        shop.execute("delete from t")
    assert isinstance(caught.value, apsw.IOError) or extended(caught) == apsw.SQLITE_READONLY_DBMOVED
    wait_until_drop_is_noticed(store)
    with pytest.raises(apsw.IOError, match="dropped"):
        shop.execute("select count(*) from t").get  # noqa: B018 - reads
    fresh = connect()
    fresh.execute("create table t(a)")
    assert count(fresh) == 0


def test_a_transaction_of_a_dropped_database_is_rolled_back(store: Store, shop: apsw.Connection) -> None:
    shop.execute("begin immediate; delete from t")
    store.drop("shop")
    with pytest.raises(apsw.IOError, match=r"rolled back.*dropped"):
        shop.execute("commit")
    wait_until_drop_is_noticed(store)


def wait_until_drop_is_noticed(store: Store) -> None:
    """Wait until the engine, which checks every quarter of a second, has noticed the drop."""
    deadline = time.monotonic() + 60
    while store.pages.stores() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not store.pages.stores()


def test_a_forked_child_is_refused_and_the_parent_continues(store: Store, shop: apsw.Connection) -> None:
    child = os.fork()
    if not child:
        try:
            shop.execute("select count(*) from t").fetchall()
            os._exit(1)
        except apsw.IOError as error:
            os._exit(0 if "fork" in str(error) else 2)
        except BaseException:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shop.execute("insert into t values (100, 'parent')")
    assert count(shop) == 11


def test_idle_versions_are_released_and_used_ones_renewed(store: Store, shop: apsw.Connection) -> None:
    pages = store.pages.open("shop")
    databases: SqliteDatabases = store._parts.sqlite
    cursor = shop.execute("select id from t")
    next(cursor)
    before = pages.readers.peek()[0].expires_at
    time.sleep(0.01)
    databases.run_keeper_round()
    assert len(pages.readers) == 1
    after = pages.readers.peek()[0].expires_at
    assert before is not None
    assert after is not None
    assert after > before
    cursor.close()
    databases.run_keeper_round()
    assert len(pages.readers) == 0
    assert count(shop) == 10


def test_a_snapshot_whose_name_has_a_space_and_a_plus_is_opened(tmp_path: Path) -> None:
    with quire.open(tmp_path / "s") as store:
        with store.sqlite("shop", create=True) as connection:
            connection.execute("create table t(a)")
        store.snapshot("shop", "end of day + 1")
        assert store.sqlite("shop", at="end of day + 1").execute("select count(*) from t").fetchall() == [(0,)]
