"""Converts spans of records to Arrow record batches, and defines their schema.

Small spans are joined, which copies them; large ones become batches over the same bytes. Importing this module loads Arrow:
readers import it for the first batch.

Threads: `Batches` belongs to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from quire.stream.spans import BATCH_BYTES, Plain, RecordSpan, StreamRecord

SCHEMA = pa.schema(
    [
        pa.field("id", pa.uint64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", "UTC"), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
"""The schema of the batches that `read_batches` yields."""
_ID, _TIMESTAMP = SCHEMA.field(0).type, SCHEMA.field(1).type
_over = pa.Array.from_buffers

BATCH_ROWS = 65_536
"""Most rows in a batch that is joined from small spans."""


class Batches:
    """Converts consecutive spans to record batches."""

    __slots__ = ("_batch_bytes", "_first", "_ids", "_stamp", "_stamps")

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        self._batch_bytes = batch_bytes
        self._first, self._ids = 0, _over(_ID, 0, [None, pa.py_buffer(b"")])
        self._stamp, self._stamps = -1, _over(_TIMESTAMP, 0, [None, pa.py_buffer(b"")])

    def of(self, spans: Iterable[RecordSpan]) -> Iterator[Any]:
        """Yield the batches of all spans."""
        kept: list[RecordSpan] = []
        rows = size = 0
        for span in spans:
            # Ids in a batch are consecutive, and a takeover leaves a gap. A large span is not copied to join a small one.
            if kept and (span.first_record != kept[-1].end_record or span.size_bytes >= self._batch_bytes):
                yield self.make(kept)
                kept, rows, size = [], 0, 0
            kept.append(span)
            rows += len(span.column)
            size += span.size_bytes
            if rows >= BATCH_ROWS or size >= self._batch_bytes:
                yield self.make(kept)
                kept, rows, size = [], 0, 0
        if kept:
            yield self.make(kept)

    def make(self, spans: list[RecordSpan]) -> Any:
        """Return one record batch of all spans."""
        columns = [_column(span) for span in spans]
        payload = columns[0] if len(columns) == 1 else pa.concat_arrays(columns)
        first, rows = spans[0].first_record, len(payload)
        if not self._first <= first <= self._first + len(self._ids) - rows:
            ids = np.arange(first, first + max(rows, BATCH_ROWS), dtype=np.uint64)
            self._first, self._ids = first, _over(_ID, len(ids), [None, pa.py_buffer(ids)])
        columns_out = [self._ids.slice(first - self._first, rows), self._stamped(spans, rows), payload]
        return pa.RecordBatch.from_arrays(columns_out, schema=SCHEMA)

    def _stamped(self, spans: list[RecordSpan], rows: int) -> Any:
        """Return the timestamps of a batch."""
        stamp = spans[0].timestamp_ms
        # Timestamps never decrease: all are the same if the first and the last are.
        if not isinstance(stamp, int) or spans[-1].last_ms != stamp:
            parts = [_each(span) for span in spans]
            stamps = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return _over(_TIMESTAMP, rows, [None, pa.py_buffer(np.ascontiguousarray(stamps))])
        if stamp != self._stamp or rows > len(self._stamps):
            stamps = np.full(rows, stamp, np.int64)
            self._stamp, self._stamps = stamp, _over(_TIMESTAMP, len(stamps), [None, pa.py_buffer(stamps)])
        return self._stamps.slice(0, rows)


def batch_of(records: Iterable[StreamRecord]) -> pa.RecordBatch:
    """Return one record batch of records that were read one by one. There must be at least one."""
    columns = [pa.array(values, field.type) for values, field in zip(zip(*records), SCHEMA)]
    return pa.record_batch(columns, schema=SCHEMA)


def _column(span: RecordSpan) -> Any:
    return span.column.arrow() if isinstance(span.column, Plain) else span.column


def _each(span: RecordSpan) -> Any:
    stamps = span.timestamp_ms
    return np.full(len(span.column), stamps, np.int64) if isinstance(stamps, int) else stamps
