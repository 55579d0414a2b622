"""The dashboard page of a stream: its tiers, and the newest records of its manifest log.

Rules
  1. Only files are read, next to a live writer, whose uncommitted tail is ignored; no request goes to the object store.
  2. A log that cannot be read is reported as a problem: the page still shows the rest.

Threads: any; pure functions of a `WatchedStore`.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from quire.core.errors import QuireError
from quire.core.json_values import plain
from quire.core.timeline import skip_gap
from quire.durable import names
from quire.durable.files import OsDisk
from quire.manifest.records import DbKind
from quire.service.web.changes import cut
from quire.service.web.dashboard_state import FILES_MAX, WatchedStore
from quire.stream.files import LogFiles
from quire.stream.gaps import before_records, count_records
from quire.stream.mlog_index import ManifestIndex
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_verify import inspect

if TYPE_CHECKING:
    from quire.stream.stream import StreamInfo

RECORDS_MAX = 200
CHUNKS_READ = 4
"""The newest chunks of the log, which are read to find these records."""
TIERS = ("hot", "warm", "remote")


def stream_page(watched: WatchedStore, stream_id: int) -> dict[str, Any]:
    """Return the part of the page that is specific to streams."""
    return watched.cached.get(("stream", stream_id), lambda: _page(watched, stream_id))


def stream_figures(info: StreamInfo) -> dict[str, Any]:
    """Return the figures of an open stream. Ids that takeovers have skipped count neither as records nor as a lag."""
    figures: dict[str, Any] = plain(info)
    figures["records"] = info.records
    figures["last_record"] = skip_gap(info.gaps, before_records(info.gaps, info.end_record, 1))
    for name, consumer in info.consumers.items():
        figures["consumers"][name]["behind"] = count_records(info.gaps, consumer.position, info.end_record)
    return figures


def _page(watched: WatchedStore, stream_id: int) -> dict[str, Any]:
    log = LogFiles(OsDisk(), watched.store.path, stream_id)
    files = watched.files(stream_id, DbKind.STREAM)
    page: dict[str, Any] = {
        "files": _files(stream_id, files),
        "files_at_least": len(files) >= FILES_MAX,
        "chunks": log.chunks(),
        "snapshots": log.snapshots(),
        "records": [],
        "tiers": {},
        "needs_repair": [],
        "problem": "",
    }
    try:
        page["records"] = _records(log)
        index = recover(log, watched.clock).index if log.chunks() else ManifestIndex()
        page["tiers"] = _tiers(index)
        page["needs_repair"] = sorted(index.needs_repair)
    except QuireError as error:
        page["problem"] = error.what  # rule 2
    return page


def _files(stream_id: int, files: list[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Return the number of files and bytes of each directory."""
    parts = {part: {"files": 0, "bytes": 0} for part in ("hot", "warm", "manifest")}
    for path, size in files:
        for part, figures in parts.items():
            if path.startswith(names.stream_dir(stream_id, part)):
                figures["files"] += 1
                figures["bytes"] += size
    return parts


def _records(log: LogFiles) -> list[dict[str, Any]]:
    """Return the newest records, newest first."""
    chunks = log.chunks()
    newest = deque(inspect(log, start_chunk=chunks[-CHUNKS_READ:][0]) if chunks else (), maxlen=RECORDS_MAX)
    return [cut(plain(record)) for record in reversed(newest)]


def _tiers(index: ManifestIndex) -> dict[str, int]:
    """Return the number of segments that have a complete copy in each tier."""
    count: Counter[str] = Counter(dict.fromkeys(TIERS, 0))
    for info in index.segments():
        count.update(TIERS[tier] for tier in info.tiers)
    return dict(count)
