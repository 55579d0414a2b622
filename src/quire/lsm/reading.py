"""Reading a key-value database: what the database and its snapshots have in common, and a cursor.

A scan reads the database as it was when `scan` was called. What it holds (its snapshot, the files) is let go when it ends, is
closed, or is forgotten. Batches are Arrow record batches of the columns `key` and `value`: the fast way to read much.

Threads: any number of scans; each belongs to one thread. Raises `StoreClosed`, `InvalidInput`, `Corruption`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self

from quire.core.errors import InvalidInput, StoreClosed
from quire.lsm.short_scan import Pair
from quire.lsm.view import prefix_end
from quire.lsm.wal import Buffer, as_bytes

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.lsm.kv import Kv
    from quire.lsm.merge import Hidden
    from quire.lsm.view import KvView


class HeldLsns:
    """The lsns that somebody reads at: versions they need are kept in memtables and by compactions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._forgotten: deque[tuple[int, ...]] = deque()
        """What was held by snapshots that nobody closed. Filled by the garbage collector, which may come at any moment, also
        while this thread has the lock: so it takes none."""
        self.newest = 0
        """The highest, or 0. Written under the lock, read by all."""

    def hold(self, lsns: Iterable[int]) -> tuple[int, ...]:
        """Keep what reads at these need; what `release` takes back."""
        taken, held = tuple(lsns), self._held
        with self._lock:
            if self._forgotten:
                self._tidy()
            for lsn in taken:
                held[lsn] = held.get(lsn, 0) + 1
                if lsn > self.newest:
                    self.newest = lsn
        return taken

    def release(self, lsns: Iterable[int]) -> None:
        """Nobody reads at these any more."""
        with self._lock:
            self._let_go(lsns)

    def _let_go(self, lsns: Iterable[int]) -> None:
        held = self._held
        for lsn in lsns:
            if held[lsn] > 1:
                held[lsn] -= 1
            else:
                del held[lsn]
                if lsn == self.newest:
                    self.newest = max(held, default=0)

    def forget(self, lsns: tuple[int, ...]) -> None:
        """The same, from a finalizer; takes effect with the next call."""
        self._forgotten.append(lsns)

    def _tidy(self) -> None:
        while self._forgotten:
            self._let_go(self._forgotten.popleft())

    def lsns(self) -> tuple[int, ...]:
        """All of them, rising."""
        with self._lock:
            self._tidy()
            return tuple(sorted(self._held))


class KvRanges(ABC):
    """Ranges, made of `batches` and `pairs`."""

    @abstractmethod
    def batches(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[pa.RecordBatch]:
        """The keys and values of a range."""

    @abstractmethod
    def pairs(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        """The same as pairs, some at a time."""

    def scan_batches(
        self,
        *,
        prefix: Buffer | None = None,
        low: Buffer = b"",
        high: Buffer | None = None,
        reverse: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The keys that begin with `prefix`, or those in [low, high), with their values: as Arrow batches."""
        return self.batches(*_range(prefix, low, high), reverse)

    def scan(
        self,
        *,
        prefix: Buffer | None = None,
        low: Buffer = b"",
        high: Buffer | None = None,
        reverse: bool = False,
    ) -> Iterator[Pair]:
        """The same, a pair at a time."""
        return (pair for pairs in self.pairs(*_range(prefix, low, high), reverse) for pair in pairs)


def _range(prefix: Buffer | None, low: Buffer, high: Buffer | None) -> tuple[bytes, bytes | None]:
    if prefix is None:
        return as_bytes(low), None if high is None else as_bytes(high)
    if low or high is not None:
        raise InvalidInput("a scan takes a prefix or a range, not both", hint="leave one of them out")
    start = as_bytes(prefix)
    return start, prefix_end(start)


class KvSnapshot(KvRanges):
    """A database as it was; made by `Kv.snapshot`."""

    def __init__(self, kv: Kv, lsn: int, hidden: Hidden, held: tuple[int, ...], view: KvView | None = None) -> None:
        """`view`: what it reads where compactions do not know of it; else what the database is at each read."""
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
        """The value that a key had, `None` if it had none."""
        self._require()
        return self._reads.get(as_bytes(key), self.lsn, self._hidden)

    def get_many(self, keys: Sequence[Buffer]) -> list[bytes | None]:
        """The values that keys had, in their order."""
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
        """`batches`, and the snapshot goes with their end. If they are never begun, it goes when they are forgotten."""
        with self:
            yield from self.batches(low, high, reverse)

    def pairs_then_close(self, low: bytes, high: bytes | None, reverse: bool) -> Iterator[Iterable[Pair]]:
        """The same with `pairs`."""
        with self:  # not `yield from self.pairs(…)`: another generator between the rows and their reader costs a tenth
            self._require()
            for pairs in self._reads.pairs(low, high, self.lsn, hidden=self._hidden, reverse=reverse):
                yield pairs
                self._require()

    def close(self) -> None:
        """Let the versions go that only this snapshot needs. A second time: nothing."""
        if self._open:
            self._open = False
            self._kv.snapshots.release(self._held)

    def _require(self) -> None:
        if not self._open:
            raise StoreClosed("the snapshot is closed", hint="take a new one")
        self._kv.require_open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._open = False
            self._kv.snapshots.forget(self._held)


class ReadableSnapshot(Protocol):
    """A set as it was, here or at an owner."""

    def scan(
        self, *, prefix: Buffer | None = None, low: Buffer = b"", high: Buffer | None = None, reverse: bool = False
    ) -> Iterator[Pair]: ...

    def close(self) -> None: ...


class KvIterator:
    """A cursor over a snapshot: `seek`, then iterate; close it, or use it as a context manager."""

    def __init__(self, snapshot: ReadableSnapshot) -> None:
        self.snapshot = snapshot
        self._pairs: Iterator[Pair] = snapshot.scan()

    def seek(self, key: Buffer) -> Self:
        """Go on with the first key at or above this one."""
        self._pairs = self.snapshot.scan(low=key)
        return self

    def seek_for_prev(self, key: Buffer) -> Self:
        """Go on with the last key at or below this one, and backwards from there."""
        self._pairs = self.snapshot.scan(high=as_bytes(key) + b"\0", reverse=True)
        return self

    def seek_to_first(self) -> Self:
        """Go on with the first key."""
        return self.seek(b"")

    def seek_to_last(self) -> Self:
        """Go on with the last key, and backwards from there."""
        self._pairs = self.snapshot.scan(reverse=True)
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Pair:
        return next(self._pairs)

    def close(self) -> None:
        """Let the snapshot go."""
        self.snapshot.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
