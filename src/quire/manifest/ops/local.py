"""Operations on local tables: subscribers, readers, metrics, answers to keyed batches. None of them enters the feed.

Rules
  1. A cursor's acknowledgement moves forward only and never beyond the head.
  2. Trimming first moves `oldest_sequence` (in the acknowledging transaction), rows follow in bounded commits (M9).
  3. Metrics merge: sums and counts add, extremes widen, buckets add.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from quire.core.errors import AlreadyExists, InvalidInput, NameTaken, OutOfRange, UnknownCursor
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.ops.base import Counter, Op, raise_watermark
from quire.manifest.overlay import Overlay
from quire.manifest.records import CursorRecord, FloorRecord, IndexRecord, MetaRecord, MetricRecord, ReaderRecord, UInt

OLDEST_SEQUENCE = t.META.key.pack("oldest_sequence")
METRIC_BUCKETS = 64


def sequence_bounds(tables: Overlay) -> tuple[int, int]:
    """(oldest retained, next to be given) change sequence."""
    oldest = tables.meta.get(OLDEST_SEQUENCE)
    return (oldest.number if oldest else 1), tables.head + 1


class RecordMetric(Op, frozen=True, tag=90):
    """Merge observations into a rolling metric."""

    logged = False
    scope: UInt
    metric_kind: UInt
    values: list[float]

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if not self.values or not all(map(math.isfinite, self.values)):
            raise InvalidInput("a metric needs finite observations", values=self.values[:5])
        key = t.METRICS.key.pack(self.scope, self.metric_kind)
        before = tables.metrics.get(key)
        buckets = list(before.buckets) if before else [0] * METRIC_BUCKETS
        for value in self.values:
            buckets[bucket_of(value)] += 1
        low, high = min(self.values), max(self.values)
        tables.metrics.put(
            key,
            MetricRecord(
                sum=(before.sum if before else 0.0) + math.fsum(self.values),
                count=(before.count if before else 0) + len(self.values),
                min=min(before.min, low) if before else low,
                max=max(before.max, high) if before else high,
                buckets=buckets,
            ),
        )


def bucket_of(value: float) -> int:
    """Powers of two: bucket 0 holds values below 1, bucket i those in [2^(i-1), 2^i).

    >>> [bucket_of(v) for v in (0.5, 1, 2, 3, 4)]
    [0, 1, 2, 2, 3]
    """
    return 0 if value < 1 else min(math.frexp(value)[1], METRIC_BUCKETS - 1)


class RegisterCursor(Op, frozen=True, tag=91):
    """A subscriber that has seen everything up to `acked_sequence`."""

    logged = False
    cursor_id: UInt
    acked_sequence: UInt
    name: str = ""
    ttl_ms: UInt = 0
    max_lag: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        oldest, following = sequence_bounds(tables)
        acked = min(max(self.acked_sequence, oldest - 1), following - 1)
        key = t.CHANGE_CURSORS.key.pack(self.cursor_id)
        if self.cursor_id == 0 or tables.change_cursors.has(key):
            raise AlreadyExists("a cursor of this id exists already", cursor_id=self.cursor_id)
        if self.name:
            check_name("cursor", self.name)
            name_key = t.CURSOR_NAMES.key.pack(self.name)
            if (holder := tables.cursor_names.get(name_key)) is not None:
                raise NameTaken("a cursor of this name exists already", name=self.name, cursor_id=holder.value)
            tables.cursor_names.put(name_key, IndexRecord(self.cursor_id))
        tables.change_cursors.put(
            key,
            CursorRecord(acked, at_ms, at_ms, self.name, ttl_ms=self.ttl_ms, max_lag=self.max_lag),
        )
        raise_watermark(tables, Counter.CURSOR, self.cursor_id)


class AcknowledgeChanges(Op, frozen=True, tag=92):
    """A subscriber has processed everything up to `upto_sequence`."""

    logged = False
    cursor_id: UInt
    upto_sequence: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, cursor = cursor_of(tables, self.cursor_id)
        oldest, following = sequence_bounds(tables)
        if self.upto_sequence >= following:
            raise OutOfRange(
                "acknowledged beyond the head of the feed",
                hint="acknowledge only what fetch returned",
                upto=self.upto_sequence,
                head=following - 1,
            )
        if self.upto_sequence > cursor.acked_sequence:
            tables.change_cursors.put(key, replace(cursor, acked_sequence=self.upto_sequence, updated_at_ms=at_ms))
        consumed = min(row.acked_sequence for _, row in tables.change_cursors.scan())
        if consumed + 1 > oldest:
            tables.meta.put(OLDEST_SEQUENCE, MetaRecord(consumed + 1))


class DropCursor(Op, frozen=True, tag=93):
    """A subscriber leaves."""

    logged = False
    cursor_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, cursor = cursor_of(tables, self.cursor_id)
        tables.change_cursors.delete(key)
        if cursor.name:
            tables.cursor_names.delete(t.CURSOR_NAMES.key.pack(cursor.name))


def cursor_of(tables: Overlay, cursor_id: int) -> tuple[bytes, CursorRecord]:
    """Key and row of a cursor."""
    key = t.CHANGE_CURSORS.key.pack(cursor_id)
    row = tables.change_cursors.get(key)
    if row is None:
        raise UnknownCursor("no change cursor has this id", hint="register one first", cursor_id=cursor_id)
    return key, row


class PutReader(Op, frozen=True, tag=95):
    """A remote reader opens or renews its lease."""

    logged = False
    db_id: UInt
    reader_id: UInt
    snapshot_lsn: UInt
    expires_at_ms: UInt
    tags: dict[str, str] = {}

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key = t.SNAPSHOT_READERS.key.pack(self.db_id, self.reader_id)
        before = tables.snapshot_readers.get(key)
        opened = before.opened_at_ms if before else at_ms
        tables.snapshot_readers.put(key, ReaderRecord(self.snapshot_lsn, opened, at_ms, self.expires_at_ms, self.tags))
        raise_watermark(tables, Counter.READER, self.reader_id)


class DropReader(Op, frozen=True, tag=96):
    """A remote reader is gone; a missing one is fine."""

    logged = False
    db_id: UInt
    reader_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.snapshot_readers.delete(t.SNAPSHOT_READERS.key.pack(self.db_id, self.reader_id))


class SetFloor(Op, frozen=True, tag=97):
    """The lowest version readers of a database may ask for."""

    logged = False
    db_id: UInt
    min_snapshot_lsn: UInt
    writer_high_lsn: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key = t.SNAPSHOT_FLOOR.key.pack(self.db_id)
        tables.snapshot_floor.put(key, FloorRecord(self.min_snapshot_lsn, self.writer_high_lsn))


class PruneIdempotency(Op, frozen=True, tag=98):
    """Forget answers that have expired, at most `limit` of them."""

    logged = False
    limit: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        expired = (key for key, row in tables.idempotency.scan() if row.expires_at_ms <= at_ms)
        for key, _ in zip(list(expired), range(self.limit)):
            tables.idempotency.delete(key)
