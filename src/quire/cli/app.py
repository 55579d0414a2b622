"""The commands of `quire`, put together.

Importing it loads typer; a command's module is loaded when that command, or the list of all, is wanted. These load the store,
LMDB or rich only when a command runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import typer

from quire.cli.typed import new_app

TEXT = "quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`."

MODULES: Mapping[str, tuple[str, ...]] = {
    "stores": ("init", "ls", "info", "create", "drop", "rename"),
    "tree": ("tree",),
    "why": ("why",),
    "snapshots": ("snapshot", "fork"),
    "sqlite": ("sqlite",),
    "kv": ("kv",),
    "stream": ("stream",),
    "retention": ("retention",),
    "checkpoint": ("checkpoint", "merge"),
    "restore": ("restore",),
    "verify": ("verify",),
    "stats": ("stats",),
    "gc": ("gc",),
    "jobs": ("jobs",),
    "audit": ("audit",),
    "feed": ("feed",),
    "manifest": ("manifest",),
    "serve": ("serve",),
    "doctor": ("doctor",),
    "tour": ("tour",),
}
"""Modules of this room, in the order of the help → the first words of their commands (a test compares)."""


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """All that a command line needs: the module of its command, or all of them where it begins with none."""
    first = arguments[0] if arguments else ""
    wanted = [name for name, words in MODULES.items() if first in words]
    return assembled(wanted or list(MODULES))


def assembled(modules: Sequence[str]) -> typer.Typer:
    """The application with the commands of these modules."""
    made = new_app(TEXT)
    for name in modules:
        import_module(f"quire.cli.{name}").add_to(made)
    made.callback(epilog="Example: quire tour --store ./quire-data")(_options)
    return made


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"quire {version('quire')}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`."""


def __getattr__(name: str) -> Any:
    """`app`: all commands, made when somebody asks."""
    if name == "app":
        globals()["app"] = made = assembled(list(MODULES))
        return made
    raise AttributeError(name)
