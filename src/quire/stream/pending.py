"""What has been appended to a stream and is not written yet: records as they came, and the blocks they become.

Terms
  run   records that become one block; a batch that needs more than one block, or is an Arrow column, is a run of its own

Pure functions and values, any thread. Raises `InvalidInput` for what is not records.
Arrow and numpy are loaded when a column comes; who gives bytes does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from quire.core.errors import InvalidInput
from quire.stream.segment import BLOCK_BYTES, BLOCK_RECORDS_MAX, Body, body_of, body_of_arrow, parts

if TYPE_CHECKING:
    import pyarrow as pa

Column: TypeAlias = Any
"""A `pyarrow.Array`."""
Records: TypeAlias = "bytes | bytearray | memoryview | Sequence[bytes] | pa.Array | pa.ChunkedArray"
"""What `append` takes: one record, or many."""


class Run(msgspec.Struct):
    """Pending records with consecutive ids."""

    first: int
    payloads: Any
    """A list, or of a batch that came as a column the column or the body of its one block."""
    size: int = BLOCK_BYTES
    """What it may take."""
    room: int = BLOCK_BYTES
    """What its block still takes, at 4 bytes a record on top: so it has no more than `BLOCK_RECORDS_MAX`."""

    def bodies(self) -> list[Body]:
        """Those of its blocks."""
        payloads = self.payloads
        if type(payloads) is Body:
            return [payloads]
        is_list = type(payloads) is list
        encode = body_of if is_list else body_of_arrow
        if self.size <= BLOCK_BYTES and len(payloads) <= BLOCK_RECORDS_MAX:
            return [encode(payloads)]
        ends = list(accumulate(map(len, payloads))) if is_list else _sizes(payloads).cumsum()
        return [encode(payloads[start:stop]) for start, stop in parts(ends)]


FULL = Run(0, [], 0, -1)
"""Takes nothing."""


class Many(NamedTuple):
    """Records that were given together."""

    payloads: Any
    """As in `Run`."""
    records: int
    size: int
    """What they take in blocks, heads left out."""
    given: Any

    def largest(self) -> int:
        """The size of the largest record: no more than `size`, which is asked first."""
        given = self.given
        return max(map(len, given), default=0) if isinstance(given, list) else int(_sizes(given).max(initial=0))

    @property
    def is_small(self) -> bool:
        """Whether they go into a block together with others."""
        return type(self.payloads) is list and self.size <= BLOCK_BYTES and self.records <= BLOCK_RECORDS_MAX


def many(records: Records) -> Many:
    """The records of an append."""
    if type(records) is not list and (isinstance(records, str) or not isinstance(records, Sequence)):
        return _column(_binary(records))
    payloads = list(records)
    if any(type(each) is not bytes for each in payloads):
        raise InvalidInput("records are bytes", hint="encode them first")
    return Many(payloads, len(payloads), sum(map(len, payloads)) + 4 * len(payloads), payloads)


def _column(column: Column) -> Many:
    count = len(column)
    if not count:
        return Many([], 0, 0, [])
    body = body_of_arrow(column)
    size = len(body.pieces[-1]) + 4 * count
    fits = size <= BLOCK_BYTES and count <= BLOCK_RECORDS_MAX
    return Many(body if fits else column, count, size, column)


def _sizes(column: Column) -> Any:
    import numpy as np

    return np.diff(np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4))


def _binary(records: Column) -> Column:
    """One binary column without nulls."""
    import pyarrow as pa

    if not isinstance(records, pa.Array | pa.ChunkedArray):
        raise InvalidInput("records are bytes", hint="encode them first", type=type(records).__name__)
    column = records
    if isinstance(records, pa.ChunkedArray):
        column = pa.concat_arrays(records.chunks) if records.num_chunks else pa.array([], pa.binary())
    if column.null_count:
        raise InvalidInput("a record cannot be null", hint="drop the nulls, or fill them", nulls=column.null_count)
    if column.type == pa.binary():
        return column
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if not pa.types.is_large_binary(column.type):
        raise InvalidInput("records are a binary or string column", hint="cast it first", type=str(column.type))
    return column.cast(pa.binary())


assert BLOCK_BYTES // 4 <= BLOCK_RECORDS_MAX
