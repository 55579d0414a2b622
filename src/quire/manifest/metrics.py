"""Figures of the manifest: totals that the writer counts in memory, and rolling metrics that operations observe.

Terms
  scope      the database that an observation is about; 0 for the store
  kind       what was observed: `MetricKind`, or a caller's own number from 256 on (`ManifestStore.record_metric`)

A rolling metric is a row of `metrics`, written in the transaction of the change that it is about: after a crash both
exist, or neither. No change fails because of a metric: a damaged row starts again from nothing. A database's metrics
are removed with its tombstone.

The writer adds plain numbers, and the collector reads them at a scrape: counting costs a few additions per commit, and
prometheus-client is imported only where metrics are served.

Threads: `observe` and `WriterStats.add` belong to the writer; a reader may see the counts of a commit half added. All
other functions use a read transaction. The numbers of kinds are in docs/formats/manifest.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core.errors import ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.overlay import Overlay
from quire.manifest.records import MetricRecord
from quire.manifest.rows import damaged_reads

if TYPE_CHECKING:
    from types import ModuleType

    from prometheus_client.core import Metric

    from quire.manifest.reads import ReadTxn
    from quire.manifest.store import ManifestStore

DURATION_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper bounds of the commit-duration histogram, in seconds."""

BUCKETS = 64


class MetricKind(IntEnum):
    """What the manifest itself observes."""

    WAL_LAG = 1
    CHECKPOINT_MS = 2
    MERGE_MS = 3
    SNAPSHOTS = 4
    SNAPSHOTS_CREATED = 5
    SNAPSHOTS_DROPPED = 6


MEANING = {
    MetricKind.WAL_LAG: "lsns in the WAL when a checkpoint was planned",
    MetricKind.CHECKPOINT_MS: "milliseconds from a checkpoint's plan to its publication",
    MetricKind.MERGE_MS: "milliseconds from a merge's plan to its publication",
    MetricKind.SNAPSHOTS: "snapshots of the database, after each was created or dropped",
    MetricKind.SNAPSHOTS_CREATED: "snapshots created",
    MetricKind.SNAPSHOTS_DROPPED: "snapshots dropped",
}


def observe(tables: Overlay, scope: int, kind: int, values: Sequence[float], at_ms: int) -> None:
    """Merge observations into a metric: sums, counts and buckets add up, extremes widen, the last value replaces the former."""
    key = t.METRICS.key.pack(scope, kind)
    before = None
    with suppress(ManifestDamaged):  # the metric starts again
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
    """Observe that a snapshot was made (+1) or dropped (-1), after its row is written."""
    kind = MetricKind.SNAPSHOTS_CREATED if change > 0 else MetricKind.SNAPSHOTS_DROPPED
    observe(tables, db_id, kind, [1.0], at_ms)
    before = None
    with suppress(ManifestDamaged):
        before = tables.metrics.get(t.METRICS.key.pack(db_id, MetricKind.SNAPSHOTS))
    if before is not None:
        count = before.last + change
    else:  # the first observation: a database from an older quire may have more snapshots
        count = sum(1 for _ in tables.snapshot_index.scan(t.SNAPSHOT_INDEX.key.prefix(db_id)))
    observe(tables, db_id, MetricKind.SNAPSHOTS, [count], at_ms)


def bucket_of(value: float) -> int:
    """Return the bucket of a value. Powers of two: bucket 0 holds values below 1, bucket i those in [2^(i-1), 2^i).

    >>> [bucket_of(v) for v in (0.5, 1, 2, 3, 4)]
    [0, 1, 2, 2, 3]
    """
    return 0 if value < 1 else min(math.frexp(value)[1], BUCKETS - 1)


class RollingMetric(msgspec.Struct, frozen=True):
    """A metric of a database, with names for display."""

    db_id: int
    database: str
    """Name of the database; empty for the store, and for a database that no longer exists."""
    kind: int
    metric: str
    record: MetricRecord

    @property
    def mean(self) -> float:
        """The mean of all observations."""
        return self.record.sum / self.record.count if self.record.count else 0.0


def rolling(txn: ReadTxn, scopes: Mapping[int, str] | None = None) -> list[RollingMetric]:
    """Return every metric, or those of these scopes (id → name), by database and kind; damaged rows are left out."""
    if scopes is None:
        names, rows = txn.database_names(txn.owners(t.METRICS)), txn.raw_scan(t.METRICS)
    else:
        names, rows = dict(scopes), chain.from_iterable(txn.raw_scan(t.METRICS, scope) for scope in sorted(scopes))
    metrics: list[RollingMetric] = []
    for key, raw in rows:
        with suppress(ManifestDamaged):
            scope, kind = t.METRICS.key.unpack(key)
            metric = MetricKind(kind).name.lower() if kind in MetricKind.__members__.values() else str(kind)
            metrics.append(RollingMetric(scope, names.get(scope, ""), kind, metric, t.METRICS.rows.decode(key, raw)))
    return metrics


