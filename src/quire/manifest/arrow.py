"""Manifest tables as Arrow: whole columns at a time, no loop over rows where numpy or Arrow can do it.

Keys of fixed width and packed records are decoded by numpy from one joined buffer. msgpack records are decoded into plain
tuples and turned into columns with one transposition per step; rows written by an older version, which have fewer
fields, go through their record type and get its defaults.

Rules
  1. Columns are the key's fields, then the record's, in order; enumerations are their numbers, nested values are JSON.
  2. Memory is the result plus one step of `SCAN_ROWS_MAX` rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa

from quire.core.limits import SCAN_ROWS_MAX
from quire.manifest import tables as t
from quire.manifest.codec import VERSION

if TYPE_CHECKING:
    from quire.manifest.reads import ReadTxn

_KEY_TYPES = {
    "u8": pa.uint8(),
    "u16": pa.uint16(),
    "u32": pa.uint32(),
    "u64": pa.uint64(),
    "text": pa.string(),
    "raw": pa.binary(),
}


def to_arrow(txn: ReadTxn, table: t.Table[Any]) -> pa.Table:
    """Every row of a table."""
    layout = schema(table)
    return pa.Table.from_batches(list(batches(txn, table)), schema=layout)


def batches(txn: ReadTxn, table: t.Table[Any], rows: int = SCAN_ROWS_MAX) -> Iterator[pa.RecordBatch]:
    """The rows of a table in steps."""
    layout = schema(table)
    cursor = txn.raw_scan(table)
    while step := list(islice(cursor, rows)):
        keys, values = zip(*step)
        columns = [*_key_columns(table, keys), *_value_columns(table, values)]
        yield pa.RecordBatch.from_arrays(columns, schema=layout)


def schema(table: t.Table[Any]) -> pa.Schema:
    """The Arrow schema of a table."""
    fields = [pa.field(_key_name(table, name), _KEY_TYPES[kind]) for name, kind in table.key.fields]
    for name, hint in _record_fields(table):
        fields.append(pa.field(name, _arrow_type(hint)))
    return pa.schema(fields)


def _key_name(table: t.Table[Any], name: str) -> str:
    """Keys keep their name unless the record has a field of the same name (change_log's sequence): then `key_…`."""
    return f"key_{name}" if name in table.codec.record_type.__struct_fields__ else name


def _record_fields(table: t.Table[Any]) -> list[tuple[str, Any]]:
    hints = get_type_hints(table.codec.record_type)
    return [(name, hints[name]) for name in table.codec.record_type.__struct_fields__]


def _arrow_type(hint: Any) -> pa.DataType:
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return pa.uint8()
    plain = {int: pa.uint64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}
    return plain.get(hint, pa.string())


def _key_columns(table: t.Table[Any], keys: tuple[bytes, ...]) -> list[pa.Array]:
    if table.key.width is None:
        columns = zip(*map(table.key.unpack, keys))
        return [pa.array(column, _KEY_TYPES[kind]) for column, (_, kind) in zip(columns, table.key.fields)]
    packed = np.frombuffer(b"".join(keys), dtype=table.key.numpy_fields())
    return [pa.array(_native(packed[name])) for name, _ in table.key.fields]


def _value_columns(table: t.Table[Any], values: tuple[bytes, ...]) -> list[pa.Array]:
    codec = table.codec
    if codec.packed is not None:
        if any(len(raw) != codec.packed.size for raw in values):
            rows = [msgspec.structs.astuple(codec.decode(raw)) for raw in values]
            return _transposed(table, rows)
        packed = np.frombuffer(b"".join(values), dtype=codec.numpy_fields())
        return [pa.array(_native(packed[name]).astype(np.uint64)) for name in codec.record_type.__struct_fields__]
    head = VERSION.pack(codec.version)
    decode: Callable[[Any], tuple[Any, ...]] = msgspec.msgpack.Decoder(tuple[Any, ...]).decode
    width = len(codec.record_type.__struct_fields__)
    rows = [decode(memoryview(raw)[2:]) if raw.startswith(head) else () for raw in values]
    if set(map(len, rows)) != {width}:
        rows = [
            row if len(row) == width else tuple(msgspec.to_builtins(codec.decode(raw)))
            for row, raw in zip(rows, values)
        ]
    return _transposed(table, rows)


def _transposed(table: t.Table[Any], rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [_column(values, _arrow_type(hint), hint) for values, (_, hint) in zip(zip(*rows), _record_fields(table))]


def _column(values: tuple[Any, ...], kind: pa.DataType, hint: Any) -> pa.Array:
    if kind == pa.string() and hint is not str:
        encode = msgspec.json.encode
        return pa.array([None if value is None else encode(value).decode() for value in values], kind)
    return pa.array(values, kind)


def _native(column: Any) -> Any:
    """A contiguous column in the machine's byte order, which Arrow requires."""
    return np.ascontiguousarray(column).astype(column.dtype.newbyteorder("="), copy=False)
