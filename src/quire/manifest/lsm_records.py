"""Rows about a key-value database's tables and logs: apart from `records.py`, which is long. The same rules hold (M1)."""

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
    checksum: UInt = 0
    """crc64 of the section of the table's file, which has the checksums of its blocks; 0 in rows that are older."""


class LsmLogEnd(Record, frozen=True):
    """How far a log of a key-value database was durable: true for as long as the file is in this life."""

    number: UInt
    """Of a write-ahead log; 0 for the log of the database's own manifest."""
    salt: UInt
    end: UInt
    link: UInt
    """The checksum that ends there; it is chained, and speaks for all bytes before it."""


class LsmEndsRecord(Record, frozen=True):
    """What was acknowledged of a key-value database's logs, kept outside the bytes that it vouches for."""

    manifest: LsmLogEnd
    snapshot_crc32: UInt = 0
    """Of the manifest's snapshot that the log goes on from; 0 if there is none."""
    last_lsn: UInt = 0
    """No lower than this was durable."""
    wals: tuple[LsmLogEnd, ...] = ()
