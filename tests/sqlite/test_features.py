"""The features of SQLite that its users expect, on every page size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import apsw
import pytest
import sqlalchemy as sa

from quire.core.errors import InvalidInput
from quire.sqlite import dbapi
from quire.sqlite.pragmas import JOURNAL_MODE, NOTES, answer_pragma, log_once
from quire.store.store import Store
from tests.rules.tree import ROOT
from tests.sqlite.conftest import Connect, count

PAGE_SIZES = [512 << step for step in range(8)]


def fill(connection: apsw.Connection, rows: int = 300) -> None:
    """A table with an index, small rows, and some rows with overflow pages."""
    connection.execute("create table t(id integer primary key, b text, c blob); create index i on t(b)")
    with connection:
        connection.executemany(
            "insert into t values (?, ?, ?)",
            (
                (number, f"row {number % 37}", bytes(number * 400 if number % 50 == 0 else number))
                for number in range(rows)
            ),
        )


# ── page sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_page_size_by_argument(connect: Connect, page_size: int) -> None:
    connection = connect(page_size=page_size)
    fill(connection)
    assert connection.pragma("page_size") == page_size
    other = connect()
    assert count(other) == 300
    assert other.pragma("integrity_check") == "ok"
    with pytest.raises(InvalidInput, match="cannot be changed"):
        connect(page_size=page_size * 2 if page_size < 65_536 else 512)


@pytest.mark.parametrize("page_size", [512, 1024, 16_384, 65_536])
def test_every_page_size_by_pragma_before_the_first_write(store: Store, connect: Connect, page_size: int) -> None:
    early, connection = connect(), connect()
    assert early.execute("select count(*) from sqlite_schema").get == 0
    connection.pragma("page_size", page_size)
    fill(connection, 60)
    assert count(early) == 60, "a connection learns the page size when it reads"
    assert store.pages.open("shop").page_size == page_size
    early.execute("delete from t")
    assert count(connection) == 0


def test_the_page_size_of_an_existing_database_does_not_change(shop: apsw.Connection) -> None:
    with pytest.raises(apsw.SQLError, match="page size of a quire database is fixed: 4096, not 8192"):
        shop.pragma("page_size", 8192)
    assert shop.pragma("page_size", 4096) is None
    shop.execute("vacuum")
    assert shop.pragma("page_size") == 4096


def test_an_invalid_page_size_is_refused(connect: Connect) -> None:
    with pytest.raises(InvalidInput, match="power of two"):
        connect(page_size=1000)


# ── the file's life ───────────────────────────────────────────────────────────────────────────────────────────────────
def test_vacuum_frees_pages(store: Store, connect: Connect) -> None:
    connection = connect()
    fill(connection)
    before = connection.pragma("page_count")
    connection.execute("delete from t where id > 10")
    connection.execute("vacuum")
    after = connection.pragma("page_count")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after < before / 2
    assert store.pages.open("shop").wal.written.size_pages == after
    assert count(connect()) == 11


@pytest.mark.parametrize("mode", ["full", "incremental"])
def test_auto_vacuum(connect: Connect, mode: str) -> None:
    connection = connect()
    connection.pragma("auto_vacuum", mode)
    fill(connection)
    before = connection.pragma("page_count")
    connection.execute("delete from t where id > 10")
    if mode == "incremental":
        assert connection.pragma("page_count") == before
        connection.execute("pragma incremental_vacuum(5)").fetchall()
        connection.execute("pragma incremental_vacuum").fetchall()
    after = connection.pragma("page_count")
    assert isinstance(before, int)
    assert isinstance(after, int)
    assert after < before
    assert connection.pragma("integrity_check") == "ok"
    assert count(connect()) == 11


def test_backup_in_and_out(store: Store, connect: Connect, tmp_path: Path) -> None:
    plain = apsw.Connection(str(tmp_path / "plain.db"))
    plain.execute("pragma page_size=8192")
    fill(plain)
    connection = connect()
    with connection.backup("main", plain, "main") as backup:
        backup.step()
    assert count(connection) == 300
    assert store.pages.open("shop").page_size == 8192
    connection.execute("delete from t where id < 100")
    back = apsw.Connection(str(tmp_path / "back.db"))
    with back.backup("main", connection, "main") as backup:
        while not backup.done:
            backup.step(7)
    assert count(back) == 200
    assert back.pragma("integrity_check") == "ok"
    copy = connect("copy")
    with copy.backup("main", connection, "main") as backup:
        backup.step()
    assert count(copy) == 200
    for file in (plain, back):
        file.close()


def test_a_backup_of_another_page_size_into_a_database_is_refused_and_nothing_is_lost(
    connect: Connect, shop: apsw.Connection, tmp_path: Path
) -> None:
    plain = apsw.Connection(str(tmp_path / "plain.db"))
    plain.execute("pragma page_size=8192")
    fill(plain)
    with pytest.raises(apsw.Error), shop.backup("main", plain, "main") as backup:
        backup.step()
    assert count(shop) == count(connect()) == 10
    plain.close()


def test_temporary_tables_and_sorting_on_disk(shop: apsw.Connection) -> None:
    shop.execute("pragma temp_store=file; pragma cache_size=10; create temp table x(a, b)").fetchall()
    shop.executemany("insert into x values (?, ?)", ((number * 7_919 % 10_007, "y" * 200) for number in range(5_000)))
    values = [row[0] for row in shop.execute("select a from x order by a, b")]
    assert values == sorted(values)
    assert len(values) == 5_000


# ── what SQLite is made of ────────────────────────────────────────────────────────────────────────────────────────────
def test_full_text_search(connect: Connect) -> None:
    connection = connect()
    connection.execute("create virtual table f using fts5(title, body)")
    with connection:
        connection.executemany(
            "insert into f values (?, ?)", ((f"title {n}", f"the quick fox number {n}") for n in range(500))
        )
    assert connection.execute("select count(*) from f where f match 'quick AND 42'").get == 1
    connection.execute("insert into f(f) values ('optimize')")
    connection.execute("insert into f(f) values ('integrity-check')")
    assert connect().execute("select title from f where f match 'number 77' order by rank").get == "title 77"


def test_rtree(connect: Connect) -> None:
    connection = connect()
    connection.execute("create virtual table r using rtree(id, x0, x1, y0, y1)")
    with connection:
        connection.executemany("insert into r values (?, ?, ?, ?, ?)", ((n, n, n + 1, n, n + 1) for n in range(1_000)))
    assert connect().execute("select count(*) from r where x0 >= 10 and x1 <= 20").get == 10
    assert connection.execute("select rtreecheck('r')").get == "ok"


def test_json_window_functions_and_generated_columns(shop: apsw.Connection) -> None:
    shop.execute("create table j(d text, n integer generated always as (d ->> '$.n') stored)")
    shop.executemany("insert into j(d) values (?)", ((f'{{"n": {n}, "tags": ["a", "b"]}}',) for n in range(5)))
    assert shop.execute("select sum(n) from j").get == 10
    assert shop.execute("select count(*) from j, json_each(d, '$.tags')").get == 10
    running = [row[0] for row in shop.execute("select sum(n) over (order by n) from j")]
    assert running == [0, 1, 3, 6, 10]


def test_blobs_are_read_and_written_in_place(shop: apsw.Connection, connect: Connect) -> None:
    shop.execute("create table b(d blob); insert into b values (zeroblob(100000))")
    with shop.blob_open("main", "b", "d", 1, True) as blob:
        blob.seek(50_000)
        blob.write(b"in the middle")
    with connect().blob_open("main", "b", "d", 1, False) as blob:
        blob.seek(50_000)
        assert blob.read(13) == b"in the middle"


def test_triggers_and_foreign_keys_work(shop: apsw.Connection) -> None:
    shop.execute(
        "pragma foreign_keys=on; create table c(t integer references t(id) on delete cascade);"
        "create table log(what); create trigger d after delete on t begin insert into log values (old.id); end;"
        "insert into c select id from t; delete from t where id < 3"
    )
    assert (count(shop, "c"), count(shop, "log")) == (7, 3)


# ── pragmas ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_journal_modes(shop: apsw.Connection) -> None:
    assert shop.pragma("journal_mode") == "memory"
    for mode in ("wal", "delete", "truncate", "persist", "memory"):
        assert shop.pragma("journal_mode", mode) == "memory"
    with pytest.raises(apsw.SQLError, match="nothing to roll back to"):
        shop.pragma("journal_mode", "off")
    shop.execute("begin; delete from t; rollback")
    assert count(shop) == 10


def test_the_page_documents_each_journal_mode() -> None:
    page = (ROOT / "docs" / "sqlite.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| `memory` \| (.+) \|$", page, re.MULTILINE))
    assert {mode for modes in rows for mode in re.findall(r"\w+", modes)} == {*NOTES, JOURNAL_MODE}
    refusal = answer_pragma("journal_mode", "off", page_size=4096).refusal
    assert refusal is not None
    assert f"| `off` | an error: `{refusal.partition(';')[0]}` |" in page


def test_a_different_journal_mode_is_reported_once(
    shop: apsw.Connection, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """SQLite's answer names the actual mode; the log explains it."""
    log_once.cache_clear()
    for mode in ("wal", "WAL", "persist", "memory"):
        assert shop.pragma("journal_mode", mode) == "memory"
        assert connect().execute(f"pragma journal_mode={mode}").get == "memory"
    shop.pragma("locking_mode", "exclusive")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" note=")[0] for line in lines] == [
        "quire warning: sqlite.pragma pragma='journal_mode' asked='wal' answered='memory'",
        "quire warning: sqlite.pragma pragma='journal_mode' asked='persist' answered='memory'",
        "quire warning: sqlite.pragma pragma='locking_mode' asked='exclusive' answered='normal'",
    ]
    assert "never wait for each other" in lines[0]


