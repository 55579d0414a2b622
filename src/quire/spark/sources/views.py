"""Versions of page databases for Spark: which ones a query reads, and how an executor opens one.

A version is a view (P16), read with nothing but the object store. Without `snapshot` it is the newest one when the first
query of a DataFrame is planned: Spark plans a source once, and all queries on the DataFrame have these partitions. The owner
lends that version until `keep_seconds` after the last read.

Where objects are remote, WAL segments that a view needs are uploaded first and executors read only objects (unless `upload`
is set otherwise). Where they are not, executors read the files of the store's directory, which they share under the same
path.

Options: `database`, or `databases` (names and patterns, separated by commas; a database whose name is written like a pattern
is selected by it, too) and `tags` (`name` or `name=value`, separated by
commas: databases that have all of them); `snapshot` (a name or an id, resolved in each database), `absent` (`error` or
`skip`: databases without it), `keep_seconds`, `upload`, `partitions` at most: pieces of many databases are dealt to them, so
that a thousand small databases are not a thousand tasks.

More than `LISTED_MAX` databases of `quire.sqlite` and `quire.pages` are not listed in partitions: the owner keeps their
versions with a lease, those of snapshots too. A partition then has ranges of names, and tasks request the versions of theirs,
`LENT_AT_ONCE` at a time. Tasks read exactly what was lent: a database that is dropped later is included, one that is created
later is not.

Importable on executors. Raises `UnknownDatabase`, `UnknownSnapshot`, `SnapshotGone`, `InvalidInput`.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from quire.core.errors import DatabaseTombstoned, InvalidInput, UnknownDatabase, UnknownSnapshot
from quire.core.limits import MIB
from quire.durable.names import matches_any
from quire.jobs.locations import StorePool
from quire.jobs.runner import balanced
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.pages.sources import Sources
from quire.pages.view import SnapshotView, ViewReader, sources_alone, without_object
from quire.service.tickets import LEASE_RANGE, OfLentRange
from quire.spark.access import OwnerAddress, object_options
from quire.spark.sources.base import KEEP_SECONDS, Options, SourceReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from quire.service.client import Client
    from quire.service.messages import LentViews
    from quire.service.values import DatabaseInfo

OPTIONS = ("database", "databases", "tags", "snapshot", "absent", "keep_seconds", "upload", "partitions")
COMPARING = (*(name for name in OPTIONS if name != "snapshot"), "from", "to")
"""Options of sources that compare two versions."""

LENT_AT_ONCE = 64
"""Databases per call: each must be opened and sealed, and all their views are one answer."""

LISTED_MAX = 1_024
"""Databases whose versions are listed in the partitions of a query, at most."""

RANGES_MAX = 1_024
"""Ranges of names in the plan of a query, at most: neighbours are merged when there are more."""

OPENING_BYTES = 256 * 1_024
"""Bytes whose reading is assumed to cost as much as opening a database: many tiny ones are work too."""

CACHE_BYTES = 32 * MIB
"""Cache of one task, in bytes: enough for the upper pages of a tree and the frames it walks through."""

CALLS_AT_ONCE = 8

P = TypeVar("P")
S = TypeVar("S", bound="Piece")


@dataclass(frozen=True, slots=True)
class LocatedVersion:
    """A version of a database, and where its files may be."""

    database: str
    view: SnapshotView
    root: str
    """The store's directory, for executors that see it; empty if everything is in objects."""
    lease_id: int = 0
    """The lease that keeps it, if no snapshot does."""
    options: Mapping[str, StoreOptions] = field(default_factory=dict, repr=False)
    """How object stores are reached, by URL."""

    @property
    def size_bytes(self) -> int:
        """Size of all its pages."""
        return self.view.size_pages * self.view.page_size


@dataclass(frozen=True, slots=True)
class ViewPiece(Generic[P]):
    """The part of a version that a task reads, and its size."""

    version: LocatedVersion
    part: P
    size_bytes: int

    @property
    def lease_id(self) -> int:
        return self.version.lease_id


