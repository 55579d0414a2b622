"""The process that runs a mirror is killed at every step; the next run duplicates no rows and loses none."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path

import pytest

from quire.testing.manifest import assert_clean
from tests.fork_server import ForkServer
from tests.jobs.mirrored_store import POINTS, MirroredStore, fill


@pytest.mark.parametrize("kind", ["parquet", pytest.param("delta", marks=pytest.mark.slow)])
def test_a_kill_at_any_step_has_no_effect_on_the_target(tmp_path: Path, kind: str) -> None:
    mirror = MirroredStore(tmp_path, kind)
    with mirror.open() as store:
        fill(store, "tenant-1")
        mirror.define(store)
    with ForkServer("tests.jobs.mirror_child:run_child") as fork_server:
        for number, point in enumerate(POINTS):
            with fork_server.spawn() as child:
                child.channel.send(pickle.dumps((str(tmp_path / "store"), f"{point}=kill")))
                assert child.channel.receive() is None
                assert child.wait() == -signal.SIGKILL, point
            with mirror.open() as store:
                mirror.run(store)
                assert_clean(store.manifest)
                fill(store, f"tenant-{number + 2}")
                if point == "jobs.mirror.created":
                    continue
                with store.sqlite(f"tenant-{number + 2}") as connection:
                    connection.execute(f"ALTER TABLE orders ADD COLUMN note_{number} TEXT")
                    connection.execute(f"UPDATE orders SET note_{number} = 'new'")
