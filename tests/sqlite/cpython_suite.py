"""Runs CPython's own tests of `sqlite3` on `quire.sqlite.dbapi`: `python -m tests.sqlite.cpython_suite test_dump …`.

The tests use databases in memory and files in the working directory. Here, both become databases of one store: a new
one for
each connection to `:memory:`, and one per file name, with an empty file where the tests expect the file. The program
writes one
line of JSON: the outcome of each test.
"""

# ruff: noqa: N802, N815 - unittest gives the names

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import unittest
from typing import Any
from urllib.parse import unquote

import quire
from quire.sqlite import dbapi
from quire.sqlite.pep249 import driver
from quire.sqlite.pep249.driver import Driver, LocalDriver
from quire.sqlite.pep249.errors import error_of

NUMBERS = itertools.count()


def open_in(store: quire.Store, database: str, *, timeout: float, uri: bool) -> Driver:
    """The database that replaces the one that a test opens."""
    path, read_only = database, False
    if uri and database.startswith("file:"):
        location, _, query = database[5:].partition("?")
        path, read_only = unquote(location, errors="surrogateescape"), "mode=ro" in query
    if path == ":memory:":
        return LocalDriver(store.sqlite(f"memory-{next(NUMBERS)}", create=True, timeout=timeout))
    name = os.fsencode(path).hex()
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise error_of(dbapi.SQLITE_CANTOPEN, "unable to open database file")
    if not os.path.exists(path):
        if read_only:
            raise error_of(dbapi.SQLITE_CANTOPEN, "unable to open database file")
        with open(path, "wb"):
            pass
        if any(info.name == name for info in store.databases()):  # a test has removed the file
            store.drop(name)
    connection = store.sqlite(name, create=True, timeout=timeout)
    if read_only:
        connection.pragma("query_only", True)
    return LocalDriver(connection)


class Outcomes(unittest.TestResult):
    """The outcomes, by the test's name without its package."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        name = getattr(test, "test_case", test).id().removeprefix("test.test_sqlite3.")
        if self.by_name.get(name, "passed") == "passed":
            self.by_name[name] = outcome

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, self._exc_info_to_string(err, test))  # type: ignore[attr-defined]  # unittest's own

    addError = addFailure

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, f"skipped: {reason}")


def main(modules: list[str]) -> None:
    sys.modules["sqlite3"] = sys.modules["sqlite3.dbapi2"] = dbapi
    outcomes = Outcomes()
    with tempfile.TemporaryDirectory() as home, quire.open(os.path.join(home, "store")) as store:
        work = os.path.join(home, "work")
        os.mkdir(work)
        os.chdir(work)
        driver.open_path = lambda database, *, timeout, uri: open_in(store, database, timeout=timeout, uri=uri)
        # A test whose connections are closed by the garbage collector leaves its databases. Syncs of the store are not tested.
        suite = unittest.defaultTestLoader.loadTestsFromNames([f"test.test_sqlite3.{name}" for name in modules])
        suite.run(outcomes)
        os.chdir("/")
    print(json.dumps(outcomes.by_name))


if __name__ == "__main__":
    main(sys.argv[1:])
