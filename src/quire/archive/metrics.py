"""Prometheus metrics of a store's archive, computed at each scrape. Threads: any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from quire.archive.status import ArchiveStatus


class ArchiveCollector:
    """A Prometheus collector. `status` returns the archive's status, or `None` if archiving is off; then all values are 0."""

    def __init__(self, status: Callable[[], ArchiveStatus | None], now_ms: Callable[[], int]) -> None:
        self._status = status
        self._now_ms = now_ms

    def describe(self) -> Iterable[Any]:
        """Return nothing: registering must not read the store."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the current values."""
        own_status = self._status()
        status = own_status or ArchiveStatus(mode="off", state="off", interval_seconds=0.0)
        drill = status.last_drill
        # Before the first base nothing can be restored: `restorable_at_ms` is 0, and the age counts from 1970.
        age = max(self._now_ms() - status.restorable_at_ms, 0) / 1000 if own_status is not None else 0.0
        for name, text, value in (
            ("enabled", "1 if the whole store is kept in its bucket", own_status is not None),
            ("interval_seconds", "how often changes are uploaded", status.interval_seconds),
            ("retain_seconds", "the window: how far back the whole store can be restored", status.retain_seconds),
            ("lag_seconds", "age of the oldest change that is not in the bucket", status.lag_seconds),
            ("backlog_bytes", "changes waiting for upload, in memory and on disk", _waiting(status)),
            ("restorable_age_seconds", "age of the newest restorable state; 0 while nothing is waiting", age),
            ("fenced", "1 if another directory has taken the store over", status.fenced),
            (
                "last_drill_timestamp_seconds",
                "start time of the last drill; 0 if there was none",
                drill.at_ms / 1000 if drill else 0,
            ),
            ("last_drill_success", "1 if the last drill found no difference", drill is not None and drill.is_good),
            ("last_drill_seconds", "duration of the last drill", drill.seconds if drill else 0),
            (
                "last_drill_restore_seconds",
                "duration of the restore in the last drill",
                drill.restore_seconds if drill else 0,
            ),
            ("writes_per_hour", "puts and listings of the whole store, in the last hour", status.writes_per_hour),
            ("reads_per_hour", "reads of the whole store from its buckets, in the last hour", status.reads_per_hour),
            (
                "dollars_per_month",
                "estimated cost of the store's requests, at the list price of S3 Standard",
                status.dollars_per_month,
            ),
        ):
            yield Gauge(f"quire_archive_{name}", text, value=float(value))
        yield Counter("quire_archive_puts", "objects uploaded since the store was opened", value=status.puts)
        yield Counter("quire_archive_put_bytes", "bytes uploaded since the store was opened", value=status.put_bytes)


def _waiting(status: ArchiveStatus) -> int:
    return status.memory_bytes + status.backlog_bytes
