"""A version of a database as a value: everything that is needed to read it, and no manifest (P16).

Terms
  link   one artifact of a slot's chain, with its size and where its object is
  pin    a WAL segment up to an lsn: what no chunk holds yet
  view   links + pins: immutable, picklable, and small: 40 bytes an artifact, whatever the size of the database

Rules
  1. A view is opened with `Sources` alone: an object store, and the store's directory where it is shared. Pins are read from
     their segments' files if they are there, else from their objects.
  2. The newest pinned version above what the chain covers wins, else the chain, else zeros: a page that never was written (P8).
  3. A chain that covers more than the view's version is never read: `SnapshotGone`, as for any reader (P8).
  4. A view says nothing about how long its artifacts stay: a snapshot's row, or a lease, stands behind it. Who opened it with a
     manifest at hand hears `SnapshotGone` when that row is gone.

Threads: a reader belongs to one at a time, a view to any. Executor-safe. Building one needs a manifest: `view_build.py`.
Raises `OutOfRange`, `ReadOnly`, `SnapshotGone`, and what `Sources` raises.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from quire.core.errors import Corruption, OutOfRange, ReadOnly, SnapshotGone
from quire.core.ids import ArtifactKey, ArtifactKind, Epoch
from quire.durable.files import OsDisk, OsFile
from quire.durable.names import object_key
from quire.objects.api import ObjectStore
from quire.pages.cache import PageCache
from quire.pages.framemap import FrameMap, PinnedSegment, Regions
from quire.pages.sources import ChunkPlace, Sources

LINK_DTYPE = np.dtype(
    [
        ("slot", "<u4"), ("origin_db_id", "<u4"), ("generation", "<u4"), ("delta_id", "<u2"), ("kind", "u1"),
        ("reserved", "u1"), ("covered_lsn", "<u8"), ("size_bytes", "<u8"), ("space", "<u4"), ("name", "<u4"),
    ]
)  # fmt: skip
"""One artifact of a chain. `space` counts `SnapshotView.spaces`, `name` counts `SnapshotView.names`."""

ALONE_BYTES = 16 << 20
"""Pages kept in memory by a reader that is opened by itself."""
CHAINS_KEPT = 4_096
SCAN_PAGES = 1_024
"""Pages that `scan` reads at a time."""

if LINK_DTYPE.itemsize != 40:
    raise AssertionError("a link has another size than the page says")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotView:
    """See the rules above."""

    db_id: int
    snapshot_id: int
    """Of the row behind it; 0 if a lease stands behind it."""
    name: str
    page_size: int
    pages_per_chunk: int
    lsn: int
    size_pages: int
    time_ms: int
    segment_id: int
    links: bytes
    """`LINK_DTYPE`, by slot, each chain in its order."""
    spaces: tuple[tuple[str, str], ...]
    """(URL of the object store, prefix of keys in it)."""
    names: tuple[str, ...]
    """Keys of artifacts that are not named after themselves; the first is empty: the others are."""
    pins: tuple[PinnedSegment, ...]
    """By first lsn."""

    @property
    def epoch(self) -> Epoch:
        """The version, as the feed and messages print it."""
        return Epoch(self.lsn, self.segment_id)

    def open(self, sources: Sources, *, regions: Regions | None = None) -> ViewReader:
        """A reader of this version."""
        return ViewReader(self, sources, regions=regions)

    def open_alone(
        self, open_store: Callable[[str], ObjectStore], *, root: str = "", cache_bytes: int = ALONE_BYTES
    ) -> ViewReader:
        """A reader that needs no manifest: object stores by URL and, for segments that were not uploaded, the store's
        directory `root` (P16)."""
        disk = OsDisk() if root else _NoDisk()
        return ViewReader(self, Sources(root=root, disk=disk, open_store=open_store, cache=PageCache(cache_bytes)))


def without_object(view: SnapshotView) -> list[ArtifactKey]:
    """Its pinned segments that have no object yet: who shares no disk with the owner cannot read them (P16)."""
    return [
        ArtifactKey(pin.origin_db_id, ArtifactKind.WAL, pin.segment_id, 0)
        for pin in view.pins
        if pin.place is None or not pin.place.object_key
    ]


class _NoDisk(OsDisk):
    """A disk with nothing on it, so that nobody's files are taken for the store's."""

    __slots__ = ()

    def open(self, path: str, **_: bool) -> OsFile:
        raise FileNotFoundError(path)

    def exists(self, _: str) -> bool:
        return False


class ViewReader:
    """Reads one view. Holds no lease."""

    def __init__(
        self,
        view: SnapshotView,
        sources: Sources,
        *,
        regions: Regions | None = None,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        # constant after construction
        self.view = view
        self.lsn = view.lsn
        self.size_pages = view.size_pages
        self.page_size = view.page_size
        self.time_ms = view.time_ms
        self.epoch = view.epoch
        self._sources = sources
        self._is_gone = is_gone
        self._links = np.frombuffer(view.links, LINK_DTYPE)
        self._slots = array("I", self._links["slot"].tobytes())
        self._map = FrameMap.of(regions or Regions(sources), view.pins, view.lsn)
        self._places = {(pin.origin_db_id, pin.segment_id): pin.place for pin in view.pins}
        # a cache
        self._chains: dict[int, tuple[int, tuple[ChunkPlace, ...]]] = {}

    def read_page(self, page: int) -> bytes:
        """The page as of this version."""
        self._check(page)
        try:
            return self._read(page)
        except Corruption:
            self._forget(page)  # a handle may be older than the copy it leads to
        try:
            return self._read(page)
        except Corruption as error:
            raise self._explained(error) from error

    def _read(self, page: int) -> bytes:
        slot, offset = divmod(page, self.view.pages_per_chunk)
        covered, chain = self._chain(slot)
        found = self._map.find(page)
        if found is not None and found[0] > covered:
            lsn, origin, segment_id = found
            return self._sources.version(origin, segment_id, lsn, page, place=self._places[origin, segment_id])
        image = self._sources.chain_page(chain, offset)
        return image if image is not None else self._sources.cache.zeros(self.page_size)

    def read_pages(self, pages: Iterable[int], *, cold: bool = False) -> dict[int, bytes]:
        """Several pages at once, page → image; neighbours share reads. `cold` leaves caches alone, under a limit."""
        wanted = list(dict.fromkeys(pages))
        for page in wanted:
            self._check(page)
        try:
            return self._read_many(wanted, cold=cold)
        except Corruption:
            return {page: self.read_page(page) for page in wanted}

    def _read_many(self, wanted: list[int], *, cold: bool) -> dict[int, bytes]:
        versions: dict[tuple[int, int], list[tuple[int, int]]] = {}
        slots: dict[int, list[int]] = {}
        for page in wanted:
            slot, offset = divmod(page, self.view.pages_per_chunk)
            found = self._map.find(page)
            if found is not None and found[0] > self._chain(slot)[0]:
                versions.setdefault((found[1], found[2]), []).append((page, found[0]))
            else:
                slots.setdefault(slot, []).append(offset)
        images: dict[int, bytes] = {}
        for (origin, segment_id), of_segment in versions.items():
            place = self._places[origin, segment_id]
            images.update(self._sources.versions(origin, segment_id, of_segment, place=place, cold=cold))
        for slot, offsets in slots.items():
            first = slot * self.view.pages_per_chunk
            got = self._sources.chain_pages(self._chain(slot)[1], offsets, cold=cold)
            images.update((first + offset, image) for offset, image in got.items())
        zeros = self._sources.cache.zeros(self.page_size)
        return {page: images.get(page, zeros) for page in wanted}

    def scan(self, start: int = 0, stop: int | None = None, *, cold: bool = True) -> Iterator[tuple[int, bytes]]:
        """(page, image) of a range of pages, default all, in order; some MiB are read at a time."""
        stop = self.size_pages if stop is None else min(stop, self.size_pages)
        for first in range(start, stop, SCAN_PAGES):
            yield from self.read_pages(range(first, min(first + SCAN_PAGES, stop)), cold=cold).items()

    def write_page(self, page: int, _: bytes) -> None:
        """Always `ReadOnly`: snapshots are for reading."""
        raise ReadOnly("a snapshot is for reading", hint="fork it to write", page=page)

    def close(self) -> None:
        """Nothing is held: closing is for symmetry."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _check(self, page: int) -> None:
        if not 0 <= page < self.size_pages:
            raise OutOfRange("the database has no such page", page=page, size_pages=self.size_pages)

    def _chain(self, slot: int) -> tuple[int, tuple[ChunkPlace, ...]]:
        """(covered lsn, places) of a slot's chain."""
        known = self._chains.get(slot)
        if known is None:
            if len(self._chains) >= CHAINS_KEPT:
                self._chains.clear()
            rows = self._links[bisect_left(self._slots, slot) : bisect_right(self._slots, slot)]
            covered = int(rows["covered_lsn"][-1]) if len(rows) else 0
            if covered > self.lsn:
                what = "the chunks of this view hold more than its version"
                raise SnapshotGone(
                    what, hint="open another one", db_id=self.view.db_id, lsn=self.lsn, covered_lsn=covered
                )
            known = self._chains[slot] = (covered, tuple(self._place(row) for row in rows))
        return known

    def _place(self, row: np.void) -> ChunkPlace:
        view = self.view
        key = ArtifactKey(
            int(row["origin_db_id"]),
            ArtifactKind(int(row["kind"])),
            int(row["slot"]),
            int(row["generation"]),
            int(row["delta_id"]),
        )
        url, prefix = view.spaces[int(row["space"])]
        name = view.names[int(row["name"])] or object_key(key)
        return ChunkPlace(
            key=key, url=url, object_key=f"{prefix}/{name}" if prefix else name, size_bytes=int(row["size_bytes"])
        )

    def _forget(self, page: int) -> None:
        for place in self._chain(page // self.view.pages_per_chunk)[1]:
            self._sources.forget_chunk(place.key)
        found = self._map.find(page)
        if found is not None:
            self._sources.forget_segment(found[1], found[2])

    def _explained(self, error: Corruption) -> Corruption | SnapshotGone:
        if not self._is_gone():
            return error
        return SnapshotGone(
            "the snapshot was dropped while it was read",
            hint="open another one",
            db_id=self.view.db_id,
            snapshot_id=self.view.snapshot_id,
            cause=str(error),
        )
