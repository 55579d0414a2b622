"""The commands of `quire`, put together.

A command's module is loaded when that command, or the list of all, is wanted. These load the store, LMDB or rich only when a
command runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from quire.cli.declared import Group

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
    "quarantine": ("quarantine",),
    "objects": ("takeover", "objects"),
    "serve": ("serve",),
    "doctor": ("doctor",),
    "tour": ("tour",),
}
"""Modules of this room, in the order of the help → the first words of their commands (a test compares)."""


def app_for(arguments: Sequence[str]) -> Group:
    """All that a command line needs: the module of its command, or all of them where it begins with none."""
    return assembled(modules_for(arguments) or list(MODULES))


def modules_for(arguments: Sequence[str]) -> list[str]:
    """The module of the command that a command line begins with, if it does."""
    first = arguments[0] if arguments else ""
    return [name for name, words in MODULES.items() if first in words]


def assembled(modules: Sequence[str]) -> Group:
    """The program with the commands of these modules."""
    made = Group(TEXT)
    for name in modules:
        import_module(f"quire.cli.{name}").add_to(made)
    return made


def __getattr__(name: str) -> Any:
    """`app`: all commands, made when somebody asks."""
    if name == "app":
        globals()["app"] = made = assembled(list(MODULES))
        return made
    raise AttributeError(name)
