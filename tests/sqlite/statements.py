"""Generated SQL: seeded, so that a failure can be repeated. It has the same result in every SQLite of one version.

Most statements succeed; some fail (a missing table, a constraint, a second BEGIN), and must fail in the same way.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

TABLES = ("t0", "t1", "t2", "t3")
WORDS = ("alpha", "beta", "gamma", "delta", "épsilon", "'; --", "", "zzz")


class Statements:
    """An endless stream of statements."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __iter__(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        kinds = [
            (self._insert, 30), (self._update, 14), (self._delete, 8), (self._select, 30), (self._transaction, 12),
            (self._savepoint, 8), (self._create, 4), (self._alter, 3), (self._drop, 1), (self._maintenance, 2),
        ]  # fmt: skip
        makers, weights = zip(*kinds)
        for table in TABLES[:2]:
            yield f"create table {table}(id integer primary key, a integer, b text, c blob, unique(a, b))", ()
        while True:
            yield self._rng.choices(makers, weights)[0]()

    def _table(self) -> str:
        return self._rng.choice(TABLES)

    def _text(self) -> str:
        word = self._rng.choice(WORDS)
        return word * self._rng.choice((1, 1, 1, 10, 400))

    def _key(self) -> int:
        return self._rng.randrange(400)

    def _insert(self) -> tuple[str, tuple[object, ...]]:
        rng, table = self._rng, self._table()
        if rng.random() < 0.2:
            many = "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
            return f"{many} insert or ignore into {table}(a, b) select i * 7 % 101, ? || i from n", (
                rng.randrange(1, 120),
                self._text(),
            )
        verb = rng.choice(("insert", "insert or ignore", "insert or replace", "replace"))
        blob = rng.randbytes(rng.choice((0, 3, 100, 5_000, 20_000)))
        values = (self._key(), rng.randrange(50), self._text(), blob)
        return f"{verb} into {table}(id, a, b, c) values (?, ?, ?, ?) returning id", values

    def _update(self) -> tuple[str, tuple[object, ...]]:
        table, low = self._table(), self._key()
        return f"update {table} set b = ?, a = a + ? where id between ? and ?", (
            self._text(),
            self._rng.randrange(3),
            low,
            low + self._rng.choice((0, 5, 200)),
        )

    def _delete(self) -> tuple[str, tuple[object, ...]]:
        low = self._key()
        return f"delete from {self._table()} where id between ? and ?", (low, low + self._rng.choice((0, 10, 150)))

    def _select(self) -> tuple[str, tuple[object, ...]]:
        table, other = self._table(), self._table()
        return self._rng.choice((
            (f"select id, a, b, length(c) from {table} order by id limit 50", ()),
            (f"select count(*), sum(a), min(b), max(length(c)) from {table}", ()),
            (f"select b, count(*) from {table} group by b order by b", ()),
            (f"select x.id, y.id from {table} x join {other} y on x.a = y.a order by 1, 2 limit 40", ()),
            (f"select hex(substr(c, 1, 8)) from {table} where id = ?", (self._key(),)),
            (f"select id, row_number() over (partition by a order by id) from {table} order by id limit 30", ()),
            ("select name, sql from sqlite_schema order by name", ()),
            ("select total_changes() - total_changes(), changes() >= 0", ()),
        ))  # fmt: skip

    def _transaction(self) -> tuple[str, tuple[object, ...]]:
        return self._rng.choice(("begin", "begin immediate", "commit", "commit", "rollback", "end")), ()

    def _savepoint(self) -> tuple[str, tuple[object, ...]]:
        name = self._rng.choice(("s1", "s2"))
        return self._rng.choice((f"savepoint {name}", f"release {name}", f"rollback to {name}")), ()

    def _create(self) -> tuple[str, tuple[object, ...]]:
        table = self._table()
        return self._rng.choice((
            (f"create table if not exists {table}(id integer primary key, a integer, b text, c blob)", ()),
            (f"create table {table}(id integer primary key, a, b, c) strict", ()),
            (f"create index if not exists i_{table} on {table}(b, a)", ()),
            (f"create index i2_{table} on {table}(a) where a > 10", ()),
            (f"create view if not exists v_{table} as select b, sum(a) as s from {table} group by b", ()),
        ))  # fmt: skip

    def _alter(self) -> tuple[str, tuple[object, ...]]:
        table = self._table()
        return self._rng.choice((
            (f"alter table {table} add column e{self._rng.randrange(3)} text default 'new'", ()),
            (f"alter table {table} drop column e{self._rng.randrange(3)}", ()),
            (f"reindex {table}", ()),
            (f"analyze {table}", ()),
        ))  # fmt: skip

    def _drop(self) -> tuple[str, tuple[object, ...]]:
        table = self._table()
        return self._rng.choice((f"drop index if exists i_{table}", f"drop table {table}", f"drop view v_{table}")), ()

    def _maintenance(self) -> tuple[str, tuple[object, ...]]:
        return self._rng.choice(("vacuum", "pragma incremental_vacuum(3)", "pragma quick_check")), ()
