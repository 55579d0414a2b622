"""What the Flight service, key-value databases and streams export to Prometheus, beside `metrics.py`; which are open.

Rules as there. Databases that nobody has opened are not opened for a scrape: they have no samples.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from quire.service.live_servers import serving
from quire.service.web.dashboard_state import Sight

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from quire.lsm.kv import Kv
    from quire.stream.stream import Stream

LABELS = ["db", "name"]


class FlightCollector:
    """What the servers of a store count, together: they come and go, so a scrape after one was closed shows less."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        figures = [each.figures() for each in serving(self._sight.store.path)]
        for name, text, field in (
            ("quire_flight_calls", "calls of clients", "calls"),
            ("quire_flight_failed", "calls answered with an error", "failed"),
            ("quire_flight_refused", "calls without the right to be made", "refused"),
            ("quire_flight_busy", "calls that found no place", "busy"),
            ("quire_flight_batches", "batches of rows sent to clients", "batches_sent"),
            ("quire_flight_rows", "rows sent to clients", "rows_sent"),
        ):
            yield Counter(name, text, value=sum(getattr(each, field) for each in figures))
        yield Gauge("quire_flight_servers", "addresses that clients are served on", value=len(figures))
        now = Gauge("quire_flight_now", "what clients are doing at this moment", labels=["what"])
        for what, field in (("calls", "calls_now"), ("waits", "waits_now"), ("streams", "streams_now")):
            now.add_metric([what], sum(getattr(each, field) for each in figures))
        yield now


class KvCollector:
    """Key-value databases that are open."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        found: list[tuple[list[str], Any]] = []
        if self._sight.info().databases["lsm"]:
            known = names_of(self._sight)
            opened = self._sight.store.kvs.databases()
            found = [([str(db_id), known.get(db_id, "")], each.stats()) for db_id, each in opened.items()]
        for make, name, text, field in (
            (Gauge, "quire_kv_tables", "tables", "tables"),
            (Gauge, "quire_kv_table_bytes", "bytes of tables", "table_bytes"),
            (Gauge, "quire_kv_rows", "versions in tables, deletions included", "rows"),
            (Gauge, "quire_kv_tombstones", "deletions in tables", "tombstones"),
            (Gauge, "quire_kv_memtable_bytes", "bytes that no table holds yet", "memtable_bytes"),
            (Gauge, "quire_kv_frozen", "memtables that wait to become tables", "frozen"),
            (Gauge, "quire_kv_last_lsn", "the newest write", "last_lsn"),
            (Counter, "quire_kv_flushes", "memtables that became tables", "flushes"),
            (Counter, "quire_kv_compactions", "merges of tables", "compactions"),
            (
                Gauge,
                "quire_kv_stalled_writers",
                "writers that wait for a flush or a compaction, now",
                "stalled_writers",
            ),
            (Counter, "quire_kv_stalls", "writes that had to wait", "stalls"),
            (Counter, "quire_kv_stall_seconds", "how long writers have waited", "stall_seconds"),
            (Gauge, "quire_kv_manifest_version", "the manifest's version: rises with each change", "manifest_version"),
        ):
            family: Any = make(name, f"{text}, by database", labels=LABELS)
            for labels, stats in found:
                family.add_metric(labels, getattr(stats, field))
            yield family
        levels = Gauge("quire_kv_level_tables", "tables in each level, by database", labels=[*LABELS, "level"])
        for labels, stats in found:
            for level, count in enumerate(stats.levels):
                levels.add_metric([*labels, str(level)], count)
        yield levels


class StreamCollector:
    """Streams that are open."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        found: list[tuple[list[str], Any]] = []
        if self._sight.info().databases["stream"]:
            known = names_of(self._sight)
            told = [each.info() for each in self._sight.store.streams.streams()]
            found = [([str(each.stream_id), known.get(each.stream_id, "")], each) for each in told]
        appended = Counter("quire_stream_records", "records ever appended, by stream", labels=LABELS)
        kept = Gauge("quire_stream_records_kept", "records that can be read, by stream", labels=LABELS)
        segments = Gauge("quire_stream_segments", "segments by tier, by stream", labels=[*LABELS, "tier"])
        sizes = Gauge("quire_stream_bytes", "bytes by tier, by stream", labels=[*LABELS, "tier"])
        lag = Gauge("quire_stream_consumer_lag", "records a consumer has not read", labels=[*LABELS, "consumer"])
        for labels, each in found:
            appended.add_metric(labels, each.end_record - 1)  # ids begin at 1
            kept.add_metric(labels, each.records)
            for tier in ("hot", "warm", "remote"):
                segments.add_metric([*labels, tier], getattr(each, f"{tier}_segments"))
                sizes.add_metric([*labels, tier], getattr(each, f"{tier}_bytes"))
            for name, consumer in each.consumers.items():
                lag.add_metric([*labels, name], max(each.end_record - consumer.position, 0))
        yield from (appended, kept, segments, sizes, lag)


def open_kv(sight: Sight, db_id: int) -> Kv | None:
    """A key-value database, if it is open."""
    return sight.store.kvs.databases().get(db_id)


def open_stream(sight: Sight, stream_id: int) -> Stream | None:
    """A stream, if it is open."""
    return next((each for each in sight.store.streams.streams() if each.info().stream_id == stream_id), None)


def names_of(sight: Sight) -> dict[int, str]:
    """Id → name of every database."""
    with sight.manifest.read() as txn:
        return {db_id: record.name for db_id, record in txn.databases()}
