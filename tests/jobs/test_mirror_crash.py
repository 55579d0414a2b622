"""The process that runs a mirror is killed at every step; the next one finds nothing doubled and nothing missing."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path

import pytest

from quire.testing.manifest import assert_clean
from tests.jobs.mirror_world import POINTS, World, fill
from tests.nursery import Nursery


@pytest.mark.parametrize("kind", ["parquet", pytest.param("delta", marks=pytest.mark.slow)])
def test_a_process_that_is_killed_at_any_step_is_not_noticed(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path, kind)
    with world.open() as store:
        fill(store, "tenant-1")
        world.define(store)
    with Nursery("tests.jobs.mirror_child:live") as nursery:
        for number, point in enumerate(POINTS):
            with nursery.spawn() as child:
                child.line.send(pickle.dumps((str(tmp_path / "store"), f"{point}=kill")))
                assert child.line.receive() is None
                assert child.wait() == -signal.SIGKILL, point
            with world.open() as store:
                world.run(store)
                assert_clean(store.manifest)
                fill(store, f"tenant-{number + 2}")
                if point == "jobs.mirror.created":
                    continue
                with store.sqlite(f"tenant-{number + 2}") as connection:
                    connection.execute(f"ALTER TABLE orders ADD COLUMN note_{number} TEXT")
                    connection.execute(f"UPDATE orders SET note_{number} = 'new'")
