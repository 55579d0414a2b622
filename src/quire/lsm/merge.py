"""Sorted rows from several places become one sorted stream, a part of the key space at a time, without a loop over rows.

A part is a range [low, high) small enough to be merged in memory: concatenate, sort by key and by falling lsn, decide by
masks. Versions of a key never fall into two parts. A stripe is the lsns between two neighbouring snapshots: of the versions
of a key in one stripe only the newest is ever seen. A compaction keeps that one; a tombstone goes only if nothing older of
its key can be anywhere else (the caller says so) and nothing older is kept here.

Any thread; importable on executors. Raises what reading and writing tables raise."""

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
from quire.lsm.compaction import TableOptions, VersionRetention
from quire.lsm.sst_format import SCHEMA, TableMeta
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter, key_changes

Mark = tuple[bytes, int]
Hidden = frozenset[int]
"""Lsns of bulk loads that were under way when a snapshot was taken: it must not see them when they are done."""

FIRST_PART_BYTES = 128 * KIB
"""A scan's first part is small, so that its first row comes soon; each next one is four times as large, up to:"""
PART_BYTES = 8 * MIB

SORT_KEYS = [("key", "ascending"), ("lsn", "descending")]
PAIR = pa.schema([SCHEMA.field("key"), pa.field("value", pa.binary(), nullable=False)])
"""What a scan gives."""


def pairs_batch(keys: list[bytes], values: list[bytes]) -> pa.RecordBatch:
    """One batch of `PAIR`."""
    return pa.record_batch([pa.array(keys, pa.binary()), pa.array(values, pa.binary())], schema=PAIR)


class RowSource(Protocol):
    """Sorted rows."""

    def marks(self, low: bytes, high: bytes | None) -> list[Mark]:
        """Where parts may begin, in order."""

    def rows_between(self, low: bytes, high: bytes | None) -> list[pa.RecordBatch]:
        """The rows with keys in [low, high), in order."""


def parts(
    sources: Sequence[RowSource], low: bytes, high: bytes | None, *, first_bytes: int, bytes_max: int = PART_BYTES
) -> list[tuple[bytes, bytes | None]]:
    """Cut [low, high) into parts."""
    marks = sorted(mark for source in sources for mark in source.marks(low, high))
    cuts, size, limit = [low], 0, first_bytes
    for key, following in marks:
        if size >= limit and key > cuts[-1]:
            cuts.append(key)
            size, limit = 0, min(limit * 4, bytes_max)
        size += following
    return list(zip(cuts, [*cuts[1:], high]))


def merged(sources: Sequence[RowSource], low: bytes, high: bytes | None) -> pa.RecordBatch:
    """All rows with keys in [low, high), sorted."""
    runs = [rows for source in sources if (rows := source.rows_between(low, high))]
    batches = [batch for rows in runs for batch in rows]
    if not batches:
        return pa.record_batch([pa.array([], field.type) for field in SCHEMA], schema=SCHEMA)
    whole = pa.concat_batches(batches) if len(batches) > 1 else batches[0]
    if len(runs) == 1:
        return whole
    return whole.take(pc.sort_indices(whole, sort_keys=SORT_KEYS))


def visible(rows: pa.RecordBatch, lsn: int, hidden: Hidden = frozenset()) -> pa.RecordBatch:
    """Keys and values that a read at an lsn sees in sorted rows, those of the `hidden` lsns left out."""
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
    """What a compaction keeps of sorted rows."""
    begins = _begins(rows.column(0))
    keep = begins
    if retention.snapshots and not begins.all():
        stripes = np.searchsorted(np.array(retention.snapshots, np.uint64), rows.column(2).to_numpy(), side="left")
        keep = begins | np.concatenate(([True], stripes[1:] != stripes[:-1]))
    rows = rows if keep.all() else rows.filter(pa.array(keep))
    dead = rows.column(3)
    if not retention.drop_tombstones_below or not dead.true_count:
        return rows
    ends = np.concatenate((key_changes(rows.column(0)), [True]))  # nothing older of the key follows
    young = rows.column(2).to_numpy() >= np.uint64(retention.drop_tombstones_below)
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
    """What a read at an lsn sees in [low, high), as batches of keys and values in order, or in the opposite one."""
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
    """What a compaction of these sources keeps, as sorted batches; no key is in two of them."""
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
    stage: str = "",
) -> list[tuple[str, TableMeta]]:
    """Merge the rows of tables in [low, high) into new ones; their paths and what they hold. `new_table` gives id and path."""
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
    """For each row, whether it is the first of its key."""
    if not len(keys):
        return np.zeros(0, np.bool_)
    return np.concatenate(([True], key_changes(keys)))
