"""Rows on their way into a SQLite table: parts that tasks send, and the transaction that takes them all.

Terms
  load   one job's rows, by number; its parts are files in a directory of `scratch/`
  part   what one attempt of a task has sent: the bytes of an Arrow stream

Rules
  1. Bytes of a part come in order; the same bytes sent again change nothing, a gap is refused.
  2. Only parts that the job names are inserted, all in one transaction, and once (`quire.sqlite.bulk_insert`).
  3. A load's files go when it is committed or dropped; those of a job that died are swept when the owner starts, or by the
     first load that finds them untouched for `IDLE_SECONDS`.
  4. What the transaction waits for is its rows: nobody else's call waits for it.

Threads: any; a part belongs to one task. Raises `InvalidInput`, `NotFound`, and what `load_rows` raises.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from quire.core.errors import InvalidInput, NotFound
from quire.durable.files import OsDisk
from quire.durable.names import scratch_dir
from quire.service import messages as m
from quire.service.api import StoreApi
from quire.sqlite.bulk_insert import load_rows

OVER_MAX = 4_096
"""Loads that are remembered as over."""

IDLE_SECONDS = 24 * 3_600.0
BUSY_SECONDS = 60.0
"""How long a load waits for another writer of the database."""

_PART = re.compile(r"[0-9]{1,10}-[0-9]{1,19}")


class Loads:
    """See the rules above."""

    def __init__(self, store: StoreApi) -> None:
        self._store = store
        self._clock = store.manifest.clock
        self._disk = OsDisk()
        # guarded by _lock
        self._lock = threading.Lock()
        self._touched: dict[int, float] = {}
        self._over: OrderedDict[int, None] = OrderedDict()
        """Loads that were inserted or dropped: nothing more is taken of them."""

    def put(self, request: m.PutPart) -> None:
        """Keep some bytes of a part (rule 1)."""
        directory, path = self._directory(request.load), self._path(request.load, request.part)
        with self._lock:
            if request.load in self._over:  # a task that goes on after its job has failed, or twice
                raise NotFound("this load is over", hint="run the job again", load=request.load)
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
        """Insert the parts that the job names, in one transaction and once (rule 2); the number of rows."""
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
            self._over[load] = None
            while len(self._over) > OVER_MAX:
                self._over.popitem(last=False)
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
        """Rule 3, when a load begins."""
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
