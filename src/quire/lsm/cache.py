"""Decoded blocks, the recently used ones, within a bound of bytes.

Rules
  1. `used_bytes` never exceeds the bound when `put` returns; a block that is larger than the bound is not kept.
  2. A block is charged what it takes decoded, with the Python objects that point reads make of it.
  3. Keys are never used again for other bytes: (number of an open table in this process, number of the block).

Threads: any; one lock, held for a few dictionary steps.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import count
from typing import Generic, Protocol, TypeVar

from quire.core.limits import MIB

CacheKey = tuple[int, int]


class Charged(Protocol):
    """What can be kept."""

    @property
    def charge(self) -> int: ...


B = TypeVar("B", bound=Charged)


class BlockCache(Generic[B]):
    """The least recently used go first."""

    def __init__(self, bytes_max: int = 64 * MIB) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._blocks: OrderedDict[CacheKey, B] = OrderedDict()

    def new_table(self) -> int:
        """A number for a table that is opened (rule 3)."""
        return next(self._numbers)

    def get(self, key: CacheKey) -> B | None:
        """A block, if it is kept."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                self.misses += 1
            else:
                self.hits += 1
                self._blocks.move_to_end(key)
            return block

    def put(self, key: CacheKey, block: B) -> None:
        """Keep a block, and let others go for it."""
        charge = block.charge
        if charge > self.bytes_max:
            return
        with self._lock:
            former = self._blocks.pop(key, None)
            self.used_bytes += charge - (former.charge if former is not None else 0)
            self._blocks[key] = block
            while self.used_bytes > self.bytes_max:
                _, oldest = self._blocks.popitem(last=False)
                self.used_bytes -= oldest.charge

    def forget(self, table: int, blocks: int) -> None:
        """A table is closed: none of its blocks will be asked for again."""
        with self._lock:
            for number in range(blocks):
                block = self._blocks.pop((table, number), None)
                if block is not None:
                    self.used_bytes -= block.charge

    def __len__(self) -> int:
        return len(self._blocks)
