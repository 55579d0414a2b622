"""`quire.changes`: the change feed, as a range of sequences or as a stream.

    spark.read.format("quire.changes").option("store", path).option("first", 1).load()
    spark.readStream.format("quire.changes").option("store", path).option("cursor", "warehouse").load()

A change is one committed batch: `sequence`, `committed_at`, `kinds` (names of its operations), `operations` (a JSON array, as
docs/feed.md describes it), `generations` (component → generation), `trace_id`. The owner sends records as they are on its
disk; executors decode them.

- A range is read completely or not at all: changes that are no longer kept, or are trimmed during the read, raise `CursorLost`.
  A live cursor keeps them; without a cursor nothing keeps a range.
- A streaming query's offset is {"store": id, "sequence": n}: everything up to n has been read. It begins at the position of its
  cursor; a cursor that does not exist is registered at `start`.

Options of a range: `first` (default: the oldest kept), `last` (default: the head), both inclusive. Options of a stream:
`cursor`; `start` for a new cursor: `oldest` (the default), `latest`, a sequence to begin after, or `snapshot` with `database`
and `snapshot`: after the change that published it, so that reading the snapshot and then the stream leaves no gap;
`max_changes` in a batch. Options of both: `partitions`; `columns`: the JSON of operations takes half of the time, and is
built only if it is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import accumulate, chain
from operator import attrgetter
from struct import pack
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import (
    ArrayType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from quire.core.errors import CursorLost, InvalidInput, OutOfRange, TimedOut, UnknownCursor
from quire.core.json_values import plain
from quire.core.timeline import Gap, Gaps, distance, gap_of_start, pieces
from quire.manifest.change import CHANGE_LOG, ChangeRecord, Start, decode_changes
from quire.manifest.ops.base import Component
from quire.manifest.ops.cursors import refuse_lost
from quire.manifest.records import AuditAction, CursorState
from quire.service.tickets import TableTicket
from quire.spark.access import OwnerAddress
from quire.spark.sources.base import (
    WAIT_SECONDS,
    Offset,
    Options,
    QueryReader,
    QuireSource,
    SourceReader,
    default_partitions,
)
from quire.sqlite.arrow_rows import coalesced, numbers, texts

if TYPE_CHECKING:
    from quire.manifest.change import CursorInfo
    from quire.service.client import Client

SCHEMA = StructType(
    [
        StructField("sequence", LongType(), nullable=False),
        StructField("committed_at", TimestampType(), nullable=False),
        StructField("kinds", ArrayType(StringType(), containsNull=False), nullable=False),
        StructField("operations", StringType(), nullable=False),
        StructField("generations", MapType(StringType(), LongType(), valueContainsNull=False), nullable=False),
        StructField("trace_id", StringType(), nullable=False),
    ]
)

PARTITION_CHANGES_MIN = 1_000
"""Fewer changes are not worth a separate task."""

STEP_RECORDS = 4_096
"""Records that are decoded and converted to columns together: they share Arrow's cost per column."""


@dataclass(frozen=True, slots=True)
class ChangeRange:
    """Changes with first ≤ sequence ≤ last."""

    first: int
    last: int


