"""Explains a page, given as DB:PAGE: which versions of it exist, and who needs each.

Terms
  version  a commit's frame in the WAL, or the page in chunks, as of the lsn that their chain covers
  view     what the database, a snapshot or a fork reads: a chain of chunks, and above what that covers the WAL, up to an lsn

A snapshot and a fork have chains of their own. After a checkpoint they need older chunks, or WAL segments that they pin. Rows
of pages in a truncated segment are gone, so whether such a segment has the page is known by its range of pages only.

Reads the manifest in one transaction. Raises `InvalidInput` for a database without pages, or a page that it does not have.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from quire.core.errors import InvalidInput
from quire.core.reader_info import ReaderInfo
from quire.manifest import tables as t
from quire.manifest.differences import read_leaves
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbRecord, Pin, SnapshotRecord, WalState
from quire.manifest.slots import EMPTY, Chain, place
from quire.store.why_files import Explanation, Holder, snapshot_holder

FORKS_MAX = 20
"""Forks of a database to list by name; a template may have a hundred thousand."""

ReaderLookup = Callable[[int], list[ReaderInfo]]
"""Returns the readers of a database that have no row in the manifest."""


class PageVersion(NamedTuple):
    """One version of the page. Versions are ordered by age."""

    lsn: int
    """Of the commit, or the highest one that the chunks or segments have."""
    where: str
    is_frame: bool
    """Whether the WAL has it, and its location is known."""


class PageView(NamedTuple):
    """What a reader or fork reads of the page's slot."""

    chain: Chain
    pins: list[Pin]
    upto_lsn: int


def explain_page(txn: ReadTxn, subject: str, reader_lookup: ReaderLookup) -> Explanation | None:
    """Return the versions of a page, newest first, with their holders. Return `None` if the subject is not a page."""
    name, _, digits = subject.rpartition(":")
    index = txn.get(t.DB_NAMES, name) if name else None
    if index is None or not (digits.isascii() and digits.isdecimal() and len(digits) <= 10):
        return None
    db_id, page = index.value, int(digits)
    database, wal = txn.database(db_id), txn.wal_state(db_id)
    assert database is not None, "its name led here"
    if database.kind is not DbKind.PAGES:
        hint = f"`quire why {shlex.quote(name)}` explains the database"
        raise InvalidInput("only page databases have pages", hint=hint, database=name)
    if wal is None or page >= wal.size_pages:
        pages = 0 if wal is None else wal.size_pages
        raise InvalidInput("the database has no such page", hint="pages are numbered from 0", page=page, pages=pages)
    versions = _Versions(txn, db_id, database, page)
    holders: dict[PageVersion, list[Holder]] = {version: [] for version in versions.live}
    for version, holder in versions.holders(name, reader_lookup):
        holders.setdefault(version, []).append(holder)
    count = f"{len(holders)} version" + ("" if len(holders) == 1 else "s")
    newest_first = [holder for version in sorted(holders, reverse=True) for holder in holders[version]]
    return Explanation(subject, "page", count, len(holders) * database.page_size, 0, tuple(newest_first))


