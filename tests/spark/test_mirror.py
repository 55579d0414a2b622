"""Mirrors on Spark: executors write the files, wherever they run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from pyspark import SparkContext

from quire.spark import session
from tests.jobs.mirror_world import World, fill


@pytest.fixture
def world(tmp_path: Path) -> World:
    session("local[2]")
    return World(tmp_path, "delta", {"file_bytes": "65536"})


def test_executors_write_what_the_driver_commits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[str] = []
    monkeypatch.setattr(SparkContext, "setJobDescription", lambda _, title: described.append(title))
    with world.open() as store:
        for number in range(12):
            fill(store, f"tenant-{number:02}", 30)
        world.define(store)
        first = store.mirrors.run("lake", runner="spark")
        assert (first.runner, first.rows_written) == ("spark", 360)
        assert first.files_added > 1
        world.check(store)
        with closing(store.sqlite("tenant-03")) as connection:
            connection.execute("ALTER TABLE orders ADD COLUMN note TEXT")
            connection.execute("UPDATE orders SET note = 'late' WHERE id = 1")
        store.drop("tenant-07")
        second = store.mirrors.run("lake", runner="spark")
        assert (second.full, second.changed, second.dropped) == (False, 1, 1)
        assert described[0] == f"quire mirror lake: batch 1, 12 databases to delta:{world.root}/lake"
        assert len(described) == 2
        world.check(store)
