"""The format of a compressed segment, in tiers 1 and 2, and the compression dictionaries of a stream.

A frame is a run of whole blocks of the raw segment, compressed separately; the first one begins with the segment's header. The
table has one row per frame; with it and the footer, the last 64 bytes, a reader fetches only the frames it needs. The
decompressed frames, concatenated, are the raw segment, byte for byte. A dictionary, where it is worthwhile, is part of the
file, so that an object can be read on its own. Every part has a crc64; a frame's covers its compressed bytes, so damage is
found before zstd sees it. No size is trusted before it is compared with another one, so that a small file cannot cause a large
allocation.

Importable on executors. Memory: one frame, and the table. Threads: any (functions over a buffer or a `read(offset, size)`).
Format: docs/formats/stream-warm.md. Raises: `Corruption`, `FormatTooNew`, `InvalidInput`."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from quire.core.errors import Corruption, FormatTooNew
from quire.core.limits import KIB, MIB
from quire.durable.checksums import Bytes, crc64
from quire.stream.segment import BLOCK_HEAD_BYTES, HEADER_BYTES, Scan, StreamSegmentHeader, records_of
from quire.stream.spans import RecordSpan, spans_of

if TYPE_CHECKING:
    from quire.objects.api import ObjectStore

MAGIC = b"QSTRWRM1"
END_MAGIC = b"QSTREND1"
VERSION = 1

HEADER = struct.Struct("<8sHHIQQQQIIQ")
"""magic, version, flags (0), reserved (0), stream_id, segment_id, base_record, raw_bytes, dictionary_id, frames, crc64"""
ROW = struct.Struct("<QQIIQQQ")
"""raw_offset, offset, bytes, raw_bytes, first_record, timestamp_ms, crc64"""
FOOTER = struct.Struct("<8sQQIIQQQQ")
"""magic, table_offset, dictionary_offset, dictionary_bytes, frames, end_record, table_crc64, raw_crc64, crc64"""

WARM_HEADER_BYTES = 64
ROW_BYTES = 48
FOOTER_BYTES = 64
CHECKED_BYTES = 56
"""Bytes of header and footer that their crc64 covers."""

FRAME_BYTES = 256 * KIB
"""Raw bytes in a frame: the amount that reading one record decompresses."""
FRAME_RAW_BYTES_MAX = 80 * MIB
"""The most that a frame may decompress to: one block of the largest record that a stream accepts (64 MiB), with a margin."""
LEVEL = 3
TAIL_BYTES = 64 * KIB
"""Bytes that a reader fetches first: the footer, and a table of up to 1,300 frames (340 MB of raw segment)."""

assert HEADER.size == WARM_HEADER_BYTES
assert ROW.size == ROW_BYTES
assert FOOTER.size == FOOTER_BYTES

Read = Callable[[int, int], bytes]
"""`read(offset, size)` of a file or object."""


class WarmFrame(NamedTuple):
    """A row of the table."""

    raw_offset: int
    offset: int
    bytes: int
    raw_bytes: int
    first_record: int
    timestamp_ms: int
    crc64: int


@cache
def row_dtype() -> np.dtype[np.void]:
    """Return the numpy type of `ROW` and `WarmFrame`."""
    kinds = ("<u8", "<u8", "<u4", "<u4", "<u8", "<u8", "<u8")
    return np.dtype(list(zip(WarmFrame._fields, kinds, strict=True)))


class Dictionary(NamedTuple):
    """A zstd dictionary, trained on a stream's records."""

    id: int
    """From 1; 0 means no dictionary."""
    body: bytes


