"""The block cache: decoded blocks of tables, bounded in bytes over all databases; and the rows of one block.

A table keeps its blocks in a list of slots, and a hit is a lookup in that list: no lock, no hashing, no LRU order to maintain.
The reader only marks the block as used. Eviction is the CLOCK algorithm: when the cache is full, a hand moves over the blocks,
clears the mark of those that have one, and evicts the first that has none.

Threads: any. Hits take no lock; `admit` and `forget` take one, for a few list operations."""

from __future__ import annotations

import threading
from array import array
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

VersionedValue = tuple[int, bytes | None]

ROW_OVERHEAD_BYTES = 170
"""Memory of a row beyond its key and value: two object headers of 33 bytes, 8 bytes in each of three lists, about 50 in a
dictionary and 28 for an integer there."""


class TableBlock:
    """The rows of a block as Python objects, so that reads of single keys and short ranges create none."""

    __slots__ = ("_rows", "charge", "is_plain", "keys", "lsns", "used", "values")

    def __init__(self, batch: pa.RecordBatch) -> None:
        keys, values, lsns, tombstones = batch.columns
        self.keys: list[bytes] = _pieces(keys)
        self.values: list[bytes | None] = _pieces(values)
        """`None` for a tombstone."""
        self.lsns = array("Q", lsns.buffers()[1][: 8 * len(lsns)].to_pybytes())
        dead = tombstones.true_count
        if dead:
            for row, is_dead in enumerate(tombstones.to_pylist()):
                if is_dead:
                    self.values[row] = None
        # Versions of a key are in descending order: its first row, inserted last, is the newest.
        self._rows = dict(zip(reversed(self.keys), range(len(self.keys) - 1, -1, -1)))
        self.is_plain = not dead and len(self._rows) == len(self.keys)
        """Whether no key occurs twice and no row is a tombstone."""
        self.charge = keys.nbytes + values.nbytes + batch.num_rows * ROW_OVERHEAD_BYTES
        self.used = False
        """Set by readers on every hit, cleared by the cache's hand."""

    def find(self, key: bytes, lsn: int) -> VersionedValue | None:
        """Return the newest version of a key at or below `lsn`, or `None`."""
        row = self._rows.get(key)
        if row is None:
            return None
        lsns = self.lsns
        if lsns[row] > lsn:
            keys = self.keys
            while lsns[row] > lsn:
                row += 1
                if row == len(keys) or keys[row] != key:
                    return None
        return lsns[row], self.values[row]


def _pieces(column: pa.BinaryArray) -> list[Any]:
    """Return the bytes of each row; empty for nulls."""
    _, offsets, data = column.buffers()
    values = data.to_pybytes() if data is not None else b""
    ends = memoryview(offsets).cast("i")[column.offset : column.offset + len(column) + 1].tolist()
    return [values[start:end] for start, end in pairwise(ends)]


Slots = list[TableBlock | None]
"""The blocks of a table that are in memory, by number."""


class BlockCache:
    """Decides which blocks stay in memory. `used_bytes` never exceeds `bytes_max` when `admit` returns."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        # guarded by _lock
        self._lock = threading.Lock()
        self._ring: deque[tuple[Slots, int, TableBlock]] = deque()
        self.used_bytes = 0
        self.admitted = 0

    def admit(self, slots: Slots, number: int, block: TableBlock) -> TableBlock:
        """Keep a block in its slot, unless it needs more than a quarter of the cache. Return the block to use: another thread
        may have filled the slot first."""
        if block.charge * 4 > self.bytes_max:
            return block
        with self._lock:
            # Two threads may have decoded the same block; counting both would leak bytes of the limit.
            if (present := slots[number]) is not None:
                return present
            while self.used_bytes + block.charge > self.bytes_max:
                self._evict_one()  # before the new block is in the ring: without a mark it could be evicted itself
            slots[number] = block
            self._ring.append((slots, number, block))
            self.used_bytes += block.charge
            self.admitted += 1
        return block

    def _evict_one(self) -> None:
        """Evict the first block that has not been used since the hand last passed it. REQUIRES the lock.

        Readers may set marks again meanwhile, so after two rounds the next block is evicted regardless."""
        ring = self._ring
        for _ in range(2 * len(ring)):
            slots, number, block = ring.popleft()
            if not block.used:
                break
            block.used = False
            ring.append((slots, number, block))
        else:
            slots, number, block = ring.popleft()
        slots[number] = None
        self.used_bytes -= block.charge

    def forget(self, slots: Slots) -> None:
        """Drop the blocks of a table."""
        with self._lock:
            kept = [entry for entry in self._ring if entry[0] is not slots]
            self.used_bytes -= sum(entry[2].charge for entry in self._ring if entry[0] is slots)
            self._ring = deque(kept)
            slots[:] = [None] * len(slots)

    def __len__(self) -> int:
        return len(self._ring)
