"""`/metrics`: the figures of the manifest, the feed, the engines, the store and its servers, for Prometheus.

Figures of single databases are read at the scrape, sums over all of them are kept for a moment (`dashboard_state.py`); a
database that is not open is not opened for it and has no samples. Labels are bounded by the store (states, kinds) and never
contain what a caller sent. Only the largest databases have series of their own (`service.metrics_databases`); a tag can be
named by whose values all are added up (`service.metrics_tag`). docs/dashboard.md lists the names; a test compares the list, the
alerts and the Grafana board with what is exported.

Threads: any.
"""

from __future__ import annotations

import shutil
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import InfoMetricFamily as Info
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from quire.archive.metrics import ArchiveCollector
from quire.lsm.metrics import KvCollector
from quire.manifest import tables as t
from quire.manifest.metrics import ManifestCollector
from quire.manifest.records import JobKind, JobState
from quire.pages.metrics import PagesCollector
from quire.service.sockets import serving
from quire.service.web.counters import LIMITS
from quire.service.web.dashboard_state import WatchedStore
from quire.stream.metrics import StreamCollector

if TYPE_CHECKING:
    from quire.lsm.kv import Kv, Stats
    from quire.service.values import MirrorStatus
    from quire.service.web.context import WebPart
    from quire.service.web.counters import WebFigures
    from quire.stream.stream import Stream, StreamInfo

OWNER_STATES = ("not needed", "unconfirmed", "confirmed", "fenced")

TAG_VALUES_MAX = 100
"""Values of a tag that databases are added up by: the most frequent."""

OUTSTANDING_MAX = 100_000
"""Outstanding jobs that are counted in one scrape."""


