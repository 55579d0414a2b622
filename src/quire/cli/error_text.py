"""How an error is told on the command line: what, where and what next, in the words of commands.

Other packages speak to programs: their hints may name Python calls, and commands that are still to come. Here every hint
becomes something that can be typed.

Rules
  1. What a program reads is what the error says (`what`, `where`); only the next step is the command line's own.
  2. People see times as their clock shows them, with an age, and values without Python around them.
  3. A hint that names a command we do not have is not shown: the next step of the error's group is.
"""

from __future__ import annotations

import re
from typing import Any

from quire.cli.exit_codes import exit_of
from quire.cli.formatting import here, in_words, plain, visible
from quire.core.clock import SystemClock
from quire.core.errors import ManifestDamaged, NameTaken, QuireError, StoreLocked, UnknownCursor

COMMANDS = frozenset(
    {
        "audit", "checkpoint", "completion", "create", "db", "doctor", "drop", "feed", "fork", "gc", "info", "init", "jobs",
        "kv", "ls", "manifest", "merge", "metrics", "namespace", "objects", "quarantine", "rename", "restore", "retention",
        "serve", "evict", "hydrate", "snapshot", "sqlite", "stats", "stream", "takeover", "tour", "tree", "verify", "why",
    }
)  # fmt: skip
"""The first words of all commands: a test compares them with the program's."""

_NAMED = re.compile(r"`quire ([a-z]+)")


def for_programs(error: QuireError) -> dict[str, Any]:
    """The object that stands under "error" in JSON."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "next": next_step(error),
        "where": plain(error.where),
        "exit_code": exit_of(error).code,
    }


def for_people(error: QuireError) -> str:
    """One sentence: what happened, and where."""
    what = error.what
    if _breaks_rules(error):  # the rows it names are what `manifest check` lists, one to a line
        what = "the manifest breaks its rules"
    place = ", ".join(_coordinate(name, value) for name, value in error.where.items() if value is not None)
    return visible(f"{what} ({place})" if place else what)


def next_step(error: QuireError) -> str:
    """What to do now, on the command line."""
    if isinstance(error, StoreLocked):
        pid = error.where.get("pid")
        who = f"process {pid}" if pid else "it"
        return f"wait for {who} to end, or stop it; commands that only read (`quire ls`) work meanwhile"
    if isinstance(error, UnknownCursor):
        return "`quire feed cursors` lists them"
    if isinstance(error, NameTaken) and not error.hint:
        return "choose another name, or drop or rename what has it"
    if _breaks_rules(error):
        return f"`quire manifest check` lists them; {error.hint}"
    if not error.hint or set(_NAMED.findall(error.hint)) - COMMANDS:
        return exit_of(error).next_step
    return error.hint


def _breaks_rules(error: QuireError) -> bool:
    return isinstance(error, ManifestDamaged) and "problems" in error.where


def _coordinate(name: str, value: Any) -> str:
    if name.endswith("_ms") and isinstance(value, int):
        return f"{name.removesuffix('_ms')} {here(value, SystemClock().now_ms())}"
    return f"{name}={value!r}" if isinstance(value, str) else f"{name}={in_words(value)}"
