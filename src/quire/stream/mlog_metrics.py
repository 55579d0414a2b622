"""What a manifest log counts, by the design document's names, and the same for Prometheus.

  manifest_chunks_active          chunks on this disk
  manifest_replay_seconds         how long rebuilding the state took when the stream was opened
  manifest_crc_error_count        damaged snapshots and chunks encountered in this process, also by streams that did not open
  manifest_upload_retries         uploads of chunks, snapshots and segments that were tried again because one had failed
  manifest_snapshot_age_seconds   since the newest snapshot was taken, whoever took it; 0 while there is none
  manifest_segments_needing_repair   segments whose only copy was an object that is missing
  manifest_shadow_divergence      segments in which log and projection differ (mode shadow)

Everything is read when somebody asks. Threads: any.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from prometheus_client.core import Metric

NAMESPACE = "aof2.manifest_log"
EXPORTED = NAMESPACE.replace(".", "_") + "_"
"""The same as Prometheus can have it: its names have no dots."""

_crc_errors: Counter[int] = Counter()
_crc_errors_lock = threading.Lock()


def count_crc_error(stream_id: int) -> None:
    """Damage was met in a stream's log."""
    with _crc_errors_lock:
        _crc_errors[stream_id] += 1


def crc_errors(stream_id: int) -> int:
    """How often damage was met in a stream's log, by this process."""
    return _crc_errors[stream_id]


class LogFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one log."""

    stream_id: int
    manifest_chunks_active: int = 0
    manifest_replay_seconds: float = 0.0
    manifest_crc_error_count: int = 0
    manifest_upload_retries: int = 0
    manifest_snapshot_age_seconds: float = 0.0
    manifest_shadow_divergence: int = 0
    manifest_segments_needing_repair: int = 0

    def named(self) -> dict[str, float]:
        """The design document's names, in its namespace."""
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


class ManifestLogCollector:
    """A Prometheus collector: `REGISTRY.register(ManifestLogCollector(lambda: [log.figures() for log in logs]))`."""

    def __init__(self, figures: Callable[[], Iterable[LogFigures]]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The current figures."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        logs = list(self._figures())
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                for prefix in ("quire_", EXPORTED):
                    metric = family(f"{prefix}{name}", text, labels=["stream"])
                    for log in logs:
                        metric.add_metric([str(log.stream_id)], getattr(log, name))
                    yield metric
