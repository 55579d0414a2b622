"""One Delta table of the orders of all tenants, kept in step with their SQLite databases.

Each tenant has a database of its own. A mirror makes one lakehouse table of all of them: the first run loads everything, the
next ones write what changed, each with one commit. Here a few tenants change, one leaves, one arrives as a fork, one gets a
new column; then the table is compared with the databases, row by row.

    python examples/tenant_lakehouse.py                                     small, in a temporary directory
    python examples/tenant_lakehouse.py --tenants 1000 --rows 10000         ten million rows
    python examples/tenant_lakehouse.py --runner spark --target delta:/srv/lake

Needs `pip install '.[lakehouse]'` in the directory of quire's source, and '.[spark]' for `--runner spark`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import time
from collections.abc import Sequence

import quire

SCHEMA = "create table orders(id integer primary key, item text, amount integer, price real)"


def fill(store: quire.Store, tenant: str, rows: int) -> None:
    """The database of a tenant, with some orders."""
    rng = random.Random(tenant)
    with contextlib.closing(store.sqlite(tenant, create=True)) as connection, connection:
        connection.execute(SCHEMA)
        connection.executemany(
            "insert into orders(item, amount, price) values (?, ?, ?)",
            [(f"item {rng.randrange(50)}", rng.randrange(1, 9), rng.randrange(10_000) / 100) for _ in range(rows)],
        )


def run(store: quire.Store, runner: str) -> None:
    """Bring the table up to date, and say what it took."""
    started = time.perf_counter()
    done = store.mirrors.run("orders", runner=runner)
    what = "full load" if done.full else "increment"
    print(
        f"{what}: {done.changed} of {done.databases} databases, {done.dropped} gone, {done.rows_written:,} rows in "
        f"{done.files_added} files, {done.bytes_written / 2**20:.1f} MiB, {time.perf_counter() - started:.2f} s"
    )


def change(store: quire.Store, tenants: list[str]) -> None:
    """What happens between two runs."""
    for tenant in tenants[:: max(len(tenants) // 3, 1)]:
        with contextlib.closing(store.sqlite(tenant)) as connection, connection:
            connection.execute("update orders set price = price * 2 where id % 7 = 0")
            connection.execute("delete from orders where id % 11 = 0")
    store.drop(tenants[1])
    store.fork(tenants[0], "tenant-new")
    with contextlib.closing(store.sqlite("tenant-new")) as connection:
        connection.execute("alter table orders add column note text")
        connection.execute("update orders set note = 'moved in' where id < 3")


def compare(store: quire.Store, url: str) -> int:
    """Compare the table with the databases, one after the other; how many rows there are."""
    import pyarrow.dataset as ds
    from deltalake import DeltaTable

    table, total = DeltaTable(url).to_pyarrow_dataset(), 0
    for info in store.databases():
        with contextlib.closing(store.sqlite(info.name)) as connection:
            cursor = connection.execute("select * from orders order by id")
            names = [column[0] for column in cursor.get_description()]
            expected = [{"note": None, **dict(zip(names, row))} for row in cursor]
        mine = table.to_table(filter=ds.field("_database") == info.name).drop_columns("_database")
        assert [sorted(row.items()) for row in mine.sort_by("id").to_pylist()] == [
            sorted(row.items()) for row in expected
        ]
        total += len(expected)
    assert table.count_rows() == total
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example."""
    parser = argparse.ArgumentParser(description="orders of all tenants as one Delta table")
    parser.add_argument("--tenants", type=int, default=40, help="how many databases")
    parser.add_argument("--rows", type=int, default=200, help="orders in each")
    parser.add_argument("--runner", default="threads", help="threads, spark or auto")
    parser.add_argument("--target", default="", help="delta:URL of the table; default: in the temporary directory")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="quire-lakehouse-") as directory:
        target = options.target or f"delta:{directory}/lake"
        with quire.open(f"{directory}/store") as store:
            tenants = [f"tenant-{number:04}" for number in range(max(options.tenants, 3))]
            started = time.perf_counter()
            for tenant in tenants:
                fill(store, tenant, options.rows)
            print(f"filled {len(tenants)} databases in {time.perf_counter() - started:.2f} s")
            store.mirrors.create("orders", "tenant-*", "orders", target)
            run(store, options.runner)
            change(store, tenants)
            run(store, options.runner)
            run(store, options.runner)
            found = compare(store, target.removeprefix("delta:"))
            print(f"the table has the {found:,} rows of {len(store.databases())} databases, and no others")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
