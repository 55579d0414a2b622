"""The checksums of quire's formats, as running checksums with one calling convention.

`crc64` is CRC-64/NVME, used by quire's own formats (about 1 µs for 4 KiB); `crc32` is zlib's, for foreign or inherited layouts
that require it; `sha256` protects against *adversaries* and swapped objects. `crc(a + b) == crc(b, crc(a))`, so a value can
seed the next part, act as a salt, or chain frames; for equal bytes the map from seed to crc is one-to-one. Any C-contiguous
buffer is accepted, and nothing is copied.

Threads: any; pure functions, importable on executors (no lmdb). The formats that use them are in `docs/formats/`. Raises only
what Python raises for a wrong argument (`TypeError`, `BufferError`).

    >>> hex(crc32(b"123456789")), hex(crc64(b"123456789"))
    ('0xcbf43926', '0xae8b14860a799888')
    >>> crc64(b"6789", crc64(b"12345")) == crc64(b"123456789")
    True
"""

from __future__ import annotations

import hashlib
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from quire.core.limits import KIB

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

Bytes = bytes | bytearray | memoryview

CRC64_POLYNOMIAL = 0x9A6C9329AC4BC9B5
"""CRC-64/NVME, reflected: the lowest bit is the highest power."""
CRC64_MAX = 2**64 - 1
TABLE_BYTES_MAX = 64 * KIB
"""How many bytes of a process are computed with the Python table, about 6 ms of work. Opening a small database and reading a
record or two stays well below it."""
ROWS_PER_BLOCK = 8192
"""`crc64_rows` processes this many rows at a time, so that its scratch space stays in the CPU cache."""
ROWS_BY_ONE = 256
"""Below this many rows, one `crc64` call per row is faster than numpy."""


class Checksum(Protocol):
    """A running checksum: `value` is the checksum of everything before `data`."""

    def __call__(self, data: Bytes, value: int = 0, /) -> int: ...


# Bound, not wrapped: saves a Python frame on paths that run half a million times per second.
crc32: Checksum = zlib.crc32


def crc64(data: Bytes, value: int = 0, /) -> int:
    """Return the crc64 of `data`, continuing from `value`, the crc64 of the preceding bytes."""
    return _crc64(data, value)


def crc64_joined(first: int, second: int, second_bytes: int) -> int | None:
    """Return the crc64 of two byte strings concatenated, from their crc64s and the length of the second.

    `None` if the installed awscrt is too old to combine them.
    """
    combine = _combine()
    return None if combine is None else combine(first, second, second_bytes)


def sha256(data: Bytes) -> bytes:
    """Return the 32-byte SHA-256 digest of `data`."""
    return hashlib.sha256(data).digest()


# ── two implementations of crc64 ──────────────────────────────────────────────────────────────────────────────────────
def _crc64_until_loaded(data: Bytes, value: int) -> int:
    """Compute crc64 with a Python table, and switch to the native implementation after `TABLE_BYTES_MAX`.

    The native library takes 60 ms to load, more than most commands may take in total. `_table_bytes` is updated without a lock,
    so with several threads the count is approximate.
    """
    global _crc64, _table_bytes
    view = memoryview(data)
    _table_bytes += view.nbytes
    if _table_bytes <= TABLE_BYTES_MAX and view.c_contiguous and 0 <= value <= CRC64_MAX:
        return _by_table(view, value)
    _crc64 = _native()
    return _crc64(data, value)


_crc64: Callable[[Bytes, int], int] = _crc64_until_loaded
_table_bytes = 0


def _by_table(view: memoryview, value: int) -> int:
    table, state = _crc64_table(), value ^ CRC64_MAX
    for byte in view.tobytes():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ CRC64_MAX


@cache
def _crc64_table() -> list[int]:
    """Return the contribution of each byte value to the state."""
    table = list(range(256))
    for _ in range(8):
        table = [(entry >> 1) ^ (CRC64_POLYNOMIAL * (entry & 1)) for entry in table]
    return table


@cache
def _awscrt() -> Any:
    from awscrt import checksums  # 60 ms

    return checksums


def _native() -> Callable[[Bytes, int], int]:
    checksums = _awscrt()
    # awscrt's public function is a Python wrapper around this one. Ours replaces that wrapper, at the same cost.
    inner = getattr(checksums, "_awscrt", None)
    native: Callable[[Bytes, int], int] = getattr(inner, "checksums_crc64nvme", checksums.crc64nvme)
    return native


@cache
def _combine() -> Callable[[int, int, int], int] | None:
    return getattr(_awscrt(), "combine_crc64nvme", None)


# ── many rows at once ─────────────────────────────────────────────────────────────────────────────────────────────────


def crc64_rows(rows: NDArray[np.uint8], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the crc64 of each row of an (n, k) array, row `i` seeded with `seeds[i]`.

    `rows` may be a strided view (the first 40 bytes of each 48). Costs about 0.1 µs per row of 40 bytes, a third of
    calling `crc64` per row; for rows longer than a few hundred bytes, calling `crc64` is faster.

    >>> import numpy as np
    >>> rows = np.frombuffer(b"123456789" * 2, np.uint8).reshape(2, 9)
    >>> [hex(value) for value in crc64_rows(rows, np.zeros(2, np.uint64)).tolist()]
    ['0xae8b14860a799888', '0xae8b14860a799888']
    """
    import numpy as np

    count, width = rows.shape
    if seeds.shape != (count,) or rows.dtype != np.uint8:
        raise TypeError(f"one seed for each row of bytes, not {seeds.shape} for {rows.shape} of {rows.dtype}")
    if count < ROWS_BY_ONE:
        pairs = zip(np.ascontiguousarray(rows), seeds.tolist(), strict=True)
        return np.array([crc64(row.data, seed) for row, seed in pairs], np.uint64)
    tables = _crc64_tables()
    result = ~seeds.astype("<u8")
    places = np.empty((8, ROWS_PER_BLOCK), np.intp)
    looked_up = np.empty(ROWS_PER_BLOCK, "<u8")
    for start in range(0, count, ROWS_PER_BLOCK):
        block, state = rows[start : start + ROWS_PER_BLOCK], result[start : start + ROWS_PER_BLOCK]
        size = len(state)
        for column in range(0, width, 8):
            word = np.ascontiguousarray(block[:, column : column + 8])
            taken = word.shape[1]  # the last word may be short; the state then shifts by that many bytes only
            state.view(np.uint8).reshape(size, 8)[:, :taken] ^= word
            places[:, :size] = state.view(np.uint8).reshape(size, 8).T
            if taken < 8:
                state >>= np.uint64(8 * taken)
            else:
                state[:] = 0
            for byte in range(taken):
                # `clip` never clips (a byte is below 256), but it lets numpy write directly into `out`.
                np.take(tables[taken - 1 - byte], places[byte, :size], out=looked_up[:size], mode="clip")
                state ^= looked_up[:size]
    return ~result


@cache
def _crc64_tables() -> NDArray[np.uint64]:
    """Return a table whose row `n` has the contribution of each byte value to the state `n` bytes later."""
    import numpy as np

    one, eight = np.uint64(1), np.uint64(8)
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        table = (table >> one) ^ (np.uint64(CRC64_POLYNOMIAL) * (table & one))
    tables = [table]
    for _ in range(7):
        last = tables[-1]
        tables.append((last >> eight) ^ table[last & np.uint64(0xFF)])
    return np.stack(tables)
