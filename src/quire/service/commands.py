"""Commands of people, done at the owner: what somebody types while another process has the store (K8).

The command line is above this package, so the owner's program lends it: `quire serve` installs what runs a command. An owner
that has not, a program of somebody's own, says so, and the person is told what to do instead.

Rules
  1. Only through the Unix socket: a command may read and write files as the owner's user.
  2. A command is done once. Its key is remembered with what came of it, and it names the process that is asked: an owner that
     took over meanwhile refuses, because nobody knows what the one before has done.

Threads: any; one command is one thread.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from quire.core.errors import InvalidInput, Unavailable
from quire.service.api import CallContext
from quire.service.tickets import Action
from quire.service.values import Request

REMEMBERED = 256
"""Commands whose answers are kept: a client asks again within a moment, or never."""


class RemoteCommand(Request, frozen=True):
    """A function of the command line and what it is called with, as JSON; `answer` is "yes" or "no" once a person was asked."""

    function: str
    arguments: bytes
    key: bytes
    pid: int
    as_json: bool = False
    width: int = 0
    colours: bool = False
    answer: str = ""


class CommandResult(Request, frozen=True):
    """What to write, and the exit code; or what to ask the person first, and what has not happened if nobody answers."""

    out: str = ""
    code: int = 0
    question: str = ""
    otherwise: str = ""


COMMAND = Action("command", RemoteCommand, CommandResult, local=True)

Run = Callable[[Any, RemoteCommand], CommandResult]
"""(store, command) → what came of it."""

_lent: list[Run] = []


def install(run: Run) -> None:
    """Have commands run here, by owners of this process."""
    _lent[:] = [run]


class CommandHandlers:
    """The action `command` of one store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        # guarded by _lock
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, Future[CommandResult]] = OrderedDict()

    def do_command(self, request: RemoteCommand, _: CallContext) -> CommandResult:
        if not _lent:
            raise InvalidInput(
                "the owner is a program that runs no commands", hint="`quire serve` does", pid=os.getpid()
            )
        if request.pid != os.getpid():
            hint = "see what came of the command, and run it again if need be"
            raise Unavailable("another process has taken the store over", hint=hint, pid=os.getpid())
        with self._lock:
            known = self._seen.get(request.key)
            if known is None:
                mine: Future[CommandResult] = Future()
                self._seen[request.key] = mine
                if len(self._seen) > REMEMBERED:
                    self._seen.popitem(last=False)
        if known is not None:
            return known.result()
        try:
            mine.set_result(_lent[0](self._store, request))
        except BaseException as error:
            mine.set_exception(error)
        return mine.result()
