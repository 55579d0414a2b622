"""Keys of manifest tables: fixed-width, big-endian, so that byte order is tuple order (M1).

A field is `u8`, `u16`, `u32` or `u64`, or `text` / `raw` as the last field, where the order needs no escaping. A prefix
is the first n fields; all rows that share them are adjacent.

Threads: pure functions, callable from any thread. Raises `OutOfRange`. The layout of every key is listed in
docs/formats/manifest.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Literal, cast

from quire.core.errors import OutOfRange
from quire.core.limits import LMDB_KEY_BYTES_MAX

Width = Literal["u8", "u16", "u32", "u64", "text", "raw"]
_STRUCT_CODE: dict[str, str] = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
_NUMPY_TYPE: dict[str, str] = {"u8": "u1", "u16": ">u2", "u32": ">u4", "u64": ">u8"}


class KeyCodec:
    """Packs tuples into keys and unpacks them.

    >>> codec = KeyCodec(("db_id", "u32"), ("shard", "u16"))
    >>> codec.pack(7, 0).hex()
    '000000070000'
    >>> codec.unpack(codec.pack(7, 0))
    (7, 0)
    >>> codec.prefix(7).hex()
    '00000007'
    """

    __slots__ = ("_fixed", "_prefixes", "_tail", "fast", "fast_unpack", "fields", "width")

    def __init__(self, *fields: tuple[str, Width]) -> None:
        self.fields = fields
        numeric = [kind for _, kind in fields if kind in _STRUCT_CODE]
        self._tail = fields[-1][1] if fields[-1][1] in ("text", "raw") else None
        assert len(numeric) == len(fields) - (self._tail is not None), "a variable field must be the last"
        self._fixed = struct.Struct(">" + "".join(_STRUCT_CODE[kind] for kind in numeric))
        self._prefixes = [
            struct.Struct(">" + "".join(_STRUCT_CODE[kind] for kind in numeric[:count]))
            for count in range(len(numeric) + 1)
        ]
        self.fast = self._fixed.pack
        """`pack` of a fixed-width key without the translation of errors: for the writer, which translates once for all."""
        self.fast_unpack: Callable[[bytes], tuple[Any, ...]] = self.unpack if self._tail else self._fixed.unpack
        """`unpack`; without an extra call where the width is fixed."""
        self.width = None if self._tail else self._fixed.size
        """Size of a key in bytes, `None` if it varies."""

    @classmethod
    def of(cls, fields: str) -> KeyCodec:
        """Return the codec of fields as tables declare them: `"db_id u32, shard u16"`."""
        return cls(*((name, cast(Width, width)) for name, width in map(str.split, fields.split(","))))

    def pack(self, *parts: Any) -> bytes:
        """Return the key of a whole tuple."""
        try:
            if self._tail is None:
                return self.fast(*parts)
            tail = parts[-1].encode() if self._tail == "text" else bytes(parts[-1])
            key = self.fast(*parts[:-1]) + tail
        except (struct.error, UnicodeEncodeError) as error:
            raise self._out_of_range(parts) from error
        if not tail or len(key) > LMDB_KEY_BYTES_MAX:
            raise OutOfRange("the key is empty or too long", bytes=len(key), max=LMDB_KEY_BYTES_MAX)
        return key

    def unpack(self, key: bytes) -> tuple[Any, ...]:
        """Return the tuple of a whole key."""
        if self._tail is None:
            return self._fixed.unpack(key)
        size = self._fixed.size
        tail = key[size:]
        return (*self._fixed.unpack_from(key), tail.decode() if self._tail == "text" else tail)

    def prefix(self, *parts: Any) -> bytes:
        """Return the common prefix of all keys whose first fields are `parts`; without `parts`, of all keys."""
        if self._tail is not None and len(parts) == len(self.fields):
            return self.pack(*parts)
        try:
            return self._prefixes[len(parts)].pack(*parts)
        except (struct.error, IndexError) as error:
            raise self._out_of_range(parts) from error

    def numpy_fields(self) -> list[tuple[str, str]]:
        """Return the layout as a numpy structured type, to decode many keys at once. Fixed-width codecs only."""
        assert self._tail is None, "keys of varying width have no numpy layout"
        return [(name, _NUMPY_TYPE[kind]) for name, kind in self.fields]

    def _out_of_range(self, parts: tuple[Any, ...]) -> OutOfRange:
        layout = ", ".join(f"{name}: {kind}" for name, kind in self.fields)
        return OutOfRange("the key does not fit its fields", layout=layout, value=parts)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{name}: {kind}" for name, kind in self.fields) + "}"


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the smallest key above every key that starts with `prefix`; `None` if there is none.

    >>> prefix_end(b"\\x00\\xff")
    b'\\x01'
    >>> prefix_end(b"\\xff") is None
    True
    """
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None
