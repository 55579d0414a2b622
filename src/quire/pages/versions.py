"""Published versions of one database: where they are by the manifest, and their bytes.

Terms
  published  in the page index: everything at or below `indexed_upto_lsn`
  head       a page's newest published version
  chain      base and deltas of a slot; what no version above its `covered_lsn` answers, the chain does (P8)

Rules
  1. Index and slot map are read in one manifest transaction. The newest version with `covered_lsn < lsn ≤ snapshot` wins, else
     the chain; if the chain holds more than the snapshot may see, `SnapshotGone`: never wrong data.
  2. A head at or below the snapshot is the newest version there is, so it answers alone: whatever the chain covers, nothing is
     newer. Its segment may be gone by then; see rule 3.
  3. What is missing or fails its check is looked up once more, in a new transaction and with new handles: its segment may have
     been recycled since, its chunk evicted. A second failure is `Corruption`.
  4. A page that neither index nor slot map knows is zeros, but only of a database that is there: dropping one empties both.
  5. It needs a manifest that is opened for reading, and the bytes: no WAL, no owner. So a process that only reads uses the
     same code as the owner, which asks its unpublished versions first (`pagestore.py`).

Threads: any; the caches are dicts that hold immutable facts.
Raises `SnapshotGone`, `DatabaseTombstoned`, `Corruption`, and what disks and object stores raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from sys import modules

from quire.core.errors import Corruption, DatabaseTombstoned, SnapshotGone
from quire.core.ids import ArtifactKey
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbStatus
from quire.manifest.slots import EMPTY, Chain, Leaf, place, unpack_leaf
from quire.pages.framemap import EMPTY_MAP, FrameMap, Location
from quire.pages.locations import chunk_place
from quire.pages.publication import Mark
from quire.pages.sources import ChunkPlace, Sources
from quire.pages.tracing import TRACE_API, span
from quire.pages.view import ViewReader
from quire.pages.view_build import kept_reader

LEAVES_KEPT = 1_024
"""Decoded leaves of the slot map in memory, per database: 256 slots each, so 16 TiB of 64 MiB chunks."""
PLACES_KEPT = 16_384

LOOKED_UP_AT_ONCE = 4_096
"""Pages that are looked up in one transaction of the manifest (M4)."""

InChain = tuple[int, list[ChunkPlace]]
"""(what the chain covers, its chunks): where a page is that no WAL version answers."""

Known = dict[tuple[int, int], list[tuple[int, int]]]
"""(origin, segment) → (page, lsn) of versions whose place is known already."""


class Versions:
    """See the rules above."""

    def __init__(
        self,
        *,
        db_id: int,
        page_size: int,
        pages_per_chunk: int,
        begin_read: Callable[[], ReadTxn],
        sources: Sources,
        objects_url: str,
        inherited: FrameMap = EMPTY_MAP,
    ) -> None:
        # constant after construction
        self.db_id = db_id
        self.page_size = page_size
        self.pages_per_chunk = pages_per_chunk
        self._begin_read = begin_read
        self._sources = sources
        self._objects_url = objects_url
        self._inherited = inherited
        """Page → newest version in segments of an origin this database was forked from (P12)."""
        # caches
        self._resolved = sources.cache.resolved(db_id)
        self._leaves: dict[tuple[int, int, int], Leaf] = {}
        self._places: dict[ArtifactKey, ChunkPlace] = {}

    # ── one page ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def read(self, page: int, lsn: int) -> bytes:
        """The page as of version `lsn`, which is published; the caller has checked the page's number."""
        if TRACE_API in modules:
            return self._read_traced(page, lsn)
        try:
            return self._read(page, lsn)[1]
        except Corruption:
            return self._read(page, lsn, again=True)[1]

    def _read_traced(self, page: int, lsn: int) -> bytes:
        with span("PageStore.read_page", db_id=self.db_id, page=page, snapshot_lsn=lsn) as traced:
            try:
                at, image = self._read(page, lsn)
            except Corruption:
                traced.set(again=True)
                at, image = self._read(page, lsn, again=True)
            traced.set(epoch=at)
            return image

    def _read(self, page: int, lsn: int, *, again: bool = False) -> tuple[int, bytes]:
        """(lsn of the version that answered, its image)."""
        with self._begin_read() as txn:
            where = self.look_up(txn, page, lsn, again=again)
        image = self.image(where, page)
        self._sources.cache.remember(self._resolved, page, (where[0], lsn, image))
        return where[0], image

    def image(self, where: Location | InChain, page: int) -> bytes:
        """The bytes of a page at a place."""
        sources = self._sources
        if len(where) == 3:
            return sources.version(where[1], where[2], where[0], page)
        found = sources.chain_page(where[1], page % self.pages_per_chunk)
        return found if found is not None else sources.cache.zeros(self.page_size)

    def look_up(self, txn: ReadTxn, page: int, lsn: int, *, again: bool = False) -> Location | InChain:
        """Where a version is: rules 1 to 3."""
        if not again:
            head = txn.get(t.PAGE_VERSION_HEAD, self.db_id, page)
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
                self._sources.forget_segment(where[1], where[2])
            return where
        if not chain:
            self._require_alive(txn)
        return covered, [self._place(txn, link.artifact(slot), again=again) for link in chain]

    def kept(self, mark: Mark) -> ViewReader | None:
        """A version that was set aside, from the snapshot that keeps it; `None` if none does."""
        return kept_reader(self._begin_read, self._sources, self.db_id, mark, self._objects_url)

    def _require_alive(self, txn: ReadTxn) -> None:
        """Nothing is known of a page: it was never written, or everything went with the database (rule 4)."""
        record = txn.database(self.db_id)
        if record is None or record.status is DbStatus.TOMBSTONED:
            raise DatabaseTombstoned("the database was dropped while it was read", db_id=self.db_id)

    def _indexed(self, txn: ReadTxn, page: int, lsn: int, covered: int) -> Location | None:
        """The newest published version in (covered, lsn]."""
        found = txn.at_or_below(t.PAGE_VERSION_INDEX, self.db_id, page, lsn)
        if found is not None and found[0][2] > covered:
            return found[0][2], found[1].origin_db_id, found[1].segment_id
        inherited = self._inherited.find(page)
        return inherited if inherited is not None and covered < inherited[0] <= lsn else None

    def _chain(self, txn: ReadTxn, slot: int) -> Chain:
        leaf, offset = place(slot)
        held = txn.get(t.LIVE_LEAF, self.db_id, leaf)
        if held is None:
            return EMPTY
        key = (held.origin_db_id, leaf, held.generation)
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
        found = self._places.get(key)
        if found is None or again:
            self._sources.forget_chunk(key)
            if len(self._places) >= PLACES_KEPT:
                self._places.clear()
            found = self._places[key] = chunk_place(txn, key, self._objects_url)
        return found

    # ── many pages ────────────────────────────────────────────────────────────────────────────────────────────────────
    def read_many(
        self,
        pages: Iterable[int],
        lsn: int,
        *,
        cold: bool = False,
        known: Known | None = None,
        reread: Callable[[int, int], bytes] | None = None,
    ) -> dict[int, bytes]:
        """Several pages of one version, page → image; frames and chunk frames next to each other are read together.

        `known` are more versions to be read with them. What fails is read by `reread`, page by page (rule 3).
        """
        if TRACE_API not in modules:
            return self._read_many(pages, lsn, cold=cold, known=known, reread=reread, epochs=[])
        wanted, epochs = list(pages), list[int]()
        if not wanted and not known:
            return {}
        with span("PageStore.read_pages", db_id=self.db_id, snapshot_lsn=lsn) as traced:
            images = self._read_many(wanted, lsn, cold=cold, known=known, reread=reread, epochs=epochs)
            traced.set(pages=len(images), epoch_min=min(epochs, default=0), epoch_max=max(epochs, default=0))
            return images

    def _read_many(
        self,
        pages: Iterable[int],
        lsn: int,
        *,
        cold: bool,
        known: Known | None,
        reread: Callable[[int, int], bytes] | None,
        epochs: list[int],
    ) -> dict[int, bytes]:
        """`epochs` gets the lsns of the versions that are read."""
        images: dict[int, bytes] = {}
        versions: Known = known if known is not None else {}
        epochs.extend(at for frames in versions.values() for _, at in frames)
        slots: dict[int, tuple[list[ChunkPlace], list[int]]] = {}
        rest: list[int] = []
        for page in pages:
            entry = self._resolved.get(page)
            if entry is not None and entry[0] <= lsn <= entry[1]:
                images[page] = entry[2]
            else:
                rest.append(page)
        for start in range(0, len(rest), LOOKED_UP_AT_ONCE):
            with self._begin_read() as txn:
                for page in rest[start : start + LOOKED_UP_AT_ONCE]:
                    found = self.look_up(txn, page, lsn)
                    epochs.append(found[0])
                    if len(found) == 3:
                        versions.setdefault(found[1:], []).append((page, found[0]))
                    else:
                        slots.setdefault(page // self.pages_per_chunk, (found[1], []))[1].append(page)
        read = reread or self.read
        for (origin, segment_id), wanted in versions.items():
            try:
                images.update(self._sources.versions(origin, segment_id, wanted, cold=cold))
            except Corruption:
                images.update((page, read(page, lsn)) for page, _ in wanted)
        for slot, (chain, wanted_pages) in slots.items():
            try:
                images.update(self._of_chain(slot, chain, wanted_pages, cold=cold))
            except Corruption:
                images.update((page, read(page, lsn)) for page in wanted_pages)
        return images

    def _of_chain(self, slot: int, chain: list[ChunkPlace], pages: list[int], *, cold: bool) -> dict[int, bytes]:
        first, zeros = slot * self.pages_per_chunk, self._sources.cache.zeros(self.page_size)
        found = self._sources.chain_pages(chain, [page - first for page in pages], cold=cold)
        return {page: found.get(page - first, zeros) for page in pages}
