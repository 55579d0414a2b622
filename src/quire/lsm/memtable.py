"""What was written and is not in a table yet: a dictionary, with older versions only where a snapshot needs them.

An entry is (lsn, value, older). Entries are replaced, never changed: readers walk them without a lock. A key that comes while
a scan runs has a higher lsn than the scan reads at, and may be missed.

Threads: one writer at a time (the engine's write lock); readers any."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from itertools import repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.merge import Mark

Entry = tuple[int, bytes | None, "Entry | None"]

ENTRY_BYTES = 150
"""What an entry takes beyond its key and value: tuple, dictionary slot, object heads."""
MARK_ROWS = 1_024
"""A part of a scan may begin at every so many keys."""


class Memtable:
    """The newest writes of a database, by key."""

    __slots__ = ("_batch", "_sorted", "_sorting", "bytes", "entries", "is_frozen", "lsn_max")

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.bytes = 0
        self.lsn_max = 0
        self.is_frozen = False
        self._sorting = threading.Lock()
        self._sorted: list[bytes] = []
        self._batch: pa.RecordBatch | None = None

    def put_all(self, lsn: int, items: Mapping[bytes, bytes | None], payload_bytes: int, snapshot_lsn: int) -> None:
        """Enter a batch. `snapshot_lsn` is the highest that somebody reads at, or 0: versions above it are not kept."""
        if snapshot_lsn:
            entries = self.entries
            for key, value in items.items():
                former = entries.get(key)
                if former is not None and former[0] > snapshot_lsn:
                    former = former[2]  # nobody reads at it; who reads further back still does
                entries[key] = (lsn, value, former)
        else:
            self.entries.update(zip(items, zip(repeat(lsn), items.values(), repeat(None))))
        self.bytes += payload_bytes + ENTRY_BYTES * len(items)
        self.lsn_max = lsn

    def get(self, key: bytes, lsn: int) -> tuple[int, bytes | None] | None:
        """The newest version of a key at or below an lsn."""
        entry = self.entries.get(key)
        while entry is not None:
            if entry[0] <= lsn:
                return entry[0], entry[1]
            entry = entry[2]
        return None

    # ── sorted ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def sorted_keys(self) -> list[bytes]:
        """The keys in order; a list that is never changed."""
        if len(self._sorted) != len(self.entries):
            with self._sorting:
                known = self._sorted
                new = list(self.entries)[
                    len(known) :
                ]  # a dictionary keeps the order of insertion, and nothing is taken out
                new.sort()
                both = known + new
                both.sort()  # two runs: this merges them
                self._sorted = both
        return self._sorted

    def marks(self, low: bytes, high: bytes | None) -> list[Mark]:
        """Where parts of a scan may begin."""
        keys = self.sorted_keys()
        start = bisect_left(keys, low)
        end = len(keys) if high is None else bisect_left(keys, high)
        row_bytes = self.bytes // max(1, len(keys))
        return [(keys[at], row_bytes * MARK_ROWS) for at in range(start, end, MARK_ROWS)]

    def rows_between(self, low: bytes, high: bytes | None) -> list[pa.RecordBatch]:
        """The rows with keys in [low, high), all versions."""
        keys = self.sorted_keys()
        start = bisect_left(keys, low) if low else 0
        end = len(keys) if high is None else bisect_left(keys, high)
        if start >= end:
            return []
        whole = self.is_frozen and start == 0 and end == len(keys)
        if whole and self._batch is not None:
            return [self._batch]
        batch = _rows(keys[start:end], self.entries)
        if whole:
            self._batch = batch
        return [batch]

    def freeze(self) -> None:
        """No more writes from here on."""
        self.is_frozen = True


def _rows(keys: list[bytes], entries: dict[bytes, Entry]) -> pa.RecordBatch:
    lsns, values, olders = zip(*map(entries.__getitem__, keys))
    if any(olders):
        rows = list[tuple[bytes, int, bytes | None]]()
        for key in keys:
            entry: Entry | None = entries[key]
            while entry is not None:
                rows.append((key, entry[0], entry[1]))
                entry = entry[2]
        names, lsns, values = zip(*rows)
        keys = list(names)
    import pyarrow as pa  # not before a memtable is read as rows: who gets and puts needs no Arrow

    from quire.lsm.sst_format import SCHEMA

    value_column = pa.array(values, pa.binary())
    columns = [pa.array(keys, pa.binary()), value_column, pa.array(lsns, pa.uint64()), value_column.is_null()]
    return pa.record_batch(columns, schema=SCHEMA)
