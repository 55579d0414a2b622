"""The client's connections to an owner, each used by one call at a time: what carriers other than Flight have in common.

Rules
  1. A call takes a connection that is free, or makes one, and gives it back if it was answered; else it is closed.
  2. After fork() the child makes connections of its own: the parent's are not touched.

Threads: any. Raises `CallBroken` and `CallTimedOut`; whether the call was done is then unknown.
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
"""Connections that are kept for the next call."""


class CallBroken(Exception):  # never leaves the client's channel
    """The connection could not be made, or broke before the answer had come."""


class CallTimedOut(Exception):  # never leaves the client's channel
    """The answer did not come in time."""


C = TypeVar("C", bound=Closable)


class Carrier(Generic[C]):
    """See the rules above."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._idle: deque[C] = deque()
        self._closed = False

    def is_there(self) -> bool:
        """Whether it makes sense to try."""
        return True

    def _connect(self, seconds: float) -> C:
        """A new connection."""
        raise NotImplementedError

    def _exchange(self, connection: C, name: str, trace: str, body: bytes, seconds: float) -> bytes:
        """Send a call; its answer."""
        raise NotImplementedError

    def _after_fork(self) -> None:
        """This is the child of a fork()."""

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # rule 2
            self._pid, self._idle = os.getpid(), deque()
            self._after_fork()

    def call(self, name: str, trace: str, body: bytes, seconds: float) -> bytes:
        """The answer to a call, as `wire.read_answer` takes it."""
        self._check_process()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect(seconds)
        try:
            answer = self._exchange(connection, name, trace, body, seconds)
        except TimeoutError:
            connection.close()
            raise CallTimedOut("no answer in time") from None
        except (OSError, EOFError, FrameError, HTTPException) as error:
            connection.close()
            raise CallBroken(str(error) or "the owner hung up") from None
        except BaseException:
            connection.close()  # an interrupt: the answer may still come, and would be the next call's
            raise
        if len(self._idle) < IDLE_MAX and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def drop_idle(self) -> None:
        """Close the connections that are not in use: the owner they lead to may be gone."""
        if self._pid == os.getpid():
            with suppress(IndexError):
                while True:
                    self._idle.pop().close()

    def close(self) -> None:
        """Close all connections, those that are in use when they are given back."""
        self._closed = True
        self.drop_idle()
