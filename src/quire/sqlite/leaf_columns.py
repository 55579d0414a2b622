"""Decodes columns of a SQLite table from the leaves of its B-tree, without creating a Python object per value.

Terms
  leaf    a page of rows; interior pages define which rowids it may hold (`trees.py`)
  plain   a row whose requested values are all in its page and of their columns' types; NULL is plain
  odd     any other row: a misfit, a value that continues in overflow pages, a column with a default that was added later

Rules
  1. Plain rows are decoded in C (`leaf_columns.c`). Odd rows are read by SQLite, by ranges of rowids: its result, including
     misfits and errors, is the answer.
  2. If a page is not a leaf, cells do not fit into their page, or rowids do not rise, SQLite reads that range.
  3. Pages are untrusted. Nothing is allocated for more rows than a page can hold, for more than `PAGE_VALUES_MAX` values, or
     for more bytes than the pages have.

Applies only to tables with rowids in databases whose texts are UTF-8, and to columns of the types in `_KINDS`. For others,
and where the C part is not built, `LeafDecoder.of` returns `None`. docs/decisions/075-columns-from-leaves.md has the reasons
and the measurement.

Threads: any; a decoder keeps no state between calls. Executor-safe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from struct import error as StructError  # noqa: N812 - it is a class
from struct import unpack_from
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quire.core.errors import OutOfRange
from quire.core.limits import MIB
from quire.sqlite.c_extensions import leaves_build
from quire.sqlite.leaf_runs import Leaves, leaves_within
from quire.sqlite.tables import ROWID, SqliteTable, affinity
from quire.sqlite.trees import Rowids, Unreadable, by_number

READ_BYTES = 4 * MIB
"""Bytes of leaves that are read together, at most; at least one leaf."""
VALUES_MAX = 1 << 16
"""Values that are decoded together, unless a single page has more: they fit the processor's cache."""
PAGE_VALUES_MAX = 1 << 22
"""Values of one page, at most. SQLite reads a page that has more."""
CELL_BYTES_MIN = 6
"""Bytes of a row, at least: its entry in the array of cells, and the shortest cell that SQLite writes."""
GAP_ROWS = 32
"""Odd rows with fewer than this many plain rows between them are read together."""
ODD_SHARE_MAX = 0.25
"""Share of odd rows among rows decoded together. If it is higher, SQLite reads all of them."""

WHOLE, DOUBLE, TEXT, BLOB = range(4)
_KINDS = {pa.int64(): WHOLE, pa.bool_(): WHOLE, pa.float64(): DOUBLE, pa.string(): TEXT, pa.binary(): BLOB}
_ENCODING_UTF8 = 1
_USABLE_MIN = 480
"""The fewest usable bytes of a page that SQLite allows."""

AsRows = Callable[[Rowids], Iterator[pa.RecordBatch]]
"""Reads the rows of a range through SQLite."""
AsBatch = Callable[[int, list[pa.Array]], pa.RecordBatch]
"""Builds a batch of the given number of rows from decoded columns."""


class LeafPages(Protocol):
    """Pages with quire's numbers, from 0."""

    @property
    def page_size(self) -> int: ...

    @property
    def size_pages(self) -> int: ...

    def read_page(self, page: int, /) -> bytes: ...

    def read_rows(self, pages: NDArray[np.int64], /) -> NDArray[np.uint8]: ...


