"""Merges sorted rows of several sources into one sorted stream, one part of the key space at a time, without a loop over rows.

Terms
  part    a range [low, high) small enough to be merged in memory: concatenate, sort by key and descending lsn, filter by masks.
          All versions of a key are in one part
  stripe  the lsns between two neighbouring snapshots. Of the versions of a key in one stripe, only the newest is visible to any
          read, and a compaction keeps only that one

A tombstone is dropped only if no older version of its key can exist elsewhere (the caller decides this) and none is kept here.

Threads: any; importable on executors. Raises the errors of reading and writing tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from quire.core.errors import StorageFault
from quire.core.limits import KIB, MIB
from quire.durable.failpoints import hit
from quire.durable.files import Disk
from quire.durable.names import TEMPORARY
from quire.lsm.compaction import VersionRetention
from quire.lsm.sst_format import SCHEMA, TableMeta
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter, key_changes
from quire.lsm.table_options import TableOptions

Mark = tuple[bytes, int]
Hidden = frozenset[int]
"""Lsns of bulk loads that were in progress when a snapshot was taken, and that it must not see once they are published."""

FIRST_PART_BYTES = 128 * KIB
"""A scan's first part is small, to return the first row soon. Each further part is four times as large, up to:"""
PART_BYTES = 8 * MIB

SORT_KEYS = [("key", "ascending"), ("lsn", "descending")]
PAIR = pa.schema([SCHEMA.field("key"), pa.field("value", pa.binary(), nullable=False)])
"""The schema of a scan's batches."""


