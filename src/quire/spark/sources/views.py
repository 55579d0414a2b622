"""Versions of page databases for Spark: which ones a query reads, and how an executor opens one.

A version is a view (P16), read with nothing but the object store. Without `snapshot` it is the newest one when the first
query of a DataFrame is planned: Spark plans a source once, and all queries on the DataFrame have these partitions. The owner
lends that version until `keep_seconds` after the last read.

Where objects are remote, WAL segments that a view needs are uploaded first and executors read objects alone (`upload` says
otherwise); else they read the files of the store's directory, which they share under the same path.

Options: `database`, or `databases` (names and patterns with commas) and `tags` (`name` or `name=value`, with commas: databases
that have all of them); `snapshot` (a name or an id, of each database its own), `absent` (`error` or `skip`: databases without
it), `keep_seconds`, `upload`, `partitions` at most: pieces of many databases are dealt to them, so that a thousand small
databases are no thousand tasks.

More than `LISTED_MAX` databases are not listed in partitions: the owner keeps their versions with a lease, those of snapshots
too; a partition has ranges of names, and tasks ask for the versions of theirs, `LENT_AT_ONCE` at a time. What was lent is read:
a database that is dropped later is still there, one that is created later is not.

Importable on executors. Raises `UnknownDatabase`, `UnknownSnapshot`, `SnapshotGone`, `InvalidInput`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from quire.core.errors import DatabaseTombstoned, InvalidInput, UnknownDatabase, UnknownSnapshot
from quire.core.limits import MIB
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
"""Of sources that compare two versions."""

LENT_AT_ONCE = 64
"""Databases of one call: each must be opened and sealed, and all their views are one answer."""

LISTED_MAX = 1_024
"""Databases whose versions are in the partitions of a query."""

RANGES_MAX = 1_024
"""Ranges of names that the plan of a query has: neighbours become one when there are more."""

OPENING_BYTES = 256 * 1_024
"""Reading so much is taken to be as much work as opening a database: many tiny ones are work too."""

CACHE_BYTES = 32 * MIB
"""Of one task: enough for the upper pages of a tree and the frames it walks through."""

CALLS_AT_ONCE = 8

P = TypeVar("P")
S = TypeVar("S", bound="Piece")


@dataclass(frozen=True, slots=True)
class LocatedVersion:
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

    version: LocatedVersion
    part: P
    size_bytes: int

    @property
    def lease_id(self) -> int:
        return self.version.lease_id


@dataclass(frozen=True, slots=True)
class LentRange:
    """Databases whose versions the owner keeps with a lease: those behind one name, up to another."""

    lease_id: int
    after: str
    last: str
    size_bytes: int
    root: str
    options: Mapping[str, StoreOptions] = field(default_factory=dict, repr=False)

    def versions(self, access: OwnerAddress) -> Iterator[LocatedVersion]:
        """What to read, asked for as it is read."""
        after = self.after
        with closing(access.channel()) as channel:
            while some := channel.ask(LEASE_RANGE, OfLentRange(self.lease_id, after, self.last)):
                for name, view in some:
                    yield LocatedVersion(name, view, self.root, self.lease_id, self.options)
                after = some[-1][0]


@dataclass(frozen=True, slots=True)
class VersionPair:
    """Two versions of a database; `None` for an earlier one that has nothing in it."""

    before: LocatedVersion | None
    after: LocatedVersion
    is_dropped: bool = False
    """Whether nothing comes after the later version: the database is gone."""


class DatabaseSelection:
    """What the options say about databases of one kind."""

    def __init__(self, options: Options, kind: str = "PAGES", what: str = "page database") -> None:
        self.one = options.text("database")
        self.tags = dict(_tag(text) for text in options.names("tags"))
        self.patterns = options.names("databases") or (["*"] if self.tags and not self.one else [])
        if bool(self.one) == bool(self.patterns):
            raise InvalidInput("which database?", hint="either the option `database`, or `databases` and `tags`")
        self._kind, self._what = kind, what

    @property
    def is_many(self) -> bool:
        """Whether rows say which database they are of."""
        return bool(self.patterns)

    def names(self, client: Client) -> list[str]:
        """The databases that are asked for."""
        return list(self.each_name(client))

    def each_name(self, client: Client) -> Iterator[str]:
        """The same, a page of them at a time, in order. That one is named and does not exist is told at the end."""
        if self.one:
            yield client.database(self.one).name
            return
        missing, is_any = literals(self.patterns), False
        for database in candidates(client, self.patterns, self._kind.lower()):
            missing.discard(database.name)
            if matches(database.name, self.patterns) and self._has_tags(database):
                is_any = True
                yield database.name
        need_none_missing(missing, self._what)
        if not is_any:
            hint = "`quire ls` lists them"
            raise UnknownDatabase(f"no {self._what} matches", hint=hint, patterns=self.patterns, tags=self.tags)

    def matching(self, client: Client) -> list[DatabaseInfo]:
        """The databases that are asked for; none is no error, nor one that is named and does not exist."""
        patterns = [self.one] if self.one else self.patterns
        known = candidates(client, patterns, self._kind.lower())
        return [database for database in known if matches(database.name, patterns) and self._has_tags(database)]

    def _has_tags(self, database: DatabaseInfo) -> bool:
        return all(name in database.tags and value in (None, database.tags[name]) for name, value in self.tags.items())


class VersionRequest(DatabaseSelection):
    """What the options say about page databases and their versions."""

    def __init__(self, options: Options, *, snapshot: str = "") -> None:
        super().__init__(options)
        self.snapshot = snapshot or options.text("snapshot")
        self.absent = options.one_of("absent", ("error", "skip", "empty"))
        self.keep_seconds = options.number("keep_seconds", KEEP_SECONDS, least=1)
        self._upload = options.one_of("upload", ("auto", "true", "false"))

    def versions(self, client: Client, names: list[str]) -> list[LocatedVersion]:
        """The versions of several databases: those that are asked for, or the newest, of one lease."""
        if not self.snapshot:
            return self._newest(client, names)
        return [version for version in self.of_snapshot(client, names, self.snapshot) if version is not None]

    def pairs(self, client: Client, names: list[str], earlier: str) -> list[VersionPair]:
        """Two versions of several databases: the one that is asked for, and an earlier snapshot; nothing, if none is named."""
        later = {version.database: version for version in self.versions(client, names)}
        if not earlier:
            return [VersionPair(None, version) for version in later.values()]
        before = self.of_snapshot(client, list(later), earlier)
        pairs = [VersionPair(old, new) for old, new in zip(before, later.values(), strict=True)]
        return [pair for pair in pairs if pair.before is not None or self.absent == "empty"]

    def of_snapshot(self, client: Client, names: list[str], snapshot: str) -> list[LocatedVersion | None]:
        """The versions of databases at a snapshot that each of them has by itself; `None` for one that has none, if that is
        no error."""

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
        # Snapshots that are named by their ids, have to be uploaded first, or are not there.
        others = [name for name in names if name not in versions]
        with ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="quire-views") as pool:
            versions.update(zip(others, pool.map(found, others)))
        return [versions[name] for name in names]

    def planned(self, client: Client, small_bytes: int) -> tuple[list[LocatedVersion], list[LentRange]]:
        """(versions, ranges of databases): if they are more than can be listed, those up to `small_bytes` are in ranges."""
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
                range_bytes, first = 0, after  # of the small ones between two large ones
                for name, view in views.items():
                    version = LocatedVersion(name, view, root, lease_id, options)
                    # One that was renamed meanwhile is met again: the lease has it by its new name, so it goes by that.
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
                    ranges = joined(ranges, 4 * sum(each.size_bytes for each in ranges) // RANGES_MAX)
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
        """(the lease, views by name). A database that is dropped after it was found by a pattern is left out."""
        upload, _ = self._reading(client)
        given: dict[str, Any] = {"holder": holder, "keep": keep, "snapshot": self.snapshot if keep else ""}
        lent: LentViews | None = None
        try:
            lent = client.lend(names, self.keep_seconds, lease_id=lease_id, **given)
            views = self._present(names, lent)
            # To upload needs more than to read, so it is asked for only if there is something.
            if upload and (bare := [name for name, view in views.items() if without_object(view)]):
                late = client.lend(bare, self.keep_seconds, lease_id=lent.lease_id, upload=True, **given)
                views.update(self._present(bare, late))
        except (UnknownDatabase, DatabaseTombstoned):
            if holder or not self.is_many:
                raise
            left = [name for name in names if self._is_there(client, name)]
            if left == names:
                raise
            # What was lent, and dropped before it was uploaded, must not be among the versions that tasks ask for.
            if lent is not None:
                client.let_go([(lent.lease_id, view.db_id) for view in lent.views])
            return self._lend(client, left, lease_id, keep=keep) if left else (lease_id, {})
        except UnknownSnapshot:
            if lent is not None and lent.lease_id != lease_id:
                client.release_lease(lent.lease_id)
            raise
        return lent.lease_id, views

    def _present(self, names: Sequence[str], lent: LentViews) -> dict[str, SnapshotView]:
        """Views by name. A database without the snapshot is an error, or passed over."""
        if lent.missing and self.absent == "error":
            hint = "`quire snapshot ls` lists them; `absent=skip` passes over databases without it"
            where = {"database": lent.missing[0], "snapshot": self.snapshot}
            raise UnknownSnapshot("the database has no such snapshot", hint=hint, **where)
        missing = set(lent.missing)
        return dict(zip((name for name in names if name not in missing), lent.views, strict=True))

    def _is_there(self, client: Client, name: str) -> bool:
        try:
            database = client.database(name)
        except UnknownDatabase:
            return False
        return database.kind.name == self._kind and self._has_tags(database)

    def lend_to(self, client: Client, holder: str, names: list[str]) -> int:
        """Have the newest versions of databases kept for a holder that comes back for them; the id of the lease."""
        return self._newest(client, names, holder)[0].lease_id

    def of_views(self, client: Client, views: Mapping[str, SnapshotView], lease_id: int) -> list[LocatedVersion]:
        """Versions, given by the names of their databases, as executors open them."""
        _, root = self._reading(client)
        options = object_options(client.server)
        return [LocatedVersion(name, view, root, lease_id, options) for name, view in views.items()]

    def _reading(self, client: Client) -> tuple[bool, str]:
        """(whether executors read objects alone, the directory that they read otherwise)."""
        objects = client.objects_url
        if client.server.is_copy:
            return False, client.path
        upload = self._upload == "true" or (self._upload == "auto" and "://" in objects and "memory:" not in objects)
        return upload, "" if upload else client.path

    def version(self, client: Client, name: str, snapshot: str = "") -> LocatedVersion:
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
        return LocatedVersion(name, view, root, options=object_options(client.server))


def _tag(text: str) -> tuple[str, str | None]:
    """(name, value); `None` for any value."""
    name, equals, value = text.partition("=")
    return name.strip(), value.strip() if equals else None


LISTED_AT_ONCE = 10_000


def candidates(client: Client, patterns: Sequence[str], kind: str) -> Iterator[DatabaseInfo]:
    """The databases that begin as all patterns do, by the page."""
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


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of these, or fits one of them."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def matching(patterns: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """The known names that match; a pattern without a wildcard must be one of them."""
    need_none_missing(literals(patterns) - set(known), what)
    return [name for name in known if matches(name, patterns)]


def literals(patterns: Sequence[str]) -> set[str]:
    """Patterns that are names."""
    return {pattern for pattern in patterns if not any(sign in pattern for sign in "*?[")}


def need_none_missing(names: set[str], what: str) -> None:
    """Refuse names that nothing has."""
    if names:
        raise UnknownDatabase(f"no {what} has this name", hint="`quire ls` lists them", names=sorted(names)[:5])


def _view(client: Client, name: str, snapshot: int | str, upload: bool) -> SnapshotView:
    """A view; what it lacks in the object store is uploaded only if there is something: that needs more than to read."""
    view = client.view(name, snapshot)
    return client.view(name, snapshot, upload=True) if upload and without_object(view) else view


class VersionReaders:
    """What versions of one store are read through, one after the other, on an executor or where a query is planned.

    An object store, a file or a page that one of them needed is there for the next: forks share most of theirs.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._sources: Sources | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, version: LocatedVersion) -> ViewReader:
        """A reader of a version."""
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
    """A reader of a single version."""
    with VersionReaders() as readers:
        yield readers.open(version)


