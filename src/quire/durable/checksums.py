"""The checksums that stand in quire's formats: one name each, the same calling form, running values.

`crc64` is CRC-64/NVME, what quire's own formats use (about 1 µs for 4 KiB); `crc32` is that of zlib, where a foreign or
inherited layout asks for it; `sha256` is for where an *adversary* or a mix-up of objects is the worry. `crc(a + b) == crc(b,
crc(a))`, so a value may seed the next part, be a salt, or chain frames; for equal bytes the map from seed to crc is one to
one. Any C-contiguous buffer will do, and nothing is copied.

Pure functions, any thread; importable on executors (no lmdb). The formats that use them are in `docs/formats/`. Raises only
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
EARLY_BYTES = 64 * KIB
"""What is checked by the table: about 6 ms of it. Opening a small database and a record or two are well below."""
ROWS_PER_BLOCK = 8192
"""`crc64_rows` takes this many rows at a time: its scratch space then stays in the processor's cache."""
ROWS_BY_ONE = 256
"""Below this many rows one call for each is quicker than the numpy calls for all."""


class Checksum(Protocol):
    """A running checksum: `value` is the checksum of everything before `data`."""

    def __call__(self, data: Bytes, value: int = 0, /) -> int: ...


# Bound, not wrapped: one Python frame less on paths that run half a million times a second.
crc32: Checksum = zlib.crc32


def crc64(data: Bytes, value: int = 0, /) -> int:
    """The crc64 of `data`, behind what `value` is the crc64 of."""
    return _crc64(data, value)


def crc64_joined(first: int, second: int, second_bytes: int) -> int | None:
    """The crc64 of what follows each other, from those of both and the second's length; `None` where awscrt is too old."""
    combine = _combine()
    return None if combine is None else combine(first, second, second_bytes)


def sha256(data: Bytes) -> bytes:
    """The 32-byte SHA-256 digest of `data`."""
    return hashlib.sha256(data).digest()


# ── one crc64, from two makers ────────────────────────────────────────────────────────────────────────────────────────
def _early(data: Bytes, value: int) -> int:
    """The native crc64 takes 60 ms to load, more than most commands may take altogether: the first bytes of a process are done
    by a table, and with the byte that is one too many the native one is loaded for good. Threads may count a little wrong."""
    global _crc64, _early_bytes
    view = memoryview(data)
    _early_bytes += view.nbytes
    if _early_bytes <= EARLY_BYTES and view.c_contiguous and 0 <= value <= CRC64_MAX:
        return _by_table(view, value)
    _crc64 = _native()
    return _crc64(data, value)


_crc64: Callable[[Bytes, int], int] = _early
_early_bytes = 0


def _by_table(view: memoryview, value: int) -> int:
    table, state = _crc64_table(), value ^ CRC64_MAX
    for byte in view.tobytes():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ CRC64_MAX


@cache
def _crc64_table() -> list[int]:
    """What each byte contributes to the state."""
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
    # awscrt's function is a Python function around this one: ours stands in its place, at the same price.
    inner = getattr(checksums, "_awscrt", None)
    native: Callable[[Bytes, int], int] = getattr(inner, "checksums_crc64nvme", checksums.crc64nvme)
    return native


@cache
def _combine() -> Callable[[int, int, int], int] | None:
    return getattr(_awscrt(), "combine_crc64nvme", None)


# ── many at once ──────────────────────────────────────────────────────────────────────────────────────────────────────


def crc64_rows(rows: NDArray[np.uint8], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The crc64 of each row of an (n, k) array, row `i` starting from `seeds[i]`.

    `rows` may be a view with gaps (the first 40 bytes of each 48). Costs about 0.1 µs per row of 40 bytes, a third of
    calling `crc64` for each; rows of more than a few hundred bytes are better off with that.

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
            taken = word.shape[1]  # the last word may be short: its bytes go in, and the state moves by as many
            state.view(np.uint8).reshape(size, 8)[:, :taken] ^= word
            places[:, :size] = state.view(np.uint8).reshape(size, 8).T
            if taken < 8:
                state >>= np.uint64(8 * taken)
            else:
                state[:] = 0
            for byte in range(taken):
                # `clip` never clips (a byte is below 256), but lets numpy write straight into `out`.
                np.take(tables[taken - 1 - byte], places[byte, :size], out=looked_up[:size], mode="clip")
                state ^= looked_up[:size]
    return ~result


@cache
def _crc64_tables() -> NDArray[np.uint64]:
    """Row `n`: what a byte contributes to the state once `n` more bytes have followed it."""
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
