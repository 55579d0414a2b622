"""Exit codes: one per group of errors, so that a script can tell what to do without reading text.

Rules
  1. A code is about what the caller will do, as the groups of `quire.core.errors` are; a new leaf needs nothing here, a
     new group needs a line (a test walks all of them).
  2. Codes are never given another meaning.

Constants and pure functions. docs/cli.md shows this table; a test holds the two together.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core import errors as e

OK = 0
PROBLEMS = 1
USAGE = 2
INTERNAL = 70
INTERRUPTED = 130
PIPE_CLOSED = 141
"""Whoever read our output has seen enough; what a shell shows for a program that SIGPIPE ended."""


@dataclass(frozen=True)
class Exit:
    """A group of errors, its code, and the next step when the error itself names none."""

    group: type[e.QuireError]
    code: int
    meaning: str
    next_step: str


EXITS = (
    Exit(
        e.InvalidInput, USAGE, "the command line, a name or the configuration is invalid", "add `--help` to the command"
    ),
    Exit(
        e.NotFound, 3, "the database, snapshot, file or other subject does not exist", "`quire ls` lists what is there"
    ),
    Exit(e.Conflict, 4, "the state of the store does not allow it", "`quire info` shows the state"),
    Exit(
        e.Unavailable,
        5,
        "temporarily unavailable: locked, overloaded or unreachable",
        "`quire doctor` shows which process owns the store",
    ),
    Exit(
        e.StorageFault,
        6,
        "the disk or the object store reported an error",
        "`quire doctor` checks the disk and the object store",
    ),
    Exit(e.Corruption, 7, "stored data is corrupt", "`quire manifest check` lists the damage"),
    Exit(e.Incompatible, 8, "a version or a fixed setting is incompatible", "`quire doctor` shows the versions"),
    Exit(e.StoreUnusable, 9, "the store must be reopened first", "run the command again"),
    Exit(e.StoreClosed, 9, "the store must be reopened first", "run the command again"),
    Exit(e.InternalError, INTERNAL, "a bug in quire", "run it with `--debug` and report the traceback"),
)


def exit_of(error: e.QuireError) -> Exit:
    """The group an error belongs to."""
    for each in EXITS:
        if isinstance(error, each.group):
            return each
    return EXITS[-1]  # only a bare QuireError comes here, and nobody raises one
