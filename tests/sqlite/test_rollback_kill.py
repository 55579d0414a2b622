"""Processes are killed while they roll a database back: it is what it was, or what it should be, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.testing.manifest import assert_clean
from tests.nursery import Nursery
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
    with Nursery("tests.sqlite.killed_rollback:run", warm_up="tests.sqlite.killed:warm_up") as nursery:
        for point in POINTS:
            if nursery.is_killed({"root": str(root), "failpoints": f"{point}=kill"}):
                killed.add(point)
            with quire.open(root, settings=SETTINGS) as store:
                assert_clean(store.manifest)
                connection = store.sqlite("shop")
                assert connection.pragma("integrity_check") == "ok"
                found = connection.execute("select * from item order by id").fetchall()
                connection.close()
                kept = [info.name for info in store.manifest.snapshots.of("shop") if info.name != "monday"]
                if found == AFTER:  # as far as the commit came: what was before is kept, and comes back
                    assert len(kept) == 1, point
                    assert store.rollback("shop", to=kept[0]).changed_pages > 0
                    connection = store.sqlite("shop")
                    found = connection.execute("select * from item order by id").fetchall()
                    connection.close()
                    for info in store.manifest.snapshots.of("shop"):
                        if info.name != "monday":
                            store.manifest.snapshots.drop("shop", info.snapshot_id)
                assert found == BEFORE, point
                assert point != DONE or kept, "the commit was durable"
    assert {"sqlite.rollback.kept", "sqlite.rollback.written", "pages.segment.frames", DONE} <= killed
