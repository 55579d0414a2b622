"""Record bytes: a u16 `record_version`, little-endian, then the body.

Terms
  msgpack body   the record as a msgpack array: compact, evolvable by appending fields
  packed body    a fixed little-endian struct, for tables with millions of rows of plain numbers: numpy decodes a whole
                 column of them without a loop (docs/decisions/002-packed-rows.md)

A msgpack body of an older version decodes with defaults for the fields it lacks. A packed body has one layout, so
changing it takes a migration. A body of a newer version raises `FormatTooNew`; bytes that are not a record raise
`ManifestDamaged`, never an error of the codec library.

Threads: pure functions, callable from any thread (msgspec coders without hooks are reentrant). Layouts:
docs/formats/manifest.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from quire.core.decoding import UNDECODABLE
from quire.core.errors import FormatTooNew, InvalidInput, ManifestDamaged
from quire.manifest.records import Record

R = TypeVar("R", bound=Record)

VERSION = struct.Struct("<H")
assert VERSION.size == 2


class RecordCodec(Generic[R]):
    """Encodes and decodes the rows of one table."""

    __slots__ = ("body", "decode", "decode_body", "encode", "head", "packed", "record_type", "version")

    def __init__(self, record_type: type[R], *, version: int = 1, packed: str | None = None) -> None:
        self.record_type = record_type
        self.version = version
        self.packed = struct.Struct("<H" + packed) if packed else None
        self.head = VERSION.pack(version)
        self.body = msgspec.msgpack.Encoder().encode
        """`encode(record) == head + body(record)` for msgpack tables: the writer concatenates them without an extra call."""
        self.decode_body: Callable[[bytes], R] | None = None
        """The inverse of `body`; `None` for packed tables."""
        self.encode: Callable[[R], bytes]
        self.decode: Callable[[bytes], R]
        if self.packed is None:
            self.decode_body = msgspec.msgpack.Decoder(record_type).decode
            self.encode, self.decode = _msgpack_coders(record_type, version, self.body, self.decode_body)
        else:
            self.encode, self.decode = _packed_coders(record_type, version, self.packed)

    def checked(self, record: R) -> R:
        """Return the record if its row can be decoded: a field of the wrong type would keep the store from opening."""
        try:
            return self.decode(self.encode(record))
        except (ManifestDamaged, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"not a {type(record).__name__}: {error}", record=str(record)[:200]) from error

    def numpy_fields(self) -> list[tuple[str, str]]:
        """Return the packed layout as a numpy structured type."""
        assert self.packed is not None, "only packed records have a numpy layout"
        numpy_code = {"B": "u1", "H": "<u2", "I": "<u4", "Q": "<u8"}
        codes = self.packed.format[2:]
        return [("record_version", "<u2")] + [
            (field, numpy_code[code]) for field, code in zip(self.record_type.__struct_fields__, codes, strict=True)
        ]


def _msgpack_coders(
    record_type: type[R], version: int, pack: Callable[[Any], bytes], unpack: Callable[[bytes], R]
) -> tuple[Callable[[R], bytes], Callable[[bytes], R]]:
    head = VERSION.pack(version)

    def encode(record: R) -> bytes:
        return head + pack(record)

    def decode(raw: bytes) -> R:
        if raw[:2] != head:
            _refuse_newer(raw, version, record_type)
        try:
            return unpack(raw[2:])  # copying a small row is cheaper than making a memoryview
        except UNDECODABLE as error:
            raise _damaged(raw, record_type, str(error)) from error

    return encode, decode


def _packed_coders(
    record_type: type[R], version: int, layout: struct.Struct
) -> tuple[Callable[[R], bytes], Callable[[bytes], R]]:
    pack = layout.pack
    unpack = layout.unpack
    astuple = msgspec.structs.astuple

    def encode(record: R) -> bytes:
        return pack(version, *astuple(record))

    def decode(raw: bytes) -> R:
        try:
            stored, *values = unpack(raw)
        except struct.error as error:
            raise _damaged(raw, record_type, str(error)) from error
        if stored != version:
            _refuse_newer(raw, version, record_type)
        return record_type(*values)

    return encode, decode


def _refuse_newer(raw: bytes, known: int, record_type: type[Any]) -> None:
    if len(raw) < VERSION.size:
        raise _damaged(raw, record_type, "shorter than its version")
    (stored,) = VERSION.unpack_from(raw)
    if stored > known:
        raise FormatTooNew(
            f"a {record_type.__name__} was written by a newer quire",
            hint="upgrade quire to open this store",
            found=stored,
            known=known,
        )
    if stored == 0:
        raise _damaged(raw, record_type, "version 0 does not exist")


def _damaged(raw: bytes, record_type: type[Any], why: str) -> ManifestDamaged:
    return ManifestDamaged(
        f"a {record_type.__name__} does not decode: {why}",
        hint="run `quire manifest check`, then restore the manifest from a backup",
        bytes=raw[:32].hex(),
        length=len(raw),
    )
