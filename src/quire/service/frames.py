"""Calls and answers on the owner's second Unix socket: length-prefixed msgpack, one call at a time on each connection.

On the same machine, a call by Flight costs twenty times as much as one through a socket (docs/decisions/055-frames.md).
Actions, keys, answers and errors are those of `wire.py`; only the framing differs. docs/formats/wire.md describes the bytes.

    connection = preface (call answer)*
    preface    = "QUIREFR1" version client    a u32; 16 random bytes, the same on all connections of a client
    call       = size [name, trace, [key, request]]
    answer     = size (00 value | 01 error)

Rules
  1. A size is compared with its limit before any of the frame is read; a buffer grows with the bytes that have arrived.
  2. A connection is closed after any error: there is no resynchronization to the next frame.

Threads: any for the functions; a reader belongs to one thread. Raises `FrameError` for bytes that are not a frame, `EOFError`
at the end.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from quire.core.decoding import UNDECODABLE
from quire.core.limits import MIB

SUFFIX = ".f"
"""The suffix of this socket's path, after that of the Flight server's."""

MAGIC = b"QUIREFR1"
CLIENT_BYTES = 16
PREFACE = struct.Struct("<8sI16s")
PREFACE_BYTES = 28
SIZE = struct.Struct("<I")
SIZE_BYTES = 4
ANSWER_BYTES_MAX = 1 << 30
"""The longest answer that a client accepts."""
ENVELOPE_BYTES_MAX = 4_096
"""The bytes of a call around its body: a name, a trace, sizes."""
RECEIVE_BYTES = 64 * 1024

assert SIZE.size == SIZE_BYTES
assert PREFACE.size == PREFACE_BYTES


class FrameError(Exception):  # never leaves the two ends of a connection
    """The bytes received are not a frame."""


class FramedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call as transmitted: `body` is what would be the body of a Flight action (`wire.write_call`)."""

    name: str
    trace: str
    body: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FramedCall).decode


def write_framed(name: str, trace: str, body: bytes) -> bytes:
    """Return the frame of a call."""
    call = _encode(FramedCall(name, trace, msgspec.Raw(body)))
    return SIZE.pack(len(call)) + call


def read_framed(frame: bytes) -> FramedCall:
    """Return the call in a frame."""
    try:
        return _decode(frame)
    except UNDECODABLE as error:
        raise FrameError(f"the call cannot be read: {error}") from error


def send_parts(connection: socket.socket, parts: list[bytes]) -> None:
    """Send an answer. A small one is sent with its size in one piece, a large one without being copied."""
    size = sum(map(len, parts))
    if size <= MIB:
        connection.sendall(b"".join((SIZE.pack(size), *parts)))
        return
    connection.sendall(SIZE.pack(size))
    for part in parts:
        connection.sendall(part)


class FrameReader:
    """Reads the frames of a connection."""

    __slots__ = ("_buffer", "_connection")

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def exactly(self, size: int) -> bytes:
        """Return exactly `size` bytes; raise `EOFError` if the peer closes the connection before."""
        buffer = self._buffer
        if len(buffer) < size:
            pieces, missing = [buffer], size - len(buffer)
            while missing > 0:
                piece = self._connection.recv(max(RECEIVE_BYTES, min(missing, MIB)))
                if not piece:
                    raise EOFError
                pieces.append(piece)
                missing -= len(piece)
            buffer = b"".join(pieces)
        if len(buffer) == size:
            self._buffer = b""
            return buffer
        self._buffer = buffer[size:]
        return buffer[:size]

    def frame(self, bytes_max: int) -> bytes:
        """Return the next frame, without its size (rule 1)."""
        (size,) = SIZE.unpack(self.exactly(SIZE_BYTES))
        if size > bytes_max:
            raise FrameError(f"a frame of {size:,} bytes exceeds the limit of {bytes_max:,}")
        return self.exactly(size)
