"""Runs in a child process that is killed at a step of a rollback."""

from __future__ import annotations

import json

import quire
from quire.durable.failpoints import arm_from
from tests.fork_server import Channel
from tests.sqlite.killed import SETTINGS


def run(channel: Channel) -> None:
    """Roll `cart` back to `monday`, and send the name of the new snapshot."""
    options = json.loads(channel.receive() or b"{}")
    with quire.open(options["root"], settings=SETTINGS) as store:
        store.kv("cart")
        arm_from(options["failpoints"])
        channel.send(store.rollback("cart", to="monday").snapshot.encode())
