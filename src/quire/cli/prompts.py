"""Questions to the person at the terminal, also of a command that the owner of a store runs for a client.

Threads: the main one, or the one of the service that runs the command.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

from quire.cli.formatting import visible
from quire.cli.output import Look, wrapped
from quire.core.errors import InvalidInput

REMOTE_ANSWER: ContextVar[str | None] = ContextVar("ELSEWHERE", default=None)
"""Set while this process runs a command for a client: what the person there answered, or "" before that."""


class Question(Exception):
    """A command that this process runs for a client must ask the person there first."""

    def __init__(self, question: str, otherwise: str) -> None:
        super().__init__(question)
        self.question = question
        self.otherwise = otherwise


class Declined(Exception):
    """The person answered no: `text` says what did not happen, `data` is the same as JSON."""

    def __init__(self, text: str, data: Any) -> None:
        super().__init__(text)
        self.text = text
        self.data = data


def on_terminal() -> bool:
    """Whether a person watches: progress is for them."""
    return REMOTE_ANSWER.get() is None and sys.stderr.isatty()


def confirm(question: str, otherwise: str, data: Any) -> None:
    """Ask the person; raise `Declined` with `otherwise`, what did not happen, unless the answer is yes."""
    if not agreed(question, otherwise):
        raise Declined(otherwise, data)


def agreed(question: str, otherwise: str) -> bool:
    """Ask on stderr: stdout belongs to the command's value."""
    if (answer := REMOTE_ANSWER.get()) is not None:
        if not answer:
            raise Question(question, otherwise)
        return answer == "yes"
    sys.stderr.write("\n".join(wrapped(f"{visible(question)} [y/N]", Look.of(sys.stderr).width)) + " ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        sys.stderr.write("\n")
        raise InvalidInput(f"no confirmation given; {otherwise}", hint="use `--yes` to skip the question")
    return line.strip().lower() in ("y", "yes")
