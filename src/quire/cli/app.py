"""The program `quire`: its commands, each loaded when a command line names it.

Threads: the main one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from quire.cli.declarations import Group

COMMANDS: Mapping[str, tuple[str, str]] = {
    "init": ("stores", "Create a store, or check that one exists."),
    "ls": ("stores", "List the databases of a store."),
    "info": ("stores", "Show a summary of a store."),
    "create": ("stores", "Create a database."),
    "drop": ("stores", "Drop a database."),
    "rename": ("stores", "Rename a database."),
    "tree": ("tree", "Show database lineage: databases, snapshots and forks."),
    "why": ("why", "Explain why data is retained and how to free it."),
    "fork": ("snapshots", "Create a database from another one, as it is or was."),
    "checkpoint": ("checkpoint", "Write the WAL of page databases into chunks now."),
    "merge": ("checkpoint", "Rewrite chunks that have many deltas now."),
    "evict": ("checkpoint", "Remove local copies of a page database that the object store has."),
    "hydrate": ("checkpoint", "Fetch what only the object store has of a page database."),
    "restore": ("restore", "Write a snapshot to a file."),
    "verify": ("verify", "Read every stored byte and compare it with the manifest."),
    "stats": ("stats", "Show how much space each database uses, alone and shared."),
    "metrics": ("stats", "Show the rolling metrics that the manifest keeps."),
    "gc": ("gc", "Run one round of maintenance now and show what it did."),
    "audit": ("audit", "Show the history of databases: snapshots, forks, deletions."),
    "takeover": ("objects", "Make this directory the owner of its bucket."),
    "serve": ("serve", "Own a store and serve it to other processes."),
    "doctor": ("doctor", "Check the machine, the store and the object store."),
    "tour": ("tour", "Watch a store at work, step by step."),
    "completion": ("completion", "Print a shell completion script."),
    "db": ("db", "Change a database's status, tags and compression."),
    "snapshot": ("snapshots", "Create, list, compare and drop snapshots."),
    "sqlite": ("sqlite", "Import, export, follow and query SQLite databases."),
    "kv": ("kv", "Read, write and maintain key-value databases."),
    "stream": ("stream", "Append to streams, read them, move them between tiers."),
    "retention": ("retention", "Choose which snapshots are kept and taken automatically."),
    "jobs": ("jobs", "Inspect and control durable jobs."),
    "feed": ("feed", "Read the change feed and manage its cursors."),
    "manifest": ("manifest", "Inspect the manifest, the catalog of everything in a store."),
    "quarantine": ("quarantine", "List, restore or remove files that recovery set aside."),
    "objects": ("objects", "Manage where the store's objects are."),
    "namespace": ("namespace", "Manage places for objects besides the store's own."),
}
"""The first word of each command → its module, and its line in `quire --help` (a test compares). The order is that of the
help."""


class Program(Group):
    """The group of all commands."""

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
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            import_module(f"quire.cli.{COMMANDS[cmd_name][0]}").add_to(self)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All commands, loaded or not."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """The list of commands, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(word, line) for word, (_, line) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """The commands and options that begin so, without loading commands."""
        words = [CompletionItem(word, help=line) for word, (_, line) in COMMANDS.items() if word.startswith(incomplete)]
        return [*words, *click.Command.shell_complete(self, ctx, incomplete)]

    def load_all(self) -> Program:
        """Load every command: for tests."""
        for word in COMMANDS:
            self.get_command(click.Context(self), word)
        return self


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"quire {version('quire')}")
        ctx.exit()
