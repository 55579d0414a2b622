"""The bloom filter: no false negatives, few false positives."""

from __future__ import annotations

import random

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from quire.lsm.bloom import build_bloom, hash_key, hash_keys


@given(st.lists(st.binary(max_size=40)), st.integers(0, 5))
def test_a_column_hashes_like_its_keys_one_by_one(keys: list[bytes], skip: int) -> None:
    column = pa.array(keys, pa.binary()).slice(skip)
    assert hash_keys(column).tolist() == [hash_key(key) for key in keys[skip:]]


def test_hashes_never_change() -> None:
    assert [hash_key(key) for key in (b"", b"\0", b"12345678", b"123456789")] == [
        0,
        0x5164B7EF41314546,
        0x5E7791DA06779B18,
        0x7F57D91CCA20AA66,
    ]


@given(st.sets(st.binary(max_size=12), max_size=200), st.integers(1, 20))
def test_there_are_no_false_negatives(keys: set[bytes], bits_per_key: int) -> None:
    column = pa.array(sorted(keys), pa.binary())
    bloom = build_bloom(hash_keys(column), bits_per_key)
    assert all(bloom.may_contain(hash_key(key)) for key in keys)


def test_false_positives_are_about_one_in_a_hundred() -> None:
    """The theoretical rate at 10 bits per key is 0.8 %; sequential keys are the hard case for a weak hash."""
    rng = random.Random(1)
    for make in (lambda n: b"%012d" % n, lambda n: n.to_bytes(8, "big"), lambda _: rng.randbytes(16)):
        keys = [make(number) for number in range(20_000)]
        bloom = build_bloom(hash_keys(pa.array(keys, pa.binary())), 10)
        false_positives = sum(bloom.may_contain(hash_key(make(number))) for number in range(20_000, 40_000))
        assert false_positives / 20_000 < 0.015
