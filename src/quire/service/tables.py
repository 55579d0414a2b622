"""Rows of a manifest table as Arrow batches, for a client that may be slow (M4).

Terms
  window   the keys from a start (or after the last row that a client has) up to a stop
  mark     the key of a batch's last row: it is sent with the batch, and a broken stream resumes after it

Rules
  1. Each batch is read in its own transaction, which ends before the batch is handed out: a slow client holds no transaction,
     and rows that are committed meanwhile are seen if their keys lie ahead.
  2. A batch ends at 64 Ki rows or with the row that exceeds its byte limit: rows are read in small steps until their size is
     known.

Threads: one per stream. Raises `InvalidInput` for a table, column or key that does not exist, `OutOfRange` for a value that
does not fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from quire.core.errors import InvalidInput
from quire.core.limits import SCAN_ROWS_MAX
from quire.manifest import tables as t
from quire.manifest.arrow import one_batch, schema, step_after
from quire.manifest.env import ManifestEnv
from quire.manifest.keys import prefix_end
from quire.manifest.reads import ReadTxn, table_named
from quire.manifest.store import ManifestStore
from quire.service.messages import TableCuts
from quire.service.tickets import TableTicket

FIRST_ROWS = 4
STEP_ROWS_MAX = 8_192
"""Rows of the first step, before their size is known, and of the largest one."""


CUT_ROWS_MIN = 20_000
"""Tables with fewer rows are read in one part."""

CUT_PARTS_MAX = 65_536
"""Each part costs a search in one transaction: so many take about a second."""

_RAW = pa.schema([("key", pa.binary()), ("value", pa.binary())])


class _WindowTxn(ReadTxn):
    """A transaction that yields one step, between two keys; it ends with the row that exceeds `bytes_max`."""

    __slots__ = ("_bytes_max", "_start", "_stop")

    def __init__(self, env: ManifestEnv, start: bytes, stop: bytes | None, bytes_max: int) -> None:
        super().__init__(env)
        self._start = start
        self._stop = stop
        self._bytes_max = bytes_max

    def steps(self, table: t.Table[Any], rows: int, *, start: bytes = b"") -> Iterator[tuple[list[bytes], list[bytes]]]:
        keys: list[bytes] = []
        values: list[bytes] = []
        used, step = 0, FIRST_ROWS
        start = max(start, self._start)
        while used < self._bytes_max and len(keys) < rows:
            more = next(super().steps(table, min(step, rows - len(keys)) + 1, start=keys[-1] if keys else start), None)
            if more is None:
                break
            skip = int(bool(keys))  # the step begins with the last row of the previous one
            more_keys, bodies = more[0][skip:], more[1][skip:]
            if not more_keys:
                break
            used += sum(map(len, bodies))
            keys += more_keys
            values += bodies
            step = max(1, min(STEP_ROWS_MAX, (self._bytes_max - used) * len(keys) // max(used, 1)))
        if self._stop is not None and keys and keys[-1] >= self._stop:
            end = bisect_left(keys, self._stop)
            del keys[end:], values[end:]
        if keys:
            yield keys, values


class TableStream:
    """The rows that a ticket selects. An invalid ticket is refused in the constructor."""

    def __init__(self, manifest: ManifestStore, ticket: TableTicket, batch_bytes: int) -> None:
        self._manifest = manifest
        self._table = table_named(ticket.table)
        self._batch_bytes = batch_bytes
        self._rows_left = ticket.rows_max or None
        self._start, self._stop = _window(self._table, ticket)
        self._after = ticket.after or None
        whole = schema(self._table)
        columns = whole.names if ticket.columns is None else list(ticket.columns)
        if unknown := [name for name in columns if name not in whole.names]:
            raise InvalidInput(
                "the table has no such column", hint=f"columns: {', '.join(whole.names)}", columns=unknown[:5]
            )
        if ticket.rows_max < 0:
            raise InvalidInput("a number of rows must not be negative", rows_max=ticket.rows_max)
        self._columns = columns
        self.schema = _RAW if ticket.raw else pa.schema([whole.field(name) for name in columns])
        self._is_raw = ticket.raw

    def batches(self) -> Iterator[tuple[pa.RecordBatch, bytes]]:
        """Yield (batch, mark), each read when it is requested (rule 1)."""
        while self._rows_left is None or self._rows_left > 0:
            batch, mark = self._next()
            if batch is None or mark is None:
                return
            yield (batch if self._is_raw else batch.select(self._columns)), mark

    def _next(self) -> tuple[pa.RecordBatch | None, bytes | None]:
        rows = SCAN_ROWS_MAX if self._rows_left is None else min(self._rows_left, SCAN_ROWS_MAX)
        with _WindowTxn(self._manifest.env, self._start, self._stop, self._batch_bytes) as txn:
            batch, mark = (_raw_batch if self._is_raw else one_batch)(txn, self._table, self._after, rows)
        if batch is not None and self._rows_left is not None:
            self._rows_left -= batch.num_rows
        self._after = mark
        return batch, mark


def _raw_batch(
    txn: ReadTxn, table: t.Table[Any], after: bytes | None, rows: int
) -> tuple[pa.RecordBatch | None, bytes | None]:
    """Return a batch like `one_batch`, with keys and plain rows; checksums are verified here."""
    keys, values = step_after(txn, table, after, rows)
    if not keys:
        return None, None
    columns = [pa.array(keys, pa.binary()), pa.array(table.rows.opened_all(keys, values), pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=_RAW), keys[-1]


def cuts(manifest: ManifestStore, request: TableCuts) -> list[tuple[Any, ...]]:
    """Return keys that split a window of a table into parts: ascending, each the key of a row, at most `parts - 1`.

    They are spread evenly between the first and the last key. The number of rows between them is unknown without counting, so a
    window with few rows is not split at all.
    """
    if request.parts > CUT_PARTS_MAX:
        raise InvalidInput("a table cannot be split into so many parts", parts=request.parts, max=CUT_PARTS_MAX)
    table = table_named(request.table)
    start, stop = _window(table, TableTicket(request.table, request.prefix, request.start, request.stop))
    with manifest.read() as txn:
        keys = next(txn.steps(table, CUT_ROWS_MIN, start=start), ([], []))[0]
        if len(keys) < CUT_ROWS_MIN or request.parts < 2 or (stop is not None and keys[-1] >= stop):
            return []
        end = stop or next(txn.raw_scan_back(table))[0]
        chosen = [keys[0]]
        for point in _points(keys[0], end, request.parts):
            key = next(txn.steps(table, 1, start=point), ([end], []))[0][0]
            if chosen[-1] < key < end:
                chosen.append(key)
    return [table.key.unpack(key) for key in chosen[1:]]


def _points(first: bytes, last: bytes, parts: int) -> Iterator[bytes]:
    """Yield keys between two keys, spread evenly as numbers."""
    width = max(len(first), len(last), 1)
    low, high = (int.from_bytes(key.ljust(width, b"\0"), "big") for key in (first, last))
    for number in range(1, parts):
        yield (low + (high - low) * number // parts).to_bytes(width, "big")


def _window(table: t.Table[Any], ticket: TableTicket) -> tuple[bytes, bytes | None]:
    """Return the first key and the key to stop before."""
    key = table.key
    try:
        first = key.prefix(*ticket.prefix)
        last = prefix_end(first) if ticket.prefix else None
        start = max(first, key.pack(*ticket.start)) if ticket.start is not None else first
        stop = key.pack(*ticket.stop) if ticket.stop is not None else last
    except (TypeError, AttributeError, IndexError) as error:
        raise InvalidInput(f"the key does not fit the table: {error}", table=table.name, key=repr(key)) from error
    return start, stop if last is None or stop is None else min(stop, last)
