"""An owner that is killed: it opens the store, runs maintenance rounds, and dies at its failpoint.

Messages are pickles: first a `ChildTask`; at the end, if the process survives, the number of hits of each failpoint.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from quire.core.ids import ArtifactKey
from quire.durable.failpoints import arm_from, hits, recording
from quire.testing.clock import ManualClock
from tests.fork_server import Channel
from tests.jobs.job_store import JobStore

ROUNDS = 5
SECONDS_BETWEEN = 240.0


@dataclass(frozen=True, slots=True)
class ChildTask:
    """What a child process does."""

    root: str
    now_ms: int
    failpoints: str
    """In the syntax of QUIRE_FAILPOINTS."""
    bodies: dict[ArtifactKey, bytes]
    """The expected content of the artifacts; the child first checks that every promised copy exists."""


def run_child(channel: Channel) -> None:
    """Entry point of the child process."""
    message = channel.receive()
    assert message is not None
    task: ChildTask = pickle.loads(message)
    with recording():
        arm_from(task.failpoints)
        job_store = JobStore(task.root, task.root + "/objects", clock=ManualClock(task.now_ms), bodies=task.bodies)
        job_store.assert_sound()
        job_store.manifest.jobs.recover()
        job_store.clock.advance(30)  # the previous process's jobs are due again, before all others
        for _ in range(ROUNDS):
            job_store.upkeep.run_once()
            job_store.clock.advance(SECONDS_BETWEEN)
        job_store.close()
    channel.send(pickle.dumps(hits()))
