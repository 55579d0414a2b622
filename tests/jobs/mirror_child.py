"""A driver that is killed: it opens the store, runs its mirror, and dies at its failpoint."""

from __future__ import annotations

import pickle

import quire
from quire.durable.failpoints import arm_from
from tests.fork_server import Channel
from tests.jobs.mirrored_store import quiet_settings


def run_child(channel: Channel) -> None:
    """Entry point of the child process."""
    message = channel.receive()
    assert message is not None
    root, failpoints = pickle.loads(message)
    arm_from(failpoints)
    with quire.open(root, settings=quiet_settings()) as store:
        store.mirrors.run("lake", runner="threads")
    channel.send(b"it lives")