LISTENER = """
import apsw, sys, quire
apsw.config(apsw.SQLITE_CONFIG_LOG, lambda code, message: print(code == apsw.SQLITE_NOTICE, message))
with quire.open(sys.argv[1]) as store:
    connection = store.sqlite("shop", create=True)
    connection.pragma("journal_mode", "wal")
    connection.close()
"""


def test_the_log_handler_of_sqlite_is_notified_as_well(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LISTENER, str(tmp_path)], capture_output=True, text=True, timeout=100, check=True
    )
    assert result.stdout.startswith("True PRAGMA journal_mode=wal is answered with 'memory': readers and the writer")


def test_an_orm_that_requests_wal_mode_works(store: Store) -> None:
    """What SQLAlchemy's documentation recommends for each new connection."""

    def prepare(connection: dbapi.Connection, _: object) -> None:
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
            "busy_timeout=5000",
            "cache_size=-8000",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    engine = sa.create_engine(
        "sqlite://", module=dbapi, poolclass=sa.QueuePool, creator=lambda: dbapi.wrap(store.sqlite("shop", create=True))
    )
    sa.event.listen(engine, "connect", prepare)
    items = sa.Table("item", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True), sa.Column("name", sa.Text))
    items.create(engine)
    with engine.begin() as connection:
        connection.execute(sa.insert(items), [{"name": "tea"}, {"name": "milk"}])
    with engine.connect() as connection:
        assert connection.scalars(sa.select(items.c.name)).all() == ["tea", "milk"]
    engine.dispose()


