"""`Blob`: reads and writes a value in place, by offset, index or slice, like sqlite3's.

Threads: as its connection.
"""

from __future__ import annotations

import operator
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import apsw

from quire.sqlite.pep249.errors import TRANSLATED, ProgrammingError

if TYPE_CHECKING:
    from quire.sqlite.pep249.connection import Connection

_INT_MAX = (1 << 31) - 1


class Blob:
    """An open blob. Created by `Connection.blobopen`."""

    __slots__ = ("__weakref__", "_blob", "_connection", "_offset")
    _connection: Connection
    _blob: apsw.Blob | None
    _offset: int

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Refuse direct construction."""
        raise TypeError(f"cannot create '{cls.__module__}.{cls.__qualname__}' instances")

    __iter__ = None  # so that `in` is refused too, as in sqlite3

    def read(self, length: int = -1, /) -> bytes:
        """Return `length` bytes from the current offset, or all that are left."""
        size = len(self)
        left = size - self._offset
        count = left if length < 0 else min(length, left)
        data = self._read(self._offset, count)
        self._offset += count
        return data

    def write(self, data: Any, /) -> None:
        """Overwrite bytes from the current offset. The length of a blob does not change."""
        view = memoryview(data).cast("B")
        if len(self) - self._offset < len(view):
            raise ValueError("data longer than blob length")
        self._write(self._offset, view)
        self._offset += len(view)

    def seek(self, offset: int, origin: int = os.SEEK_SET, /) -> None:
        """Move to an offset from the start, the current offset or the end."""
        size = len(self)
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: size}
        if origin not in bases:
            raise ValueError("'origin' should be os.SEEK_SET, os.SEEK_CUR, or os.SEEK_END")
        wanted = bases[origin] + offset
        if origin != os.SEEK_SET and wanted > _INT_MAX:
            raise OverflowError("seek offset results in overflow")
        if not 0 <= wanted <= size:
            raise ValueError("offset out of blob range")
        self._offset = wanted

    def tell(self) -> int:
        """Return the offset of the next read or write."""
        self._open()
        return self._offset

    def close(self) -> None:
        """Release the value."""
        self._connection._require()
        blob, self._blob = self._blob, None
        if blob is not None:
            blob.close(True)  # forced: an error of an earlier read or write has already been raised

    def __len__(self) -> int:
        return self._open().length()

    def __getitem__(self, key: int | slice) -> Any:
        size = len(self)
        if isinstance(key, slice):
            start, stop, step = _bounds(key, size)
            return self._read(start, max(stop - start, 0))[::step] if step > 0 else self._read(0, size)[key]
        return self._read(_index(key, size), 1)[0]

    def __setitem__(self, key: int | slice, value: Any) -> None:
        size = len(self)
        if not isinstance(key, slice):
            number = _index(key, size)
            byte = operator.index(value)
            if byte not in range(256):
                raise ValueError("byte must be in range(0, 256)")
            self._write(number, bytes([byte]))
            return
        start, stop, step = _bounds(key, size)
        view = memoryview(value)
        if not view.c_contiguous:
            raise BufferError("underlying buffer is not C-contiguous")
        data = view.cast("B")
        if len(data) != len(range(start, stop, step)):
            raise IndexError("Blob slice assignment is wrong size")
        if not data:
            return
        first, last = min(start, stop), max(start, stop)
        changed = bytearray(self._read(first, last - first))
        changed[start - first : stop - first : step] = data
        self._write(first, changed)

    def __delitem__(self, key: int | slice) -> NoReturn:
        raise TypeError("Blob doesn't support item deletion")

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open()
        self.close()

    def _open(self) -> apsw.Blob:
        self._connection._require()
        if self._blob is None:
            raise ProgrammingError("Cannot operate on a closed blob.")
        return self._blob

    def _read(self, offset: int, count: int) -> bytes:
        blob = self._open()
        with TRANSLATED:
            blob.seek(offset)
            return blob.read(count)

    def _write(self, offset: int, data: Any) -> None:
        blob = self._open()
        with TRANSLATED:
            blob.seek(offset)
            blob.write(bytes(data))


def open_blob(connection: Connection, blob: apsw.Blob) -> Blob:
    """Return a `Blob` of a connection."""
    opened: Blob = object.__new__(Blob)
    opened._connection, opened._blob, opened._offset = connection, blob, 0
    return opened


def _index(key: Any, size: int) -> int:
    try:
        number = operator.index(key)
    except TypeError:
        raise TypeError("Blob indices must be integers") from None
    if not -(1 << 63) <= number < 1 << 63:
        raise IndexError("cannot fit 'int' into an index-sized integer")
    number += size if number < 0 else 0
    if not 0 <= number < size:
        raise IndexError("Blob index out of range")
    return number


def _bounds(key: slice, size: int) -> tuple[int, int, int]:
    try:
        return key.indices(size)
    except TypeError:
        raise TypeError("Blob indices must be integers") from None
