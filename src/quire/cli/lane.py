"""The short way in: a command line that is written as it should be runs without loading typer, which is slow to load.

Rules
  1. The lane understands a command with its words and options in any order, each option whole (`--limit 5`, `--limit=5`,
     `-n 5`), and `--help`, `-h` and `--version` alone. It declines everything else, mistakes included: typer is the only one
     that explains.
  2. What it does not decline it understands as typer does, by the same declarations (a test compares the two on every command).
  3. Commands that have a quick way too (`quire.cli.quick`) take it if nothing unusual is asked; if that meets anything unusual
     it declines, and the usual command tells what is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from quire.cli.command import STORE_VARIABLE, Cli, perform
from quire.cli.declared import HELP, REQUIRED, Command, Option, Parameter
from quire.cli.exits import OK
from quire.cli.values import Value

QUICK: Mapping[str, str] = {
    "show.ls": "quick.ls",
    "show.info": "quick.info",
    "tree.tree": "quick.tree",
    "snapshots.ls": "quick.snapshot_ls",
    "jobs.ls": "quick_lists.jobs_ls",
    "feed.cursors": "quick_lists.feed_cursors",
}
"""A command's function → the quick one, which may take less of what the command takes: who asks for more goes the usual way."""


class Understood(Value):
    """A command line of the lane."""

    command: Command
    arguments: dict[str, Any]
    cli: Cli
    debug: bool


class _Declined(Exception):
    """Rule 1."""


def understand(arguments: Sequence[str]) -> Understood | None:
    """The command line, if it is one for the lane (rule 1)."""
    if "_QUIRE_COMPLETE" in os.environ:
        return None
    from quire.cli.app import assembled, modules_for

    found = assembled(modules_for(arguments)).find(arguments)
    if found is None:
        return None
    command, words = found
    try:
        values = _read([*command.parameters(), *command.shared()], arguments[words:])
    except _Declined:
        return None
    store, as_json, debug = (values.pop(each.name) for each in command.shared())
    return Understood(command, values, Cli(store, as_json), debug)


def run(arguments: Sequence[str]) -> int | None:
    """Run a command of the lane; its exit code, or `None` if the command line is not for the lane (rule 1)."""
    if list(arguments) in ([HELP[0]], [HELP[1]], ["--version"]) and "_QUIRE_COMPLETE" not in os.environ:
        return _about(arguments[0])
    understood = understand(arguments)
    if understood is None:
        return None
    body, given = understood.command.body, understood.arguments
    if (shown := _quickly(understood)) is not None:
        return perform(lambda _: shown, understood.cli, {}, debug=understood.debug)
    return perform(body, understood.cli, given, debug=understood.debug)


# ── reading a command line ────────────────────────────────────────────────────────────────────────────────────────────
def _read(parameters: Sequence[Parameter], words: Sequence[str]) -> dict[str, Any]:
    """The values of all parameters; declines where one is missing or is not what it should be."""
    options = {name: each for each in parameters for name in _spellings(each)}
    values: dict[str, Any] = {}
    placed: list[str] = []
    rest = iter(words)
    for word in rest:
        if word[:1] != "-":
            placed.append(word)
            continue
        name, equals, text = word.partition("=")
        option = options.get(name)
        if option is None or (equals and (option.kind is bool or name[:2] != "--")):
            raise _Declined
        if option.kind is bool:
            values[option.name] = name not in _refusals(option)
            continue
        value = _value(option, text if equals else next(rest, ""))
        values[option.name] = [*values.get(option.name, ()), value] if option.many else value
    values.update(_placed([each for each in parameters if not isinstance(each.declared, Option)], placed))
    return {each.name: _settled(each, values) for each in parameters}


def _spellings(each: Parameter) -> Iterator[str]:
    for name in each.names:
        yield from name.split("/")


def _refusals(each: Parameter) -> list[str]:
    """The spellings that say no: `--no-lock` of `--lock/--no-lock`."""
    return [part for name in each.names for part in name.split("/")[1:]]


def _placed(parameters: Sequence[Parameter], words: list[str]) -> dict[str, Any]:
    """The arguments by their places; the last one may take all that is left."""
    values: dict[str, Any] = {}
    left = list(words)
    for each in parameters:
        if each.many:
            if left:
                values[each.name] = [_value(each, word) for word in left]
            left = []
        elif left:
            values[each.name] = _value(each, left.pop(0))
    if left:
        raise _Declined
    return values


def _value(each: Parameter, text: str) -> Any:
    """What a text is as the parameter's kind; what begins with a dash may be a forgotten value, and is left to typer."""
    if not text or text[0] == "-":
        raise _Declined
    if each.kind is str:
        return text
    digits = text.replace(".", "", 1) if each.kind is float else text
    if not (digits.isascii() and digits.isdecimal()):
        raise _Declined
    value = each.kind(text)
    if value < each.declared.said.get("min", value):
        raise _Declined
    return value


def _settled(each: Parameter, values: dict[str, Any]) -> Any:
    if each.name in values:
        return values[each.name]
    if each.default is REQUIRED:
        raise _Declined
    if each.declared.said.get("envvar") == STORE_VARIABLE:
        return os.environ.get(STORE_VARIABLE) or each.default
    return each.default


# ── the quick way ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _quickly(understood: Understood) -> Any:
    """What the quick way shows, or `None` (rule 3)."""
    command, given = understood.command, understood.arguments
    where = QUICK.get(f"{command.body.__module__.rpartition('.')[2]}.{command.body.__name__}")
    if where is None:
        return None
    module, _, name = where.partition(".")
    try:
        function = getattr(import_module(f"quire.cli.{module}"), name)
        taken = function.__code__.co_varnames[1 : function.__code__.co_argcount]
        if any(given[each.name] != each.default for each in command.parameters() if each.name not in taken):
            return None
        return function(understood.cli, **{each: given[each] for each in taken})
    except Exception:
        return None


def _about(option: str) -> int | None:
    """The list of commands, or the version."""
    try:
        if option in HELP:
            from quire.cli.quick import help_text

            text = help_text()
        else:
            from importlib.metadata import version

            text = f"quire {version('quire')}\n"
    except Exception:
        return None  # rule 3
    sys.stdout.write(text)
    return OK
