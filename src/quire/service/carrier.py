"""The client's pool of connections to an owner, each used by one call at a time: the base of the carriers other than Flight.

Rules
  1. A call takes an idle connection or opens one. It returns the connection if a response arrived, and closes it otherwise.
  2. After fork() the child opens its own connections and does not touch the parent's.

Threads: any. Raises `CallBroken` and `CallTimedOut`; it is then unknown whether the call was executed.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from http.client import HTTPException
from typing import Generic, TypeVar

from quire.core.closing import Closable
from quire.service.frames import FrameError

IDLE_MAX = 16
"""Idle connections that are kept for later calls."""


class CallBroken(Exception):  # never leaves the client's channel
    """The connection could not be made, or broke before the response arrived."""


class CallTimedOut(Exception):  # never leaves the client's channel
    """The response did not arrive in time."""


C = TypeVar("C", bound=Closable)


class Carrier(Generic[C]):
    """A pool of connections. See the rules above."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._idle: deque[C] = deque()
        self._closed = False

    def is_available(self) -> bool:
        """Return whether a call is worth trying."""
        return True

    def _connect(self, seconds: float) -> C:
        """Open a connection."""
        raise NotImplementedError

    def _exchange(self, connection: C, name: str, trace: str, body: bytes, seconds: float) -> bytes:
        """Send a call and return its response."""
        raise NotImplementedError

    def _after_fork(self) -> None:
        """Reset state in the child of a fork()."""

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # rule 2
            self._pid, self._idle = os.getpid(), deque()
            self._after_fork()

    def call(self, name: str, trace: str, body: bytes, seconds: float) -> bytes:
        """Send a call and return the response in the form that `wire.read_answer` takes."""
        self._check_process()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect(seconds)
        try:
            answer = self._exchange(connection, name, trace, body, seconds)
        except TimeoutError:
            connection.close()
            raise CallTimedOut("no response in time") from None
        except (OSError, EOFError, FrameError, HTTPException) as error:
            connection.close()
            raise CallBroken(str(error) or "the owner closed the connection") from None
        except BaseException:
            connection.close()  # an interrupt: the response may still arrive, and the next call would read it
            raise
        if len(self._idle) < IDLE_MAX and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def drop_idle(self) -> None:
        """Close the idle connections: the owner at their other end may be gone."""
        if self._pid == os.getpid():
            with suppress(IndexError):
                while True:
                    self._idle.pop().close()

    def close(self) -> None:
        """Close all connections; those in use are closed when they are returned."""
        self._closed = True
        self.drop_idle()
