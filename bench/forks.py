"""A database for each test: a fork of a template against a copy of its file, and against PostgreSQL's template databases.

One round is what the database of one test costs: it is created from the template, opened, gets one row in one transaction, and
is removed. The store is open, PostgreSQL is running, and the template is in the page cache. The copy is opened with SQLite's
defaults, and also without any sync, as test suites often do.
"""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import quire
from bench.report import Report, alternate, seconds
from bench.wire import postgresql
from quire.sqlite import dbapi, import_file

SETTINGS = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))
SIZES = (1, 4, 16, 64, 256)
QUICK = (1, 16, 64)
"""MiB of the template."""
FILL = (
    "with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)"
    " insert into t(a, b) select i, printf('%0900d', i) from n"
)
ROWS_PER_MIB = 1_000
INSERT = "insert into t(a, b) values (0, 'of a test')"
Round = Callable[[], None]


def template_file(directory: Path, mib: int) -> Path:
    """Create an ordinary SQLite file of about this size, and return its path."""
    path = directory / f"template-{mib}.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table t(id integer primary key, a integer, b text)")
        connection.execute(FILL, (mib * ROWS_PER_MIB,))
        connection.commit()
    return path


def copies(template: Path, directory: Path, *, synced: bool) -> Round:
    """Return a round that copies the file."""
    copy = directory / "copy.db"

    def run() -> None:
        shutil.copyfile(template, copy)
        with closing(sqlite3.connect(copy)) as connection:
            if not synced:
                connection.execute("pragma synchronous = off")
            connection.execute(INSERT)
            connection.commit()
        copy.unlink()

    return run


def forks(store: quire.Store, template: str) -> Round:
    """Return a round that forks the template, as the fixture `quire_branch` does."""
    numbers = itertools.count()

    def run() -> None:
        name = f"{template}-{next(numbers)}"
        store.fork(template, name)
        with closing(dbapi.connect(Path(store.path) / name)) as connection:
            connection.execute(INSERT)
            connection.commit()
        store.drop(name, snapshots=True)

    return run


def against_copies(report: Report, directory: Path, quick: bool) -> None:
    """Compare forks with copies. The ratio is the copy's time divided by the fork's: above 1, forks are faster."""
    rounds = 5 if quick else 15
    with quire.open(directory / "store", settings=SETTINGS) as store:
        for mib in QUICK if quick else SIZES:
            template = template_file(directory, mib)
            import_file(store.manifest, store.pages, template, f"t{mib}")
            contenders = (
                forks(store, f"t{mib}"),
                copies(template, directory, synced=True),
                copies(template, directory, synced=False),
            )
            fork, copy, unsynced = alternate(rounds, *(partial(seconds, run) for run in contenders))
            size = f"{mib} MiB"
            detail = f"fork {fork * 1e3:.1f} ms, copy {copy * 1e3:.1f} ms, without syncs {unsynced * 1e3:.1f} ms"
            report.ratio(f"forks_vs_copies_{mib}_mib", copy / fork, None, "higher", f"{size}: {detail}")
            report.ratio(f"forks_vs_unsynced_copies_{mib}_mib", unsynced / fork, None, "higher", size)
            report.figure(f"fork_seconds_{mib}_mib", fork)
            template.unlink()


def template_databases(psycopg: Any, admin: Any, dsn: str, template: str) -> Round:
    """Return a round that creates a database from PostgreSQL's template."""

    def run() -> None:
        admin.execute(f"create database of_a_test template {template}")
        with psycopg.connect(f"{dsn} dbname=of_a_test") as connection:
            connection.execute(INSERT)
        admin.execute("drop database of_a_test")

    return run


def against_postgresql(report: Report, directory: Path, quick: bool) -> None:
    """Compare forks with `CREATE DATABASE … TEMPLATE …`, which copies the template's files."""
    sizes = (1, 16) if quick else (1, 16, 64)
    binaries = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
    if binaries is None or importlib.util.find_spec("psycopg") is None:
        for mib in sizes:
            name = f"forks_vs_postgresql_{mib}_mib"
            report.ratio(name, None, None, "higher", "PostgreSQL or psycopg is not installed")
        return
    psycopg = importlib.import_module("psycopg")
    with (
        postgresql(directory / "postgresql", binaries) as dsn,
        psycopg.connect(dsn, autocommit=True) as admin,
        quire.open(directory / "beside", settings=SETTINGS) as store,
    ):
        for mib in sizes:
            template = template_file(directory, mib)
            import_file(store.manifest, store.pages, template, f"t{mib}")
            name = f"t{mib}"
            admin.execute(f"create database {name}")
            with psycopg.connect(f"{dsn} dbname={name}") as connection:
                connection.execute("create table t(id serial primary key, a integer, b text)")
                fill = "insert into t(a, b) select i, lpad(i::text, 900, '0') from generate_series(1, %s) as i"
                connection.execute(fill, (mib * ROWS_PER_MIB,))

            contenders = forks(store, name), template_databases(psycopg, admin, dsn, name)
            fork, database = alternate(5 if quick else 9, *(partial(seconds, run) for run in contenders))
            detail = f"{mib} MiB: fork {fork * 1e3:.1f} ms, database {database * 1e3:.1f} ms"
            report.ratio(f"forks_vs_postgresql_{mib}_mib", database / fork, None, "higher", detail)


PARTS = (against_copies, against_postgresql)
