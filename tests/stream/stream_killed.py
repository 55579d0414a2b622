"""Runs in a child process that tests kill: appends to a stream, moves its segments, and reports what was acknowledged.

Its options are JSON: the directory (`base`), the failpoints to arm (`failpoints`), the number of rounds and the seed.
It
sends `ack END` when every record below END is durable, and `low FIRST` when retention has removed the records below
FIRST.
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
from tests.fork_server import Channel
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
    """Import everything that a child needs, without starting a thread."""
    import quire.objects.open
    import quire.store.wiring
    import quire.stream.engine  # noqa: F401


def run(channel: Channel) -> None:
    """Write until the process is killed or the rounds are done."""
    options = json.loads(channel.receive() or b"{}")
    rng = random.Random(options["seed"])
    arm_from(options["failpoints"])
    store = open_at(Path(options["base"]))
    stream = store.stream("clicks", create=True)
    stream.retain(Retention(bytes=64 << 10))
    channel.send(b"open")
    for _ in range(options["rounds"]):
        first = stream.hot.next_record
        payloads = [record(first + number, rng.randint(0, 400)) for number in range(rng.randint(1, 40))]
        stream.append(payloads).result()
        channel.send(f"ack {stream.end_record}".encode())
        step = rng.random()
        if step < 0.4:
            stream.seal()
        if step < 0.5:
            stream.keep()
        if step > 0.6:
            low = stream.tick()
            if low.retired:
                channel.send(f"low {stream.first_record}".encode())
        sealed = stream.ledger.view.sealed
        if step > 0.8 and sealed:
            try:
                stream.tiers.upload(sealed[-1].segment_id)
                stream.tiers.evict(sealed[-1].segment_id)
                stream.tiers.hydrate(sealed[-1].segment_id)
            except IllegalTransition:
                pass  # another move of the segment is in progress
    store.close()
    channel.send(b"done")
