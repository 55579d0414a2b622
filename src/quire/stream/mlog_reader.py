"""Reads a manifest log: verifies a chunk before it returns any of its records, and returns records without copying them.

Before a chunk yields anything, its header is settled (see `mlog_format`), its checksums match, and its records follow each
other without gaps up to exactly `committed_len`. Bytes after that are a torn tail: not read, and not an error. Across chunks,
indexes are consecutive, `base_record` continues from the previous chunk, and every chunk but the last is sealed (S2). One chunk
is in memory at a time.

Importable on executors. Threads: chunks and views are immutable; a reader or cursor belongs to one thread.
Format: docs/formats/manifest-log.md. Raises: `ManifestIntegrityError`, `FormatTooNew`, and what the disk raises."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from quire.durable.checksums import crc64, crc64_rows
from quire.durable.files import read_all
from quire.stream.files import LogFiles
from quire.stream.mlog_format import (
    CHUNK_BYTES,
    NO_IDENTITY,
    RECORD,
    RECORD_BYTES,
    ChunkFacts,
    ChunkHeader,
    Identity,
    damaged,
    settle,
)
from quire.stream.mlog_records import Payload, RecordType, SnapshotMarker, decode

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOGETHER_RECORDS = 512
"""A chunk with at least this many records is checked with numpy."""
TOGETHER_PAYLOAD_BYTES = 24
"""Payloads longer than this are checked one by one: numpy would take longer than one call for each."""
_NOT_IN_A_HEAD = 0x7_FFFF_0000
"""Bits of a record's first eight bytes that must be 0: the flags, and the low bits of the length, a multiple of 8."""

Fetch = Callable[[int], "Chunk | None"]
"""Returns a chunk that is not on the disk, or the bundle that contains it, from tier 2; `None` if tier 2 has neither."""


class LogPosition(NamedTuple):
    """The position at which a record starts; compares in log order."""

    chunk_index: int
    offset: int


START = LogPosition(0, CHUNK_BYTES)


class RecordView:
    """A view of one record in its chunk."""

    __slots__ = ("chunk", "logical_offset", "offset", "payload_len", "record_type", "segment_id", "timestamp_ms")

    def __init__(self, chunk: Chunk, offset: int) -> None:
        self.chunk = chunk
        self.offset = offset
        self.payload_len: int
        self.segment_id: int
        self.record_type: int
        self.logical_offset: int
        self.timestamp_ms: int
        (self.record_type, _, self.payload_len, self.segment_id, self.logical_offset, self.timestamp_ms, _) = (
            RECORD.unpack_from(chunk.data, offset)
        )

    @property
    def position(self) -> LogPosition:
        return LogPosition(self.chunk.index, self.offset)

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.offset + RECORD_BYTES + self.payload_len

    @property
    def payload(self) -> memoryview:
        """The payload's bytes, without a copy."""
        return memoryview(self.chunk.data)[self.offset + RECORD_BYTES : self.end]

    @property
    def raw(self) -> bytes:
        """A copy of header and payload, as bundles and snapshots store them."""
        return self.chunk.data[self.offset : self.end]

    def value(self) -> Payload:
        """Decode the payload."""
        return decode(
            self.record_type, bytes(self.payload), chunk=self.chunk.index, segment=self.segment_id, offset=self.offset
        )


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """A chunk of which every committed byte has been verified."""

    data: bytes
    header: ChunkHeader
    offsets: Sequence[int]
    snapshot_id: int
    """The id in the newest snapshot marker up to the end of this chunk, as the chunk states it; 0 for none."""
    last_index: int
    """The chunk's index; for a bundle, the index of its last chunk."""
    places: NDArray[np.int64] | None = None
    """The offsets divided by eight, for numpy; only for chunks with many records."""
    identity: Identity = NO_IDENTITY

    @property
    def index(self) -> int:
        return self.header.chunk_index

    @property
    def facts(self) -> ChunkFacts:
        return ChunkFacts(self.header, len(self.offsets), self.snapshot_id, self.identity)

    @property
    def end(self) -> LogPosition:
        """The position after the last committed record."""
        return LogPosition(self.index, self.header.committed_len)

    def records(self, skip: int = 0) -> Iterator[RecordView]:
        """Yield the records after the first `skip` ones."""
        for offset in self.offsets[skip:]:
            yield RecordView(self, offset)

    def place(self, offset: int) -> int:
        """Return how many records start before `offset`, which must be the start of a record or the end of the chunk."""
        if offset == CHUNK_BYTES:
            return 0
        if offset == self.header.committed_len:
            return len(self.offsets)
        place = bisect_left(self.offsets, offset)
        if place == len(self.offsets) or self.offsets[place] != offset:
            raise damaged("no record starts at this offset", chunk=self.index, offset=offset)
        return place


