"""Decodes rows of tables WITHOUT ROWID as they are stored: cells of an index B-tree, and the key at the start of each cell.

Terms
  cell      one row of a page: in a leaf, or in an interior page between two of its children
  payload   the record of a row, assembled from its cell and the overflow pages that the cell points to
  record    the types of all values, then the values; columns of the primary key come first

The format is SQLite's own (https://www.sqlite.org/fileformat2.html). Pages may come from a damaged file: anything malformed
raises `Unreadable`, no page is read twice, no more bytes are taken from a page than it has, and no length beyond the size of
the database is accepted.

Threads: any; nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import error as StructError  # noqa: N812 - it is a class
from struct import unpack_from

from quire.sqlite.trees import FIRST_HEADER, INTERIOR_INDEX, LEAF_INDEX, ReadPage, Unreadable, kind_of, varint

Value = int | float | str | bytes | None

_ENCODINGS = {1: "utf-8", 2: "utf-16-le", 3: "utf-16-be"}
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_REAL, _ZERO, _ONE, _BLOB, _TEXT = 7, 8, 9, 12, 13


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """Properties of all records, from the first page."""

    usable: int
    """Bytes of a page that SQLite uses."""
    encoding: str
    bytes_max: int
    """Bytes of a payload, at most: the size of the database."""

    @classmethod
    def of(cls, first_page: bytes, size_pages: int) -> IndexFormat:
        """Return the format of a database that begins with this page."""
        try:
            (encoding,) = unpack_from(">I", first_page, 56)
            return cls(
                len(first_page) - first_page[20], _ENCODINGS.get(encoding, "utf-8"), size_pages * len(first_page)
            )
        except (StructError, IndexError) as error:
            raise Unreadable(1) from error


def payloads(read_page: ReadPage, pages: Iterable[int], form: IndexFormat) -> Iterator[bytes]:
    """Yield the records in these pages of an index B-tree."""
    seen = set[int]()

    def read_once(page: int) -> bytes:
        # For all records together: the cells of a damaged database may all point to one long chain of overflow pages.
        if page in seen:
            raise Unreadable(page)
        seen.add(page)
        return read_page(page)

    for page in pages:
        yield from _payloads_of(read_once, page, form)


def _payloads_of(read_page: ReadPage, page: int, form: IndexFormat) -> Iterator[bytes]:
    image = read_page(page)
    left = len(image)
    at = FIRST_HEADER if page == 1 else 0
    kind = kind_of(image, page)
    if kind not in (INTERIOR_INDEX, LEAF_INDEX):
        raise Unreadable(page)
    try:
        (count,) = unpack_from(">H", image, at + 3)
        header = 12 if kind == INTERIOR_INDEX else 8
        for cell in unpack_from(f">{count}H", image, at + header):
            payload = _payload(read_page, image, cell + (4 if kind == INTERIOR_INDEX else 0), form, page)
            left -= _local_bytes(len(payload), form.usable)
            if left < 0:
                raise Unreadable(page)  # cells overlap
            yield payload
    except (StructError, IndexError) as error:
        raise Unreadable(page) from error


def _payload(read_page: ReadPage, image: bytes, at: int, form: IndexFormat, page: int) -> bytes:
    size, at = _varint_at(image, at)
    if not 0 < size <= form.bytes_max:
        raise Unreadable(page)
    local = _local_bytes(size, form.usable)
    parts = [image[at : at + local]]
    if local < size:
        (following,) = unpack_from(">I", image, at + local)
        missing = size - local
        while missing > 0:
            if not following:
                raise Unreadable(page)
            overflow = read_page(following)
            parts.append(overflow[4 : 4 + min(missing, form.usable - 4)])
            missing -= form.usable - 4
            (following,) = unpack_from(">I", overflow)
    payload = b"".join(parts)
    if len(payload) != size:
        raise Unreadable(page)
    return payload


def _local_bytes(size: int, usable: int) -> int:
    """Return how many bytes of a payload are in its cell."""
    most, least = (usable - 12) * 64 // 255 - 23, (usable - 12) * 32 // 255 - 23
    if size <= most:
        return size
    rest = least + (size - least) % (usable - 4)
    return rest if rest <= most else least


def key_of(payload: bytes, columns: int, encoding: str) -> tuple[Value, ...]:
    """Return the first `columns` values of a record.

    >>> key_of(bytes([3, 1, 17, 5]) + b"ab", 2, "utf-8")
    (5, 'ab')
    """
    try:
        header, at = _varint_at(payload, 0)
        body, values = header, list[Value]()
        for _ in range(columns):
            if at >= header:
                raise Unreadable(0)
            kind, at = _varint_at(payload, at)
            value, body = _value(payload, kind, body, encoding)
            values.append(value)
    except (StructError, IndexError, UnicodeDecodeError) as error:
        raise Unreadable(0) from error
    return tuple(values)


def _value(payload: bytes, kind: int, at: int, encoding: str) -> tuple[Value, int]:
    """Return a value and the position of the next one."""
    if kind == 0:
        return None, at
    if kind in (_ZERO, _ONE):
        return kind - _ZERO, at
    if kind == _REAL:
        return unpack_from(">d", payload, at)[0], at + 8
    if kind in _INTEGER_BYTES:
        end = at + _INTEGER_BYTES[kind]
        return int.from_bytes(_exactly(payload, at, end), signed=True), end
    if kind < _BLOB:
        raise Unreadable(0)
    end = at + (kind - _BLOB) // 2
    stored = _exactly(payload, at, end)
    return (stored.decode(encoding) if kind % 2 else stored), end


def _exactly(payload: bytes, at: int, end: int) -> bytes:
    if end > len(payload):
        raise Unreadable(0)
    return payload[at:end]


def _varint_at(image: bytes, at: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    end = at
    while end < at + 8 and image[end] >= 0x80:
        end += 1
    return varint(image, at), end + 1
