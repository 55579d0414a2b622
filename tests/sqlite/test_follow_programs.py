"""Follow files that other programs write, Django with its ORM and libSQL, each in its own process in WAL mode, without
disturbing them.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

import quire
from quire.sqlite.follow import Follower
from quire.store.store import Store
from tests.sqlite.conftest import SETTINGS, assert_sound
from tests.sqlite.follow_helpers import SqlProgram, content, follower, sqlite_content
from tests.sqlite.sqlite_files import program, read_line, send_line

DJANGO = """
import sys
import django
from django.conf import settings

wal = {"init_command": "PRAGMA journal_mode=wal; PRAGMA synchronous=normal", "transaction_mode": "IMMEDIATE"}
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1], "OPTIONS": wal}},
    USE_TZ=True,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
)
django.setup()
from django.db import connection, models, transaction

class Shop(models.Model):
    name = models.CharField(max_length=80, unique=True)
    class Meta:
        app_label = "shop"

class Order(models.Model):
    shop = models.ForeignKey(Shop, on_delete=models.CASCADE)
    item = models.CharField(max_length=80, db_index=True)
    cents = models.IntegerField()
    details = models.JSONField(default=dict)
    at = models.DateTimeField(auto_now_add=True)
    class Meta:
        app_label = "shop"

def migrate(*_):
    with connection.schema_editor() as editor:
        editor.create_model(Shop)
        editor.create_model(Order)

def sell(count):
    with transaction.atomic():
        shop, _ = Shop.objects.get_or_create(name="corner")
        orders = [Order(shop=shop, item=f"item {n}", cents=n, details={"n": [n] * 20}) for n in range(int(count))]
        Order.objects.bulk_create(orders)

def fail(count):
    try:
        with transaction.atomic():
            Order.objects.all().delete()
            sell(count)
            raise RuntimeError("on second thoughts")
    except RuntimeError:
        pass

def nested(*_):
    with transaction.atomic():
        sell(3)
        fail(5)
        Order.objects.filter(cents=1).update(cents=models.F("cents") + 100)

def cancel(*_):
    Order.objects.filter(cents__gt=50).delete()

def alter(*_):
    field = models.CharField(max_length=8, null=True)
    field.set_attributes_from_name("state")
    with connection.schema_editor() as editor:
        editor.add_field(Order, field)

def sql(*words):
    with connection.cursor() as cursor:
        cursor.execute(" ".join(words))

def total(*_):
    print(Order.objects.aggregate(models.Sum("cents"))["cents__sum"], end=" ")

print(connection.cursor().execute("PRAGMA journal_mode").fetchone()[0], flush=True)
for line in sys.stdin:
    verb, *words = line.split()
    globals()[verb](*words)
    print("ok", flush=True)
connection.close()
"""

LIBSQL = """
import sys
import libsql

connection = libsql.connect(sys.argv[1])
print(connection.execute("PRAGMA journal_mode=wal").fetchone()[0], flush=True)
for line in sys.stdin:
    for statement in line.split(";"):
        found = connection.execute(statement)
        if statement.lstrip().upper().startswith(("SELECT", "PRAGMA")):
            found.fetchall()
    connection.commit()
    print("ok", flush=True)
connection.close()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        yield store
        assert_sound(store)