def test_a_journal_mode_for_all_attached_databases_loses_nothing(
    store: Store, shop: apsw.Connection, tmp_path: Path
) -> None:
    """An unqualified pragma applies to every attached database, but only the first one's file is asked."""
    flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    plain = apsw.Connection(str(tmp_path / "plain.db"), flags=flags)
    plain.execute(f"create table x(a); attach 'file:shop?vfs={store.sqlite_vfs}' as shop")
    for mode in ("wal", "delete", "truncate", "persist", "off"):
        assert plain.pragma("journal_mode", mode) == mode
        plain.execute("begin; delete from shop.t; rollback")
        assert count(shop) == count(plain, "shop.t") == 10
        plain.execute("pragma shop.cache_size=5; begin; savepoint s")
        plain.execute("update shop.t set b = hex(randomblob(9000)); insert into shop.t values (99, 'x')")
        if mode != "off":  # without a journal SQLite cannot roll back to a savepoint
            plain.execute("rollback to s")
        plain.execute("rollback")
        assert shop.execute("select group_concat(length(b)) from t").get == ",".join("5" * 10)
        plain.execute("begin; insert into shop.t values (50, 'kept'); insert into x values (1); commit")
        assert count(shop) == 11
        shop.execute("delete from t where id = 50")
    plain.close()
    assert not list(tmp_path.glob("*journal*"))


def test_an_attached_database_keeps_its_journal_in_memory_too(shop: apsw.Connection, connect: Connect) -> None:
    connect("other").execute("create table u(a)")
    shop.execute("attach 'other' as o")
    assert shop.execute("pragma o.journal_mode").get == "memory"
    shop.execute("begin; insert into o.u values (1); rollback")
    assert count(shop, "o.u") == 0


def test_invalid_modes_are_answered_and_change_nothing(shop: apsw.Connection, connect: Connect) -> None:
    assert shop.pragma("locking_mode", "exclusive") == "normal"
    assert shop.pragma("mmap_size", 1 << 30) == "0"
    assert shop.pragma("wal_checkpoint") is not None
    shop.execute("delete from t where id = 1")
    connect(timeout=0).execute("delete from t where id = 2")
    assert count(shop) == 8


def test_the_recommended_settings_of_apsw_can_be_applied(shop: apsw.Connection) -> None:
    import apsw.bestpractice

    for hook in apsw.bestpractice.recommended:
        if hook.__name__.startswith("connection_"):
            hook(shop)
    shop.execute("delete from t where id = 1")
    assert count(shop) == 9
