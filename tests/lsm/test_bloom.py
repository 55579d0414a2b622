"""The bloom filter: never wrong about what is there, rarely about what is not."""

from __future__ import annotations

import random

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from quire.lsm.bloom import build_bloom, hash_key, hash_keys


@given(st.lists(st.binary(max_size=40)), st.integers(0, 5))
def test_a_column_hashes_as_its_keys_do_one_by_one(keys: list[bytes], skip: int) -> None:
    column = pa.array(keys, pa.binary()).slice(skip)
    assert hash_keys(column).tolist() == [hash_key(key) for key in keys[skip:]]


def test_hashes_are_fixed_for_ever() -> None:
    assert [hash_key(key) for key in (b"", b"\0", b"12345678", b"123456789")] == [
        0,
        0x5164B7EF41314546,
        0x5E7791DA06779B18,
        0x7F57D91CCA20AA66,
    ]


@given(st.sets(st.binary(max_size=12), max_size=200), st.integers(1, 20))
def test_no_key_is_denied(keys: set[bytes], bits_per_key: int) -> None:
    column = pa.array(sorted(keys), pa.binary())
    bloom = build_bloom(hash_keys(column), bits_per_key)
    assert all(bloom.may_contain(hash_key(key)) for key in keys)


def test_false_positives_are_about_one_in_a_hundred() -> None:
    """At 10 bits for each key theory says 0.8 %; sequential keys are the hard case for a weak hash."""
    rng = random.Random(1)
    for make in (lambda n: b"%012d" % n, lambda n: n.to_bytes(8, "big"), lambda _: rng.randbytes(16)):
        keys = [make(number) for number in range(20_000)]
        bloom = build_bloom(hash_keys(pa.array(keys, pa.binary())), 10)
        wrong = sum(bloom.may_contain(hash_key(make(number))) for number in range(20_000, 40_000))
        assert wrong / 20_000 < 0.015
