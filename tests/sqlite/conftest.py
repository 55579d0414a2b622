"""A store per test, and a database in it. After the test, the store has no problems and SQLite's integrity check
passes.
"""

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
    """Assert that the manifest breaks no rule, and that every database passes SQLite's integrity check."""
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
    """The directory of a test's store. Whatever the test does to it, the store is checked afterwards."""
    path = tmp_path / "store"
    yield path
    if path.exists():
        with quire.open(path, settings=SETTINGS) as store:
            assert_sound(store)


@pytest.fixture
def python_vfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Python VFS even where the C shim is available."""
    monkeypatch.setenv(SWITCH, "1")


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with quire.open(root, settings=SETTINGS) as store:
        yield store


@pytest.fixture
def connect(store: Store) -> Iterator[Connect]:
    """Opens connections to `shop`, or to another database, and closes them at the end."""
    connections: list[apsw.Connection] = []

    def open_connection(name: str = "shop", **options: object) -> apsw.Connection:
        options.setdefault("create", "at" not in options and "fork_of" not in options)
        connections.append(store.sqlite(name, **options))  # type: ignore[arg-type]  # passed through
        return connections[-1]

    yield open_connection
    for connection in connections:
        connection.close()


@pytest.fixture
def shop(connect: Connect) -> apsw.Connection:
    """A database with ten rows: (0, 'row 0') … (9, 'row 9')."""
    connection = connect()
    connection.execute("create table t(id integer primary key, b text)")
    connection.executemany("insert into t values (?, ?)", [(number, f"row {number}") for number in range(10)])
    return connection


def count(connection: apsw.Connection, table: str = "t") -> int:
    """The number of rows of a table."""
    number = connection.execute(f"select count(*) from {table}").get
    assert isinstance(number, int)
    return number


def extended(caught: pytest.ExceptionInfo[apsw.Error]) -> int:
    """The extended result code of the raised error."""
    code = getattr(caught.value, "extendedresult", None)
    assert isinstance(code, int)
    return code
