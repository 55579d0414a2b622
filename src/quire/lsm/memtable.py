"""What was written and is not in a table yet: a dictionary, with older versions only where a snapshot needs them.

An entry is (lsn, value, older). Entries are replaced, never changed: readers walk them without a lock. A key that comes while
a scan runs has a higher lsn than the scan reads at, and may be missed.

Threads: one writer at a time (the engine's write lock); readers any."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice, repeat
from typing import TYPE_CHECKING

from quire.lsm.short_scan import RowWindows, span, span_before

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.merge import Mark

Entry = tuple[int, bytes | None, "Entry | None"]
SortedKeys = tuple[list[bytes], list[bytes]]

ENTRY_BYTES = 150
"""What an entry takes beyond its key and value: tuple, dictionary slot, object heads."""
RECENT_KEYS = 1_024
"""So many keys, or a sixteenth of all, may be in the list of the newest keys before it is merged into the other one."""
MARK_ROWS = 1_024
"""A part of a scan may begin at every so many keys."""


class Memtable:
    """The newest writes of a database, by key."""

    __slots__ = ("_batch", "_runs", "_sorting", "bytes", "entries", "is_frozen", "lsn_max")

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.bytes = 0
        self.lsn_max = 0
        self.is_frozen = False
        self._sorting = threading.Lock()
        self._runs: SortedKeys = ([], [])
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
        older, recent = self._sorted_runs()
        if recent:
            with self._sorting:
                older, recent = self._runs
                older = sorted(older + recent)  # two runs: this merges them
                self._runs = (older, [])
        return older

    def _sorted_runs(self) -> SortedKeys:
        """The keys as two sorted lists that are never changed: most of them, and the ones that came last. A scan after each
        write would otherwise copy the whole list each time."""
        older, recent = self._runs
        if len(older) + len(recent) != len(self.entries):
            with self._sorting:
                older, recent = self._runs
                recent = sorted(recent + self._latest(len(older) + len(recent)))
                if len(recent) > max(RECENT_KEYS, len(older) >> 4):
                    older, recent = sorted(older + recent), []
                self._runs = (older, recent)
        return self._runs

    def _latest(self, known: int) -> list[bytes]:
        """The keys after the first so many: a dictionary keeps the order of insertion, and nothing is taken out."""
        while True:
            count = len(self.entries)
            latest = list(islice(reversed(self.entries), count - known))
            if len(self.entries) == count:  # else one came in between, and took the place of another
                return latest

    def window(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add the first rows of [low, high); the edge (short_scan.py)."""
        if not self.entries:
            return None
        edges = list[bytes]()
        for keys in self._sorted_runs():
            start, end, is_more = span(keys, low, high, rows)
            if start < end:
                self._add(windows, keys[start:end])
            if is_more:
                edges.append(keys[end])
        return min(edges, default=None)

    def window_before(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """The same with the last rows of [low, high)."""
        if not self.entries:
            return None
        edges = list[bytes]()
        for keys in self._sorted_runs():
            start, end, is_more = span_before(keys, low, high, rows)
            if start < end:
                self._add(windows, keys[start:end])
            if is_more:
                edges.append(keys[start])
        return max(edges, default=None)

    def _add(self, windows: RowWindows, keys: list[bytes]) -> None:
        """Add all versions of some keys."""
        lsns, values, olders = zip(*map(self.entries.__getitem__, keys))
        has_older = any(olders)
        windows.add(keys, lsns, values, max(lsns), not has_older and None not in values)
        if has_older:
            windows.add(*_older_versions(keys, olders), self.lsn_max, is_plain=False)

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


def _older_versions(
    keys: Sequence[bytes], olders: Sequence[Entry | None]
) -> tuple[list[bytes], list[int], list[bytes | None]]:
    """The rows of all versions but the newest ones."""
    names, lsns, values = list[bytes](), list[int](), list[bytes | None]()
    for key, version in zip(keys, olders):
        older = version
        while older is not None:
            names.append(key)
            lsns.append(older[0])
            values.append(older[1])
            older = older[2]
    return names, lsns, values


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
