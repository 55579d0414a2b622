"""Records: round trip, older and newer bytes, bytes that are not a record."""

from __future__ import annotations

import enum
import struct
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import FormatTooNew, ManifestDamaged
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.codec import VERSION
from quire.manifest.ops.registry import OPS
from quire.manifest.records import Record, SnapshotKind, SnapshotRecord
from quire.manifest.tables import TABLES, Table

WIDTHS = {"B": 8, "H": 16, "I": 32, "Q": 64}
RECORD_TABLES = [table for table in TABLES.values() if table is not CHANGE_LOG]
MSGPACK = [table for table in TABLES.values() if table.codec.packed is None]
PACKED = [table for table in TABLES.values() if table.codec.packed is not None]

FEWER_EXAMPLES = settings(max_examples=settings().max_examples // 4)
"""For tests of every table or operation: these share their code, so that together they try it often enough."""


def values(hint: Any) -> st.SearchStrategy[Any]:
    """A strategy for the values of a record's field, from its type."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    if isinstance(hint, type) and issubclass(hint, Record):
        return records(hint)
    if isinstance(hint, UnionType):
        return st.one_of([values(part) for part in get_args(hint)])
    # Hypothesis would use the default of a record's field as a value even if it is a factory.
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]))
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return st.tuples(*map(values, get_args(hint)))
    return st.from_type(hint)


# Fields hold no number beyond u64, and no NaN, which does not equal itself.
st.register_type_strategy(int, st.integers(0, 2**64 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))


def records(kind: type[Any]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    fields = {name: values(hints[name]) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


def rows(table: Table[Any]) -> st.SearchStrategy[Any]:
    """A strategy for records of a table; the fields of packed ones are within their widths."""
    kind, packed = table.codec.record_type, table.codec.packed
    if packed is None:
        return records(kind)
    widths = [WIDTHS[code] for code in packed.format[2:]]
    return st.builds(kind, *(st.integers(0, 2**bits - 1) for bits in widths))


TABLE_ROWS = st.sampled_from(RECORD_TABLES).flatmap(lambda table: st.tuples(st.just(table), rows(table)))


@given(TABLE_ROWS)
def test_decode_is_the_inverse_of_encode(case: tuple[Table[Any], Any]) -> None:
    table, record = case
    raw = table.codec.encode(record)
    assert VERSION.unpack_from(raw) == (table.codec.version,)
    assert table.codec.decode(raw) == record
    assert table.codec.encode(table.codec.decode(raw)) == raw


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.__name__)
def test_a_change_record_round_trips_every_operation(op: type[Any]) -> None:
    @FEWER_EXAMPLES
    @given(records(op))
    def round_trip(value: Any) -> None:
        change = ChangeRecord(7, 8, (value,), ((1, 2),), "trace")
        decoded = CHANGE_LOG.codec.decode(CHANGE_LOG.codec.encode(change))
        assert decoded == change
        assert type(decoded.operations[0]) is op

    round_trip()


@given(TABLE_ROWS.filter(lambda case: case[0].codec.packed is None), st.data())
def test_older_shorter_rows_decode_with_defaults(case: tuple[Table[Any], Any], data: st.DataObject) -> None:
    table, record = case
    kind = table.codec.record_type
    fields, defaults = kind.__struct_fields__, kind.__struct_defaults__
    required = len(fields) - len(defaults)
    length = data.draw(st.integers(required, len(fields)))
    array = msgspec.msgpack.decode(table.codec.encode(record)[2:])
    old = table.codec.decode(VERSION.pack(1) + msgspec.msgpack.encode(array[:length]))
    assert msgspec.structs.astuple(old)[:length] == msgspec.structs.astuple(record)[:length]
    fresh = kind(*msgspec.structs.astuple(record)[:required])
    assert msgspec.structs.astuple(old)[length:] == msgspec.structs.astuple(fresh)[length:]


@given(TABLE_ROWS.filter(lambda case: case[0].codec.packed is None))
def test_rows_with_future_fields_decode_without_them(case: tuple[Table[Any], Any]) -> None:
    table, record = case
    array = msgspec.msgpack.decode(table.codec.encode(record)[2:])
    future = VERSION.pack(1) + msgspec.msgpack.encode([*array, "new", 7])
    assert table.codec.decode(future) == record


@given(TABLE_ROWS, st.integers(1, 1000))
def test_a_newer_version_is_rejected(case: tuple[Table[Any], Any], distance: int) -> None:
    table, record = case
    raw = VERSION.pack(table.codec.version + distance) + table.codec.encode(record)[2:]
    with pytest.raises(FormatTooNew) as caught:
        table.codec.decode(raw)
    assert caught.value.where["found"] == table.codec.version + distance


@given(st.sampled_from(list(TABLES.values())), st.binary(max_size=64))
def test_bytes_that_are_not_a_record_are_reported_as_damage(table: Table[Any], raw: bytes) -> None:
    """A body with no version, with a version, or random bytes: a record, `ManifestDamaged` or `FormatTooNew`, never
    another error of the codec."""
    for candidate in (raw, table.codec.head + raw):
        try:
            table.codec.decode(candidate)
        except (ManifestDamaged, FormatTooNew):
            pass


@given(TABLE_ROWS, st.data())
def test_a_truncated_row_is_damage(case: tuple[Table[Any], Any], data: st.DataObject) -> None:
    table, record = case
    raw = table.codec.encode(record)
    cut = raw[: data.draw(st.integers(0, len(raw) - 1))]
    with pytest.raises(ManifestDamaged):
        table.codec.decode(cut)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
@pytest.mark.parametrize("raw", [b"", b"\x01", b"\x00\x00", b"\x00\x00\x90", b"\x01\x00\xc0", b"\x01\x00\x81\xa1a\x01"])
def test_short_versionless_and_foreign_bytes_are_damage(table: Table[Any], raw: bytes) -> None:
    with pytest.raises(ManifestDamaged):
        table.codec.decode(raw)


@pytest.mark.parametrize("table", PACKED, ids=lambda table: table.name)
def test_numpy_reads_packed_rows_as_decode_does(table: Table[Any]) -> None:
    numpy = pytest.importorskip("numpy")

    @given(rows(table))
    def check(record: Any) -> None:
        row = numpy.frombuffer(table.codec.encode(record), dtype=table.codec.numpy_fields())[0]
        assert tuple(map(int, row)) == (table.codec.version, *msgspec.structs.astuple(record))

    check()


@pytest.mark.parametrize("table", MSGPACK, ids=lambda table: table.name)
def test_the_writer_may_concatenate_head_and_body(table: Table[Any]) -> None:
    @FEWER_EXAMPLES
    @given(rows(table) if table is not CHANGE_LOG else st.just(ChangeRecord(1, 2, (), ())))
    def check(record: Any) -> None:
        assert table.codec.head + table.codec.body(record) == table.codec.encode(record)

    check()


def test_a_packed_number_that_does_not_fit_is_a_struct_error_for_the_writer_to_translate() -> None:
    table = TABLES["gc_refcounts"]
    with pytest.raises(struct.error):
        table.codec.encode(table.codec.record_type(2**32, 0, 0))


def test_a_snapshot_of_the_reserved_kind_is_anonymous() -> None:
    """Kind 3 was LEASED; old stores still have such rows."""
    codec = TABLES["snapshot_index"].codec
    row = bytearray(codec.encode(SnapshotRecord("", SnapshotKind.ANONYMOUS, 1, 1)))
    assert row[4] == SnapshotKind.ANONYMOUS
    row[4] = 3
    assert codec.decode(bytes(row)).kind is SnapshotKind.ANONYMOUS
