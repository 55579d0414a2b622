"""The checksums that stand in quire's formats: one name each, the same calling form, running values.

Terms
  crc32   CRC-32/ISO-HDLC, as in zlib and gzip; where a foreign or inherited layout asks for it
  crc64   CRC-64/NVME; what quire's own formats use (hardware speed: about 1 µs for 4 KiB)
  sha256  where an *adversary* or a mix-up of objects is the worry; a crc only finds accidents

Rules
  1. Running: `crc(a + b) == crc(b, crc(a))`, so a value may seed the next part, be a salt, or chain frames.
  2. A changed seed always changes the result: for equal bytes the map from seed to crc is one to one.
  3. Any C-contiguous buffer will do: `bytes`, `bytearray`, `memoryview`, `mmap`, an array. Nothing is copied.

Pure functions, any thread; importable on executors (no lmdb). The formats that use them are in `docs/formats/`.
Raises only what Python raises for a wrong argument (`TypeError`, `BufferError`).

    >>> hex(crc32(b"123456789")), hex(crc64(b"123456789"))
    ('0xcbf43926', '0xae8b14860a799888')
    >>> crc64(b"6789", crc64(b"12345")) == crc64(b"123456789")
    True
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Protocol

from awscrt.checksums import crc64nvme

Bytes = bytes | bytearray | memoryview


class Checksum(Protocol):
    """A running checksum: `value` is the checksum of everything before `data`."""

    def __call__(self, data: Bytes, value: int = 0, /) -> int: ...


# Bound, not wrapped: one Python frame less on paths that run half a million times a second.
crc32: Checksum = zlib.crc32
crc64: Checksum = crc64nvme


def sha256(data: Bytes) -> bytes:
    """The 32-byte SHA-256 digest of `data`."""
    return hashlib.sha256(data).digest()