class WriterStats:
    """Totals since the writer started."""

    __slots__ = ("batches", "buckets", "commits", "failed", "ops", "pages", "rows", "seconds")

    def __init__(self) -> None:
        self.commits = 0
        self.batches = 0
        self.failed = 0
        self.ops = 0
        self.rows = 0
        self.pages = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(DURATION_BOUNDS) + 1)

    def add(self, batches: int, failed: int, ops: int, rows: int, pages: int, seconds: float) -> None:
        """Count one commit."""
        self.commits += 1
        self.batches += batches
        self.failed += failed
        self.ops += ops
        self.rows += rows
        self.pages += pages
        self.seconds += seconds
        self.buckets[bisect_left(DURATION_BOUNDS, seconds)] += 1


class ManifestCollector:
    """The Prometheus collector of a manifest: `registry.register(ManifestCollector(manifest))`.

    A read-only process has no writer to count, and exports only the rolling metrics. `scopes` returns those to export;
    `None` exports all.
    """

    def __init__(self, manifest: ManifestStore, scopes: Callable[[], Mapping[int, str] | None] = lambda: None) -> None:
        self._manifest = manifest
        self._scopes = scopes

    def describe(self) -> Iterable[Any]:
        """Describe nothing in advance: registering must not read the manifest."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        import prometheus_client.core as families  # installed only where metrics are scraped

        if not self._manifest.read_only:
            yield from self._of_writer(self._manifest.writer.stats, families)
        yield from self._rolling(families)

    def _of_writer(self, stats: WriterStats, families: ModuleType) -> Iterator[Metric]:
        for name, text, value in (
            ("quire_manifest_commits", "LMDB transactions committed", stats.commits),
            ("quire_manifest_batches", "batches committed or refused", stats.batches),
            ("quire_manifest_batches_failed", "batches refused", stats.failed),
            ("quire_manifest_operations", "operations applied", stats.ops),
            ("quire_manifest_rows", "rows written", stats.rows),
            ("quire_manifest_pages", "LMDB pages written", stats.pages),
            ("quire_manifest_damaged_reads", "damaged rows encountered and ignored", damaged_reads.total()),
        ):
            yield families.CounterMetricFamily(name, text, value=value)
        buckets = _cumulative(stats.buckets, DURATION_BOUNDS)
        yield families.HistogramMetricFamily(
            "quire_manifest_commit_seconds", "duration of a commit", buckets=buckets, sum_value=stats.seconds
        )
        info = self._manifest.env.info()
        yield families.GaugeMetricFamily(
            "quire_manifest_file_bytes", "size of the manifest file", value=info["file_bytes"]
        )
        yield families.GaugeMetricFamily("quire_manifest_readers", "reader slots in use", value=info["num_readers"])
        lag = families.GaugeMetricFamily(
            "quire_feed_lag", "changes that a subscriber has not acknowledged", labels=["cursor"]
        )
        with suppress(ManifestDamaged):  # a damaged cursor row: the counter above and `doctor` report it
            for cursor, waiting in self._manifest.feed.lag().items():
                lag.add_metric([str(cursor)], waiting)
        yield lag

    def _rolling(self, families: ModuleType) -> Iterator[Metric]:
        """Yield a histogram and the last value for each kind that the manifest observes."""
        with self._manifest.read() as txn:
            metrics = rolling(txn, self._scopes())
        for kind, meaning in MEANING.items():
            name = f"quire_rolling_{kind.name.lower()}"
            histogram = families.HistogramMetricFamily(name, meaning, labels=["db", "name"])
            last = families.GaugeMetricFamily(f"{name}_last", f"last value of: {meaning}", labels=["db", "name"])
            for metric in metrics:
                if metric.kind == kind:
                    labels, counts = [str(metric.db_id), metric.database], metric.record.buckets
                    # Buckets above the highest in use are left out.
                    highest = max((place for place, count in enumerate(counts) if count), default=0)
                    bounds = [float(2**place) for place in range(highest + 1)]
                    histogram.add_metric(labels, _cumulative(counts[: highest + 1], bounds), metric.record.sum)
                    last.add_metric(labels, metric.record.last)
            yield histogram
            yield last


def _cumulative(counts: Sequence[int], bounds: Sequence[float]) -> list[tuple[str, float]]:
    """Return Prometheus buckets: the number of observations at or below each bound, and the total."""
    totals = [*accumulate(counts)]
    return [*((str(bound), total) for bound, total in zip(bounds, totals)), ("+Inf", totals[-1] if totals else 0)]
