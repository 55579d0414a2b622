"""The format of a table: an Arrow IPC file of small record batches, with quire's own index before Arrow's footer.

A block is one record batch, about 64 KiB before compression: the unit of reading, checking and caching. The section (bloom
filter, index, tail) lies between the last record batch and Arrow's end-of-stream mark, so any Arrow reader reads the file.
Rows are sorted by key, the versions of a key by lsn, newest first; no key spans two blocks; a tombstone has a null value. A
table never changes once a manifest names it.

A valid checksum does not make the contents trustworthy: tables come from executors, backups and object stores. Sizes in the
section are checked against the file, and a block's message against the index before Arrow decodes it, because a few
compressed KiB may expand to GiB; afterwards Arrow's offsets are validated.

Threads: pure functions; any. Importable on executors. Format page: `docs/formats/sstable.md`.
Raises `Corruption`, `ChecksumMismatch`, `FormatTooNew`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from quire.core.decoding import UNDECODABLE
from quire.core.errors import ChecksumMismatch, Corruption, FormatTooNew, InternalError
from quire.durable.checksums import crc64
from quire.durable.files import File
from quire.lsm.bloom import Bloom

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary()),
        pa.field("lsn", pa.uint64(), nullable=False),
        pa.field("tombstone", pa.bool_(), nullable=False),
    ]
)

MAGIC = b"QUIRESST"
VERSION = 1
TAIL = struct.Struct("<QQIIHH4sQ8s")
"""offset of the section, bytes of the filter, bytes of the index, probes of the filter, version, reserved (0), reserved (0),
crc64 of the section up to here, magic"""
TAIL_BYTES = 48
CRC_BYTES = 16
"""Bytes from the crc64 to the end of the tail."""
ALIGNMENT = 64
ARROW_END = struct.Struct("<i6s")
"""The end of an Arrow file: bytes of the footer, magic"""
ARROW_END_BYTES = 10
ARROW_MAGIC = b"ARROW1"
END_OF_STREAM_BYTES = 8
COMPRESSIONS = frozenset({"lz4", "zstd", "none"})
LEVEL_MAX = 64
"""Each level is ten times as large as the one above, so deeper levels do not exist."""
PROBES_MAX = 64
U64_END = 1 << 64
READ_BYTES = 64 << 10
"""Bytes of the first read, at the end of a file. It usually contains the whole section."""

BLOCK_ROWS_MAX = 1 << 24
"""Most rows of a block: 128 MiB of lsns. Blocks are cut between keys, so only versions of one key can make a large one."""
BLOCK_BYTES_MAX = (1 << 31) - 1
"""Most bytes of a column of a block: Arrow's offsets have 32 bits."""

CONTINUATION = 0xFFFFFFFF
METADATA_V5 = 4
"""The version of messages since Arrow 1.0, in Arrow's numbering."""
RECORD_BATCH = 3
"""The type of a record batch message in Arrow's numbering."""
COLUMNS = 4
BUFFERS = 10
"""Validity, offsets and data of key and value; validity and data of lsn and tombstone."""
DATA_BUFFERS = (2, 5)
PADDING = 64
"""Arrow may round a buffer's size up to this."""
NOT_COMPRESSED = -1
"""In place of a buffer's uncompressed size: the buffer is stored uncompressed."""

_HEAD = struct.Struct("<Ii")
_PAIR = struct.Struct("<qq")

if TAIL.size != TAIL_BYTES or ARROW_END.size != ARROW_END_BYTES:
    raise AssertionError("the table's structs disagree with their literal sizes")

_HINT = "`quire kv verify` shows what is affected; `quire kv repair` shows what can be recovered"


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """The location of a block, with its expected rows, checksum and first key."""

    offset: int
    size: int
    rows: int
    crc64: int
    first_key: bytes


