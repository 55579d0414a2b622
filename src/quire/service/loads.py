"""Loads: what the tasks of a job send, and the one step that takes it all, into a SQLite table or a key-value database.

A load is known by its number. It ends when it is committed or dropped, and nothing more is taken of it; one that has been idle
for `IDLE_SECONDS` is dropped when another begins.

Threads: any; a part belongs to one task. Raises `InvalidInput`, `NotFound`, and what the engines raise.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from quire.core.errors import InvalidInput, NotFound, QuireError
from quire.core.events import emit
from quire.durable.files import OsDisk
from quire.durable.names import scratch_dir
from quire.lsm.bulk import Load, begin_load, published
from quire.lsm.kv import Kv
from quire.service import messages as m
from quire.service.api import StoreApi
from quire.sqlite.bulk_insert import load_rows

ENDED_MAX = 4_096
"""Loads that are remembered as ended."""
IDS_MAX = 10_000
"""Ids of one call."""

IDLE_SECONDS = 24 * 3_600.0
BUSY_SECONDS = 60.0
"""How long a load waits for another writer of the database."""

_PART = re.compile(r"[0-9]{1,10}-[0-9]{1,19}")


class EndedLoads:
    """The last loads that have ended. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[int, None] = OrderedDict()

    def add(self, load: int) -> None:
        """A load was committed or dropped."""
        self._numbers[load] = None
        while len(self._numbers) > ENDED_MAX:
            self._numbers.popitem(last=False)

    def check(self, load: int) -> None:
        """Refuse a load that has ended: a task may outlive its job, or run twice."""
        if load in self._numbers:
            raise load_ended(load)


def load_ended(load: int) -> NotFound:
    """The error of a call for a load that has ended."""
    return NotFound("this load has ended", hint="run the job again", load=load)


class Loads:
    """Rows of SQLite tables: parts that tasks send, and the transaction that inserts them all.

    A part is what one attempt of a task has sent, the bytes of an Arrow stream, in a file in `scratch/`. Its bytes come in
    order:
    the same bytes sent again change nothing, a gap is refused. Only parts that the job names are inserted, in one transaction
    and once (`quire.sqlite.bulk_insert`); no other call waits for it. Files of a job that died are swept when the owner starts.
    """

    def __init__(self, store: StoreApi) -> None:
        self._store = store
        self._clock = store.manifest.clock
        self._disk = OsDisk()
        # guarded by _lock
        self._lock = threading.Lock()
        self._touched: dict[int, float] = {}
        self._ended = EndedLoads()

    def put(self, request: m.PutPart) -> None:
        """Keep some bytes of a part."""
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
                        "a part has a gap", hint="send its bytes in order", offset=request.offset, size=file.size()
                    )
                file.write_at(request.body, request.offset)
        if is_new:
            self._drop_idle(request.load)

    def insert(self, request: m.LoadRows) -> int:
        """Insert the parts that the job names, in one transaction and once; the number of rows."""
        if not request.columns:
            raise InvalidInput("rows have at least one column", table=request.table)
        connection = self._store.sqlite(request.database, create=False, timeout=BUSY_SECONDS)
        try:
            count = load_rows(
                connection,
                request.load,
                request.table,
                request.columns,
                self._rows(request.load, request.parts, len(request.columns)),
                now_ms=self._clock.now_ms(),
                overwrite=request.overwrite,
                create=request.create,
            )
        finally:
            connection.close()
        self.drop(request.load)
        return count

    def drop(self, load: int) -> None:
        """Remove what a load has sent; nothing, if it is gone."""
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
        for part in parts:
            path = self._path(load, part)
            if not self._disk.exists(path):
                raise NotFound(
                    "a part of the load is not here", hint="has the owner restarted? Run the job again", part=part
                )
            with pa.OSFile(path) as file, pa.ipc.open_stream(file) as reader:
                for batch in reader:
                    if batch.num_columns != width:
                        raise InvalidInput("a part has other columns than its load", part=part)
                    yield from zip(*[values_of(column) for column in batch.columns])

    def _drop_idle(self, new: int) -> None:
        """Drop loads that have been idle."""
        horizon = self._clock.monotonic() - IDLE_SECONDS
        with self._lock:
            idle = [load for load, at in self._touched.items() if at < horizon and load != new]
        for load in idle:
            self.drop(load)

    def _directory(self, load: int) -> str:
        return os.path.join(self._store.path, scratch_dir(load))

    def _path(self, load: int, part: str) -> str:
        if not _PART.fullmatch(part):
            raise InvalidInput("not the name of a part", part=part[:40])
        return os.path.join(self._directory(load), part)


def values_of(column: pa.Array) -> list[Any]:
    """A column as SQLite takes it: dates, times and decimals as text, booleans as numbers."""
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
    """A load that is under way."""

    database: str
    kv: Kv
    load: Load
    touched: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class KvLoads:
    """Tables of key-value databases: ids for the tasks that write them, and the step that publishes them all.

    Ids come from the database's manifest, so that tasks and loads at the same time never collide. Only tables that the job
    names
    are published, in one event and once: the database remembers the load's number (`lsm/load_notes.py`), so a commit whose
    answer
    was lost is repeated safely. Files of attempts that failed or came second go when the load ends. A load that was begun
    before the owner restarted cannot be published.
    """

    def __init__(self, store: StoreApi) -> None:
        self._store = store
        self._clock = store.manifest.clock
        # guarded by _lock
        self._lock = threading.Lock()
        self._begun: dict[int, _Begun] = {}
        self._ended = EndedLoads()

    def take(self, request: m.TakeIds) -> m.Shelf:
        """Ids for a task."""
        if not 0 < request.count <= IDS_MAX:
            raise InvalidInput(f"a task takes from 1 to {IDS_MAX:,} ids", count=request.count)
        begun = self._begin(request)
        with begun.lock:
            ids = tuple(begun.load.allocate(request.count))
        settings = begun.kv.settings
        return m.Shelf(
            begun.kv.home.path,
            begun.load.lsn,
            ids,
            settings.table_bytes,
            settings.block_bytes,
            settings.compression,
            settings.bloom_bits_per_key,
        )

    def _begin(self, request: m.TakeIds) -> _Begun:
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
            raise InvalidInput("a load is of one database", load=request.load, database=request.database)
        return begun

    def _kv(self, name: str, *, create: bool) -> Kv:
        return self._store.kvs.open(name, create=create)

    def publish(self, request: m.PublishTables) -> int:
        """Publish the tables that the job names, in one event and once; the number of rows."""
        with self._lock:
            begun = self._begun.get(request.load)
        kv = self._kv(request.database, create=request.create)
        if begun is None:
            rows = published(kv, request.load)
            if rows is None and request.ids:
                hint = "has the owner restarted? Run the job again"
                raise NotFound("this load is not under way here", hint=hint, load=request.load)
            return rows or 0
        with begun.lock:
            rows = published(kv, request.load)  # two calls at once: the second finds what the first did
            if rows is None:
                rows = begun.load.publish(request.ids, number=request.load)
        self._end(request.load)
        return rows

    def drop(self, load: int) -> None:
        """Let a load's tables go; nothing, if it is over."""
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