@dataclass(frozen=True, slots=True)
class LentRange:
    """Databases whose versions the owner keeps with a lease: those after one name, up to another."""

    lease_id: int
    after: str
    last: str
    size_bytes: int
    root: str
    options: Mapping[str, StoreOptions] = field(default_factory=dict, repr=False)

    def versions(self, access: OwnerAddress) -> Iterator[LocatedVersion]:
        """Yield the versions to read, requested as they are read."""
        after = self.after
        with closing(access.channel()) as channel:
            while some := channel.ask(LEASE_RANGE, OfLentRange(self.lease_id, after, self.last)):
                for name, view in some:
                    yield LocatedVersion(name, view, self.root, self.lease_id, self.options)
                after = some[-1][0]


@dataclass(frozen=True, slots=True)
class VersionPair:
    """Two versions of a database; the earlier one is `None` if it is empty."""

    before: LocatedVersion | None
    after: LocatedVersion
    is_dropped: bool = False
    """Whether nothing follows the later version: the database is gone."""

    @property
    def is_replaced(self) -> bool:
        """Whether another database has the name of the earlier one now."""
        return self.before is not None and self.before.view.db_id != self.after.view.db_id


class DatabaseSelection:
    """The databases of one kind that the options select."""

    def __init__(self, options: Options, kind: str = "PAGES", what: str = "page database") -> None:
        self.one = options.text("database")
        self.tags = dict(_tag(text) for text in options.names("tags"))
        self.patterns = options.names("databases") or (["*"] if self.tags and not self.one else [])
        if self.one and options.text("databases"):
            raise InvalidInput("`database` and `databases` cannot be used together", hint="add the name to `databases`")
        if not self.one and not self.patterns:
            raise InvalidInput("no database was given", hint="pass the option `database`, or `databases` and `tags`")
        self._kind, self._what = kind, what

    @property
    def is_many(self) -> bool:
        """Whether rows name their database."""
        return bool(self.patterns)

    def names(self, client: Client) -> list[str]:
        """Return the selected databases."""
        return list(self.each_name(client))

    def each_name(self, client: Client) -> Iterator[str]:
        """Yield the same, in order, fetched a page at a time. A name that does not exist is reported at the end."""
        if self.one:
            yield client.database(self.one).name
            return
        missing, is_any = literals(self.patterns), False
        for database in candidates(client, self.patterns, self._kind.lower()):
            missing.discard(database.name)
            if matches_any(database.name, self.patterns) and self._has_tags(database):
                is_any = True
                yield database.name
        need_none_missing(missing, self._what)
        if not is_any:
            hint = "`quire ls` lists them"
            raise UnknownDatabase(f"no {self._what} matches", hint=hint, patterns=self.patterns, tags=self.tags)

    def matching(self, client: Client) -> list[DatabaseInfo]:
        """Return the selected databases. An empty result is not an error, nor is a name that does not exist."""
        known = candidates(client, [self.one] if self.one else self.patterns, self._kind.lower())
        return [database for database in known if self._is_selected(database.name) and self._has_tags(database)]

    def _is_selected(self, name: str) -> bool:
        return name == self.one if self.one else matches_any(name, self.patterns)

    def _has_tags(self, database: DatabaseInfo) -> bool:
        return all(name in database.tags and value in (None, database.tags[name]) for name, value in self.tags.items())


