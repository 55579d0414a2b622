"""Loads: data that the tasks of a job send, and the one step that writes it all to a SQLite table, stream or key-value set.

A load is identified by its number. It ends when it is committed or dropped, and then accepts nothing more. A load that has been
idle for `IDLE_SECONDS` is dropped when another begins.

Threads: any; a part belongs to one task. Raises `InvalidInput`, `NotFound`, and what the engines raise.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import pyarrow as pa

from quire.core.errors import InvalidInput, NotFound, OutOfRange, QuireError
from quire.core.events import emit
from quire.core.limits import IDEMPOTENCY_KEY_BYTES, MIB
from quire.durable.failpoints import hit
from quire.durable.files import OsDisk
from quire.durable.names import scratch_dir
from quire.lsm.bulk import Load, begin_load, published
from quire.lsm.kv import Kv
from quire.service import messages as m
from quire.service.api import StoreApi
from quire.service.tickets import QUERY_KEYS, LoadPairs, LoadRecords, PutPart, TableDestination, TakeIds
from quire.sqlite.bulk_insert import TableWrite, load_rows
from quire.stream.stream import Stream

ENDED_MAX = 4_096
"""The number of ended loads that are remembered."""
IDS_MAX = 10_000
"""The most ids per call."""

IDLE_SECONDS = 24 * 3_600.0
BUSY_SECONDS = 60.0
"""How long a load waits for another writer of the database."""

BATCH_BYTES_MAX = 256 * MIB
"""The largest batch of a query for a key-value set or a stream: the owner holds it in memory."""

_PART = re.compile(r"[0-9]{1,10}-[0-9]{1,19}")


class EndedLoads:
    """The last loads that have ended. Guarded by the lock of the object that contains it."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def add(self, load: int) -> None:
        """Record that a load was committed or dropped."""
        self._numbers[load] = None
        while len(self._numbers) > ENDED_MAX:
            self._numbers.popitem(last=False)

    def check(self, load: int) -> None:
        """Refuse a load that has ended: a task may outlive its job, or run twice."""
        if load in self._numbers:
            raise load_ended(load)


def load_ended(load: int) -> NotFound:
    """Return the error of a call for a load that has ended."""
    return NotFound("this load has ended", hint="run the job again", load=load)


