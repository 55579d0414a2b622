"""The bytes of a table: an Arrow IPC file of small record batches, with an index of our own before Arrow's footer.

Terms
  block     one record batch, about 64 KiB before compression; the unit of reading, checking and caching
  section   bloom filter, index and tail: between the last record batch and Arrow's end-of-stream mark and footer
  tail      the last, fixed part of the section; says where the rest is

Rules
  1. Rows are sorted by key, and the versions of a key by lsn, newest first. No key spans two blocks.
  2. Any Arrow reader reads the file: it looks at Arrow's footer, which knows nothing of the section.
  3. We read a block by its place in the index, check its crc64, then what decoding it would take (block_bounds.py), decode it,
     and check that Arrow's offsets stay inside its buffers: a checksum says that somebody wrote the bytes, not that they make
     sense. The section has a crc64 of its own, and its numbers are checked against the file before any is used.
  4. A tombstone has a null value.
  5. A table never changes once a manifest names it. Before that its level may: a load's is chosen when all of it is there.

Pure functions; importable on executors. Format page: `docs/formats/sstable.md`.
Raises `Corruption`, `ChecksumMismatch`, `FormatTooNew`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from quire.core.errors import ChecksumMismatch, Corruption, FormatTooNew, InternalError
from quire.durable.checksums import crc64
from quire.durable.files import File
from quire.lsm.block_bounds import BLOCK_ROWS_MAX, check_message
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
"""From the crc64 to the end of the tail."""
ALIGNMENT = 64
ARROW_END = struct.Struct("<i6s")
"""How an Arrow file ends: bytes of the footer, magic"""
ARROW_END_BYTES = 10
ARROW_MAGIC = b"ARROW1"
END_OF_STREAM_BYTES = 8
COMPRESSIONS = frozenset({"lz4", "zstd", "none"})
LEVEL_MAX = 64
"""Each level is ten times the one above: more than these do not exist."""
PROBES_MAX = 64
U64_END = 1 << 64
READ_BYTES = 64 << 10
"""Read from the end of a file at first: mostly all of the section."""

if TAIL.size != TAIL_BYTES or ARROW_END.size != ARROW_END_BYTES:
    raise AssertionError("the table's structs disagree with their literal sizes")

_HINT = "`quire kv verify` shows what is affected; `quire kv repair` shows what can be recovered"


class BlockPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a block is, and what it must be."""

    offset: int
    size: int
    rows: int
    crc64: int
    first_key: bytes


class TableMeta(msgspec.Struct, frozen=True, array_like=True):
    """Everything about a table that is not its rows. Fields are only appended, with defaults."""

    sst_id: int
    level: int
    rows: int
    tombstones: int
    key_min: bytes
    key_max: bytes
    lsn_min: int
    lsn_max: int
    raw_bytes: int
    """Of keys and values, before compression."""
    bloom_bits: int
    blocks: list[BlockPlace]
    compression: str = "lz4"
    keys: int = 0
    """Different ones; 0: not known, the table is from before they were counted. Rows beyond them are older versions."""


def encode_section(meta: TableMeta, bloom: Bloom, offset: int) -> bytes:
    """The section, for a file that is `offset` bytes long so far."""
    index = msgspec.msgpack.encode(meta)
    padding = bytes(-(offset + len(bloom.data) + len(index) + TAIL_BYTES) % ALIGNMENT)
    head = TAIL.pack(offset, len(bloom.data), len(index), bloom.hashes, VERSION, 0, bytes(4), 0, MAGIC)[:-CRC_BYTES]
    covered = b"".join((bloom.data, index, padding, head))
    return covered + crc64(covered).to_bytes(8, "little") + MAGIC


@dataclass(frozen=True, slots=True)
class _Section:
    """What is between the last record batch and Arrow's end, checked."""

    offset: int
    size: int
    meta: TableMeta
    bloom: Bloom
    checksum: int


def read_section(file: File, path: str) -> tuple[TableMeta, Bloom, int]:
    """The index, the filter and the checksum of both; raises if the file is not a whole, unaltered table."""
    section = _find_section(file, path)
    return section.meta, section.bloom, section.checksum


def set_level(file: File, path: str, level: int) -> None:
    """Give another level to a table that no manifest names yet; synced on return (rule 5)."""
    old = _find_section(file, path)
    section = encode_section(msgspec.structs.replace(old.meta, level=level), old.bloom, old.offset)
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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corruption("a table's index cannot be decoded", hint=_HINT, path=path, cause=str(error)) from error
    if nonsense := _nonsense(meta, hashes, bloom_bytes, offset):
        raise Corruption("a table's index is inconsistent", hint=_HINT, path=path, cause=nonsense)
    return _Section(offset, section_bytes, meta, Bloom(meta.bloom_bits, hashes, section[:bloom_bytes]), checksum)


def _nonsense(meta: TableMeta, probes: int, bloom_bytes: int, blocks_end: int) -> str:
    """What is impossible about an index, before any of its numbers is used; empty if nothing is."""
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
    """Some bytes of a file whose end was read already."""
    start = size - len(end)
    if offset >= start:
        return end[offset - start : offset - start + length]
    return file.read_at(length, offset)


def decode_blocks(data: bytes, places: Sequence[BlockPlace], meta: TableMeta, path: str) -> list[pa.RecordBatch]:
    """The rows of neighbouring blocks, if the bytes are the ones that were written, and make sense (rule 3)."""
    start, view, compression = places[0].offset, memoryview(data), meta.compression
    for place in places:
        piece = view[place.offset - start : place.offset - start + place.size]
        actual = crc64(piece)
        if actual != place.crc64:
            text = "a block of a table fails its checksum"
            where = {"path": path, "offset": place.offset, "expected": place.crc64, "actual": actual}
            raise ChecksumMismatch(text, hint=_HINT, **where)
        try:
            check_message(piece, place.rows, meta.raw_bytes, compressed=compression != "none")
        except ValueError as error:
            text = "a block of a table cannot be decoded"
            raise Corruption(text, hint=_HINT, path=path, offset=place.offset, cause=str(error)) from error
    try:
        if compression == "none":  # the columns then lie in `data` itself
            pieces = (view[place.offset - start : place.offset - start + place.size] for place in places)
            batches = [pa.ipc.read_record_batch(pa.py_buffer(piece), SCHEMA) for piece in pieces]
        else:  # as a stream, because only there can Arrow be told not to wake other threads for a few KiB
            reader = pa.ipc.open_stream(pa.py_buffer(_SCHEMA_MESSAGE + data), options=_READ_OPTIONS)
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
    """Only values may be null; point reads look at the other columns' buffers as they are."""
    if any(batch.column(number).null_count for number in (0, 2, 3)):
        raise ValueError("a key, an lsn or a tombstone is null")


_SCHEMA_MESSAGE: bytes = SCHEMA.serialize().to_pybytes()
_READ_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)


def _not_a_table(what: str, path: str, size: int) -> Corruption:
    return Corruption(what, hint=_HINT, path=path, size=size)
