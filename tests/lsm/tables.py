"""Shared by the tests of tables: rows, and tables made of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
from hypothesis import strategies as st

from quire.durable.files import OsDisk
from quire.lsm.block_cache import BlockCache
from quire.lsm.sst_format import SCHEMA
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter
from quire.lsm.table_options import TableOptions

Row = tuple[bytes, int, bytes | None]
"""key, lsn, value; `None` is a tombstone."""

SMALL = TableOptions(block_bytes=256)
KEYS = st.one_of(st.binary(max_size=3), st.binary(max_size=20), st.sampled_from([b"", b"\0", b"\xff", b"\xff" * 9]))
VALUES = st.one_of(st.none(), st.binary(max_size=60))
ROWS = st.dictionaries(st.tuples(KEYS, st.integers(0, 2**64 - 1)), VALUES, min_size=1, max_size=60).map(
    lambda rows: in_order((key, lsn, value) for (key, lsn), value in rows.items())
)


def in_order(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row[0], -row[1]))


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    columns = [
        [key for key, _, _ in rows],
        [value for _, _, value in rows],
        [lsn for _, lsn, _ in rows],
        [value is None for _, _, value in rows],
    ]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA)]
    return pa.record_batch(arrays, schema=SCHEMA)


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    return [
        (row["key"], row["lsn"], None if row["tombstone"] else row["value"])
        for batch in batches
        for row in batch.to_pylist()
    ]


def make_table(
    path: Path | str,
    rows: Sequence[Row],
    *,
    sst_id: int = 1,
    level: int = 0,
    options: TableOptions = SMALL,
    pieces: int = 1,
    cache: BlockCache | None = None,
) -> SSTable:
    """A table with these rows, added in `pieces` batches."""
    writer = TableWriter(sst_id, level, options)
    step = max(1, len(rows) // pieces)
    for start in range(0, len(rows), step):
        writer.add(batch_of(rows[start : start + step]))
    target = f"{path}/{sst_id:06d}.sst"
    writer.write(OsDisk(), target)
    return SSTable.open(OsDisk(), target, sst_id, cache)


def newest(rows: Iterable[Row], key: bytes, lsn: int) -> tuple[int, bytes | None] | None:
    """The result of a read at an lsn, by linear search."""
    versions = [(at, value) for name, at, value in rows if name == key and at <= lsn]
    return max(versions, key=lambda version: version[0], default=None)
