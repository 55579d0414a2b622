"""The program `quire`: the table of commands, whose modules are loaded on demand, and the exit code of a command line.

Threads: the main thread.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from quire.cli.declarations import COMPLETING, REGISTERED, Group, run_program
from quire.cli.errors import INTERRUPTED
from quire.cli.output import output_for, pipe_closed, report_error, unwritable
from quire.core.errors import StoreLocked
from quire.core.packages import installed_version

GARBAGE_ALLOCATIONS = 50_000
"""Allocations between two garbage collections. With Python's default of 700, loading modules alone triggers a hundred, which
find no garbage."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    "init": ("init", "Create a store, or check that one exists."),
    "ls": ("stores", "List the databases of a store, by name."),
    "info": ("stores", "Show a summary of a store."),
    "create": ("stores", "Create a database."),
    "drop": ("stores", "Drop a database."),
    "undrop": ("stores", "Restore a dropped database."),
    "rename": ("stores", "Rename a database."),
    "tree": ("tree", "Show database lineage: databases, snapshots and forks."),
    "why": ("why", "Explain why data is retained and how to free it."),
    "fork": ("snapshots", "Fork a database: create a copy that shares its data."),
    "rollback": ("snapshots", "Undo everything since a version, in place."),
    "checkpoint": ("checkpoint", "Write the WAL of page databases to chunks now."),
    "merge": ("checkpoint", "Merge chunks and their deltas into new chunks now."),
    "evict": ("checkpoint", "Remove local copies that the object store also has."),
    "hydrate": ("checkpoint", "Fetch data that is only in the object store."),
    "restore": ("checkpoint", "Write a snapshot to a file."),
    "backup": ("backup", "Back up the store while it is in use."),
    "restore-db": ("backup", "Copy one database out of an archive or backup."),
    "verify": ("verify", "Read every stored byte and compare it with the manifest."),
    "stats": ("stats", "Show the space that each database uses, exclusive and shared."),
    "metrics": ("stats", "Show the rolling metrics kept in the manifest."),
    "gc": ("gc", "Run one round of maintenance now and show what it did."),
    "audit": ("audit", "Show the history of databases: snapshots, forks, deletions."),
    "restore-store": ("restore_store", "Restore a whole store from its bucket or a backup."),
    "standby": ("standby", "Keep a directory up to date with a store's archive."),
    "promote": ("standby", "Make a standby the owner of its store."),
    "clone": ("standby", "Create a new store from the current or an earlier state of another one."),
    "takeover": ("objects", "Make this directory the owner of its bucket."),
    "serve": ("serve", "Own a store and serve it to other processes."),
    "token": ("token", "Create tokens for clients of the SQL server."),
    "doctor": ("doctor", "Check the machine, the store and the object store."),
    "tour": ("tour", "Demonstrate quire step by step."),
    "completion": ("completion", "Print a shell completion script, or install it."),
    "db": ("stores", "Change a database's status, tags and compression."),
    "snapshot": ("snapshots", "Create, list, compare and drop snapshots."),
    "sqlite": ("sqlite", "Import, export, follow and query SQLite databases."),
    "kv": ("kv", "Read, write and maintain key-value sets."),
    "stream": ("stream", "Append to streams, read them and move them between tiers."),
    "mirror": ("mirror", "Keep lakehouse tables in step with tables of many databases."),
    "retention": ("retention", "Choose which snapshots are kept or created automatically."),
    "jobs": ("jobs", "Inspect and control durable jobs."),
    "feed": ("feed", "Read the change feed and manage its cursors."),
    "manifest": ("manifest", "Inspect the manifest, the catalog of everything in a store."),
    "quarantine": ("quarantine", "List, restore or remove files that recovery set aside."),
    "archive": ("archive", "Keep the whole store in its bucket; status and drills."),
    "clones": ("standby", "List and release the clones that a store keeps objects for."),
    "objects": ("objects", "Manage the location of the store's objects."),
    "namespace": ("objects", "Manage additional locations for objects."),
}
"""First word of a command → its module and its line in `quire --help`, in this order. The line is the help of a group, and must
equal the first sentence of a single command's help (a test compares them)."""


SECTIONS: Mapping[str, str] = {
    "Databases": "init ls info create drop undrop rename tree db",
    "Contents": "sqlite kv stream",
    "Versions": "snapshot fork rollback retention",
    "Space and upkeep": "why stats gc checkpoint merge evict hydrate jobs metrics audit",
    "Recovery": "backup restore restore-db archive restore-store standby promote clone clones takeover",
    "Checks and repair": "doctor verify manifest quarantine",
    "Other programs": "serve token feed mirror objects namespace",
    "Learning": "tour completion",
}
"""Heading in `quire --help` → its commands. Each command has one heading (a test compares them)."""


class Program(Group):
    """The group of all commands."""

    def __init__(self) -> None:
        super().__init__()
        self.help = "quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`."
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
        """Load and return the command with this name."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            module, line = COMMANDS[cmd_name]
            import_module(f"quire.cli.{module}")
            command = REGISTERED[cmd_name]
            if isinstance(command, Group):
                command.help = line
            self.add_command(command, cmd_name)
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all commands, loaded or not."""
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write the list of commands, without loading them."""
        for heading, words in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(word, COMMANDS[word][1]) for word in words.split()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the commands and options with this prefix, without loading commands."""
        words = [CompletionItem(word, help=line) for word, (_, line) in COMMANDS.items() if word.startswith(incomplete)]
        return [*words, *click.Command.shell_complete(self, ctx, incomplete)]

    def load_all(self) -> Program:
        """Load every command, for tests and man pages."""
        for word in COMMANDS:
            self.get_command(click.Context(self), word)
        return self


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"quire {installed_version()}")
        ctx.exit()


def main() -> None:
    """Run the command line of this process: the entry point of the console script and `python -m quire`."""
    gc.set_threshold(GARBAGE_ALLOCATIONS)
    _replace_closed_streams()
    code = run(sys.argv[1:])
    gc.freeze()  # the collection at interpreter exit would take a tenth of a short command's time
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        if instruction := os.environ.get(COMPLETING):
            from quire.cli.candidates import answer  # here: it loads the manifest, which help does not need

            return answer(Program(), instruction)
        code = run_program(Program(), arguments, perform_command)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return pipe_closed()
    except OSError as error:  # while click was writing help; commands report such errors themselves
        return report_error(output_for("--json" in arguments), unwritable(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def perform_command(
    body: Callable[..., Any], store: str, arguments: dict[str, Any], *, as_json: bool, debug: bool
) -> int:
    """Run the function of a command; see `declarations.Perform`."""
    from quire.cli.command import Cli, perform  # here: it loads the manifest, which help does not need

    cli = Cli(store, as_json)

    def run_at_owner(locked: StoreLocked) -> int:
        from quire.cli import remote  # here: it loads sockets and Arrow, and few commands meet an owner

        return remote.run_at_owner(body, cli, arguments, locked)

    return perform(body, cli, arguments, run_at_owner, debug=debug)


def _replace_closed_streams() -> None:
    """Open /dev/null for a standard stream that the caller closed. Otherwise the next file opened gets its descriptor, and our
    output goes into that file."""
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - stays open until we exit
        elif number:
            stream.reconfigure(errors="backslashreplace")  # paths may contain bytes that are not valid text
