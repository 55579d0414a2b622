"""Asks the user at the terminal for confirmation, also for a command that the owner of a store runs for a client.

The owner does not wait for the user: it runs the command again with the answer. If the store has changed in between, so that
the answer would be about something else, the user is asked again.

Threads: the main thread, or the service's thread that runs the command.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from hashlib import sha256
from typing import Any, NamedTuple

from quire.cli.formatting import visible
from quire.cli.output import TerminalStyle, wrapped
from quire.core.errors import InvalidInput


class RemoteAnswer(NamedTuple):
    """The answer of the user of a client."""

    answer: str
    """ "" before there is one."""
    about: str = ""
    """What the question was about; "" from a client that does not say."""


REMOTE_ANSWER: ContextVar[RemoteAnswer | None] = ContextVar("ELSEWHERE", default=None)
"""Set while this process runs a command for a client."""


class Question(Exception):
    """Raised when a command that this process runs for a client must first ask the user there."""

    def __init__(self, question: str, otherwise: str, about: str) -> None:
        super().__init__(question)
        self.question = question
        self.otherwise = otherwise
        self.about = about


class Declined(Exception):
    """The user answered no. `text` states what was not done, `data` is the same for JSON."""

    def __init__(self, text: str, data: Any) -> None:
        super().__init__(text)
        self.text = text
        self.data = data


def on_terminal() -> bool:
    """Return whether stderr is a terminal of the user, where progress is shown."""
    return REMOTE_ANSWER.get() is None and sys.stderr.isatty()


def confirm(question: str, otherwise: str, data: Any, *, about: object = None) -> None:
    """Ask the user, and raise `Declined` unless the answer is yes. `otherwise` states what is then not done."""
    if not agreed(question, otherwise, about=about):
        raise Declined(otherwise, data)


def agreed(question: str, otherwise: str, *, about: object = None) -> bool:
    """Ask the user and return whether the answer is yes. Asks on stderr: stdout is for the command's value.

    `about` identifies what the answer is about, if the words do not: they may name it by a name that can be reused, or contain
    numbers that always change.
    """
    if (given := REMOTE_ANSWER.get()) is not None:
        subject = sha256(repr(question if about is None else about).encode("utf-8", "backslashreplace")).hexdigest()
        if not given.answer or (given.about and given.about != subject):
            raise Question(question, otherwise, subject)
        return given.answer == "yes"
    sys.stderr.write("\n".join(wrapped(f"{visible(question)} [y/N]", TerminalStyle.of(sys.stderr).width)) + " ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        sys.stderr.write("\n")
        raise InvalidInput(f"no confirmation given; {otherwise}", hint="use `--yes` to confirm")
    return line.strip().lower() in ("y", "yes")
