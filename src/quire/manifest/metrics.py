"""Rolling metrics: what the operations themselves observe, merged into `metrics` in their own transaction.

Terms
  scope      the database that an observation is about; 0 for the store
  kind       what was observed: `MetricKind`, or a number of one's own from 256 on (`ManifestStore.record_metric`)

Rules
  1. Observations merge: sums and counts add, extremes widen, buckets add; the last one is kept as it is.
  2. They are in the transaction of the change that they are about: after a crash both are there, or neither.
  3. No change fails because of a metric: a damaged row begins anew.
  4. A database's metrics go with its tombstone.

`observe` belongs to the writer's thread; the rest are functions of a read transaction and disturb nobody.
Numbers on the page docs/formats/manifest.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.errors import ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.overlay import Overlay
from quire.manifest.records import MetricRecord

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from quire.manifest.reads import ReadTxn
    from quire.manifest.store import ManifestStore

BUCKETS = 64


class MetricKind(IntEnum):
    """What the manifest observes by itself."""

    WAL_LAG = 1
    CHECKPOINT_MS = 2
    MERGE_MS = 3
    SNAPSHOTS = 4
    SNAPSHOTS_CREATED = 5
    SNAPSHOTS_DROPPED = 6


MEANING = {
    MetricKind.WAL_LAG: "lsns that a checkpoint found waiting in the WAL",
    MetricKind.CHECKPOINT_MS: "milliseconds from a checkpoint's plan to its publication",
    MetricKind.MERGE_MS: "milliseconds from a merge's plan to its publication",
    MetricKind.SNAPSHOTS: "snapshots of the database, after each that was made or dropped",
    MetricKind.SNAPSHOTS_CREATED: "snapshots that were made",
    MetricKind.SNAPSHOTS_DROPPED: "snapshots that were dropped",
}


def observe(tables: Overlay, scope: int, kind: int, values: Sequence[float], at_ms: int) -> None:
    """Merge observations into a metric (rule 1)."""
    key = t.METRICS.key.pack(scope, kind)
    before = None
    with suppress(ManifestDamaged):  # rule 3
        before = tables.metrics.get(key)
    buckets = list(before.buckets) if before else [0] * BUCKETS
    for value in values:
        buckets[bucket_of(value)] += 1
    low, high = min(values), max(values)
    merged = MetricRecord(
        sum=(before.sum if before else 0.0) + math.fsum(values),
        count=(before.count if before else 0) + len(values),
        min=min(before.min, low) if before else low,
        max=max(before.max, high) if before else high,
        buckets=buckets,
        last=float(values[-1]),
        updated_at_ms=at_ms,
    )
    tables.metrics.put(key, merged)


def observe_snapshots(tables: Overlay, db_id: int, change: int, at_ms: int) -> None:
    """A snapshot was made (+1) or dropped (-1), and its row is written."""
    kind = MetricKind.SNAPSHOTS_CREATED if change > 0 else MetricKind.SNAPSHOTS_DROPPED
    observe(tables, db_id, kind, [1.0], at_ms)
    before = None
    with suppress(ManifestDamaged):  # rule 3
        before = tables.metrics.get(t.METRICS.key.pack(db_id, MetricKind.SNAPSHOTS))
    if before is not None:
        count = before.last + change
    else:  # the first that is counted: of a database of an older quire there may be more
        count = sum(1 for _ in tables.snapshot_index.scan(t.SNAPSHOT_INDEX.key.prefix(db_id)))
    observe(tables, db_id, MetricKind.SNAPSHOTS, [count], at_ms)


def bucket_of(value: float) -> int:
    """Powers of two: bucket 0 holds values below 1, bucket i those in [2^(i-1), 2^i).

    >>> [bucket_of(v) for v in (0.5, 1, 2, 3, 4)]
    [0, 1, 2, 2, 3]
    """
    return 0 if value < 1 else min(math.frexp(value)[1], BUCKETS - 1)


class RollingMetric(msgspec.Struct, frozen=True):
    """A metric of a database, as people read it."""

    db_id: int
    database: str
    """Its name; empty for the store, and for one that is not there any more."""
    kind: int
    metric: str
    record: MetricRecord

    @property
    def mean(self) -> float:
        """Of all observations."""
        return self.record.sum / self.record.count if self.record.count else 0.0


def rolling(txn: ReadTxn) -> list[RollingMetric]:
    """Every metric, by database and kind; rows that are damaged are left out."""
    names = txn.database_names()
    metrics: list[RollingMetric] = []
    for key, raw in txn.raw_scan(t.METRICS):
        with suppress(ManifestDamaged):
            scope, kind = t.METRICS.key.unpack(key)
            metric = MetricKind(kind).name.lower() if kind in MetricKind.__members__.values() else str(kind)
            metrics.append(RollingMetric(scope, names.get(scope, ""), kind, metric, t.METRICS.rows.decode(key, raw)))
    return metrics


class RollingCollector:
    """The rolling metrics for Prometheus: for each kind that the manifest observes a histogram, and the last value."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time: registering must not read the manifest."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current figures, from one read transaction."""
        from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

        with self._manifest.read() as txn:
            metrics = rolling(txn)
        for kind, meaning in MEANING.items():
            name = f"quire_rolling_{kind.name.lower()}"
            histogram = HistogramMetricFamily(name, meaning, labels=["db", "name"])
            last = GaugeMetricFamily(f"{name}_last", f"the last of: {meaning}", labels=["db", "name"])
            for metric in metrics:
                if metric.kind == kind:
                    labels = [str(metric.db_id), metric.database]
                    histogram.add_metric(labels, _cumulative(metric.record.buckets), metric.record.sum)
                    last.add_metric(labels, metric.record.last)
            yield histogram
            yield last


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    """Prometheus's buckets: how many observations are below each bound; those above the highest in use are left out."""
    highest = max((place for place, count in enumerate(counts) if count), default=0)
    below, buckets = 0, list[tuple[str, float]]()
    for place, count in enumerate(counts[: highest + 1]):
        below += count
        buckets.append((str(float(2**place)), below))
    return [*buckets, ("+Inf", below)]
