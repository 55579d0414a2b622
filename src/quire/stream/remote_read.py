"""Reading a stream from other processes: the owner describes it (`share`), and readers read it without the owner.

A *share* describes a part of a stream at one moment, as a small value that can be sent. It covers durable records only: for
the open segment it states how far its file may be read. A process that sees the store's directory reads the files; any other
reads the objects, and only the frames that it needs. Blocks are verified as the owner verifies them, so that a recycled file
cannot pass for the segment that was shared.

Threads: a reader belongs to one. `SharedReader` is importable on executors.
Raises: `CursorLost` (never a silent gap), `Corruption`, `ObjectNotFound`, `Unavailable`, `InvalidInput`, `OutOfRange`.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.cache import ByteCache
from quire.core.errors import Corruption, CursorLost, InvalidInput, QuireError
from quire.core.events import emit
from quire.core.limits import MIB
from quire.core.timeline import Gap, Gaps, skip_gap
from quire.durable.files import directories_id
from quire.stream.files import StreamFiles
from quire.stream.gaps import begin_within
from quire.stream.segment import HEADER_BYTES
from quire.stream.segments import StreamSegment
from quire.stream.sources import (
    VERIFY,
    Lost,
    StreamCache,
    hot_source,
    record_batches,
    remote_source,
    retried,
    warm_source,
)
from quire.stream.spans import RecordSpan

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore
    from quire.stream.stream import Stream

BATCH_BYTES = 4 * MIB
"""Blocks are joined until a batch has this size."""
CACHE_BYTES = 16 * MIB
ASKS_MAX = 16
"""How often one read locates segments again before a missing copy is an error."""
ATTEMPTS = 5
RETRY_SECONDS = 0.2
"""The first pause between attempts while the object store is unavailable; each further one is twice as long."""
SEGMENTS_MAX = 8_192
"""Most segments in one share: about 1 MiB. A reader that needs more requests another share from the end of the last one."""

_HOT, _WARM, _REMOTE = 0, 1, 2


class SharedSegment(msgspec.Struct, frozen=True, array_like=True):
    """One segment of a share."""

    segment_id: int
    base_record: int
    end_record: int
    """The id after its last record; for the open segment, after its last durable record."""
    stored_bytes: int
    """Bytes of the hot file up to `end_record`."""
    crc64: int
    """Checksum of those bytes, if the segment is sealed."""
    sealed_ms: int
    """When it was sealed; 0 while it is open."""
    warm_bytes: int = 0
    key: str = ""
    """Key of its object; empty if it has none."""

    @property
    def durable_bytes(self) -> int:
        return self.stored_bytes


class SharedStream(msgspec.Struct, frozen=True, array_like=True):
    """Segments of a stream, and the locations of its files and objects."""

    store_id: str
    stream_id: int
    root: str
    """The store's directory, on the owner's machine."""
    objects_url: str
    first_record: int
    end_record: int
    segments: tuple[SharedSegment, ...] = ()
    """The segments with requested records, in order; at most as many as one share can have."""
    gaps: tuple[Gap, ...] = ()
    """Record ids that takeovers have skipped."""


class PolledStream(msgspec.Struct, frozen=True, array_like=True):
    """A stream as a consumer of many streams sees it."""

    name: str
    """Its current name; empty if it was dropped and can be brought back."""
    position: int = 0
    """The first record that the consumer has not acknowledged; 0 if the stream has no such consumer."""
    end_record: int = 0
    gaps: tuple[Gap, ...] = ()


Locate = Callable[[int, int, bool], SharedStream]
"""Requests a new share from the owner: (start, stop, upload) → share."""


# ── at the owner ──────────────────────────────────────────────────────────────────────────────────────────────────────
def share(
    stream: Stream,
    start: int | None,
    stop: int | None,
    *,
    upload: bool = False,
    store_id: str = "",
    objects_url: str = "",
) -> SharedStream:
    """Return the segments with records of [start, stop); by default of all retained, durable records.

    With `upload`, every requested record is in an object when this returns.
    """
    first, end = stream.first_record, stream.end_record
    begin = first if start is None else begin_within(stream.gaps, start, first, end)
    last = end if stop is None else min(stop, end)
    if upload and begin < last:
        _upload(stream, begin, last)
    shared: list[SharedSegment] = []
    for segment in stream.segments():
        if len(shared) >= SEGMENTS_MAX:
            break
        if segment.base_record < last and segment.end_record > begin and begin < last:
            shared.append(segment)
    gaps = tuple(stream.gaps)
    return SharedStream(store_id, stream.stream_id, stream.files.root, objects_url, first, end, tuple(shared), gaps)


def _upload(stream: Stream, begin: int, last: int) -> None:
    """Upload every requested record; seal the open segment first if it has some of them."""
    view = stream.ledger.view.segments
    if view and not view[-1].is_sealed and last > view[-1].base_record:
        stream.seal()
    for segment in stream.ledger.view:
        if segment.is_sealed and not segment.is_remote and segment.base_record < last and segment.end_record > begin:
            stream.tiers.upload(segment.segment_id)


def shared_segments(stream: Stream) -> Iterator[SharedSegment]:
    """Yield the segments of an open stream, as other processes read them."""
    durable = stream.end_record
    for segment in stream.ledger.view:
        if (entry := _shared(stream, segment, durable)) is not None:
            yield entry


def _shared(stream: Stream, segment: StreamSegment, durable: int) -> SharedSegment | None:
    """Return a segment as other processes see it; `None` if it has no records for them."""
    if segment.is_being_removed:
        return None
    if segment.is_sealed:
        key = segment.key if segment.is_remote else ""
        return SharedSegment(
            segment.segment_id, segment.base_record, segment.end_record, segment.durable_bytes, segment.crc64,
            segment.sealed_ms, segment.warm_bytes, key,
        )  # fmt: skip
    live = stream.hot.segment
    if live is None or live.segment_id != segment.segment_id:  # just sealed: the next share has it
        return None
    if durable <= segment.base_record:
        return None
    return SharedSegment(segment.segment_id, segment.base_record, durable, live.end_of(durable), 0, 0)


# ── in other processes ────────────────────────────────────────────────────────────────────────────────────────────────
class SharedReader:
    """Reads records of one stream in another process."""

    def __init__(
        self,
        files: StreamFiles | None,
        store: Callable[[], ObjectStore],
        stream_id: int,
        locate: Locate,
        *,
        uploads: bool = True,
        gaps: Gaps = (),
    ) -> None:
        """`uploads`: whether the reader may request the upload of records that are only in the owner's files. `gaps`: record
        ids that takeovers have skipped."""
        self._files = files if files is not None and os.path.isdir(files.home) else None
        self._store = store
        self._stream_id = stream_id
        self._locate = locate
        self._uploads = uploads and self._files is None
        self.gaps = gaps
        self._cache: StreamCache = ByteCache(CACHE_BYTES)

    def batches(self, segments: tuple[SharedSegment, ...], start: int, stop: int) -> Iterator[Any]:
        """Yield record batches (`arrow_batches.SCHEMA`) of [start, stop). `segments` are those known to have the records."""
        yield from record_batches(self.spans(segments, start, stop), BATCH_BYTES)

    def spans(self, segments: tuple[SharedSegment, ...], position: int, stop: int) -> Iterator[RecordSpan]:
        """Yield the records of [position, stop)."""
        bad: set[tuple[SharedSegment, int]] = set()
        error: QuireError = CursorLost("these records are no longer retained", start=position)
        asked, version = 0, self._version()
        while (position := skip_gap(self.gaps, position)) < stop:
            segment = _holding(segments, position)
            tier = next((tier for tier in self._tiers(segment) if (segment, tier) not in bad), None)
            if segment is None or tier is None:
                fresh = self._ask(position, stop)
                asked += 1
                if (now := self._version()) != version:
                    version = now
                    bad.clear()  # the copies were missing while the directories were replaced
                elif segment is not None and _holding(fresh, position) == segment:
                    raise error  # the owner reports the same segment: nothing has moved, so the copy is damaged
                if asked > ASKS_MAX:
                    raise error
                segments = fresh
                continue
            end = min(stop, segment.end_record)
            try:
                for span in self._of_copy(segment, tier, position, end):
                    yield span.within(position, end)
                    position = min(span.end_record, end)
                if position < end:
                    raise Lost(_short(segment))
            except Lost as lost:
                bad.add((segment, tier))
                error = lost.error
                emit(
                    "info", "stream.shared_copy_lost", stream=self._stream_id, segment_id=segment.segment_id, tier=tier,
                    error=str(error),
                )  # fmt: skip

    def _version(self) -> int:
        """Return a number that changes when a standby replaces the directories."""
        return directories_id(self._files.disk) if self._files is not None else 0

    def _ask(self, position: int, stop: int) -> tuple[SharedSegment, ...]:
        segments = self._locate(position, stop, self._uploads).segments
        segment = _holding(segments, position)
        if segment is not None and self._files is None and not segment.key:
            raise InvalidInput(
                "these records are not uploaded yet, and this executor cannot access the store's directory",
                hint='upload them with option("upload", "auto")',
                record=position,
                segment=segment.segment_id,
            )
        return segments

    def _tiers(self, segment: SharedSegment | None) -> list[int]:
        """Return the tiers to try, in order. Which copies exist is found by trying: the owner may have moved them since."""
        if segment is None:
            return []
        tiers = [_REMOTE] if segment.key else []
        if self._files is not None:
            tiers = [_HOT, *([_WARM] if segment.sealed_ms else []), *tiers]  # an open segment has no compressed copy
        return tiers

    def _of_copy(self, segment: SharedSegment, tier: int, position: int, stop: int) -> Iterator[RecordSpan]:
        if tier == _REMOTE:
            retry = partial(retried, stream_id=self._stream_id, attempts=ATTEMPTS, pause_seconds=RETRY_SECONDS)
            source = remote_source(self._stream_id, segment, self._store(), self._cache, retry)
            yield from source.spans(position, stop)
            return
        assert self._files is not None
        if tier == _WARM:
            with warm_source(self._files, segment, self._cache) as warm:
                yield from warm.spans(position, stop)
            return
        with hot_source(self._files, segment, segment.stored_bytes) as hot:
            offset = hot.marks().with_record(position) if position > segment.base_record else HEADER_BYTES
            yield from hot.spans(offset, stop)


def _holding(segments: tuple[SharedSegment, ...], record: int) -> SharedSegment | None:
    place = bisect_right(segments, record, key=lambda segment: segment.base_record) - 1
    return segments[place] if place >= 0 and record < segments[place].end_record else None


def _short(segment: SharedSegment) -> Corruption:
    return Corruption("a segment's copy ends before its records do", hint=VERIFY, segment=segment.segment_id)
