"""Runs in a process of its own, to be killed: works on an archived store and says what was archived.

It is told, as JSON: where (`home`), which failpoint dies when (`failpoints`) and the number it begins with. It tells
`archived N` when everything up to round N is in the bucket, and `begun N` before round N.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire.durable.failpoints import arm_from
from tests.archive.world import WAIT, World, fill, until
from tests.nursery import Line

ROUND = 6


def warm_up() -> None:
    """Everything is imported by now."""


def work(w: World, number: int) -> None:
    """One round: changes of every kind of database, with tables, snapshots and checkpoints."""
    fill(w.store, number * 1_000, ROUND)
    w.store.kv("pairs").flush()
    if number % 3 == 2:
        w.store.kv("pairs").compact()
    w.store.stream("events").seal()
    w.store.stream("events").compress()
    if number % 2:
        w.store.snapshot("shop", f"round-{number}")
        w.store.checkpoint("shop")


def await_bases(w: World, least: int) -> None:
    """Rounds are quicker than bases become due: wait until parts of so many are in the bucket."""
    until(lambda: len(list(w.bucket.glob("*/archive/*/base/*"))) >= least)


def run(line: Line) -> None:
    """Work until death, or until the last round."""
    told = json.loads(line.receive() or b"{}")
    w = World(Path(told["home"]), base_seconds=0.05)
    arm_from(told["failpoints"])
    for number in range(told["first"], told["first"] + told["rounds"]):
        line.send(f"begun {number}".encode())
        work(w, number)
        w.archiver.wait(WAIT)
        line.send(f"archived {number}".encode())
        await_bases(w, number - told["first"] + 1)
    w.close()
    line.send(b"done")
