"""The short way in: what is asked most runs without loading typer, which is more than all the rest of it.

Rules
  1. The lane understands `COMMAND [--store DIR | -s DIR | --store=DIR] [--json] [--debug]` for the commands listed here, with
     exactly the words they take, and `--help` and `--version` alone. It declines everything else, mistakes included: typer is
     the only one that explains.
  2. What it does not decline it understands as typer does (a test compares the two).
  3. A command that meets anything unusual declines as well (`quire.cli.quick`): the usual way tells what is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from quire.cli.command import HERE, STORE_VARIABLE, Cli, perform
from quire.cli.exits import OK
from quire.cli.values import Value

COMMANDS: Mapping[tuple[str, ...], tuple[str, int]] = {
    ("ls",): ("ls", 0),
    ("info",): ("info", 0),
    ("tree",): ("tree", 0),
    ("snapshot", "ls"): ("snapshot_ls", 1),
}
"""A command's words → the function of `quire.cli.quick`, and how many words come after them."""


class Understood(Value):
    """A command line of the lane."""

    name: str
    words: tuple[str, ...]
    cli: Cli
    debug: bool


def understand(arguments: Sequence[str]) -> Understood | None:
    """The command line, if it is one for the lane (rule 1)."""
    known = next((each for each in COMMANDS if tuple(arguments[: len(each)]) == each), None)
    if known is None or "_QUIRE_COMPLETE" in os.environ:
        return None
    name, words_wanted = COMMANDS[known]
    store = os.environ.get(STORE_VARIABLE) or HERE
    as_json = debug = False
    words: list[str] = []
    rest = iter(arguments[len(known) :])
    for each in rest:
        if each == "--json":
            as_json = True
        elif each == "--debug":
            debug = True
        elif each in ("--store", "-s") or each.startswith("--store="):
            store = each[8:] if "=" in each else next(rest, "")
            if not store or store.startswith("-"):
                return None
        elif each and not each.startswith("-"):
            words.append(each)
        else:
            return None
    if len(words) != words_wanted:
        return None
    return Understood(name, tuple(words), Cli(store, as_json), debug)


def run(arguments: Sequence[str]) -> int | None:
    """Run a command of the lane; its exit code, or `None` if the command line is not for the lane (rules 1 and 3)."""
    if list(arguments) in (["--help"], ["--version"]) and "_QUIRE_COMPLETE" not in os.environ:
        return _about(arguments[0])
    understood = understand(arguments)
    if understood is None:
        return None
    try:
        from quire.cli import quick

        shown = getattr(quick, understood.name)(understood.cli, *understood.words)
    except Exception:
        return None  # rule 3
    return perform(lambda _: shown, understood.cli, {}, debug=understood.debug)


def _about(option: str) -> int | None:
    """The list of commands, or the version."""
    try:
        if option == "--help":
            from quire.cli.quick import help_text

            text = help_text()
        else:
            from importlib.metadata import version

            text = f"quire {version('quire')}\n"
    except Exception:
        return None  # rule 3
    sys.stdout.write(text)
    return OK
