"""Calls and answers on the owner's second Unix socket: length-prefixed msgpack, one call at a time on each connection.

Flight costs a call on the same machine twenty times what a socket does (docs/decisions/055-frames.md). Here an action, its key,
its answer and its error are those of `wire.py`; only what is around them differs. docs/formats/wire.md describes the bytes.

    connection = preface (call answer)*
    preface    = "QUIREFR1" version client    a u32; 16 random bytes, the same on all connections of a client
    call       = size [name, trace, [key, request]]
    answer     = size (00 value | 01 error)

Rules
  1. A size is compared with its limit before anything is read of what it announces; a buffer grows with the bytes that came.
  2. A connection on which something went wrong is closed: nobody looks for the beginning of the next frame.

Pure functions, and a reader that belongs to one thread. Raises `FrameError` for bytes that are no frame, `EOFError` at the end.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from quire.core.limits import MIB

SUFFIX = ".f"
"""What the path of this socket adds to that of the Flight server's."""

MAGIC = b"QUIREFR1"
CLIENT_BYTES = 16
PREFACE = struct.Struct("<8sI16s")
PREFACE_BYTES = 28
SIZE = struct.Struct("<I")
SIZE_BYTES = 4
ANSWER_BYTES_MAX = 1 << 30
"""Of an answer, as a client takes it."""
ENVELOPE_BYTES_MAX = 4_096
"""What a call has around its body: a name, a trace, sizes."""
RECEIVE_BYTES = 64 * 1024

assert SIZE.size == SIZE_BYTES
assert PREFACE.size == PREFACE_BYTES


class FrameError(Exception):  # never leaves the two ends of a connection
    """What came is no frame."""


class FramedCall(msgspec.Struct, frozen=True, array_like=True):
    """A call as it travels: `body` is what a Flight action has as its body (`wire.write_call`)."""

    name: str
    trace: str
    body: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FramedCall).decode


def write_framed(name: str, trace: str, body: bytes) -> bytes:
    """The frame of a call."""
    call = _encode(FramedCall(name, trace, msgspec.Raw(body)))
    return SIZE.pack(len(call)) + call


def read_framed(frame: bytes) -> FramedCall:
    """The call in a frame."""
    try:
        return _decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"the call cannot be read: {error}") from error


def send_parts(connection: socket.socket, parts: list[bytes]) -> None:
    """Send an answer. A small one goes with its size in one piece, a large one without being copied."""
    size = sum(map(len, parts))
    if size <= MIB:
        connection.sendall(b"".join((SIZE.pack(size), *parts)))
        return
    connection.sendall(SIZE.pack(size))
    for part in parts:
        connection.sendall(part)


class FrameReader:
    """The frames that come in on a connection."""

    __slots__ = ("_buffer", "_connection")

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""

    def exactly(self, size: int) -> bytes:
        """So many bytes; `EOFError` if the other side is gone before."""
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
        """The next frame, without its size (rule 1)."""
        (size,) = SIZE.unpack(self.exactly(SIZE_BYTES))
        if size > bytes_max:
            raise FrameError(f"a frame of {size:,} bytes is longer than {bytes_max:,}")
        return self.exactly(size)
