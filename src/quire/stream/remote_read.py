"""A stream as other processes read it: which segments have which records, and how to read them without the owner.

Terms
  share    a part of a stream at one moment, as a value: small, and good for sending
  locate   how a reader asks the owner again where records are: (start, stop, upload) → share

Rules
  1. Whoever sees the store's directory reads the files, the hot one first, then the compressed one; else, and if neither is
     there, the object. Only the frames that are wanted are fetched of it.
  2. A copy that is not there, or not what the owner said, has moved on: the owner is asked again. If it says the same, that
     is the error. Blocks are checked as the owner checks them, so that a file that became another segment's cannot pass.
  3. Who does not see the directory has records that are in no object yet uploaded first, if `uploads` allows it; the owner
     then ends the open segment if records of it are wanted.
  4. Below what is retained a reader hears `CursorLost`, also if retention overtakes it: never a silent gap.

Threads: a reader belongs to one. Importable on executors.
Raises `CursorLost`, `Corruption`, `ObjectNotFound`, `Unavailable`, `InvalidInput`.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.cache import ByteCache
from quire.core.errors import Corruption, CursorLost, InvalidInput, QuireError, Unavailable
from quire.core.events import emit
from quire.core.limits import MIB
from quire.stream.files import StreamFiles
from quire.stream.mlog_states import Hot, Hydration, Life, Remote, State, Warm
from quire.stream.segment import HEADER_BYTES, RecordBlock, records_of
from quire.stream.segments import StreamSegment
from quire.stream.sources import VERIFY, Lost, Piece, StreamCache, hot_source, remote_source, warm_source

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore

BATCH_BYTES = 4 * MIB
"""Blocks are put together until a batch has so much."""
CACHE_BYTES = 16 * MIB
ASKS_MAX = 16
"""How often one reader asks the owner again before what it finds is an error."""
ATTEMPTS = 5
RETRY_SECONDS = 0.2
"""Of reads that the object store cannot do for a while; each pause is twice as long."""

_HOT, _WARM, _REMOTE = 0, 1, 2
_ANY = State(Life.SEALED, Warm.DONE, Remote.DONE, Hot.RESIDENT, Hydration.IDLE)
"""Where the copies are is found out by looking: the owner may have moved them since."""


class SharedSegment(msgspec.Struct, frozen=True, array_like=True):
    """One segment of a share."""

    segment_id: int
    base_record: int
    end_record: int
    """Behind its last record; of the open one: of its last durable record."""
    stored_bytes: int
    """Of the hot file, up to `end_record`."""
    crc64: int
    """Of those bytes, if it is sealed."""
    sealed_ms: int
    """0: it is open."""
    warm_bytes: int = 0
    key: str = ""
    """Of its object; empty if there is none."""


class SharedStream(msgspec.Struct, frozen=True, array_like=True):
    """Segments of a stream, and where the rest is."""

    store_id: str
    stream_id: int
    root: str
    """The store's directory, on the owner's machine."""
    objects_url: str
    first_record: int
    end_record: int
    segments: tuple[SharedSegment, ...] = ()
    """Those with records of what was asked for, in order; no more than one answer has room for."""


Locate = Callable[[int, int, bool], SharedStream]


class SharedReader:
    """Reads records of one stream."""

    def __init__(
        self,
        files: StreamFiles | None,
        store: Callable[[], ObjectStore],
        stream_id: int,
        locate: Locate,
        *,
        uploads: bool = True,
    ) -> None:
        self._files = files if files is not None and os.path.isdir(files.home) else None
        self._store = store
        self._stream_id = stream_id
        self._locate = locate
        self._uploads = uploads and self._files is None
        self._cache: StreamCache = ByteCache(CACHE_BYTES)

    def batches(self, segments: tuple[SharedSegment, ...], start: int, stop: int) -> Iterator[Any]:
        """Record batches (`reading.SCHEMA`) of the records in [start, stop); `segments` have them, as far as is known."""
        from quire.stream.arrow_batches import BATCH_ROWS  # loads Arrow; who wants pieces does without

        columns: list[Any] = []
        begins: list[tuple[int, int]] = []
        rows = size = 0
        for block, body in self.pieces(segments, start, stop):
            column, begin = _column(block, body, start, stop)
            columns.append(column)
            begins.append((begin, block.timestamp_ms))
            rows += len(column)
            size += block.body_bytes
            if rows >= BATCH_ROWS or size >= BATCH_BYTES:
                yield _batch(columns, begins)
                columns, begins, rows, size = [], [], 0, 0
        if columns:
            yield _batch(columns, begins)

    def pieces(self, segments: tuple[SharedSegment, ...], position: int, stop: int) -> Iterator[Piece]:
        """The blocks that have these records."""
        bad: set[tuple[SharedSegment, int]] = set()
        error: QuireError = CursorLost("these records are no longer retained", start=position)
        asked = 0
        while position < stop:
            segment = _holding(segments, position)
            tier = next((tier for tier in self._tiers(segment) if (segment, tier) not in bad), None)
            if segment is None or tier is None:
                fresh = self._ask(position, stop)
                asked += 1
                if (segment is not None and _holding(fresh, position) == segment) or asked > ASKS_MAX:
                    raise error  # rule 2: nothing has moved
                segments = fresh
                continue
            try:
                for block, body in self._of_copy(segment, tier, position, min(stop, segment.end_record)):
                    yield block, body
                    position = block.end_record
                if position < min(stop, segment.end_record):
                    raise Lost(_short(segment))
            except Lost as lost:
                bad.add((segment, tier))
                error = lost.error
                emit(
                    "info", "stream.shared_copy_lost", stream=self._stream_id, segment_id=segment.segment_id, tier=tier,
                    error=str(error),
                )  # fmt: skip

    def _ask(self, position: int, stop: int) -> tuple[SharedSegment, ...]:
        segments = self._locate(position, stop, self._uploads).segments
        there = _holding(segments, position)
        if there is not None and self._files is None and not there.key:
            raise InvalidInput(
                "these records are not uploaded yet, and the store's directory is not reachable from here",
                hint='option("upload", "auto") uploads them',
                record=position,
                segment=there.segment_id,
            )
        return segments

    def _tiers(self, segment: SharedSegment | None) -> list[int]:
        """The order of copies to try: hot file, compressed file, object (rule 1)."""
        if segment is None:
            return []
        return ([_HOT, _WARM] if self._files is not None else []) + ([_REMOTE] if segment.key else [])

    def _of_copy(self, shared: SharedSegment, tier: int, position: int, stop: int) -> Iterator[Piece]:
        segment = _segment(shared)
        if tier == _REMOTE:
            source = remote_source(self._stream_id, segment, self._store(), self._cache, retried)
            yield from source.pieces(position, stop)
            return
        assert self._files is not None
        if tier == _WARM:
            with warm_source(self._files, segment, self._cache) as warm:
                yield from warm.pieces(position, stop)
            return
        with hot_source(self._files, segment, shared.stored_bytes) as hot:
            offset = hot.marks().with_record(position) if position > segment.base_record else HEADER_BYTES
            yield from hot.pieces(offset, stop)


def retried(work: Callable[[], bytes]) -> bytes:
    """Call again what the object store cannot do for a while."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return work()
        except Unavailable:
            time.sleep(RETRY_SECONDS * 2**attempt)
    return work()


