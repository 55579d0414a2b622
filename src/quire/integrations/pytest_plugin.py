"""Fixtures for pytest: a store for the session, and a fork of a template database for each test.

    @pytest.fixture(scope="session")
    def quire_template(quire_store):  # in conftest.py: make what all tests begin with, once
        connection = dbapi.connect(f"{quire_store.path}/shop")
        migrate(connection)
        connection.close()
        return "shop"

    def test_an_order(quire_branch):
        connection = quire_branch.connect()  # as the template was, and not shared

The store is in pytest's temporary directory. Under xdist each worker is a process with its own store, so nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from quire import Store
    from quire.sqlite.dbapi import Connection


@dataclass(frozen=True, slots=True)
class Branch:
    """A database that belongs to one test."""

    store: Store
    name: str

    @property
    def path(self) -> str:
        """The path for `quire.sqlite.dbapi.connect`."""
        return str(Path(self.store.path) / self.name)

    @property
    def url(self) -> str:
        """The URL for SQLAlchemy's `create_engine`."""
        return f"quire:///{self.path}"

    def connect(self, **options: Any) -> Connection:
        """Open a connection like sqlite3's."""
        from quire.sqlite import dbapi  # lazily: a project that has quire installed but does not use it loads nothing

        return dbapi.connect(self.path, **options)


@pytest.fixture(scope="session")
def quire_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Open a store in pytest's temporary directory, for all tests of this process."""
    import quire  # as above

    # The store is not needed after the session, so there is nothing for maintenance to do.
    settings = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))
    with quire.open(tmp_path_factory.mktemp("quire") / "store", settings=settings) as store:
        yield store


@pytest.fixture(scope="session")
def quire_template(quire_store: Store) -> str:
    """Return the name of the database that branches are forked from: an empty one, unless a project overrides this fixture."""
    quire_store.sqlite("template", create=True).close()
    return "template"


@pytest.fixture
def quire_branch(quire_store: Store, quire_template: str, request: pytest.FixtureRequest) -> Iterator[Branch]:
    """Yield a fork of the template for one test, dropped after it. Its cost does not depend on the template's size."""
    name = f"{quire_template}-{abs(hash(request.node.nodeid)):x}"
    quire_store.fork(quire_template, name)
    yield Branch(quire_store, name)
    quire_store.drop(name, snapshots=True)
