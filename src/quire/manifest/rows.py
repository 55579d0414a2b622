"""Rows as stored: a record's bytes (`codec.py`), marked, and followed by a checksum of table, key and record.

Terms
  plain row    the output of the record's codec: `record_version`, then the body. Stores made before checksums have such
               rows
  stored row   a plain row whose version has its highest bit set, then the crc32 of (table name, key, row), a
               little-endian u32

The checksum is checked with every read: a row that decodes is the one that was written, to this table, under this key.
Any other row raises `ManifestDamaged`, which names table and key, and is never used. The checksum detects neither an
older version of a row that reappears nor a missing row (a write that the disk lost): LMDB's pages carry no such proof.

A plain row is read as before; the migration step `row_checksums` adds its checksum. A stored row that has lost its mark
is four bytes too long for a plain row, and does not decode.

Threads: pure functions, callable from any thread. Layout: docs/formats/manifest.md, reasons:
docs/decisions/025-row-checksums.md.
"""

from __future__ import annotations

import struct
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Generic

from quire.core.decoding import UNDECODABLE
from quire.core.errors import ManifestDamaged
from quire.durable.checksums import crc32
from quire.manifest.codec import VERSION, R, RecordCodec
from quire.manifest.keys import KeyCodec

MARK = 0x8000
"""The bit of a row's version that marks a checksum after the record."""
CHECKSUM = struct.Struct("<I")
assert CHECKSUM.size == 4
RESIDUE = 0x2144DF1C
"""The crc32 of any bytes that end with their own crc32, little-endian: one call checks a row without slicing it."""

_CHECK = "`quire manifest check` lists all damaged rows and shows what can be repaired"


damaged_reads: Tally[str] = Tally()
"""How often this process read a damaged row, by table; for metrics."""


