"""Prometheus metrics of the open key-value databases, computed at each scrape. Threads: any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from quire.lsm.kv import Stats

LABELS = ["db", "name"]

_GAUGES = {
    "tables": "tables",
    "table_bytes": "size of the tables in bytes",
    "rows": "versions in tables, deletions included",
    "tombstones": "deletions in tables",
    "memtable_bytes": "size of the memtables in bytes",
    "frozen": "memtables waiting to be flushed",
    "last_lsn": "lsn of the newest write",
    "stalled_writers": "writers currently waiting for a flush or a compaction",
    "manifest_version": "version of the manifest; increases with each change",
}
_COUNTERS = {
    "flushes": "memtables flushed to tables",
    "compactions": "table merges",
    "stalls": "writes delayed by a flush or a compaction",
    "stall_seconds": "total time that writers have waited",
}
"""Keys here and in `_GAUGES` are fields of `Stats`, and the suffix of the metric's name."""


class KvCollector:
    """A Prometheus collector. `databases` returns (labels, stats) of each open database."""

    def __init__(self, databases: Callable[[], Iterable[tuple[list[str], Stats]]]) -> None:
        self._databases = databases

    def describe(self) -> Iterable[Any]:
        """Return nothing: registering must not read the databases."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        databases = list(self._databases())
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for field, text in names.items():
                metric = family(f"quire_kv_{field}", f"{text}, by database", labels=LABELS)
                for labels, stats in databases:
                    metric.add_metric(labels, getattr(stats, field))
                yield metric
        level_labels = [*LABELS, "level"]
        levels = GaugeMetricFamily("quire_kv_level_tables", "tables in each level, by database", labels=level_labels)
        for labels, stats in databases:
            for level, count in enumerate(stats.levels):
                levels.add_metric([*labels, str(level)], count)
        yield levels
