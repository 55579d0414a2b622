"""Versions that stay readable between the requests of one sync.

A replica that fetches in several requests names the version of the first answer. A lease holds that version from the first
request on, and for `HOLD_SECONDS` after the last one; a checkpoint waits for it no longer than that, or sets it aside
(`pages/readers.py`). At most `HELD_MAX` versions are held; the least recently requested one is released first.

Threads: any; one lock. Raises what opening a version raises.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from quire.pages.page_source import Mark
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot

HOLD_SECONDS = 60.0
HELD_MAX = 256
TAGS = {"for": "replica"}


@contextmanager
def closed_on_failure(reader: Snapshot) -> Iterator[Snapshot]:
    """Close the reader if the block raises: an answer that is not sent would hold its version until the lease expires."""
    try:
        yield reader
    except BaseException:
        reader.close()
        raise


class HeldVersions:
    """Leases on versions, by database and lsn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, int], Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def newest(self, store: PageStore, *, hold: bool) -> Snapshot:
        """Return a reader of the newest durable version; with `hold` the version stays available to later requests."""
        with closed_on_failure(store.open_snapshot(tags=TAGS)) as reader:
            if hold and reader.lsn:
                self._hold(store, reader.mark)
            return reader

    def at(self, store: PageStore, lsn: int) -> Snapshot:
        """Return a reader of a version that is held or can still be opened; it is held from now on."""
        with self._lock:
            held = self._held.get((store.db_id, lsn))
        if held is not None and held.is_open:
            reader = store.open_mark(held.mark, tags=TAGS)
        else:
            reader = store.open_snapshot(at=lsn, tags=TAGS)
        with closed_on_failure(reader):
            if reader.lsn == lsn:
                self._hold(store, reader.mark)
            return reader

    def _hold(self, store: PageStore, mark: Mark) -> None:
        key = (store.db_id, mark.lsn)
        with self._lock:
            held = self._held.pop(key, None)
            if held is not None and held.is_open:
                held.renew()
            else:
                held = store.open_mark(mark, tags=TAGS, ttl_seconds=HOLD_SECONDS)
            self._held[key] = held
            for old in [other for other, reader in self._held.items() if not reader.is_open]:
                del self._held[old]
            while len(self._held) > HELD_MAX:
                self._held.popitem(last=False)[1].close()

    def close(self) -> None:
        """Release all of them."""
        with self._lock:
            for reader in self._held.values():
                reader.close()
            self._held.clear()