class TableMeta(msgspec.Struct, frozen=True, array_like=True):
    """The index of a table: its metadata and its blocks. Fields are only appended, with defaults."""

    sst_id: int
    level: int
    rows: int
    tombstones: int
    key_min: bytes
    key_max: bytes
    lsn_min: int
    lsn_max: int
    raw_bytes: int
    """Bytes of keys and values, before compression."""
    bloom_bits: int
    blocks: list[BlockPlace]
    compression: str = "lz4"
    keys: int = 0
    """Distinct keys; 0 if unknown, in a table written before they were counted. Rows beyond this number are older versions."""


def encode_section(meta: TableMeta, bloom: Bloom, offset: int) -> bytes:
    """Encode the section for a file that is `offset` bytes long so far."""
    index = msgspec.msgpack.encode(meta)
    padding = bytes(-(offset + len(bloom.data) + len(index) + TAIL_BYTES) % ALIGNMENT)
    head = TAIL.pack(offset, len(bloom.data), len(index), bloom.hashes, VERSION, 0, bytes(4), 0, MAGIC)[:-CRC_BYTES]
    covered = b"".join((bloom.data, index, padding, head))
    return covered + crc64(covered).to_bytes(8, "little") + MAGIC


@dataclass(frozen=True, slots=True)
class _Section:
    """The decoded and checked section."""

    offset: int
    size: int
    meta: TableMeta
    bloom: Bloom
    checksum: int


def read_section(file: File, path: str) -> tuple[TableMeta, Bloom, int]:
    """Return the index, the filter and the checksum of the section. Raises if the file is not a complete, undamaged table."""
    section = _find_section(file, path)
    return section.meta, section.bloom, section.checksum


def set_level(file: File, path: str, level: int) -> None:
    """Change the level of a table that no manifest names yet. Synced on return."""
    old = _find_section(file, path)
    section = encode_section(msgspec.structs.replace(old.meta, level=level), old.bloom, old.offset)
    # The size does not change: msgpack needs one byte for any level up to LEVEL_MAX.
    if len(section) != old.size:
        raise InternalError("a table's index would move", path=path, level=level)
    file.write_at(section, old.offset)
    file.sync()


def _find_section(file: File, path: str) -> _Section:
    size = file.size()
    if size < ARROW_END_BYTES + TAIL_BYTES:
        raise _not_a_table("the file is too short to be a table", path, size)
    end = file.read_at(min(size, READ_BYTES), max(0, size - READ_BYTES))
    footer_bytes, magic = ARROW_END.unpack(end[-ARROW_END_BYTES:])
    if magic != ARROW_MAGIC or not 0 < footer_bytes < size:
        raise _not_a_table("the file does not end like a table", path, size)
    tail_end = size - ARROW_END_BYTES - footer_bytes - END_OF_STREAM_BYTES
    if tail_end < TAIL_BYTES:
        raise _not_a_table("the file has no room for an index", path, size)
    tail = _piece(file, end, size, tail_end - TAIL_BYTES, TAIL_BYTES)
    offset, bloom_bytes, index_bytes, hashes, version, _, _, checksum, magic = TAIL.unpack(tail)
    if magic != MAGIC:
        raise _not_a_table("the file has no index", path, size)
    section_bytes = tail_end - offset
    if not bloom_bytes + index_bytes + TAIL_BYTES <= section_bytes <= tail_end:
        raise _not_a_table("the index is not where the tail says", path, size)
    section = _piece(file, end, size, offset, section_bytes)
    actual = crc64(memoryview(section)[:-CRC_BYTES])
    if actual != checksum:
        text = "a table's index fails its checksum"
        raise ChecksumMismatch(text, hint=_HINT, path=path, offset=offset, expected=checksum, actual=actual)
    if version > VERSION:
        raise FormatTooNew("the table was written by a newer quire", hint="upgrade quire", path=path, version=version)
    try:
        meta = _DECODER.decode(section[bloom_bytes : bloom_bytes + index_bytes])
    except UNDECODABLE as error:
        raise Corruption("a table's index cannot be decoded", hint=_HINT, path=path, cause=str(error)) from error
    if nonsense := _nonsense(meta, hashes, bloom_bytes, offset):
        raise Corruption("a table's index is inconsistent", hint=_HINT, path=path, cause=nonsense)
    return _Section(offset, section_bytes, meta, Bloom(meta.bloom_bits, hashes, section[:bloom_bytes]), checksum)


