"""The page cache: bytes of pages, bounded, shared by all databases of a process (docs/decisions/037-caches-of-a-page-read.md).

A *location* is where a version's bytes are: (origin, lsn) in a WAL, (artifact, page) in a chunk. It is immutable, so an entry
is never wrong, and forks and snapshots that share an object share its entries. The cache holds two generations: one is full at
half the budget, then becomes the old one, and the former old one is forgotten. What is used meanwhile moves over. Nearly as
good as least-recently-used, and a hit costs no bookkeeping at all.

A *resolved* entry says "for snapshots in [lsn, upto] this is the page": it saves the look-up, not only the read. `upto` is the
snapshot it was resolved for; entries are replaced, never widened in place. Cold scans read past the cache: they neither fill
it nor age it.

Threads: any. Single dict operations are atomic; two threads that miss at once read the page twice, which is harmless.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

Resolved = tuple[int, int, bytes]
"""(lsn, upto, page)."""

RESOLVED_MAX = 131_072
"""Resolved entries per database: about 20 MB of tuples and ints at most, the bytes of the pages apart."""


class PageCache:
    """Pages by location, and what was resolved of each database."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.misses = 0
        self.lookups = 0
        self.resolved_hits = 0
        """Reads that a resolved entry answered, as far as their snapshots have told."""
        self._half = max(bytes_max // 2, 1)
        self._young: dict[Hashable, bytes] = {}
        self._old: dict[Hashable, bytes] = {}
        self._young_bytes = 0
        self._old_bytes = 0
        self._turning = threading.Lock()
        self._resolved: dict[int, dict[int, Resolved]] = {}
        self._zeros: dict[int, bytes] = {}

    # ── by location ───────────────────────────────────────────────────────────────────────────────────────────────────
    def get(self, location: Hashable) -> bytes | None:
        """The page at a location, if it is here."""
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
        """Remember a page."""
        size = len(page)
        if self._young_bytes + size > self._half:
            self._turn(size)
        if location not in self._young:
            self._young_bytes += size
        self._young[location] = page

    def _turn(self, size: int) -> None:
        with self._turning:
            if self._young_bytes + size <= self._half:
                return  # somebody else has just turned it: once more would forget what is in use
            self._old, self._young = self._young, {}
            self._old_bytes, self._young_bytes = self._young_bytes, 0
            # Resolved entries would keep alive what has just been forgotten.
            for pages in list(self._resolved.values()):
                pages.clear()

    def zeros(self, page_size: int) -> bytes:
        """The one page of zeros of this size."""
        return self._zeros.get(page_size) or self._zeros.setdefault(page_size, bytes(page_size))

    # ── by page ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def resolved(self, db_id: int) -> dict[int, Resolved]:
        """Page → resolved entry of one database; the caller keeps the dict and looks into it directly."""
        return self._resolved.setdefault(db_id, {})

    def remember(self, resolved: dict[int, Resolved], page: int, entry: Resolved) -> None:
        """Enter what a look-up has found."""
        if len(resolved) >= RESOLVED_MAX:  # pages of zeros are shared: their bytes do not bound their number
            resolved.clear()
        resolved[page] = entry

    def forget(self, db_id: int) -> None:
        """A database was closed or dropped: what was resolved for it is no longer needed."""
        self._resolved.pop(db_id, None)

    # ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def used_bytes(self) -> int:
        """Bytes of pages held; pages that moved to the young generation are counted in both."""
        return self._young_bytes + self._old_bytes

    @property
    def hit_ratio(self) -> float:
        """Of all reads that asked the cache."""
        asked = self.lookups + self.resolved_hits
        return 1 - self.misses / asked if asked else 0.0
