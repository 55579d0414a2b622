"""The state behind every view of the dashboard: the store, and figures that are cached for a moment.

Sums over all databases (`survey`, `info`, `space`, `damaged`) are computed once for all views and kept for ten times as long as
they took (`response_cache.py`): whatever the number of databases, they take a tenth of one core at most. Everything else that a
view shows is a page, or the largest few, and reads no more rows than that.

Threads: any.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from quire.durable import names
from quire.durable.names import lsm_home
from quire.durable.space import Space, allocated_bytes, measure
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, WalStateRecord
from quire.service.api import StoreApi
from quire.service.web.catalog_totals import StoreSurvey, Survey, survey, survey_of
from quire.service.web.response_cache import Cached

if TYPE_CHECKING:
    from quire.pages.metrics import DatabaseFigures
    from quire.pages.readers import Lease
    from quire.stream.engine import StreamEngine
    from quire.stream.metrics import LogFigures

FILES_MAX = 20_000
"""Files of one database whose sizes are added up; the rest is left out."""

STREAM_PARTS = ("hot", "warm", "manifest")


SAMPLES = 360
DATABASES = 256

Sample = tuple[int, dict[str, int]]
"""(ms, number of segments by state)."""


class Explain(Protocol):
    """`quire.store.why.why`: what keeps a subject. The store passes it in, so that nothing here imports upwards."""

    def __call__(self, txn: ReadTxn, subject: str) -> Any: ...


class WebStore(StoreApi, Protocol):
    """The interface that the dashboard needs of a store beyond that of the service."""

    @property
    def streams(self) -> StreamEngine: ...


class History:
    """Samples of how many segments were in which state: the last `SAMPLES` of at most `DATABASES` databases, in memory. The
    manifest has only the present. One thread calls `sample`; any may call `of`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: dict[int, deque[Sample]] = {}

    def sample(self, at_ms: int, segments: Mapping[int, Mapping[str, int]]) -> None:
        """Add a sample; databases that are not in `segments` are forgotten."""
        with self._lock:
            for gone in self._samples.keys() - segments.keys():
                del self._samples[gone]
            for db_id, counts in segments.items():
                if db_id in self._samples or len(self._samples) < DATABASES:
                    self._samples.setdefault(db_id, deque(maxlen=SAMPLES)).append((at_ms, dict(counts)))

    def of(self, db_id: int) -> list[Sample]:
        """Return the samples of a database, oldest first."""
        with self._lock:
            return list(self._samples.get(db_id, ()))


class WatchedStore:
    """A store and its cached figures."""

    def __init__(self, store: WebStore, explain: Explain) -> None:
        self.store = store
        self.manifest = store.manifest
        self.clock = store.manifest.clock
        self.explain = explain
        self.cached = Cached(self.clock)
        self.history = History()
        self.started_ms = self.clock.now_ms()

    def survey(self) -> StoreSurvey:
        """Return the figures of all databases together."""

        def make() -> StoreSurvey:
            with self.manifest.read() as txn:
                return survey(txn)

        return self.cached.get("survey", make)

    def survey_of(self, db_id: int) -> Survey:
        """Return the figures of a database."""
        with self.manifest.read() as txn:
            return survey_of(txn, db_id)

    def sample(self) -> None:
        """Add the current figures to the history."""
        with self.manifest.read() as txn:
            first = islice(txn.owners(t.WAL_CATALOG), DATABASES)
            segments = {db_id: survey_of(txn, db_id).segments for db_id in first}
        self.history.sample(self.clock.now_ms(), segments)

    def open_figures(self) -> dict[int, DatabaseFigures]:
        """Return the page engine's counters, for the databases it has open."""
        return self.cached.get(
            "figures", lambda: {figures.db_id: figures for figures in self.store.pages.figures().databases}
        )

    def leases(self, db_id: int) -> list[Lease]:
        """Return the readers of a database, lowest version first."""
        versions = self._versions().get(db_id)
        return self.store.pages.readers(db_id) if versions is None else versions[0]

    def readers(self) -> int:
        """Return the number of readers of all databases that are open here."""
        return sum(len(leases) for leases, _ in self._versions().values())

    def newest(self, db_id: int, wal: WalStateRecord | None) -> tuple[int, int]:
        """Return (lsn, pages) of the newest durable version, never below a lease; for a database that is not open here, those
        of the published version."""
        if (versions := self._versions().get(db_id)) is not None:
            return versions[1]
        return (wal.last_applied_lsn, wal.size_pages) if wal else (0, 0)

    def _versions(self) -> dict[int, tuple[list[Lease], tuple[int, int]]]:
        def make() -> dict[int, tuple[list[Lease], tuple[int, int]]]:
            return {pages.db_id: (pages.readers.peek(), pages.durable_version()) for pages in self.store.pages.stores()}

        return self.cached.get("versions", make)

    def log_figures(self) -> list[LogFigures]:
        """Return the figures of the manifest logs of open streams; without streams, their engine is not loaded."""
        return self.store.streams.figures() if self.info().databases["stream"] else []

    def info(self) -> Any:
        """Return the store's figures."""
        return self.cached.get("info", self.store.info)

    def space(self) -> Space:
        """Return the disk usage of the store's directory, by database; kept for longer where measuring it takes long."""
        return self.cached.get("space", lambda: measure(self.store.path))

    def damaged(self) -> dict[int, str]:
        """Return id → name of the databases that are closed because their rows are damaged."""

        def make() -> dict[int, str]:
            with self.manifest.read() as txn:
                return txn.damaged_databases()

        return self.cached.get("damaged", make)

    def largest(self) -> list[int]:
        """Return the databases whose files take most space; they have their own series in `/metrics`."""

        def make() -> list[int]:
            given = self.space().databases
            return nlargest(self.store.settings.service.metrics_databases, given, key=given.__getitem__)

        return self.cached.get("largest", make)

    def names(self, db_ids: Iterable[int]) -> dict[int, str]:
        """Return id → name of these databases."""
        with self.manifest.read() as txn:
            return txn.database_names(db_ids)

    def files_bytes(self, db_id: int, kind: DbKind) -> int:
        """Return the bytes of a database's own directories, where streams and key-value databases keep their files."""
        return sum(size for _, size in self.files(db_id, kind))

    def files(self, db_id: int, kind: DbKind) -> list[tuple[str, int]]:
        """Return (path in the store, bytes) of those files."""
        if kind is DbKind.LSM:
            parts = [lsm_home(db_id)]
        elif kind is DbKind.STREAM:
            parts = [names.stream_dir(db_id, part) for part in STREAM_PARTS]
        else:
            return []
        files: list[tuple[str, int]] = []
        for part in parts:
            for folder, _, inside in os.walk(os.path.join(self.store.path, part)):
                for name in inside:
                    if len(files) >= FILES_MAX:
                        return files
                    path = os.path.join(folder, name)
                    files.append((os.path.relpath(path, self.store.path), allocated_bytes(path)))
        return files
