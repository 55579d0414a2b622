"""`/metrics`: the figures of the manifest, the feed, the engines, the store and its servers, for Prometheus.

Figures of single databases are read at the scrape, sums over all of them are cached for a moment (`dashboard_state.py`). A
database that is not open is not opened for a scrape and has no samples. Labels are bounded by the store (states, kinds) and
never contain data that a caller sent. Only the largest databases have their own series (`service.metrics_databases`);
`service.metrics_tag` names a tag by whose values all databases are added up. docs/dashboard.md lists the names; a test compares
the list, the alerts and the Grafana board with what is exported.

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
from quire.service.sockets import registered_servers
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
"""The most frequent values of the tag by which databases are added up."""

OUTSTANDING_MAX = 100_000
"""Outstanding jobs that are counted in one scrape, at most, for each state."""


class _Collector:
    """A collector whose figures are read when `/metrics` is scraped."""

    def describe(self) -> Iterable[Any]:
        """Return nothing ahead of time: registering must not read the manifest."""
        return ()


class StoreCollector(_Collector):
    """The figures of the store: its contents and its outstanding work."""

    def __init__(self, watched: WatchedStore) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        yield Info("quire_build", "version of quire that owns the store", value={"version": version("quire")})
        info, totals = self._watched.info(), self._watched.survey()
        sums = totals.sums
        state = Gauge("quire_owner_state", "1 for the current state of ownership of the bucket", labels=["state"])
        for state_name in OWNER_STATES:
            state.add_metric([state_name], state_name == info.owner_state)
        yield state
        yield Gauge(
            "quire_owner_epoch", "owner epoch: takeovers of the store, including its creation", value=info.owner_epoch
        )
        yield Gauge(
            "quire_owner_session", "sessions of this owner epoch that uploaded objects", value=info.owner_session
        )
        databases = Gauge("quire_databases", "live databases", labels=["kind"])
        for kind, count in info.databases.items():
            databases.add_metric([kind], count)
        yield databases
        damaged = len(self._watched.damaged())
        yield Gauge("quire_databases_damaged", "databases closed because their rows are damaged", value=damaged)
        yield Gauge("quire_snapshots", "snapshots of all databases", value=info.snapshots)
        yield Gauge(
            "quire_artifacts_unreferenced",
            "unreferenced artifacts waiting for garbage collection",
            value=info.unreferenced,
        )
        yield Gauge("quire_feed_head_sequence", "sequence of the newest change", value=info.newest_change)
        yield Gauge("quire_feed_oldest_sequence", "sequence of the oldest retained change", value=info.oldest_change)
        for name, text, counter, label in (
            ("quire_wal_segments", "WAL segments by state", sums.segments, "state"),
            ("quire_artifacts", "artifacts by tier", sums.tiers, "tier"),
            ("quire_artifact_bytes", "bytes of artifacts by tier", sums.tier_bytes, "tier"),
            ("quire_artifacts_verified", "artifacts by result of the last verification", sums.verified, "state"),
        ):
            gauge = Gauge(name, text, labels=[label])
            for state_name, count in sorted(counter.items()):
                gauge.add_metric([state_name], count)
            yield gauge
        yield Gauge("quire_artifacts_damaged", "artifacts found missing or altered", value=totals.damaged_count)
        disk = shutil.disk_usage(self._watched.store.path)
        yield Gauge("quire_disk_free_bytes", "free space on the store's disk", value=disk.free)
        yield Gauge("quire_disk_bytes", "size of the store's disk", value=disk.total)
        yield from self._space()
        yield from self._tags()
        yield from self._jobs()

    def _space(self) -> Iterator[Metric]:
        space = self._watched.space()
        yield Gauge("quire_store_disk_bytes", "disk usage of the store's directory, as in du", value=space.total_bytes)
        others = Gauge("quire_store_disk_other_bytes", "disk usage outside the databases", labels=["part"])
        for part, amount in sorted(space.others.items()):
            others.add_metric([part], amount)
        yield others
        names = self._watched.names(largest := self._watched.largest())
        databases = Gauge("quire_database_disk_bytes", "disk usage of each database's files", labels=["db", "name"])
        for db_id in sorted(largest):
            databases.add_metric([str(db_id), names.get(db_id, "")], space.databases.get(db_id, 0))
        yield databases

    def _tags(self) -> Iterator[Metric]:
        if not (tag := self._watched.store.settings.service.metrics_tag):
            return
        sums = self._watched.cached.get("tags", lambda: self._by_value(tag))
        count = Gauge("quire_tag_databases", "live databases by the value of a tag", labels=["tag", "value"])
        disk = Gauge(
            "quire_tag_disk_bytes", "disk usage of the databases by the value of a tag", labels=["tag", "value"]
        )
        for value, (databases, amount) in sorted(sums.items()):
            count.add_metric([tag, value], databases)
            disk.add_metric([tag, value], amount)
        yield count
        yield disk

    def _by_value(self, tag: str) -> dict[str, tuple[int, int]]:
        """Return value → (number of databases, bytes of their files), for the most frequent values."""
        given, counts, sizes = self._watched.space().databases, Tally[str](), Tally[str]()
        with self._watched.manifest.read() as txn:
            for db_id, record in txn.databases():
                if not record.is_dropped and (value := record.tags.get(tag)) is not None:
                    counts[value] += 1
                    sizes[value] += given.get(db_id, 0)
        return {value: (count, sizes[value]) for value, count in counts.most_common(TAG_VALUES_MAX)}

    def _jobs(self) -> Iterator[Metric]:
        counts, oldest = self._watched.cached.get("outstanding", self._outstanding)
        jobs = Gauge("quire_jobs", "jobs that are pending, running or permanently failed", labels=["kind", "state"])
        for key, count in sorted(counts.items()):
            jobs.add_metric(list(key), count)
        yield jobs
        yield Gauge(
            "quire_jobs_oldest_due_seconds", "how long the oldest due job has been waiting", value=oldest / 1000
        )

    def _outstanding(self) -> tuple[dict[tuple[str, str], int], int]:
        """Return (kind, state) → number of jobs, and for how many milliseconds the longest due one has waited."""
        now, oldest = self._watched.clock.now_ms(), 0
        counts: dict[tuple[str, str], int] = {}
        with self._watched.manifest.read() as txn:
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
    """The lag of the targets of mirrors."""

    def __init__(self, watched: WatchedStore) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        mirrors = self._watched.info().mirrors
        for name, text, value in (
            ("lag_seconds", "time since the target was last up to date; 0 while it is", _field("lag_seconds")),
            ("lag_frames", "page versions not yet in the target", _field("lag_frames")),
            (
                "databases_behind",
                "databases changed or dropped since the last run",
                lambda row: row.changed + row.dropped,
            ),
            ("databases", "databases in the target", _field("held")),
            ("rows", "rows in the target", _field("rows")),
            ("bytes", "bytes of the target's files", _field("size_bytes")),
            ("failures", "failed runs since the target was last up to date", _field("failures")),
            ("every_seconds", "time between scheduled runs; 0 if it only runs on request", _field("every_seconds")),
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
    """The counters of the HTTP server."""

    def __init__(self, figures: Callable[[], WebFigures]) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        figures = self._figures()
        yield Counter("quire_http_requests", "requests answered", value=figures.calls)
        yield Counter("quire_http_failed", "requests answered with an error", value=figures.failed)
        yield Counter("quire_http_refused", "unauthorized requests", value=figures.refused)
        yield Counter("quire_http_busy", "connections refused because the limit was reached", value=figures.busy)
        limited = Counter("quire_http_limited", "requests refused because a limit was reached", labels=["limit"])
        for limit, count in sorted((dict.fromkeys(LIMITS, 0) | figures.limited).items()):
            limited.add_metric([limit], count)
        yield limited
        yield Counter(
            "quire_http_pages_dropped",
            "dashboard pages disconnected because they did not read their updates",
            value=figures.pages_dropped,
        )
        yield Gauge("quire_http_connections", "open connections", value=figures.connections_now)
        yield Gauge("quire_http_pages", "dashboard pages with live updates", value=figures.pages_now)


class PartsCollector(_Collector):
    """The counters of the parts of the HTTP server: the SQL server, the replicas."""

    def __init__(self, parts: Sequence[WebPart]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        for part in self._parts:
            yield from part.collect()


class LargestCollector(_Collector):
    """Another collector, with series of the largest databases only."""

    def __init__(self, watched: WatchedStore, collector: Any) -> None:
        self._watched = watched
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        shown = {"", *map(str, self._watched.largest())}
        for metric in self._collector.collect():
            metric.samples = [sample for sample in metric.samples if _database(sample.labels) in shown]
            yield metric


def _database(labels: Mapping[str, str]) -> str:
    """Return the database of a series; empty if it has none."""
    return labels.get("db") or labels.get("stream", "")


def registry(watched: WatchedStore, figures: Callable[[], WebFigures], parts: Sequence[WebPart]) -> CollectorRegistry:
    """Return a registry of everything that is exported. It is separate, because one process may serve several stores."""
    prometheus = CollectorRegistry(auto_describe=False)
    collectors: tuple[Any, ...] = (
        ManifestCollector(watched.manifest, lambda: {0: "", **watched.names(watched.largest())}),
        PagesCollector(watched.store.pages.figures),
        KvCollector(partial(kv_stats, watched)),
        StreamCollector(partial(stream_infos, watched), watched.log_figures),
        StoreCollector(watched),
        MirrorCollector(watched),
        ArchiveCollector(lambda: watched.info().archive, watched.clock.now_ms),
        FlightCollector(watched),
        WebCollector(figures),
        PartsCollector(parts),
    )
    for collector in collectors:
        prometheus.register(LargestCollector(watched, collector))
    ProcessCollector(registry=prometheus)
    PlatformCollector(registry=prometheus)
    return prometheus


def exposition(prometheus: CollectorRegistry) -> tuple[bytes, str]:
    """Return (text, content type) for Prometheus."""
    return generate_latest(prometheus), CONTENT_TYPE_LATEST


# ── engines and the Flight service ────────────────────────────────────────────────────────────────────────────────────


class FlightCollector(_Collector):
    """The counters of the servers of a store, summed. A closed server no longer contributes, so sums may fall."""

    def __init__(self, watched: WatchedStore) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        """Yield the current figures."""
        figures = [server.figures() for server in registered_servers(self._watched.store.path)]
        for name, text, field in (
            ("quire_flight_calls", "calls from clients", "calls"),
            ("quire_flight_failed", "calls answered with an error", "failed"),
            ("quire_flight_refused", "unauthorized calls", "refused"),
            ("quire_flight_busy", "calls refused because the limit was reached", "busy"),
            ("quire_flight_batches", "batches of rows sent to clients", "batches_sent"),
            ("quire_flight_rows", "rows sent to clients", "rows_sent"),
        ):
            yield Counter(name, text, value=sum(getattr(figure, field) for figure in figures))
        yield Gauge("quire_flight_servers", "addresses that the server listens on", value=len(figures))
        now = Gauge("quire_flight_now", "calls, long polls and streams in progress", labels=["what"])
        for what, field in (("calls", "calls_now"), ("waits", "waits_now"), ("streams", "streams_now")):
            now.add_metric([what], sum(getattr(figure, field) for figure in figures))
        yield now


def kv_stats(watched: WatchedStore) -> list[tuple[list[str], Stats]]:
    """Return (labels, figures) of the open key-value databases; without any, their engine is not loaded."""
    if not watched.info().databases["lsm"]:
        return []
    names = watched.names(opened := watched.store.kvs.databases())
    return [([str(db_id), names.get(db_id, "")], kv.stats()) for db_id, kv in opened.items()]


def stream_infos(watched: WatchedStore) -> list[tuple[list[str], StreamInfo]]:
    """Return (labels, figures) of the open streams; without any, their engine is not loaded."""
    if not watched.info().databases["stream"]:
        return []
    infos = [stream.info() for stream in watched.store.streams.streams()]
    names = watched.names(info.stream_id for info in infos)
    return [([str(info.stream_id), names.get(info.stream_id, "")], info) for info in infos]


def open_kv(watched: WatchedStore, db_id: int) -> Kv | None:
    """Return a key-value database, if it is open."""
    return watched.store.kvs.databases().get(db_id)


def open_stream(watched: WatchedStore, stream_id: int) -> Stream | None:
    """Return a stream, if it is open."""
    return next((stream for stream in watched.store.streams.streams() if stream.info().stream_id == stream_id), None)
