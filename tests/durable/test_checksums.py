"""Checksums: published check values, running values, every kind of buffer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.durable.checksums import Checksum, crc32, crc64, sha256

BOTH = pytest.mark.parametrize("crc", [crc32, crc64], ids=["crc32", "crc64"])


def test_published_check_values() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert crc64(b"123456789") == 0xAE8B14860A799888
    assert sha256(b"abc").hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@BOTH
@given(a=st.binary(), b=st.binary(), seed=st.integers(0, 2**32 - 1))
def test_a_running_value_continues(crc: Checksum, a: bytes, b: bytes, seed: int) -> None:
    assert crc(a + b, seed) == crc(b, crc(a, seed))


@BOTH
@given(data=st.binary(), one=st.integers(0, 2**32 - 1), other=st.integers(0, 2**32 - 1))
def test_another_seed_always_gives_another_value(crc: Checksum, data: bytes, one: int, other: int) -> None:
    assert (crc(data, one) == crc(data, other)) is (one == other)


@BOTH
def test_any_buffer_will_do(crc: Checksum) -> None:
    data = b"some bytes"
    assert crc(data) == crc(bytearray(data)) == crc(memoryview(data)) == crc(memoryview(b"x" + data)[1:])


def test_nothing_else_of_quire_is_needed() -> None:
    code = "import sys; sys.modules['lmdb'] = None; import quire.durable.checksums"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