class _Versions:
    """The versions of one page."""

    def __init__(self, txn: ReadTxn, db_id: int, database: DbRecord, page: int) -> None:
        self._txn, self._db_id, self._page = txn, db_id, page
        self._slot = page // database.pages_per_chunk if database.pages_per_chunk else None
        self._frames = [
            PageVersion(
                lsn,
                f"of lsn {lsn}, in WAL segment {row.segment_id}, frame {row.frame_no}{_follows(row.prev_lsn)}",
                True,
            )
            for (_, _, lsn), row in txn.scan(t.PAGE_VERSION_INDEX, db_id, page)
        ]
        """Of this database, oldest first. A checkpoint leaves those that it has absorbed until they are truncated."""
        chain = self._chain_of(db_id)
        covered = _covered(chain)
        self.live = [_in_chunks(chain)] if chain else []
        """The versions that the database has, oldest first."""
        self.live += [version for version in self._frames if version.lsn > covered]

    def holders(self, name: str, reader_lookup: ReaderLookup) -> Iterator[tuple[PageVersion, Holder]]:
        """Yield each version with one of its holders. `name` is the database's."""
        if self.live:
            release = f"quire drop {shlex.quote(name)}, or a newer version of the page"
            yield self.live[-1], Holder("database", name, _needs(self.live[-1]), release)
        yield from self._of_readers(reader_lookup)
        for (_, snapshot_id), row in self._txn.scan(t.SNAPSHOT_INDEX, self._db_id):
            if self._page < row.size_pages and (version := self._at(self._view_of(row))) is not None:
                yield version, snapshot_holder(self._txn, self._db_id, snapshot_id, row, _needs(version))
        yield from self._of_forks()
        for version in self.live[:-1]:
            if version.is_frame:
                kept = f"keeps the version {version.where}, until a checkpoint absorbs it"
                yield version, Holder("database", name, kept, f"quire checkpoint {shlex.quote(name)}")

    def _of_readers(self, reader_lookup: ReaderLookup) -> Iterator[tuple[PageVersion, Holder]]:
        readers = [(info.lsn, f"pid {info.pid}" if info.pid else info.reader) for info in reader_lookup(self._db_id)]
        rows = self._txn.scan(t.SNAPSHOT_READERS, self._db_id)
        readers += [(row.snapshot_lsn, str(reader)) for (_, reader), row in rows]
        for lsn, reader in readers:
            # A reader older than the chunks reads the frames that they have absorbed: it holds back their truncation.
            readable = [version for version in (*self._frames, *self.live) if version.lsn <= lsn]
            if readable:
                version = max(readable, key=lambda version: (version.lsn, version in self.live))
                yield version, Holder("reader", reader, _needs(version), "when it closes, or its lease expires")

    def _of_forks(self) -> Iterator[tuple[PageVersion, Holder]]:
        forks = (
            (db_id, row)
            for db_id, row in self._txn.databases()
            if row.parent_db_id == self._db_id and not row.is_dropped
        )
        shared = ((row.name, version) for db_id, row in forks if (version := self._shared_with(db_id, row)) is not None)
        for fork, version in islice(shared, FORKS_MAX):
            yield (
                version,
                Holder(
                    "fork", fork, _needs(version), f"quire drop {shlex.quote(fork)}, or its own version of the page"
                ),
            )
        if left := sum(1 for _ in shared):
            what = "need a version of the page"
            yield self.live[-1], Holder("forks", f"{left:,} more", what, "`quire tree --all --limit 0` lists them")

    def _shared_with(self, fork_id: int, fork: DbRecord) -> PageVersion | None:
        """Return the version that a fork reads, `None` if it has one of its own or no such page."""
        state = self._txn.wal_state(fork_id)
        chain = self._chain_of(fork_id)
        is_own = any(True for _ in self._txn.scan(t.PAGE_VERSION_INDEX, fork_id, self._page))
        if (
            state is None
            or self._page >= state.size_pages
            or is_own
            or any(link.origin_db_id == fork_id for link in chain)
        ):
            return None
        pins = [
            Pin(row.origin_db_id, segment_id, row.last_lsn)
            for (_, segment_id), row in self._txn.scan(t.WAL_CATALOG, fork_id)
            if row.origin_db_id != fork_id and row.state is not WalState.TRUNCATED
        ]
        return self._at(PageView(chain, pins, fork.parent_lsn))

    def _view_of(self, row: SnapshotRecord) -> PageView:
        chain = EMPTY
        if self._slot is not None:
            leaf, offset = place(self._slot)
            keys = [key for key in row.leaves if key[0] == leaf]
            chain = next((chains.get(offset, EMPTY) for _, chains in read_leaves(self._txn, keys)), EMPTY)
        return PageView(chain, row.pins, row.anchor_lsn)

    def _at(self, view: PageView) -> PageVersion | None:
        """Return the version that a view reads; `None` if nothing was written to the page by then."""
        covered = _covered(view.chain)
        for version in reversed(self._frames):
            if covered < version.lsn <= view.upto_lsn:
                return version
        pinned = [pin for pin in view.pins if pin.upto_lsn > covered and self._may_be_in(pin)]
        if pinned:
            numbers = " or ".join(f"{pin.segment_id}" for pin in pinned)
            else_chunks = f", or in chunks as of lsn {covered}" if view.chain else ""
            return PageVersion(
                view.upto_lsn, f"as of lsn {view.upto_lsn}, in pinned WAL segment {numbers}{else_chunks}", False
            )
        return _in_chunks(view.chain) if view.chain else None

    def _may_be_in(self, pin: Pin) -> bool:
        """Whether a pinned segment may have the page: the frames of one that is not truncated are in the index."""
        row = self._txn.get(t.WAL_CATALOG, pin.origin_db_id, pin.segment_id)
        if row is None or (pin.origin_db_id == self._db_id and row.state is not WalState.TRUNCATED):
            return False
        return row.first_page <= self._page <= row.last_page

    def _chain_of(self, db_id: int) -> Chain:
        return EMPTY if self._slot is None else self._txn.chain(db_id, self._slot)


def _covered(chain: Chain) -> int:
    return chain[-1].covered_lsn if chain else 0


def _in_chunks(chain: Chain) -> PageVersion:
    return PageVersion(_covered(chain), f"in chunks, as of lsn {_covered(chain)}", False)


def _needs(version: PageVersion) -> str:
    return f"needs the version {version.where}"


def _follows(prev_lsn: int) -> str:
    return f", follows lsn {prev_lsn}" if prev_lsn else ""
