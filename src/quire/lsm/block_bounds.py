"""What an Arrow record batch message of a table would take, known before any of it is decompressed.

Arrow believes a compressed buffer's own word about its size, and a batch's about its rows: a few KiB may ask for GiB. Tables
come from executors, backups and object stores, and a checksum says only that somebody wrote it. So the message's metadata, a
FlatBuffers table, is read here first, and every size compared with what the table's index declares.

Rules
  1. Every offset is inside the message, every buffer inside its body, before it is followed.
  2. The rows of the batch and of every column are those of the index. Buffers of fixed width then have the size that follows
     from them; those of keys and values together are at most the table's declared bytes.
  3. Anything else, and what does not parse, is `ValueError`: the caller says which file it was.

Pure functions, any thread; importable on executors. Format page: `docs/formats/sstable.md`.
"""

from __future__ import annotations

import struct

BLOCK_ROWS_MAX = 1 << 24
"""Of a block: 128 MiB of lsns. A block is cut between keys, so only versions of one key can make a large one."""
BLOCK_BYTES_MAX = (1 << 31) - 1
"""Of a column of a block: Arrow's offsets have 32 bits."""

CONTINUATION = 0xFFFFFFFF
RECORD_BATCH = 3
"""The kind of a message, in Arrow's own numbering."""
COLUMNS = 4
BUFFERS = 10
"""Validity, offsets and data of key and value; validity and data of lsn and tombstone."""
DATA_BUFFERS = (2, 5)
PADDING = 64
"""Arrow may round a buffer's size up to this."""
NOT_COMPRESSED = -1
"""In place of a compressed buffer's size: it is as it is."""

_HEAD = struct.Struct("<Ii")
_PAIR = struct.Struct("<qq")


def check_message(message: memoryview, rows: int, raw_bytes: int, *, compressed: bool) -> None:
    """Raise `ValueError` unless decoding the message takes what its place in the index declares (rules 1 to 3)."""
    if not 0 < rows <= BLOCK_ROWS_MAX:
        raise ValueError(f"{rows} rows in a block")
    try:
        mark, size = _HEAD.unpack_from(message)
        if mark != CONTINUATION or not 0 < size <= len(message) - _HEAD.size:
            raise ValueError("not an Arrow message")
        metadata, body = message[_HEAD.size : _HEAD.size + size], message[_HEAD.size + size :]
        root = _table(metadata, _number(metadata, "<I", 0))
        if _number(metadata, "<B", _field(metadata, root, 1)) != RECORD_BATCH:
            raise ValueError("not a record batch")
        place = _field(metadata, root, 2)
        batch = _table(metadata, place + _number(metadata, "<I", place))
        if _number(metadata, "<q", _field(metadata, batch, 0)) != rows:
            raise ValueError("the number of rows differs from the index")
        nodes = _pairs(metadata, _field(metadata, batch, 1), COLUMNS)
        if any(length != rows for length, _ in nodes):
            raise ValueError("a column's number of rows differs from the index")
        _check_buffers(body, _pairs(metadata, _field(metadata, batch, 2), BUFFERS), rows, raw_bytes, compressed)
    except struct.error as error:
        raise ValueError(f"the message is cut off: {error}") from error


def _check_buffers(
    body: memoryview, buffers: list[tuple[int, int]], rows: int, raw_bytes: int, compressed: bool
) -> None:
    bits, offsets = (rows + 7) // 8, 4 * (rows + 1)
    fixed = {0: bits, 1: offsets, 3: bits, 4: offsets, 6: bits, 7: 8 * rows, 8: bits, 9: bits}
    data_bytes = 0
    for number, (offset, length) in enumerate(buffers):
        if offset < 0 or length < 0 or offset + length > len(body):
            raise ValueError(f"buffer {number} is not in the message")
        size = length
        if compressed and length:
            size = _number(body, "<q", offset)
            if size == NOT_COMPRESSED:
                size = length - 8
        if number in DATA_BUFFERS:
            data_bytes += size
            limit = min(raw_bytes, BLOCK_BYTES_MAX) + PADDING
        else:
            limit = fixed[number] + PADDING
        if not 0 <= size <= limit or data_bytes > raw_bytes + 2 * PADDING:
            raise ValueError(f"buffer {number} would take {size} bytes, more than declared")


def _number(data: memoryview, layout: str, at: int) -> int:
    if at < 0:  # struct would count from the end
        raise ValueError("an offset leads out of the message")
    (number,) = struct.unpack_from(layout, data, at)
    return int(number)


def _table(data: memoryview, at: int) -> int:
    """A FlatBuffers table at an offset, if its list of fields is in the data."""
    fields = at - _number(data, "<i", at)
    _number(data, "<H", fields)
    return at


def _field(data: memoryview, table: int, number: int) -> int:
    """Where a field of a table is."""
    fields = table - _number(data, "<i", table)
    if 4 + 2 * number >= _number(data, "<H", fields):
        raise ValueError(f"the message has no field {number}")
    offset = _number(data, "<H", fields + 4 + 2 * number)
    if not offset:
        raise ValueError(f"the message has no field {number}")
    return table + offset


def _pairs(data: memoryview, at: int, count: int) -> list[tuple[int, int]]:
    """A vector of pairs of 64-bit numbers, of which there must be so many."""
    start = at + _number(data, "<I", at)
    if _number(data, "<I", start) != count:
        raise ValueError("wrong number of columns or buffers")
    return [_PAIR.unpack_from(data, start + 4 + _PAIR.size * number) for number in range(count)]
