"""Manifest tables as Arrow: decodes whole columns at a time, with no loop over rows where numpy or Arrow can avoid it.

Keys of fixed width and packed records are decoded by numpy from one joined buffer. msgpack records of plain fields are
decoded in one call per step and turned into columns in another; rows written by an older version, which have fewer
fields, and records with nested fields go through their record type one by one.

Rules
  1. Columns are the key's fields, then the record's, in order; enumerations are their numbers, nested values are JSON.
  2. Memory is the result plus one step of `STEP_ROWS` rows.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa

from quire.core.decoding import UNDECODABLE
from quire.manifest import tables as t

if TYPE_CHECKING:
    from quire.manifest.reads import ReadTxn

STEP_ROWS = 8_192
"""Rows decoded at once: few enough that their Python objects stay in the processor's cache."""

_KEY_TYPES = {
    "u8": pa.uint8(),
    "u16": pa.uint16(),
    "u32": pa.uint32(),
    "u64": pa.uint64(),
    "text": pa.string(),
    "raw": pa.binary(),
}


def to_arrow(txn: ReadTxn, table: t.Table[Any]) -> pa.Table:
    """Return every row of a table."""
    layout = schema(table)
    return pa.Table.from_batches(list(batches(txn, table)), schema=layout)


def batches(txn: ReadTxn, table: t.Table[Any], rows: int = STEP_ROWS) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in steps."""
    layout = schema(table)
    for keys, values in txn.steps(table, rows):
        columns = [*_key_columns(table, keys), *_value_columns(table, keys, values)]
        yield pa.RecordBatch.from_arrays(columns, schema=layout)


def step_after(txn: ReadTxn, table: t.Table[Any], after: bytes | None, rows: int) -> tuple[list[bytes], list[bytes]]:
    """Return keys and values of up to `rows` rows whose keys lie after `after`."""
    keys, values = next(txn.steps(table, rows + 1, start=after or b""), ([], []))
    first = int(bool(keys) and keys[0] == after)
    return keys[first : first + rows], values[first : first + rows]


def one_batch(
    txn: ReadTxn, table: t.Table[Any], after: bytes | None, rows: int
) -> tuple[pa.RecordBatch | None, bytes | None]:
    """Return up to `rows` rows whose keys lie after `after`, and the last of those keys; (None, None) at the end."""
    keys, values = step_after(txn, table, after, rows)
    if not keys:
        return None, None
    columns = [*_key_columns(table, keys), *_value_columns(table, keys, values)]
    return pa.RecordBatch.from_arrays(columns, schema=schema(table)), keys[-1]


def schema(table: t.Table[Any]) -> pa.Schema:
    """Return the Arrow schema of a table."""
    fields = [pa.field(_key_name(table, name), _KEY_TYPES[kind]) for name, kind in table.key.fields]
    for name, hint in _record_fields(table):
        fields.append(pa.field(name, _arrow_type(hint)))
    return pa.schema(fields)


def _key_name(table: t.Table[Any], name: str) -> str:
    """Return the column name of a key field: `key_…` if the record has a field of that name (change_log's sequence)."""
    return f"key_{name}" if name in table.codec.record_type.__struct_fields__ else name


def _record_fields(table: t.Table[Any]) -> list[tuple[str, Any]]:
    hints = get_type_hints(table.codec.record_type)
    return [(name, hints[name]) for name in table.codec.record_type.__struct_fields__]


def _arrow_type(hint: Any) -> pa.DataType:
    if _is_enum(hint):
        return pa.uint8()
    plain = {int: pa.uint64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
    return plain.get(hint, pa.string())


def _key_columns(table: t.Table[Any], keys: list[bytes]) -> list[pa.Array]:
    if table.key.width is None:
        columns = zip(*map(table.key.unpack, keys))
        return [pa.array(column, _KEY_TYPES[kind]) for column, (_, kind) in zip(columns, table.key.fields)]
    packed = np.frombuffer(b"".join(keys), dtype=table.key.numpy_fields())
    return [pa.array(_native(packed[name])) for name, _ in table.key.fields]


def _value_columns(table: t.Table[Any], keys: list[bytes], values: list[bytes]) -> list[pa.Array]:
    codec, rows = table.codec, table.rows
    if codec.packed is not None:
        packed = rows.columns(keys, values)
        return [pa.array(_native(packed[name]).astype(np.uint64)) for name in codec.record_type.__struct_fields__]
    fields = _record_fields(table)
    if all(_is_plain(hint) for _, hint in fields) and rows.are_intact(keys, values):
        cells = _cells(rows.marked, len(fields), values)
        if cells is not None:
            return [_plain_column(cells[index :: len(fields)], hint) for index, (_, hint) in enumerate(fields)]
    records = [rows.decode(key, raw) for key, raw in zip(keys, values, strict=True)]
    return _transposed(table, [tuple(msgspec.to_builtins(record, builtin_types=(bytes,))) for record in records])


def _cells(version: bytes, width: int, values: list[bytes]) -> list[Any] | None:
    """Return the fields of all rows in one flat list, or `None` if a row has another version or fewer fields.

    A row is its version, a msgpack array and its checksum. Without their array headers, and after one header for all of
    them, the rows are one long array: one call of the decoder, and no object per row for the garbage collector to
    visit.
    """
    header = version + (bytes([0x90 | width]) if width < 16 else b"\xdc" + width.to_bytes(2, "big"))
    if not all(map(bytes.startswith, values, repeat(header))):
        return None
    begin = len(header)
    try:
        bodies = b"".join([raw[begin:-4] for raw in values])
        cells = _DECODE_LIST(b"\xdd" + (width * len(values)).to_bytes(4, "big") + bodies)
    except UNDECODABLE:
        return None  # the slow path names the row that does not decode
    return cells


def _plain_column(cells: list[Any], hint: Any) -> pa.Array:
    """Return a column of plain values. Numbers go through `array`, which converts three times as fast as Arrow."""
    if hint is int:
        return pa.Array.from_buffers(pa.uint64(), len(cells), [None, pa.py_buffer(array("Q", cells))])
    if _is_enum(hint):
        return pa.Array.from_buffers(pa.uint8(), len(cells), [None, pa.py_buffer(array("B", cells))])
    return pa.array(cells, _arrow_type(hint))


_DECODE_LIST = msgspec.msgpack.Decoder(list[Any]).decode


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.IntEnum)


def _is_plain(hint: Any) -> bool:
    return hint in (int, float, str, bytes) or _is_enum(hint)


def _transposed(table: t.Table[Any], rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [_column(values, _arrow_type(hint), hint) for values, (_, hint) in zip(zip(*rows), _record_fields(table))]


def _column(values: tuple[Any, ...], kind: pa.DataType, hint: Any) -> pa.Array:
    if kind == pa.string() and hint is not str:
        encode = msgspec.json.encode
        return pa.array([None if value is None else encode(value).decode() for value in values], kind)
    return pa.array(values, kind)


def _native(column: Any) -> Any:
    """Return a contiguous column in the machine's byte order, which Arrow requires."""
    return np.ascontiguousarray(column).astype(column.dtype.newbyteorder("="), copy=False)
