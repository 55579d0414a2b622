"""Bulk loads: tables that are written by this process or others (e.g. executors) enter a database atomically.

All rows of a load have one lsn, taken when it begins: earlier writes are older than the loaded rows, later writes are newer,
even those that become visible before the load does. So a key may occur only once in a load. Publishing makes all rows visible
with one `Compaction{added, removed: []}`; a snapshot taken before that does not see them. A load that is not published leaves
only files, which are removed when it is closed, with the next compaction, or at the next open.

    with begin_load(kv) as load:
        writer = BulkWriter.of(kv, load)        # or anywhere that shares the directory: `BulkWriter(disk, target, ids)`
        writer.add(keys, values)
        load.publish(writer.finish())

Threads: one for each load and each writer. Importable on executors. Raises `InvalidInput`, `OutOfRange`, `Corruption`, and
the disk's errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.core.barrier import changes
from quire.core.closing import ClosedOnExit
from quire.core.errors import InvalidInput, OutOfRange, StorageFault
from quire.core.limits import MIB
from quire.durable.files import Disk
from quire.durable.names import LsmHome
from quire.lsm.compaction import VersionRetention, clusters
from quire.lsm.load_records import LoadRecord, read_load_record
from quire.lsm.merge import PART_BYTES, merge_tables, merged, parts
from quire.lsm.sst_format import SCHEMA, TableMeta
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter, key_changes
from quire.lsm.table_options import TableOptions, table_options
from quire.lsm.wal import KEY_BYTES_MAX, VALUE_BYTES_MAX

if TYPE_CHECKING:
    from quire.lsm.kv import Kv

BUFFER_BYTES = 128 * MIB
"""Keys and values that a writer buffers before it sorts and writes them. Sorting needs twice this memory."""


class Load(ClosedOnExit):
    """A load in progress; made by `begin_load`."""

    def __init__(self, kv: Kv, lsn: int) -> None:
        self.lsn = lsn
        self._kv = kv
        if kv.barrier is not None:
            kv.barrier.cover(self)
        self._ids: set[int] = set()
        self._over = False

    def allocate(self, count: int) -> range:
        """Allocate ids for tables of this load."""
        ids = self._kv.manifest.allocate_sst_ids(count)
        self._ids.update(ids)
        return ids

    def path(self, sst_id: int) -> str:
        """Return the path to which the table with this id must be written."""
        return self._kv.home.sst(sst_id)

    @changes
    def publish(self, ids: Iterable[int], *, number: int = 0) -> int:
        """Add tables to the database atomically. Return the number of their rows.

        With a `number` the result is recorded, and `published` returns it."""
        kv = self._kv
        chosen = sorted(set(ids))
        if self._over or not self._ids.issuperset(chosen):
            raise InvalidInput("these tables do not belong to this load", hint="use ids from `allocate`", ids=chosen)
        tables = [SSTable.open(kv.disk, self.path(sst_id), sst_id) for sst_id in chosen]
        try:
            for table in tables:
                self._check(table)
            _refuse_duplicates(tables)
        finally:
            for table in tables:
                table.close()
        rows = sum(table.meta.rows for table in tables)
        record = LoadRecord(number=number, at_ms=kv.clock.now_ms(), rows=rows, ids=tuple(chosen)) if number else None
        self._ids.difference_update(chosen)  # from here on an event may name them, so `close` must not remove them
        try:
            kv.upkeep.add_tables(tables, self.lsn, record)
        except BaseException:
            if not kv.upkeep.may_be_live(chosen):
                self._ids.update(chosen)  # `close` removes them
            raise
        self.close()
        return rows

    def _check(self, table: SSTable) -> None:
        meta = table.meta
        if (meta.lsn_min, meta.lsn_max) != (self.lsn, self.lsn):
            lsns = (meta.lsn_min, meta.lsn_max)
            raise InvalidInput("every row of a loaded table must have the load's lsn", sst_id=meta.sst_id, lsns=lsns)

    def close(self) -> None:
        """End the load, and remove tables that were not published. Idempotent."""
        if self._over:
            return
        self._over = True
        self._kv.end_load(self.lsn)
        self._kv.upkeep.abandon_tables(self._ids)


def begin_load(kv: Kv) -> Load:
    """Begin a load."""
    return Load(kv, kv.begin_load())


def published(kv: Kv, number: int) -> int | None:
    """Return the number of rows of the load with this number, or `None` if it was not published."""
    record = read_load_record(kv.disk, kv.home, number)
    return record.rows if record is not None and record.done else None


def _refuse_duplicates(tables: list[SSTable]) -> None:
    """Refuse a key that occurs twice in a load. The writer ensures this within a table, so only overlapping tables are
    read."""
    for together in clusters(tables):
        for low, high in parts(together, b"", None, first_bytes=PART_BYTES):
            keys = merged(together, low, high).column(0)
            changes = key_changes(keys)
            if not changes.all():
                raise duplicate_key_error(keys[int(np.argmin(changes))].as_py())


def duplicate_key_error(key: bytes = b"") -> InvalidInput:
    """Return the error for a key that occurs twice in a load."""
    text = "a key occurs twice in a load, so its newest value is ambiguous"
    where = {"key": key[:60]} if key else {}
    return InvalidInput(text, hint="keep one row per key first, with dropDuplicates or an aggregate", **where)


# ── writing the tables, in this process or on an executor ─────────────────────────────────────────────────────────────
TakeIds = Callable[[int], Sequence[int]]
"""Returns the given number of table ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """Where and how the tables of a load are written. Small and picklable."""

    directory: str
    """The directory of the database."""
    lsn: int
    table_bytes: int
    options: TableOptions