def load_chunk(
    data: bytes, *, chunk_index: int, last_index: int | None = None, path: str = "", owner: Identity = NO_IDENTITY
) -> Chunk:
    """Verify the bytes of a chunk's file or object. `last_index` is for bundles, which begin with a marker.

    `owner` is the expected identity; by default it is not checked.
    """
    header, copy = settle(data, chunk_index=chunk_index, path=path, owner=owner)
    offsets = walk(data, CHUNK_BYTES, header.committed_len, chunk=chunk_index, path=path)
    places = _places(offsets)
    check_payloads(data, offsets, places, chunk=chunk_index, path=path)
    if copy is not None and copy.record_count != len(offsets):
        raise damaged("the chunk's record count differs from what was committed", chunk=chunk_index, offset=0)
    snapshot_id = copy.snapshot_id if copy is not None else _newest_marker(data, offsets, chunk_index)
    last = chunk_index
    if last_index is not None:
        last = last_index
        del offsets[0]
        places = places[1:] if places is not None else None
    identity = copy.identity if copy is not None else NO_IDENTITY
    return Chunk(data, header, offsets, snapshot_id, last, places, identity)


def walk(data: bytes, start: int, end: int, *, chunk: int, path: str = "") -> list[int]:
    """Return the offsets of the records between two offsets."""
    words = memoryview(data)[: end & ~7].cast("Q") if sys.byteorder == "little" else _swapped(data[: end & ~7])
    offsets: list[int] = []
    add = offsets.append
    at, last = start >> 3, end >> 3
    head = RECORD_BYTES >> 3
    while at < last - head:
        first = words[at]  # type, flags, length of the payload
        length = first >> 35
        if not length or first & _NOT_IN_A_HEAD:
            break
        add(at << 3)
        at += head + length
    if at != last:
        raise damaged(
            "the records of a chunk do not follow each other", chunk=chunk, offset=min(at, last) << 3, path=path
        )
    return offsets


def check_payloads(
    data: bytes, offsets: Sequence[int], places: NDArray[np.int64] | None, *, chunk: int, path: str = ""
) -> None:
    """Compare every payload with its `payload_crc64`."""
    if places is not None:
        bad = _bad_payload(data, places)
    else:
        bad = next((offset for offset in offsets if not _fits(data, offset)), None)
    if bad is not None:
        segment = RECORD.unpack_from(data, bad)[3]
        raise damaged("a record's payload fails its checksum", chunk=chunk, segment=segment, offset=bad, path=path)


class ManifestLogReader:
    """The chunks of one log, in order."""

    def __init__(self, files: LogFiles, fetch: Fetch | None = None) -> None:
        self._files = files
        self._fetch = fetch

    def chunk(self, index: int) -> Chunk:
        """Read one chunk from the disk, or from tier 2 if it is not there."""
        path = self._files.chunk(index)
        try:
            data = read_all(self._files.disk, path)
        except FileNotFoundError:
            fetched = self._fetch(index) if self._fetch is not None else None
            if fetched is None:
                hint = "pass the object store if the chunk was uploaded; otherwise restore the file from a copy"
                raise damaged(
                    "a chunk of the manifest log is missing", chunk=index, offset=0, path=path, hint=hint
                ) from None
            return fetched
        return load_chunk(data, chunk_index=index, path=path, owner=self._files.identity)

    def chunks(self, start: int | None = None) -> Iterator[Chunk]:
        """Yield the chunks from index `start` on (default: the first local one), each checked against its predecessor."""
        here = self._files.chunks()
        if not here:
            return
        index = here[0] if start is None else start
        expected = 0 if index == 0 else None
        while index <= here[-1]:
            chunk = self.chunk(index)
            check_sequence(chunk.header, expected, is_last=chunk.last_index >= here[-1])
            yield chunk
            expected = chunk.facts.next_record
            index = chunk.last_index + 1

    def cursor(self, start: LogPosition = START) -> LogCursor:
        """Return a cursor that reads from a position in bounded steps."""
        return LogCursor(self, self._files, start)


