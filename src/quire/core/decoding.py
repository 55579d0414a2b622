"""What every use of msgspec's decoders needs: the errors of decoding, types that several threads may decode, and JSON with a
digest.

msgspec describes a type when it is decoded for the first time, and other threads see the description before it is complete: one
that decodes the same type meanwhile ends the process with a segmentation fault (seen with msgspec 0.22). So types are described
under a lock, except those that a module gives to a decoder while it is imported.

Threads: any.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Another structure, a text that is not UTF-8, or values nested too deeply. One damaged byte can cause any of them."""

_lock = threading.RLock()
_described: set[object] = set()


def described(kind: T) -> T:
    """Return a type that is given to `decode` or `convert` after msgspec has described it."""
    if kind not in _described:
        with _lock:
            msgspec.msgpack.Decoder(kind)  # of all formats, the one that can have every type
            _described.add(kind)
    return kind


def encode_with_digest(record: object) -> bytes:
    """Encode a record as a line of JSON, followed by a line with the line's SHA-256."""
    line = msgspec.json.encode(record)
    return line + b"\n" + _digest(line)


def decode_with_digest(data: bytes, record_type: type[T]) -> T | None:
    """Return the record that `encode_with_digest` encoded; `None` if any byte was changed."""
    line, _, digest = data.partition(b"\n")
    return msgspec.json.decode(line, type=described(record_type)) if digest == _digest(line) else None


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest().encode() + b"\n"
