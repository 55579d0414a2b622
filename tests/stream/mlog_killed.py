"""Runs in a process of its own, to be killed: appends to a manifest log, ticks, and tells what was committed.

It is told, as JSON: where (`base`), which failpoint dies when (`failpoints`), and how many rounds to go. It tells
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
from tests.nursery import Line

SETTINGS = ManifestLogSettings(
    chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=3, rotation_seconds=0.001, sealed_kept=1
)


def files_of(base: Path) -> LogFiles:
    return LogFiles(OsDisk(), str(base / "store"), 7)


def warm_up() -> None:
    """Everything is imported by now, the object store's library too."""
    open_store("memory://").close()


def run(line: Line) -> None:
    """Write until death, or until the rounds are over."""
    told = json.loads(line.receive() or b"{}")
    base = Path(told["base"])
    arm_from(told["failpoints"])
    objects = LogObjects(open_store(str(base / "objects")), 7)
    collect = open_store(str(base / "objects")).delete_many
    log = ManifestLog.open(files_of(base), clock=SystemClock(), settings=SETTINGS, objects=objects, collect=collect)
    line.send(b"open")
    for number in range(told["rounds"]):
        segment = log.index.opened_max + 1
        key = f"segments/{segment}"
        log.append_all([(r.SegmentOpened(segment * 100, 1), segment), (r.SealSegment(100, segment), segment)])
        log.append_all([(r.UploadStarted(key), segment), (r.UploadDone(key, "e"), segment)])
        line.send(f"ack {segment}".encode())
        if number % 3 == 2:
            log.append_all([(r.CustomEvent(5_000, bytes(20_000)), segment)])  # more than the chunk has room for
        if number % 2:
            log.rotate()
        log.tick()
    log.close()
    line.send(b"done")
