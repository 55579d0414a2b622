"""A driver that is killed: opens the store and runs its mirror, and dies at the failpoint it was told."""

from __future__ import annotations

import pickle

import quire
from quire.durable.failpoints import arm_from
from tests.jobs.mirror_world import quiet_settings
from tests.nursery import Line


def live(line: Line) -> None:
    """The target of the nursery."""
    message = line.receive()
    assert message is not None
    root, failpoints = pickle.loads(message)
    arm_from(failpoints)
    with quire.open(root, settings=quiet_settings()) as store:
        store.mirrors.run("lake", runner="threads")
    line.send(b"it lives")
