"""Sizes of the tables of key-value sets, from their rows in the manifest.

A fork of a key-value set has hard links to the tables of its origin, and rows of its own that describe the same tables; a table
that two databases describe in the same way is shared. The rows of a fork appear when it is first opened.

Pure functions of a read transaction.
"""

from __future__ import annotations

from collections import Counter as Tally

from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import LsmTableRecord

Identity = tuple[int, int, int, int]
"""What identifies a table: (id, bytes, newest lsn, checksum)."""


def table_holders(txn: ReadTxn) -> Tally[Identity]:
    """Return how many databases hold each table. Reads every table row of the store."""
    return Tally(_identity(sst_id, row) for (_, sst_id), row in txn.scan(t.LSM_CATALOG))


def table_bytes(txn: ReadTxn, db_id: int) -> int:
    """Return the bytes of a database's live tables."""
    return sum(row.size_bytes for _, row in txn.scan(t.LSM_CATALOG, db_id))


def own_tables(txn: ReadTxn, db_id: int, holders: Tally[Identity]) -> list[int]:
    """Return the sizes of the live tables that no other database holds."""
    rows = txn.scan(t.LSM_CATALOG, db_id)
    return [row.size_bytes for (_, sst_id), row in rows if holders[_identity(sst_id, row)] <= 1]


def _identity(sst_id: int, row: LsmTableRecord) -> Identity:
    return sst_id, row.size_bytes, row.lsn_max, row.checksum
