"""Open files that are read: kept while they are in use, closed when the last one lets go.

Terms
  handle   an open file; whoever reads holds it for the length of the read
  given up the cache has dropped a handle; readers in the middle of it finish, then it is closed

Rules
  1. At most so many handles are kept; beyond that the one unused for longest is given up. What was not asked for between two
     looks (`drop_unused`) is too, so that an idle database holds none.
  2. A handle is closed when nobody holds it, never under a reader: a descriptor that is closed too early may be reused, and
     the read would return another file's bytes.
  3. Two threads that open the same file at once both get a handle; one of them is kept.

Threads: any. Executor-safe.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from quire.core.errors import ReadOnly
from quire.durable.files import File
from quire.objects.api import ObjectStore
from quire.pages.segment_file import SegmentFile

H = TypeVar("H")


class Handles(Generic[H]):
    """At most `limit` handles by key (rule 1)."""

    __slots__ = ("_kept", "_limit", "_lock", "_used")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, H] = OrderedDict()
        self._used: set[Hashable] = set()
        """Keys that were asked for since the last look."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> H | None:
        """The handle, if it is kept."""
        with self._lock:
            handle = self._kept.get(key)
            if handle is not None:
                self._kept.move_to_end(key)
                self._used.add(key)
        return handle

    def peek(self, key: Hashable) -> H | None:
        """The same, without a lock and without counting as use: for keys of plain numbers, on hot paths."""
        return self._kept.get(key)

    def keep(self, key: Hashable, opener: Callable[[], H]) -> H:
        """The handle, opened if need be."""
        handle = self.get(key)
        if handle is not None:
            return handle
        opened = opener()
        given_up: list[H] = []  # dropped outside the lock: closing takes a system call
        with self._lock:
            handle = self._kept.setdefault(key, opened)
            self._used.add(key)
            while len(self._kept) > self._limit:
                given_up.append(self._kept.popitem(last=False)[1])
        return handle

    def drop(self, key: Hashable) -> None:
        """Give a handle up."""
        with self._lock:
            self._kept.pop(key, None)

    def drop_unused(self) -> None:
        """Give up what was not asked for since the last time; what is only peeked at is opened anew, now and then."""
        with self._lock:
            unused = [self._kept.pop(key) for key in list(self._kept) if key not in self._used]
            self._used = set()
        unused.clear()  # outside the lock: closing takes a system call

    def clear(self) -> None:
        """Give all up."""
        with self._lock:
            kept, self._kept = self._kept, OrderedDict()
        kept.clear()


class ReadSegment(SegmentFile):
    """A segment to read that closes itself (rule 2)."""

    __slots__ = ()

    def __del__(self) -> None:
        self.close()


class ReadFile:
    """A file to read that closes itself (rule 2)."""

    __slots__ = ("_file",)

    def __init__(self, file: File) -> None:
        self._file = file

    def read_at(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the file."""
        return self._file.read_at(size, offset)

    def __del__(self) -> None:
        self._file.close()


class ObjectFile:
    """An object as a `File` to read: what a segment that has left the disk is read through."""

    __slots__ = ("_key", "_size", "_store")

    def __init__(self, store: ObjectStore, key: str, size_bytes: int) -> None:
        self._store = store
        self._key = key
        self._size = size_bytes

    @property
    def path(self) -> str:
        return self._key

    def read_at(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer at the end of the object."""
        size = min(size, self._size - offset)
        return self._store.get_range(self._key, offset, size) if size > 0 else b""

    def size(self) -> int:
        return self._size

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        raise ReadOnly("an object is not written in place", object=self._key, offset=offset, bytes=len(data))

    def truncate(self, size: int) -> None:
        raise ReadOnly("an object is not truncated", object=self._key, size=size)

    def allocate(self, size: int) -> None:
        raise ReadOnly("an object is not enlarged", object=self._key, size=size)

    def sync(self) -> None:
        """Nothing is written here, so nothing is to be synced."""

    def fileno(self) -> int:
        raise ReadOnly("an object has no descriptor", object=self._key)

    def close(self) -> None:
        """Nothing is held."""
