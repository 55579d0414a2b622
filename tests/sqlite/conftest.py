"""A store per test, and a database in it; afterwards the store must be sound, and SQLite finds nothing wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import DbKind
from quire.sqlite.c_extensions import SWITCH
from quire.store.store import Store

SETTINGS = StoreSettings(maintenance=MaintenanceSettings(enabled=False))

Connect = Callable[..., apsw.Connection]


def assert_sound(store: Store) -> None:
    """The manifest breaks no rule, and every database that SQLite has written is whole."""
    assert store.manifest.check() == []
    for info in store.databases():
        if info.kind is DbKind.PAGES:
            connection = store.sqlite(info.name)
            try:
                assert connection.pragma("integrity_check") == "ok", info.name
            finally:
                connection.close()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Where the store of a test is; whatever the test does to it, it is sound afterwards."""
    path = tmp_path / "store"
    yield path
    if path.exists():
        with quire.open(path, settings=SETTINGS) as store:
            assert_sound(store)


@pytest.fixture
def pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python answers SQLite, also where there is a shim."""
    monkeypatch.setenv(SWITCH, "1")


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with quire.open(root, settings=SETTINGS) as opened:
        yield opened


@pytest.fixture
def connect(store: Store) -> Iterator[Connect]:
    """Connections to `shop`, or to another database; closed at the end."""
    made: list[apsw.Connection] = []

    def open_connection(name: str = "shop", **options: object) -> apsw.Connection:
        options.setdefault("create", "at" not in options and "fork_of" not in options)
        made.append(store.sqlite(name, **options))  # type: ignore[arg-type]  # passed through
        return made[-1]

    yield open_connection
    for connection in made:
        connection.close()


@pytest.fixture
def shop(connect: Connect) -> apsw.Connection:
    """A database with ten rows: (0, 'row 0') … (9, 'row 9')."""
    connection = connect()
    connection.execute("create table t(id integer primary key, b text)")
    connection.executemany("insert into t values (?, ?)", [(number, f"row {number}") for number in range(10)])
    return connection


def count(connection: apsw.Connection, table: str = "t") -> int:
    """The rows of a table."""
    found = connection.execute(f"select count(*) from {table}").get
    assert isinstance(found, int)
    return found


def extended(caught: pytest.ExceptionInfo[apsw.Error]) -> int:
    """The extended result code of an error that was raised."""
    code = getattr(caught.value, "extendedresult", None)
    assert isinstance(code, int)
    return code