def _holding(segments: tuple[SharedSegment, ...], record: int) -> SharedSegment | None:
    place = bisect_right(segments, record, key=lambda segment: segment.base_record) - 1
    return segments[place] if place >= 0 and record < segments[place].end_record else None


def _segment(shared: SharedSegment) -> StreamSegment:
    return StreamSegment(
        segment_id=shared.segment_id,
        base_record=shared.base_record,
        end_record=shared.end_record,
        epoch=0,
        opened_ms=0,
        sealed_ms=shared.sealed_ms,
        state=_ANY,
        durable_bytes=shared.stored_bytes,
        crc64=shared.crc64,
        warm_bytes=shared.warm_bytes,
        dictionary_id=0,
        key=shared.key,
        etag="",
    )


def _short(segment: SharedSegment) -> Corruption:
    return Corruption("a segment's copy ends before its records do", hint=VERIFY, segment=segment.segment_id)


def _column(block: RecordBlock, body: Any, start: int, stop: int) -> tuple[Any, int]:
    """The records of a block within [start, stop), and the id of the first."""
    begin, end = max(start, block.first_record), min(stop, block.end_record)
    return records_of(block, body).slice(begin - block.first_record, end - begin), begin


def _batch(columns: list[Any], begins: list[tuple[int, int]]) -> Any:
    import numpy as np
    import pyarrow as pa

    from quire.stream.arrow_batches import SCHEMA

    payload = columns[0] if len(columns) == 1 else pa.concat_arrays(columns)
    counts = [len(column) for column in columns]
    ids = np.arange(begins[0][0], begins[0][0] + len(payload), dtype=np.uint64)
    stamps = np.repeat(np.array([stamp for _, stamp in begins], np.int64), counts)
    columns_out = [pa.array(ids), pa.array(stamps).view(SCHEMA.field("timestamp").type), payload]
    return pa.RecordBatch.from_arrays(columns_out, schema=SCHEMA)
