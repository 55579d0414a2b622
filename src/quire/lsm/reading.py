"""Reading a key-value database: scans, which databases and snapshots share, snapshots, and a cursor.

A scan reads the database as it was when `scan` was called. It releases its snapshot and files when it ends, is closed, or is
garbage-collected. Batches are Arrow record batches with the columns `key` and `value`: the fast way to read many rows.

Threads: any number of scans; each belongs to one thread. Raises `StoreClosed`, `InvalidInput`, `Corruption`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from quire.core.closing import ClosedOnExit
from quire.core.errors import InvalidInput, StoreClosed
from quire.lsm.short_scan import Pair
from quire.lsm.wal import Buffer, as_bytes
from quire.manifest.keys import prefix_end

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.kv import Kv
    from quire.lsm.merge import Hidden
    from quire.lsm.view import KvView


class HeldLsns:
    """The lsns of open snapshots. Memtables and compactions keep the versions that they read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._forgotten: deque[tuple[int, ...]] = deque()
        """Lsns of snapshots that were garbage-collected without being closed. Finalizers append here without the lock: they
        may run in a thread that already holds it."""
        self.newest = 0
        """The highest held lsn, or 0. Written under the lock, read without it."""

    def hold(self, lsns: Iterable[int]) -> tuple[int, ...]:
        """Hold lsns, so that the versions they read are kept. Return the argument for `release`."""
        taken, held = tuple(lsns), self._held
        with self._lock:
            if self._forgotten:
                self._release_forgotten()
            for lsn in taken:
                held[lsn] = held.get(lsn, 0) + 1
                if lsn > self.newest:
                    self.newest = lsn
        return taken

    def release(self, lsns: Iterable[int]) -> None:
        """Release held lsns."""
        with self._lock:
            self._release_locked(lsns)

    def _release_locked(self, lsns: Iterable[int]) -> None:
        held = self._held
        for lsn in lsns:
            if held[lsn] > 1:
                held[lsn] -= 1
            else:
                del held[lsn]
                if lsn == self.newest:
                    self.newest = max(held, default=0)

    def forget(self, lsns: tuple[int, ...]) -> None:
        """Release held lsns from a finalizer. Takes effect with the next `hold` or `lsns`."""
        self._forgotten.append(lsns)

    def _release_forgotten(self) -> None:
        while self._forgotten:
            self._release_locked(self._forgotten.popleft())

    def lsns(self) -> tuple[int, ...]:
        """Return the held lsns in ascending order."""
        with self._lock:
            self._release_forgotten()
            return tuple(sorted(self._held))


class KvRanges(ABC):
    """Range scans, built on `batches` and `pairs`."""

    @abstractmethod
    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        """Yield the keys and values in [low, high) as Arrow batches."""

    @abstractmethod
    def pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        """Yield groups of (key, value) pairs in [low, high)."""

    def scan_batches(
        self,
        *,
        prefix: Buffer | None = None,
        low: Buffer = b"",
        high: Buffer | None = None,
        reverse: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Return the keys that begin with `prefix`, or those in [low, high), with their values, as Arrow batches."""
        return self.batches(*_range(prefix, low, high), reverse)

    def scan(
        self,
        *,
        prefix: Buffer | None = None,
        low: Buffer = b"",
        high: Buffer | None = None,
        reverse: bool = False,
    ) -> Iterator[Pair]:
        """Return the keys that begin with `prefix`, or those in [low, high), with their values, as pairs."""
        return (pair for pairs in self.pairs(*_range(prefix, low, high), reverse) for pair in pairs)


def _range(prefix: Buffer | None, low: Buffer, high: Buffer | None) -> tuple[bytes, bytes | None]:
    if prefix is None:
        return as_bytes(low), None if high is None else as_bytes(high)
    if low or high is not None:
        raise InvalidInput("a scan takes a prefix or a range, not both", hint="omit one of them")
    start = as_bytes(prefix)
    return start, prefix_end(start)


class KvSnapshot(KvRanges, ClosedOnExit):
    """A database as of one moment; made by `Kv.snapshot`."""

    def __init__(self, kv: Kv, lsn: int, hidden: Hidden, held: tuple[int, ...], view: KvView | None = None) -> None:
        """Create a snapshot at `lsn`. With `view` it reads that view, for a reader whose held lsns compactions do not see;
        otherwise the database's current view at each read."""
        self.lsn = lsn
        self._view = view
        self._kv = kv
        self._hidden = hidden
        self._held = held
        self._open = True

    @property
    def _reads(self) -> KvView:
        return self._kv.view if self._view is None else self._view

    def get(self, key: Buffer) -> bytes | None:
        """Return the value of a key at the snapshot, or `None`."""
        self._require()
        return self._reads.get(as_bytes(key), self.lsn, self._hidden)

    def get_many(self, keys: Sequence[Buffer]) -> list[bytes | None]:
        """Return the values of keys at the snapshot, in their order."""
        self._require()
        return self._reads.get_many(keys, self.lsn, self._hidden)

    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        self._require()
        # One view for the whole scan: it holds the files that the scan reads.
        for batch in self._reads.scan(low, high, self.lsn, hidden=self._hidden, reverse=reverse):
            yield batch
            self._require()

    def pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        self._require()
        for pairs in self._reads.pairs(low, high, self.lsn, hidden=self._hidden, reverse=reverse):
            yield pairs
            self._require()

    def batches_then_close(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        """Yield `batches`, then close the snapshot. If iteration never starts, garbage collection releases it."""
        with self:
            yield from self.batches(low, high, reverse)

    def pairs_then_close(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        """Yield `pairs`, then close the snapshot."""
        with self:  # not `yield from self.pairs(…)`: one more generator between rows and reader costs a tenth
            self._require()
            for pairs in self._reads.pairs(low, high, self.lsn, hidden=self._hidden, reverse=reverse):
                yield pairs
                self._require()

    def close(self) -> None:
        """Release the versions that only this snapshot needs. Idempotent."""
        if self._open:
            self._open = False
            self._kv.snapshots.release(self._held)

    def _require(self) -> None:
        if not self._open:
            raise StoreClosed("the snapshot is closed", hint="take a new one")
        self._kv.require_open()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._open = False
            self._kv.snapshots.forget(self._held)


class ReadableSnapshot(Protocol):
    """A snapshot of a key-value set, in this process or at an owner."""

    def scan(
        self, *, prefix: Buffer | None = None, low: Buffer = b"", high: Buffer | None = None, reverse: bool = False
    ) -> Iterator[Pair]: ...

    def close(self) -> None: ...


class KvIterator(ClosedOnExit):
    """A cursor over a snapshot: `seek`, then iterate; close it, or use it as a context manager."""

    def __init__(self, snapshot: ReadableSnapshot) -> None:
        self.snapshot = snapshot
        self._pairs: Iterator[Pair] = snapshot.scan()

    def seek(self, key: Buffer) -> Self:
        """Move to the first key at or above `key`."""
        self._pairs = self.snapshot.scan(low=key)
        return self

    def seek_for_prev(self, key: Buffer) -> Self:
        """Move to the last key at or below `key`, and iterate backwards from there."""
        self._pairs = self.snapshot.scan(high=as_bytes(key) + b"\0", reverse=True)
        return self

    def seek_to_first(self) -> Self:
        """Move to the first key."""
        return self.seek(b"")

    def seek_to_last(self) -> Self:
        """Move to the last key, and iterate backwards from there."""
        self._pairs = self.snapshot.scan(reverse=True)
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Pair:
        return next(self._pairs)

    def close(self) -> None:
        """Close the snapshot."""
        self.snapshot.close()
