"""What a shell offers for a word that is being typed: names of databases, snapshots, cursors, tables; words that options take.

What a parameter takes is known by its metavar, so that a new command completes by itself. Completion only reads, as `quire ls`
does: nothing is created and no lock is taken. Paths and new names are left to the shell.

Loaded only while a shell asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

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

from quire.cli.command import COMPLETING, HERE, Cli
from quire.manifest import tables as t
from quire.manifest.tables import TABLES

WORDS: Mapping[str, tuple[str, ...]] = {
    "KIND": ("pages", "stream", "lsm"),
    "STATE": ("pending", "running", "succeeded", "failed", "cancelled"),
    "RUNNER": ("threads", "spark", "auto"),
    "MOVE": ("compress", "upload", "evict", "hydrate"),
    "STYLE": ("json", "console"),
    "SHELL": ("bash", "zsh", "fish"),
    "MODE": ("off", "shadow", "on"),
    "STATUS": ("active", "read_only"),
}
"""Metavar → what may be there."""

DATABASES = frozenset({"DB", "OTHERDB", "OLD", "WHAT", "STREAM", "LABEL"})
SNAPSHOTS = frozenset({"SNAP", "A", "B", "VERSION"})
NAMED_IN = frozenset({"quire drop"})
"""Commands whose NAME is that of a database that is there."""

KINDS: Mapping[str, str] = {"kv": "LSM", "stream": "STREAM", "sqlite": "PAGES"}
"""Group → the only kind of its databases."""


def candidates(metavar: str, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """What begins with `incomplete`, for a parameter with this metavar."""
    try:
        return [CompletionItem(text) for text in _offered(metavar.strip("[]."), ctx) if text.startswith(incomplete)]
    except Exception:
        return []  # a shell that asks is never told an error


def script(program: click.Command, shell: str) -> str:
    """What a shell runs to have the words of `quire` completed."""
    return SHELLS[shell](program, {}, "quire", COMPLETING).source()


def answer(program: click.Command, instruction: str) -> int:
    """Write what could come next, for the script of a shell that asks in the environment; the exit code."""
    return shell_complete(program, {}, "quire", COMPLETING, instruction)


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
    with Cli(ctx.params.get("store") or HERE).reader() as manifest, manifest.read() as txn:
        if word == "CURSOR":
            yield from sorted(row.name for _, row in txn.scan(t.CHANGE_CURSORS) if row.name)
            return
        live = {db_id: record for db_id, record in txn.databases() if record.status.name != "TOMBSTONED"}
        if word not in SNAPSHOTS:
            kind = "STREAM" if word == "STREAM" else KINDS.get(ctx.command_path.split()[1], "")
            yield from sorted(record.name for record in live.values() if kind in ("", record.kind.name))
            return
        other = ctx.params.get("of") if word == "B" else ""
        # while an option waits for its value, the arguments are not parsed yet
        database = other or ctx.params.get("database") or next(iter(ctx.args), "")
        for db_id in (db_id for db_id, record in live.items() if record.name == database):
            for snapshot in manifest.snapshots.of(db_id):
                yield snapshot.name or str(snapshot.snapshot_id)


class Bash(BashComplete):
    """Bash, with names that have spaces: click's own script takes the backslashes away again."""

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
