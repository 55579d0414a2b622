"""Processes are killed during a rollback: the database is unchanged or rolled back, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.testing.manifest import assert_clean
from tests.fork_server import ForkServer
from tests.sqlite.killed import SETTINGS

DONE = "sqlite.rollback.committed"
POINTS = (
    "pages.wal.publishing",
    "pages.wal.sealed",
    "manifest.commit.applied",
    "manifest.commit.flushed",
    "manifest.commit.durable",
    "sqlite.rollback.kept",
    "pages.segment.frames",
    "pages.segment.sync",
    "sqlite.rollback.written",
    "pages.wal.synced",
    DONE,
)
BEFORE, AFTER = [(1, "pen", 3), (2, "cup", 4)], [(1, "pen")]


def test_killed_at_every_step_of_a_rollback(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with quire.open(root, settings=SETTINGS) as store:
        connection = store.sqlite("shop", create=True)
        connection.execute("create table item(id integer primary key, name); insert into item values (1, 'pen')")
        store.snapshot("shop", "monday")
        connection.execute("alter table item add column price; update item set price = 3")
        connection.execute("insert into item values (2, 'cup', 4)")
        connection.close()
    killed = set()
    with ForkServer("tests.sqlite.killed_rollback:run", warm_up="tests.sqlite.killed:warm_up") as fork_server:
        for point in POINTS:
            if fork_server.is_killed({"root": str(root), "failpoints": f"{point}=kill"}):
                killed.add(point)
            with quire.open(root, settings=SETTINGS) as store:
                assert_clean(store.manifest)
                connection = store.sqlite("shop")
                assert connection.pragma("integrity_check") == "ok"
                rows = connection.execute("select * from item order by id").fetchall()
                connection.close()
                snapshots = [info.name for info in store.manifest.snapshots.of("shop") if info.name != "monday"]
                if (
                    rows == AFTER
                ):  # the rollback was committed: the former state is kept as a snapshot and can be restored
                    assert len(snapshots) == 1, point
                    assert store.rollback("shop", to=snapshots[0]).changed_pages > 0
                    connection = store.sqlite("shop")
                    rows = connection.execute("select * from item order by id").fetchall()
                    connection.close()
                    for info in store.manifest.snapshots.of("shop"):
                        if info.name != "monday":
                            store.manifest.snapshots.drop("shop", info.snapshot_id)
                assert rows == BEFORE, point
                assert point != DONE or snapshots, "a durable rollback keeps a snapshot"
    assert {"sqlite.rollback.kept", "sqlite.rollback.written", "pages.segment.frames", DONE} <= killed
