"""The format of a stream segment, a header followed by blocks of records, and the scan that finds its valid end.

A block holds records that were appended together: a head of 64 bytes, then the body, which is `count + 1` offsets and the
payloads, the layout of a binary column in Arrow. Its records share one timestamp; ids rise by one, within a block, from block
to block and from segment to segment. The last block of an append is a commit: an append of more than one block is present as a
whole or not at all. Blocks begin at multiples of 64, so that those after damage can be found. The seed of a block is the
header's crc64, which covers a salt that is new whenever a file is reused, xor the block's offset: the head's checksum starts
from it, which proves that the block belongs at this offset of this file. `durable_upto` is the id after the last record that
was synced when the block was written (S4).

A segment is cut after its last commit before the first bad block; everything after the cut is discarded. A bad block below
`durable_upto`, as the caller has it or as stated in any valid block after it, is not a torn tail but `Corruption`.

Little-endian. Importable on executors; only the functions for columns load Arrow.
Threads: any (pure functions and values). Format: docs/formats/stream-segment.md.
Raises: `Corruption`, `FormatTooNew`; `OutOfRange`, `InvalidInput` for values that cannot be encoded."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from quire.core.errors import Corruption, FormatTooNew, InvalidInput
from quire.core.ids import u64
from quire.core.limits import KIB, MIB
from quire.durable.checksums import Bytes, crc64, crc64_joined

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"QSTREAM1"
VERSION = 2
"""Version 1 had no idempotency keys."""

HEADER = struct.Struct("<8sHHIQQQQQQ")
"""magic, version, reserved (0), reserved (0), stream_id, segment_id, base_record, created_at_ms, salt, crc64"""
BLOCK = struct.Struct("<IIIIQQQQQQ")
"""mark, flags, body_bytes, count, first_record, timestamp_ms, durable_upto, body_crc64, call (0 for none), head_crc64"""

CHECKED = struct.Struct("<IIIIQQQQQ")
"""A head without its checksum."""

LAST = struct.Struct("<i")
"""One offset in the table of a body."""

HEADER_BYTES = 64
BLOCK_HEAD_BYTES = 64
CHECKED_BYTES = 56
"""Bytes of a header or a head that its crc64 covers."""
ALIGN = 64
"""Alignment of blocks in the file, in bytes."""
BODY_ALIGN = 8
"""Alignment of the payloads in a body, in bytes."""
PADDING = tuple(map(bytes, range(ALIGN)))
"""Zero bytes, indexed by their number."""

MARK = 0x4B4C4251
"""The first 4 bytes of a block: "QBLK"."""
COMMIT = 1
"""Flag: the last block of an append."""

BLOCK_BYTES = 256 * KIB
"""The size up to which small records share a block: the amount that one read of a slice fetches and verifies."""
BLOCK_RECORDS_MAX = 65_536
"""Most records in a block: limits the objects that one read creates in memory."""
JOIN_BYTES = 4 * KIB
"""From this block size on, the body's checksum is combined into the segment's; for smaller blocks checksumming all bytes again
is faster."""

assert HEADER.size == HEADER_BYTES
assert BLOCK.size == BLOCK_HEAD_BYTES
assert CHECKED.size == CHECKED_BYTES


@dataclass(frozen=True, slots=True)
class StreamSegmentHeader:
    """The first 64 bytes of a segment."""

    stream_id: int
    segment_id: int
    base_record: int
    """The id of its first record."""
    created_at_ms: int
    salt: int
    crc64: int = field(default=0, compare=False)

    def encode(self) -> bytes:
        """Return its bytes in the file."""
        fields = (self.stream_id, self.segment_id, self.base_record, self.created_at_ms, self.salt)
        for name, value in zip(("stream_id", "segment_id", "base_record", "created_at_ms", "salt"), fields):
            u64(name, value)
        checked = HEADER.pack(MAGIC, VERSION, 0, 0, *fields, 0)[:CHECKED_BYTES]
        return checked + crc64(checked).to_bytes(8, "little")

    @classmethod
    def decode(cls, raw: Bytes, *, path: str = "") -> StreamSegmentHeader:
        """Decode the header at the beginning of `raw`."""
        if len(raw) < HEADER_BYTES:
            raise Corruption("a stream's segment is shorter than its header", path=path, bytes=len(raw))
        magic, version, zero, other, stream, segment, base, created, salt, crc = HEADER.unpack_from(raw)
        if magic != MAGIC or zero or other or crc != crc64(memoryview(raw)[:CHECKED_BYTES]):
            raise Corruption("this is not the header of a stream's segment", path=path)
        if not 1 <= version <= VERSION:
            raise FormatTooNew(
                "this segment was written by a newer quire", hint="upgrade quire", version=version, path=path
            )
        return cls(stream, segment, base, created, salt, crc)


class RecordBlock(NamedTuple):
    """The head of a block, and its offset in the file."""

    offset: int
    flags: int
    body_bytes: int
    records: int
    first_record: int
    timestamp_ms: int
    durable_upto: int
    body_crc64: int
    call: int = 0
    """The idempotency key of the append, 0 for none. An append with a key shares no block with others."""

    @property
    def end(self) -> int:
        """The offset of the next block."""
        return aligned(self.offset + BLOCK_HEAD_BYTES + self.body_bytes, ALIGN)

    @property
    def end_record(self) -> int:
        """The id after its last record."""
        return self.first_record + self.records

    @property
    def is_commit(self) -> bool:
        """Whether an append ends here."""
        return bool(self.flags & COMMIT)


class NextBlock(NamedTuple):
    """The position of a block that is about to be written, and the fields of its head that depend on it."""

    offset: int
    first_record: int
    timestamp_ms: int
    durable_upto: int
    call: int = 0


FEW_OFFSETS = 64
"""Offsets of up to this many records are checked without numpy, whose call overhead is as high."""


def aligned(number: int, step: int) -> int:
    """Return `number` rounded up to a multiple of `step`."""
    return -(-number // step) * step


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class Body(NamedTuple):
    """The body of a block, in pieces that are consecutive in the file."""

    pieces: tuple[Bytes, ...]
    size: int
    records: int
    block_bytes: int
    """Bytes that its block takes in the file, with head and padding."""


def body_of(payloads: Sequence[bytes]) -> Body:
    """Return the body of a block of these records."""
    count = len(payloads)
    # Not numpy: for a block of few records, which most commits have, its call overhead would dominate.
    table = struct.pack(f"<{count + 1}i", 0, *accumulate(map(len, payloads)))
    piece = b"".join((table, PADDING[-len(table) % BODY_ALIGN], *payloads))
    size = len(piece)
    return Body((piece,), size, count, BLOCK_HEAD_BYTES + size + -size % ALIGN)


def body_of_arrow(column: pa.Array) -> Body:
    """Return the body of a binary column without nulls, as views of its memory, without touching single records."""
    count = len(column)
    _, offsets, data = column.buffers()
    start = 4 * column.offset
    table = memoryview(offsets).cast("B")[start : start + 4 * count + 4]
    first, last = LAST.unpack_from(table)[0], LAST.unpack_from(table, 4 * count)[0]
    if first:
        table = (np.frombuffer(table, np.int32) - np.int32(first)).view(np.uint8).data
    padding = PADDING[-len(table) % BODY_ALIGN]
    payload = memoryview(data).cast("B")[first:last] if data is not None else b""
    size = len(table) + len(padding) + len(payload)
    return Body((table, padding, payload), size, count, BLOCK_HEAD_BYTES + size + -size % ALIGN)


def encode_into(out: memoryview, seed: int, place: NextBlock, body: Body, *, is_commit: bool, running: int = 0) -> int:
    """Encode a block into `out`, padded to the next one, and return the crc64 `running` extended over it.

    `seed` is the header's crc64. The body is copied once, and the copy is checksummed: a caller that modifies a column
    meanwhile may change a record, but never causes a block that fails its checksum.
    """
    if place.durable_upto > place.first_record:
        raise InvalidInput("a block cannot vouch for itself", first=place.first_record, durable_upto=place.durable_upto)
    pieces, size, count, whole = body
    at = BLOCK_HEAD_BYTES
    for piece in pieces:
        out[at : at + len(piece)] = piece
        at += len(piece)
    padding = PADDING[-size % ALIGN]
    out[at : at + len(padding)] = padding
    body_crc = crc64(out[BLOCK_HEAD_BYTES:at])
    flags = COMMIT if is_commit else 0
    checked = CHECKED.pack(
        MARK, flags, size, count, place.first_record, place.timestamp_ms, place.durable_upto, body_crc, place.call
    )
    out[:BLOCK_HEAD_BYTES] = head = checked + crc64(checked, seed ^ place.offset).to_bytes(8, "little")
    joined = crc64_joined(crc64(head, running), body_crc, size) if whole >= JOIN_BYTES else None
    return crc64(out[:whole], running) if joined is None else crc64(padding, joined)


def parts(ends: Sequence[int], bytes_max: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Yield how records are divided into blocks: (start, stop) of each. A block holds at least one record.

    `ends` are the cumulative end offsets of the payloads, starting at 0: a list or a numpy array.
    """

    def taken(number: int) -> int:
        """Return the bytes that the records up to this one take, with their offsets."""
        return int(ends[number]) + 4 * (number + 1)

    start, count = 0, len(ends)
    while start < count:
        before = taken(start - 1) if start else 0
        stop = bisect_right(range(count), before + bytes_max, start, key=taken)
        stop = min(max(stop, start + 1), start + BLOCK_RECORDS_MAX, count)
        yield start, stop
        start = stop


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def decode_head(raw: Bytes, offset: int, seed: int, *, at: int | None = None) -> RecordBlock | None:
    """Decode the head at `offset` of a file, which is at `at` in `raw` (default: the same offset); `None` if it is invalid."""
    start = offset if at is None else at
    if start + BLOCK_HEAD_BYTES > len(raw):
        return None
    mark, flags, body_bytes, count, first, stamp, durable, body_crc, call, crc = BLOCK.unpack_from(raw, start)
    if mark != MARK or crc64(memoryview(raw)[start : start + CHECKED_BYTES], seed ^ offset) != crc:
        return None
    return RecordBlock(offset, flags, body_bytes, count, first, stamp, durable, body_crc, call)


