"""Runs in its own process, to be killed: changes an archived store and reports what was archived.

The first message is JSON: the directory (`home`), the failpoints (`failpoints`) and the first number. The process sends
`archived N` when everything up to round N is in the bucket, and `begun N` before round N.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire.durable.failpoints import arm_from
from tests.archive.archived_store import WAIT, ArchivedStore, fill, until
from tests.fork_server import Channel

ROUND = 6


def warm_up() -> None:
    """Everything is already imported."""


def work(archived: ArchivedStore, number: int) -> None:
    """One round: changes of every kind of database, with tables, snapshots and checkpoints."""
    fill(archived.store, number * 1_000, ROUND)
    archived.store.kv("pairs").flush()
    if number % 3 == 2:
        archived.store.kv("pairs").compact()
    archived.store.stream("events").seal()
    archived.store.stream("events").compress()
    if number % 2:
        archived.store.snapshot("shop", f"round-{number}")
        archived.store.checkpoint("shop")


def await_bases(archived: ArchivedStore, least: int) -> None:
    """Rounds are faster than bases become due: wait until parts of this many are in the bucket."""
    until(lambda: len(list(archived.bucket.glob("*/archive/*/base/*"))) >= least)


def run(channel: Channel) -> None:
    """Run rounds until the process is killed, or until the last round."""
    task = json.loads(channel.receive() or b"{}")
    archived = ArchivedStore(Path(task["home"]), base_seconds=0.05)
    arm_from(task["failpoints"])
    for number in range(task["first"], task["first"] + task["rounds"]):
        channel.send(f"begun {number}".encode())
        work(archived, number)
        archived.archiver.wait(WAIT)
        channel.send(f"archived {number}".encode())
        await_bases(archived, number - task["first"] + 1)
    archived.close()
    channel.send(b"done")
