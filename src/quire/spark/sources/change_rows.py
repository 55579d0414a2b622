"""Changes as rows of `quire.changes`: the same JSON that `quire.manifest.change` makes, some thousand times as many.

Rules
  1. `operations` is what `plain` makes of them, byte for byte: what differs is that the way there is worked out once for each
     type of operation, not for each operation.
  2. Records are decoded and turned into columns in small steps, which stay in the processor's cache.

Importable on executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from itertools import accumulate, chain
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa

from quire.core.plain import plain
from quire.manifest.change import ChangeRecord, decode_changes
from quire.manifest.ops.base import Component
from quire.spark.sources.sqlite_rows import joined

STEP_RECORDS = 512
BATCH_BYTES = 4 << 20

Teller = Callable[[Any], Any]

_COMPONENTS = {int(each): each.name.lower() for each in Component}
_encode_lines = msgspec.json.Encoder().encode_lines
_as_dict = msgspec.structs.asdict


def change_batches(raws: Sequence[bytes], schema: pa.Schema, first: int) -> Iterator[pa.RecordBatch]:
    """Rows of records as they are on disk, which must be those from `first` on; the first that is not ends them."""
    made: list[pa.RecordBatch] = []
    size = 0
    for start in range(0, len(raws), STEP_RECORDS):
        records = decode_changes(list(raws[start : start + STEP_RECORDS]))
        if [record.sequence for record in records] != list(range(first + start, first + start + len(records))):
            break
        made.append(as_batch(records, schema))
        size += made[-1].nbytes
        if size >= BATCH_BYTES:
            yield joined(made)
            made, size = [], 0
    if made:
        yield joined(made)


def as_batch(records: list[ChangeRecord], schema: pa.Schema) -> pa.RecordBatch:
    """Changes as rows."""
    operations = [record.operations for record in records]
    reached = [record.generation_updates for record in records]
    flat = list(chain.from_iterable(reached))
    kinds = pa.ListArray.from_arrays(
        _offsets(operations), pa.array([type(op).__name__ for ops in operations for op in ops], pa.string())
    )
    generations = pa.MapArray.from_arrays(
        _offsets(reached),
        pa.array([_COMPONENTS.get(number) or str(number) for number, _ in flat], pa.string()),
        pa.array([generation for _, generation in flat], pa.int64()),
    )
    columns = [
        pa.array([record.sequence for record in records], pa.int64()),
        pa.array([record.committed_at_ms * 1_000 for record in records], pa.int64()).cast(schema.field(1).type),
        kinds.cast(schema.field(2).type),
        pa.array(_lines([[told(op) for op in ops] for ops in operations]), pa.string()),
        generations.cast(schema.field(4).type),
        pa.array([record.trace_id for record in records], pa.string()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _lines(values: list[Any]) -> list[str]:
    """The JSON of each; all in one call, and cut where no JSON has a newline of its own."""
    return _encode_lines(values).decode().split("\n")[: len(values)]


def told(op: msgspec.Struct) -> dict[str, Any]:
    """An operation as JSON has it (rule 1).

    >>> from quire.manifest.ops.base import Counter, ReserveIds
    >>> told(ReserveIds(Counter.JOB, 7)) == plain(ReserveIds(Counter.JOB, 7))
    True
    """
    name, tellers = _tellers(type(op))
    form = {"op": name, **_as_dict(op)}
    for field, tell in tellers:
        form[field] = tell(form[field])
    return form


@cache
def _tellers(kind: type[msgspec.Struct]) -> tuple[str, list[tuple[str, Teller]]]:
    """The name of a type of operations, and how those of its fields are told that are not told as they are."""
    hints = get_type_hints(kind)
    found = [(name, _teller(hints[name])) for name in kind.__struct_fields__]
    return kind.__name__, [(name, tell) for name, tell in found if tell is not None]


def _teller(hint: Any) -> Teller | None:
    if hint in (int, str, float, bool):
        return None
    if hint is bytes:
        return bytes.hex
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {each: each.name.lower() for each in hint}.__getitem__
    return plain


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    return pa.array([0, *accumulate(map(len, lists))], pa.int32())