def is_body_good(block: RecordBlock, body: Bytes) -> bool:
    """Return whether `body` matches its checksum and its offsets are valid."""
    if len(body) != block.body_bytes or crc64(body) != block.body_crc64:
        return False
    start = table_bytes(block.records)
    if start > block.body_bytes or LAST.unpack_from(body, 4 * block.records)[0] != block.body_bytes - start:
        return False
    return _are_rising(body, block.records)


_all_of = np.logical_and.reduce


def _are_rising(body: Bytes, count: int) -> bool:
    """Return whether offsets begin at 0 and never decrease. A checksum does not prove that, and Arrow reads wherever they
    point."""
    if count <= FEW_OFFSETS:
        offsets = list(struct.unpack_from(f"<{count + 1}i", body))
        return offsets[0] == 0 and offsets == sorted(offsets)
    table = np.frombuffer(body, "<i4", count + 1)
    # The ufunc directly: `.all()` goes through Python, which takes as long as the comparison.
    return bool(table[0] == 0 and _all_of(table[1:] >= table[:-1]))


def table_bytes(count: int) -> int:
    """Return the bytes that the offsets of `count` records take in a body, with padding."""
    return aligned(4 * (count + 1), BODY_ALIGN)


def records_of(block: RecordBlock, body: Bytes) -> pa.Array:
    """Return the records of a verified block as a binary column over the same bytes."""
    import pyarrow as pa

    whole, count = pa.py_buffer(body), block.records
    return pa.Array.from_buffers(pa.binary(), count, [None, whole, whole.slice(table_bytes(count))])


