"""What the writer counts, and the same for Prometheus.

The writer adds plain numbers; a collector reads them when somebody scrapes. So counting costs a few additions per commit
and prometheus-client is imported only where metrics are served.

Thread: `add` by the writer alone; readers may see the counts of a commit half added, never wrong for long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quire.core.errors import ManifestDamaged
from quire.manifest.rows import damaged_reads

if TYPE_CHECKING:
    from prometheus_client.core import Metric

DURATION_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
"""Upper bounds of the commit-duration histogram, in seconds."""


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
    """A Prometheus collector over a manifest: `REGISTRY.register(ManifestCollector(stats, info, lag))`.

    `lag` is `manifest.feed.lag`: changes that wait for each subscriber.
    """

    def __init__(
        self,
        stats: WriterStats,
        info: Callable[[], dict[str, int]],
        lag: Callable[[], Mapping[str | int, int]] | None = None,
    ) -> None:
        self._stats = stats
        self._info = info
        self._lag = lag

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time: registering must not read the environment."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The current figures."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        stats = self._stats
        for name, text, value in (
            ("quire_manifest_commits", "LMDB transactions committed", stats.commits),
            ("quire_manifest_batches", "batches submitted and decided", stats.batches),
            ("quire_manifest_batches_failed", "batches that were refused", stats.failed),
            ("quire_manifest_operations", "operations applied", stats.ops),
            ("quire_manifest_rows", "rows written", stats.rows),
            ("quire_manifest_pages", "LMDB pages written", stats.pages),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield CounterMetricFamily(
            "quire_manifest_damaged_reads", "damaged rows that were met, and not believed", value=damaged_reads.total()
        )
        cumulative, buckets = 0, []
        for bound, count in zip([*map(str, DURATION_BOUNDS), "+Inf"], stats.buckets):
            cumulative += count
            buckets.append((bound, cumulative))
        yield HistogramMetricFamily(
            "quire_manifest_commit_seconds", "time of a commit", buckets=buckets, sum_value=stats.seconds
        )
        info = self._info()
        yield GaugeMetricFamily("quire_manifest_file_bytes", "size of the manifest file", value=info["file_bytes"])
        yield GaugeMetricFamily("quire_manifest_readers", "reader slots in use", value=info["num_readers"])
        if self._lag is not None:
            lag = GaugeMetricFamily("quire_feed_lag", "changes that wait for a subscriber", labels=["cursor"])
            with suppress(ManifestDamaged):  # a cursor's row: the counter above and doctor tell
                for cursor, waiting in self._lag().items():
                    lag.add_metric([str(cursor)], waiting)
            yield lag
