"""The client's side of frames: a few connections to an owner's second socket, each used by one call at a time.

Rules
  1. A call takes a connection that is free, or makes one, and gives it back if it was answered; else it is closed.
  2. After fork() the child makes connections of its own: the parent's are not touched.

Threads: any. Raises `FrameBroken` and `FrameTimedOut`; whether the call was done is then unknown.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import suppress

from quire.service.frames import (
    ANSWER_BYTES_MAX,
    CLIENT_BYTES,
    MAGIC,
    PREFACE,
    SUFFIX,
    FrameError,
    FrameReader,
    write_framed,
)

IDLE_MAX = 16
"""Connections that are kept for the next call."""


class FrameBroken(Exception):  # never leaves the client's channel
    """The connection could not be made, or broke before the answer had come."""


class FrameTimedOut(Exception):  # never leaves the client's channel
    """The answer did not come in time."""


class FrameCarrier:
    """See the rules above."""

    def __init__(self, path: str, client: bytes, version: int) -> None:
        self._path = path + SUFFIX
        self._version = version
        self._client = client
        self._pid = os.getpid()
        self._idle: deque[tuple[socket.socket, FrameReader]] = deque()
        self._closed = False

    def is_there(self) -> bool:
        """Whether the owner has such a socket; an owner that is just starting has it before the other one."""
        return bool(self._idle) or os.path.exists(self._path)

    @property
    def client(self) -> bytes:
        """Who we are to the owner: another one in the child of a fork()."""
        self._check_process()
        return self._client

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # rule 2
            self._pid, self._idle, self._client = os.getpid(), deque(), os.urandom(CLIENT_BYTES)

    def call(self, name: str, trace: str, body: bytes, seconds: float) -> bytes:
        """The answer to a call, as `wire.read_answer` takes it."""
        self._check_process()
        try:
            connection, reader = self._idle.pop()
        except IndexError:
            connection, reader = self._connect(seconds)
        try:
            connection.settimeout(seconds)
            with suppress(BrokenPipeError, ConnectionResetError):  # an owner that hung up may have said why
                connection.sendall(write_framed(name, trace, body))
            answer = reader.frame(ANSWER_BYTES_MAX)
        except TimeoutError:
            connection.close()
            raise FrameTimedOut("no answer in time") from None
        except (OSError, EOFError, FrameError) as error:
            connection.close()
            raise FrameBroken(str(error) or "the owner hung up") from None
        except BaseException:
            connection.close()  # an interrupt: the answer may still come, and would be the next call's
            raise
        if len(self._idle) < IDLE_MAX and not self._closed:
            self._idle.append((connection, reader))
        else:
            connection.close()
        return answer

    def _connect(self, seconds: float) -> tuple[socket.socket, FrameReader]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(self._path)
            connection.sendall(PREFACE.pack(MAGIC, self._version, self._client))
        except OSError as error:
            connection.close()
            raise FrameBroken(str(error)) from None
        return connection, FrameReader(connection)

    def drop_idle(self) -> None:
        """Close the connections that are not in use: the owner they lead to may be gone."""
        if self._pid == os.getpid():
            with suppress(IndexError):
                while True:
                    self._idle.pop()[0].close()

    def close(self) -> None:
        """Close all connections, those that are in use when they are given back."""
        self._closed = True
        self.drop_idle()
