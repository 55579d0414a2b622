"""A least-recently-used cache bounded in bytes, for frames and indexes of stream segments and for parts of archived files.

The caches of pages (`pages/cache.py`) and of table blocks (`lsm/block_cache.py`) are different structures: a hit there takes no
lock and maintains no order (docs/decisions/080-block-cache.md).

Threads: any; one lock, held for a few dictionary operations.

    >>> cache: ByteCache[str, bytes] = ByteCache(100)
    >>> cache.put("a", b"x", 20), cache.get("a"), cache.used_bytes
    (None, b'x', 20)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """Values by key, each with its size; `used_bytes` never exceeds `bytes_max` when `put` returns."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        # guarded by _lock
        self._lock = threading.Lock()
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.used_bytes = 0

    def get(self, key: K) -> V | None:
        """Return the cached value, or `None`."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, size_bytes: int) -> None:
        """Cache a value, unless it takes more than a quarter of the cache: it could evict nearly everything else."""
        if size_bytes * 4 > self.bytes_max:
            return
        with self._lock:
            previous = self._entries.pop(key, None)
            self.used_bytes += size_bytes - (previous[1] if previous is not None else 0)
            self._entries[key] = (value, size_bytes)
            while self.used_bytes > self.bytes_max:
                _, (_, evicted_bytes) = self._entries.popitem(last=False)
                self.used_bytes -= evicted_bytes

    def forget(self, key: K) -> None:
        """Remove a value, if it is cached."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.used_bytes -= entry[1]

    def __len__(self) -> int:
        return len(self._entries)
