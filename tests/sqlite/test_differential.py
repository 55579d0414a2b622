"""The same generated statements on quire and on a file: identical results, identical errors, the same database in the end."""

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
    """Everything in a database, by its schema."""
    schema = list(connection.execute("select type, name, sql from sqlite_schema order by name"))
    tables = [str(name) for kind, name, _ in schema if kind == "table"]
    return [schema, *(list(connection.execute(f'select * from "{table}" order by 1')) for table in tables)]


def _fetch(cursor: apsw.Cursor, rows: int) -> list[object]:
    """So many rows, and the error if there was one."""
    found: list[object] = []
    try:
        found.extend(islice(cursor, rows))
    except apsw.Error as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


class Pair:
    """The two databases, and what happens to the one of them that a file knows nothing of."""

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
        """Now and then begin to read on both and go on a few statements later, whatever those have done to the rows."""
        chance = self._rng.random()
        if self._cursors and chance < 0.1:
            assert _fetch(self._cursors[0], 1_000) == _fetch(self._cursors[1], 1_000), "the rest of an open cursor"
            self._let_go()
        elif not self._cursors and chance < 0.03:
            table = self._rng.choice(TABLES)
            try:
                self._cursors = [
                    each.execute(f"select id, a, b from {table} order by id") for each in (self.native, self.ours)
                ]
            except apsw.SQLError:
                return  # there is no such table just now
            assert _fetch(self._cursors[0], 2) == _fetch(self._cursors[1], 2)

    def _let_go(self) -> None:
        for cursor in self._cursors:
            cursor.close(True)
        self._cursors = []

    def compare(self) -> None:
        assert dump(self.native) == dump(self.ours)

    def between(self) -> None:
        """What may happen between two statements, outside of a transaction: nothing of it is seen."""
        chance = self._rng.random()
        if self.native.in_transaction or chance > 0.02:
            return
        self._let_go()
        if chance < 0.004:
            self.store.checkpoint("shop")
        elif chance < 0.008:
            name = f"kept-{len(self._snapshots)}"
            self.store.snapshot("shop", name)
            self._snapshots[name] = dump(self.native)
        elif chance < 0.014:
            self.native.close()
            self.ours.close()
            self._connect()
        elif chance < 0.017:
            self.native.close()
            self.ours.close()
            self.store.close()
            self.store = quire.open(self._root, settings=SETTINGS)
            self._connect()

    def finish(self) -> None:
        self._let_go()
        for connection in (self.native, self.ours):
            if connection.in_transaction:
                connection.execute("rollback")
        self.compare()
        for name, expected in self._snapshots.items():
            old = self.store.sqlite("shop", at=name)
            assert dump(old) == expected, f"snapshot {name} is another one"
            old.close()
        self.native.close()
        self.ours.close()
        assert_sound(self.store)
        self.store.close()


def run(directory: Path, seed: int, statements: int) -> int:
    """Run so many statements on both; how many of them succeeded."""
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
def test_generated_statements_do_the_same_on_both(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, 500) > 150


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_long_generated_statements_do_the_same_on_both(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, 2_000) > 600
