"""Every command of the program, by its words."""

from __future__ import annotations

from collections.abc import Iterator

from quire.cli.declarations import CliCommand, Group
from quire.cli.main import Program

PROGRAM = Program().load_all()
GROUPS = [name for name, found in PROGRAM.commands.items() if isinstance(found, Group)]


def _walk(group: Group, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CliCommand]]:
    for name in group.list_commands(PROGRAM.make_context("quire", [], resilient_parsing=True)):
        found = group.commands[name]
        if isinstance(found, Group):
            yield from _walk(found, (*before, name))
        else:
            assert isinstance(found, CliCommand)
            yield (*before, name), found


COMMANDS = dict(_walk(PROGRAM))