NO_DICTIONARY = Dictionary(0, b"")


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def compress(raw: Bytes, segment: Scan, *, dictionary: Dictionary = NO_DICTIONARY) -> Iterator[bytes]:
    """Yield the parts of the compressed form of a sealed segment, in order. `segment` is the scan of `raw`."""
    header, view = segment.header, memoryview(raw)[: segment.cut]
    runs = _runs(segment)
    checked = HEADER.pack(
        MAGIC,
        VERSION,
        0,
        0,
        header.stream_id,
        header.segment_id,
        header.base_record,
        segment.cut,
        dictionary.id,
        len(runs),
        0,
    )[:CHECKED_BYTES]
    yield checked + crc64(checked).to_bytes(8, "little")
    dict_data = zstandard.ZstdCompressionDict(dictionary.body) if dictionary.id else None
    compressor = zstandard.ZstdCompressor(level=LEVEL, dict_data=dict_data, write_content_size=True)
    offset, rows = WARM_HEADER_BYTES, []
    for start, stop, first_record, stamp in runs:
        body = compressor.compress(view[start:stop])
        rows.append(ROW.pack(start, offset, len(body), stop - start, first_record, stamp, crc64(body)))
        offset += len(body)
        yield body
    appendix = dictionary.body + crc64(dictionary.body).to_bytes(8, "little") if dictionary.id else b""
    yield appendix
    table = b"".join(rows)
    yield table
    checked = FOOTER.pack(
        END_MAGIC,
        offset + len(appendix),
        offset,
        len(appendix),
        len(rows),
        segment.end_record,
        crc64(table),
        crc64(view),
        0,
    )[:CHECKED_BYTES]
    yield checked + crc64(checked).to_bytes(8, "little")


