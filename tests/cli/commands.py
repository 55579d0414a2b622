"""All commands of the program, by their words."""

from __future__ import annotations

from collections.abc import Iterator

from quire.cli.declarations import CliCommand, Group
from quire.cli.main import Program

PROGRAM = Program().load_all()
GROUPS = [name for name, command in PROGRAM.commands.items() if isinstance(command, Group)]


def _walk(group: Group, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CliCommand]]:
    for name in group.list_commands(PROGRAM.make_context("quire", [], resilient_parsing=True)):
        command = group.commands[name]
        if isinstance(command, Group):
            yield from _walk(command, (*before, name))
        else:
            assert isinstance(command, CliCommand)
            yield (*before, name), command


COMMANDS = dict(_walk(PROGRAM))
