"""Follow what other people's programs write: Django through its ORM, and libSQL, each in a process of its own, in WAL mode; and
leave them alone while they write."""

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
from tests.sqlite.followed import Obedient, content, follower, truth
from tests.sqlite.ordinary import heard, program, tell

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
    with quire.open(tmp_path / "store", settings=SETTINGS) as opened:
        yield opened
        assert_sound(opened)


@contextmanager
def running(text: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program in WAL mode; it ends in order."""
    path.parent.mkdir(exist_ok=True)
    process = program(text, str(path))
    try:
        assert heard(process) == "wal"
        yield process
        process.communicate(timeout=120)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def told(store: Store, ours: Follower, process: subprocess.Popen[str], line: str) -> None:
    """The program does something; after a look our database is its file."""
    assert tell(process, line) == "ok", line
    ours.look()
    assert content(store) == truth(Path(ours.path)), line


def asked(store: Store, query: str) -> object:
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
        ours = follower(store, path)
        for line in DJANGO_LINES:
            told(store, ours, app, line)
        before = ours.done.transactions
        told(store, ours, app, "sell 4")
        assert ours.done.transactions == before + 1, "one atomic block is one version"
        said = tell(app, "total")
        assert said == f"{asked(store, 'select sum(cents) from shop_order')} ok"
    with running(DJANGO, path) as app:  # it comes back, and its log is a new one
        told(store, ours, app, "sell 9")
    ours.look()
    assert content(store) == truth(path)
    assert ours.done.transactions >= 5, "most came out of the log, one by one"
    assert asked(store, "select json_extract(details, '$.n[3]') from shop_order where item = 'item 8' limit 1") == 8


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
    """Its vectors and their index are pages as any other; SQLite reads the rows, but does not know the index's function."""
    path = tmp_path / "live" / "libsql.db"
    with running(LIBSQL, path) as app:
        ours = follower(store, path)
        for line in LIBSQL_LINES:
            told(store, ours, app, line)
    with running(LIBSQL, path) as app:
        told(store, ours, app, "INSERT INTO item VALUES (5, 'five', vector('[2,2,2]'), 'back')")
        wanted = "select group_concat(id || name) from item not indexed where id < 10 order by id"
        assert asked(store, wanted) == "1ONE,3three,4four,5five"
        with pytest.raises(apsw.SQLError, match="libsql_vector_idx"):
            asked(store, "pragma integrity_check")
        told(store, ours, app, "DROP INDEX item_e")
    ours.look()
    assert content(store) == truth(path)
    assert asked(store, "pragma integrity_check") == "ok"


def test_the_program_is_not_disturbed(store: Store, tmp_path: Path) -> None:
    """A program that would not wait a millisecond for anybody writes while it is looked at without a pause, and no byte of its
    files is ours: after the last look they are what they were before it."""
    path = tmp_path / "live" / "app.db"
    path.parent.mkdir()
    with Obedient(path) as app:
        app.do("PRAGMA busy_timeout=0", "PRAGMA journal_mode=wal", "CREATE TABLE t (id INTEGER PRIMARY KEY, x)")
        ours, stop = follower(store, path), threading.Event()
        thread = threading.Thread(target=ours.run, args=(stop, 0.0))
        thread.start()
        try:
            done, patience = 0, time.monotonic() + 120  # a look takes long on a busy machine
            while done < 100 or (ours.done.looks <= 20 and time.monotonic() < patience):
                done += 1
                app.do("INSERT INTO t (x) VALUES (randomblob(900))", "UPDATE t SET x = 'y' WHERE id % 5 = 1")
        finally:
            stop.set()
            thread.join(60)
        assert ours.done.looks > 20
        files = [path, Path(f"{path}-wal")]
        before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
        ours.look()
        assert content(store) == truth(path)
        assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before


def _many(rounds: int) -> Iterator[str]:
    for number in range(rounds):
        yield f"INSERT INTO t (x) VALUES (randomblob({number * 37 % 5000}))"
        yield f"BEGIN; UPDATE t SET x = randomblob(700) WHERE id % 7 = {number % 7}; DELETE FROM t WHERE id % 31 = 3; COMMIT"
        yield f"BEGIN; DELETE FROM t; INSERT INTO t (x) VALUES ('{'lost' * 999}'); ROLLBACK"
        if number % 10 == 9:
            yield f"PRAGMA wal_checkpoint({('PASSIVE', 'RESTART', 'TRUNCATE')[number // 10 % 3]})"


@pytest.mark.slow
def test_libsql_for_long(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "live" / "libsql.db"
    with running(LIBSQL, path) as app:
        ours = follower(store, path)
        told(store, ours, app, "CREATE TABLE t (id INTEGER PRIMARY KEY, x)")
        for line in _many(200):
            told(store, ours, app, line)
    assert ours.done.transactions > 300, "of 400; the rest fell together with a checkpoint"


@pytest.mark.slow
def test_django_for_long(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "live" / "django.db"
    with running(DJANGO, path) as app:
        ours = follower(store, path)
        told(store, ours, app, "migrate")
        for number in range(60):
            for line in ("sell 30", "nested", "fail 9", "cancel"):
                told(store, ours, app, line)
            if number % 10 == 9:
                told(store, ours, app, f"sql PRAGMA wal_checkpoint({('PASSIVE', 'TRUNCATE')[number // 10 % 2]})")
    assert ours.done.transactions > 150, "of 180; the rest fell together with a checkpoint"
