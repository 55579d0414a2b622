"""Runs in a child process that is killed at a step of a rollback."""

from __future__ import annotations

import json

import quire
from quire.durable.failpoints import arm_from
from tests.fork_server import Channel
from tests.sqlite.killed import SETTINGS


def run(channel: Channel) -> None:
    """Roll `shop` back to `monday`, and send the name of the new snapshot."""
    options = json.loads(channel.receive() or b"{}")
    with quire.open(options["root"], settings=SETTINGS) as store:
        store.pages.open("shop")
        arm_from(options["failpoints"])
        result = store.rollback("shop", to="monday")
        channel.send(result.snapshot.encode())