class Piece(Protocol):
    """A part of a task."""

    @property
    def size_bytes(self) -> int: ...


def joined(ranges: list[LentRange], size_max: int) -> list[LentRange]:
    """Fewer ranges over the same databases: those that follow each other become one, up to this size."""
    fewer: list[LentRange] = []
    for each in ranges:
        before = fewer[-1] if fewer else None
        if before is None or before.last != each.after or before.size_bytes + each.size_bytes > size_max:
            fewer.append(each)
        else:
            fewer[-1] = replace(before, last=each.last, size_bytes=before.size_bytes + each.size_bytes)
    return fewer


def balanced_groups(pieces: Iterable[S], partitions: int) -> list[list[S]]:
    """Pieces in at most so many heaps of about the same size."""
    queue = list(pieces)
    heaps: list[list[S]] = [[] for _ in range(min(partitions, len(queue)))]
    for piece, heap in zip(queue, balanced([piece.size_bytes + 1 for piece in queue], len(heaps)), strict=True):
        heaps[heap].append(piece)
    return heaps


class PiecesReader(SourceReader):
    """A reader whose tasks read pieces of versions, which one lease keeps."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self.request = VersionRequest(options)
        self.keep_seconds = self.request.keep_seconds

    def lease_of(self, part: list[ViewPiece[Any] | LentRange]) -> int:
        return part[0].lease_id
