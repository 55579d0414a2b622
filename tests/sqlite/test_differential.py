"""The same generated statements on quire and on a file: identical results, identical errors, and the same database in
the end.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import apsw
import pytest

import quire
from quire.store.store import Store
from tests.sqlite.conftest import SETTINGS, assert_sound
from tests.sqlite.statements import TABLES, Statements

Result = list[tuple[object, ...]] | str


def result(connection: apsw.Connection, statement: str, values: tuple[object, ...]) -> Result:
    """The rows, or the error."""
    try:
        return list(connection.execute(statement, values))
    except apsw.Error as error:
        return f"{type(error).__name__}: {error}"


def dump(connection: apsw.Connection) -> list[object]:
    """The whole content of a database, ordered by its schema."""
    schema = list(connection.execute("select type, name, sql from sqlite_schema order by name"))
    tables = [str(name) for kind, name, _ in schema if kind == "table"]
    return [schema, *(list(connection.execute(f'select * from "{table}" order by 1')) for table in tables)]


def _fetch(cursor: apsw.Cursor, rows: int) -> list[object]:
    """Up to `rows` rows, and the error if there was one."""
    fetched: list[object] = []
    try:
        fetched.extend(islice(cursor, rows))
    except apsw.Error as error:
        fetched.append(f"{type(error).__name__}: {error}")
    return fetched


class Pair:
    """The two databases, and operations on the store that have no counterpart for a file."""

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._rng = rng
        self._file, self._root = str(directory / "native.db"), directory / "store"
        self._pragmas = (
            f"pragma page_size={rng.choice((512, 1024, 4096, 65_536))}",
            f"pragma auto_vacuum={rng.choice(('none', 'full', 'incremental'))}",
        )
        self.store: Store = quire.open(self._root, settings=SETTINGS)
        self._connect()
        self._snapshots: dict[str, list[object]] = {}
        self._cursors: list[apsw.Cursor] = []

    def _connect(self) -> None:
        self.native, self.ours = apsw.Connection(self._file), self.store.sqlite("shop", create=True)
        cache = self._rng.choice((5, 20, 1_000))
        for connection in (self.native, self.ours):
            connection.execute("pragma synchronous=off").fetchall()
            for pragma in (*self._pragmas, f"pragma cache_size={cache}"):
                connection.execute(pragma).fetchall()

    def read_along(self) -> None:
        """At random, start reading on both, and continue a few statements later, whatever they did to the rows."""
        draw = self._rng.random()
        if self._cursors and draw < 0.1:
            assert _fetch(self._cursors[0], 1_000) == _fetch(self._cursors[1], 1_000), "the rest of an open cursor"
            self._close_cursors()
        elif not self._cursors and draw < 0.03:
            table = self._rng.choice(TABLES)
            try:
                self._cursors = [
                    connection.execute(f"select id, a, b from {table} order by id")
                    for connection in (self.native, self.ours)
                ]
            except apsw.SQLError:
                return  # the table does not exist at the moment
            assert _fetch(self._cursors[0], 2) == _fetch(self._cursors[1], 2)

    def _close_cursors(self) -> None:
        for cursor in self._cursors:
            cursor.close(True)
        self._cursors = []

    def compare(self) -> None:
        assert dump(self.native) == dump(self.ours)

    def between(self) -> None:
        """Operations between two statements, outside of a transaction, that must not be visible."""
        draw = self._rng.random()
        if self.native.in_transaction or draw > 0.02:
            return
        self._close_cursors()
        if draw < 0.004:
            self.store.checkpoint("shop")
        elif draw < 0.008:
            name = f"kept-{len(self._snapshots)}"
            self.store.snapshot("shop", name)
            self._snapshots[name] = dump(self.native)
        elif draw < 0.014:
            self.native.close()
            self.ours.close()
            self._connect()
        elif draw < 0.017:
            self.native.close()
            self.ours.close()
            self.store.close()
            self.store = quire.open(self._root, settings=SETTINGS)
            self._connect()

    def finish(self) -> None:
        self._close_cursors()
        for connection in (self.native, self.ours):
            if connection.in_transaction:
                connection.execute("rollback")
        self.compare()
        for name, expected in self._snapshots.items():
            old = self.store.sqlite("shop", at=name)
            assert dump(old) == expected, f"snapshot {name} has changed"
            old.close()
        self.native.close()
        self.ours.close()
        assert_sound(self.store)
        self.store.close()


def run(directory: Path, seed: int, statements: int) -> int:
    """Run statements on both databases, and return how many of them succeeded."""
    pair, succeeded = Pair(directory, random.Random(seed)), 0
    for number, (statement, values) in enumerate(islice(Statements(seed), statements)):
        native, ours = result(pair.native, statement, values), result(pair.ours, statement, values)
        assert native == ours, f"statement {number} of seed {seed}: {statement} {values!r:.200}"
        assert pair.native.in_transaction == pair.ours.in_transaction, f"statement {number} of seed {seed}: {statement}"
        succeeded += not isinstance(native, str)
        pair.between()
        pair.read_along()
        if number % 200 == 0:
            pair.compare()
    pair.finish()
    return succeeded


@pytest.mark.parametrize("seed", range(3))
def test_generated_statements_have_the_same_results(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, 500) > 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_long_generated_statements_have_the_same_results(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, 2_000) > 600
