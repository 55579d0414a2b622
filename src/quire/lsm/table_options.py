"""How the tables of a key-value set are written.

Importable on executors, without Arrow. Threads: any.
"""

from __future__ import annotations

import msgspec

from quire.core.limits import KIB
from quire.core.settings import LsmSettings


class TableOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tables are written. Small and picklable."""

    block_bytes: int = 64 * KIB
    compression: str = "lz4"
    """lz4, zstd or none."""
    bloom_bits_per_key: int = 10


def table_options(settings: LsmSettings) -> TableOptions:
    """Return the table options of a database's settings."""
    return TableOptions(
        block_bytes=settings.block_bytes,
        compression=settings.compression,
        bloom_bits_per_key=settings.bloom_bits_per_key,
    )
