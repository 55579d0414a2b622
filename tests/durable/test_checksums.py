"""Checksums: published check values, running values, every kind of buffer."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from awscrt.checksums import crc64nvme
from hypothesis import given
from hypothesis import strategies as st

from quire.durable import checksums
from quire.durable.checksums import ROWS_BY_ONE, ROWS_PER_BLOCK, Checksum, crc32, crc64, crc64_rows, sha256

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
def test_different_seeds_always_give_different_values(crc: Checksum, data: bytes, one: int, other: int) -> None:
    assert (crc(data, one) == crc(data, other)) is (one == other)


@BOTH
def test_every_kind_of_buffer_is_accepted(crc: Checksum) -> None:
    data = b"some bytes"
    assert crc(data) == crc(bytearray(data)) == crc(memoryview(data)) == crc(memoryview(b"x" + data)[1:])


@given(data=st.binary(max_size=300), seed=st.integers(0, 2**64 - 1), skip=st.integers(0, 9))
def test_the_table_and_the_native_code_agree(data: bytes, seed: int, skip: int) -> None:
    """For every buffer, and for every value before it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "_table_bytes", 0)
        view = memoryview(data)[skip:]
        assert checksums._crc64_until_loaded(view, seed) == crc64nvme(view, seed) == checksums._native()(view, seed)
        assert checksums._table_bytes == len(view), "the table was used"
        words = memoryview(data[: len(data) // 4 * 4]).cast("I")
        assert checksums._crc64_until_loaded(words, seed) == crc64nvme(words, seed)


def test_the_native_code_is_loaded_when_the_limit_of_the_table_is_exceeded() -> None:
    program = """
import sys
from quire.durable import checksums as c
first = bytes(range(256)) * (c.TABLE_BYTES_MAX // 256)
one = c.crc64(first)
assert "awscrt" not in sys.modules
both = c.crc64(b"x", one)
assert "awscrt" in sys.modules
from awscrt.checksums import crc64nvme
assert (one, both) == (crc64nvme(first), crc64nvme(first + b"x"))
assert c.crc64(b"y", 7) == crc64nvme(b"y", 7)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.parametrize(("data", "value"), [(b"bytes", "1"), (memoryview(b"bytes")[::2], 0)])
def test_invalid_arguments_are_rejected_by_both(data: Any, value: Any) -> None:
    for crc in (checksums._crc64_until_loaded, checksums._native()):
        with pytest.raises((TypeError, BufferError, ValueError)):
            crc(data, value)


@given(a=st.binary(), b=st.binary())
def test_checksums_are_joined(a: bytes, b: bytes) -> None:
    assert checksums.crc64_joined(crc64(a), crc64(b), len(b)) == crc64(a + b)


# Around each limit: one row at a time or all at once, one block or two, whole words or a remainder.
COUNTS = [0, 1, ROWS_BY_ONE - 1, ROWS_BY_ONE, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1]


@given(count=st.sampled_from(COUNTS), width=st.integers(0, 70), gap=st.integers(0, 9), seed=st.integers(0, 99))
def test_rows_have_the_checksums_of_their_bytes(count: int, width: int, gap: int, seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(count * (width + gap))
    seeds = np.frombuffer(rng.randbytes(8 * count), "<u8")
    rows = np.frombuffer(data, np.uint8).reshape(count, width + gap)[:, :width]
    actual = crc64_rows(rows, seeds)
    assert actual.dtype == np.uint64
    starts = range(0, count * (width + gap), width + gap) if width + gap else [0] * count
    assert actual.tolist() == [crc64(data[start : start + width], int(value)) for start, value in zip(starts, seeds)]


@given(rows=st.lists(st.tuples(st.binary(min_size=11, max_size=11), st.integers(0, 2**64 - 1)), max_size=20))
def test_few_rows_have_the_same_checksums_at_once(rows: list[tuple[bytes, int]]) -> None:
    array = np.frombuffer(b"".join(data for data, _ in rows), np.uint8).reshape(len(rows), 11)
    seeds = np.array([seed for _, seed in rows], np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "ROWS_BY_ONE", 0)
        at_once = crc64_rows(array, seeds)
    assert at_once.tolist() == crc64_rows(array, seeds).tolist() == [crc64(data, seed) for data, seed in rows]


def test_rows_are_not_changed_and_invalid_arrays_are_rejected() -> None:
    rows, seeds = np.ones((300, 10), np.uint8), np.ones(300, np.uint64)
    crc64_rows(rows, seeds)
    assert rows.min() == rows.max() == seeds.min() == seeds.max() == 1
    with pytest.raises(TypeError):
        crc64_rows(rows, seeds[1:])
    with pytest.raises(TypeError):
        crc64_rows(rows.astype(np.int64), seeds)


def test_importing_checksums_does_not_load_numpy() -> None:
    code = "import sys; import quire.durable.checksums; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_checksums_need_no_lmdb() -> None:
    code = "import sys; sys.modules['lmdb'] = None; import quire.durable.checksums"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
