"""`/metrics`: the figures of the manifest, the feed, the engines, the store and those who serve it, for Prometheus.

Rules
  1. Everything is read when somebody scrapes; nothing is counted for the sake of it.
  2. Labels are bounded by the store: databases, states and kinds; never what a caller sent.

docs/dashboard.md lists the names, a test holds the list, the alerts and the Grafana board to what is exported.
Threads: any.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.manifest import tables as t
from quire.manifest.metrics import RollingCollector
from quire.manifest.records import JobKind, JobState
from quire.manifest.stats import ManifestCollector
from quire.service.web.dashboard_state import Sight
from quire.service.web.engines import FlightCollector, KvCollector, StreamCollector
from quire.stream.mlog_metrics import ManifestLogCollector

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from quire.service.web.server import WebFigures

OWNER_STATES = ("not needed", "unconfirmed", "confirmed", "fenced")

OUTSTANDING_MAX = 100_000
"""Outstanding jobs that are counted in one scrape."""


class StoreCollector:
    """What a store has and has to do."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def describe(self) -> Iterable[Any]:
        """Nothing ahead of time: registering must not read the manifest."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        from prometheus_client.core import GaugeMetricFamily as Gauge
        from prometheus_client.core import InfoMetricFamily as Info

        yield Info("quire_build", "the version that owns the store", value={"version": version("quire")})
        info, whole = self._sight.info(), self._sight.survey()
        state = Gauge("quire_owner_state", "1 for where the store stands in its bucket", labels=["state"])
        for each in OWNER_STATES:
            state.add_metric([each], each == info.owner_state)
        yield state
        yield Gauge("quire_owner_epoch", "takeovers of the store, its creation included", value=info.owner_epoch)
        yield Gauge("quire_owner_session", "openings of this epoch that put objects", value=info.owner_session)
        databases = Gauge("quire_databases", "live databases", labels=["kind"])
        for kind, count in info.databases.items():
            databases.add_metric([kind], count)
        yield databases
        yield Gauge("quire_snapshots", "snapshots of all databases", value=info.snapshots)
        yield Gauge("quire_artifacts_unreferenced", "artifacts that wait for the collector", value=info.unreferenced)
        yield Gauge("quire_feed_head_sequence", "the newest change", value=info.newest_change)
        yield Gauge("quire_feed_oldest_sequence", "the oldest change that is kept", value=info.oldest_change)
        for name, text, counter, label in (
            ("quire_wal_segments", "WAL segments by state", "segments", "state"),
            ("quire_artifacts", "artifacts by where they are", "tiers", "tier"),
            ("quire_artifact_bytes", "bytes of artifacts by where they are", "tier_bytes", "tier"),
            ("quire_artifacts_verified", "artifacts by what a verification said", "verified", "state"),
        ):
            gauge = Gauge(name, text, labels=[label])
            for each, count in sorted(whole.total(counter).items()):
                gauge.add_metric([each], count)
            yield gauge
        yield Gauge("quire_artifacts_damaged", "artifacts found missing or altered", value=whole.damaged_count)
        disk = shutil.disk_usage(self._sight.store.path)
        yield Gauge("quire_disk_free_bytes", "free space where the store is", value=disk.free)
        yield Gauge("quire_disk_bytes", "size of the disk where the store is", value=disk.total)
        yield from self._space()
        yield from self._jobs()

    def _space(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily as Gauge

        space = self._sight.space()
        yield Gauge("quire_store_disk_bytes", "what the store's directory takes, as du says", value=space.total_bytes)
        others = Gauge("quire_store_disk_other_bytes", "of it, what is no database's", labels=["part"])
        for part, amount in sorted(space.others.items()):
            others.add_metric([part], amount)
        yield others
        known = {info.db_id: info.name for info in self._sight.store.databases()}
        databases = Gauge("quire_database_disk_bytes", "of it, the files of each database", labels=["db", "name"])
        for db_id, amount in sorted(space.databases.items()):
            databases.add_metric([str(db_id), known.get(db_id, "")], amount)
        yield databases

    def _jobs(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily as Gauge

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
        jobs = Gauge("quire_jobs", "jobs that wait, run or have failed for good", labels=["kind", "state"])
        for key, count in sorted(counts.items()):
            jobs.add_metric(list(key), count)
        yield jobs
        yield Gauge("quire_jobs_oldest_due_seconds", "how long the longest due job has waited", value=oldest / 1000)


class WebCollector:
    """What the HTTP side counts."""

    def __init__(self, figures: Callable[[], WebFigures]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Any]:
        """See `StoreCollector`."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current figures."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        figures = self._figures()
        yield Counter("quire_http_requests", "requests answered", value=figures.calls)
        yield Counter("quire_http_failed", "requests answered with an error", value=figures.failed)
        yield Counter("quire_http_refused", "requests without the right to be made", value=figures.refused)
        yield Counter("quire_http_busy", "connections that found no place", value=figures.busy)
        yield Counter("quire_http_pages_dropped", "pages that did not read their updates", value=figures.pages_dropped)
        yield Gauge("quire_http_connections", "connections that are open", value=figures.connections_now)
        yield Gauge("quire_http_pages", "pages that follow the store live", value=figures.pages_now)


def registry(sight: Sight, figures: Callable[[], WebFigures]) -> CollectorRegistry:
    """Everything that is exported, in a registry of its own: several stores may be served by one process."""
    from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

    made = CollectorRegistry(auto_describe=False)
    manifest = sight.manifest
    collectors: tuple[Any, ...] = (
        ManifestCollector(manifest.writer.stats, manifest.env.info, manifest.feed.lag),
        RollingCollector(manifest),
        sight.store.pages.collector(),
        ManifestLogCollector(sight.log_figures),
        StoreCollector(sight),
        FlightCollector(sight),
        KvCollector(sight),
        StreamCollector(sight),
        WebCollector(figures),
    )
    for each in collectors:
        made.register(each)
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    return made


def exposition(made: CollectorRegistry) -> tuple[bytes, str]:
    """(text, content type) as Prometheus reads it."""
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

    return generate_latest(made), CONTENT_TYPE_LATEST
