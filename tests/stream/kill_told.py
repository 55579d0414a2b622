"""Runs in a process of its own, to be killed: does to a stream what it is told, one thing at a time, and says how far it is.

It is told JSON: first `{"base": PATH}`, then `{"do": WHAT, …}`. It answers each with `{"first", "end", "next", "prefixes"}`;
what is not allowed in the state of things changes nothing. It is killed from outside, or by a failpoint that it was told to
arm.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.core.errors import IllegalTransition
from quire.durable.failpoints import arm_from
from quire.stream.state import Retention
from quire.stream.stream import Stream
from tests.nursery import Line
from tests.stream.stream_killed import open_at
from tests.stream.streams import record


def size_of(number: int) -> int:
    """How long the record of an id is."""
    return number * 7919 % 400


def run(line: Line) -> None:
    """Live until death, or until the line ends."""
    store = open_at(Path(json.loads(line.receive() or b"{}")["base"]))
    stream = store.stream("clicks", create=True)
    _answer(line, stream)
    while (message := line.receive()) is not None:
        told = json.loads(message)
        if told["do"] == "end":
            break
        try:
            _do(stream, told)
        except IllegalTransition:
            pass  # the last copy was to be given up, or it is on its way elsewhere
        _answer(line, stream)
    store.close()


def _answer(line: Line, stream: Stream) -> None:
    objects = stream.ledger.log.objects
    assert objects is not None
    answer = {
        "first": stream.first_record,
        "end": stream.end_record,
        "next": stream.hot.next_record,
        "prefixes": objects.prefixes,
    }
    line.send(json.dumps(answer).encode())


def _do(stream: Stream, told: dict[str, Any]) -> None:
    what = told["do"]
    if what == "arm":
        arm_from(told["failpoints"])
    elif what == "append":
        first = stream.hot.next_record
        payloads = [record(number, size_of(number)) for number in range(first, first + told["count"])]
        guards = [stream.append(payloads)] if told["together"] else [stream.append(each) for each in payloads]
        if told["wait"]:
            guards[-1].result()
    elif what == "retain":
        stream.retain(Retention(bytes=told["bytes"], consumed=told["consumed"]))
    elif what == "consume":
        first, end = stream.first_record, stream.end_record
        stream.register("ann")
        stream.ack("ann", first + (end - first) * told["percent"] // 100)
    elif what == "snapshot":
        stream.ledger.guarded(stream.ledger.log.snapshot)
    elif what == "switch":
        stream.switch(told["mode"])
    elif what in ("seal", "sync", "keep", "tick"):
        getattr(stream, what)()
    else:
        _move(stream, what, told["which"])


def _move(stream: Stream, what: str, which: int) -> None:
    sealed = stream.ledger.view.sealed
    if not sealed:
        return
    chosen = sealed[which % len(sealed)].segment_id
    if what == "retire":
        stream.tiers.retire(sealed[0].segment_id)
    elif what == "evict_warm":
        stream.tiers.evict(chosen, warm=True)
    else:
        getattr(stream.tiers, what)(chosen)
