"""The command `completion`, and what a shell offers for a word that is being typed: names of databases, snapshots, cursors and
tables, and the words that options accept.

What a parameter accepts is known by its metavar, so a new command completes without further work. Completion reads the manifest
as `quire ls` does: it creates nothing and takes no lock. Paths and new names are left to the shell.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
    shell_complete,
)

from quire.cli.command import Cli, CliResult
from quire.cli.declarations import COMPLETING, HERE, Argument, command
from quire.cli.errors import OK
from quire.cli.output import Note
from quire.core.errors import InvalidInput
from quire.manifest import tables as t
from quire.manifest.tables import TABLES
from quire.store.info import StoreReader

WORDS: Mapping[str, tuple[str, ...]] = {
    "KIND": ("pages", "stream", "lsm"),
    "STATE": ("pending", "running", "succeeded", "failed", "cancelled"),
    "RUNNER": ("threads", "spark", "auto"),
    "MOVE": ("compress", "upload", "evict", "hydrate"),
    "STYLE": ("json", "console"),
    "SHELL": ("bash", "zsh", "fish"),
    "MODE": ("off", "shadow", "on"),
    "ARCHIVEMODE": ("async", "sync"),
    "STATUS": ("active", "read_only"),
}
"""Metavar → the words it accepts."""

DATABASES = frozenset({"DB", "OTHERDB", "OLD", "WHAT", "STREAM", "LABEL"})
SNAPSHOTS = frozenset({"SNAP", "A", "B", "VERSION"})
NAMED_IN = frozenset({"quire drop"})
"""Commands whose NAME is an existing database."""

KINDS: Mapping[str, str] = {"kv": "LSM", "stream": "STREAM", "sqlite": "PAGES"}
"""Group → the kind of its databases."""


@command("completion", example="quire completion bash")
def completion(
    cli: Cli, shell: Annotated[str, Argument(metavar="SHELL", help="The shell: bash, zsh or fish.")]
) -> Note | CliResult:
    """Print a shell completion script.

    Add `eval "$(quire completion bash)"` to ~/.bashrc, or the same with zsh to ~/.zshrc. For fish, write the output to
    ~/.config/fish/completions/quire.fish.
    """
    if shell not in SHELLS:
        raise InvalidInput("completion does not support this shell", hint="choose bash, zsh or fish", shell=shell)
    script = SHELLS[shell](click.Command("quire"), {}, "quire", COMPLETING).source()
    if cli.as_json:
        return Note(text="", data={"shell": shell, "script": script})
    sys.stdout.write(script)
    return CliResult(None, OK)


def answer(program: click.Command, instruction: str) -> int:
    """Write the candidates for the word being typed, as a shell's script requests them; the exit code."""
    return shell_complete(program, {"obj": candidates}, "quire", COMPLETING, instruction)


def candidates(metavar: str, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """The candidates that begin with `incomplete`, for a parameter with this metavar."""
    try:
        return [CompletionItem(text) for text in _offered(metavar.strip("[]."), ctx) if text.startswith(incomplete)]
    except Exception:
        return []  # an error message would end up on the command line that is being typed


def _offered(word: str, ctx: click.Context) -> Iterator[str]:
    if word in WORDS:
        yield from WORDS[word]
    elif word not in {*DATABASES, *SNAPSHOTS, "NAME", "CURSOR", "TABLE"}:
        return
    elif word == "TABLE":
        yield from sorted(TABLES)
    elif word == "NAME" and ctx.command_path not in NAMED_IN:
        return
    else:
        yield from _in_store(word, ctx)


def _in_store(word: str, ctx: click.Context) -> Iterator[str]:
    with StoreReader(ctx.params.get("store") or HERE) as store, store.read() as txn:
        if word == "CURSOR":
            yield from sorted(row.name for _, row in txn.scan(t.CHANGE_CURSORS) if row.name)
            return
        live = {db_id: record for db_id, record in txn.databases() if not record.is_dropped}
        if word not in SNAPSHOTS:
            kind = "STREAM" if word == "STREAM" else KINDS.get(ctx.command_path.split()[1], "")
            yield from sorted(record.name for record in live.values() if kind in ("", record.kind.name))
            return
        other = ctx.params.get("of") if word == "B" else ""
        # while an option waits for its value, the arguments are not parsed yet
        database = other or ctx.params.get("database") or next(iter(ctx.args), "")
        for db_id in (db_id for db_id, record in live.items() if record.name == database):
            for (_, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX, db_id):
                yield snapshot.name or str(snapshot_id)


class Bash(BashComplete):
    """Bash, with support for names that contain spaces: click's own script strips the backslashes."""

    source_template = """\
%(complete_func)s() {
    local line IFS=$'\\n'
    COMPREPLY=()
    for line in $(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD %(complete_var)s=bash_complete "$1"); do
        COMPREPLY+=("$line")
    done
}
complete -o default -F %(complete_func)s %(prog_name)s
"""

    def format_completion(self, item: CompletionItem[str]) -> str:
        """As it is written on a command line."""
        return re.sub(r"([^\w@%+=:,./-])", r"\\\1", item.value)


add_completion_class(Bash)
SHELLS: Mapping[str, type[ShellComplete]] = {"bash": Bash, "zsh": ZshComplete, "fish": FishComplete}
