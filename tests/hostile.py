"""What tests of decoders share: a bound on memory, and bytes that promise more than they hold."""

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
    """Numbers of a field, most of them where something overflows."""
    limit = 1 << bits
    return st.sampled_from([value for value in EXTREMES if value < limit]) | st.integers(0, limit - 1)


@contextmanager
def memory_of_at_most(more_bytes: int) -> Iterator[None]:
    """Whoever allocates more than this in the block gets a `MemoryError`."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


DEEP = b"\x91" * 100_000
"""msgpack: arrays in arrays, deeper than any stack."""
PROMISES = [
    DEEP,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
]
"""msgpack: that, and arrays, maps, bytes, texts and extensions of four billion."""
