"""Identifiers: which numbers are valid, and which are rejected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import OutOfRange
from quire.core.ids import U16_MAX, U32_MAX, U64_MAX, ArtifactKey, ArtifactKind, Epoch, some_u32, u16, u32, u64

CHECKS: list[tuple[Callable[[str, Any], int], int]] = [(u16, U16_MAX), (u32, U32_MAX), (u64, U64_MAX)]


@pytest.mark.parametrize(("check", "largest"), CHECKS)
def test_the_whole_range_is_valid_and_nothing_beyond(check: Callable[[str, Any], int], largest: int) -> None:
    assert check("n", 0) == 0
    assert check("n", largest) == largest
    for invalid in (-1, largest + 1, 2**80):
        with pytest.raises(OutOfRange) as caught:
            check("n", invalid)
        assert caught.value.where["value"] == invalid
        assert "n " in caught.value.what


@pytest.mark.parametrize("invalid", [1.0, "1", None, True, b"1"])
@pytest.mark.parametrize(("check", "largest"), CHECKS)
def test_only_integers_are_ids(check: Callable[[str, Any], int], largest: int, invalid: object) -> None:
    with pytest.raises(OutOfRange):
        check("n", invalid)


def test_zero_means_none_and_is_not_an_id() -> None:
    with pytest.raises(OutOfRange):
        some_u32("db_id", 0)
    assert some_u32("db_id", 1) == 1


@given(st.tuples(*[st.integers(0, U32_MAX)] * 4), st.tuples(*[st.integers(0, U32_MAX)] * 4))
def test_artifact_keys_are_ordered_by_their_fields(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    def key(parts: tuple[int, ...]) -> ArtifactKey:
        return ArtifactKey(parts[0], ArtifactKind.BASE, parts[1], parts[2], parts[3])

    assert (key(first) < key(second)) == (first < second)


def test_epochs_order_by_lsn() -> None:
    assert Epoch(1, 9) < Epoch(2, 1)
    assert str(Epoch(lsn=4711, segment_id=3)) == "3:4711"