# ── scanning ───────────────────────────────────────────────────────────────────────────────────────────────────────────
WINDOW_BYTES = MIB
"""Bytes that are searched at a time."""
_MARK = MARK.to_bytes(4, "little")
_ZEROS = bytes(WINDOW_BYTES)

assert WINDOW_BYTES % ALIGN == 0


class Scan(msgspec.Struct, frozen=True):
    """The result of scanning one segment."""

    header: StreamSegmentHeader
    blocks: tuple[RecordBlock, ...]
    """Every block up to the cut."""
    cut: int
    """File offset at which the segment ends."""
    end_record: int
    """The id after the last record."""
    torn_bytes: int
    """Bytes from the cut to the last byte that is not zero: remains of an interrupted write."""

    @property
    def calls(self) -> dict[int, int]:
        """The first record of each append with an idempotency key, by key; oldest first."""
        calls: dict[int, int] = {}
        for block in self.blocks:
            if block.call:
                calls.setdefault(block.call, block.first_record)
        return calls

    @property
    def last_ms(self) -> int:
        """The newest timestamp; 0 without blocks."""
        return self.blocks[-1].timestamp_ms if self.blocks else 0


def scan(raw: Bytes, *, durable_upto: int = 0, path: str = "") -> Scan:
    """Scan a segment from its first byte. `durable_upto` is the id after the last record known to have been synced."""
    header = StreamSegmentHeader.decode(raw, path=path)
    blocks: list[RecordBlock] = []
    committed = 0
    expected, stamp = header.base_record, 0
    offset = HEADER_BYTES
    while (block := _next(raw, header, offset, expected, stamp)) is not None:
        blocks.append(block)
        offset, expected, stamp = block.end, block.end_record, block.timestamp_ms
        if block.is_commit:
            committed = len(blocks)
    kept = blocks[:committed]
    # Only blocks after the bad one are asked: a block vouches for records before itself, and all of those were found
    # valid in front of the bad one.
    promised = max([durable_upto, *(block.durable_upto for block in _behind(raw, header, offset))])
    if promised > expected:
        raise Corruption(
            "a stream's segment is damaged",
            hint="`quire stream verify` shows what is lost",
            path=path,
            segment=header.segment_id,
            offset=offset,
            record=expected,
            durable_upto=promised,
        )
    cut = kept[-1].end if kept else HEADER_BYTES
    end_record = kept[-1].end_record if kept else header.base_record
    return Scan(header, tuple(kept), cut, end_record, _written(raw, cut))


