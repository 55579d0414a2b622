"""Give every test its own database with data, at the cost of a fork.

A template database is filled once. Each test gets a fork of it: a private SQLite database that it can modify freely. A
fork copies nothing, so it takes about as long for ten gigabytes as for ten kilobytes. Tests need no cleanup and can run
in any order.

    pytest examples/branch_per_test.py      the tests below
    python examples/branch_per_test.py      the same, and a comparison with filling a new database

To use it, copy the two fixtures and put your own schema into `fill`.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import apsw
import pytest

import quire

PRODUCTS, ORDERS = 200, 20_000
_numbers = itertools.count(1)


def fill(connection: apsw.Connection) -> None:
    """The schema and the data of every test."""
    connection.execute(
        """
        create table product(id integer primary key, name text unique, stock integer check (stock >= 0));
        create table sale(id integer primary key, product integer references product, quantity integer);
        create index sale_product on sale(product);
        pragma foreign_keys = on;
        """
    )
    with connection:
        rows = ((number, f"product {number}", 100) for number in range(PRODUCTS))
        connection.executemany("insert into product values (?, ?, ?)", rows)
        sales = ((number % PRODUCTS, 1 + number % 3) for number in range(ORDERS))
        connection.executemany("insert into sale(product, quantity) values (?, ?)", sales)


@pytest.fixture(scope="session")
def store() -> Iterator[quire.Store]:
    """A store with the template, for the whole run."""
    with tempfile.TemporaryDirectory() as directory, quire.open(directory) as opened:
        with contextlib.closing(opened.sqlite("template", create=True)) as connection:
            fill(connection)
        yield opened


@pytest.fixture
def db(store: quire.Store) -> Iterator[apsw.Connection]:
    """A branch of the template, for one test."""
    name = f"test-{next(_numbers)}"
    connection = store.sqlite(name, fork_of="template")
    connection.pragma("foreign_keys", True)
    yield connection
    connection.close()
    store.drop(name)


# ── the code under test, and its tests ────────────────────────────────────────────────────────────────────────────────
def sell(db: apsw.Connection, product: int, quantity: int) -> None:
    """Take an item out of stock, and record it."""
    with db:
        db.execute("update product set stock = stock - ? where id = ?", (quantity, product))
        db.execute("insert into sale(product, quantity) values (?, ?)", (product, quantity))


def test_a_sale_takes_from_the_stock(db: apsw.Connection) -> None:
    sell(db, 7, 30)
    assert db.execute("select stock from product where id = 7").get == 70


def test_more_than_there_is_cannot_be_sold(db: apsw.Connection) -> None:
    with pytest.raises(apsw.ConstraintError):
        sell(db, 7, 101)
    assert db.execute("select stock, (select count(*) from sale) from product where id = 7").get == (100, ORDERS)


def test_what_does_not_exist_cannot_be_sold(db: apsw.Connection) -> None:
    with pytest.raises(apsw.ConstraintError):
        sell(db, PRODUCTS + 1, 1)


def test_a_test_may_wreck_everything(db: apsw.Connection) -> None:
    db.execute("delete from sale; delete from product; vacuum")
    assert db.execute("select count(*) from product").get == 0


@pytest.mark.parametrize("product", range(6))
def test_and_the_others_do_not_notice(db: apsw.Connection, product: int) -> None:
    assert db.execute("select count(*) from sale where product = ?", (product,)).get == ORDERS // PRODUCTS
    db.execute("update product set stock = 0")


def main() -> int:
    """Run the tests, then compare a fork with filling a new database; return pytest's exit code."""
    # In a process of its own: pytest rewrites the assertions of its plugins, quire's among them, when it loads them first.
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "--no-header"]
    code = subprocess.run(command, check=False).returncode
    with tempfile.TemporaryDirectory() as directory, quire.open(directory) as store:
        with contextlib.closing(store.sqlite("template", create=True)) as connection:
            began = time.perf_counter()
            fill(connection)
            filled = time.perf_counter() - began
        forks = []
        for number in range(10):
            began = time.perf_counter()
            store.sqlite(f"fork-{number}", fork_of="template").close()
            forks.append(time.perf_counter() - began)
    fork = statistics.median(forks)
    print(
        f"filling a database: {filled * 1000:.0f} ms; a fork, opened: {fork * 1000:.1f} ms ({filled / fork:.0f} × faster)"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
