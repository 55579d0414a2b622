"""Locates the published versions of one database through the manifest and, in the owner, the unpublished ones in memory.

Terms
  published  in the page index: everything at or below `indexed_upto_lsn`
  head       a page's newest published version

Unpublished versions are searched first, then index and slot map in one manifest transaction. The newest version with
`covered_lsn < lsn ≤ snapshot` wins, else the chain; if the chain contains more than the snapshot may see, `SnapshotGone` is
raised: wrong data is never returned (P8). A page in neither index nor slot map is zeros, but only if the database exists:
dropping it empties both.

Without unpublished versions it needs neither WAL nor owner, so read-only processes use the same code.

Threads: any; the caches are dicts of immutable facts.
Raises `SnapshotGone`, `DatabaseTombstoned`, `Corruption`, and what disks and object stores raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from typing import TYPE_CHECKING, Self

from quire.core.errors import Corruption, DatabaseTombstoned, SnapshotGone
from quire.core.ids import ArtifactKey
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbStatus
from quire.manifest.slots import EMPTY, Chain, Leaf, place, unpack_leaf
from quire.pages.catalog import chunk_place
from quire.pages.framemap import EMPTY_MAP, FrameMap, Location
from quire.pages.page_source import InChain, Mark, PageSource
from quire.pages.sources import ChunkPlace, Sources
from quire.pages.view_build import kept_source

if TYPE_CHECKING:
    from quire.pages.wal import Version

BeginRead = Callable[[], AbstractContextManager[ReadTxn]]

LEAVES_KEPT = 1_024
"""Decoded leaves of the slot map kept in memory per database: 256 slots each, so 16 TiB of 64 MiB chunks."""
PLACES_KEPT = 16_384

LOOKED_UP_AT_ONCE = 4_096
"""Pages looked up in one transaction of the manifest (M4)."""


def _nothing(_page: int, _lsn: int) -> None:
    """Return no unpublished version: a read-only process has none."""


class Versions(PageSource):
    """All versions of one database that have not been checkpointed away."""

    def __init__(
        self,
        *,
        db_id: int,
        page_size: int,
        pages_per_chunk: int,
        begin_read: BeginRead,
        sources: Sources,
        objects_url: str,
        inherited: FrameMap = EMPTY_MAP,
        unpublished: Callable[[int, int], Version | None] = _nothing,
    ) -> None:
        super().__init__(db_id=db_id, page_size=page_size, pages_per_chunk=pages_per_chunk, sources=sources)
        # constant after construction
        self._begin_read = begin_read
        self._objects_url = objects_url
        self._inherited = inherited
        """Page → newest version in segments inherited from the database that this one was forked from (P12)."""
        self._unpublished = unpublished
        self._present: Versions | None = None
        """For an `as_of` copy: the original, which uses the current rows."""
        # caches
        self._leaves: dict[tuple[int, int, int], Leaf] = {}
        self._places: dict[ArtifactKey, ChunkPlace] = {}

    def as_of(self, rows: BeginRead) -> Self:
        """Return a copy that uses the rows of one moment, whatever is checkpointed afterwards."""
        held = copy(self)
        held._begin_read, held._present = rows, self
        return held

    def _read_again(self, page: int, lsn: int) -> tuple[int, bytes]:
        try:
            return super()._read_again(page, lsn)
        except Corruption:
            if self._present is not None:
                self._present.locate(page, lsn)  # raises `SnapshotGone` if later rows no longer have the version
            raise

    def locate(self, page: int, lsn: int, *, again: bool = False) -> Location | InChain:
        """Return the location of the page as of version `lsn`."""
        version = self._unpublished(page, lsn)
        if version is None:
            # Begun after the look into memory: a version that is published in between is in the index by now (P8).
            with self._begin_read() as txn:
                return self._look_up(txn, page, lsn, again=again)
        if again:
            self.sources.forget_segment(self.db_id, version[1])
        return version[0], self.db_id, version[1]

    def locate_many(self, pages: Sequence[int], lsn: int) -> Iterator[tuple[int, Location | InChain]]:
        """Yield the locations of several pages, in few transactions."""
        for start in range(0, len(pages), LOOKED_UP_AT_ONCE):
            published: list[int] = []
            for page in pages[start : start + LOOKED_UP_AT_ONCE]:
                version = self._unpublished(page, lsn)
                if version is None:
                    published.append(page)
                else:
                    yield page, (version[0], self.db_id, version[1])
            # Begun after the search of unpublished versions: those published in between are in the index by now (P8).
            with self._begin_read() as txn:
                located = [(page, self._look_up(txn, page, lsn)) for page in published]
            yield from located

    def _look_up(self, txn: ReadTxn, page: int, lsn: int, *, again: bool = False) -> Location | InChain:
        """Return the location of a published version."""
        # After a failed read the head alone is not enough: rows of absorbed versions are deleted late, so its segment
        # may be gone while the chain has the page.
        if not again:
            head = txn.get(t.PAGE_VERSION_HEAD, self.db_id, page)
            # Nothing is newer than a head at or below the snapshot, whatever the chain covers.
            if head is not None and head.lsn <= lsn:
                return head.lsn, self.db_id, head.segment_id
        slot = page // self.pages_per_chunk
        chain = self._chain(txn, slot)
        covered = chain[-1].covered_lsn if chain else 0
        if covered > lsn:
            raise SnapshotGone(
                "this version of the page is no longer kept",
                hint="open a newer snapshot; named snapshots keep theirs",
                db_id=self.db_id,
                page=page,
                lsn=lsn,
                covered_lsn=covered,
            )
        where = self._indexed(txn, page, lsn, covered)
        if where is not None:
            if again:
                self.sources.forget_segment(where[1], where[2])
            return where
        if not chain:
            self._require_alive(txn)
        return covered, [self._place(txn, link.artifact(slot), again=again) for link in chain]

    def kept(self, mark: Mark) -> PageSource | None:
        """Return a source of a version that was set aside, from the snapshot that keeps it."""
        return kept_source(self._begin_read, self.sources, self.db_id, mark, self._objects_url)

    def _require_alive(self, txn: ReadTxn) -> None:
        """Raise if the database was dropped. For a page without any row: it was never written, or its rows are gone."""
        record = txn.database(self.db_id)
        if record is None or record.status is DbStatus.TOMBSTONED:
            raise DatabaseTombstoned("the database was dropped while it was read", db_id=self.db_id)

    def _indexed(self, txn: ReadTxn, page: int, lsn: int, covered: int) -> Location | None:
        """Return the newest published version in (covered, lsn]."""
        indexed = txn.at_or_below(t.PAGE_VERSION_INDEX, self.db_id, page, lsn)
        if indexed is not None and indexed[0][2] > covered:
            return indexed[0][2], indexed[1].origin_db_id, indexed[1].segment_id
        inherited = self._inherited.find(page)
        return inherited if inherited is not None and covered < inherited[0] <= lsn else None

    def _chain(self, txn: ReadTxn, slot: int) -> Chain:
        leaf, offset = place(slot)
        held = txn.get(t.LIVE_LEAF, self.db_id, leaf)
        if held is None:
            return EMPTY
        key = (held.origin_db_id, leaf, held.generation)
        # A leaf of one generation never changes, so a cached one is never stale. This transaction has the generation.
        chains = self._leaves.get(key)
        if chains is None:
            row = txn.get(t.SLOT_LEAF, held.origin_db_id, leaf, held.generation)
            if row is None:
                raise Corruption("a leaf of the slot map is missing", hint="run `quire manifest check`", leaf=key)
            if len(self._leaves) >= LEAVES_KEPT:
                self._leaves.clear()
            chains = self._leaves[key] = unpack_leaf(row.entries)
        return chains.get(offset, EMPTY)

    def _place(self, txn: ReadTxn, key: ArtifactKey, *, again: bool) -> ChunkPlace:
        place = self._places.get(key)
        if place is None or again:
            self.sources.forget_chunk(key)
            if len(self._places) >= PLACES_KEPT:
                self._places.clear()
            place = self._places[key] = chunk_place(txn, key, self._objects_url)
        return place
