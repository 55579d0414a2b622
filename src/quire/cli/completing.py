"""What a shell offers for a word that is being typed: names of databases, snapshots, cursors, tables; words that options take.

Rules
  1. What a parameter takes is known by its metavar, so that a new command completes by itself.
  2. It only looks, as `quire ls` does: nothing is made, no lock is taken, and whatever is unusual is nothing to offer. A shell
     that asks is never told an error.
  3. Paths, and what is new, are left to the shell.

Loaded only while a shell asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.cli.command import HERE, STORE_VARIABLE
from quire.cli.typed import COMPLETING

WORDS: Mapping[str, tuple[str, ...]] = {
    "KIND": ("pages", "stream", "lsm"),
    "STATE": ("pending", "running", "succeeded", "failed", "cancelled"),
    "RUNNER": ("threads", "spark", "auto"),
    "MOVE": ("compress", "upload", "evict", "hydrate"),
    "STYLE": ("json", "console"),
}
"""Metavar → what may be there."""

DATABASES = frozenset({"DB", "OTHERDB", "OLD", "WHAT", "STREAM", "LABEL"})
SNAPSHOTS = frozenset({"SNAP", "A", "B", "VERSION"})
NAMED_IN = frozenset({"quire drop"})
"""Commands whose NAME is that of a database that is there."""

KINDS: Mapping[str, str] = {"kv": "LSM", "stream": "STREAM", "sqlite": "PAGES"}
"""Group → the only kind of its databases."""


def completer(metavar: str) -> Callable[[Any, str], list[str]] | None:
    """What offers values for a parameter with this metavar, as typer calls it; nothing if it has none to offer."""
    word = metavar.strip("[].")
    if word not in {*WORDS, *DATABASES, *SNAPSHOTS, "NAME", "CURSOR", "TABLE"}:
        return None

    def offer(ctx: Any, incomplete: str) -> list[str]:
        try:
            return [_for_shell(each) for each in _offered(word, ctx) if each.startswith(incomplete)]
        except Exception:
            return []  # rule 2

    offer.__annotations__ = {}  # typer goes by the names of its parameters then
    return offer


def _offered(word: str, ctx: Any) -> Iterator[str]:
    if word in WORDS:
        yield from WORDS[word]
    elif word == "TABLE":
        from quire.manifest.tables import TABLES

        yield from sorted(TABLES)
    elif word == "NAME" and ctx.command_path not in NAMED_IN:
        return
    else:
        yield from _in_store(word, ctx)


def _in_store(word: str, ctx: Any) -> Iterator[str]:
    from quire.cli.command import Cli
    from quire.cli.quick import Looked

    path = ctx.params.get("store") or os.environ.get(STORE_VARIABLE) or HERE
    with Looked(Cli(path)) as store:
        if word == "CURSOR":
            from quire.cli.quick_lists import CURSOR
            from quire.manifest.glance import record

            rows = [record("change_cursors", key, raw, CURSOR) for key, raw in store.rows("change_cursors")]
            yield from sorted(row.name for row in rows if row.name)
            return
        live = {db_id: each for db_id, each in store.databases().items() if each.status.name != "TOMBSTONED"}
        if word not in SNAPSHOTS:
            kind = "STREAM" if word == "STREAM" else KINDS.get(ctx.command_path.split()[1], "")
            yield from sorted(each.name for each in live.values() if kind in ("", each.kind.name))
            return
        of = ctx.params.get("of") if word == "B" else ""
        wanted = (
            of or ctx.params.get("database") or next(iter(ctx.args), "")
        )  # the last while an option waits for its value
        for db_id in (db_id for db_id, each in live.items() if each.name == wanted):
            yield from (each.name or str(each.snapshot_id) for each in store.snapshots(db_id))


def _for_shell(text: str) -> str:
    """Bash puts what it is offered on the line as it is; the others see to what they need."""
    if os.environ.get(COMPLETING) != "complete_bash":
        return text
    return re.sub(r"([^\w@%+=:,./-])", r"\\\1", text)