def sealed_blocks(raw: Bytes, durable_bytes: int, *, path: str = "") -> Scan:
    """Scan a sealed segment, all of which was synced: if it ends before its full length, raise `Corruption`."""
    result = scan(memoryview(raw)[:durable_bytes], path=path)
    if result.cut != durable_bytes:
        raise Corruption(
            "a sealed segment ends too early",
            hint="`quire stream verify` shows what is lost",
            path=path,
            segment=result.header.segment_id,
            offset=result.cut,
            record=result.end_record,
            durable_bytes=durable_bytes,
        )
    return result


def _next(raw: Bytes, header: StreamSegmentHeader, offset: int, expected: int, stamp: int) -> RecordBlock | None:
    """Return the block at `offset` if it is valid and continues the segment."""
    block = decode_head(raw, offset, header.crc64)
    if block is None or block.first_record != expected or not block.records or block.timestamp_ms < stamp:
        return None
    start = offset + BLOCK_HEAD_BYTES
    return block if is_body_good(block, memoryview(raw)[start : start + block.body_bytes]) else None


def _behind(raw: Bytes, header: StreamSegmentHeader, offset: int) -> Iterator[RecordBlock]:
    """Yield valid heads after a bad block: their `durable_upto` shows what had been synced."""
    view = memoryview(raw)
    for start in range(offset, len(raw), WINDOW_BYTES):
        window = view[start : start + WINDOW_BYTES].tobytes()
        place = -1 if _is_blank(window) else window.find(_MARK)
        while place >= 0:
            # A payload may contain the mark; a head is at a multiple of ALIGN only. `offset` and the window's size are
            # such multiples, so a position in the window is aligned as in the file.
            if place % ALIGN == 0 and (block := decode_head(raw, start + place, header.crc64)) is not None:
                yield block
            place = window.find(_MARK, (place // ALIGN + 1) * ALIGN)


def _written(raw: Bytes, cut: int) -> int:
    """Return the number of bytes from the cut to the last one that is not zero."""
    view = memoryview(raw)[cut:]
    for end in range(len(view), 0, -WINDOW_BYTES):
        start = max(end - WINDOW_BYTES, 0)
        window = view[start:end].tobytes()
        if not _is_blank(window):
            return start + len(window.rstrip(b"\0"))
    return 0


def _is_blank(window: bytes) -> bool:
    """Return whether all bytes are zero, as most are after a cut. Comparing is the fastest test."""
    return window == _ZEROS[: len(window)]
