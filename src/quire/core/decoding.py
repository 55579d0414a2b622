"""Decoding of bytes that may be damaged: the errors that msgspec raises for them, and JSON with a digest."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

T = TypeVar("T")

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Another structure, a text that is not UTF-8, or values nested too deeply. One damaged byte can cause any of them."""


def encode_with_digest(record: object) -> bytes:
    """Encode a record as a line of JSON, followed by a line with the line's SHA-256."""
    line = msgspec.json.encode(record)
    return line + b"\n" + _digest(line)


def decode_with_digest(data: bytes, record_type: type[T]) -> T | None:
    """Return the record that `encode_with_digest` encoded; `None` if any byte was changed."""
    line, _, digest = data.partition(b"\n")
    return msgspec.json.decode(line, type=record_type) if digest == _digest(line) else None


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode() + b"\n"
