"""Decoded blocks of tables, bounded in bytes over all databases, and the rows of one block.

A table keeps its blocks in a list of slots, and a hit is a look into that list: no lock, no hashing, no order to maintain.
The reader only marks the block as used. The cache is a clock: when it is full, a hand goes round the blocks, takes the mark
off those that have one, and empties the slot of the first that has none.

Threads: any. Hits take no lock; admitting and forgetting take one, for a few list operations."""

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
"""What a row costs beyond its key and value: two heads of 33 bytes, 8 bytes in each of three lists, about 50 in a dictionary
and 28 for a number there."""


class TableBlock:
    """The rows of a block as Python objects: reads of single keys and of short ranges make no others."""

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
        # Versions of a key are in falling order: its first row, entered last, is the newest.
        self._rows = dict(zip(reversed(self.keys), range(len(self.keys) - 1, -1, -1)))
        self.is_plain = not dead and len(self._rows) == len(self.keys)
        """Whether no key is here twice and no row is a tombstone."""
        self.charge = keys.nbytes + values.nbytes + batch.num_rows * ROW_OVERHEAD_BYTES
        self.used = False
        """Set by whoever reads it again, taken off by the cache's hand."""

    def find(self, key: bytes, lsn: int) -> VersionedValue | None:
        """The newest version of a key at or below an lsn."""
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
    """The bytes of each row; empty for nulls."""
    _, offsets, data = column.buffers()
    whole = data.to_pybytes() if data is not None else b""
    ends = memoryview(offsets).cast("i")[column.offset : column.offset + len(column) + 1].tolist()
    return [whole[start:end] for start, end in pairwise(ends)]


Slots = list[TableBlock | None]
"""The blocks of a table that are in memory, by number."""


class BlockCache:
    """Which blocks stay in memory; `used_bytes` never exceeds `bytes_max` when `admit` returns."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        # guarded by _lock
        self._lock = threading.Lock()
        self._ring: deque[tuple[Slots, int, TableBlock]] = deque()
        self.used_bytes = 0
        self.admitted = 0

    def admit(self, slots: Slots, number: int, block: TableBlock) -> TableBlock:
        """Keep a block in its slot, unless it needs more than a quarter of the cache; the one to use, which another thread
        may have brought first."""
        if block.charge * 4 > self.bytes_max:
            return block
        with self._lock:
            if (present := slots[number]) is not None:
                return present
            while self.used_bytes + block.charge > self.bytes_max:
                self._evict_one()  # before the new one is in the ring: it has no mark yet, and would be the first to go
            slots[number] = block
            self._ring.append((slots, number, block))
            self.used_bytes += block.charge
            self.admitted += 1
        return block

    def _evict_one(self) -> None:
        """Go round to the first block that nobody has used since the last time. REQUIRES the lock. Ends: each block passed
        loses its mark, and readers that mark them again hold up one round at most a few blocks long."""
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
        """Let the blocks of a table go."""
        with self._lock:
            kept = [entry for entry in self._ring if entry[0] is not slots]
            self.used_bytes -= sum(entry[2].charge for entry in self._ring if entry[0] is slots)
            self._ring = deque(kept)
            slots[:] = [None] * len(slots)

    def __len__(self) -> int:
        return len(self._ring)
