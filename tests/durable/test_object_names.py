"""Object keys of snapshots and bundles: build and parse are inverse, other texts are rejected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import OutOfRange
from quire.durable import object_names

U64 = st.integers(0, 2**64 - 1)


@given(stream_id=U64, number=U64, more=U64)
def test_every_key_parses_to_what_built_it(stream_id: int, number: int, more: int) -> None:
    first, last = sorted((number, more))
    assert object_names.parse_snapshot_key(object_names.snapshot_key(stream_id, number)) == (stream_id, number)
    assert object_names.parse_bundle_key(object_names.bundle_key(stream_id, first, last)) == (stream_id, first, last)


@given(text=st.from_regex(r"manifest/[0-9]{1,21}/(snapshot_[0-9]{1,21}\.bin|bundle_[0-9]{1,3}_[0-9]{1,3}\.mlog)\n?"))
def test_a_text_that_parses_is_exactly_the_text_of_its_numbers(text: str) -> None:
    snapshot, bundle = object_names.parse_snapshot_key(text), object_names.parse_bundle_key(text)
    assert snapshot is None or object_names.snapshot_key(*snapshot) == text
    assert bundle is None or object_names.bundle_key(*bundle) == text


@pytest.mark.parametrize("text", ["", "manifest/7/bundle_3_2.mlog", "manifest/07/snapshot_1.bin", "manifest/7/1.mlog"])
def test_other_texts_are_rejected(text: str) -> None:
    assert object_names.parse_snapshot_key(text) is None
    assert object_names.parse_bundle_key(text) is None


def test_numbers_are_checked_when_a_key_is_built() -> None:
    with pytest.raises(OutOfRange):
        object_names.snapshot_key(2**64, 1)
    with pytest.raises(OutOfRange):
        object_names.bundle_key(1, -1, 2)