def _nonsense(meta: TableMeta, probes: int, bloom_bytes: int, blocks_end: int) -> str:
    """Return why an index cannot be valid, or an empty string. Called before any of its numbers is used."""
    numbers = (meta.sst_id, meta.rows, meta.tombstones, meta.lsn_min, meta.lsn_max, meta.raw_bytes)
    if not all(0 <= number < U64_END for number in numbers) or meta.lsn_min > meta.lsn_max:
        return "numbers out of range"
    if not (0 <= meta.level <= LEVEL_MAX and meta.compression in COMPRESSIONS and 0 < probes <= PROBES_MAX):
        return f"level {meta.level}, compression {meta.compression!r}, {probes} probes"
    if not 0 < meta.bloom_bits <= 8 * bloom_bytes:
        return f"a filter of {meta.bloom_bits} bits in {bloom_bytes} bytes"
    if not meta.blocks or meta.blocks[0].first_key != meta.key_min:
        return "no block, or a different first key"
    end, last = 0, None
    for place in meta.blocks:
        if place.offset < end or place.size <= 0 or place.offset + place.size > blocks_end:
            return f"a block of {place.size} bytes at {place.offset}"
        if not 0 < place.rows <= BLOCK_ROWS_MAX or (last is not None and place.first_key <= last):
            return f"a block of {place.rows} rows, or out of order, at {place.offset}"
        end, last = place.offset + place.size, place.first_key
    if last is None or meta.key_max < last or sum(place.rows for place in meta.blocks) != meta.rows:
        return "keys or rows that do not add up"
    return (
        "" if max(meta.tombstones, meta.keys) <= meta.rows and meta.keys >= 0 else "more tombstones or keys than rows"
    )


_DECODER = msgspec.msgpack.Decoder(TableMeta)


def _piece(file: File, end: bytes, size: int, offset: int, length: int) -> bytes:
    """Return bytes of a file whose end has already been read."""
    start = size - len(end)
    if offset >= start:
        return end[offset - start : offset - start + length]
    return file.read_at(length, offset)


def decode_blocks(data: bytes, places: Sequence[BlockPlace], meta: TableMeta, path: str) -> list[pa.RecordBatch]:
    """Decode adjacent blocks. Raises if their bytes fail a checksum or are not valid."""
    start, view, messages = places[0].offset, memoryview(data), list[memoryview]()
    for place in places:
        piece = view[place.offset - start : place.offset - start + place.size]
        actual = crc64(piece)
        if actual != place.crc64:
            text = "a block of a table fails its checksum"
            where = {"path": path, "offset": place.offset, "expected": place.crc64, "actual": actual}
            raise ChecksumMismatch(text, hint=_HINT, **where)
        try:
            check_message(piece, place.rows, meta.raw_bytes)
        except ValueError as error:
            text = "a block of a table cannot be decoded"
            raise Corruption(text, hint=_HINT, path=path, offset=place.offset, cause=str(error)) from error
        messages.append(piece)
    try:
        if meta.compression == "none":  # zero-copy: the columns then lie in `data` itself
            batches = [pa.ipc.read_record_batch(pa.py_buffer(message), SCHEMA) for message in messages]
        else:  # as a stream, which accepts the option not to wake other threads for a few KiB
            # Of the messages, not of `data`: bytes between two blocks have not been checked.
            stream = b"".join((_SCHEMA_MESSAGE, *messages))
            reader = pa.ipc.open_stream(pa.py_buffer(stream), options=_READ_OPTIONS)
            batches = [reader.read_next_batch() for _ in places]
        for batch in batches:
            batch.validate(full=True)  # 2 µs of the 45 that a block costs; without it bad offsets crash the process
            _refuse_nulls(batch)
    except (pa.ArrowException, OSError, StopIteration, ValueError) as error:
        text = "a block of a table cannot be decoded"
        raise Corruption(text, hint=_HINT, path=path, offset=start, cause=str(error)) from error
    for batch, place in zip(batches, places):
        if batch.num_rows != place.rows:
            text = "a block has the wrong number of rows"
            raise Corruption(text, hint=_HINT, path=path, offset=place.offset, rows=batch.num_rows)
    return batches


