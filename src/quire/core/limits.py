"""Fixed limits, each with its reason; relations between them are asserted here.

A limit that a user can tune is a *default* in `core/settings.py`; the limits here are fixed by a format or by arithmetic.
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

NAME_BYTES_MAX = 200
"""UTF-8 bytes in the name of a database, snapshot or cursor: names are part of LMDB keys (511 bytes) and file names (255)."""

LMDB_KEY_BYTES_MAX = 511
"""LMDB's own limit as compiled into py-lmdb."""

SLOTS_PER_LEAF = 256
"""Slots in one leaf of a database's slot map (M7): 1 TiB of 64 MiB chunks is 64 leaves, so a snapshot is 64 increments."""

CHUNK_BYTES = 64 * MIB
"""Bytes of pages that one full chunk of a page database covers."""

BATCH_OPS_MAX = 65_536
"""Operations in one batch: a batch is one transaction and one change record, and both must fit in memory several times."""

SCAN_ROWS_MAX = 65_536
"""Rows that exports and streams read within one LMDB read transaction (M4): a long transaction stops page reuse."""

IDEMPOTENCY_KEY_BYTES = 16
"""Bytes of an idempotency key, a UUID (M11)."""

PAGE_SIZE_MIN = 512
PAGE_SIZE_MAX = 65_536
"""SQLite's range of page sizes in bytes; always powers of two."""

assert NAME_BYTES_MAX + 8 <= LMDB_KEY_BYTES_MAX
assert SLOTS_PER_LEAF <= 256, "a slot's offset in its leaf is one byte"
assert CHUNK_BYTES % PAGE_SIZE_MAX == 0
