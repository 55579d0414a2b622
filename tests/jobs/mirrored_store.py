"""A store whose tenants are mirrored, and the target as an independent reader sees it."""

from __future__ import annotations

import json
import random
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.jobs.mirror.parquet_target import NEWEST
from quire.manifest.records import DbKind
from quire.store.store import Store

FORMATS = ("parquet", "delta", "iceberg")
KILLED = "jobs.mirror."

POINTS = (
    "jobs.mirror.created",
    "jobs.mirror.file_written",
    "jobs.mirror.written",
    "jobs.mirror.columns_added",
    "jobs.mirror.recorded",
    "jobs.mirror.committed",
    "jobs.mirror.adopted",
)
"""The failpoint of every durable step of a run."""

Rows = list[tuple[tuple[str, Any], ...]]


class Killed(BaseException):
    """The driver's process is killed; no handler catches this."""


def kill(_: str) -> None:
    raise Killed


def quiet_settings() -> StoreSettings:
    return StoreSettings(maintenance=MaintenanceSettings(enabled=False, workers=2))


def catalog_options(root: Path) -> dict[str, str]:
    (root / "lake").mkdir(exist_ok=True)
    return {
        "catalog.type": "sql",
        "catalog.uri": f"sqlite:///{root}/catalog.db",
        "catalog.warehouse": f"file://{root}/lake",
    }


def target_at(root: Path, kind: str) -> tuple[str, dict[str, str]]:
    """The target and its options, in a directory."""
    if kind == "iceberg":
        return "iceberg:lake.shop.orders", catalog_options(root)
    return f"{kind}:{root}/lake", {}


def sorted_rows(rows: list[dict[str, Any]]) -> Rows:
    """Rows in a comparable form; a column that is NULL counts as absent."""
    return sorted(
        (tuple(sorted((name, value) for name, value in row.items() if value is not None)) for row in rows), key=repr
    )


def read_target(root: Path, kind: str) -> Rows:
    """The target's rows, read without quire."""
    if kind == "delta":
        from deltalake import DeltaTable

        table = DeltaTable(f"{root}/lake").to_pyarrow_table()
    elif kind == "iceberg":
        from pyiceberg.catalog import load_catalog

        options = {name.removeprefix("catalog."): value for name, value in catalog_options(root).items()}
        table = load_catalog("lake", **options).load_table("shop.orders").scan().to_arrow()
    else:
        manifest = json.loads((root / "lake" / NEWEST).read_text("utf-8"))
        tables = [pq.read_table(root / "lake" / file["path"], partitioning=None) for file in manifest["files"]]
        table = pa.concat_tables(tables, promote_options="default") if tables else pa.table({})
    return sorted_rows(table.to_pylist())


def read_databases(store: Store, pattern: str = "tenant-") -> Rows:
    """The same rows, read from SQLite."""
    rows: list[dict[str, Any]] = []
    for info in store.databases():
        if not info.name.startswith(pattern) or info.kind is not DbKind.PAGES:
            continue
        with closing(store.sqlite(info.name)) as connection:
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'orders'").fetchall():
                continue
            cursor = connection.execute("SELECT * FROM orders")
            for row in cursor:
                columns = zip((column[0] for column in cursor.get_description()), row, strict=True)
                rows.append({"_database": info.name, **dict(columns)})
    return sorted_rows(rows)


@dataclass
class MirroredStore:
    """A store and its mirror."""

    root: Path
    kind: str
    options: dict[str, str] = field(default_factory=dict)

    def open(self) -> Store:
        return quire.open(self.root / "store", settings=quiet_settings())

    def define(self, store: Store) -> None:
        target, options = target_at(self.root, self.kind)
        store.mirrors.create("lake", "tenant-*", "orders", target, options={**options, **self.options})

    def run(self, store: Store, **options: Any) -> quire.MirrorRun:
        """Run the mirror, and compare the target with the databases."""
        result = store.mirrors.run("lake", runner="threads", **options)
        self.check(store)
        return result

    def check(self, store: Store) -> None:
        assert read_target(self.root, self.kind) == read_databases(store)
        status = store.mirrors.status("lake")
        assert (status.changed, status.dropped) == (0, 0)

    def killed_run(self, store: Store, point: str) -> bool:
        """Run the mirror up to a failpoint; whether the run reached it."""
        try:
            with armed(point, kill):
                store.mirrors.run("lake", runner="threads")
        except Killed:
            return True
        return False


def fill(store: Store, name: str, rows: int = 4) -> None:
    """Create a database with orders."""
    with closing(store.sqlite(name, create=True)) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT, price REAL)")
        connection.executemany(
            "INSERT INTO orders VALUES (?, ?, ?)", [(number, f"{name}/{number}", number / 4) for number in range(rows)]
        )


class History:
    """Random changes of tenants."""

    STEPS = ("insert", "insert", "update", "delete", "create", "drop", "fork", "rename", "column", "checkpoint")

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store, self.rng = store, rng
        self._next = 0

    def tenants(self) -> list[str]:
        return [info.name for info in self.store.databases() if info.name.startswith("tenant-")]

    def step(self) -> None:
        tenants, action = self.tenants(), self.rng.choice(self.STEPS)
        if not tenants or (action == "create" and len(tenants) < 8):
            fill(self.store, self._name(), self.rng.randint(0, 5))
            return
        tenant = self.rng.choice(tenants)
        match action:
            case "drop":
                self.store.drop(tenant)
            case "fork" if len(tenants) < 8:
                self.store.fork(tenant, self._name())
            case "rename":
                self.store.rename(tenant, self._name())
            case "checkpoint":
                self.store.checkpoint(tenant)
            case _:
                with closing(self.store.sqlite(tenant)) as connection:
                    self._sql(connection, action)

    def _name(self) -> str:
        self._next += 1
        return f"tenant-{self.rng.randint(0, 9)}-{self._next}"

    def _sql(self, connection: Any, action: str) -> None:
        number = self.rng.randint(0, 9)
        if action == "column":
            columns = [row[1] for row in connection.execute("PRAGMA table_info(orders)")]
            name, kind = self.rng.choice([("note", "TEXT"), ("size", "INTEGER"), ("size", "REAL")])
            if name not in columns:
                connection.execute(f"ALTER TABLE orders ADD COLUMN {name} {kind}")
        elif action == "delete":
            connection.execute("DELETE FROM orders WHERE id = ?", (number,))
        elif action == "update":
            connection.execute("UPDATE orders SET price = price + 1 WHERE id = ?", (number,))
        else:
            connection.execute(
                "INSERT OR REPLACE INTO orders (id, item, price) VALUES (?, ?, 0.5)", (number, "x" * number)
            )
