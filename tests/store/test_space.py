"""The disk space of a store, and the reports of it (N2)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.limits import MIB
from quire.durable.space import measure, owner_of
from tests.programs import run_program


def _du(path: Path) -> int:
    """The size in bytes according to `du`."""
    done = subprocess.run(["du", "-s", "--block-size=1", str(path)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def test_snapshots_of_a_tiny_database_need_little_space(tmp_path: Path) -> None:
    """24 × (one row, snapshot, checkpoint) took 303 MiB: each segment was twice as large as the one before."""
    with quire.open(tmp_path / "s") as store:
        db = store.sqlite("tiny", create=True)
        db.execute("create table t(x)")
        for number in range(24):
            db.execute("insert into t values (?)", (number,))
            store.snapshot("tiny", f"s{number}")
            store.checkpoint("tiny", runner="threads")
        assert _du(tmp_path / "s") < 4 * MIB
        for number in (0, 11, 23):
            with store.sqlite("tiny", at=f"s{number}") as connection:
                assert connection.execute("select count(*) from t").fetchall() == [(number + 1,)]
        db.close()
    assert _du(tmp_path / "s") < 4 * MIB


def test_databases_with_few_writes_need_little_space(tmp_path: Path) -> None:
    """Three of them took 240 MiB for 231 commits, each in a segment sealed by the timer."""
    names = ["a", "b", "c"]
    with quire.open(tmp_path / "s") as store:
        connections = [store.sqlite(name, create=True) for name in names]
        for db in connections:
            db.execute("create table t(x)")
        for number in range(76):
            for name, db in zip(names, connections, strict=True):
                db.execute("insert into t values (?)", (number,))
                store.pages.flush(store.database(name).db_id)  # as the timer does after a minute
        assert _du(tmp_path / "s") < 8 * MIB
        for db in connections:
            assert db.execute("select count(*) from t").fetchall() == [(76,)]
            db.close()


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A store with databases of all kinds, snapshots, a fork, a dropped database, and a quarantined file."""
    root = tmp_path / "s"
    with quire.open(root) as store:
        with store.sqlite("shop", create=True) as db:
            db.execute("create table item(name, data)")
            for _ in range(20):
                db.execute("insert into item values ('x', randomblob(20000))")
        store.snapshot("shop", "monday")
        store.checkpoint("shop", runner="threads")
        store.fork("shop", "copy")
        with store.sqlite("copy") as db:
            db.execute("delete from item where rowid < 10")
        with store.sqlite("gone", create=True) as db:
            db.execute("create table t(x)")
        store.drop("gone")
        clicks = store.stream("clicks", create=True)
        for _ in range(2000):
            clicks.append(os.urandom(500))
        clicks.sync()
        sessions = store.kv("sessions", create=True)
        for number in range(2000):
            sessions.put(f"{number}".encode(), os.urandom(200))
    (root / "quarantine").mkdir(exist_ok=True)
    (root / "quarantine" / "note").write_bytes(bytes(10_000))
    return root


def _is_near(shown: int, actual: int) -> bool:
    return abs(shown - actual) <= 0.05 * actual


def test_every_byte_is_attributed(mixed: Path) -> None:
    space = measure(str(mixed))
    assert space.total_bytes == _du(mixed)
    assert space.total_bytes == sum(space.databases.values()) + sum(space.others.values())
    assert {"manifest", "quarantine", "store"} <= set(space.others)
    with quire.open(mixed, mode="r") as store:
        for name in ("shop", "copy", "clicks", "sessions"):
            assert space.databases[store.database(name).db_id] > 20_000, name


def test_reported_sizes_equal_those_of_du(mixed: Path) -> None:
    """`stats`, `info`, `why`, dashboard and metrics showed a fraction of the size."""
    du_bytes = _du(mixed)
    environment = {**os.environ, "QUIRE_STORE": str(mixed)}

    def quire_says(*arguments: str) -> Any:
        done = run_program(["-m", "quire", *arguments, "--json"], capture_output=True, check=True, env=environment)
        return json.loads(done.stdout)

    assert _is_near(quire_says("info")["disk_bytes"], du_bytes)
    rows = quire_says("stats")
    space, live = measure(str(mixed)), {row["db_id"] for row in rows}
    dropped = sum(amount for db_id, amount in space.databases.items() if db_id not in live)
    assert _is_near(sum(row["disk_bytes"] for row in rows) + dropped + sum(space.others.values()), du_bytes)
    for row in rows:
        assert quire_says("why", row["database"])["disk_bytes"] == row["disk_bytes"]
    with quire.open(mixed) as store:
        assert _is_near(store.info().disk_bytes, _du(mixed))
        reported = {row.database: row.disk_bytes for row in store.heavy.stats(runner="threads") if not row.snapshot}
        for name, shown in reported.items():
            kind, db_id = store.database(name).kind.name.lower(), store.database(name).db_id
            folder = {"pages": f"pages/{db_id:08x}", "lsm": f"lsm/{db_id:08x}", "stream": f"streams/{db_id}"}[kind]
            database_bytes = _du(mixed / folder) + (
                _du(directory) if (directory := mixed / f"objects/{db_id:08x}").exists() else 0
            )
            assert shown >= 0.95 * database_bytes, name


def test_the_dashboard_and_metrics_report_the_same(mixed: Path) -> None:
    from quire.service.web.dashboard_state import WatchedStore
    from quire.service.web.metrics import StoreCollector
    from quire.service.web.overview import overview
    from quire.store.why import why

    with quire.open(mixed) as store:
        watched = WatchedStore(store, why)
        shown = overview(watched)
        du_bytes = _du(mixed)
        assert _is_near(shown["space"]["total_bytes"], du_bytes)
        samples = [sample for metric in StoreCollector(watched).collect() for sample in metric.samples]
        value = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
        assert _is_near(int(value["quire_store_disk_bytes",]), du_bytes)
        parts = [
            amount
            for (name, *_), amount in value.items()
            if name in ("quire_store_disk_other_bytes", "quire_database_disk_bytes")
        ]
        assert _is_near(int(sum(parts)), du_bytes)
        assert {row["name"] for row in shown["databases"] if row["disk_bytes"]} == {
            "shop",
            "copy",
            "clicks",
            "sessions",
        }


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("pages/0000000a", 10),
        ("pages/0000000a/follow.json", 10),
        ("lsm/0000000a/sst/000001.sst", 10),
        ("streams/10/hot/0000000000000001.seg", 10),
        ("objects/0000000a/00000000", 10),
        ("objects/0000000a/00000000/base:00000001", 10),
        ("objects/0f4c2c9e-5b1e-4d0e-9a71-2f6f6a1d8d11/e/00000001/0000000a/00000000/base:00000001", 10),
        ("objects/0f4c2c9e-5b1e-4d0e-9a71-2f6f6a1d8d11/e/00000001", "objects"),
        ("objects/manifest/10/0.mlog", 10),
        ("objects/kv/backups/x", "objects"),
        ("manifest.lmdb", "manifest"),
        ("quarantine/1/pages/0000000a/wal/00000001.seg", "quarantine"),
        ("pages", "store"),
        (".", "store"),
    ],
)
def test_the_owner_of_a_path(path: str, owner: int | str) -> None:
    assert owner_of(path) == owner
