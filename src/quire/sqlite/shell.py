"""SQLite's shell, as apsw has it, on a connection to one of our databases.

Thread: the main one, if people type. Raises `InvalidInput` for a statement that was given and fails.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import apsw
import apsw.shell

from quire.core.errors import InvalidInput, QuireError


class _Script:
    """Lines of a program or file; its last statement may lack the semicolon, as for SQLite's own shell."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines
        self._has_ended = False

    def readline(self) -> str:
        if (line := self._lines.readline()) or self._has_ended:
            return line
        self._has_ended = True
        return ";\n"

    def isatty(self) -> bool:
        return False


class _Shell(apsw.shell.Shell):
    """Remembers whether anything went wrong: who reads no messages has the exit code."""

    has_failed = False

    def _apply_fts(self) -> None:
        # It asks SQLite, which reads the schema: a malformed one is repaired in this shell, so it must begin.
        with suppress(apsw.CorruptError):
            super()._apply_fts()  # type: ignore[no-untyped-call]

    def handle_exception(self) -> None:
        self.has_failed = True
        super().handle_exception()  # type: ignore[no-untyped-call]


def run_shell(connection: apsw.Connection, title: str, statements: Sequence[str] = ()) -> int:
    """Run statements, or what people type until they leave, or a script; the exit code, 1 if a script met errors.

    `title` is what the shell says it is open on.
    """
    typed: Any = sys.stdin if sys.stdin.isatty() else _Script(sys.stdin)
    shell: Any = _Shell(db=connection, stdin=typed, stdout=sys.stdout, stderr=sys.stderr)
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        shell.command_colour(["off"])
    if statements:
        for statement in statements:
            _run(shell, statement)
        return 0
    try:
        shell.cmdloop(f'{title}, SQLite {apsw.sqlite_lib_version()}\nEnter ".help" for instructions\n')
    except SystemExit as end:  # how `.exit` leaves
        return end.code if isinstance(end.code, int) else 0
    return int(shell.has_failed and not shell.interactive)


def _run(shell: Any, statement: str) -> None:
    """One statement that was given. What the shell says of an error is not shown: the exception tells it."""
    shell.stderr = said = io.StringIO()
    try:
        shell.process_complete_line(statement)
    except (apsw.Error, apsw.shell.Shell.Error) as error:
        if isinstance(error.__cause__, QuireError):
            raise error.__cause__ from error  # a missing chunk, say: SQLite only passed it on
        hint = "`.help` lists the commands"
        raise InvalidInput(f"SQLite says: {error}", hint=hint, statement=statement) from error
    finally:
        shell.stderr = sys.stderr
    sys.stderr.write(said.getvalue())
