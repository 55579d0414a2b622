"""Figures of the page engine, also as a Prometheus collector.

Everything is computed on request: counting costs the engine only a few additions.

Threads: any; the figures of a busy engine are from slightly different moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.core.reader_info import ReaderInfo
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WalState
from quire.pages.pagestore import PageStore

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_INDEXED = (WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFigures:
    """The figures of one open database."""

    db_id: int
    name: str
    page_index_rows: int
    readers_active: int
    segments_blocked: int
    wait_for_floor_ms: int
    wal_bytes: int
    unpublished_bytes: int
    syncs: int
    recycled: int
    oldest_reader: ReaderInfo | None = None
    """The reader of the oldest version: the first suspect when segments are blocked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesFigures:
    """The figures of the whole engine."""

    databases: tuple[DatabaseFigures, ...]
    cache_bytes: int
    cache_bytes_max: int
    cache_hit_ratio: float
    cold_wait_seconds: float


def database_figures(txn: ReadTxn, store: PageStore, *, wal_bytes: int, wait_for_floor_ms: int) -> DatabaseFigures:
    """Return the figures of one database."""
    record, wal = txn.database(store.db_id), txn.wal_state(store.db_id)
    leases = store.readers.peek()
    lowest = min((lease.lsn for lease in leases if not lease.set_aside), default=None)
    rows = blocked = 0
    is_truncating = False
    for _, row in txn.scan(t.WAL_CATALOG, store.db_id):
        if row.origin_db_id != store.db_id:
            continue
        if row.state in _INDEXED:
            rows += row.frame_count
            blocked += lowest is not None and row.state is WalState.INDEXED and row.last_lsn > lowest
        elif row.state is WalState.CHECKPOINTED:
            is_truncating = True
        elif row.state is WalState.OPEN and wal is not None:
            rows += max(wal.indexed_upto_lsn - row.first_lsn + 1, 0)
    if is_truncating:
        # After a checkpoint, rows are removed from the index gradually: until its segments are truncated, they must be counted.
        rows = sum(1 for _ in txn.raw_scan(t.PAGE_VERSION_INDEX, store.db_id))
    return DatabaseFigures(
        oldest_reader=leases[0].info if leases else None,
        db_id=store.db_id,
        name=record.name if record else str(store.db_id),
        page_index_rows=rows,
        readers_active=len(leases),
        segments_blocked=blocked,
        wait_for_floor_ms=wait_for_floor_ms,
        wal_bytes=wal_bytes,
        unpublished_bytes=store.wal.unpublished_bytes,
        syncs=store.wal.syncs,
        recycled=store.wal.recycled,
    )


class PagesCollector:
    """A Prometheus collector over an engine: `registry.register(PagesCollector(engine.figures))`."""

    def __init__(self, figures: Callable[[], PagesFigures]) -> None:
        self._figures = figures

    def describe(self) -> Iterable[Any]:
        """Return nothing, so that registering does not read the manifest."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Return the current figures."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._figures()
        gauges = (
            ("quire_page_index_rows", "WAL-backed page versions that the index tracks", "page_index_rows"),
            ("quire_snapshot_readers_active", "live leases", "readers_active"),
            ("quire_wal_segments_blocked_by_readers", "segments waiting for the readers' floor", "segments_blocked"),
            ("quire_wal_bytes", "WAL not yet absorbed by a checkpoint", "wal_bytes"),
            ("quire_wal_unpublished_bytes", "WAL not yet in the page index", "unpublished_bytes"),
        )
        counters = (
            (
                "quire_checkpoint_wait_for_floor_ms",
                "time that checkpoint plans have waited for readers",
                "wait_for_floor_ms",
            ),
            ("quire_wal_syncs", "syncs of the WAL", "syncs"),
            ("quire_wal_recycled", "segment files reused", "recycled"),
        )
        for name, text, field in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["db", "name"])
            for database in figures.databases:
                gauge.add_metric([str(database.db_id), database.name], getattr(database, field))
            yield gauge
        oldest = GaugeMetricFamily(
            "quire_oldest_reader_since_seconds",
            "when the reader of the oldest version opened it, in Unix time",
            labels=["db", "name", "reader", "pid", "host", "tags"],
        )
        for database in figures.databases:
            who = database.oldest_reader or ReaderInfo(reader="", lsn=0)  # 0 and no name: there are no readers
            tags = ",".join(f"{name}={value}" for name, value in sorted(who.tags.items()))
            labels = [str(database.db_id), database.name, who.reader, str(who.pid or ""), who.host, tags]
            oldest.add_metric(labels, who.since_ms / 1000)
        yield oldest
        for name, text, field in counters:
            counter = CounterMetricFamily(name, text, labels=["db", "name"])
            for database in figures.databases:
                counter.add_metric([str(database.db_id), database.name], getattr(database, field))
            yield counter
        yield GaugeMetricFamily("quire_page_cache_bytes", "bytes of pages in memory", value=figures.cache_bytes)
        yield GaugeMetricFamily(
            "quire_page_cache_hit_ratio", "share of reads served from the cache", value=figures.cache_hit_ratio
        )
        yield CounterMetricFamily(
            "quire_cold_wait_seconds", "time that cold scans were throttled", value=figures.cold_wait_seconds
        )
