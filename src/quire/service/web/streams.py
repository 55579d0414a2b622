"""A stream, for its page: its tiers, and the newest records of its manifest log.

Rules
  1. Reads files only, beside a live writer, whose uncommitted tail is not looked at; the object store is not asked.
  2. A log that cannot be read is told as its problem: the page still shows the rest.

Pure functions of a `WatchedStore`; any thread.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from quire.core.errors import QuireError
from quire.core.json_values import plain
from quire.durable import names
from quire.durable.files import OsDisk
from quire.manifest.records import DbKind
from quire.service.web.changes import cut
from quire.service.web.dashboard_state import WatchedStore
from quire.stream.files import LogFiles
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_verify import inspect

RECORDS_MAX = 200
CHUNKS_READ = 4
"""Chunks of the log that are read for that: the newest ones."""
TIERS = ("hot", "warm", "remote")


def stream_page(sight: WatchedStore, stream_id: int) -> dict[str, Any]:
    """What the page of a stream shows beyond that of any database."""
    return sight.cached.get(("stream", stream_id), lambda: _page(sight, stream_id))


def _page(sight: WatchedStore, stream_id: int) -> dict[str, Any]:
    log = LogFiles(OsDisk(), sight.store.path, stream_id)
    page: dict[str, Any] = {
        "files": _files(sight, stream_id),
        "chunks": log.chunks(),
        "snapshots": log.snapshots(),
        "records": [],
        "tiers": {},
        "needs_repair": [],
        "problem": "",
    }
    try:
        page["records"] = _records(log)
        index = recover(log, sight.clock).index if log.chunks() else ManifestIndex()
        page["tiers"] = _tiers(index)
        page["needs_repair"] = sorted(index.needs_repair)
    except QuireError as error:
        page["problem"] = error.what  # rule 2
    return page


def _files(sight: WatchedStore, stream_id: int) -> dict[str, dict[str, int]]:
    """Files and bytes of each directory."""
    parts = {part: {"files": 0, "bytes": 0} for part in ("hot", "warm", "manifest")}
    for path, size in sight.files(stream_id, DbKind.STREAM):
        for part, figures in parts.items():
            if path.startswith(names.stream_dir(stream_id, part)):
                figures["files"] += 1
                figures["bytes"] += size
    return parts


def _records(log: LogFiles) -> list[dict[str, Any]]:
    """The newest records, newest first."""
    chunks = log.chunks()
    newest = deque(inspect(log, start_chunk=chunks[-CHUNKS_READ:][0]) if chunks else (), maxlen=RECORDS_MAX)
    return [cut(plain(record)) for record in reversed(newest)]


def _tiers(index: ManifestIndex) -> dict[str, int]:
    """Segments that have a whole copy in each tier."""
    count: Counter[str] = Counter(dict.fromkeys(TIERS, 0))
    for info in index.segments():
        count.update(TIERS[tier] for tier in info.tiers)
    return dict(count)
