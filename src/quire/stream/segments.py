"""The segments of a stream, for readers and movers: immutable values, looked up by record.

Everything is derived from the index of the manifest log. A *view* is all segments at one moment, in the order of their
records; it is replaced, never modified. A segment whose copies moved is a different value: a reader that lost a race detects
it by that.

Threads: any; views are replaced as a whole. Importable on executors."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from quire.stream.mlog_format import RECORD
from quire.stream.mlog_index import Entry, ManifestIndex, SegmentInfo
from quire.stream.mlog_records import RecordType
from quire.stream.mlog_states import Hot, Life, Remote, State, Warm

_LOGICAL_OFFSET, _TIMESTAMP = 4, 5
"""Positions of two fields in a record's header."""


class StreamSegment(msgspec.Struct, frozen=True, kw_only=True):
    """One segment."""

    segment_id: int
    base_record: int
    """The id of its first record."""
    end_record: int
    """The id after its last record; 0 while it is open."""
    epoch: int
    opened_ms: int
    sealed_ms: int
    state: State
    durable_bytes: int
    """Size of the hot copy."""
    crc64: int
    warm_bytes: int
    """Size of the compressed copy; 0 if the segment was never compressed."""
    dictionary_id: int
    key: str
    """Key of its object; empty if no upload was ever started."""
    etag: str

    @property
    def is_sealed(self) -> bool:
        return self.state.life is Life.SEALED

    @property
    def is_hot(self) -> bool:
        return self.state.hot is Hot.RESIDENT

    @property
    def is_warm(self) -> bool:
        return self.state.warm is Warm.DONE

    @property
    def is_remote(self) -> bool:
        return self.state.remote is Remote.DONE

    @property
    def is_being_removed(self) -> bool:
        """Whether retention has begun to remove it."""
        return self.state.remote in (Remote.DELETING, Remote.DELETED)

    @property
    def records(self) -> int:
        return max(self.end_record - self.base_record, 0)


class SegmentList(msgspec.Struct, frozen=True):
    """All segments at one moment."""

    segments: tuple[StreamSegment, ...]
    bases: tuple[int, ...]

    def __iter__(self) -> Iterator[StreamSegment]:
        return iter(self.segments)

    def get(self, segment_id: int) -> StreamSegment | None:
        """Return a segment by id."""
        place = bisect_left(self.segments, segment_id, key=lambda segment: segment.segment_id)
        segment = self.segments[place] if place < len(self.segments) else None
        return segment if segment is not None and segment.segment_id == segment_id else None

    def holding(self, record: int) -> StreamSegment | None:
        """Return the segment that has a record, or will have it."""
        place = bisect_right(self.bases, record) - 1
        return self.segments[place] if place >= 0 else None

    def before(self, timestamp_ms: int) -> StreamSegment | None:
        """Return the last segment opened before a timestamp: records at or after that timestamp are in it or in later ones."""
        place = bisect_left(self.segments, timestamp_ms, key=lambda segment: segment.opened_ms) - 1
        return self.segments[max(place, 0)] if self.segments else None

    @property
    def sealed(self) -> list[StreamSegment]:
        """The sealed segments, oldest first."""
        return [segment for segment in self.segments if segment.is_sealed]


EMPTY = SegmentList((), ())


def view_of(index: ManifestIndex, before: SegmentList = EMPTY, changed: frozenset[int] | None = None) -> SegmentList:
    """Return the view of an index. With `changed`, only those segments differ from `before`."""
    known = {segment.segment_id: segment for segment in before} if changed is not None else {}
    segments = [
        known[number]
        if changed is not None and number not in changed and number in known
        else _segment(number, index.entries[number], index)
        for number in sorted(index.entries)
    ]
    for place, (segment, following) in enumerate(pairwise(segments)):
        if segment.is_sealed and not segment.records:
            # A record of `catch_up` may lack the segment's end. An empty segment never has a successor.
            segments[place] = msgspec.structs.replace(segment, end_record=following.base_record)
    return SegmentList(tuple(segments), tuple(segment.base_record for segment in segments))


def _segment(segment_id: int, entry: Entry, index: ManifestIndex) -> StreamSegment:
    info = index.get(segment_id)
    assert info is not None
    opened, sealed = entry[RecordType.SEGMENT_OPENED + 1], entry[RecordType.SEAL_SEGMENT + 1]
    return StreamSegment(
        segment_id=segment_id,
        base_record=_number(info, RecordType.SEGMENT_OPENED, "base_offset"),
        end_record=RECORD.unpack_from(sealed)[_LOGICAL_OFFSET] if sealed is not None else 0,
        epoch=_number(info, RecordType.SEGMENT_OPENED, "epoch"),
        opened_ms=RECORD.unpack_from(opened)[_TIMESTAMP],
        sealed_ms=RECORD.unpack_from(sealed)[_TIMESTAMP] if sealed is not None else 0,
        state=info.state,
        durable_bytes=_number(info, RecordType.SEAL_SEGMENT, "durable_bytes"),
        crc64=_number(info, RecordType.SEAL_SEGMENT, "segment_crc64"),
        warm_bytes=_number(info, RecordType.COMPRESSION_DONE, "compressed_bytes"),
        dictionary_id=_number(info, RecordType.COMPRESSION_DONE, "dictionary_id"),
        key=info.field(RecordType.UPLOAD_STARTED, "key") or "",
        etag=info.field(RecordType.UPLOAD_DONE, "etag") or "",
    )


def _number(info: SegmentInfo, kind: RecordType, name: str) -> int:
    return int(info.field(kind, name) or 0)