class RowCodec(Generic[R]):
    """Encodes, checks and decodes the stored rows of one table."""

    __slots__ = ("codec", "decode", "encode", "key", "marked", "salt", "table")

    def __init__(self, table: str, key: KeyCodec, codec: RecordCodec[R]) -> None:
        self.table = table
        self.key = key
        self.codec = codec
        self.marked = VERSION.pack(codec.version | MARK)
        """The first bytes of stored rows."""
        self.salt = crc32(table.encode())
        """The initial value of this table's checksums: `crc32(row, crc32(key, salt)) == RESIDUE`."""
        self.encode: Callable[[bytes, R], bytes] = self._encoder()
        """Returns the stored row of a record."""
        self.decode: Callable[[bytes, bytes], R] = self._decoder()
        """Returns the record of a stored row."""

    def _encoder(self) -> Callable[[bytes, R], bytes]:
        marked, salt, plain, pack = self.marked, self.salt, self.codec.encode, CHECKSUM.pack

        def encode(key: bytes, record: R) -> bytes:
            row = marked + plain(record)[2:]
            return row + pack(crc32(row, crc32(key, salt)))

        return encode

    def _decoder(self) -> Callable[[bytes, bytes], R]:
        marked, salt, body, plain, opened = (
            self.marked,
            self.salt,
            self.codec.decode_body,
            self.codec.decode,
            self.opened,
        )
        head = self.codec.head

        def decode(key: bytes, raw: bytes) -> R:
            if raw[:2] == marked and crc32(raw, crc32(key, salt)) == RESIDUE:
                if body is None:
                    return plain(head + raw[2:-4])
                try:
                    return body(raw[2:-4])
                except UNDECODABLE:
                    pass  # raised below, with table and key
            try:
                return plain(opened(key, raw))
            except ManifestDamaged as error:
                raise self._at(key, error) from error

        return decode

    def encode_all(self, rows: Iterable[tuple[bytes, Any]]) -> list[tuple[bytes, bytes]]:
        """Return the stored rows of many records, or of plain rows."""
        marked, salt, pack, encode = self.marked, self.salt, CHECKSUM.pack, self.codec.encode
        stored = []
        if self.codec.packed is None:
            body = self.codec.body
            for key, record in rows:
                row = marked + body(record)
                stored.append((key, row + pack(crc32(row, crc32(key, salt)))))
            return stored
        for key, record in rows:
            row = marked + (record if type(record) is bytes else encode(record))[2:]
            stored.append((key, row + pack(crc32(row, crc32(key, salt)))))
        return stored

    def sealed(self, key: bytes, plain: bytes) -> bytes:
        """Return the stored form of a plain row, of any version."""
        return sealed(self.table, key, plain)

    def opened(self, key: bytes, raw: bytes) -> bytes:
        """Return the plain row in a stored one; raises `ManifestDamaged` if its checksum is wrong."""
        if not is_marked(raw):
            return raw
        if len(raw) < VERSION.size + CHECKSUM.size or crc32(raw, crc32(key, self.salt)) != RESIDUE:
            raise self._damaged(key, raw, "its checksum does not match its bytes and key")
        (version,) = VERSION.unpack_from(raw)
        return VERSION.pack(version & ~MARK) + raw[2:-4]

    def opened_all(self, keys: list[bytes], raws: list[bytes]) -> list[bytes]:
        """Return the plain rows in many stored ones, at 0.2 µs each: the checksums are computed without a loop."""
        if self.are_intact(keys, raws):
            head = self.codec.head
            return [head + raw[2:-4] for raw in raws]
        return [self.opened(key, raw) for key, raw in zip(keys, raws, strict=True)]

    def columns(self, keys: list[bytes], raws: list[bytes]) -> Any:
        """Return checked rows of a packed table as one numpy array."""
        import numpy as np  # not at the top: commands that read few rows avoid its 260 ms

        fields = self.codec.numpy_fields()
        if self.are_intact(keys, raws):
            assert self.codec.packed is not None, "only packed records have a numpy layout"
            if set(map(len, raws)) <= {self.codec.packed.size + CHECKSUM.size}:
                return np.frombuffer(b"".join(raws), [*fields, ("checksum", "<u4")])
        plain = [self.codec.encode(self.decode(key, raw)) for key, raw in zip(keys, raws, strict=True)]
        return np.frombuffer(b"".join(plain), fields)

    def are_intact(self, keys: list[bytes], raws: list[bytes]) -> bool:
        """Return whether all are stored rows of the current version with correct checksums; if not, check them one by one."""
        marked = self.marked
        return set(map(crc32, raws, map(crc32, keys, repeat(self.salt)))) <= {RESIDUE} and all(
            map(bytes.startswith, raws, repeat(marked))
        )

    def _damaged(self, key: bytes, raw: bytes, why: str) -> ManifestDamaged:
        damaged_reads[self.table] += 1
        return ManifestDamaged(
            f"a row of {self.table} is damaged: {why}",
            hint=_CHECK,
            table=self.table,
            key=self.key_of(key),
            bytes=raw[:32].hex(),
            length=len(raw),
        )

    def _at(self, key: bytes, error: ManifestDamaged) -> ManifestDamaged:
        """Return the error with the row's table and key."""
        if "table" in error.where:
            return error
        return ManifestDamaged(error.what, hint=_CHECK, table=self.table, key=self.key_of(key), **error.where)

    def key_of(self, key: bytes) -> Any:
        """Return the key for display; in hex if its bytes are not a key."""
        try:
            return self.key.unpack(key)
        except (ValueError, struct.error):
            return key.hex()


def sealed(table: str, key: bytes, plain: bytes) -> bytes:
    """Return the stored form of a plain row, of any version."""
    (version,) = VERSION.unpack_from(plain)
    row = VERSION.pack(version | MARK) + plain[2:]
    return row + CHECKSUM.pack(crc32(row, crc32(key, crc32(table.encode()))))


def is_marked(raw: bytes) -> bool:
    """Return whether a row is marked: a checksum follows its record."""
    return len(raw) >= VERSION.size and bool(raw[1] & (MARK >> 8))