@contextmanager
def running(text: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program in WAL mode, and check that it ends cleanly."""
    path.parent.mkdir(exist_ok=True)
    process = program(text, str(path))
    try:
        assert read_line(process) == "wal"
        yield process
        process.communicate(timeout=120)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def run_and_compare(store: Store, file_follower: Follower, process: subprocess.Popen[str], line: str) -> None:
    """Send a command to the program, poll, and compare the database with the file."""
    assert send_line(process, line) == "ok", line
    file_follower.look()
    assert content(store) == sqlite_content(Path(file_follower.path)), line


def query_copy(store: Store, query: str) -> object:
    connection = store.sqlite("copy")
    try:
        return connection.execute(query).get
    finally:
        connection.close()


DJANGO_LINES = (
    "migrate", "sell 5", "sell 80", "fail 3", "nested", "cancel", "sql PRAGMA wal_checkpoint(PASSIVE)", "sell 7", "alter",
    "sql PRAGMA wal_checkpoint(TRUNCATE)", "sell 2", "sql VACUUM", "sell 1",
)  # fmt: skip


def test_django(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "live" / "django.db"
    with running(DJANGO, path) as app:
        file_follower = follower(store, path)
        for line in DJANGO_LINES:
            run_and_compare(store, file_follower, app, line)
        before = file_follower.done.transactions
        run_and_compare(store, file_follower, app, "sell 4")
        assert file_follower.done.transactions == before + 1, "one atomic block is one version"
        total = send_line(app, "total")
        assert total == f"{query_copy(store, 'select sum(cents) from shop_order')} ok"
    with running(DJANGO, path) as app:  # the program restarts with a new log
        run_and_compare(store, file_follower, app, "sell 9")
    file_follower.look()
    assert content(store) == sqlite_content(path)
    assert file_follower.done.transactions >= 5, "most transactions were copied from the log"
    assert (
        query_copy(store, "select json_extract(details, '$.n[3]') from shop_order where item = 'item 8' limit 1") == 8
    )


LIBSQL_LINES = (
    "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, e F32_BLOB(3))",
    "CREATE INDEX item_e ON item (libsql_vector_idx(e))",
    "INSERT INTO item VALUES (1, 'one', vector('[1,2,3]')), (2, 'two', vector('[4,5,6]'))",
    "INSERT INTO item SELECT id + 10, name || ' again', e FROM item; UPDATE item SET name = upper(name) WHERE id = 1",
    "PRAGMA wal_checkpoint(RESTART)",
    "INSERT INTO item VALUES (3, 'three', vector('[7,8,9]'))",
    "DELETE FROM item WHERE id = 2",
    "ALTER TABLE item ADD COLUMN note TEXT DEFAULT 'none'",
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "INSERT INTO item VALUES (4, 'four', vector('[1,1,1]'), 'last')",
)


def test_libsql(store: Store, tmp_path: Path) -> None:
    """Vectors and their index are ordinary pages; SQLite reads the rows, but does not know the index's function."""
    path = tmp_path / "live" / "libsql.db"
    with running(LIBSQL, path) as app:
        file_follower = follower(store, path)
        for line in LIBSQL_LINES:
            run_and_compare(store, file_follower, app, line)
    with running(LIBSQL, path) as app:
        run_and_compare(store, file_follower, app, "INSERT INTO item VALUES (5, 'five', vector('[2,2,2]'), 'back')")
        query = "select group_concat(id || name) from item not indexed where id < 10 order by id"
        assert query_copy(store, query) == "1ONE,3three,4four,5five"
        with pytest.raises(apsw.SQLError, match="libsql_vector_idx"):
            query_copy(store, "pragma integrity_check")
        run_and_compare(store, file_follower, app, "DROP INDEX item_e")
    file_follower.look()
    assert content(store) == sqlite_content(path)
    assert query_copy(store, "pragma integrity_check") == "ok"


def test_the_program_is_not_disturbed(store: Store, tmp_path: Path) -> None:
    """A program with a busy timeout of 0 writes while its file is polled without a pause. The follower changes no byte
    of its files.
    """
    path = tmp_path / "live" / "app.db"
    path.parent.mkdir()
    with SqlProgram(path) as app:
        app.run_sql("PRAGMA busy_timeout=0", "PRAGMA journal_mode=wal", "CREATE TABLE t (id INTEGER PRIMARY KEY, x)")
        file_follower, stop = follower(store, path), threading.Event()
        thread = threading.Thread(target=file_follower.run, args=(stop, 0.0))
        thread.start()
        try:
            rounds, deadline = 0, time.monotonic() + 120  # a poll takes long on a busy machine
            while rounds < 100 or (file_follower.done.looks <= 20 and time.monotonic() < deadline):
                rounds += 1
                app.run_sql("INSERT INTO t (x) VALUES (randomblob(900))", "UPDATE t SET x = 'y' WHERE id % 5 = 1")
        finally:
            stop.set()
            thread.join(60)
        assert file_follower.done.looks > 20
        files = [path, Path(f"{path}-wal")]
        before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
        file_follower.look()
        assert content(store) == sqlite_content(path)
        assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before


def _many(rounds: int) -> Iterator[str]:
    for number in range(rounds):
        yield f"INSERT INTO t (x) VALUES (randomblob({number * 37 % 5000}))"
        yield f"BEGIN; UPDATE t SET x = randomblob(700) WHERE id % 7 = {number % 7}; DELETE FROM t WHERE id % 31 = 3; COMMIT"
        yield f"BEGIN; DELETE FROM t; INSERT INTO t (x) VALUES ('{'lost' * 999}'); ROLLBACK"
        if number % 10 == 9:
            yield f"PRAGMA wal_checkpoint({('PASSIVE', 'RESTART', 'TRUNCATE')[number // 10 % 3]})"


@pytest.mark.slow
def test_libsql_for_many_rounds(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "live" / "libsql.db"
    with running(LIBSQL, path) as app:
        file_follower = follower(store, path)
        run_and_compare(store, file_follower, app, "CREATE TABLE t (id INTEGER PRIMARY KEY, x)")
        for line in _many(200):
            run_and_compare(store, file_follower, app, line)
    assert file_follower.done.transactions > 300, "of 400; the rest coincided with a checkpoint"


@pytest.mark.slow
def test_django_for_many_rounds(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "live" / "django.db"
    with running(DJANGO, path) as app:
        file_follower = follower(store, path)
        run_and_compare(store, file_follower, app, "migrate")
        for number in range(60):
            for line in ("sell 30", "nested", "fail 9", "cancel"):
                run_and_compare(store, file_follower, app, line)
            if number % 10 == 9:
                run_and_compare(
                    store, file_follower, app, f"sql PRAGMA wal_checkpoint({('PASSIVE', 'TRUNCATE')[number // 10 % 2]})"
                )
    assert file_follower.done.transactions > 150, "of 180; the rest coincided with a checkpoint"
