"""Reads pages of versions: a subclass locates them, `Sources` reads the bytes (P8).

Terms
  version   the database as of one commit, named by its lsn (P5); a `Mark` also has its size, segment and time
  chain     the base and deltas of a slot; they supply a page if the WAL has no version of it above their `covered_lsn`
  resolved  pages that were looked up before, each with the range of versions that see the same image (`cache.py`)

A page that is missing or fails its check is looked up again, in a new transaction and with new handles: in the meantime its
segment may have been recycled, or its chunk evicted. A second failure is `Corruption`.

Threads: any. Executor-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from sys import modules
from typing import NamedTuple

from quire.core.errors import Corruption
from quire.core.tracing import TRACE_API, span
from quire.pages.framemap import Location
from quire.pages.sources import ChunkPlace, SegmentPlace, Sources


class Mark(NamedTuple):
    """A version of the database."""

    lsn: int
    size_pages: int
    segment_id: int = 0
    commit_ms: int = 0


InChain = tuple[int, Sequence[ChunkPlace]]
"""(covered lsn, chunks) of a chain: the location of a page that has no newer version in the WAL."""


class PageSource:
    """Pages of any version that `locate` finds. REQUIRES that callers check page numbers."""

    def __init__(self, *, db_id: int, page_size: int, pages_per_chunk: int, sources: Sources) -> None:
        # constant after construction
        self.db_id = db_id
        self.page_size = page_size
        self.pages_per_chunk = pages_per_chunk
        self.sources = sources
        self._segment_places: dict[tuple[int, int], SegmentPlace | None] = {}
        """(origin, segment) → its place, if known; `Sources` looks up the rest."""
        # a cache
        self.resolved = sources.cache.resolved(db_id)

    # ── for subclasses ────────────────────────────────────────────────────────────────────────────────────────────────
    def locate(self, page: int, lsn: int, *, again: bool = False) -> Location | InChain:
        """Return the location of the page as of version `lsn`. `again`: a read has failed, so handles are dropped first."""
        raise NotImplementedError

    def locate_many(self, pages: Sequence[int], lsn: int) -> Iterator[tuple[int, Location | InChain]]:
        """Yield the locations of several pages."""
        return ((page, self.locate(page, lsn)) for page in pages)

    def kept(self, _: Mark) -> PageSource | None:
        """Return another source of a version that this one no longer has, if a snapshot keeps it."""
        return None

    def explain(self, error: Corruption) -> None:
        """Raise a more specific error that explains `error`, if there is one."""

    # ── one page ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, page: int, lsn: int) -> bytes:
        """Return the page as of version `lsn`."""
        if TRACE_API in modules:
            return self._read_traced(page, lsn)
        try:
            return self._read(page, lsn)[1]
        except Corruption:
            return self._read_again(page, lsn)[1]

    def _read_traced(self, page: int, lsn: int) -> bytes:
        with span("PageStore.read_page", db_id=self.db_id, page=page, snapshot_lsn=lsn) as traced:
            try:
                version_lsn, image = self._read(page, lsn)
            except Corruption:
                traced.set(again=True)
                version_lsn, image = self._read_again(page, lsn)
            traced.set(epoch=version_lsn)
            return image

    def _read(self, page: int, lsn: int, *, again: bool = False) -> tuple[int, bytes]:
        """Return (lsn of the version found, its image)."""
        where, sources = self.locate(page, lsn, again=again), self.sources
        if len(where) == 3:
            version_lsn, origin, segment_id = where
            place = self._segment_places.get((origin, segment_id)) if self._segment_places else None
            image = sources.version(origin, segment_id, version_lsn, page, place=place)
        else:
            version_lsn, chain = where
            in_chain = sources.chain_page(chain, page % self.pages_per_chunk)
            image = in_chain if in_chain is not None else sources.cache.zeros(self.page_size)
        # No version of the page lies between the one found and `lsn`: the image is right for all snapshots between them.
        sources.cache.remember(self.resolved, page, (version_lsn, lsn, image))
        return version_lsn, image

    def _read_again(self, page: int, lsn: int) -> tuple[int, bytes]:
        try:
            return self._read(page, lsn, again=True)
        except Corruption as error:
            self.explain(error)
            raise

    # ── many pages ────────────────────────────────────────────────────────────────────────────────────────────────────
    def read_many(self, pages: Iterable[int], lsn: int, *, cold: bool = False) -> dict[int, bytes]:
        """Return several pages of one version, page → image; adjacent frames and chunk frames are read together."""
        images: dict[int, bytes] = {}
        missing: list[int] = []
        for page in pages:
            entry = self.resolved.get(page)
            if entry is not None and entry[0] <= lsn <= entry[1]:
                images[page] = entry[2]
            else:
                missing.append(page)
        if not missing:
            return images
        if TRACE_API not in modules:
            self._read_missing(images, missing, lsn, cold=cold)
            return images
        with span("PageStore.read_pages", db_id=self.db_id, snapshot_lsn=lsn) as traced:
            lsns = self._read_missing(images, missing, lsn, cold=cold)
            traced.set(pages=len(missing), epoch_min=min(lsns), epoch_max=max(lsns))
            return images

    def _read_missing(self, images: dict[int, bytes], pages: list[int], lsn: int, *, cold: bool) -> list[int]:
        """Read pages into `images` and return the lsns of the versions found."""
        frames: dict[tuple[int, int], list[tuple[int, int]]] = {}
        chains: dict[int, tuple[Sequence[ChunkPlace], list[int]]] = {}
        lsns: list[int] = []
        for page, where in self.locate_many(pages, lsn):
            lsns.append(where[0])
            if len(where) == 3:
                frames.setdefault(where[1:], []).append((page, where[0]))
            else:
                chains.setdefault(page // self.pages_per_chunk, (where[1], []))[1].append(page)
        for (origin, segment_id), versions in frames.items():
            place = self._segment_places.get((origin, segment_id))
            try:
                images.update(self.sources.versions(origin, segment_id, versions, place=place, cold=cold))
            except Corruption:  # read the pages one by one, which looks each up again
                images.update((page, self.read(page, lsn)) for page, _ in versions)
        for slot, (chain, in_slot) in chains.items():
            try:
                images.update(self._of_chain(slot, chain, in_slot, cold=cold))
            except Corruption:
                images.update((page, self.read(page, lsn)) for page in in_slot)
        return lsns

    def _of_chain(self, slot: int, chain: Sequence[ChunkPlace], pages: list[int], *, cold: bool) -> dict[int, bytes]:
        first, zeros = slot * self.pages_per_chunk, self.sources.cache.zeros(self.page_size)
        in_chain = self.sources.chain_pages(chain, [page - first for page in pages], cold=cold)
        return {page: in_chain.get(page - first, zeros) for page in pages}
