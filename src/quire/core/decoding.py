"""What every use of msgspec's decoders needs: the errors of decoding, and types that several threads may decode.

msgspec describes a type when it is decoded for the first time, and other threads see the description before it is complete: one
that decodes the same type meanwhile ends the process with a segmentation fault (seen with msgspec 0.22). So types are described
under a lock, except those that a module gives to a decoder while it is imported.

Threads: any.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Another structure, a text that is not UTF-8, or values nested too deeply. One damaged byte can cause any of them."""

T = TypeVar("T")

_lock = threading.RLock()
_described: set[object] = set()


def described(kind: T) -> T:
    """Return a type that is given to `decode` or `convert` after msgspec has described it."""
    if kind not in _described:
        with _lock:
            msgspec.msgpack.Decoder(kind)  # of all formats, the one that can have every type
            _described.add(kind)
    return kind
