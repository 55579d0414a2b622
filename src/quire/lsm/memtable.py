"""The memtable: writes that are not in a table yet, in a dictionary that keeps older versions only where a snapshot needs them.

An entry is (lsn, value, older). Entries are replaced, never modified, so readers walk them without a lock. A key inserted
during a scan has a higher lsn than the scan reads at, so the scan may miss it.

Threads: one writer at a time (the engine's write lock); any number of readers."""

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
"""Memory of an entry beyond its key and value: tuple, dictionary slot, object headers."""
RECENT_KEYS = 1_024
"""The list of newest keys is merged into the main one when it exceeds this and a sixteenth of the main one."""
MARK_ROWS = 1_024
"""Keys between two positions at which a part of a scan may begin."""


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
        """Insert a batch. `snapshot_lsn` is the highest lsn that a snapshot reads at, or 0; older versions above it are
        dropped."""
        if snapshot_lsn:
            entries = self.entries
            for key, value in items.items():
                former = entries.get(key)
                if former is not None and former[0] > snapshot_lsn:
                    former = former[2]  # no snapshot reads this version; an older snapshot may read the one below it
                entries[key] = (lsn, value, former)
        else:
            # No snapshot is open: older versions go, also those that were kept for snapshots closed since.
            self.entries.update(zip(items, zip(repeat(lsn), items.values(), repeat(None))))
        self.bytes += payload_bytes + ENTRY_BYTES * len(items)
        self.lsn_max = lsn

    def get(self, key: bytes, lsn: int) -> tuple[int, bytes | None] | None:
        """Return the newest version (lsn, value) of a key at or below `lsn`, or `None`."""
        entry = self.entries.get(key)
        while entry is not None:
            if entry[0] <= lsn:
                return entry[0], entry[1]
            entry = entry[2]
        return None

    # ── key order ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def sorted_keys(self) -> list[bytes]:
        """Return the keys in order, as a list that is never modified."""
        older, recent = self._sorted_runs()
        if recent:
            with self._sorting:
                older, recent = self._runs
                older = sorted(older + recent)  # Timsort merges two sorted runs in linear time
                self._runs = (older, [])
        return older

    def _sorted_runs(self) -> SortedKeys:
        """Return the keys as two sorted lists that are never modified: the bulk of the keys, and the newest ones.

        With a single list, alternating writes and scans would copy all keys each time."""
        older, recent = self._runs
        if len(older) + len(recent) != len(self.entries):
            with self._sorting:
                older, recent = self._runs
                recent = sorted(recent + self._latest(len(older) + len(recent)))
                if len(recent) > max(RECENT_KEYS, len(older) >> 4):
                    older, recent = sorted(older + recent), []
                self._runs = (older, recent)
        return self._runs

    def _latest(self, sorted_count: int) -> list[bytes]:
        """Return the keys inserted after the first `sorted_count`: a dictionary keeps their order, and no key is removed."""
        while True:
            count = len(self.entries)
            latest = list(islice(reversed(self.entries), count - sorted_count))
            if len(self.entries) == count:  # else a key inserted meanwhile has displaced the oldest of them
                return latest

    def window(self, windows: RowWindows, low: bytes, high: bytes | None, rows: int) -> bytes | None:
        """Add the first `rows` rows of [low, high) to `windows`. Return the edge (short_scan.py)."""
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
        """Add the last `rows` rows of [low, high) to `windows`. Return the edge."""
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
        """Return the positions at which parts of a scan may begin."""
        keys = self.sorted_keys()
        start = bisect_left(keys, low)
        end = len(keys) if high is None else bisect_left(keys, high)
        row_bytes = self.bytes // max(1, len(keys))
        return [(keys[at], row_bytes * MARK_ROWS) for at in range(start, end, MARK_ROWS)]

    def rows_between(self, low: bytes, high: bytes | None) -> list[pa.RecordBatch]:
        """Return the rows with keys in [low, high), all versions."""
        keys = self.sorted_keys()
        start = bisect_left(keys, low) if low else 0
        end = len(keys) if high is None else bisect_left(keys, high)
        if start >= end:
            return []
        is_complete = self.is_frozen and start == 0 and end == len(keys)
        if is_complete and self._batch is not None:
            return [self._batch]
        batch = _rows(keys[start:end], self.entries)
        if is_complete:
            self._batch = batch
        return [batch]

    def freeze(self) -> None:
        """Mark the memtable as immutable."""
        self.is_frozen = True


def _older_versions(
    keys: Sequence[bytes], olders: Sequence[Entry | None]
) -> tuple[list[bytes], list[int], list[bytes | None]]:
    """Return the rows of all versions except the newest of each key."""
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
    import pyarrow as pa  # a program that only gets and puts does not need Arrow

    from quire.lsm.sst_format import SCHEMA

    value_column = pa.array(values, pa.binary())
    columns = [pa.array(keys, pa.binary()), value_column, pa.array(lsns, pa.uint64()), value_column.is_null()]
    return pa.record_batch(columns, schema=SCHEMA)
