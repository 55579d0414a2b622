"""Maps errors to what a command reports: its exit code, the sentence for users, the object in JSON, and the next step.

An exit code stands for what the caller should do, like the groups in `quire.core.errors`, and its meaning never changes. A new
group of errors needs a line in `EXITS` (a test covers all groups); docs/cli.md has the same table (a test compares them).
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.cli.formatting import in_words, local_moment, visible
from quire.core import errors as e
from quire.core.clock import SystemClock
from quire.core.json_values import plain

OK = 0
PROBLEMS = 1
USAGE = 2
INTERNAL = 70
INTERRUPTED = 130
PIPE_CLOSED = 141
"""The reader of our output has closed the pipe: the code a shell reports for a program killed by SIGPIPE."""


class Exit(msgspec.Struct, frozen=True):
    """A group of errors, its exit code and meaning, and the next step if the error itself has no hint."""

    group: type[e.QuireError]
    code: int
    meaning: str
    next_step: str


_BAD_INPUT = "the command line, a name or the configuration is invalid"
_MISSING = "the database, snapshot, file or other subject does not exist"
_UNAVAILABLE = "temporarily unavailable: locked, overloaded or unreachable"
_FAULT = "the disk or the object store reported an error"
_REOPEN = "the store must be reopened first"

EXITS = (
    Exit(e.InvalidInput, USAGE, _BAD_INPUT, "add `--help` to the command"),
    Exit(e.NotFound, 3, _MISSING, "`quire ls` lists the databases"),
    Exit(e.Conflict, 4, "the state of the store does not allow it", "`quire info` shows the state"),
    Exit(e.Unavailable, 5, _UNAVAILABLE, "`quire doctor` shows which process owns the store"),
    Exit(e.StorageFault, 6, _FAULT, "`quire doctor` checks the disk and the object store"),
    Exit(e.Corruption, 7, "stored data is corrupt", "`quire manifest check` lists the damage"),
    Exit(e.Incompatible, 8, "a version or a fixed setting is incompatible", "`quire doctor` shows the versions"),
    Exit(e.StoreUnusable, 9, _REOPEN, "run the command again"),
    Exit(e.StoreClosed, 9, _REOPEN, "run the command again"),
    Exit(e.InternalError, INTERNAL, "a bug in quire", "run it with `--debug` and report the traceback"),
)


def exit_of(error: e.QuireError) -> Exit:
    """Return the group of an error. A bare `QuireError`, which nothing raises, counts as internal."""
    return next((entry for entry in EXITS if isinstance(error, entry.group)), EXITS[-1])


def for_programs(error: e.QuireError) -> dict[str, Any]:
    """Return the object under "error" in JSON: `what` and `where` are the error's own, only the next step is added here."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "next": next_step(error),
        "where": plain(error.where),
        "exit_code": exit_of(error).code,
    }


def for_people(error: e.QuireError) -> str:
    """Return one sentence: what happened, and where. Times have an age, values have no Python syntax."""
    # Without the rows that such an error names: `manifest check` lists them, one per line.
    what = "the manifest breaks its rules" if _breaks_rules(error) else error.what
    place = ", ".join(_coordinate(name, value) for name, value in error.where.items() if value is not None)
    return visible(f"{what} ({place})" if place else what)


def next_step(error: e.QuireError) -> str:
    """Return what to do next, on the command line."""
    if isinstance(error, e.StoreLocked):
        pid = error.where.get("pid")
        who = f"process {pid}" if pid else "it"
        return f"wait for {who} to end, or stop it; commands that only read (`quire ls`) work meanwhile"
    if isinstance(error, e.UnknownCursor):
        return "`quire feed cursors` lists them"
    if isinstance(error, e.NameTaken) and not error.hint:
        return "choose another name, or drop or rename the database that has it"
    if _breaks_rules(error):
        return f"`quire manifest check` lists them; {error.hint}"
    return error.hint or exit_of(error).next_step


def _breaks_rules(error: e.QuireError) -> bool:
    return isinstance(error, e.ManifestDamaged) and "problems" in error.where


def _coordinate(name: str, value: Any) -> str:
    if name.endswith("_ms") and isinstance(value, int):
        return f"{name.removesuffix('_ms')} {local_moment(value, SystemClock().now_ms())}"
    return f"{name}={value!r}" if isinstance(value, str) else f"{name}={in_words(value)}"