def _runs(segment: Scan) -> list[tuple[int, int, int, int]]:
    """Return (start, stop, first record, first timestamp) of each frame: whole blocks, about `FRAME_BYTES` in total."""
    if not segment.blocks:
        return [(0, segment.cut, segment.header.base_record, segment.header.created_at_ms)]
    runs = []
    first, start = segment.blocks[0], 0
    for block, following in zip(segment.blocks, [*segment.blocks[1:], None]):
        if following is None or following.end - start > FRAME_BYTES:
            runs.append((start, block.end, first.first_record, first.timestamp_ms))
            start = block.end
            first = following or first
    return runs


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class WarmReader:
    """Reads slices of a compressed segment through `read`."""

    def __init__(self, read: Read, size: int, *, path: str = "", raw_bytes: int | None = None) -> None:
        """Fetch the footer and the table, in one read if the table is short. `raw_bytes`: size of the raw segment, if known."""
        self._read = read
        self.path = path
        self.size_bytes = size
        start = max(size - TAIL_BYTES, 0)
        tail = read(start, size - start)
        footer = self._footer(tail)
        (
            _,
            self._table_at,
            self._dictionary_at,
            self._dictionary_bytes,
            frames,
            self.end_record,
            crc,
            self.raw_crc64,
            _,
        ) = footer
        table_bytes = frames * ROW_BYTES
        # Before the table is read: `frames` is untrusted, and would decide how much is allocated.
        if self._table_at + table_bytes + FOOTER_BYTES != size:
            raise self._damaged("its parts do not fit its size")
        inside = self._table_at - start
        table = tail[inside : inside + table_bytes] if inside >= 0 else read(self._table_at, table_bytes)
        if len(table) != table_bytes or crc64(table) != crc:
            raise self._damaged("its table differs from what was written")
        self._rows = np.frombuffer(table, row_dtype())
        self._check_table(raw_bytes)
        self._firsts: list[int] = self._rows["first_record"].tolist()
        self._stamps: list[int] = self._rows["timestamp_ms"].tolist()
        self._decompressor: zstandard.ZstdDecompressor | None = None
        self._header: StreamSegmentHeader | None = None

    def _check_table(self, raw_bytes: int | None) -> None:
        """Check that frames follow each other without gaps, in this file and in the raw segment, and that none is too large.

        A checksum does not prove who wrote the bytes, so sizes are compared with each other before they are trusted.
        """
        rows = self._rows
        if not len(rows):
            raise self._damaged("it has no frames")
        ends = WARM_HEADER_BYTES + np.cumsum(rows["bytes"], dtype=np.uint64)
        raw_ends = np.cumsum(rows["raw_bytes"], dtype=np.uint64)
        in_row = bool(
            rows["offset"][0] == WARM_HEADER_BYTES
            and rows["raw_offset"][0] == 0
            and (rows["offset"][1:] == ends[:-1]).all()
            and (rows["raw_offset"][1:] == raw_ends[:-1]).all()
            and int(ends[-1]) == self._dictionary_at
            and self._dictionary_at + self._dictionary_bytes == self._table_at
        )
        if not in_row:
            raise self._damaged("its frames do not follow each other")
        if int(rows["raw_bytes"].max()) > FRAME_RAW_BYTES_MAX or int(rows["raw_bytes"].min()) == 0:
            raise self._damaged("a frame has an impossible size")
        if raw_bytes is not None and int(raw_ends[-1]) != raw_bytes:
            raise self._damaged("it is not as long as the segment that was sealed", raw_bytes=raw_bytes)
        if self._dictionary_bytes and self._dictionary_bytes <= 8:
            raise self._damaged("its dictionary is too short")

    def _footer(self, tail: bytes) -> tuple[bytes, int, int, int, int, int, int, int, int]:
        raw = tail[-FOOTER_BYTES:]
        if len(raw) < FOOTER_BYTES or self.size_bytes < WARM_HEADER_BYTES + FOOTER_BYTES:
            raise self._damaged("it is too short")
        magic, *_, crc = fields = FOOTER.unpack(raw)
        if magic != END_MAGIC or crc64(raw[:CHECKED_BYTES]) != crc:
            raise self._damaged("its footer differs from what was written")
        return fields

    def _damaged(self, what: str, **where: int) -> Corruption:
        hint = "`quire stream verify` shows what is lost"
        return Corruption(f"a compressed segment is damaged: {what}", hint=hint, path=self.path, **where)

    @property
    def frames(self) -> int:
        """The number of frames."""
        return len(self._rows)

    @property
    def raw_bytes(self) -> int:
        """The size of the raw segment."""
        last = self.frame(self.frames - 1)
        return last.raw_offset + last.raw_bytes

    def frame(self, number: int) -> WarmFrame:
        """Return a row of the table."""
        return WarmFrame(*self._rows[number].tolist())

    def frame_with(self, record: int) -> int:
        """Return the number of the frame that contains a record."""
        return max(bisect_right(self._firsts, record) - 1, 0)

    def frame_at(self, timestamp_ms: int) -> int:
        """Return the last frame that begins before a timestamp: records at or after it are in that frame or in later ones."""
        return max(bisect_right(self._stamps, timestamp_ms - 1) - 1, 0)

    def header(self) -> StreamSegmentHeader:
        """Return the segment's header, from its first frame."""
        if self._header is None:
            self._header = StreamSegmentHeader.decode(self.raw(0), path=self.path)
        return self._header

    def raw(self, number: int) -> bytes:
        """Read, verify and decompress one frame."""
        row = self.frame(number)
        body = self._read(row.offset, row.bytes)
        if len(body) != row.bytes or crc64(body) != row.crc64:
            raise self._damaged("a frame differs from what was written", frame=number, offset=row.offset)
        try:
            # zstd allocates the size that the frame declares, whatever limit it is given: check that size first.
            if zstandard.frame_content_size(body) != row.raw_bytes:
                raise self._damaged("a frame declares the wrong length", frame=number, offset=row.offset)
            raw = self._zstd().decompress(body, max_output_size=row.raw_bytes)
        except zstandard.ZstdError as error:
            raise self._damaged(f"a frame does not decompress: {error}", frame=number, offset=row.offset) from error
        if len(raw) != row.raw_bytes:
            raise self._damaged("a frame has the wrong length", frame=number, offset=row.offset)
        return raw

    def spans(self, number: int) -> list[RecordSpan]:
        """Return the records of one frame; every block is verified."""
        raw, row, seed = self.raw(number), self.frame(number), self.header().crc64
        scanned = spans_of(memoryview(raw), row.raw_offset, seed, at=HEADER_BYTES if row.raw_offset == 0 else 0)
        if scanned.used_bytes != len(raw):
            offset = row.raw_offset + scanned.used_bytes
            raise self._damaged("a block differs from what was written", frame=number, offset=offset)
        return scanned.spans

    def dictionary(self) -> Dictionary:
        """Read the dictionary with which the segment was compressed."""
        if not self._dictionary_bytes:
            return NO_DICTIONARY
        raw = self._read(self._dictionary_at, self._dictionary_bytes)
        if crc64(raw[:-8]) != int.from_bytes(raw[-8:], "little"):
            raise self._damaged("its dictionary differs from what was written", offset=self._dictionary_at)
        return Dictionary(dictionary_of(self._read(0, WARM_HEADER_BYTES), path=self.path), raw[:-8])

    def _zstd(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            dict_data = None
            if self._dictionary_bytes:
                dict_data = zstandard.ZstdCompressionDict(self.dictionary().body)
            self._decompressor = zstandard.ZstdDecompressor(dict_data=dict_data)
        return self._decompressor

    def verify(self) -> int:
        """Read and verify everything; return the raw segment's crc64, which equals the footer's."""
        check_header(self._read(0, WARM_HEADER_BYTES), path=self.path)
        checksum = 0
        for number in range(self.frames):
            checksum = crc64(self.raw(number), checksum)
        if checksum != self.raw_crc64:
            raise self._damaged("its frames differ from the segment that was sealed")
        return checksum


def reader_of(data: Bytes, path: str, raw_bytes: int | None = None) -> WarmReader:
    """Return a reader of a compressed segment in memory."""
    view = memoryview(data)
    return WarmReader(
        lambda offset, size: bytes(view[offset : offset + size]), len(data), path=path, raw_bytes=raw_bytes
    )


def bounded(store: ObjectStore, key: str, raw_bytes: int) -> bytes:
    """Read a segment's object; raise `Corruption` if it is larger than a compressed segment of this raw size can be."""
    size = store.head(key).size_bytes
    # zstd expands incompressible bytes by less than 1/32; dictionary and table fit into the rest.
    if size > raw_bytes + raw_bytes // 32 + MIB:
        raise Corruption("an object exceeds its segment's maximum size", key=key, bytes=size, raw_bytes=raw_bytes)
    return store.get(key)


def check_header(raw: Bytes, *, path: str = "") -> tuple[int, int]:
    """Check the header of a compressed segment, its first 64 bytes, and return (stream_id, segment_id)."""
    if len(raw) < WARM_HEADER_BYTES:
        raise Corruption("a compressed segment is shorter than its header", path=path)
    magic, version, _, _, stream_id, segment_id, *_, crc = HEADER.unpack_from(raw)
    if magic != MAGIC or crc64(memoryview(raw)[:CHECKED_BYTES]) != crc:
        raise Corruption("this is not the header of a compressed segment", path=path)
    if version != VERSION:
        raise FormatTooNew(
            "this segment was compressed by a newer quire", hint="upgrade quire", version=version, path=path
        )
    return stream_id, segment_id


def header_fields(read: Read, size: int, path: str) -> tuple[tuple[int, int], int, int]:
    """Return ((stream_id, segment_id), base_record, end_record) of a compressed segment, from its header and footer."""
    header = read(0, WARM_HEADER_BYTES)
    whose = check_header(header, path=path)
    return whose, HEADER.unpack_from(header)[6], WarmReader(read, size, path=path).end_record


def dictionary_of(raw: Bytes, *, path: str = "") -> int:
    """Return the dictionary_id of a compressed segment, from its first 64 bytes."""
    check_header(raw, path=path)
    dictionary_id: int = HEADER.unpack_from(raw)[8]
    return dictionary_id


# ── dictionaries ───────────────────────────────────────────────────────────────────────────────────────────────────────
GAIN_MIN = 0.05
SAMPLE_FRAMES = 8
DICTIONARY_BYTES = 32 * KIB
SAMPLES_MAX = 4_096
"""Most records used for training."""
TRY_EVERY = 16
"""Fewest segments between two trainings."""


class Dictionaries:
    """Decides whether the segments of one stream are compressed with a dictionary, and with which. Guarded by the mover's lock.

    A dictionary is worthwhile if the segment is at least 5 % smaller with it, including the dictionary itself. This is measured
    on a few sample frames, for a newly trained dictionary on half of them. The last dictionary is tried first; a new one is
    trained when that is no longer worthwhile, at most once in `TRY_EVERY` segments: most streams do not benefit, and training
    costs time.
    """

    def __init__(self, newest: Dictionary = NO_DICTIONARY, *, next_id: int = 1) -> None:
        self._newest = newest
        self._next_id = max(next_id, newest.id + 1)
        self._since_training = TRY_EVERY

    def choose(self, raw: Bytes, segment: Scan) -> Dictionary:
        """Return the dictionary for this segment, `NO_DICTIONARY` for none."""
        frames = _frames(raw, segment)
        self._since_training += 1
        if self._newest.id and is_worthwhile(self._newest, frames, segment.cut):
            return self._newest
        if self._since_training < TRY_EVERY or len(frames) < 2:
            return NO_DICTIONARY
        self._since_training = 0
        trained = self._train(raw, segment)
        if trained.id and is_worthwhile(trained, frames[1::2], segment.cut):
            self._newest, self._next_id = trained, trained.id + 1
            return trained
        return NO_DICTIONARY

    def _train(self, raw: Bytes, segment: Scan) -> Dictionary:
        samples = _records(raw, segment)
        if len(samples) < 16:
            return NO_DICTIONARY
        try:
            body = zstandard.train_dictionary(DICTIONARY_BYTES, samples, level=LEVEL).as_bytes()
        except zstandard.ZstdError:  # too few records, too short, or with nothing in common
            return NO_DICTIONARY
        return Dictionary(self._next_id, body)


def is_worthwhile(dictionary: Dictionary, frames: Sequence[bytes], segment_bytes: int) -> bool:
    """Return whether a dictionary makes a segment, of which `frames` are samples, sufficiently smaller."""
    total = sum(map(len, frames))
    if not total:
        return False
    plain = zstandard.ZstdCompressor(level=LEVEL)
    taught = zstandard.ZstdCompressor(level=LEVEL, dict_data=zstandard.ZstdCompressionDict(dictionary.body))
    without = sum(len(plain.compress(frame)) for frame in frames) / total * segment_bytes
    with_it = sum(len(taught.compress(frame)) for frame in frames) / total * segment_bytes + len(dictionary.body)
    return with_it <= without * (1 - GAIN_MIN)


def _frames(raw: Bytes, segment: Scan) -> list[bytes]:
    """Return samples of the future frames, spread over the segment."""
    starts = range(0, segment.cut, FRAME_BYTES)
    step = max(len(starts) // SAMPLE_FRAMES, 1)
    return [bytes(memoryview(raw)[start : min(start + FRAME_BYTES, segment.cut)]) for start in starts[::step]]


def _records(raw: Bytes, segment: Scan) -> list[bytes | bytearray | memoryview]:
    """Return records of some blocks, spread over the segment, for training."""
    view = memoryview(raw)
    samples: list[bytes | bytearray | memoryview] = []
    step = max(len(segment.blocks) // 64, 1)
    for block in segment.blocks[::step]:
        start = block.offset + BLOCK_HEAD_BYTES
        column = records_of(block, view[start : start + block.body_bytes])
        samples += [record for record in column.slice(0, 64).to_pylist() if record]
        if len(samples) >= SAMPLES_MAX:
            break
    return samples[:SAMPLES_MAX]