class _Column(ctypes.Structure):
    """`Column` of `leaf_columns.c`."""

    _fields_ = (
        ("place", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("is_null_absent", ctypes.c_int64),
        ("nulls", ctypes.c_int64),
        ("valid", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
    )


class _Library:
    """The functions of the library. They release the interpreter's lock while they run."""

    def __init__(self, library: ctypes.CDLL) -> None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        self.columns = library.quire_leaf_columns
        self.columns.argtypes = [
            pointer, number, number, number, ctypes.POINTER(_Column), number, number, pointer, pointer
        ]  # fmt: skip
        self.columns.restype = number
        self.texts = library.quire_leaf_texts
        self.texts.argtypes = [pointer, pointer, pointer, number, pointer]
        self.texts.restype = None


@cache
def _load(path: str) -> _Library:
    return _Library(ctypes.CDLL(path))


@dataclass(frozen=True, slots=True)
class WantedColumn:
    """A column of the result."""

    type: pa.DataType
    kind: int
    place: int
    """Position of its value in a record; `ROWID` if it is the rowid."""
    is_null_absent: bool
    """Whether a record that ends before this column means NULL."""

    @classmethod
    def of(cls, table: SqliteTable, name: str, kind: pa.DataType) -> WantedColumn | None:
        """Return the column, or `None` if its stored value may differ from what SQLite returns."""
        column = table.column(name)
        if column is None or column.place is None or kind not in _KINDS:
            return None
        taken = _KINDS[kind]
        if taken == WHOLE and affinity(column.declared) == "real":
            return None  # SQLite returns doubles for them
        if taken >= TEXT and column.place == ROWID:
            return None
        return cls(kind, taken, column.place, column.default is None)


class Decoded(NamedTuple):
    """The rows of some leaves."""

    rowids: NDArray[np.int64]
    is_odd: NDArray[np.bool_]
    arrays: list[pa.Array]
    """One array per requested column, in their order. Values of odd rows are undefined."""


@dataclass(frozen=True, slots=True)
class LeafDecoder:
    """Decodes columns from the leaves of one table."""

    columns: tuple[WantedColumn, ...]
    page_size: int
    usable: int
    """Bytes of a page that SQLite uses."""
    library: _Library

    @classmethod
    def of(cls, pages: LeafPages, table: SqliteTable, wanted: Sequence[tuple[str, pa.DataType]]) -> LeafDecoder | None:
        """Return a decoder for these columns of a table, or `None` if SQLite has to read them."""
        build = leaves_build()
        columns = [WantedColumn.of(table, name, kind) for name, kind in wanted]
        known = tuple(column for column in columns if column is not None)
        has_tree = bool(table.rowid and table.root and pages.size_pages)
        if not (build.path and has_tree and known) or len(known) < len(columns):
            return None
        try:
            first = pages.read_page(0)
            usable = pages.page_size - first[20]
            (encoding,) = unpack_from(">I", first, 56)
        except (StructError, IndexError):
            return None
        if encoding != _ENCODING_UTF8 or usable < _USABLE_MIN:
            return None
        return cls(known, pages.page_size, usable, _load(build.path))

    def decode(self, images: NDArray[np.uint8]) -> Decoded:
        """Decode the rows of leaves, one leaf per row of `images`. Raises `Unreadable` if one is no leaf or a text is not
        UTF-8."""
        counts = row_counts(images)
        rows = int(counts.sum())
        # The counts come from the pages: checked before anything is allocated for them.
        if counts.max() > self.usable // CELL_BYTES_MIN or rows * len(self.columns) > PAGE_VALUES_MAX:
            raise Unreadable(0)
        images = np.ascontiguousarray(images)
        rowids, is_odd = np.empty(rows, np.int64), np.empty(rows, np.bool_)
        given = (_Column * len(self.columns))()
        order = sorted(range(len(self.columns)), key=lambda number: self.columns[number].place)
        buffers = {number: _Buffers(self.columns[number], rows, given[at]) for at, number in enumerate(order)}
        taken = self.library.columns(
            images.ctypes.data, len(images), self.page_size, self.usable, given, len(given), rows, rowids.ctypes.data,
            is_odd.ctypes.data,
        )  # fmt: skip
        if taken != rows:
            raise Unreadable(0)
        for buffer in buffers.values():
            buffer.mark_misfits(is_odd)
        return Decoded(
            rowids, is_odd, [buffers[number].array(images.ctypes.data, self.library) for number in range(len(order))]
        )


class _Buffers:
    """The buffers that C decodes a column into."""

    def __init__(self, column: WantedColumn, rows: int, given: _Column) -> None:
        self._column, self._rows, self._given = column, rows, given
        self._valid = np.zeros((rows + 7) // 8, np.uint8)
        given.place, given.kind, given.is_null_absent = column.place, column.kind, column.is_null_absent
        given.valid = self._valid.ctypes.data
        if column.kind >= TEXT:
            self._offsets, self._positions = np.zeros(rows + 1, np.int32), np.empty(rows, np.int32)
            given.offsets, given.positions = self._offsets.ctypes.data, self._positions.ctypes.data
        else:
            self._values = np.empty(rows, np.int64)
            given.values = self._values.ctypes.data

    def mark_misfits(self, is_odd: NDArray[np.bool_]) -> None:
        """Mark the rows whose whole numbers are not of the column's type: only 0 and 1 are booleans. NULLs have the value 0."""
        if pa.types.is_boolean(self._column.type):
            is_odd |= self._values.view(np.uint64) > 1

    def array(self, pages: int, library: _Library) -> pa.Array:
        """Return the decoded column as an Arrow array."""
        valid = pa.py_buffer(self._valid) if self._given.nulls else None
        kind = self._column.type
        if self._column.kind < TEXT:
            stored = pa.int64() if pa.types.is_boolean(kind) else kind
            return pa.Array.from_buffers(stored, self._rows, [valid, pa.py_buffer(self._values)]).cast(kind)
        texts = np.empty(int(self._offsets[-1]), np.uint8)
        library.texts(pages, self._given.positions, self._given.offsets, self._rows, texts.ctypes.data)
        buffers = [valid, pa.py_buffer(self._offsets), pa.py_buffer(texts)]
        array = pa.Array.from_buffers(kind, self._rows, buffers)
        if self._column.kind == TEXT and texts.size and texts.max() >= 0x80:
            try:
                array.validate(full=True)
            except pa.ArrowInvalid as error:
                raise Unreadable(0) from error  # SQLite returns the text as stored; the caller decides what it means
        return array


# ── a range of rowids ─────────────────────────────────────────────────────────────────────────────────────────────────
def leaf_batches(
    pages: LeafPages, root: int, decoder: LeafDecoder, rowids: Rowids, as_batch: AsBatch, as_rows: AsRows
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a range, in order."""
    for span, leaves, images in _steps(pages, root, decoder, rowids):
        decoded = _decoded(decoder, leaves, images)
        if decoded is None:
            yield from as_rows(span)
            continue
        batch = as_batch(len(decoded.rowids), decoded.arrays)
        for first, last, is_plain in _runs(decoded, span):
            if is_plain:
                yield batch.slice(first, last - first + 1)
            else:
                yield from as_rows((int(decoded.rowids[first]), int(decoded.rowids[last])))


def _steps(
    pages: LeafPages, root: int, decoder: LeafDecoder, rowids: Rowids
) -> Iterator[tuple[Rowids, Leaves | None, NDArray[np.uint8]]]:
    """Yield (range, its leaves, their images) without gaps. The leaves are None if SQLite has to find them."""
    start, last = rowids
    try:
        for leaves in _read_together(leaves_within(by_number(pages), root, rowids, pages.size_pages), pages.page_size):
            images = pages.read_rows(leaves.pages - 1)
            for begin, end in _decoded_together(row_counts(images), VALUES_MAX // len(decoder.columns)):
                some = leaves.part(begin, end)
                stop = min(some.last, last)
                yield (start, stop), some, images[begin:end]
                start = stop + 1
    except (Unreadable, OutOfRange):
        yield (start, last), None, np.empty((0, pages.page_size), np.uint8)


def _read_together(parts: Iterator[Leaves], page_size: int) -> Iterator[Leaves]:
    """Yield the same leaves, `READ_BYTES` at a time. A part may be much smaller, or larger: an interior page of 64 KiB has up
    to 450 MB of leaves."""
    count, waiting = max(READ_BYTES // page_size, 1), list[Leaves]()
    for some in parts:
        waiting.append(some)
        if sum(map(len, waiting)) >= count:
            leaves = Leaves.joined(waiting)
            rest = len(leaves) - len(leaves) % count
            for start in range(0, rest, count):
                yield leaves.part(start, start + count)
            waiting = [leaves.part(rest, len(leaves))]
    if any(map(len, waiting)):
        yield Leaves.joined(waiting)


def row_counts(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return the number of rows that each leaf declares."""
    return images[:, 3].astype(np.int64) << 8 | images[:, 4]


def _decoded_together(counts: NDArray[np.int64], rows_max: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of runs of leaves that declare about `rows_max` rows together; at least one leaf each."""
    ends, begin, before = np.cumsum(counts), 0, 0
    while begin < len(counts):
        end = max(int(np.searchsorted(ends, before + rows_max, "right")), begin + 1)
        yield begin, end
        begin, before = end, int(ends[end - 1])


def _decoded(decoder: LeafDecoder, leaves: Leaves | None, images: NDArray[np.uint8]) -> Decoded | None:
    """Decode the rows of leaves; return `None` if SQLite has to read them."""
    if leaves is None:
        return None
    try:
        decoded = decoder.decode(images)
    except Unreadable:
        return None
    rowids = decoded.rowids
    is_rising = bool((rowids[1:] > rowids[:-1]).all())
    is_inside = leaves.first <= rowids[0] and rowids[-1] <= leaves.last
    return decoded if is_rising and is_inside else None


def _runs(decoded: Decoded, span: Rowids) -> Iterator[tuple[int, int, bool]]:
    """Yield (first row, last row, whether they are plain) for the rows in a range of rowids."""
    start = int(np.searchsorted(decoded.rowids, span[0]))
    stop = int(np.searchsorted(decoded.rowids, span[1], "right"))
    odd = start + np.flatnonzero(decoded.is_odd[start:stop])
    if len(odd) > ODD_SHARE_MAX * (stop - start):
        yield start, stop - 1, False
        return
    for run in np.split(odd, np.flatnonzero(np.diff(odd) > GAP_ROWS) + 1) if len(odd) else ():
        if start < run[0]:
            yield start, int(run[0]) - 1, True
        yield int(run[0]), int(run[-1]), False
        start = int(run[-1]) + 1
    if start < stop:
        yield start, stop - 1, True
