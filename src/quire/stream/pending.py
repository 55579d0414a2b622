"""What has been appended to a stream and is not written yet: records as they came, and the blocks they become.

Terms
  run   records that become one block; a batch that needs more than one block, or is an Arrow column, is a run of its own

Pure functions and values, any thread. Raises `InvalidInput` for what is not records.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from quire.core.errors import InvalidInput
from quire.stream.segment import BLOCK_BYTES, BLOCK_RECORDS_MAX, body_of, body_of_arrow, parts

Column: TypeAlias = Any
"""A `pyarrow.Array`."""
Records: TypeAlias = "bytes | bytearray | memoryview | Sequence[bytes] | pa.Array | pa.ChunkedArray"
"""What `append` takes: one record, or many."""


@dataclass(slots=True)
class Run:
    """Pending records with consecutive ids."""

    first: int
    payloads: list[bytes] | Column
    size: int = BLOCK_BYTES
    """What it may take."""
    room: int = BLOCK_BYTES
    """What its block still takes, at 4 bytes a record on top: so it has no more than `BLOCK_RECORDS_MAX`."""
    is_batch: bool = False
    """Whether it is one append that nothing is added to."""

    def bodies(self) -> Generator[tuple[bytes, int], None, None]:
        """(body, records) of each of its blocks."""
        payloads = self.payloads
        if not self.is_batch:
            yield body_of(payloads), len(payloads)
        elif isinstance(payloads, list):
            for start, stop in parts(list(map(len, payloads))):
                yield body_of(payloads[start:stop]), stop - start
        else:
            for start, stop in parts(_sizes(payloads)):
                yield body_of_arrow(payloads.slice(start, stop - start)), stop - start


FULL = Run(0, [], 0, -1)
"""Takes nothing."""


@dataclass(frozen=True, slots=True)
class Many:
    """Records that were given together."""

    payloads: list[bytes] | Column
    size: int
    """What they take in blocks, heads left out."""
    largest: int

    @property
    def is_small(self) -> bool:
        """Whether they go into a block together with others."""
        payloads = self.payloads
        return isinstance(payloads, list) and self.size <= BLOCK_BYTES and len(payloads) <= BLOCK_RECORDS_MAX


def many(records: Records) -> Many:
    """The records of an append."""
    if isinstance(records, (pa.Array, pa.ChunkedArray)):
        column = _binary(records)
        sizes = _sizes(column)
        return Many(column, int(sizes.sum()) + 4 * len(column), int(sizes.max(initial=0)))
    if isinstance(records, str) or not isinstance(records, Sequence):
        raise InvalidInput("records are bytes", hint="encode them first", type=type(records).__name__)
    payloads = list(records)
    if any(type(each) is not bytes for each in payloads):
        raise InvalidInput("records are bytes", hint="encode them first")
    lengths = list(map(len, payloads))
    return Many(payloads, sum(lengths) + 4 * len(payloads), max(lengths, default=0))


def _sizes(column: Column) -> Any:
    if not len(column):
        return np.zeros(0, np.int64)
    _, offsets, _ = column.buffers()
    return np.diff(np.frombuffer(offsets, np.int32, len(column) + 1, column.offset * 4))


def _binary(records: Column) -> Column:
    """One binary column without nulls."""
    column = records
    if isinstance(records, pa.ChunkedArray):
        column = pa.concat_arrays(records.chunks) if records.num_chunks else pa.array([], pa.binary())
    if column.null_count:
        raise InvalidInput("a record cannot be null", hint="drop the nulls, or fill them", nulls=column.null_count)
    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise InvalidInput("records are a binary or string column", hint="cast it first", type=str(column.type))
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


assert BLOCK_BYTES // 4 <= BLOCK_RECORDS_MAX
