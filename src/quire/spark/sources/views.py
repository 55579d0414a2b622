"""Versions of databases for Spark: which ones a query reads, and how an executor opens one.

Terms
  view      a version as a value (P16): leaf contents and pins, read with nothing but the object store
  lent      a version without a name: what it needs is kept by a lease while somebody reads it (`leases.py`)
  asked     `database` (one), or `databases` (names and patterns with commas), and `snapshot` (a name or an id)

Rules
  1. Without `snapshot` a DataFrame reads what is newest when its first query is planned: Spark plans the source once, and all
     queries on the DataFrame have these partitions. The owner lends that version until `keep_seconds` after it was last read.
  2. Where objects are remote, WAL segments that a view needs are uploaded first, and executors read objects alone (`upload`
     says otherwise); else they read the files of the store's directory, which they share under the same path.
  3. Pieces of many databases are dealt to at most `partitions` partitions, the largest first, so that a thousand small
     databases are no thousand tasks.

Importable on executors. Raises `UnknownDatabase`, `UnknownSnapshot`, `SnapshotGone`, `InvalidInput`.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Generic, TypeVar

from quire.core.errors import InvalidInput, UnknownDatabase, UnknownSnapshot
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.pages.cache import PageCache
from quire.pages.chunk_format import PAGES_PER_FRAME
from quire.pages.sources import Sources
from quire.pages.view import SnapshotView, ViewReader, without_object
from quire.spark.access import object_options
from quire.spark.sources.leases import KEEP_SECONDS
from quire.spark.sources.options import Options

if TYPE_CHECKING:
    from quire.service.client import Client

OPTIONS = ("database", "databases", "snapshot", "keep_seconds", "upload", "partitions")

LENT_AT_ONCE = 64
"""Databases of one call: each must be opened and sealed, and all their views are one answer."""

CACHE_BYTES = 32 * MIB
"""Of one task: enough for the upper pages of a tree and the frames it walks through."""

CALLS_AT_ONCE = 8

AHEAD_FRAMES = 8
AHEAD_BYTES = 8 * MIB
"""Frames that are read together where somebody walks, and pages kept by who reads ahead."""

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Version:
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
class Piece(Generic[P]):
    """What a task does with a version, and how much that is."""

    version: Version
    part: P
    size_bytes: int


class Asked:
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
        known = [each.name for each in client.databases() if each.kind.name == "PAGES"]
        found = [name for name in known if any(fnmatchcase(name, pattern) for pattern in self.patterns)]
        plain = [each for each in self.patterns if not any(sign in each for sign in "*?[")]
        if missing := [name for name in plain if name not in known]:
            raise UnknownDatabase("no page database has this name", hint="`quire ls` lists them", names=missing[:5])
        if not found:
            raise UnknownDatabase("no page database matches", hint="`quire ls` lists them", patterns=self.patterns)
        return found

    def versions(self, client: Client, names: list[str]) -> list[Version]:
        """The versions of several databases: those that are asked for, or the newest, of one lease (rule 1)."""
        if not self.snapshot:
            return self._newest(client, names)
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            return list(pool.map(lambda name: self.version(client, name), names))

    def _newest(self, client: Client, names: list[str]) -> list[Version]:
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
        return [Version(name, view, root, lease_id, options) for name, view in views.items()]

    def _reading(self, client: Client) -> tuple[bool, str]:
        """(whether executors read objects alone, the directory that they read otherwise): rule 2."""
        objects = client.objects_url
        upload = self._upload == "true" or (self._upload == "auto" and "://" in objects and "memory:" not in objects)
        return upload, "" if upload else client.path

    def version(self, client: Client, name: str, snapshot: str = "") -> Version:
        """The version of a database to read: the one that is asked for, or the newest (rule 1)."""
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
        return Version(name, view, root, options=object_options(client.server))


def _view(client: Client, name: str, snapshot: int | str, upload: bool) -> SnapshotView:
    """A view; what it lacks in the object store is uploaded only if there is something: that needs more than to read."""
    view = client.view(name, snapshot)
    return client.view(name, snapshot, upload=True) if upload and without_object(view) else view


@contextmanager
def opened(version: Version) -> Iterator[ViewReader]:
    """A reader of a version, on an executor or where a query is planned (rule 2)."""
    stores: dict[str, ObjectStore] = {}

    def store_of(url: str) -> ObjectStore:
        if url not in stores:
            stores[url] = open_store(url, options=version.options.get(url))
        return stores[url]

    if not version.root or not os.path.isdir(version.root):
        yield version.view.open_alone(store_of, cache_bytes=CACHE_BYTES)
        return
    sources = Sources(root=version.root, disk=OsDisk(), open_store=store_of, cache=PageCache(CACHE_BYTES))
    try:
        yield version.view.open(sources)
    finally:
        sources.close()


class ReadAhead:
    """A reader whose pages come in runs: SQLite asks for one page at a time, chunks have frames of 16 (P11).

    A page that is missing brings its frame with it; if the frame before it is here, somebody walks, and the next ones come too,
    past the reader's own cache: nobody walks back.
    """

    def __init__(self, reader: ViewReader) -> None:
        self.lsn, self.page_size, self.size_pages = reader.lsn, reader.page_size, reader.size_pages
        self._reader = reader
        self._pages_per_chunk = reader.view.pages_per_chunk
        self._images: dict[int, bytes] = {}
        self._slots: set[int] = set()
        """Whose chunks are open: a read past the cache would open them each time."""

    def read_page(self, page: int) -> bytes:
        """The page as of this version."""
        image = self._images.get(page)
        return self._bring(page) if image is None else image

    def _bring(self, page: int) -> bytes:
        first = page - page % PAGES_PER_FRAME
        frames = AHEAD_FRAMES if first - 1 in self._images else 1
        stop = min(first + frames * PAGES_PER_FRAME, self.size_pages)
        if len(self._images) * self.page_size >= AHEAD_BYTES:
            self._images.clear()
        wanted = range(first, max(stop, page + 1))
        slots = {each // self._pages_per_chunk for each in (wanted[0], wanted[-1])}
        self._images.update(self._reader.read_pages(wanted, cold=frames > 1 and slots <= self._slots))
        self._slots |= slots
        return self._images[page]

    def close(self) -> None:
        """Let the pages go."""
        self._images.clear()


def dealt(pieces: Iterable[Piece[P]], partitions: int) -> list[list[Piece[P]]]:
    """Pieces in at most so many heaps of about the same size (rule 3)."""
    queue = sorted(pieces, key=lambda piece: piece.size_bytes, reverse=True)
    heaps: list[list[Piece[P]]] = [[] for _ in range(min(partitions, len(queue)))]
    loads = [(0, number) for number in range(len(heaps))]
    for piece in queue:
        load, number = heapq.heappop(loads)
        heaps[number].append(piece)
        heapq.heappush(loads, (load + piece.size_bytes + 1, number))
    return heaps
