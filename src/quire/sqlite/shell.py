"""SQLite's shell, in apsw's version, on a connection to a database of a store.

Thread: the main one, if it is interactive. Raises `InvalidInput` if a statement given as an argument fails.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TextIO

import apsw
import apsw.shell

from quire.core.errors import InvalidInput, QuireError
from quire.sqlite.pep249.driver import Driver
from quire.sqlite.pep249.errors import Error


class _Script:
    """Lines of a program or file. Its last statement may lack the semicolon, as in SQLite's own shell."""

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
    """Records whether any statement failed, for the exit code."""

    has_failed = False

    def _apply_fts(self) -> None:
        # It reads the schema. The shell must start even if the schema is malformed: this is where a user repairs it.
        with suppress(apsw.CorruptError):
            super()._apply_fts()  # type: ignore[no-untyped-call]

    def handle_exception(self) -> None:
        self.has_failed = True
        super().handle_exception()  # type: ignore[no-untyped-call]


class _ServedShell(_Shell):
    """A shell whose SQL runs at the owner of the store; its commands read the version that the owner has published."""

    served: Driver

    def process_sql(self, sql: str, bindings: Any = None, internal: bool = False, summary: Any = None) -> None:
        """Run statements one after the other and show their rows."""
        if internal:
            super().process_sql(sql, bindings, internal, summary)
            return
        for statement in statements_of(sql):
            try:
                self._show(statement)
            except Error as error:
                raise self.Error(str(error)) from error

    def _show(self, statement: str) -> None:
        cursor = self.served.cursor()
        cursor.execute(statement, ())
        rows: Any = list(self.PositionRow(cursor))  # type: ignore[no-untyped-call]
        if not rows:
            return
        wants_row = list(inspect.signature(self.output).parameters.values())[1].annotation == "Shell.Row"
        values = rows if wants_row else [row.row for row in rows]
        if getattr(self.output, "all_at_once", False):
            self.output(rows[0].columns, values)
            return
        self.output(True, rows[0].columns)
        for value in values:
            self.output(False, value)


def statements_of(sql: str) -> Iterator[str]:
    """Yield the statements of a text.

    >>> list(statements_of("insert into t values (';'); select 1"))
    ["insert into t values (';');", ' select 1']
    """
    start = 0
    for end in (match.end() for match in re.finditer(";", sql)):
        if apsw.complete(sql[start:end]):
            yield sql[start:end]
            start = end
    if sql[start:].strip():
        yield sql[start:]


def run_shell(
    connection: apsw.Connection, title: str, statements: Sequence[str] = (), *, served: Driver | None = None
) -> int:
    """Run the given statements, or a session or script from stdin. Return the exit code: 1 if a script had errors.

    `title` is what the shell displays as its database. With `served` SQL runs there, and `connection` is for the shell's
    commands.
    """
    typed: Any = sys.stdin if sys.stdin.isatty() else _Script(sys.stdin)
    kind: Any = _Shell if served is None else _ServedShell
    shell: Any = kind(db=connection, stdin=typed, stdout=sys.stdout, stderr=sys.stderr)
    if served is not None:
        shell.served = served
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
    """Run one statement given as an argument. The shell's error output is dropped, because the exception reports the error."""
    shell.stderr = said = io.StringIO()
    try:
        shell.process_complete_line(statement)
    except (apsw.Error, apsw.shell.Shell.Error) as error:
        if isinstance(error.__cause__, QuireError):
            raise error.__cause__ from error  # a missing chunk, for example: SQLite only passed it on
        hint = "`.help` lists the commands" if statement.startswith(".") else "`.schema` shows tables and their columns"
        raise InvalidInput(f"SQLite says: {error}", hint=hint, statement=statement) from error
    finally:
        shell.stderr = sys.stderr
    sys.stderr.write(said.getvalue())
