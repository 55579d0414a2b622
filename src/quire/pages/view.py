"""A version of a database as a value: everything needed to read it without a manifest (P16).

Terms
  link   one artifact of a slot's chain, with its size and the location of its object
  pin    a WAL segment up to an lsn, with the pages that no chunk contains yet
  view   links + pins: immutable, picklable, and small: 40 bytes per artifact, whatever the size of the database

A view is opened with `Sources` alone: an object store, and the store's directory if it is shared. Pins are read from their
segments' files if these exist, else from their objects. The newest pinned version above what the chain covers wins, else the
chain, else zeros, for a page that was never written (P8). A chain that covers more than the view's version is never read:
`SnapshotGone`, as for any reader.

A view does not keep its artifacts: a snapshot's row, or a lease, does. A reader that was opened with a manifest raises
`SnapshotGone` when that row is gone.

Threads: a reader belongs to one at a time, a view to any. Executor-safe. Building one needs a manifest: `view_build.py`.
Raises `OutOfRange`, `ReadOnly`, `SnapshotGone`, and what `Sources` raises.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from quire.core.errors import Corruption, SnapshotGone
from quire.core.ids import ArtifactKey, ArtifactKind, Epoch
from quire.durable.files import OsDisk, OsFile
from quire.durable.names import object_key
from quire.objects.api import ObjectStore, key_below
from quire.pages.cache import PageCache
from quire.pages.chunk_copy import PageRows, copy_pages, packed
from quire.pages.framemap import FrameMap, Location, PinnedSegment, Regions
from quire.pages.page_source import InChain, Mark, PageSource
from quire.pages.snapshot import Snapshot, Unleased
from quire.pages.sources import ChunkPlace, Sources

LINK_DTYPE = np.dtype(
    [
        ("slot", "<u4"), ("origin_db_id", "<u4"), ("generation", "<u4"), ("delta_id", "<u2"), ("kind", "u1"),
        ("reserved", "u1"), ("covered_lsn", "<u8"), ("size_bytes", "<u8"), ("space", "<u4"), ("name", "<u4"),
    ]
)  # fmt: skip
"""One artifact of a chain. `space` is an index into `SnapshotView.spaces`, `name` into `SnapshotView.names`."""

ALONE_BYTES = 16 << 20
"""Bytes of pages cached by a reader without an engine."""
CHAINS_KEPT = 4_096

if LINK_DTYPE.itemsize != 40:
    raise AssertionError("a link has another size than the page says")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotView:
    """A version as a value."""

    db_id: int
    snapshot_id: int
    """The id of the snapshot that keeps it; 0 if a lease does."""
    name: str
    page_size: int
    pages_per_chunk: int
    lsn: int
    size_pages: int
    time_ms: int
    segment_id: int
    links: bytes
    """`LINK_DTYPE`, sorted by slot, each chain in order."""
    spaces: tuple[tuple[str, str], ...]
    """(URL of the object store, prefix of keys in it)."""
    names: tuple[str, ...]
    """Object keys that do not follow from the artifact's key; the first is empty and stands for those that do."""
    pins: tuple[PinnedSegment, ...]
    """Sorted by first lsn."""

    @property
    def epoch(self) -> Epoch:
        """The version, as the feed and messages print it."""
        return Epoch(self.lsn, self.segment_id)

    def open(self, sources: Sources, *, regions: Regions | None = None) -> ViewReader:
        """Return a reader of this version."""
        return ViewReader(self, sources, regions=regions)

    def open_alone(
        self, open_store: Callable[[str], ObjectStore], *, root: str = "", cache_bytes: int = ALONE_BYTES
    ) -> ViewReader:
        """Return a reader that needs no manifest: only object stores by URL and, for segments that were not uploaded, the
        store's directory `root` (P16)."""
        return ViewReader(self, sources_alone(open_store, root=root, cache_bytes=cache_bytes))


def sources_alone(
    open_store: Callable[[str], ObjectStore], *, root: str = "", cache_bytes: int = ALONE_BYTES
) -> Sources:
    """Return the sources to read any number of views of one store without its manifest."""
    disk = OsDisk() if root else _NoDisk()
    return Sources(root=root, disk=disk, open_store=open_store, cache=PageCache(cache_bytes))


def without_object(view: SnapshotView) -> list[ArtifactKey]:
    """Return the pinned segments that have no object yet: only processes that share the owner's disk can read them (P16)."""
    return [
        ArtifactKey(pin.origin_db_id, ArtifactKind.WAL, pin.segment_id, 0)
        for pin in view.pins
        if pin.place is None or not pin.place.object_key
    ]


def place_of(view: SnapshotView, link: np.void) -> ChunkPlace:
    """Return the location of a link's chunk."""
    key = ArtifactKey(
        int(link["origin_db_id"]),
        ArtifactKind(int(link["kind"])),
        int(link["slot"]),
        int(link["generation"]),
        int(link["delta_id"]),
    )
    url, prefix = view.spaces[int(link["space"])]
    name = view.names[int(link["name"])] or object_key(key)
    return ChunkPlace(key=key, url=url, object_key=key_below(prefix, name), size_bytes=int(link["size_bytes"]))


class _NoDisk(OsDisk):
    """An empty disk, so that no unrelated file is taken for one of the store's."""

    __slots__ = ()

    def open(self, path: str, **_: bool) -> OsFile:
        raise FileNotFoundError(path)

    def exists(self, _: str) -> bool:
        return False


