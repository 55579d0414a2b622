"""Runs in a child process that tests kill: appends to a manifest log, ticks, and reports what was committed.

Its options are JSON: the directory (`base`), the failpoints to arm (`failpoints`) and the number of rounds. It sends
`ack SEGMENT` when everything about a segment is committed.
"""

from __future__ import annotations

import json
from pathlib import Path

from quire.core.clock import SystemClock
from quire.core.settings import ManifestLogSettings
from quire.durable.failpoints import arm_from
from quire.durable.files import OsDisk
from quire.objects.open import open_store
from quire.stream import mlog_records as r
from quire.stream.files import LogFiles
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_tier2 import LogObjects
from tests.fork_server import Channel
from tests.stream.logs import append_all

SETTINGS = ManifestLogSettings(
    chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=3, rotation_seconds=0.001, sealed_kept=1
)


def files_of(base: Path) -> LogFiles:
    return LogFiles(OsDisk(), str(base / "store"), 7)


def warm_up() -> None:
    """Import everything that a child needs, including the object store's library."""
    open_store("memory://").close()


def run(channel: Channel) -> None:
    """Write until the process is killed or the rounds are done."""
    options = json.loads(channel.receive() or b"{}")
    base = Path(options["base"])
    arm_from(options["failpoints"])
    objects = LogObjects(open_store(str(base / "objects")), 7)
    collect = open_store(str(base / "objects")).delete_many
    log = ManifestLog.open(files_of(base), clock=SystemClock(), settings=SETTINGS, objects=objects, collect=collect)
    channel.send(b"open")
    for number in range(options["rounds"]):
        segment = log.index.opened_max + 1
        key = f"segments/{segment}"
        append_all(log, [(r.SegmentOpened(segment * 100, 1), segment), (r.SealSegment(100, segment), segment)])
        append_all(log, [(r.UploadStarted(key), segment), (r.UploadDone(key, "e"), segment)])
        channel.send(f"ack {segment}".encode())
        if number % 3 == 2:
            append_all(log, [(r.CustomEvent(5_000, bytes(20_000)), segment)])  # does not fit into the chunk
        if number % 2:
            log.rotate()
        log.tick()
    log.close()
    channel.send(b"done")
