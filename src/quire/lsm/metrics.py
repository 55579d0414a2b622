"""The figures of key-value databases that are open, for Prometheus. Read when somebody asks. Threads: any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from quire.lsm.kv import Stats

LABELS = ["db", "name"]

_GAUGES = {
    "tables": "tables",
    "table_bytes": "bytes of tables",
    "rows": "versions in tables, deletions included",
    "tombstones": "deletions in tables",
    "memtable_bytes": "bytes that no table holds yet",
    "frozen": "memtables that wait to become tables",
    "last_lsn": "the newest write",
    "stalled_writers": "writers that wait for a flush or a compaction, now",
    "manifest_version": "the manifest's version: rises with each change",
}
_COUNTERS = {
    "flushes": "memtables that became tables",
    "compactions": "merges of tables",
    "stalls": "writes that had to wait",
    "stall_seconds": "how long writers have waited",
}
"""Fields of `Stats`, each the end of its metric's name."""


class KvCollector:
    """A Prometheus collector. `databases` gives (labels, numbers) of the databases that are open."""

    def __init__(self, databases: Callable[[], Iterable[tuple[list[str], Stats]]]) -> None:
        self._databases = databases

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The current figures."""
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