def _refuse_nulls(batch: pa.RecordBatch) -> None:
    """Raise if a column other than the value has nulls: point reads use those columns' buffers without checking validity."""
    if any(batch.column(number).null_count for number in (0, 2, 3)):
        raise ValueError("a key, an lsn or a tombstone is null")


_SCHEMA_MESSAGE: bytes = SCHEMA.serialize().to_pybytes()
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


def _not_a_table(what: str, path: str, size: int) -> Corruption:
    return Corruption(what, hint=_HINT, path=path, size=size)


# ── limits on decoding a block ────────────────────────────────────────────────────────────────────────────────────────
def check_message(message: memoryview, rows: int, raw_bytes: int) -> None:
    """Raise `ValueError` if the bytes are not one record batch message, or if decoding it would need more memory than its entry
    in the index declares."""
    if not 0 < rows <= BLOCK_ROWS_MAX:
        raise ValueError(f"{rows} rows in a block")
    try:
        mark, size = _HEAD.unpack_from(message)
        if mark != CONTINUATION or not 0 < size <= len(message) - _HEAD.size:
            raise ValueError("not an Arrow message")
        metadata, body = message[_HEAD.size : _HEAD.size + size], message[_HEAD.size + size :]
        root = _table(metadata, _number(metadata, "<I", 0))
        # In older versions Arrow also looks for a compression elsewhere than `_check_buffers` does.
        if _number(metadata, "<h", _field(metadata, root, 0)) != METADATA_V5:
            raise ValueError("not a message of Arrow's current version")
        if _number(metadata, "<B", _field(metadata, root, 1)) != RECORD_BATCH:
            raise ValueError("not a record batch")
        # Otherwise a stream would continue after the body, with a message that has not been checked.
        if _number(metadata, "<q", _field(metadata, root, 3)) != len(body):
            raise ValueError("the message is not as long as the block")
        place = _field(metadata, root, 2)
        batch = _table(metadata, place + _number(metadata, "<I", place))
        if _number(metadata, "<q", _field(metadata, batch, 0)) != rows:
            raise ValueError("the number of rows differs from the index")
        nodes = _pairs(metadata, _field(metadata, batch, 1), COLUMNS)
        if any(length != rows for length, _ in nodes):
            raise ValueError("a column's number of rows differs from the index")
        # As the message says, not the index: Arrow goes by the message.
        compressed = _has_field(metadata, batch, 3)
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
    """Return the offset of a FlatBuffers table, after checking that its vtable is in the data."""
    fields = at - _number(data, "<i", at)
    _number(data, "<H", fields)
    return at


def _has_field(data: memoryview, table: int, number: int) -> bool:
    """Return whether a FlatBuffers table has a field."""
    fields = table - _number(data, "<i", table)
    return 4 + 2 * number < _number(data, "<H", fields) and _number(data, "<H", fields + 4 + 2 * number) != 0


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the offset of a field of a FlatBuffers table."""
    if not _has_field(data, table, number):
        raise ValueError(f"the message has no field {number}")
    fields = table - _number(data, "<i", table)
    return table + _number(data, "<H", fields + 4 + 2 * number)


def _pairs(data: memoryview, at: int, count: int) -> list[tuple[int, int]]:
    """Return a FlatBuffers vector of pairs of 64-bit numbers. Raises unless it has `count` of them."""
    start = at + _number(data, "<I", at)
    if _number(data, "<I", start) != count:
        raise ValueError("wrong number of columns or buffers")
    return [_PAIR.unpack_from(data, start + 4 + _PAIR.size * number) for number in range(count)]
