"""Rows that are written once and read in order, without holding all of them in memory.

Up to `MEMORY_BYTES` of encoded rows stay in memory; what exceeds that goes to a temporary file, which has no name and
disappears with the process. A job over a hundred thousand databases returns its results this way.

Rows are encoded as msgpack, `ROWS_A_FRAME` at a time; a frame is its length (four bytes) and an array of rows.

Threads: one appends; when it is done, any may read. An iterator yields what was appended before it began. Raises `StorageFault`
(`DiskFull`) if the temporary directory cannot be written.
"""

from __future__ import annotations

import os
import struct
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import IO, Generic, TypeVar

import msgspec

from quire.core.decoding import described
from quire.durable.files import translate

ROWS_A_FRAME = 256
MEMORY_BYTES = 1 << 20

T = TypeVar("T")

_LENGTH = struct.Struct("<I")


class Spool(Generic[T]):
    """A sized collection of msgspec structs, read in the order in which they were appended, any number of times.

    >>> rows = Spool(int)
    >>> rows.extend(range(1_000))
    >>> len(rows), sum(rows)
    (1000, 499500)
    """

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(described(list[kind]))  # type: ignore[valid-type]
        self._frame: list[T] = []
        self._encoded = bytearray()
        """Encoded frames that are not in the file."""
        self._file: IO[bytes] | None = None
        self._file_bytes = 0
        self._count = 0

    def append(self, row: T) -> None:
        """Append a row."""
        self._frame.append(row)
        self._count += 1
        if len(self._frame) == ROWS_A_FRAME:
            self._encode_frame()

    def extend(self, rows: Iterable[T]) -> None:
        """Append rows; they are taken one at a time."""
        for row in rows:
            self.append(row)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        start, end, frame = 0, self._file_bytes + len(self._encoded), self._frame[:]
        while start < end:
            body = self._read_frame(start)
            yield from self._decoder.decode(body)
            start += _LENGTH.size + len(body)
        yield from frame

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _encode_frame(self) -> None:
        body = msgspec.msgpack.encode(self._frame)
        self._encoded += _LENGTH.pack(len(body)) + body
        self._frame.clear()
        if len(self._encoded) > MEMORY_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        """Move the encoded frames to the file. If that fails, they stay in memory and are written again."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="quire-rows-")  # noqa: SIM115  # lives as long as this object
                weakref.finalize(self, self._file.close)
            waiting, end = bytes(self._encoded), self._file_bytes
            while waiting:
                count = os.pwrite(self._file.fileno(), waiting, end)
                waiting, end = waiting[count:], end + count
        except OSError as error:
            raise translate(error, tempfile.tempdir or "", "writing rows to a temporary file") from error
        self._file_bytes = end
        self._encoded.clear()

    def _read_frame(self, start: int) -> bytes:
        """Return the body of the frame that starts at an offset."""
        (length,) = _LENGTH.unpack(self._read(start, _LENGTH.size))
        return self._read(start + _LENGTH.size, length)

    def _read(self, start: int, count: int) -> bytes:
        if self._file is not None and start < self._file_bytes:
            return os.pread(self._file.fileno(), count, start)  # keeps no position: several readers may be at work
        start -= self._file_bytes
        return bytes(self._encoded[start : start + count])
