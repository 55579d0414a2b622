"""Rows become tables of a bulk load: sorted here, whatever order they come in. Runs on executors.

Terms
  buffer   rows that are sorted together; those of one buffer become tables with disjoint ranges, next to each other

Rules
  1. The tables of one writer are disjoint. Rows that fit one buffer, or come in order, are written once; of others each buffer
     becomes tables, and those are merged in the end.
  2. A key comes once, else it is refused; whoever publishes looks for keys that two writers have.
  3. A value that is null is a tombstone: the load deletes its key.
  4. Nothing here can be seen before the load is published: who fails or comes second leaves files, and nothing else.

Threads: one for each writer. Imports no manifest. Raises `InvalidInput`, `OutOfRange`, and what the disk raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.core.errors import InvalidInput, OutOfRange, StorageFault
from quire.core.limits import KIB, MIB
from quire.durable.files import Disk
from quire.durable.names import LsmHome
from quire.lsm import compaction
from quire.lsm.loading import Load, double_key
from quire.lsm.merge import VersionRetention
from quire.lsm.sst_format import SCHEMA, TableMeta
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableOptions, TableWriter, key_changes

if TYPE_CHECKING:
    from quire.lsm.kv import Kv

BUFFER_BYTES = 128 * MIB
"""Of keys and values: a task holds this twice while it sorts."""

KEY_BYTES_MAX = 64 * KIB - 1
VALUE_BYTES_MAX = 32 * MIB
"""As in kv.py."""

TakeIds = Callable[[int], Sequence[int]]
"""Gives so many ids of tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTarget:
    """Where the tables of a load go, and how they are written; small and picklable."""

    directory: str
    """The database's."""
    lsn: int
    table_bytes: int
    options: TableOptions


class BulkWriter:
    """`add` pairs of columns, then `finish`."""

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
        """A writer for a load of a database that this process owns."""
        options = compaction.table_options(kv.settings)
        target = LoadTarget(directory=kv.home.path, lsn=load.lsn, table_bytes=kv.settings.table_bytes, options=options)
        return cls(kv.disk, target, load.allocate)

    def add(self, keys: pa.Array, values: pa.Array) -> None:
        """More rows: keys and values, binary or text."""
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
        """Write what is left; the ids of all tables (rule 1)."""
        self._flush()
        ids = [sst_id for sst_id, _ in self._written]
        ranges = sorted((meta.key_min, meta.key_max) for _, meta in self._written)
        if any(left[1] >= right[0] for left, right in pairwise(ranges)):
            ids = self._merge(ids)
        return ids

    def _merge(self, ids: list[int]) -> list[int]:
        """Tables that overlap become tables that do not."""
        tables = [SSTable.open(self._disk, self._home.sst(sst_id), sst_id) for sst_id in ids]
        try:
            outputs = compaction.run(
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
        if sum(meta.rows for _, meta in outputs) != self.rows:
            raise double_key()
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
    """Rows sorted by key; one that comes twice is refused (rule 2).

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
        raise double_key(keys[int(np.argmin(changes))].as_py())
    return batch


def table_cuts(batch: pa.RecordBatch, table_bytes: int) -> list[int]:
    """Where rows are cut into tables of about so many bytes, all of about the same size."""
    count = max(1, round(batch.nbytes / table_bytes))
    return [batch.num_rows * number // count for number in range(count)] + [batch.num_rows]


PIECE_ROWS = 65_536
"""Rows that a table's writer gets at a time: its own columns are made for these, not for all."""


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
