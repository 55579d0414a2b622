"""The page cache: a bounded cache of page images, shared by all databases of a process
(docs/decisions/037-caches-of-a-page-read.md).

A *location* identifies a version's bytes: (origin, lsn) in a WAL, (artifact, page) in a chunk. Bytes at a location never
change, so an entry is never stale, and forks and snapshots that share an object share its entries. The cache has two
generations: when the young one reaches half the budget, it becomes the old one, and the previous old one is dropped. An entry
that is used in the old generation moves to the young one. This is nearly as good as least-recently-used, and a hit needs no
bookkeeping.

A *resolved* entry means "for snapshots in [lsn, upto] this is the page": it saves the look-up, not only the read. `upto` is the
snapshot it was resolved for; entries are replaced, never widened in place. Cold scans bypass the cache: they neither fill it
nor age it.

Threads: any. Single dict operations are atomic; two threads that miss at once read the page twice, which is harmless.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from weakref import WeakValueDictionary

Resolved = tuple[int, int, bytes]
"""(lsn, upto, page)."""

RESOLVED_MAX = 131_072
"""Resolved entries per database: at most about 20 MB of tuples and ints, not counting the bytes of the pages."""


class ResolvedPages(dict[int, Resolved]):
    """Page → resolved entry of one database. A class only because a plain dict cannot be referenced weakly."""

    __slots__ = ("__weakref__",)


class PageCache:
    """Pages by location, and the resolved entries of each database."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.misses = 0
        self.lookups = 0
        self.resolved_hits = 0
        """Reads served by a resolved entry, as far as their snapshots have reported them."""
        self._half = max(bytes_max // 2, 1)
        self._young: dict[Hashable, bytes] = {}
        self._old: dict[Hashable, bytes] = {}
        self._young_bytes = 0
        self._old_bytes = 0
        self._turning = threading.Lock()
        self._resolved: WeakValueDictionary[int, ResolvedPages] = WeakValueDictionary()
        """Weak: each is kept by those who read through it, and `_turn` clears it as long as it exists."""
        self._zeros: dict[int, bytes] = {}

    # ── by location ───────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, location: Hashable) -> bytes | None:
        """Return the page at a location, `None` if it is not cached."""
        self.lookups += 1
        page = self._young.get(location)
        if page is not None:
            return page
        page = self._old.get(location)
        if page is None:
            self.misses += 1
            return None
        self.put(location, page)
        return page

    def put(self, location: Hashable, page: bytes) -> None:
        """Add a page."""
        size = len(page)
        if self._young_bytes + size > self._half:
            self._turn(size)
        # Not under a lock: a lost update only makes this generation somewhat larger or smaller.
        if location not in self._young:
            self._young_bytes += size
        self._young[location] = page

    def _turn(self, size: int) -> None:
        with self._turning:
            if self._young_bytes + size <= self._half:
                return  # another thread has just done this; doing it again would drop pages in use
            self._old, self._young = self._young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
            # Resolved entries would keep the dropped pages alive.
            for pages in list(self._resolved.values()):
                pages.clear()

    def zeros(self, page_size: int) -> bytes:
        """Return the shared page of zeros of this size."""
        return self._zeros.get(page_size) or self._zeros.setdefault(page_size, bytes(page_size))

    # ── by page ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def resolved(self, db_id: int) -> ResolvedPages:
        """Return page → resolved entry of one database; the caller keeps the dict and reads it directly."""
        with self._turning:  # two dicts of one database would not both be cleared
            return self._resolved.setdefault(db_id, ResolvedPages())

    def remember(self, resolved: ResolvedPages, page: int, entry: Resolved) -> None:
        """Add the result of a look-up."""
        if len(resolved) >= RESOLVED_MAX:  # zero pages are shared, so the byte budget does not bound their number
            resolved.clear()
        resolved[page] = entry

    def forget(self, db_id: int) -> None:
        """Drop the resolved entries of a database that was closed or dropped."""
        # It stays registered: views and readers of published versions continue to use it, and `_turn` must clear it.
        if (pages := self._resolved.get(db_id)) is not None:
            pages.clear()

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def used_bytes(self) -> int:
        """Bytes of cached pages; pages that moved to the young generation count twice."""
        return self._young_bytes + self._old_bytes

    @property
    def hit_ratio(self) -> float:
        """The fraction of reads through the cache that were hits."""
        reads = self.lookups + self.resolved_hits
        return 1 - self.misses / reads if reads else 0.0
