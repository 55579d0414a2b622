"""The owner of a store that is killed: opens it, does rounds of maintenance, and dies at the failpoint it was told.

Messages are pickles: first what to do, at the end (if it lives to see it) how often each failpoint was hit.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from quire.core.ids import ArtifactKey
from quire.durable.failpoints import arm_from, hits, recording
from quire.testing.clock import ManualClock
from tests.jobs.world import World
from tests.nursery import Line

ROUNDS = 5
SECONDS_BETWEEN = 240.0


@dataclass(frozen=True, slots=True)
class Life:
    """What a child is told."""

    root: str
    now_ms: int
    failpoints: str
    """As in QUIRE_FAILPOINTS."""
    bodies: dict[ArtifactKey, bytes]
    """What the artifacts are made of: the first thing it does is to look whether all promises are kept."""


def live(line: Line) -> None:
    """The target of the nursery."""
    message = line.receive()
    assert message is not None
    told: Life = pickle.loads(message)
    with recording():
        arm_from(told.failpoints)
        world = World(told.root, told.root + "/objects", clock=ManualClock(told.now_ms), bodies=told.bodies)
        world.assert_sound()
        world.manifest.jobs.recover()
        world.clock.advance(30)  # what the last life was working on is due again, before everything else
        for _ in range(ROUNDS):
            world.upkeep.run_once()
            world.clock.advance(SECONDS_BETWEEN)
        world.close()
    line.send(pickle.dumps(hits()))
