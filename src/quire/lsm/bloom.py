"""The bloom filter of a table: rules out keys without reading a block.

`hash_keys(column)[i] == hash_key(column[i])`, and neither may ever change, because filters are stored. There are no false
negatives, and about 1 % false positives at 10 bits per key. numpy processes one 8-byte word of all keys at a time, without a
loop over rows.

Threads: pure functions; any. Importable on executors. The filter's place in a table: `docs/formats/sstable.md`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

MULTIPLIER = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio."""
FINAL = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
"""The factors of MurmurHash3's 64-bit finaliser."""
MASK = (1 << 64) - 1
HALF = (1 << 32) - 1
BITS_MIN = 64

_U = np.uint64


@lru_cache(maxsize=16)  # a lookup checks the filters of several tables for the same key
def hash_key(key: bytes) -> int:
    """Return the hash of one key.

    >>> hex(hash_key(b"quire"))
    '0x6ae16d07ddb8ab00'
    """
    size = len(key)
    state = (size * MULTIPLIER) & MASK
    number = int.from_bytes(key, "little")
    for _ in range(0, size, 8):
        state = ((state ^ (number & MASK)) * MULTIPLIER) & MASK
        state ^= state >> 29
        number >>= 64
    state = ((state ^ (state >> 33)) * FINAL[0]) & MASK
    state = ((state ^ (state >> 33)) * FINAL[1]) & MASK
    return state ^ (state >> 33)


def hash_keys(keys: pa.BinaryArray) -> NDArray[np.uint64]:
    """Return the hashes of a column of keys."""
    count = len(keys)
    if not count:
        return np.empty(0, _U)
    _, offsets_buffer, data_buffer = keys.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32)[keys.offset : keys.offset + count + 1].astype(np.int64)
    starts, sizes = offsets[:-1], np.diff(offsets)
    low, high = int(offsets[0]), int(offsets[-1])
    # Eight zeros after the end, so that the last word of the last key can be read as a whole.
    data = (data_buffer[low:high].to_pybytes() if data_buffer is not None else b"") + bytes(8)
    words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))  # the word at every byte offset
    state: NDArray[np.uint64] = sizes.astype(_U) * _U(MULTIPLIER)
    starts = starts - low
    for at in range(0, int(sizes.max()), 8):
        left = sizes - at
        if left.min() > 0:
            state = _mix(state, _words(words, starts, at, left))
        else:
            rows = np.flatnonzero(left > 0)
            state[rows] = _mix(state[rows], _words(words, starts[rows], at, left[rows]))
    for factor in FINAL:
        state = (state ^ (state >> _U(33))) * _U(factor)
    return state ^ (state >> _U(33))


def _words(
    words: NDArray[np.uint64], starts: NDArray[np.int64], at: int, left: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return the word at `at` of each key, padded with zeros where the key ends within it."""
    word: NDArray[np.uint64] = words[starts + at]
    if left.min() < 8:
        kept = np.minimum(left, 8).astype(_U) * _U(8)
        # A shift by 64 is undefined, so the mask of a whole word is built by shifting right.
        word = word & (_U(MASK) >> (_U(64) - kept))
    return word


def _mix(state: NDArray[np.uint64], word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = (state ^ word) * _U(MULTIPLIER)
    return mixed ^ (mixed >> _U(29))


@dataclass(frozen=True, slots=True)
class Bloom:
    """A filter as it is stored: a bit string, lowest bit of each byte first. `hashes` is the number of probes."""

    bits: int
    hashes: int
    data: bytes

    def may_contain(self, key_hash: int) -> bool:
        """Return whether a key with this hash may be in the table."""
        bits, data = self.bits, self.data
        place, step = key_hash & HALF, (key_hash >> 32) | 1
        for _ in range(self.hashes):
            bit = place % bits
            if not data[bit >> 3] >> (bit & 7) & 1:
                return False
            place += step
        return True


def build_bloom(hashes: NDArray[np.uint64], bits_per_key: int) -> Bloom:
    """Build the filter of keys with these hashes."""
    probes = max(1, round(bits_per_key * 0.69))  # ln 2 minimises false positives
    size = max(BITS_MIN, len(hashes) * bits_per_key)
    flags = np.zeros(size, np.bool_)
    place, step = hashes & _U(HALF), (hashes >> _U(32)) | _U(1)
    for _ in range(probes):
        flags[place % _U(size)] = True
        place = place + step
    return Bloom(size, probes, np.packbits(flags, bitorder="little").tobytes())
