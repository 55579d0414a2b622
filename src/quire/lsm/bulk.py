"""Bulk loads: tables that are written here or elsewhere (on executors, say) enter a database in one step.

A load has one lsn for all its rows, taken when it begins: what is written before is older than the loaded rows, what is
written after is newer, although it may be there first. So a key may come only once in a load. Publishing makes everything
visible with one `Compaction{added, removed: []}`; a snapshot taken before that does not see it. A load that is not published
leaves files that go when it is closed, with the next compaction, or at the next open, and nothing else.

    with begin_load(kv) as load:
        writer = BulkWriter.of(kv, load)        # or anywhere that shares the directory: `BulkWriter(disk, target, ids)`
        writer.add(keys, values)
        load.publish(writer.finish())

Threads: one for each load and each writer. Importable on executors. Raises `InvalidInput`, `OutOfRange`, `Corruption`, and
what the disk raises."""

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
from quire.core.errors import InvalidInput, OutOfRange, StorageFault
from quire.core.limits import KIB, MIB
from quire.durable.files import Disk
from quire.durable.names import LsmHome
from quire.lsm import compaction
from quire.lsm.compaction import TableOptions, VersionRetention, clusters
from quire.lsm.load_notes import LoadNote, read_note
from quire.lsm.merge import PART_BYTES, merge_tables, merged, parts
from quire.lsm.sst_format import SCHEMA, TableMeta
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter, key_changes

if TYPE_CHECKING:
    from quire.lsm.kv import Kv

BUFFER_BYTES = 128 * MIB
"""Of keys and values: a task holds this twice while it sorts."""

KEY_BYTES_MAX = 64 * KIB - 1
VALUE_BYTES_MAX = 32 * MIB
"""As in kv.py."""


class Load:
    """A load that is under way; made by `begin_load`."""

    def __init__(self, kv: Kv, lsn: int) -> None:
        self.lsn = lsn
        self._kv = kv
        if kv.barrier is not None:
            kv.barrier.cover(self)
        self._ids: set[int] = set()
        self._over = False

    def allocate(self, count: int) -> range:
        """Ids for tables of this load."""
        ids = self._kv.manifest.allocate_sst_ids(count)
        self._ids.update(ids)
        return ids

    def path(self, sst_id: int) -> str:
        """Where the table with this id is to be written."""
        return self._kv.home.sst(sst_id)

    @changes
    def publish(self, ids: Iterable[int], *, number: int = 0) -> int:
        """Have these tables in the database, all at once; how many rows they bring."""
        kv = self._kv
        chosen = sorted(set(ids))
        if self._over or not self._ids.issuperset(chosen):
            raise InvalidInput("these tables do not belong to this load", hint="use ids from `allocate`", ids=chosen)
        tables = [SSTable.open(kv.disk, self.path(sst_id), sst_id) for sst_id in chosen]
        try:
            for table in tables:
                self._check(table)
            _refuse_doubles(tables)
        finally:
            for table in tables:
                table.close()
        rows = sum(table.meta.rows for table in tables)
        note = LoadNote(number=number, at_ms=kv.clock.now_ms(), rows=rows, ids=tuple(chosen)) if number else None
        self._ids.difference_update(chosen)  # from here on an event may name them: they are not this load's to remove
        try:
            kv.upkeep.add_tables(tables, self.lsn, note)
        except BaseException:
            if kv.failure is None and kv.manifest.state().tables.keys().isdisjoint(chosen):
                self._ids.update(chosen)
            raise
        self.close()
        return rows

    def _check(self, table: SSTable) -> None:
        meta = table.meta
        if (meta.lsn_min, meta.lsn_max) != (self.lsn, self.lsn):
            lsns = (meta.lsn_min, meta.lsn_max)
            raise InvalidInput("every row of a loaded table must have the load's lsn", sst_id=meta.sst_id, lsns=lsns)

    def close(self) -> None:
        """The load is over; tables that were not published are removed. A second time: nothing."""
        if self._over:
            return
        self._over = True
        self._kv.end_load(self.lsn)
        self._kv.upkeep.forsake(self._ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin_load(kv: Kv) -> Load:
    """Begin a load."""
    return Load(kv, kv.begin_load())


def published(kv: Kv, number: int) -> int | None:
    """How many rows a load with this number has brought; `None` if it was not published."""
    note = read_note(kv.disk, kv.home, number)
    return note.rows if note is not None and note.done else None


def _refuse_doubles(tables: list[SSTable]) -> None:
    """Refuse a key that comes twice in a load. Inside a table the writer has seen to it, so only tables that overlap
    are read."""
    for together in clusters(tables):
        for low, high in parts(together, b"", None, first_bytes=PART_BYTES):
            keys = merged(together, low, high).column(0)
            changes = key_changes(keys)
            if not changes.all():
                raise double_key(keys[int(np.argmin(changes))].as_py())


def double_key(key: bytes = b"") -> InvalidInput:
    """The error for a key that comes twice in a load."""
    text = "a key occurs twice in a load, so its newest value is ambiguous"
    where = {"key": key[:60]} if key else {}
    return InvalidInput(text, hint="keep one row per key first, with dropDuplicates or an aggregate", **where)


# ── writing the tables, here or on an executor ──────────────────────────────────────────────────────────────────────────
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
        """Write what is left; the ids of all tables."""
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
    """Rows sorted by key; one that comes twice is refused.

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
