"""The command `completion`, and what a shell offers for a word that is being typed: names of databases, snapshots, cursors and
tables, and the words that options accept.

What a parameter accepts is known by its metavar, so a new command completes without further work. Completion reads the manifest
as `quire ls` does: it creates nothing and takes no lock. Paths and new names are left to the shell.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
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
from quire.cli.declarations import COMPLETING, HERE, Argument, Option, command
from quire.cli.errors import OK
from quire.cli.lookup import LISTED
from quire.cli.output import Note
from quire.core.errors import InvalidInput, StorageFault
from quire.manifest import tables as t
from quire.manifest.tables import TABLES
from quire.service.values import DatabaseFilter
from quire.store.info import StoreReader
from quire.store.listing import matching

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
    "ORDER": ("name", "written", "size", "alone", "wal", "disk"),
}
"""Metavar → the words it accepts."""

DATABASES = frozenset({"DB", "OTHERDB", "OLD", "WHAT", "STREAM", "LABEL"})
SNAPSHOTS = frozenset({"SNAP", "A", "B", "VERSION"})
NAMED_IN = frozenset({"quire drop", "quire undrop"})
"""Commands whose NAME is an existing database."""

KINDS: Mapping[str, str] = {"kv": "LSM", "stream": "STREAM", "sqlite": "PAGES"}
"""Group → the kind of its databases."""


@command("completion", example="quire completion bash")
def completion(
    cli: Cli,
    shell: Annotated[
        str, Argument(metavar="[SHELL]", help="The shell: bash, zsh or fish.", show_default="default: $SHELL")
    ] = "",
    install: Annotated[bool, Option("--install", help="Set it up for new shells, instead of printing it.")] = False,
) -> Note | CliResult:
    """Print a shell completion script, or install it.

    `quire completion --install` writes the script to ~/.config/quire and one line to ~/.bashrc or ~/.zshrc that reads it; for
    fish it is one file. A second time it only renews the script. To set it up by hand, add `eval "$(quire completion bash)"` to
    ~/.bashrc.
    """
    shell = shell or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SHELLS:
        raise InvalidInput("completion does not support this shell", hint="choose bash, zsh or fish", shell=shell)
    script = SHELLS[shell](click.Command("quire"), {}, "quire", COMPLETING).source()
    if install:
        return _installed(shell, script)
    if cli.as_json:
        return Note(text="", data={"shell": shell, "script": script})
    sys.stdout.write(script)
    return CliResult(None, OK)


def _installed(shell: str, script: str) -> Note:
    """Write the script, and have new shells read it."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    file = config / ("fish/completions/quire.fish" if shell == "fish" else f"quire/completion.{shell}")
    start = None if shell == "fish" else Path("~/.bashrc" if shell == "bash" else "~/.zshrc").expanduser()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script, "utf-8")
        if start is not None:
            line = f"[ -f {shlex.quote(str(file))} ] && . {shlex.quote(str(file))}  # completion of quire"
            before = start.read_text("utf-8") if start.exists() else ""
            if line not in before.splitlines():
                gap = "" if before.endswith("\n") or not before else "\n"
                with start.open(
                    "a", encoding="utf-8"
                ) as startup:  # appended: what a person has there is never rewritten
                    startup.write(f"{gap}{line}\n")
    except (OSError, UnicodeDecodeError) as error:
        hint = "`quire completion SHELL` prints the script, to be set up by hand"
        raise StorageFault(f"completion could not be installed: {error}", hint=hint) from None
    read_by = f", which {start} reads" if start is not None else ""
    data = {"shell": shell, "file": str(file), "startup": str(start) if start is not None else None}
    return Note(text=f"wrote {file}{read_by}; open a new {shell} to use it", data=data)


def answer(program: click.Command, instruction: str) -> int:
    """Write the candidates for the word being typed, as a shell's script requests them; the exit code."""
    return shell_complete(program, {"obj": candidates}, "quire", COMPLETING, instruction)


def candidates(metavar: str, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
    """The candidates that begin with `incomplete`, for a parameter with this metavar."""
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
    with StoreReader(ctx.params.get("store") or HERE) as store, store.read() as txn:
        if word == "CURSOR":
            yield from sorted(row.name for _, row in txn.scan(t.CHANGE_CURSORS) if row.name)
            return
        if ctx.command_path == "quire undrop":
            yield from sorted({record.former_name for _, record in txn.dropped()})
            return
        if word not in SNAPSHOTS:
            kind = "STREAM" if word == "STREAM" else KINDS.get(ctx.command_path.split()[1], "")
            wanted = DatabaseFilter(prefix=incomplete, kind=kind.lower(), limit=LISTED)
            yield from (record.name for _, record in matching(txn, wanted))
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
        """As it is written on a command line."""
        return re.sub(r"([^\w@%+=:,./-])", r"\\\1", item.value)


add_completion_class(Bash)
SHELLS: Mapping[str, type[ShellComplete]] = {"bash": Bash, "zsh": ZshComplete, "fish": FishComplete}
