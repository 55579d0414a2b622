"""Pages of a database's newest version, for connections whose own pages are out of date.

When somebody has committed, SQLite drops the pages that another connection has in its cache, all of them, and asks for those it
needs again: in a load of small writes some six a transaction, which came from the log one by one, with a read and a checksum
each (20 µs). Here they are a look into a dict.

Terms
  recall   a run of commits, each built on the one before it, and the newest image of each page that was written or read in it
  since    the first version of the run; `upto`: the last one

Rules
  1. An entry (lsn, image) is the page as versions from `lsn` to `upto` have it. Every commit of the run enters what it has
     written, and raises `upto` afterwards: so whoever reads looks at `upto` first, and at the entry behind it.
  2. What was read of a version between `since` and `upto` is entered only where there is no entry: nobody in the run has
     written that page then, and the version before `since` does not matter.
  3. A run ends, and the next one begins empty, with a commit that is not built on its end (somebody has written past SQLite),
     that has cut the database off or was too large to be kept, or for which there is no room. So no entry is of a page beyond
     the end of a version that may use it.
  4. Pages are of use as long as somebody commits. `rest`, called every second, forgets them when nobody does.

Threads: `note` by who has the turn to write (`locks.py`), the rest by any. Single steps on dicts are atomic. Who still has a
former run in hand reads and writes what is true and soon forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

KEPT_BYTES = 8 << 20
"""Pages of one database, at most; what was read takes half of it and leaves the other half to what is written."""


class Recall:
    """A run of commits; see the rules above."""

    __slots__ = ("pages", "room", "since", "upto")

    def __init__(self, lsn: int, room: int = 0) -> None:
        self.since = self.upto = lsn
        self.room = room
        self.pages: dict[int, tuple[int, bytes]] = {}

    def enter(self, page: int, lsn: int, image: bytes) -> None:
        """A page was read, as the version `lsn` has it (rule 2)."""
        if self.since <= lsn <= self.upto and len(self.pages) * 2 < self.room:
            self.pages.setdefault(page, (lsn, image))


class NewestPages:
    """What all connections to one database share of it."""

    __slots__ = ("_rested", "recall")

    def __init__(self) -> None:
        self.recall = Recall(-1)
        self._rested = -1

    def note(self, base_lsn: int, lsn: int, images: Mapping[int, bytes] | None, page_size: int) -> None:
        """Somebody has committed the version `lsn` on top of another one. Without images: too much to be kept (rule 3)."""
        recall, room = self.recall, KEPT_BYTES // page_size
        if images is None or recall.upto != base_lsn or len(recall.pages) + len(images) > room:
            self.recall = recall = Recall(lsn, room)
        if images is not None and len(images) <= room:
            recall.pages.update({page: (lsn, image) for page, image in images.items()})
        recall.upto = lsn

    def rest(self) -> None:
        """Forget the pages when nobody has committed since the last call (rule 4)."""
        upto = self.recall.upto
        if upto == self._rested:
            self.forget()
        self._rested = upto

    def forget(self) -> None:
        """Begin anew."""
        self.recall = Recall(-1)
