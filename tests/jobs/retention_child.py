"""A store of databases with rules, whose retention is to be interrupted; and the process that is killed in it."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from quire.durable.failpoints import arm_from, hits, recording
from quire.jobs.retention import apply_many
from quire.manifest.records import RetentionRecord
from quire.testing.clock import ManualClock
from tests.jobs.world import World
from tests.nursery import Line

MADE, KEPT = 4, 2
"""Snapshots that a database has, and those of them that its rules keep."""

BEGIN_MS = 1_750_000_000_000


def fill(world: World, count: int, *, chunks: bool = True) -> list[int]:
    """Databases with snapshots, each of which holds a chunk of its own; their ids."""

    def make(number: int) -> int:
        db_id = world.database(f"db-{number:04}")
        for _ in range(MADE):
            if chunks:
                world.chunks(db_id, 1)
            world.manifest.snapshots.publish(db_id)
        world.manifest.retention.set(db_id, RetentionRecord(keep_last=KEPT))
        return db_id

    with ThreadPoolExecutor(16) as pool:  # so that they share commits
        return sorted(pool.map(make, range(count)))


@dataclass(frozen=True, slots=True)
class Life:
    """What a child is told."""

    root: str
    now_ms: int
    failpoints: str
    """As in QUIRE_FAILPOINTS."""
    db_ids: list[int]


def live(line: Line) -> None:
    """The target of the nursery: an owner that applies all rules, and dies where it was told to."""
    message = line.receive()
    assert message is not None
    told: Life = pickle.loads(message)
    world = World(told.root, told.root + "/objects", clock=ManualClock(told.now_ms))
    world.manifest.jobs.recover()
    with recording():
        arm_from(told.failpoints)
        apply_many(world.manifest, told.db_ids)
        line.send(pickle.dumps(hits()))
    world.close()
