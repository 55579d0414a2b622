"""Rows that declare larger sizes than they have, or that nest too deeply, are reported as damage, with bounded
memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidInput, ManifestDamaged, QuireError
from quire.core.limits import MIB
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, change_from_json, decode_changes
from quire.manifest.slots import unpack_leaf
from tests.hostile import FALSE_LENGTHS, memory_limit

TABLES = [table for table in (*t.TABLES.values(), CHANGE_LOG) if table.codec.packed is None]
BOUND = 64 * MIB


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_oversized_or_deeply_nested_values_in_any_field_are_damage(table: t.Table[Any]) -> None:
    """Also in unknown fields, which are skipped: a deeply nested one ended in a `RecursionError`."""
    fields = len(table.codec.record_type.__struct_fields__)
    for value in FALSE_LENGTHS:
        for position in (0, fields - 1, fields):
            raw = table.codec.head + bytes([0xDC, 0, position + 1]) + b"\x00" * position + value
            with memory_limit(BOUND), pytest.raises(ManifestDamaged):
                table.codec.decode(raw)


def test_oversized_or_deeply_nested_values_in_a_change_are_damage() -> None:
    for value in FALSE_LENGTHS:
        raw = CHANGE_LOG.codec.head + b"\x96\x01\x01\x90\x90\xa0" + value
        with memory_limit(BOUND), pytest.raises(ManifestDamaged):
            decode_changes([raw])
    with pytest.raises(InvalidInput):
        change_from_json("[" * 100_000)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.binary(max_size=20) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(table=st.sampled_from(TABLES), row=st.lists(values, max_size=12), cut=st.integers(0, 40))
def test_any_row_of_any_values_decodes_or_is_damage(table: t.Table[Any], row: list[Any], cut: int) -> None:
    raw = table.codec.head + msgspec.msgpack.encode(row)
    for data in (raw, raw[: len(raw) - cut]):
        try:
            table.codec.decode(data)
        except QuireError:
            pass


@given(st.binary(max_size=200))
def test_any_bytes_are_a_leaf_or_damage(entries: bytes) -> None:
    with memory_limit(BOUND):
        try:
            unpack_leaf(entries)
        except QuireError:
            pass
