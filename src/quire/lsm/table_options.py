"""How tables are written: a value, apart from the writer, so that opening a database loads neither numpy nor Arrow."""

from __future__ import annotations

import msgspec

from quire.core.limits import KIB


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tables are written; small and picklable."""

    block_bytes: int = 64 * KIB
    compression: str = "lz4"
    """lz4, zstd or none."""
    bloom_bits_per_key: int = 10