# ── a range ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class ChangesReader(SourceReader):
    """Reads a range of sequences."""

    def __init__(self, options: Options, schema: StructType) -> None:
        options.need_schema(schema, _schema(options))
        options.refuse(("cursor", "start", "max_changes"), "streams", "use first and last, or readStream")
        super().__init__(options, schema)
        self._first = options.number("first", 0)
        self._last = options.number("last", 0)

    def plan(self) -> list[ChangeRange]:
        with self.access.connect() as client:
            info, gaps = client.info(), gaps_of(client)
        oldest, head = info.oldest_change, info.newest_change
        first, last = self._first or oldest, self._last or head
        if first < oldest:
            raise reader_too_late(first, oldest)
        if last > head:
            raise OutOfRange("the feed has not reached this sequence yet", last=last, head_sequence=head)
        if gap_of_start(gaps, first) is not None:
            refuse_lost(gaps, first - 1)
        refuse_lost(gaps, last)
        return split(ChangeRange(first, last), self.partitions_max, gaps)

    def batches(self, part: ChangeRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return read_changes(self.access, part, schema)


def gaps_of(owner: Client) -> tuple[Gap, ...]:
    """Return the sequences that takeovers have skipped."""
    batches = owner.scan("timeline", columns=("first_number", "last_sequence"))
    return tuple(Gap(row["last_sequence"], row["first_number"]) for batch in batches for row in batch.to_pylist())


def split(changes: ChangeRange, parts: int, gaps: Gaps = ()) -> list[ChangeRange]:
    """Return a range in parts of about the same size; none if it is empty. No part spans a gap: a takeover may add a part."""
    count = distance(gaps, changes.first - 1, changes.last)
    if count <= 0:
        return []
    step = max(-(-count // parts), PARTITION_CHANGES_MIN)
    return [
        ChangeRange(first, min(first + step - 1, last))
        for start, last in pieces(gaps, changes.first, changes.last)
        for first in range(start, last + 1, step)
    ]


def read_changes(access: OwnerAddress, changes: ChangeRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all changes of a range, with the columns of a schema."""
    expected = changes.first

    def decoded() -> Iterator[pa.RecordBatch]:
        nonlocal expected
        ticket = TableTicket(CHANGE_LOG.name, (), (changes.first,), (changes.last + 1,), raw=True)
        with closing(access.channel()) as channel:
            for batch in channel.stream(ticket):
                raws = batch.column("value").to_pylist()
                for start in range(0, len(raws), STEP_RECORDS):
                    records = decode_changes(raws[start : start + STEP_RECORDS])
                    if [record.sequence for record in records] != list(range(expected, expected + len(records))):
                        return  # some were trimmed during the read
                    expected += len(records)
                    yield as_batch(records, schema)

    yield from coalesced(decoded())
    if expected != changes.last + 1:
        raise reader_too_late(expected, changes.last + 1)


def reader_too_late(first: int, oldest: int) -> CursorLost:
    """Return the error for changes that have been trimmed."""
    return CursorLost(
        f"the changes from {first:,} on are no longer kept",
        hint="start again from a snapshot, with a cursor that retains unread changes",
        oldest_sequence=oldest,
    )


class ChangesSource(QuireSource):
    """The data source `quire.changes`."""

    NAME = "quire.changes"
    KNOWN = ("first", "last", "cursor", "start", "database", "snapshot", "max_changes", "partitions", "columns")
    READER = ChangesReader

    def schema(self) -> StructType:
        return _schema(self.parse(self.options))

    def streamReader(self, schema: StructType) -> ChangesQueryReader:  # noqa: N802 - Spark gives the name
        return ChangesQueryReader(self.parse(self.options), schema)


def _schema(options: Options) -> StructType:
    return StructType([SCHEMA[name] for name in options.columns(SCHEMA.names, of="a change")])


# ── a streaming query ─────────────────────────────────────────────────────────────────────────────────────────────────
class ChangesQueryReader(QueryReader):
    """A streaming query whose progress is the acknowledgement of a cursor: nothing above it is trimmed."""

    HOLDER = "cursor"
    POSITION = "sequence"

    def __init__(self, options: Options, schema: StructType) -> None:
        options.need_schema(schema, _schema(options))
        options.refuse(("first", "last"), "ranges", "use start, or read instead of readStream")
        super().__init__(options, schema, options.number("max_changes", 0))
        self._start = _Start(options)
        self._partitions_max = options.number("partitions", default_partitions(), least=1)

    def connect(self) -> Client:
        return self.access.connect()

    def identity(self) -> dict[str, Any]:
        return {"store": self.owner.server.store_id}

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark gives these names
        """Return the position of the cursor."""
        try:
            cursor = self.owner.feed.cursor(self.holder)
        except UnknownCursor:
            cursor = self._start.register(self.owner, self.holder)
        self._check_alive(cursor)
        return self.offset(cursor.acked_sequence)

    def end(self) -> int:
        return int(self.owner.feed.head())

    def end_beyond(self, position: int) -> int:
        head = self.end()
        if head <= position:
            with suppress(TimedOut):
                head = self.owner.feed.wait(position, WAIT_SECONDS)
        return head

    def gaps(self) -> Gaps:
        return gaps_of(self.owner)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        first, last = self.position(start) + 1, self.position(end)
        if first > last:
            return []
        with self.holder_required():
            cursor = self.owner.feed.cursor(self.holder)
        self._check_alive(cursor)
        self.need_unacknowledged(first, cursor.acked_sequence + 1)
        if first < cursor.oldest_sequence:
            raise reader_too_late(first, cursor.oldest_sequence)
        gaps = self.gaps()
        for position in (first - 1, last):
            refuse_lost(gaps, position, cursor=self.holder)
        return [InputPartition(part) for part in split(ChangeRange(first, last), self._partitions_max, gaps)]

    def batches(self, part: ChangeRange, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return read_changes(self.access, part, schema)

    def commit(self, end: Offset) -> None:
        """Acknowledge: Spark has processed everything up to `end`."""
        with self.holder_required():
            self.owner.feed.acknowledge(self.holder, self.position(end))

    def _check_alive(self, cursor: CursorInfo) -> None:
        if cursor.state is CursorState.LOST:
            raise CursorLost(
                f"the cursor is lost: {cursor.lost_reason}",
                hint="start again from a snapshot, with a new cursor and checkpoint location",
                cursor=self.holder,
            )


class _Start:
    """Where a new cursor begins."""

    def __init__(self, options: Options) -> None:
        self.where = options.text("start", "oldest").lower()
        if self.where not in ("oldest", "latest", "snapshot") and not self.where.isdecimal():
            raise InvalidInput("a stream must start at oldest, latest, snapshot or a sequence", start=self.where)
        if self.where == "snapshot":
            self.database, self.snapshot = options.need("database"), options.need("snapshot")

    def register(self, owner: Client, name: str) -> CursorInfo:
        if self.where in ("oldest", "latest"):
            return owner.feed.register(Start(self.where), name=name)
        wanted = self._published(owner) if self.where == "snapshot" else int(self.where)
        cursor = owner.feed.register(wanted, name=name)
        if cursor.acked_sequence > wanted:  # the feed moves the start to the oldest kept change: that would be a gap
            owner.feed.drop(cursor.cursor_id)
            raise reader_too_late(wanted + 1, cursor.oldest_sequence)
        return cursor

    def _published(self, owner: Client) -> int:
        """Return the sequence of the change that published a snapshot."""
        info = owner.get_snapshot(self.database, self.snapshot)
        for batch in owner.scan("audit", prefix=(info.db_id,), columns=("sequence", "action", "number")):
            for row in batch.to_pylist():
                if row["action"] == AuditAction.SNAPSHOT_CREATED and row["number"] == info.snapshot_id:
                    return int(row["sequence"])
        raise CursorLost(
            "the audit log no longer has the creation of this snapshot",
            hint="create a new snapshot",
            snapshot=self.snapshot,
        )


# ── changes as columns ────────────────────────────────────────────────────────────────────────────────────────────────
ToJson = Callable[[Any], str]

_COMPONENTS = {int(component): component.name.lower() for component in Component}
_encode = msgspec.json.Encoder().encode


def as_batch(records: list[ChangeRecord], schema: pa.Schema) -> pa.RecordBatch:
    """Return changes as rows; only the columns of the schema are built."""
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
    return _texts(_arrays(operations_json(list(chain.from_iterable(operations))), operations))


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
    """Turn the JSON of values into JSON of the lists they come from."""
    if len(values) == len(lists) and all(lists):  # one each, the usual case
        return list(map("[%s]".__mod__, values))
    ends = list(accumulate(map(len, lists)))
    return [f"[{','.join(values[end - len(values_of) : end])}]" for end, values_of in zip(ends, lists)]


def operations_json(ops: Sequence[msgspec.Struct]) -> list[str]:
    """Return operations as JSON, built by type and field: that takes a third of the time of one by one.

    >>> from quire.manifest.ops.base import Counter, ReserveIds
    >>> operations_json([ReserveIds(Counter.JOB, 7)])
    ['{"op":"ReserveIds","counter":"job","upto":7}']
    """
    kinds = set(map(type, ops))
    if len(kinds) == 1:
        return _json_of_kind(kinds.pop(), ops)
    result = [""] * len(ops)
    for kind in kinds:
        places = [place for place, op in enumerate(ops) if type(op) is kind]
        for place, text in zip(places, _json_of_kind(kind, [ops[place] for place in places])):
            result[place] = text
    return result


def _json_of_kind(kind: type[msgspec.Struct], ops: Sequence[msgspec.Struct]) -> list[str]:
    """Do the same for operations of one type."""
    form, fields = _template(kind)
    if not fields:
        return [form] * len(ops)
    columns = [map(getter, ops) if to_json is None else map(to_json, map(getter, ops)) for getter, to_json in fields]
    return list(map(form.__mod__, zip(*columns)))


@cache
def _template(kind: type[msgspec.Struct]) -> tuple[str, list[tuple[Callable[[Any], Any], ToJson | None]]]:
    """Return the JSON of a type of operations with gaps, and a function that gives the text for each gap; None for numbers."""
    hints = get_type_hints(kind)
    names = kind.__struct_fields__
    form = ",".join([f'"op":"{kind.__name__}"', *(f'"{name}":%s' for name in names)])
    return f"{{{form}}}", [(attrgetter(name), _to_json(hints[name])) for name in names]


def _to_json(hint: Any) -> ToJson | None:
    if hint is int:
        return None
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {member: f'"{member.name.lower()}"' for member in hint}.__getitem__
    return _json


def _json(value: Any) -> str:
    return _encode(plain(value)).decode()


def _texts(values: list[str]) -> pa.Array:
    try:
        return texts(values)
    except ValueError:  # no values, or a NUL in one
        return pa.array(values, pa.string())


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    ends = [0, *accumulate(map(len, lists))]
    return pa.Array.from_buffers(pa.int32(), len(ends), [None, pa.py_buffer(pack(f"{len(ends)}i", *ends))])
