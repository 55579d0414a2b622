"""Keys: round trip, order, range, prefixes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import OutOfRange
from quire.core.limits import LMDB_KEY_BYTES_MAX
from quire.manifest.change import CHANGE_LOG
from quire.manifest.keys import KeyCodec, prefix_end
from quire.manifest.tables import TABLES

BITS = {"u8": 8, "u16": 16, "u32": 32, "u64": 64}
assert CHANGE_LOG.name in TABLES


def field(kind: str) -> st.SearchStrategy[Any]:
    if kind == "text":
        return st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
    if kind == "raw":
        return st.binary(min_size=1, max_size=40)
    return st.one_of(st.integers(0, 3), st.integers(0, 2 ** BITS[kind] - 1), st.just(2 ** BITS[kind] - 1))


def tuples(codec: KeyCodec) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(*(field(kind) for _, kind in codec.fields))


CODECS = st.sampled_from([table.key for table in TABLES.values()])
PARTS = CODECS.flatmap(lambda codec: st.tuples(st.just(codec), tuples(codec)))
PAIRS = CODECS.flatmap(lambda codec: st.tuples(st.just(codec), tuples(codec), tuples(codec)))


@given(PARTS)
def test_unpack_is_the_inverse_of_pack(case: tuple[KeyCodec, tuple[Any, ...]]) -> None:
    codec, parts = case
    key = codec.pack(*parts)
    assert codec.unpack(key) == parts
    assert codec.width is None or len(key) == codec.width


@given(PAIRS)
def test_byte_order_is_tuple_order(case: tuple[KeyCodec, tuple[Any, ...], tuple[Any, ...]]) -> None:
    codec, first, second = case
    assert (codec.pack(*first) < codec.pack(*second)) == (first < second)
    assert (codec.pack(*first) == codec.pack(*second)) == (first == second)


@given(PARTS, st.data())
def test_a_number_out_of_range_is_rejected(case: tuple[KeyCodec, tuple[Any, ...]], data: st.DataObject) -> None:
    codec, parts = case
    numeric = [index for index, (_, kind) in enumerate(codec.fields) if kind in BITS]
    if not numeric:
        return
    index = data.draw(st.sampled_from(numeric))
    limit = 2 ** BITS[codec.fields[index][1]]
    wrong = data.draw(st.sampled_from([-1, limit, limit * 3, -(2**80), 1.5, "x", None]))
    invalid = (*parts[:index], wrong, *parts[index + 1 :])
    with pytest.raises(OutOfRange):
        codec.pack(*invalid)
    with pytest.raises(OutOfRange):
        codec.prefix(*invalid[: index + 1])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_key_with_the_wrong_number_of_fields_is_rejected(count: int) -> None:
    codec = KeyCodec(("db_id", "u32"), ("shard", "u16"))
    with pytest.raises(OutOfRange):
        codec.pack(*range(count))


@pytest.mark.parametrize("name", ["", "x" * LMDB_KEY_BYTES_MAX + "x", "\ud800"])
def test_text_that_cannot_be_a_key_is_rejected(name: str) -> None:
    with pytest.raises(OutOfRange):
        KeyCodec(("name", "text")).pack(name)


@given(PAIRS, st.data())
def test_a_prefix_covers_exactly_the_keys_that_begin_with_it(
    case: tuple[KeyCodec, tuple[Any, ...], tuple[Any, ...]], data: st.DataObject
) -> None:
    codec, parts, other = case
    # A last field of variable width cannot be the end of a prefix: rows that share it are one row.
    fixed_fields = len(parts) - (codec.width is None)
    count = data.draw(st.integers(0, fixed_fields))
    prefix, end = codec.prefix(*parts[:count]), prefix_end(codec.prefix(*parts[:count]))
    for key in (codec.pack(*parts), codec.pack(*other)):
        is_inside = key >= prefix and (end is None or key < end)
        assert is_inside == (codec.unpack(key)[:count] == parts[:count])


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_prefix_end_is_the_least_key_above_every_continuation(prefix: bytes, tail: bytes) -> None:
    end = prefix_end(prefix)
    if end is None:
        assert set(prefix) <= {0xFF}
    else:
        assert prefix + tail < end
        assert end[:-1] + bytes([end[-1] - 1]) <= prefix


@given(PARTS)
def test_numpy_reads_keys_as_unpack_does(case: tuple[KeyCodec, tuple[Any, ...]]) -> None:
    numpy = pytest.importorskip("numpy")
    codec, parts = case
    if codec.width is not None:
        row = numpy.frombuffer(codec.pack(*parts), dtype=codec.numpy_fields())[0]
        assert tuple(map(int, row)) == parts


def test_a_codec_prints_its_layout() -> None:
    assert repr(KeyCodec(("db_id", "u32"), ("name", "text"))) == "{db_id: u32, name: text}"
