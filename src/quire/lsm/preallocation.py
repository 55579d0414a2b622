"""A file that is kept filled with zeros a little ahead of its end, so that syncing small appends is cheap.

A sync after an append must also make the file's new size and new extents durable, which costs the file system a commit of its
journal. Over zeros that are on disk already it moves data only (measured: about half the time).

Rules
  1. Only small writes fill ahead; large ones pay for themselves.
  2. Filling is a help, never a need: if it fails (no space), the write goes on without it.
  3. When the file is closed the zeros behind its end are cut off. After a crash they are a torn end to whoever reads the
     log, like any other bytes behind it.

Threads: as the file below, with one writer at a time.
"""

from __future__ import annotations

from contextlib import suppress

from quire.core.errors import StorageFault
from quire.core.limits import KIB
from quire.durable.files import DiskLayer, File, forget_cached

AHEAD_BYTES = 256 * KIB
SMALL_BYTES = 8 * KIB
"""Larger writes do not fill ahead."""

_ZEROS = bytes(AHEAD_BYTES)


class AheadFile:
    """A `File` for appending."""

    __slots__ = ("_end", "_filled", "_inner", "_open")

    def __init__(self, inner: File) -> None:
        self._inner = inner
        self._end = self._filled = inner.size()
        self._open = True

    @property
    def path(self) -> str:
        return self._inner.path

    def read_at(self, size: int, offset: int) -> bytes:
        return self._inner.read_at(size, offset)

    def write_at(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        end = offset + len(data)
        if end > self._filled:
            if len(data) <= SMALL_BYTES:
                with suppress(StorageFault):  # rule 2
                    self._inner.write_at(_ZEROS, self._filled)
                    self._filled += AHEAD_BYTES
            self._filled = max(self._filled, end)
        self._inner.write_at(data, offset)
        self._end = max(self._end, end)

    def size(self) -> int:
        return self._inner.size()

    def truncate(self, size: int) -> None:
        self._inner.truncate(size)
        self._end = self._filled = size

    def allocate(self, size: int) -> None:
        self._inner.allocate(size)

    def sync(self) -> None:
        self._inner.sync()

    def fileno(self) -> int:
        return self._inner.fileno()

    def forget_cached(self) -> None:
        forget_cached(self._inner)

    def close(self) -> None:
        if self._open:
            self._open = False
            try:
                if self._filled > self._end:
                    with suppress(StorageFault):
                        self._inner.truncate(self._end)  # rule 3
            finally:
                self._inner.close()


class AheadDisk(DiskLayer):
    """A `Disk` whose `open` gives such files; what else a log asks of it is the disk's below."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        file = self._inner.open(path, create=create, exclusive=exclusive, write=write)
        return AheadFile(file) if write and not create and not exclusive else file
