"""The segment that a stream is writing, and what is told when it ends and the next one begins.

Threads: written by whoever holds the log's writing lock; readers look at blocks below the durable mark.
Format page: `docs/formats/stream-segment.md`.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from quire.durable.checksums import crc64
from quire.durable.files import File
from quire.stream.segment import HEADER_BYTES, SegmentHeader


class Sealed(NamedTuple):
    """A segment that takes no more records."""

    segment_id: int
    base_record: int
    end_record: int
    durable_bytes: int
    crc64: int
    blocks: int


class Opened(NamedTuple):
    """A segment that begins."""

    segment_id: int
    base_record: int


class Newest(NamedTuple):
    """Records that have just become durable: whoever waits for them need not read the file."""

    first: int
    timestamp_ms: int
    payloads: list[bytes]
    """Nobody adds to it any more."""


class OpenSegment:
    """The segment that is being written, and where its blocks are."""

    __slots__ = ("capacity", "crc", "file", "firsts", "header", "offset", "offsets", "opened_at", "stamps", "written")

    def __init__(self, file: File, header: SegmentHeader, capacity: int, opened_at: float) -> None:
        self.file = file
        self.header = header
        self.capacity = capacity
        self.opened_at = opened_at
        self.offset = HEADER_BYTES
        """Where the next block goes."""
        self.written = header.base_record
        """The id behind the last record in it."""
        self.crc = crc64(header.encode())
        self.firsts, self.offsets, self.stamps = array("Q"), array("Q"), array("Q")
        """Of its blocks. Appended to by the writer alone; readers look at those below the durable mark."""

    @property
    def segment_id(self) -> int:
        return self.header.segment_id

    def sealed(self) -> Sealed:
        """What it is when it ends now."""
        header = self.header
        return Sealed(header.segment_id, header.base_record, self.written, self.offset, self.crc, len(self.offsets))
