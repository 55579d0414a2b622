"""The short way in: commands without arguments of their own run without loading typer, which is a third of their time.

Rules
  1. The lane understands `COMMAND [--store DIR | -s DIR | --store=DIR] [--json] [--debug]` for the commands listed here, and
     declines everything else, `--help` and mistakes included: typer is the only one that explains.
  2. What it does not decline it understands as typer does (a test compares the two).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from quire.cli import show
from quire.cli.command import HERE, STORE_VARIABLE, Cli, Verdict, perform
from quire.cli.output import Shown

COMMANDS: Mapping[str, Callable[[Cli], Shown | Verdict]] = {"ls": show.ls, "info": show.info}


class Understood(msgspec.Struct, frozen=True):
    """A command line of the lane."""

    name: str
    cli: Cli
    debug: bool


def understand(arguments: Sequence[str]) -> Understood | None:
    """The command line, if it is one for the lane (rule 1)."""
    if not arguments or arguments[0] not in COMMANDS or "_QUIRE_COMPLETE" in os.environ:
        return None
    store = os.environ.get(STORE_VARIABLE) or HERE
    as_json = debug = False
    rest = iter(arguments[1:])
    for each in rest:
        if each == "--json":
            as_json = True
        elif each == "--debug":
            debug = True
        elif each in ("--store", "-s") or each.startswith("--store="):
            store = each[8:] if "=" in each else next(rest, "")
            if not store or store.startswith("-"):
                return None
        else:
            return None
    return Understood(arguments[0], Cli(store, as_json), debug)


def run(arguments: Sequence[str]) -> int | None:
    """Run a command of the lane; its exit code, or `None` if the command line is not for the lane."""
    understood = understand(arguments)
    if understood is None:
        return None
    return perform(COMMANDS[understood.name], understood.cli, {}, debug=understood.debug)
