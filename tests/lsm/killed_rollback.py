"""Runs in a process of its own, to be killed at a step of a rollback."""

from __future__ import annotations

import json

import quire
from quire.durable.failpoints import arm_from
from tests.nursery import Line
from tests.sqlite.killed import SETTINGS


def run(line: Line) -> None:
    """Roll `cart` back to `monday`, and say so."""
    told = json.loads(line.receive() or b"{}")
    with quire.open(told["root"], settings=SETTINGS) as store:
        store.kv("cart")
        arm_from(told["failpoints"])
        line.send(store.rollback("cart", to="monday").snapshot.encode())
