"""Versions of page databases for Spark: which ones a query reads, and how an executor opens one.

A version is a view (P16), read with nothing but the object store. Without `snapshot` it is the newest one when the first
query of a DataFrame is planned: Spark plans a source once, and all queries on the DataFrame have these partitions. The owner
lends that version until `keep_seconds` after the last read.

Where objects are remote, WAL segments that a view needs are uploaded first and executors read objects alone (`upload` says
otherwise); else they read the files of the store's directory, which they share under the same path.

Options: `database`, or `databases` (names and patterns with commas); `snapshot` (a name or an id), `keep_seconds`, `upload`,
`partitions` at most: pieces of many databases are dealt to them, so that a thousand small databases are no thousand tasks.

Importable on executors. Raises `UnknownDatabase`, `UnknownSnapshot`, `SnapshotGone`, `InvalidInput`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quire.core.errors import InvalidInput, UnknownDatabase, UnknownSnapshot
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.jobs.locations import StorePool
from quire.jobs.runner import balanced
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.pages.view import SnapshotView, ViewReader, without_object
from quire.spark.access import object_options
from quire.spark.sources.base import KEEP_SECONDS, Options, SourceReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from quire.service.client import Client

OPTIONS = ("database", "databases", "snapshot", "keep_seconds", "upload", "partitions")

LENT_AT_ONCE = 64
"""Databases of one call: each must be opened and sealed, and all their views are one answer."""

CACHE_BYTES = 32 * MIB
"""Of one task: enough for the upper pages of a tree and the frames it walks through."""

CALLS_AT_ONCE = 8

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class DatabaseVersion:
    """A version of a database, and where its files may be."""

    database: str
    view: SnapshotView
    root: str
    """The store's directory, for who sees it; empty if everything is in objects."""
    lease_id: int = 0
    """What keeps it, if no snapshot does."""
    options: Mapping[str, StoreOptions] = field(default_factory=dict, repr=False)
    """How object stores are reached, by their URLs."""

    @property
    def size_bytes(self) -> int:
        """Of all its pages."""
        return self.view.size_pages * self.view.page_size


@dataclass(frozen=True, slots=True)
class ViewPiece(Generic[P]):
    """What a task does with a version, and how much that is."""

    version: DatabaseVersion
    part: P
    size_bytes: int


class VersionRequest:
    """What the options say about databases and versions."""

    def __init__(self, options: Options, *, snapshot: str = "") -> None:
        self.one = options.text("database")
        self.patterns = options.names("databases")
        if bool(self.one) == bool(self.patterns):
            raise InvalidInput("which database?", hint="either the option `database` or `databases`")
        self.snapshot = snapshot or options.text("snapshot")
        self.keep_seconds = options.number("keep_seconds", KEEP_SECONDS, least=1)
        self._upload = options.one_of("upload", ("auto", "true", "false"))

    @property
    def is_many(self) -> bool:
        """Whether rows say which database they are of."""
        return bool(self.patterns)

    def names(self, client: Client) -> list[str]:
        """The databases that are asked for."""
        if self.one:
            return [client.database(self.one).name]
        known = [database.name for database in client.databases() if database.kind.name == "PAGES"]
        names = matching(self.patterns, known, "page database")
        if not names:
            raise UnknownDatabase("no page database matches", hint="`quire ls` lists them", patterns=self.patterns)
        return names

    def versions(self, client: Client, names: list[str]) -> list[DatabaseVersion]:
        """The versions of several databases: those that are asked for, or the newest, of one lease."""
        if not self.snapshot:
            return self._newest(client, names)
        with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="quire-views") as pool:
            return list(pool.map(lambda name: self.version(client, name), names))

    def _newest(self, client: Client, names: list[str]) -> list[DatabaseVersion]:
        upload, root = self._reading(client)
        lease_id, views = 0, dict[str, SnapshotView]()
        for start in range(0, len(names), LENT_AT_ONCE):
            some = names[start : start + LENT_AT_ONCE]
            lent = client.lend(some, self.keep_seconds, lease_id=lease_id)
            lease_id = lent.lease_id
            views.update(zip(some, lent.views, strict=True))
            # To upload needs more than to read, so it is asked for only if there is something.
            if upload and (bare := [name for name in some if without_object(views[name])]):
                lent = client.lend(bare, self.keep_seconds, lease_id=lease_id, upload=True)
                views.update(zip(bare, lent.views, strict=True))
        options = object_options(client.server)
        return [DatabaseVersion(name, view, root, lease_id, options) for name, view in views.items()]

    def _reading(self, client: Client) -> tuple[bool, str]:
        """(whether executors read objects alone, the directory that they read otherwise)."""
        objects = client.objects_url
        upload = self._upload == "true" or (self._upload == "auto" and "://" in objects and "memory:" not in objects)
        return upload, "" if upload else client.path

    def version(self, client: Client, name: str, snapshot: str = "") -> DatabaseVersion:
        """The version of a database to read: the one that is asked for, or the newest."""
        wanted = snapshot or self.snapshot
        if not wanted:
            return self._newest(client, [name])[0]
        upload, root = self._reading(client)
        try:
            view = _view(client, name, wanted, upload)
        except UnknownSnapshot:
            if not wanted.isdecimal():
                raise
            view = _view(client, name, int(wanted), upload)
        return DatabaseVersion(name, view, root, options=object_options(client.server))


def matching(patterns: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The known names that match; a pattern without a wildcard must be one of them."""
    literal = [pattern for pattern in patterns if not any(sign in pattern for sign in "*?[")]
    if missing := [name for name in literal if name not in known]:
        raise UnknownDatabase(f"no {what} has this name", hint="`quire ls` lists them", names=missing[:5])
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _view(client: Client, name: str, snapshot: int | str, upload: bool) -> SnapshotView:
    """A view; what it lacks in the object store is uploaded only if there is something: that needs more than to read."""
    view = client.view(name, snapshot)
    return client.view(name, snapshot, upload=True) if upload and without_object(view) else view


@contextmanager
def opened(version: DatabaseVersion) -> Iterator[ViewReader]:
    """A reader of a version, on an executor or where a query is planned."""
    with closing(StorePool(lambda url: open_store(url, options=version.options.get(url)))) as stores:
        if not version.root or not os.path.isdir(version.root):
            yield version.view.open_alone(stores, cache_bytes=CACHE_BYTES)
            return
        sources = Sources(root=version.root, disk=OsDisk(), open_store=stores, cache=PageCache(CACHE_BYTES))
        with closing(sources):
            yield version.view.open(sources)


def dealt(pieces: Iterable[ViewPiece[P]], partitions: int) -> list[list[ViewPiece[P]]]:
    """Pieces in at most so many heaps of about the same size."""
    queue = list(pieces)
    heaps: list[list[ViewPiece[P]]] = [[] for _ in range(min(partitions, len(queue)))]
    for piece, heap in zip(queue, balanced([piece.size_bytes + 1 for piece in queue], len(heaps)), strict=True):
        heaps[heap].append(piece)
    return heaps


class PiecesReader(SourceReader):
    """A reader whose tasks read pieces of versions, which one lease keeps."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.request = VersionRequest(options)
        self.keep_seconds = self.request.keep_seconds

    def lease_of(self, part: list[ViewPiece[Any]]) -> int:
        return part[0].version.lease_id