class _Collector:
    """Figures that are read when `/metrics` is scraped."""

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time: registering must not read the manifest."""
        return ()


class StoreCollector(_Collector):
    """What a store has and has to do."""

    def __init__(self, sight: WatchedStore) -> None:
        self._sight = sight

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        yield Info("quire_build", "the version that owns the store", value={"version": version("quire")})
        info, whole = self._sight.info(), self._sight.survey()
        sums = whole.sums
        state = Gauge("quire_owner_state", "1 for where the store stands in its bucket", labels=["state"])
        for state_name in OWNER_STATES:
            state.add_metric([state_name], state_name == info.owner_state)
        yield state
        yield Gauge("quire_owner_epoch", "takeovers of the store, its creation included", value=info.owner_epoch)
        yield Gauge("quire_owner_session", "openings of this epoch that put objects", value=info.owner_session)
        databases = Gauge("quire_databases", "live databases", labels=["kind"])
        for kind, count in info.databases.items():
            databases.add_metric([kind], count)
        yield databases
        damaged = len(self._sight.damaged())
        yield Gauge("quire_databases_damaged", "databases that are closed: their rows are damaged", value=damaged)
        yield Gauge("quire_snapshots", "snapshots of all databases", value=info.snapshots)
        yield Gauge("quire_artifacts_unreferenced", "artifacts that wait for the collector", value=info.unreferenced)
        yield Gauge("quire_feed_head_sequence", "the newest change", value=info.newest_change)
        yield Gauge("quire_feed_oldest_sequence", "the oldest change that is kept", value=info.oldest_change)
        for name, text, counter, label in (
            ("quire_wal_segments", "WAL segments by state", sums.segments, "state"),
            ("quire_artifacts", "artifacts by where they are", sums.tiers, "tier"),
            ("quire_artifact_bytes", "bytes of artifacts by where they are", sums.tier_bytes, "tier"),
            ("quire_artifacts_verified", "artifacts by what a verification said", sums.verified, "state"),
        ):
            gauge = Gauge(name, text, labels=[label])
            for state_name, count in sorted(counter.items()):
                gauge.add_metric([state_name], count)
            yield gauge
        yield Gauge("quire_artifacts_damaged", "artifacts found missing or altered", value=whole.damaged_count)
        disk = shutil.disk_usage(self._sight.store.path)
        yield Gauge("quire_disk_free_bytes", "free space where the store is", value=disk.free)
        yield Gauge("quire_disk_bytes", "size of the disk where the store is", value=disk.total)
        yield from self._space()
        yield from self._tags()
        yield from self._jobs()

    def _space(self) -> Iterator[Metric]:
        space = self._sight.space()
        yield Gauge("quire_store_disk_bytes", "what the store's directory takes, as du says", value=space.total_bytes)
        others = Gauge("quire_store_disk_other_bytes", "of it, what is no database's", labels=["part"])
        for part, amount in sorted(space.others.items()):
            others.add_metric([part], amount)
        yield others
        known = self._sight.names(largest := self._sight.largest())
        databases = Gauge("quire_database_disk_bytes", "of it, the files of each database", labels=["db", "name"])
        for db_id in sorted(largest):
            databases.add_metric([str(db_id), known.get(db_id, "")], space.databases.get(db_id, 0))
        yield databases

    def _tags(self) -> Iterator[Metric]:
        if not (tag := self._sight.store.settings.service.metrics_tag):
            return
        sums = self._sight.cached.get("tags", lambda: self._by_value(tag))
        count = Gauge("quire_tag_databases", "live databases by the value of a tag", labels=["tag", "value"])
        disk = Gauge("quire_tag_disk_bytes", "what their files take", labels=["tag", "value"])
        for value, (databases, amount) in sorted(sums.items()):
            count.add_metric([tag, value], databases)
            disk.add_metric([tag, value], amount)
        yield count
        yield disk

    def _by_value(self, tag: str) -> dict[str, tuple[int, int]]:
        """Value → how many databases have it, and what their files take; of the most frequent values."""
        given, counts, sizes = self._sight.space().databases, Tally[str](), Tally[str]()
        with self._sight.manifest.read() as txn:
            for db_id, record in txn.databases():
                if not record.is_dropped and (value := record.tags.get(tag)) is not None:
                    counts[value] += 1
                    sizes[value] += given.get(db_id, 0)
        return {value: (count, sizes[value]) for value, count in counts.most_common(TAG_VALUES_MAX)}

    def _jobs(self) -> Iterator[Metric]:
        counts, oldest = self._sight.cached.get("outstanding", self._outstanding)
        jobs = Gauge("quire_jobs", "jobs that wait, run or have failed for good", labels=["kind", "state"])
        for key, count in sorted(counts.items()):
            jobs.add_metric(list(key), count)
        yield jobs
        yield Gauge("quire_jobs_oldest_due_seconds", "how long the longest due job has waited", value=oldest / 1000)

    def _outstanding(self) -> tuple[dict[tuple[str, str], int], int]:
        """(kind, state) → how many jobs, and how many milliseconds the longest due one has waited."""
        now, oldest = self._sight.clock.now_ms(), 0
        counts: dict[tuple[str, str], int] = {}
        with self._sight.manifest.read() as txn:
            for state in (JobState.PENDING, JobState.IN_FLIGHT, JobState.FAILED_PERMANENT):
                for (_, job_id), _ in islice(txn.scan(t.JOBS_BY_STATE, state), OUTSTANDING_MAX):
                    if (job := txn.job(job_id)) is None:
                        continue
                    key = (JobKind(job.kind).name.lower(), state.name.lower())
                    counts[key] = counts.get(key, 0) + 1
                    if state is JobState.PENDING:
                        oldest = max(oldest, now - max(job.created_at_ms, job.not_before_ms))
        return counts, oldest


class MirrorCollector(_Collector):
    """How far the targets of mirrors are behind."""

    def __init__(self, sight: WatchedStore) -> None:
        self._sight = sight

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        mirrors = self._sight.info().mirrors
        for name, text, value in (
            ("lag_seconds", "since the target was last up to date; 0 while it lacks nothing", _field("lag_seconds")),
            ("lag_frames", "page versions of the databases that are not in the target", _field("lag_frames")),
            ("databases_behind", "databases that changed or went since", lambda row: row.changed + row.dropped),
            ("databases", "databases in the target", _field("held")),
            ("rows", "rows in the target", _field("rows")),
            ("bytes", "bytes of the target's files", _field("size_bytes")),
            ("failures", "runs that failed since the target was last up to date", _field("failures")),
            ("every_seconds", "between two scheduled runs; 0: runs on request", _field("every_seconds")),
            ("started_timestamp_seconds", "when the last run began", lambda row: row.started_at_ms / 1000),
            ("synced_timestamp_seconds", "when the target was last up to date", lambda row: row.synced_at_ms / 1000),
        ):
            gauge = Gauge(f"quire_mirror_{name}", text, labels=["mirror"])
            for mirror in mirrors:
                gauge.add_metric([mirror.name], value(mirror))
            yield gauge


def _field(name: str) -> Callable[[MirrorStatus], float]:
    return lambda mirror: getattr(mirror, name)


class WebCollector(_Collector):
    """What the HTTP side counts."""

    def __init__(self, figures: Callable[[], WebFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        figures = self._figures()
        yield Counter("quire_http_requests", "requests answered", value=figures.calls)
        yield Counter("quire_http_failed", "requests answered with an error", value=figures.failed)
        yield Counter("quire_http_refused", "requests without the right to be made", value=figures.refused)
        yield Counter("quire_http_busy", "connections that found no place", value=figures.busy)
        limited = Counter("quire_http_limited", "refusals because something was used up", labels=["limit"])
        for limit, count in sorted((dict.fromkeys(LIMITS, 0) | figures.limited).items()):
            limited.add_metric([limit], count)
        yield limited
        yield Counter("quire_http_pages_dropped", "pages that did not read their updates", value=figures.pages_dropped)
        yield Gauge("quire_http_connections", "connections that are open", value=figures.connections_now)
        yield Gauge("quire_http_pages", "pages that follow the store live", value=figures.pages_now)


class PartsCollector(_Collector):
    """What the parts of the HTTP side count: the SQL server, the replicas."""

    def __init__(self, parts: Sequence[WebPart]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        for part in self._parts:
            yield from part.collect()


class LargestCollector(_Collector):
    """Another collector, without the series of single databases but the largest."""

    def __init__(self, sight: WatchedStore, collector: Any) -> None:
        self._sight = sight
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        shown = {"", *map(str, self._sight.largest())}
        for metric in self._collector.collect():
            metric.samples = [sample for sample in metric.samples if _database(sample.labels) in shown]
            yield metric


def _database(labels: Mapping[str, str]) -> str:
    """The database that a series is about; empty if it is about none."""
    return labels.get("db") or labels.get("stream", "")


def registry(sight: WatchedStore, figures: Callable[[], WebFigures], parts: Sequence[WebPart]) -> CollectorRegistry:
    """Everything that is exported, in a registry of its own: several stores may be served by one process."""
    prometheus = CollectorRegistry(auto_describe=False)
    collectors: tuple[Any, ...] = (
        ManifestCollector(sight.manifest, lambda: {0: "", **sight.names(sight.largest())}),
        PagesCollector(sight.store.pages.figures),
        KvCollector(partial(kv_stats, sight)),
        StreamCollector(partial(stream_infos, sight), sight.log_figures),
        StoreCollector(sight),
        MirrorCollector(sight),
        ArchiveCollector(lambda: sight.info().archive, sight.clock.now_ms),
        FlightCollector(sight),
        WebCollector(figures),
        PartsCollector(parts),
    )
    for collector in collectors:
        prometheus.register(LargestCollector(sight, collector))
    ProcessCollector(registry=prometheus)
    PlatformCollector(registry=prometheus)
    return prometheus


def exposition(prometheus: CollectorRegistry) -> tuple[bytes, str]:
    """(text, content type) as Prometheus reads it."""
    return generate_latest(prometheus), CONTENT_TYPE_LATEST


# ── engines and the Flight service ────────────────────────────────────────────────────────────────────────────────────


class FlightCollector(_Collector):
    """What the servers of a store count, together: they come and go, so a scrape after one was closed shows less."""

    def __init__(self, sight: WatchedStore) -> None:
        self._sight = sight

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        figures = [server.figures() for server in serving(self._sight.store.path)]
        for name, text, field in (
            ("quire_flight_calls", "calls of clients", "calls"),
            ("quire_flight_failed", "calls answered with an error", "failed"),
            ("quire_flight_refused", "calls without the right to be made", "refused"),
            ("quire_flight_busy", "calls that found no place", "busy"),
            ("quire_flight_batches", "batches of rows sent to clients", "batches_sent"),
            ("quire_flight_rows", "rows sent to clients", "rows_sent"),
        ):
            yield Counter(name, text, value=sum(getattr(figure, field) for figure in figures))
        yield Gauge("quire_flight_servers", "addresses that clients are served on", value=len(figures))
        now = Gauge("quire_flight_now", "what clients are doing at this moment", labels=["what"])
        for what, field in (("calls", "calls_now"), ("waits", "waits_now"), ("streams", "streams_now")):
            now.add_metric([what], sum(getattr(figure, field) for figure in figures))
        yield now


def kv_stats(sight: WatchedStore) -> list[tuple[list[str], Stats]]:
    """(labels, numbers) of the key-value databases that are open; without any nothing is loaded."""
    if not sight.info().databases["lsm"]:
        return []
    known = sight.names(opened := sight.store.kvs.databases())
    return [([str(db_id), known.get(db_id, "")], kv.stats()) for db_id, kv in opened.items()]


def stream_infos(sight: WatchedStore) -> list[tuple[list[str], StreamInfo]]:
    """(labels, numbers) of the streams that are open; without any nothing is loaded."""
    if not sight.info().databases["stream"]:
        return []
    infos = [stream.info() for stream in sight.store.streams.streams()]
    known = sight.names(info.stream_id for info in infos)
    return [([str(info.stream_id), known.get(info.stream_id, "")], info) for info in infos]


def open_kv(sight: WatchedStore, db_id: int) -> Kv | None:
    """A key-value database, if it is open."""
    return sight.store.kvs.databases().get(db_id)


def open_stream(sight: WatchedStore, stream_id: int) -> Stream | None:
    """A stream, if it is open."""
    return next((stream for stream in sight.store.streams.streams() if stream.info().stream_id == stream_id), None)
