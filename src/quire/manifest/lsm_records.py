"""The row of a table of a key-value database: apart from `records.py`, which is long enough. The same rules hold (M1)."""

from quire.manifest.records import Record, UInt


class LsmTableRecord(Record, frozen=True):
    """A live table of a key-value database, as its own manifest and the table's file have it (S1)."""

    level: UInt
    rows: UInt
    """Versions, tombstones included."""
    tombstones: UInt
    size_bytes: UInt
    lsn_min: UInt
    lsn_max: UInt
    key_min: bytes = b""
    """The first 256 bytes of it."""
    key_max: bytes = b""
