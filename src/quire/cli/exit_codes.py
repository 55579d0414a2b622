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
        e.InvalidInput, USAGE, "the command line, a name or the configuration is wrong", "add `--help` to the command"
    ),
    Exit(e.NotFound, 3, "what was asked for is not there", "`quire ls` lists what is there"),
    Exit(e.Conflict, 4, "the state of the store forbids it", "`quire info` shows the state"),
    Exit(e.Unavailable, 5, "not now: locked, overloaded or unreachable", "`quire doctor` shows who is in the way"),
    Exit(e.StorageFault, 6, "the machine or the object store refused", "`quire doctor` shows disk and object store"),
    Exit(e.Corruption, 7, "bytes are not what was written", "`quire manifest check` lists the damage"),
    Exit(e.Incompatible, 8, "versions or fixed settings do not fit", "`quire doctor` shows the versions"),
    Exit(e.StoreUnusable, 9, "nothing is accepted until the store is reopened", "run the command again"),
    Exit(e.StoreClosed, 9, "nothing is accepted until the store is reopened", "run the command again"),
    Exit(e.InternalError, INTERNAL, "a bug in quire", "add `--debug` and report what it shows"),
)


def exit_of(error: e.QuireError) -> Exit:
    """The group an error belongs to."""
    for each in EXITS:
        if isinstance(error, each.group):
            return each
    return EXITS[-1]  # only a bare QuireError comes here, and nobody raises one
