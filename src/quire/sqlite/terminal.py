"""SQLite's shell, as apsw has it, on a connection to one of our databases.

Thread: the main one, if people type. Raises `InvalidInput` for a statement that was given and fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import apsw
import apsw.shell

from quire.core.errors import InvalidInput


def run_shell(connection: apsw.Connection, title: str, statements: Sequence[str] = ()) -> int:
    """Run statements, or what people type until they leave; the exit code. `title` is what the shell says it is open on."""
    shell: Any = apsw.shell.Shell(db=connection, stdin=sys.stdin, stdout=sys.stdout, stderr=sys.stderr)
    if statements:
        for each in statements:
            try:
                shell.process_complete_line(each)
            except (apsw.Error, apsw.shell.Shell.Error) as error:
                raise InvalidInput(
                    f"SQLite says: {error}", hint="`.help` lists the commands", statement=each
                ) from error
        return 0
    try:
        shell.cmdloop(f'{title}, SQLite {apsw.sqlite_lib_version()}\nEnter ".help" for instructions\n')
    except SystemExit as end:  # how `.exit` leaves
        return end.code if isinstance(end.code, int) else 0
    return 0