class ViewSource(PageSource):
    """The pages of one view, from the object store or the store's directory."""

    def __init__(
        self,
        view: SnapshotView,
        sources: Sources,
        *,
        regions: Regions | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(
            db_id=view.db_id, page_size=view.page_size, pages_per_chunk=view.pages_per_chunk, sources=sources
        )
        # constant after construction
        self._view = view
        self._is_gone = is_gone
        self._links = np.frombuffer(view.links, LINK_DTYPE)
        self._slots = array("I", self._links["slot"].tobytes())
        self._map = FrameMap.of(regions or Regions(sources), view.pins, view.lsn)
        self._segment_places = {(pin.origin_db_id, pin.segment_id): pin.place for pin in view.pins}
        # a cache
        self._chains: dict[int, tuple[int, tuple[ChunkPlace, ...]]] = {}

    def locate(self, page: int, lsn: int, *, again: bool = False) -> Location | InChain:
        """Return the location of a page: the newest pinned version above what the chain covers, else the chain."""
        assert lsn == self._view.lsn, "a view has one version"
        covered, chain = self._chain(page // self.pages_per_chunk)
        pinned = self._map.find(page)
        if again:  # a handle may be of a file that was since recycled or evicted
            for place in chain:
                self.sources.forget_chunk(place.key)
            if pinned is not None:
                self.sources.forget_segment(pinned[1], pinned[2])
        return pinned if pinned is not None and pinned[0] > covered else (covered, chain)

    def _chain(self, slot: int) -> tuple[int, tuple[ChunkPlace, ...]]:
        """Return (covered lsn, places) of a slot's chain."""
        chain = self._chains.get(slot)
        if chain is None:
            if len(self._chains) >= CHAINS_KEPT:
                self._chains.clear()
            rows = self._links[bisect_left(self._slots, slot) : bisect_right(self._slots, slot)]
            # The last artifact of a chain covers the most: deltas are in the order in which they were written.
            covered = int(rows["covered_lsn"][-1]) if len(rows) else 0
            if covered > self._view.lsn:
                what = "the chunks of this view hold more than its version"
                raise SnapshotGone(
                    what, hint="open another one", db_id=self.db_id, lsn=self._view.lsn, covered_lsn=covered
                )
            chain = self._chains[slot] = (covered, tuple(place_of(self._view, row) for row in rows))
        return chain

    # ── many pages ────────────────────────────────────────────────────────────────────────────────────────────────────
    def rows(self, pages: NDArray[np.int64]) -> PageRows:
        """Return pages in the requested order, bypassing the caches."""
        rising, inverse = np.unique(pages, return_inverse=True)
        if len(rising) < len(pages):
            return self.rows(rising)[inverse]
        order = np.argsort(pages, kind="stable")
        images = np.empty((len(pages), self.page_size), np.uint8)
        slots, starts = np.unique(rising // self.pages_per_chunk, return_index=True)
        for slot, start, stop in zip(slots.tolist(), starts.tolist(), [*starts[1:].tolist(), len(rising)]):
            try:
                self._copy_slot(slot, rising[start:stop], order[start:stop], images)
            except Corruption:  # read the pages one by one, which looks each up again
                self._copy_each(rising[start:stop], order[start:stop], images)
        return images

    def _copy_slot(self, slot: int, pages: NDArray[np.int64], rows: NDArray[np.intp], images: PageRows) -> None:
        """Copy ascending pages of one slot into these rows of `images`."""
        first = slot * self.pages_per_chunk
        in_map = np.isin(pages, np.array(self._map.within(int(pages[0]), int(pages[-1]) + 1), np.int64))
        if in_map.any():
            self._copy_each(pages[in_map], rows[in_map], images)
        offsets, rows = (pages[~in_map] - first).astype(np.uint32), rows[~in_map]
        missing = BitMap(packed(offsets))
        for place in reversed(self._chain(slot)[1]):
            if not missing:
                return
            chunk = self.sources.chunk(place)
            if present := chunk.pages & missing:
                present_offsets = np.array(present.to_array(), np.uint32)
                copy_pages(chunk, present_offsets, rows[np.searchsorted(offsets, present_offsets)], images)
                missing -= present
        images[rows[np.searchsorted(offsets, np.array(missing.to_array(), np.uint32))]] = 0

    def _copy_each(self, pages: NDArray[np.int64], rows: NDArray[np.intp], images: PageRows) -> None:
        read = self.read_many(pages.tolist(), self._view.lsn, cold=True)
        for page, row in zip(pages.tolist(), rows.tolist()):
            images[row] = np.frombuffer(read[page], np.uint8)

    def explain(self, error: Corruption) -> None:
        """Raise `SnapshotGone` if the snapshot behind the view was dropped."""
        if self._is_gone():
            raise SnapshotGone(
                "the snapshot was dropped while it was read",
                hint="open another one",
                db_id=self.db_id,
                snapshot_id=self._view.snapshot_id,
                cause=str(error),
            ) from error


class ViewReader(Snapshot):
    """A reader of a view. Holds no lease: a snapshot's row, or another lease, keeps what it reads."""

    __slots__ = ("_pages", "sources", "view")

    def __init__(
        self,
        view: SnapshotView,
        sources: Sources,
        *,
        regions: Regions | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pages = ViewSource(view, sources, regions=regions, is_gone=is_gone)
        super().__init__(self._pages, Mark(view.lsn, view.size_pages, view.segment_id, view.time_ms), Unleased())
        self.view = view
        self.sources = sources

    def read_rows(self, pages: NDArray[np.int64]) -> PageRows:
        """Return pages in the requested order, one per row, bypassing the caches; for decoding many pages."""
        if len(pages):
            self._check(int(pages.min()))
            self._check(int(pages.max()))
        return self._pages.rows(pages)