class Loads:
    """Rows of SQLite tables, batches of key-value sets and streams: parts that tasks send, and the step that writes them all.

    A part is the data that one attempt of a task has sent: the bytes of an Arrow stream, in a file in `scratch/`. Its bytes
    arrive in order: sending the same bytes again changes nothing, a gap is refused. Only parts that the job names are inserted,
    in one transaction and once (`quire.sqlite.bulk_insert`); no other call waits for it. Files of a job that died are swept
    when the owner starts.

    Batches of streaming queries are written once: a set stores the number of the last one under a reserved key, in the same
    batch as the data; a stream stores it in its state (`Stream.append_batch`).
    """

    def __init__(self, store: StoreApi) -> None:
        self._store = store
        self._clock = store.manifest.clock
        self._disk = OsDisk()
        # guarded by _lock
        self._lock = threading.Lock()
        self._touched: dict[int, float] = {}
        self._ended = EndedLoads()
        # held while a query's batch is written to a key-value set
        self._batches = threading.Lock()

    def put(self, request: PutPart) -> None:
        """Write some bytes of a part."""
        directory, path = self._directory(request.load), self._path(request.load, request.part)
        with self._lock:
            self._ended.check(request.load)
            is_new = request.load not in self._touched
            self._touched[request.load] = self._clock.monotonic()
            if not self._disk.exists(directory):
                self._disk.make_dirs(directory)
            with self._disk.open(path, create=True) as file:
                if request.offset > file.size():
                    raise InvalidInput(
                        "a part has a gap", hint="send the bytes in order", offset=request.offset, size=file.size()
                    )
                # Not synced: the owner clears `scratch/` when it starts, and a load that has not ended by then is run
                # again.
                file.write_at(request.body, request.offset)
        if is_new:
            self._drop_idle(request.load)

    def insert(self, request: m.LoadRows) -> int:
        """Insert the parts that the job names, in one transaction and once; return the number of rows."""
        if not request.columns:
            raise InvalidInput("rows must have at least one column", table=request.table)
        write = TableWrite(
            table=request.table,
            columns=request.columns,
            keys=request.keys,
            delete=request.delete,
            overwrite=request.overwrite,
            create=request.create,
            exists=request.exists,
        )
        with closing(
            self._store.sqlite(request.database, create=request.create_database, timeout=BUSY_SECONDS)
        ) as connection:
            count = load_rows(
                connection,
                request.load,
                write,
                # A generator, so that a repeated call is answered from the record of the load: its parts are gone by
                # then.
                self._rows(request.load, request.parts, len(request.columns)),
                now_ms=self._clock.now_ms(),
                query=request.query,
                batch=request.batch,
            )
        hit("load.taken")
        self.drop(request.load)
        return count

    def write_pairs(self, request: LoadPairs) -> int:
        """Write a query's batch and its number to a key-value set, once; return the number of rows."""
        kv = self._store.kvs.open(request.database, create=request.create)
        record, rows = QUERY_KEYS + request.query.encode(), 0
        with self._batches:  # of two concurrent attempts, the second finds the number that the first wrote
            last = kv.get(record)
            if last is None or int(last) < request.batch:
                pairs: dict[bytes, bytes | None] = {}
                for key, value in self._pairs(request):
                    pairs[key], rows = value, rows + 1
                if request.overwrite:
                    _delete_others(kv, pairs)
                pairs[record] = b"%d" % request.batch
                hit("kv.batch.gathered")
                kv.write(pairs)
        hit("load.taken")
        self.drop(request.load)
        return rows

    def append_records(self, request: LoadRecords) -> int:
        """Append a load, or a query's batch, to a stream, once; return the number of records, 0 if they were there before."""
        stream: Stream = self._store.stream(request.stream, create=request.create)
        key = request.load.to_bytes(IDEMPOTENCY_KEY_BYTES, "little")
        # Checked before the parts are read: a call is repeated when its response was lost, and then the parts are gone.
        if stream.has_batch(request.query, request.batch) if request.query else _is_appended(stream, key):
            self.drop(request.load)
            return 0
        payloads: list[pa.Array] = []
        size = 0
        for batch in self._batches_of(request.load, request.parts, 1):
            column = batch.column(0).cast(pa.binary())
            if column.null_count:
                raise InvalidInput("a record has no payload", hint="filter out rows whose payload is NULL")
            payloads.append(column)
            size = _bounded(size + column.nbytes)
        records = pa.chunked_array(payloads, pa.binary())
        if request.query:
            stream.append_batch(records, query=request.query, batch=request.batch)
        else:
            stream.append(records, key=key).result()
        hit("load.taken")
        self.drop(request.load)
        return len(records)

    def drop(self, load: int) -> None:
        """Remove the parts of a load; do nothing if it is gone."""
        directory = self._directory(load)
        with self._lock:
            self._touched.pop(load, None)
            self._ended.add(load)
            try:
                for name in self._disk.names(directory):
                    self._disk.remove(os.path.join(directory, name))
                self._disk.remove_dir(directory)
            except FileNotFoundError:
                return

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _rows(self, load: int, parts: Sequence[str], width: int) -> Iterator[tuple[Any, ...]]:
        for batch in self._batches_of(load, parts, width):
            yield from zip(*[values_of(column) for column in batch.columns])

    def _pairs(self, request: LoadPairs) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield keys and values in the order of the rows; a row that is flagged, or has no value, deletes its key."""
        size, columns = 0, {name: place for place, name in enumerate(request.columns)}
        for batch in self._batches_of(request.load, request.parts, len(request.columns)):
            size = _bounded(size + batch.nbytes)
            keys, values = (batch.column(columns[name]).cast(pa.binary()).to_pylist() for name in ("key", "value"))
            gone = batch.column(columns[request.delete]).to_pylist() if request.delete else repeat(False)
            for key, value, is_gone in zip(keys, values, gone):
                if key is None:
                    raise InvalidInput("a row has no key", hint="filter out rows whose key is NULL")
                if key.startswith(QUERY_KEYS):
                    raise InvalidInput(
                        "this key is reserved for the set's own records", hint="use another key", key=key
                    )
                yield key, None if is_gone else value

    def _batches_of(self, load: int, parts: Sequence[str], width: int) -> Iterator[pa.RecordBatch]:
        for part in parts:
            path = self._path(load, part)
            if not self._disk.exists(path):
                raise NotFound(
                    "a part of the load is missing", hint="run the job again; the owner may have restarted", part=part
                )
            with pa.OSFile(path) as file, pa.ipc.open_stream(file) as reader:
                for batch in reader:
                    if batch.num_columns != width:
                        raise InvalidInput("the columns of a part differ from those of its load", part=part)
                    yield batch

    def _drop_idle(self, new: int) -> None:
        """Drop idle loads."""
        horizon = self._clock.monotonic() - IDLE_SECONDS
        with self._lock:
            idle = [load for load, at in self._touched.items() if at < horizon and load != new]
        for load in idle:
            self.drop(load)

    def _directory(self, load: int) -> str:
        return os.path.join(self._store.path, scratch_dir(load))

    def _path(self, load: int, part: str) -> str:
        if not _PART.fullmatch(part):
            raise InvalidInput("invalid name of a part", part=part[:40])
        return os.path.join(self._directory(load), part)


def _is_appended(stream: Stream, key: bytes) -> bool:
    """Return whether records with this idempotency key are durable. Waits if they are being appended."""
    if not stream.hot.has_call(key):
        return False
    stream.sync()
    return stream.hot.has_call(key)  # not if a full disk has refused them


def _delete_others(kv: Kv, pairs: dict[bytes, bytes | None]) -> None:
    """Add the deletion of every other key of a set to a batch."""
    size = 0
    for key, _ in kv.scan():
        if key not in pairs and not key.startswith(QUERY_KEYS):
            size = _bounded(size + len(key), hint="drop the set first")
            pairs[key] = None


def _bounded(
    size: int, *, hint: str = "limit batches where the query reads (maxFilesPerTrigger, max_records), or use df.write"
) -> int:
    """Return a size in bytes; raise if it is too large to be written at once."""
    if size > BATCH_BYTES_MAX:
        raise OutOfRange("the batch is too large to be written in one step", hint=hint, bytes=size, max=BATCH_BYTES_MAX)
    return size


def values_of(column: pa.Array) -> list[Any]:
    """Return the values of a column in SQLite's types: dates, times and decimals as text, booleans as numbers."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    elif pa.types.is_timestamp(kind):
        column = column.cast(pa.timestamp("us")).cast(pa.string())
    elif pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.string())
    return list(column.to_pylist())


