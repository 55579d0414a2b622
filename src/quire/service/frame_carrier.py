"""The client side of frames: connections to an owner's second socket.

Threads and errors: as in `carrier.py`.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from quire.service.carrier import CallBroken, Carrier
from quire.service.frames import (
    ANSWER_BYTES_MAX,
    CLIENT_BYTES,
    MAGIC,
    PREFACE,
    SUFFIX,
    FrameReader,
    write_framed,
)


class FrameConnection:
    """A connection and its read buffer."""

    __slots__ = ("close", "reader", "socket")

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.reader = FrameReader(connected)
        self.close = connected.close


class FrameCarrier(Carrier[FrameConnection]):
    """A carrier for calls through a Unix socket."""

    def __init__(self, path: str, client: bytes, version: int) -> None:
        super().__init__()
        self._path = path + SUFFIX
        self._version = version
        self._client = client

    def is_available(self) -> bool:
        """Return whether the owner has such a socket. A starting owner creates it before the Flight socket."""
        return bool(self._idle) or os.path.exists(self._path)

    @property
    def client(self) -> bytes:
        """The id of this client at the owner; the child of a fork() gets a new one."""
        self._check_process()
        return self._client

    def _after_fork(self) -> None:
        self._client = os.urandom(CLIENT_BYTES)

    def _exchange(self, connection: FrameConnection, name: str, trace: str, body: bytes, seconds: float) -> bytes:
        connection.socket.settimeout(seconds)
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # an owner that closed the connection may have sent a reason
            connection.socket.sendall(write_framed(name, trace, body))
        return connection.reader.frame(ANSWER_BYTES_MAX)

    def _connect(self, seconds: float) -> FrameConnection:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(self._path)
            connection.sendall(PREFACE.pack(MAGIC, self._version, self._client))
        except OSError as error:
            connection.close()
            raise CallBroken(str(error)) from None
        return FrameConnection(connection)
