"""Django's test databases: databases of the same store, `test_shop` for `shop`; those for parallel tests are forks of it.

Threads: the test runner's.
"""

from __future__ import annotations

import os
from typing import Any

from django.db.backends.sqlite3 import creation

from quire.core.errors import UnknownDatabase
from quire.store.sqlite_urls import DatabasePath, parse, shared_store


def database_path(name: Any) -> DatabasePath:
    """Return where the database of this NAME is. Raises `ValueError` for a database in memory, which is in no store."""
    path = parse(os.fspath(name), uri=True)
    if path is None:
        raise ValueError(f"{name!r} is an in-memory database, not in a store")
    return path


def fork(source: Any, target: Any) -> None:
    """Make a database a fork of another one in the same store."""
    drop(target)
    with shared_store(database_path(source).root) as store:
        store.fork(database_path(source).name, database_path(target).name)


def drop(name: Any) -> None:
    """Drop a database, if it exists."""
    path = database_path(name)
    with shared_store(path.root) as store:
        try:
            store.drop(path.name)
        except UnknownDatabase:
            pass


class DatabaseCreation(creation.DatabaseCreation):
    """Creates, forks and drops test databases."""

    def _get_test_db_name(self) -> str:
        settings = self.connection.settings_dict
        if settings["TEST"]["NAME"]:
            return str(settings["TEST"]["NAME"])
        if self.is_in_memory_db(settings["NAME"]):
            return super()._get_test_db_name()
        path = database_path(settings["NAME"])
        return os.path.join(path.root, f"test_{path.name}")

    def _create_test_db(self, verbosity: int, autoclobber: bool, keepdb: bool = False) -> str:
        name = self._get_test_db_name()
        if self.is_in_memory_db(name):
            return super()._create_test_db(verbosity, autoclobber, keepdb)
        if not keepdb:
            drop(name)
        return name

    def _clone_test_db(self, suffix: str, verbosity: int, keepdb: bool = False) -> None:
        source = self.connection.settings_dict["NAME"]
        if self.is_in_memory_db(source):
            super()._clone_test_db(suffix, verbosity, keepdb)
        else:
            fork(source, self.get_test_db_clone_settings(suffix)["NAME"])

    def _destroy_test_db(self, test_database_name: str, verbosity: int) -> None:  # noqa: ARG002 - Django's signature
        if not self.is_in_memory_db(test_database_name):
            drop(test_database_name)