# ── key-value databases ───────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(slots=True, eq=False)
class _Begun:
    """A load in progress."""

    database: str
    kv: Kv
    load: Load
    touched: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class KvLoads:
    """Tables of key-value databases: ids for the tasks that write them, and the step that publishes them all.

    Ids come from the database's manifest, so that concurrent tasks and loads never collide. Only tables that the job names are
    published, in one event and once: the database remembers the load's number (`lsm/load_records.py`), so a commit whose
    response was lost is repeated safely. Files of attempts that failed or came second are removed when the load ends. A load
    that was begun before the owner restarted cannot be published.
    """

    def __init__(self, store: StoreApi) -> None:
        self._store = store
        self._clock = store.manifest.clock
        # guarded by _lock
        self._lock = threading.Lock()
        self._begun: dict[int, _Begun] = {}
        self._ended = EndedLoads()

    def take(self, request: TakeIds) -> TableDestination:
        """Allocate ids for a task."""
        if not 0 < request.count <= IDS_MAX:
            raise InvalidInput(f"a task can take 1 to {IDS_MAX:,} ids", count=request.count)
        begun = self._begin(request)
        with begun.lock:
            ids = tuple(begun.load.allocate(request.count))
        settings = begun.kv.settings
        return TableDestination(
            begun.kv.home.path,
            begun.load.lsn,
            ids,
            settings.table_bytes,
            settings.block_bytes,
            settings.compression,
            settings.bloom_bits_per_key,
        )

    def _begin(self, request: TakeIds) -> _Begun:
        with self._lock:
            self._ended.check(request.load)
            begun = self._begun.get(request.load)
            if begun is None:
                kv = self._kv(request.database, create=request.create)
                if published(kv, request.load) is not None:
                    raise load_ended(request.load)
                begun = _Begun(request.database, kv, begin_load(kv), 0.0)
                self._begun[request.load] = begun
            begun.touched = self._clock.monotonic()
            idle = [load for load, at in self._begun.items() if at.touched < begun.touched - IDLE_SECONDS]
        for load in idle:
            emit("warning", "kv.load_idle", load=load)
            self.drop(load)
        if begun.database != request.database:
            raise InvalidInput("a load can only write to one database", load=request.load, database=request.database)
        return begun

    def _kv(self, name: str, *, create: bool) -> Kv:
        return self._store.kvs.open(name, create=create)

    def publish(self, request: m.PublishTables) -> int:
        """Publish the tables that the job names, in one event and once; return the number of rows."""
        with self._lock:
            begun = self._begun.get(request.load)
        kv = self._kv(request.database, create=request.create)
        if begun is None:
            rows = published(kv, request.load)
            if rows is None and request.ids:
                hint = "run the job again; the owner may have restarted"
                raise NotFound("this load is not running", hint=hint, load=request.load)
            return rows or 0
        with begun.lock:
            rows = published(kv, request.load)  # of two concurrent calls, the second finds the result of the first
            if rows is None:
                rows = begun.load.publish(request.ids, number=request.load)
        self._end(request.load)
        return rows

    def drop(self, load: int) -> None:
        """Discard a load's tables; do nothing if it has ended."""
        begun = self._end(load)
        if begun is not None:
            with begun.lock:
                try:
                    begun.load.close()
                except QuireError as error:  # the database was closed or dropped meanwhile: its files are swept
                    emit("warning", "kv.load_not_dropped", load=load, error=str(error))

    def _end(self, load: int) -> _Begun | None:
        with self._lock:
            self._ended.add(load)
            return self._begun.pop(load, None)
