"""Computes completions for a shell: names of databases, snapshots, cursors and tables, and the words that options accept.

The metavar of a parameter determines its candidates, so completion of a new command needs no further work. Completion reads the
manifest as `quire ls` does: it creates nothing and takes no lock. Paths and new names are left to the shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

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

from quire.cli.declarations import COMPLETING, HERE
from quire.cli.lookup import LISTED
from quire.manifest import tables as t
from quire.manifest.tables import TABLES
from quire.service.values import DatabaseFilter
from quire.store.listing_by_name import by_name
from quire.store.manifest_reader import ManifestReader

WORDS: Mapping[str, tuple[str, ...]] = {
    "KIND": ("pages", "stream", "kv"),
    "STATE": ("pending", "running", "succeeded", "failed", "cancelled"),
    "RUNNER": ("threads", "spark", "auto"),
    "MOVE": ("compress", "upload", "evict", "hydrate"),
    "STYLE": ("json", "console"),
    "SHELL": ("bash", "zsh", "fish"),
    "MODE": ("off", "shadow", "on"),
    "async|sync": ("async", "sync"),
    "STATUS": ("active", "read_only"),
    "ORDER": ("name", "written", "size", "alone", "wal", "disk"),
}
"""Metavar → the words it accepts."""

DATABASES = frozenset({"DB", "OTHERDB", "OLD", "WHAT", "STREAM", "LABEL"})
SNAPSHOTS = frozenset({"SNAP", "A", "B", "VERSION"})
NAMED_IN = frozenset({"quire drop", "quire undrop"})
"""Commands whose NAME is an existing database."""

KINDS: Mapping[str, str] = {"kv": "LSM", "stream": "STREAM", "sqlite": "PAGES"}
"""Group → the kind of its databases."""


def answer(program: click.Command, instruction: str) -> int:
    """Write the candidates for the word being typed, as requested by a shell's script, and return the exit code."""
    return shell_complete(program, {"obj": candidates}, "quire", COMPLETING, instruction)


def candidates(metavar: str, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """Return the candidates that begin with `incomplete` for a parameter with this metavar."""
    try:
        return [
            CompletionItem(text)
            for text in _offered(metavar.strip("[]."), ctx, incomplete)
            if text.startswith(incomplete)
        ]
    except Exception:
        return []  # an error message would end up on the command line that is being typed


def _offered(word: str, ctx: click.Context, incomplete: str) -> Iterator[str]:
    if word in WORDS:
        yield from WORDS[word]
    elif word not in {*DATABASES, *SNAPSHOTS, "NAME", "CURSOR", "TABLE"}:
        return
    elif word == "TABLE":
        yield from sorted(TABLES)
    elif word == "NAME" and ctx.command_path not in NAMED_IN:
        return
    else:
        yield from _in_store(word, ctx, incomplete)


def _in_store(word: str, ctx: click.Context, incomplete: str) -> Iterator[str]:
    with ManifestReader(ctx.params.get("store") or HERE) as store, store.read() as txn:
        if word == "CURSOR":
            yield from sorted(row.name for _, row in txn.scan(t.CHANGE_CURSORS) if row.name)
            return
        if ctx.command_path == "quire undrop":
            yield from sorted({record.former_name for _, record in txn.dropped()})
            return
        if word not in SNAPSHOTS:
            kind = "STREAM" if word == "STREAM" else KINDS.get(ctx.command_path.split()[1], "")
            wanted = DatabaseFilter(prefix=incomplete, kind=kind.lower())
            yield from (record.name for _, record in islice(by_name(txn, wanted), LISTED))
            return
        other = ctx.params.get("of") if word == "B" else ""
        # while an option waits for its value, the arguments are not parsed yet
        database = other or ctx.params.get("database") or next(iter(ctx.args), "")
        for (_, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX, txn.database_id(database)):
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
        """Escape a candidate for the command line."""
        return re.sub(r"([^\w@%+=:,./-])", r"\\\1", item.value)


add_completion_class(Bash)
SHELLS: Mapping[str, type[ShellComplete]] = {"bash": Bash, "zsh": ZshComplete, "fish": FishComplete}