def check_sequence(header: ChunkHeader, expected: int | None, *, is_last: bool) -> None:
    """Check that a chunk continues its predecessor, and that it is sealed unless it is the last."""
    if expected is not None and header.base_record != expected:
        raise damaged(
            "the chunk does not continue where the previous one ended",
            chunk=header.chunk_index,
            offset=0,
            base_record=header.base_record,
            expected=expected,
        )
    if not is_last and not header.sealed:
        raise damaged("a chunk is not sealed, yet a later one exists", chunk=header.chunk_index, offset=0)


class LogCursor:
    """A position in the log that advances as records are read."""

    def __init__(self, reader: ManifestLogReader, files: LogFiles, start: LogPosition) -> None:
        self.position = start
        self._reader = reader
        self._files = files

    def read(self, records_max: int) -> list[RecordView]:
        """Return up to `records_max` records, none at the current end of the log. Includes records committed meanwhile."""
        offsets: list[RecordView] = []
        here = self._files.chunks()
        while here and self.position.chunk_index <= here[-1] and len(offsets) < records_max:
            chunk = self._reader.chunk(self.position.chunk_index)
            place = chunk.place(self.position.offset)
            taken = chunk.offsets[place : place + records_max - len(offsets)]
            offsets.extend(RecordView(chunk, offset) for offset in taken)
            if taken:
                self.position = LogPosition(chunk.index, offsets[-1].end)
            if place + len(taken) < len(chunk.offsets) or not chunk.header.sealed:
                break
            self.position = LogPosition(chunk.index + 1, CHUNK_BYTES)
        return offsets


def _newest_marker(data: bytes, offsets: Sequence[int], chunk: int) -> int:
    for offset in reversed(offsets):
        record_type, _, length, *_ = RECORD.unpack_from(data, offset)
        if record_type == RecordType.SNAPSHOT_MARKER:
            start = offset + RECORD_BYTES
            value = decode(record_type, data[start : start + length], chunk=chunk, offset=offset)
            assert isinstance(value, SnapshotMarker)
            return value.snapshot_id
    return 0


def _fits(data: bytes, offset: int) -> bool:
    _, _, length, _, _, _, checksum = RECORD.unpack_from(data, offset)
    start = offset + RECORD_BYTES
    return bool(crc64(data[start : start + length]) == checksum)


def _places(offsets: Sequence[int]) -> NDArray[np.int64] | None:
    if len(offsets) < TOGETHER_RECORDS:
        return None
    return np.array(offsets, np.int64) >> 3


def _bad_payload(data: bytes, at: NDArray[np.int64]) -> int | None:
    """Return the offset of the first record whose payload fails its checksum; payloads are grouped by length."""
    words = np.frombuffer(data, "<u8", count=len(data) // 8)
    lengths = (words[at] >> np.uint64(32)).astype(np.int64)
    wrong: list[int] = []
    for length in (np.flatnonzero(np.bincount(lengths >> 3)) << 3).tolist():
        chosen = at[lengths == length]
        expected = words[chosen + RECORD_BYTES // 8 - 1]
        if length > TOGETHER_PAYLOAD_BYTES:
            starts = ((chosen << 3) + RECORD_BYTES).tolist()
            checksums = np.array([crc64(data[start : start + length]) for start in starts], np.uint64)
        else:
            columns = np.arange(RECORD_BYTES // 8, (RECORD_BYTES + length) // 8)
            rows = words[chosen[:, None] + columns].view(np.uint8)
            checksums = crc64_rows(rows, np.zeros(len(chosen), np.uint64))
        wrong += (chosen[checksums != expected] << 3).tolist()
    return min(wrong, default=None)


def _swapped(data: bytes) -> array[int]:
    words = array("Q", data)
    words.byteswap()
    return words