class VersionRequest(DatabaseSelection):
    """The page databases and versions that the options select."""

    def __init__(self, options: Options, *, snapshot: str = "") -> None:
        super().__init__(options)
        self.snapshot = snapshot or options.text("snapshot")
        self.absent = options.one_of("absent", ("error", "skip", "empty"))
        self.keep_seconds = options.number("keep_seconds", KEEP_SECONDS, least=1)
        self._upload = options.one_of("upload", ("auto", "true", "false"))

    def versions(self, client: Client, names: list[str]) -> list[LocatedVersion]:
        """Return the versions of several databases: the requested ones, or the newest, under one lease."""
        if not self.snapshot:
            return self._newest(client, names)
        return [version for version in self.of_snapshot(client, names, self.snapshot) if version is not None]

    def pairs(self, client: Client, names: list[str], earlier: str) -> list[VersionPair]:
        """Return two versions of several databases: the requested one and an earlier snapshot; None if `earlier` is empty."""
        later = {version.database: version for version in self.versions(client, names)}
        if not earlier:
            return [VersionPair(None, version) for version in later.values()]
        before = self.of_snapshot(client, list(later), earlier)
        pairs = [VersionPair(old, new) for old, new in zip(before, later.values(), strict=True)]
        return [pair for pair in pairs if pair.before is not None or self.absent == "empty"]

    def of_snapshot(self, client: Client, names: list[str], snapshot: str) -> list[LocatedVersion | None]:
        """Return the versions of databases at a snapshot, looked up in each; `None` for one without it, if that is no error."""

        def found(name: str) -> LocatedVersion | None:
            try:
                return self.version(client, name, snapshot)
            except UnknownSnapshot:
                if self.absent == "error":
                    raise
                return None

        upload, root = self._reading(client)
        options = object_options(client.server)
        versions: dict[str, LocatedVersion | None] = {}
        for start in range(0, len(names), LENT_AT_ONCE):
            some = names[start : start + LENT_AT_ONCE]
            for name, view in zip(some, client.views(some, snapshot), strict=True):
                if view is not None and not (upload and without_object(view)):
                    versions[name] = LocatedVersion(name, view, root, options=options)
        # Snapshots that are named by id, have to be uploaded first, or do not exist.
        others = [name for name in names if name not in versions]
        with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="quire-views") as pool:
            versions.update(zip(others, pool.map(found, others)))
        return [versions[name] for name in names]

    def planned(self, client: Client, small_bytes: int) -> tuple[list[LocatedVersion], list[LentRange]]:
        """Return (versions, ranges of databases). If there are too many to list, those up to `small_bytes` are in ranges."""
        names = self.each_name(client)
        listed = list(islice(names, LISTED_MAX + 1))
        if len(listed) <= LISTED_MAX:
            return self.versions(client, listed), []
        (_, root), options = self._reading(client), object_options(client.server)
        large, ranges = dict[int, LocatedVersion](), list[LentRange]()
        lease_id, after, rest = 0, "", chain(listed, names)
        try:
            while some := list(islice(rest, LENT_AT_ONCE)):
                lease_id, views = self._lend(client, some, lease_id, keep=True)
                range_bytes, first = 0, after  # small databases between two large ones
                for name, view in views.items():
                    version = LocatedVersion(name, view, root, lease_id, options)
                    # A database that was renamed in the meantime appears again: the lease has it under its new name, so that
                    # one counts.
                    large.pop(view.db_id, None)
                    if version.size_bytes <= small_bytes:
                        range_bytes += version.size_bytes + OPENING_BYTES
                    else:
                        large[view.db_id] = version
                        if range_bytes:
                            ranges.append(LentRange(lease_id, first, after, range_bytes, root, options))
                        range_bytes, first = 0, name
                    after = name
                if range_bytes:
                    ranges.append(LentRange(lease_id, first, after, range_bytes, root, options))
                if len(ranges) > RANGES_MAX:
                    ranges = joined(ranges, 4 * sum(lent_range.size_bytes for lent_range in ranges) // RANGES_MAX)
        except BaseException:
            if lease_id:
                client.release_lease(lease_id)
            raise
        return list(large.values()), ranges

    def _newest(self, client: Client, names: list[str], holder: str = "") -> list[LocatedVersion]:
        lease_id, views = 0, dict[str, SnapshotView]()
        for start in range(0, len(names), LENT_AT_ONCE):
            lease_id, some = self._lend(client, names[start : start + LENT_AT_ONCE], lease_id, holder)
            views |= some
        return self.of_views(client, views, lease_id)

    def _lend(
        self, client: Client, names: list[str], lease_id: int, holder: str = "", *, keep: bool = False
    ) -> tuple[int, dict[str, SnapshotView]]:
        """Return (the lease, views by name). A database that is dropped after it was found by a pattern is left out."""
        upload, _ = self._reading(client)
        given: dict[str, Any] = {"holder": holder, "keep": keep, "snapshot": self.snapshot if keep else ""}
        lent: LentViews | None = None
        try:
            lent = client.lend(names, self.keep_seconds, lease_id=lease_id, **given)
            views = self._present(names, lent)
            # Uploading needs more rights than reading, so it is requested only if there is something to upload.
            if upload and (bare := [name for name, view in views.items() if without_object(view)]):
                late = client.lend(bare, self.keep_seconds, lease_id=lent.lease_id, upload=True, **given)
                views.update(self._present(bare, late))
        except (UnknownDatabase, DatabaseTombstoned):
            if holder or not self.is_many:
                raise
            left = [name for name in names if self._still_exists(client, name)]
            if left == names:
                raise
            # A version that was lent, and dropped before it was uploaded, must not be among those that tasks request.
            if lent is not None:
                client.release_versions([(lent.lease_id, view.db_id) for view in lent.views])
            return self._lend(client, left, lease_id, keep=keep) if left else (lease_id, {})
        except UnknownSnapshot:
            if lent is not None and lent.lease_id != lease_id:
                client.release_lease(lent.lease_id)
            raise
        return lent.lease_id, views

    def _present(self, names: Sequence[str], lent: LentViews) -> dict[str, SnapshotView]:
        """Return views by name. A database without the snapshot is an error, or skipped."""
        if lent.missing and self.absent == "error":
            hint = "`quire snapshot ls` lists them; `absent=skip` skips databases without it"
            where = {"database": lent.missing[0], "snapshot": self.snapshot}
            raise UnknownSnapshot("the database has no such snapshot", hint=hint, **where)
        missing = set(lent.missing)
        return dict(zip((name for name in names if name not in missing), lent.views, strict=True))

    def _still_exists(self, client: Client, name: str) -> bool:
        try:
            database = client.database(name)
        except UnknownDatabase:
            return False
        return database.kind.name == self._kind and self._has_tags(database)

    def lend_to(self, client: Client, holder: str, names: list[str]) -> int:
        """Make the owner keep the newest versions of databases for a holder that comes back for them; return the lease's id."""
        return self._newest(client, names, holder)[0].lease_id

    def of_views(self, client: Client, views: Mapping[str, SnapshotView], lease_id: int) -> list[LocatedVersion]:
        """Return views, given by database name, in the form in which executors open them."""
        _, root = self._reading(client)
        options = object_options(client.server)
        return [LocatedVersion(name, view, root, lease_id, options) for name, view in views.items()]

    def _reading(self, client: Client) -> tuple[bool, str]:
        """Return (whether executors read only objects, the directory that they read otherwise)."""
        objects = client.objects_url
        if client.server.is_copy:
            return False, client.path
        upload = self._upload == "true" or (self._upload == "auto" and "://" in objects and "memory:" not in objects)
        return upload, "" if upload else client.path

    def version(self, client: Client, name: str, snapshot: str = "") -> LocatedVersion:
        """Return the version of a database to read: the requested one, or the newest."""
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
        return LocatedVersion(name, view, root, options=object_options(client.server))


def _tag(text: str) -> tuple[str, str | None]:
    """Return (name, value); `None` for any value."""
    name, equals, value = text.partition("=")
    return name.strip(), value.strip() if equals else None


LISTED_AT_ONCE = 10_000


def candidates(client: Client, patterns: Sequence[str], kind: str) -> Iterator[DatabaseInfo]:
    """Yield the databases that share the common prefix of all patterns, fetched a page at a time."""
    heads = [re.split(r"[*?\[]", pattern, maxsplit=1)[0] for pattern in patterns] or [""]
    first, last = min(heads), max(heads)
    shared = next((place for place, sign in enumerate(first) if last[place : place + 1] != sign), len(first))
    after = ""
    while True:
        page = client.databases(prefix=first[:shared], kind=kind, limit=LISTED_AT_ONCE, after=after)
        yield from page
        if len(page) < LISTED_AT_ONCE:
            return
        after = page[-1].name


def matching(patterns: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Return the known names that match; a pattern without a wildcard must be one of them."""
    need_none_missing(literals(patterns) - set(known), what)
    return [name for name in known if matches_any(name, patterns)]


def literals(patterns: Sequence[str]) -> set[str]:
    """Return the patterns that are plain names."""
    return {pattern for pattern in patterns if not any(sign in pattern for sign in "*?[")}


def need_none_missing(names: set[str], what: str) -> None:
    """Raise if there are names that no database has."""
    if names:
        raise UnknownDatabase(f"no {what} has this name", hint="`quire ls` lists them", names=sorted(names)[:5])


def _view(client: Client, name: str, snapshot: int | str, upload: bool) -> SnapshotView:
    """Return a view. Uploading what it lacks needs more rights than reading, so it is requested only if something is
    missing."""
    view = client.view(name, snapshot)
    return client.view(name, snapshot, upload=True) if upload and without_object(view) else view


class VersionReaders:
    """Readers for versions of one store, one after the other, on an executor or where a query is planned.

    They share object stores, files and pages: forks have most of theirs in common.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._sources: Sources | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, version: LocatedVersion) -> ViewReader:
        """Open a reader of a version."""
        if self._sources is None:
            options = version.options
            stores = StorePool(lambda url: open_store(url, options=options.get(url)))
            root = version.root if version.root and os.path.isdir(version.root) else ""
            self._stack.enter_context(closing(stores))
            sources = sources_alone(stores, root=root, cache_bytes=CACHE_BYTES)
            self._sources = self._stack.enter_context(closing(sources))
        return version.view.open(self._sources)


@contextmanager
def opened(version: LocatedVersion) -> Iterator[ViewReader]:
    """Open a reader of a single version."""
    with VersionReaders() as readers:
        yield readers.open(version)


class Piece(Protocol):
    """A part of a task."""

    @property
    def size_bytes(self) -> int: ...


def joined(ranges: list[LentRange], size_max: int) -> list[LentRange]:
    """Return fewer ranges over the same databases: adjacent ones are merged, up to this size."""
    fewer: list[LentRange] = []
    for lent_range in ranges:
        before = fewer[-1] if fewer else None
        if before is None or before.last != lent_range.after or before.size_bytes + lent_range.size_bytes > size_max:
            fewer.append(lent_range)
        else:
            fewer[-1] = replace(before, last=lent_range.last, size_bytes=before.size_bytes + lent_range.size_bytes)
    return fewer


def balanced_groups(pieces: Iterable[S], partitions: int) -> list[list[S]]:
    """Return pieces in at most `partitions` groups of about the same size."""
    queue = list(pieces)
    heaps: list[list[S]] = [[] for _ in range(min(partitions, len(queue)))]
    for piece, heap in zip(queue, balanced([piece.size_bytes + 1 for piece in queue], len(heaps)), strict=True):
        heaps[heap].append(piece)
    return heaps


class PiecesReader(SourceReader, Generic[P]):
    """A reader whose tasks read pieces of versions that one lease keeps, or ranges of databases."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.request = VersionRequest(options)
        self.keep_seconds = self.request.keep_seconds

    def lease_of(self, part: list[ViewPiece[P] | LentRange]) -> int:
        return part[0].lease_id

    @abstractmethod
    def pieces(self, version: LocatedVersion) -> Iterable[ViewPiece[P]]:
        """Return the pieces of a version in a range, all of which are read by one task."""

    def listed(self, part: list[ViewPiece[P] | LentRange]) -> Iterator[ViewPiece[P]]:
        """Yield the pieces of a task; versions of ranges are requested as they are read."""
        for piece in part:
            if isinstance(piece, ViewPiece):
                yield piece
            else:
                for version in piece.versions(self.access):
                    yield from self.pieces(version)
