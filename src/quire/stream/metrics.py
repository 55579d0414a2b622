"""Prometheus metrics of streams and of their manifest logs. Those of a log have the design document's names.

All values are read on collection. Threads: any.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from quire.stream.stream import StreamInfo

NAMESPACE = "aof2.manifest_log"
EXPORTED = NAMESPACE.replace(".", "_") + "_"
"""The namespace in Prometheus, whose names cannot have dots."""
LABELS = ["db", "name"]

_crc_errors: Counter[int] = Counter()
_crc_errors_lock = threading.Lock()


def count_crc_error(stream_id: int) -> None:
    """Count damage found in a stream's log."""
    with _crc_errors_lock:
        _crc_errors[stream_id] += 1


def crc_errors(stream_id: int) -> int:
    """Return how often this process has found damage in a stream's log, including streams that did not open."""
    return _crc_errors[stream_id]


class LogFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one manifest log."""

    stream_id: int
    manifest_chunks_active: int = 0
    manifest_replay_seconds: float = 0.0
    manifest_crc_error_count: int = 0
    manifest_upload_retries: int = 0
    manifest_snapshot_age_seconds: float = 0.0
    """Seconds since the newest snapshot was taken, by any process; 0 while there is none."""
    manifest_shadow_divergence: int = 0
    manifest_segments_needing_repair: int = 0

    def named(self) -> dict[str, float]:
        """Return the metrics by the design document's names, in its namespace."""
        return {f"{NAMESPACE}.{name}": getattr(self, name) for name in (*_GAUGES, *_COUNTERS)}


_GAUGES = {
    "manifest_chunks_active": "chunks of the manifest log on this disk",
    "manifest_replay_seconds": "duration of the replay when the stream was opened",
    "manifest_snapshot_age_seconds": "time since the newest snapshot",
    "manifest_shadow_divergence": "segments in which log and projection differ",
    "manifest_segments_needing_repair": "segments whose only copy was an object that is missing",
}
_COUNTERS = {
    "manifest_crc_error_count": "damaged snapshots and chunks encountered",
    "manifest_upload_retries": "uploads retried after a failure",
}


class StreamCollector:
    """A Prometheus collector. `streams` returns (labels, statistics) of the open streams, `logs` the metrics of their logs."""

    def __init__(
        self,
        streams: Callable[[], Iterable[tuple[list[str], StreamInfo]]],
        logs: Callable[[], Iterable[LogFigures]],
    ) -> None:
        self._streams = streams
        self._logs = logs

    def describe(self) -> Iterable[Any]:
        """Describe no metrics in advance."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        logs = list(self._logs())
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                for prefix in ("quire_", EXPORTED):
                    metric = family(f"{prefix}{name}", text, labels=["stream"])
                    for log in logs:
                        metric.add_metric([str(log.stream_id)], getattr(log, name))
                    yield metric
        appended = CounterMetricFamily("quire_stream_records", "records ever appended, by stream", labels=LABELS)
        kept = GaugeMetricFamily("quire_stream_records_kept", "records that can be read, by stream", labels=LABELS)
        tiers = [*LABELS, "tier"]
        segments = GaugeMetricFamily("quire_stream_segments", "segments by tier, by stream", labels=tiers)
        sizes = GaugeMetricFamily("quire_stream_bytes", "bytes by tier, by stream", labels=tiers)
        lag_labels = [*LABELS, "consumer"]
        lag = GaugeMetricFamily("quire_stream_consumer_lag", "records a consumer has not read", labels=lag_labels)
        for labels, info in self._streams():
            appended.add_metric(labels, info.appended)
            kept.add_metric(labels, info.records)
            for tier in ("hot", "warm", "remote"):
                segments.add_metric([*labels, tier], getattr(info, f"{tier}_segments"))
                sizes.add_metric([*labels, tier], getattr(info, f"{tier}_bytes"))
            for name in info.consumers:
                lag.add_metric([*labels, name], info.lag(name))
        yield from (appended, kept, segments, sizes, lag)