class BulkWriter:
    """Writes the tables of a load: `add` pairs of columns, then `finish`."""

    def __init__(self, disk: Disk, target: LoadTarget, take_ids: TakeIds, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._disk = disk
        self._target = target
        self._home = LsmHome(target.directory)
        self._take_ids = take_ids
        self._buffer_bytes = buffer_bytes
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._written: list[tuple[int, TableMeta]] = []
        self.rows = 0

    @classmethod
    def of(cls, kv: Kv, load: Load) -> Self:
        """Return a writer for a load of a database that this process owns."""
        options = table_options(kv.settings)
        target = LoadTarget(directory=kv.home.path, lsn=load.lsn, table_bytes=kv.settings.table_bytes, options=options)
        return cls(kv.disk, target, load.allocate)

    def add(self, keys: pa.Array, values: pa.Array) -> None:
        """Add rows: keys and values, binary or text. A null value is a deletion."""
        if not len(keys):
            return
        batch = pa.record_batch([_binary(keys, "key"), _binary(values, "value")], names=["key", "value"])
        _check(batch)
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._waiting_bytes >= self._buffer_bytes:
            self._flush()

    def finish(self) -> list[int]:
        """Write the remaining rows. Return the ids of all tables."""
        self._flush()
        ids = [sst_id for sst_id, _ in self._written]
        ranges = sorted((meta.key_min, meta.key_max) for _, meta in self._written)
        if any(left[1] >= right[0] for left, right in pairwise(ranges)):
            ids = self._merge(ids)
        return ids

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge overlapping tables into disjoint ones. Return their ids."""
        tables = [SSTable.open(self._disk, self._home.sst(sst_id), sst_id) for sst_id in ids]
        try:
            outputs = merge_tables(
                self._disk,
                tables,
                VersionRetention(),
                level=0,
                table_bytes=self._target.table_bytes,
                options=self._target.options,
                new_table=self._new_table,
            )
        finally:
            for table in tables:
                table.close()
        # All rows have one lsn, so the merge keeps one row of a key that occurs twice: fewer rows show it.
        if sum(meta.rows for _, meta in outputs) != self.rows:
            raise duplicate_key_error()
        for table in tables:
            with suppress(StorageFault, FileNotFoundError):
                self._disk.remove(table.path)
        return [meta.sst_id for _, meta in outputs]

    def _new_table(self) -> tuple[int, str]:
        (sst_id,) = self._take_ids(1)
        return sst_id, self._home.sst(sst_id)

    def _flush(self) -> None:
        if not self._waiting:
            return
        batch = pa.concat_batches(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        self._waiting, self._waiting_bytes = [], 0
        batch = in_order(batch)
        cuts = table_cuts(batch, self._target.table_bytes)
        for sst_id, (start, end) in zip(self._take_ids(len(cuts) - 1), pairwise(cuts)):
            writer = TableWriter(sst_id, 0, self._target.options)
            for piece in _pieces(batch.slice(start, end - start)):
                writer.add(self._rows(piece))
            self._written.append((sst_id, writer.write(self._disk, self._home.sst(sst_id))))

    def _rows(self, pairs: pa.RecordBatch) -> pa.RecordBatch:
        keys, values = pairs.columns
        lsns = pa.array(np.full(len(keys), self._target.lsn, np.uint64))
        return pa.record_batch([keys, values, lsns, values.is_null()], schema=SCHEMA)


def in_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows sorted by key. Raises if a key occurs twice.

    >>> in_order(pa.record_batch([pa.array([b"b", b"a"]), pa.array([b"2", b"1"])], names=["key", "value"])).to_pylist()
    [{'key': b'a', 'value': b'1'}, {'key': b'b', 'value': b'2'}]
    """
    keys = batch.column(0)
    if len(keys) < 2 or pc.all(pc.less(keys.slice(0, len(keys) - 1), keys.slice(1))).as_py():
        return batch
    batch = batch.take(pc.array_sort_indices(keys))
    keys = batch.column(0)
    changes = key_changes(keys)
    if not changes.all():
        raise duplicate_key_error(keys[int(np.argmin(changes))].as_py())
    return batch


def table_cuts(batch: pa.RecordBatch, table_bytes: int) -> list[int]:
    """Return the rows at which a batch is split into tables of equal row counts and about `table_bytes` each."""
    count = max(1, round(batch.nbytes / table_bytes))
    return [batch.num_rows * number // count for number in range(count)] + [batch.num_rows]


PIECE_ROWS = 65_536
"""Rows that are passed to the table writer at once, so that the lsn and tombstone columns are built for these only."""


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, PIECE_ROWS):
        yield batch.slice(start, PIECE_ROWS)


def _binary(column: pa.Array, name: str) -> pa.Array:
    kind = column.type
    if kind == pa.binary():
        return column
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return column.cast(pa.binary())
    raise InvalidInput(
        "keys and values must be binary or string columns", hint="cast the column", column=name, type=str(kind)
    )


def _check(batch: pa.RecordBatch) -> None:
    if batch.column(0).null_count:
        raise InvalidInput("a key is null", hint="filter such rows out: df.filter('key IS NOT NULL')")
    for column, name, most in ((0, "key", KEY_BYTES_MAX), (1, "value", VALUE_BYTES_MAX)):
        longest = pc.max(pc.binary_length(batch.column(column))).as_py()
        if longest is not None and longest > most:
            raise OutOfRange(f"a {name} is too long", size=longest, max=most)
