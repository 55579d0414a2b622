"""Commands of the command line that run at the owner, because the owner has the store open (K8).

The command line is a layer above this package, so it installs its runner here: `quire serve` does. An owner that has none, such
as a user's own program, refuses the command with a hint.

Rules
  1. Commands are accepted through the Unix socket only: a command may read and write files as the owner's user.
  2. A command runs once. Its key is remembered with the result, and the request names the process that it is for: an owner that
     took over meanwhile refuses it, because it cannot know what its predecessor has done.

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
"""Commands whose results are kept: a client retries within moments, or never."""


class RemoteCommand(Request, frozen=True):
    """A function of the command line with its arguments as JSON; `answer` is "yes" or "no" after the user was asked."""

    function: str
    arguments: bytes
    key: bytes
    pid: int
    as_json: bool = False
    width: int = 0
    colours: bool = False
    answer: str = ""
    about: str = ""
    """What the answer is about, as in the result that asked."""


class CommandResult(Request, frozen=True):
    """The output and the exit code; or the question to ask the user first, and what does not happen without an answer."""

    out: str = ""
    code: int = 0
    question: str = ""
    otherwise: str = ""
    about: str = ""
    """What the question is about. If an answer is about something else, the question is asked again."""


COMMAND = Action("command", RemoteCommand, CommandResult, local=True)

Run = Callable[[Any, RemoteCommand], CommandResult]
"""(store, command) → its result."""

_installed: list[Run] = []


def install(run: Run) -> None:
    """Install the function that runs commands for the owners in this process."""
    _installed[:] = [run]


class CommandHandlers:
    """Handles the action `command` of one store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        # guarded by _lock
        self._lock = threading.Lock()
        self._seen: OrderedDict[bytes, Future[CommandResult]] = OrderedDict()

    def do_command(self, request: RemoteCommand, _: CallContext) -> CommandResult:
        if not _installed:
            raise InvalidInput(
                "the owner is a program that runs no commands",
                hint="own the store with `quire serve` instead",
                pid=os.getpid(),
            )
        if request.pid != os.getpid():
            hint = "check whether the command took effect, and run it again if necessary"
            raise Unavailable("another process has taken the store over", hint=hint, pid=os.getpid())
        with self._lock:
            earlier = self._seen.get(request.key)
            if earlier is None:
                mine: Future[CommandResult] = Future()
                self._seen[request.key] = mine
                if len(self._seen) > REMEMBERED:
                    self._seen.popitem(last=False)
        if earlier is not None:
            return earlier.result()
        try:
            mine.set_result(_installed[0](self._store, request))
        except BaseException as error:
            mine.set_exception(error)
        return mine.result()
