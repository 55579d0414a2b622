"""A cache bounded in bytes, least recently used first out; shared by the streams of a store.

Rules
  1. An entry larger than a quarter of the cache is not kept: it would push out everything else.

Threads: any; one lock, held for dictionary steps only.

    >>> cache = ByteCache(100)
    >>> cache.put("a", b"x", 20), cache.get("a"), cache.bytes
    (None, b'x', 20)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any


class ByteCache:
    """Values by key, with what each takes."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        # guarded by _lock
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def get(self, key: Hashable) -> Any:
        """The value of a key, `None` if it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self.misses += 1
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            return entry[0]

    def put(self, key: Hashable, value: Any, size_bytes: int) -> None:
        """Keep a value, for as long as there is room for it."""
        if size_bytes * 4 > self.bytes_max:
            return
        with self._lock:
            former = self._entries.pop(key, None)
            self.bytes += size_bytes - (former[1] if former is not None else 0)
            self._entries[key] = (value, size_bytes)
            while self.bytes > self.bytes_max:
                _, (_, size) = self._entries.popitem(last=False)
                self.bytes -= size

    def forget(self, key: Hashable) -> None:
        """Let a value go."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                self.bytes -= entry[1]
