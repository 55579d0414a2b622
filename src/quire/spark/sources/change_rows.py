"""Changes as rows of `quire.changes`: the same JSON that `quire.manifest.change` makes, some thousand times as many.

Rules
  1. `operations` is what `plain` makes of them, byte for byte: what differs is that the way there is worked out once for each
     type of operation, not for each operation.
  2. Records are decoded and turned into columns some thousand at a time: what Arrow takes for a column is shared by them.

Importable on executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from itertools import accumulate, chain
from operator import attrgetter
from struct import pack
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa

from quire.core.json_values import plain
from quire.manifest.change import ChangeRecord, decode_changes
from quire.manifest.ops.base import Component
from quire.spark.sources.sqlite_rows import joined, numbers, texts

STEP_RECORDS = 4_096
BATCH_BYTES = 4 << 20

Getter = Callable[[Any], Any]
Teller = Callable[[Any], str]

_COMPONENTS = {int(each): each.name.lower() for each in Component}
_encode = msgspec.json.Encoder().encode


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
    """Changes as rows; of a schema with some of the columns only those are made."""
    columns = [_COLUMNS[field.name](records, field.type) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _sequences(records: list[ChangeRecord], _: pa.DataType) -> pa.Array:
    return numbers("q", [record.sequence for record in records])


def _times(records: list[ChangeRecord], kind: pa.DataType) -> pa.Array:
    return numbers("q", [record.committed_at_ms * 1_000 for record in records]).view(kind)


def _kinds(records: list[ChangeRecord], kind: pa.DataType) -> pa.Array:
    operations = [record.operations for record in records]
    names = _texts([type(op).__name__ for op in chain.from_iterable(operations)])
    return pa.ListArray.from_arrays(_offsets(operations), names, type=kind)


def _operations(records: list[ChangeRecord], _: pa.DataType) -> pa.Array:
    operations = [record.operations for record in records]
    return _texts(_arrays(told(list(chain.from_iterable(operations))), operations))


def _generations(records: list[ChangeRecord], kind: pa.DataType) -> pa.Array:
    reached = [record.generation_updates for record in records]
    updates = list(chain.from_iterable(reached))
    names = _texts([_COMPONENTS.get(number) or str(number) for number, _ in updates])
    numbers_reached = numbers("q", [generation for _, generation in updates])
    return pa.MapArray.from_arrays(_offsets(reached), names, numbers_reached, type=kind)


def _traces(records: list[ChangeRecord], _: pa.DataType) -> pa.Array:
    return _texts([record.trace_id for record in records])


_COLUMNS: dict[str, Callable[[list[ChangeRecord], pa.DataType], pa.Array]] = {
    "sequence": _sequences,
    "committed_at": _times,
    "kinds": _kinds,
    "operations": _operations,
    "generations": _generations,
    "trace_id": _traces,
}


def _arrays(values: list[str], lists: Sequence[Sequence[Any]]) -> list[str]:
    """The JSON of values as JSON of the lists they come from."""
    if len(values) == len(lists) and all(lists):  # one each, as nearly always
        return list(map("[%s]".__mod__, values))
    ends = list(accumulate(map(len, lists)))
    return [f"[{','.join(values[end - len(each) : end])}]" for end, each in zip(ends, lists)]


def told(ops: Sequence[msgspec.Struct]) -> list[str]:
    """Operations as JSON (rule 1), type by type and field by field: that takes a third of the time that one by one does.

    >>> from quire.manifest.ops.base import Counter, ReserveIds
    >>> told([ReserveIds(Counter.JOB, 7)])
    ['{"op":"ReserveIds","counter":"job","upto":7}']
    """
    kinds = set(map(type, ops))
    if len(kinds) == 1:
        return _told_alike(kinds.pop(), ops)
    found = [""] * len(ops)
    for kind in kinds:
        places = [place for place, op in enumerate(ops) if type(op) is kind]
        for place, text in zip(places, _told_alike(kind, [ops[place] for place in places])):
            found[place] = text
    return found


def _told_alike(kind: type[msgspec.Struct], ops: Sequence[msgspec.Struct]) -> list[str]:
    """The same, for operations of one type."""
    form, tellers = _teller_of(kind)
    if not tellers:
        return [form] * len(ops)
    columns = [map(getter, ops) if tell is None else map(tell, map(getter, ops)) for getter, tell in tellers]
    return list(map(form.__mod__, zip(*columns)))


@cache
def _teller_of(kind: type[msgspec.Struct]) -> tuple[str, list[tuple[Getter, Teller | None]]]:
    """The JSON of a type of operations with gaps, and what gives the text for each gap; a number is its own."""
    hints = get_type_hints(kind)
    names = kind.__struct_fields__
    form = ",".join([f'"op":"{kind.__name__}"', *(f'"{name}":%s' for name in names)])
    return f"{{{form}}}", [(attrgetter(name), _teller(hints[name])) for name in names]


def _teller(hint: Any) -> Teller | None:
    if hint is int:
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {each: f'"{each.name.lower()}"' for each in hint}.__getitem__
    return _json


def _json(value: Any) -> str:
    return _encode(plain(value)).decode()


def _texts(values: list[str]) -> pa.Array:
    try:
        return texts(values)
    except ValueError:  # none at all, or a NUL in one
        return pa.array(values, pa.string())


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    ends = [0, *accumulate(map(len, lists))]
    return pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(pack(f"{len(ends)}i", *ends))])
