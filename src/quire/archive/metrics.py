"""The figures of a store's archive, for Prometheus. Read when somebody asks. Threads: any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric

from quire.archive.status import ArchiveStatus


class ArchiveCollector:
    """A Prometheus collector. `status` gives the archive's status, `None` if archiving is off: then all figures are 0."""

    def __init__(self, status: Callable[[], ArchiveStatus | None], now_ms: Callable[[], int]) -> None:
        self._status = status
        self._now_ms = now_ms

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time: registering must not read the store."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The current figures."""
        known = self._status()
        status = known or ArchiveStatus(mode="off", state="off", interval_seconds=0.0)
        drill = status.last_drill
        # Before the first base nothing can be restored: the age of nothing is as old as time.
        age = max(self._now_ms() - status.restorable_at_ms, 0) / 1000 if known is not None else 0.0
        for name, text, value in (
            ("enabled", "1 if the whole store is kept in its bucket", known is not None),
            ("interval_seconds", "how often changes are uploaded", status.interval_seconds),
            ("lag_seconds", "age of the oldest change that is not in the bucket", status.lag_seconds),
            ("backlog_bytes", "what waits for the bucket, in memory and on disk", _waiting(status)),
            ("restorable_age_seconds", "how old the newest restorable state is; 0 while nothing waits", age),
            ("fenced", "1 if another directory has taken the store over", status.fenced),
            ("last_drill_timestamp_seconds", "when the last drill began; 0: never", drill.at_ms / 1000 if drill else 0),
            ("last_drill_success", "1 if it found no difference", drill is not None and drill.is_good),
            ("last_drill_seconds", "how long it took", drill.seconds if drill else 0),
            ("last_drill_restore_seconds", "of that, the restore", drill.restore_seconds if drill else 0),
        ):
            yield Gauge(f"quire_archive_{name}", text, value=float(value))
        yield Counter("quire_archive_puts", "objects put since the store was opened", value=status.puts)
        yield Counter("quire_archive_put_bytes", "their bytes", value=status.put_bytes)


def _waiting(status: ArchiveStatus) -> int:
    return status.memory_bytes + status.backlog_bytes
