"""Runs in a process of its own, to be killed: appends to a stream, moves its segments, and tells what was acknowledged.

It is told, as JSON: where (`base`), which failpoint dies when (`failpoints`), how many rounds to go and with which seed. It
tells `ack END` when every record below END is durable, and `low FIRST` when retention has taken what is below FIRST.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import quire
from quire.core.errors import IllegalTransition
from quire.core.settings import MaintenanceSettings, ManifestLogSettings, StoreSettings, StreamSettings
from quire.durable.failpoints import arm_from
from quire.store.store import Store
from quire.stream.state import Retention
from tests.nursery import Line
from tests.stream.streams import record

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False),
    stream=StreamSettings(segment_bytes=16 << 10, record_bytes_max=8 << 10, hot_bytes=48 << 10, warm_bytes=8 << 10),
    manifest_log=ManifestLogSettings(
        chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=2, rotation_seconds=0.001, sealed_kept=1
    ),
)


def open_at(base: Path) -> Store:
    return quire.open(base / "store", settings=SETTINGS)


def warm_up() -> None:
    """Import what a life needs, and leave no thread behind."""
    import quire.objects.open
    import quire.store.wiring
    import quire.stream.engine  # noqa: F401


def run(line: Line) -> None:
    """Live until death, or until the rounds are over."""
    told = json.loads(line.receive() or b"{}")
    draw = random.Random(told["seed"])
    arm_from(told["failpoints"])
    store = open_at(Path(told["base"]))
    stream = store.stream("clicks", create=True)
    stream.retain(Retention(bytes=64 << 10))
    line.send(b"open")
    for _ in range(told["rounds"]):
        first = stream.hot.next_record
        payloads = [record(first + number, draw.randint(0, 400)) for number in range(draw.randint(1, 40))]
        stream.append(payloads).result()
        line.send(f"ack {stream.end_record}".encode())
        step = draw.random()
        if step < 0.4:
            stream.seal()
        if step < 0.5:
            stream.keep()
        if step > 0.6:
            low = stream.tick()
            if low.retired:
                line.send(f"low {stream.first_record}".encode())
        sealed = stream.ledger.view.sealed
        if step > 0.8 and sealed:
            try:
                stream.tiers.upload(sealed[-1].segment_id)
                stream.tiers.evict(sealed[-1].segment_id)
                stream.tiers.hydrate(sealed[-1].segment_id)
            except IllegalTransition:
                pass  # it is on its way elsewhere
    store.close()
    line.send(b"done")