def pairs_batch(keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
    """Build one batch of schema `PAIR`."""
    return pa.record_batch([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=PAIR)


class RowSource(Protocol):
    """A source of sorted rows."""

    def marks(self, low: bytes, high: bytes | None) -> list[Mark]:
        """Return the positions at which parts may begin, in order: (key, approximate bytes until the next one)."""

    def rows_between(self, low: bytes, high: bytes | None) -> list[pa.RecordBatch]:
        """Return the rows with keys in [low, high), in order."""


def parts(
    sources: Sequence[RowSource], low: bytes, high: bytes | None, *, first_bytes: int, bytes_max: int = PART_BYTES
) -> list[tuple[bytes, bytes | None]]:
    """Split [low, high) into parts."""
    marks = sorted(mark for source in sources for mark in source.marks(low, high))
    cuts, size, limit = [low], 0, first_bytes
    for key, following in marks:
        if size >= limit and key > cuts[-1]:
            cuts.append(key)
            size, limit = 0, min(limit * 4, bytes_max)
        size += following
    return list(zip(cuts, [*cuts[1:], high]))


def merged(sources: Sequence[RowSource], low: bytes, high: bytes | None) -> pa.RecordBatch:
    """Return all rows with keys in [low, high), sorted."""
    runs = [rows for source in sources if (rows := source.rows_between(low, high))]
    batches = [batch for rows in runs for batch in rows]
    if not batches:
        return pa.record_batch([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)
    rows = pa.concat_batches(batches) if len(batches) > 1 else batches[0]
    if len(runs) == 1:
        return rows
    return rows.take(pc.sort_indices(rows, sort_keys=SORT_KEYS))


def visible(rows: pa.RecordBatch, lsn: int, hidden: Hidden = frozenset()) -> pa.RecordBatch:
    """Return the keys and values that a read at `lsn` sees in sorted rows, ignoring rows with `hidden` lsns."""
    numbers = rows.column(2).to_numpy()
    if hidden:
        rows = rows.filter(pa.array(~np.isin(numbers, np.array(sorted(hidden), np.uint64))))
        numbers = rows.column(2).to_numpy()
    if rows.num_rows and int(numbers.max()) > lsn:
        rows = rows.filter(pa.array(numbers <= np.uint64(lsn)))
    keep = _begins(rows.column(0))
    dead = rows.column(3)
    if dead.true_count:
        keep &= ~dead.to_numpy(zero_copy_only=False)
    pair = pa.record_batch([rows.column(0), rows.column(1)], schema=PAIR)
    return pair if keep.all() else pair.filter(pa.array(keep))


def retained(rows: pa.RecordBatch, retention: VersionRetention) -> pa.RecordBatch:
    """Return the rows that a compaction keeps of sorted rows."""
    begins = _begins(rows.column(0))
    keep = begins
    if retention.snapshots and not begins.all():
        # `left`: a version at a snapshot's own lsn is visible to it, so it belongs to the stripe that ends there.
        stripes = np.searchsorted(np.array(retention.snapshots, np.uint64), rows.column(2).to_numpy(), side="left")
        keep = begins | np.concatenate(([True], stripes[1:] != stripes[:-1]))
    rows = rows if keep.all() else rows.filter(pa.array(keep))
    dead = rows.column(3)
    if not retention.drop_tombstones_below or not dead.true_count:
        return rows
    ends = np.concatenate((key_changes(rows.column(0)), [True]))  # whether the row is the oldest of its key
    young = rows.column(2).to_numpy() >= np.uint64(retention.drop_tombstones_below)
    # A tombstone above a kept version stays: that version is there for a snapshot, and hidden from all other reads.
    stays = ~dead.to_numpy(zero_copy_only=False) | ~ends | young
    return rows.filter(pa.array(stays))


def scan_parts(
    sources: Sequence[RowSource],
    low: bytes,
    high: bytes | None,
    lsn: int,
    *,
    hidden: Hidden = frozenset(),
    reverse: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the keys and values that a read at `lsn` sees in [low, high), as batches in ascending or descending order."""
    cut = parts(sources, low, high, first_bytes=FIRST_PART_BYTES)
    for start, end in reversed(cut) if reverse else cut:
        batch = visible(merged(sources, start, end), lsn, hidden)
        if batch.num_rows:
            yield batch.take(pa.array(np.arange(batch.num_rows - 1, -1, -1))) if reverse else batch


def compacted(
    sources: Sequence[RowSource],
    retention: VersionRetention,
    low: bytes = b"",
    high: bytes | None = None,
    *,
    part_bytes: int = PART_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows that a compaction of `sources` keeps, as sorted batches. No key is in two batches."""
    for start, end in parts(sources, low, high, first_bytes=part_bytes, bytes_max=part_bytes):
        batch = retained(merged(sources, start, end), retention)
        if batch.num_rows:
            yield batch


def merge_tables(
    disk: Disk,
    inputs: Sequence[SSTable],
    retention: VersionRetention,
    *,
    level: int,
    table_bytes: int,
    options: TableOptions,
    new_table: Callable[[], tuple[int, str]],
    low: bytes = b"",
    high: bytes | None = None,
    stage: str = TEMPORARY,
) -> list[tuple[str, TableMeta]]:
    """Merge the rows of tables in [low, high) into new tables. Return their paths and metadata.

    `new_table` returns the id and path of the next table."""
    outputs: list[tuple[str, TableMeta]] = []
    writer: TableWriter | None = None
    path = ""
    try:
        for batch in compacted(inputs, retention, low, high, part_bytes=min(PART_BYTES, table_bytes)):
            if writer is None:
                sst_id, path = new_table()
                writer = TableWriter(sst_id, level, options)
            writer.add(batch)
            if writer.raw_bytes >= table_bytes:
                outputs.append((path, writer.write(disk, path, stage)))
                writer = None
                hit("lsm.compaction.output")
        if writer is not None:
            outputs.append((path, writer.write(disk, path, stage)))
    except Exception:
        for written, _ in outputs:
            with suppress(StorageFault, FileNotFoundError):
                disk.remove(written)
        raise
    return outputs


def _begins(keys: pa.BinaryArray) -> NDArray[np.bool_]:
    """Return for each row whether it is the first of its key."""
    if not len(keys):
        return np.zeros(0, np.bool_)
    return np.concatenate(([True], key_changes(keys)))
