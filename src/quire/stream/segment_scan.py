"""What a segment holds: its blocks up to the cut, or the verdict that it is damaged.

Terms
  torn      a bad block that nobody had promised: the end of what was written when the process or the machine died
  damage    a bad block among records that had been synced: of a sealed segment, or below what a later block vouches for

Rules
  1. A segment is cut behind its last commit before the first bad block (S4). What is behind is given up, never read again: the
     next append goes into a new segment (P4).
  2. A bad block at or below `durable_upto`, as the caller knows it or as any valid block behind it says, is `Corruption`.
  3. A block is good if its head is valid in this place, its body is what the head says, and it follows the one before.

Pure functions over the bytes of a file, any thread; importable on executors. Memory: 64 bytes a block.
Raises `Corruption`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.core.errors import Corruption
from quire.core.limits import MIB
from quire.durable.checksums import Bytes
from quire.stream.segment import (
    ALIGN,
    BLOCK_HEAD_BYTES,
    HEADER_BYTES,
    MARK,
    RecordBlock,
    StreamSegmentHeader,
    decode_head,
    is_body_good,
)

WINDOW_BYTES = MIB
"""What is looked through at once."""

_MARK = MARK.to_bytes(4, "little")
_ZEROS = bytes(WINDOW_BYTES)

assert WINDOW_BYTES % ALIGN == 0


class Scan(msgspec.Struct, frozen=True):
    """The verdict on one segment."""

    header: StreamSegmentHeader
    blocks: tuple[RecordBlock, ...]
    """Every block up to the cut."""
    cut: int
    """Where the segment ends, in bytes."""
    end_record: int
    """The id behind the last record."""
    torn_bytes: int
    """Bytes behind the cut that look as if something was being written there."""

    @property
    def last_ms(self) -> int:
        """The newest timestamp; 0 if there is none."""
        return self.blocks[-1].timestamp_ms if self.blocks else 0


def scan(raw: Bytes, *, durable_upto: int = 0, path: str = "") -> Scan:
    """Read a segment from its first byte. `durable_upto`: the id behind the last record known to have been synced."""
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
    """The same of a sealed segment, all of which was synced: anything but its full length is `Corruption`."""
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
    """The block at `offset`, if it is good (rule 3)."""
    block = decode_head(raw, offset, header.crc64)
    if block is None or block.first_record != expected or not block.records or block.timestamp_ms < stamp:
        return None
    start = offset + BLOCK_HEAD_BYTES
    return block if is_body_good(block, memoryview(raw)[start : start + block.body_bytes]) else None


def _behind(raw: Bytes, header: StreamSegmentHeader, offset: int) -> Iterator[RecordBlock]:
    """Valid heads behind a bad block: they know what had been synced."""
    view = memoryview(raw)
    for start in range(offset, len(raw), WINDOW_BYTES):
        window = view[start : start + WINDOW_BYTES].tobytes()
        place = -1 if _is_blank(window) else window.find(_MARK)
        while place >= 0:
            if place % ALIGN == 0 and (block := decode_head(raw, start + place, header.crc64)) is not None:
                yield block
            place = window.find(_MARK, (place // ALIGN + 1) * ALIGN)


def _written(raw: Bytes, cut: int) -> int:
    """How many bytes from the cut on are not zero-fill."""
    view = memoryview(raw)[cut:]
    for end in range(len(view), 0, -WINDOW_BYTES):
        start = max(end - WINDOW_BYTES, 0)
        window = view[start:end].tobytes()
        if not _is_blank(window):
            return start + len(window.rstrip(b"\0"))
    return 0


def _is_blank(window: bytes) -> bool:
    """Most of what is behind a cut is zeros, and this is the quickest way to see it."""
    return window == _ZEROS[: len(window)]
