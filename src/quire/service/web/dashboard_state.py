"""What every view of the dashboard looks at: the store, and figures that are kept for a moment.

Sums over all databases (`survey`, `info`, `space`, `damaged`) are made for all views at once and kept for ten times as long as
they took (`response_cache.py`): whatever the number of databases, they take a tenth of one core at most. Everything else that a
view shows is a page, or the largest few, and reads no more rows than that.

Threads: any.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from quire.durable import names
from quire.durable.names import lsm_home
from quire.durable.space import Space, given_bytes, measure
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, WalStateRecord
from quire.service.api import StoreApi
from quire.service.web.catalog_totals import Survey, Whole, survey, survey_of
from quire.service.web.history import DATABASES, History
from quire.service.web.response_cache import Cached

if TYPE_CHECKING:
    from quire.pages.metrics import DatabaseFigures
    from quire.pages.readers import Lease
    from quire.stream.engine import StreamEngine
    from quire.stream.metrics import LogFigures

FILES_MAX = 20_000
"""Files of one database whose sizes are added up; a database with more is told as `at least`."""

STREAM_PARTS = ("hot", "warm", "manifest")


class Explain(Protocol):
    """`quire.store.why.why`: what keeps a subject. The store passes it in, so that nothing here looks upward."""

    def __call__(self, txn: ReadTxn, subject: str) -> Any: ...


class WebStore(StoreApi, Protocol):
    """What the dashboard needs of a store beyond what the service needs."""

    @property
    def streams(self) -> StreamEngine: ...


class WatchedStore:
    """A store that is being looked at."""

    def __init__(self, store: WebStore, explain: Explain) -> None:
        self.store = store
        self.manifest = store.manifest
        self.clock = store.manifest.clock
        self.explain = explain
        self.cached = Cached(self.clock)
        self.history = History()
        self.started_ms = self.clock.now_ms()

    def survey(self) -> Whole:
        """The figures of all databases together."""

        def make() -> Whole:
            with self.manifest.read() as txn:
                return survey(txn)

        return self.cached.get("survey", make)

    def survey_of(self, db_id: int) -> Survey:
        """The figures of a database."""
        with self.manifest.read() as txn:
            return survey_of(txn, db_id)

    def sample(self) -> None:
        """Have the history remember the present."""
        with self.manifest.read() as txn:
            first = islice(txn.owners(t.WAL_CATALOG), DATABASES)
            segments = {db_id: survey_of(txn, db_id).segments for db_id in first}
        self.history.sample(self.clock.now_ms(), segments)

    def open_figures(self) -> dict[int, DatabaseFigures]:
        """What the page engine counts, of the databases it has open."""
        return self.cached.get(
            "figures", lambda: {figures.db_id: figures for figures in self.store.pages.figures().databases}
        )

    def leases(self, db_id: int) -> list[Lease]:
        """The readers of a database, lowest version first."""
        versions = self._versions().get(db_id)
        return self.store.pages.readers(db_id) if versions is None else versions[0]

    def readers(self) -> int:
        """How many there are, of all databases that are open here."""
        return sum(len(leases) for leases, _ in self._versions().values())

    def newest(self, db_id: int, wal: WalStateRecord | None) -> tuple[int, int]:
        """(lsn, pages) of the newest durable version, never below a lease; of a database that is not open here, what was
        published."""
        if (versions := self._versions().get(db_id)) is not None:
            return versions[1]
        return (wal.last_applied_lsn, wal.size_pages) if wal else (0, 0)

    def _versions(self) -> dict[int, tuple[list[Lease], tuple[int, int]]]:
        def make() -> dict[int, tuple[list[Lease], tuple[int, int]]]:
            return {pages.db_id: (pages.readers.peek(), pages.durable_version()) for pages in self.store.pages.stores()}

        return self.cached.get("versions", make)

    def log_figures(self) -> list[LogFigures]:
        """Of the manifest logs of the streams that are open; without streams nothing is loaded."""
        return self.store.streams.figures() if self.info().databases["stream"] else []

    def info(self) -> Any:
        """The store in numbers."""
        return self.cached.get("info", self.store.info)

    def space(self) -> Space:
        """What the store's directory takes, and whose it is; where looking takes long it is kept for longer."""
        return self.cached.get("space", lambda: measure(self.store.path))

    def damaged(self) -> dict[int, str]:
        """Id → name of the databases that are closed because their rows are damaged."""

        def make() -> dict[int, str]:
            with self.manifest.read() as txn:
                return txn.damaged_databases()

        return self.cached.get("damaged", make)

    def largest(self) -> list[int]:
        """The databases whose files take most, which have series of their own in `/metrics`."""

        def make() -> list[int]:
            given = self.space().databases
            return nlargest(self.store.settings.service.metrics_databases, given, key=given.__getitem__)

        return self.cached.get("largest", make)

    def names(self, db_ids: Iterable[int]) -> dict[int, str]:
        """Id → name of these databases."""
        with self.manifest.read() as txn:
            return txn.database_names(db_ids)

    def files_bytes(self, db_id: int, kind: DbKind) -> int:
        """The bytes of a database's own directories: streams and key-value databases keep their files there."""
        return sum(size for _, size in self.files(db_id, kind))

    def files(self, db_id: int, kind: DbKind) -> list[tuple[str, int]]:
        """(path in the store, bytes) of those files."""
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
                    files.append((os.path.relpath(path, self.store.path), given_bytes(path)))
        return files
