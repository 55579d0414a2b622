"""Runs in a child process that tests kill: executes commands on a stream, one at a time, and reports its state.

Commands are JSON: first `{"base": PATH}`, then `{"do": ACTION, …}`. The reply to each is `{"first", "end", "next",
"prefixes"}`.
A command that the current state does not allow changes nothing. The process is killed from outside, or by a failpoint
that a
command armed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.core.errors import IllegalTransition
from quire.durable.failpoints import arm_from
from quire.stream.state import Retention
from quire.stream.stream import Stream
from tests.fork_server import Channel
from tests.stream.stream_killed import open_at
from tests.stream.streams import record


def size_of(number: int) -> int:
    """The size of the record with this id."""
    return number * 7919 % 400


def run(channel: Channel) -> None:
    """Execute commands until the process is killed or the line ends."""
    store = open_at(Path(json.loads(channel.receive() or b"{}")["base"]))
    stream = store.stream("clicks", create=True)
    _send_state(channel, stream)
    while (message := channel.receive()) is not None:
        command = json.loads(message)
        if command["do"] == "end":
            break
        try:
            _do(stream, command)
        except IllegalTransition:
            pass  # it is the last copy, or another move is in progress
        _send_state(channel, stream)
    store.close()


def _send_state(channel: Channel, stream: Stream) -> None:
    objects = stream.ledger.log.objects
    assert objects is not None
    state = {
        "first": stream.first_record,
        "end": stream.end_record,
        "next": stream.hot.next_record,
        "prefixes": objects.prefixes,
    }
    channel.send(json.dumps(state).encode())


def _do(stream: Stream, command: dict[str, Any]) -> None:
    action = command["do"]
    if action == "arm":
        arm_from(command["failpoints"])
    elif action == "append":
        first = stream.hot.next_record
        payloads = [record(number, size_of(number)) for number in range(first, first + command["count"])]
        guards = [stream.append(payloads)] if command["together"] else [stream.append(payload) for payload in payloads]
        if command["wait"]:
            guards[-1].result()
    elif action == "retain":
        stream.retain(Retention(bytes=command["bytes"], consumed=command["consumed"]))
    elif action == "consume":
        first, end = stream.first_record, stream.end_record
        stream.register("ann")
        stream.ack("ann", first + (end - first) * command["percent"] // 100)
    elif action == "snapshot":
        stream.ledger.guarded(stream.ledger.log.snapshot)
    elif action == "switch":
        stream.switch(command["mode"])
    elif action in ("seal", "sync", "keep", "tick"):
        getattr(stream, action)()
    else:
        _move(stream, action, command["which"])


def _move(stream: Stream, action: str, which: int) -> None:
    sealed = stream.ledger.view.sealed
    if not sealed:
        return
    segment_id = sealed[which % len(sealed)].segment_id
    if action == "retire":
        stream.tiers.retire(sealed[0].segment_id)
    elif action == "evict_warm":
        stream.tiers.evict(segment_id, warm=True)
    else:
        getattr(stream.tiers, action)(segment_id)
