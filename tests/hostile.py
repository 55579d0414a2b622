"""Shared by tests of decoders: a memory limit, and messages with false lengths."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

EXTREMES = [
    0,
    1,
    2,
    511,
    512,
    513,
    0x7FFF,
    0xFFFF,
    0x1_0000,
    0x7FFF_FFFF,
    0xFFFF_FFFE,
    0xFFFF_FFFF,
    1 << 63,
    (1 << 64) - 1,
]


def numbers(bits: int) -> st.SearchStrategy[int]:
    """Values of a field of `bits` bits, most of them near an overflow."""
    limit = 1 << bits
    return st.sampled_from([value for value in EXTREMES if value < limit]) | st.integers(0, limit - 1)


@contextmanager
def memory_limit(more_bytes: int) -> Iterator[None]:
    """Allocations of more than `more_bytes` in the block raise `MemoryError`."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


DEEP = b"\x91" * 100_000
"""msgpack: arrays nested deeper than any stack."""
FALSE_LENGTHS = [
    DEEP,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
]
"""msgpack: the same, and arrays, maps, bytes, strings and extensions with a length of four billion."""
