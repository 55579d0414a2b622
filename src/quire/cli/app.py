"""The program `quire`: its commands, each loaded when a command line names it.

Threads: the main one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

from quire.cli.declared import Group

MODULES: Mapping[str, tuple[str, ...]] = {
    "stores": ("init", "ls", "info", "create", "drop", "rename"),
    "db": ("db",),
    "tree": ("tree",),
    "why": ("why",),
    "snapshots": ("snapshot", "fork"),
    "sqlite": ("sqlite",),
    "kv": ("kv",),
    "stream": ("stream",),
    "retention": ("retention",),
    "checkpoint": ("checkpoint", "merge", "evict", "hydrate"),
    "restore": ("restore",),
    "verify": ("verify",),
    "stats": ("stats", "metrics"),
    "gc": ("gc",),
    "jobs": ("jobs",),
    "audit": ("audit",),
    "feed": ("feed",),
    "manifest": ("manifest",),
    "quarantine": ("quarantine",),
    "objects": ("takeover", "objects"),
    "namespace": ("namespace",),
    "serve": ("serve",),
    "doctor": ("doctor",),
    "tour": ("tour",),
    "complete": ("completion",),
}
"""Modules of this package, in the order of the help → the first words of their commands (a test compares)."""


class Program(Group):
    """The group of all commands; importing a module of `MODULES` adds those that it declares."""

    def __init__(self) -> None:
        super().__init__("quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`.")
        self.epilog = "Example: quire tour --store ./quire-data"
        self.params.append(
            click.Option(
                ["--version"],
                is_flag=True,
                callback=_version,
                is_eager=True,
                expose_value=False,
                help="Show the version.",
            )
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name, its module loaded."""
        self._load([module for module, words in MODULES.items() if cmd_name in words])
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order of `MODULES`, single ones first."""
        self.load_all()
        return super().list_commands(ctx)

    def load_all(self) -> Program:
        """Load every module: for help, completion and tests."""
        self._load(list(MODULES))
        return self

    def _load(self, modules: list[str]) -> None:
        for module in modules:
            if MODULES[module][0] not in self.commands:
                import_module(f"quire.cli.{module}").add_to(self)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"quire {version('quire')}")
        ctx.exit()
