"""Asks the user at the terminal for confirmation, also for a command that the owner of a store runs for a client.

Threads: the main thread, or the service's thread that runs the command.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

from quire.cli.formatting import visible
from quire.cli.output import TerminalStyle, wrapped
from quire.core.errors import InvalidInput

REMOTE_ANSWER: ContextVar[str | None] = ContextVar("ELSEWHERE", default=None)
"""Set while this process runs a command for a client: the answer of the user there, or "" before there is one."""


class Question(Exception):
    """Raised when a command that this process runs for a client must first ask the user there."""

    def __init__(self, question: str, otherwise: str) -> None:
        super().__init__(question)
        self.question = question
        self.otherwise = otherwise


class Declined(Exception):
    """The user answered no. `text` states what was not done, `data` is the same for JSON."""

    def __init__(self, text: str, data: Any) -> None:
        super().__init__(text)
        self.text = text
        self.data = data


def on_terminal() -> bool:
    """Return whether stderr is a terminal of the user, where progress is shown."""
    return REMOTE_ANSWER.get() is None and sys.stderr.isatty()


def confirm(question: str, otherwise: str, data: Any) -> None:
    """Ask the user, and raise `Declined` unless the answer is yes. `otherwise` states what is then not done."""
    if not agreed(question, otherwise):
        raise Declined(otherwise, data)


def agreed(question: str, otherwise: str) -> bool:
    """Ask the user and return whether the answer is yes. Asks on stderr: stdout is for the command's value."""
    if (answer := REMOTE_ANSWER.get()) is not None:
        if not answer:
            raise Question(question, otherwise)
        return answer == "yes"
    sys.stderr.write("\n".join(wrapped(f"{visible(question)} [y/N]", TerminalStyle.of(sys.stderr).width)) + " ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        sys.stderr.write("\n")
        raise InvalidInput(f"no confirmation given; {otherwise}", hint="use `--yes` to confirm")
    return line.strip().lower() in ("y", "yes")
