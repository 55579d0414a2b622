"""What a pragma means here, where it cannot mean what it means for a file.

SQLite shows every pragma to the file first (`SQLITE_FCNTL_PRAGMA`). `PragmaAnswer` is the answer: leave it to SQLite, say
something in its place, or refuse it with a message of ours. The table for users is in docs/sqlite.md.

A program that asks for another journal mode goes on: whoever answers `memory` has not changed it, by SQLite's own rule, and
what the mode stands for is had anyway. But nobody reads that answer, so a note says so too, once in a process for each mode:
the event `sqlite.pragma`, and a line in SQLite's own log (`SQLITE_NOTICE`), which programs that use apsw may listen to.

    >>> judge("journal_mode", "wal", page_size=4096).reply
    'memory'
    >>> judge("journal_mode", "wal", page_size=4096).note
    "readers and the writer never wait for each other here, as in WAL mode; the log is the store's own"
    >>> judge("journal_mode", "off", page_size=4096).refusal[:50]
    'journal_mode=off would leave nothing to roll back '
    >>> judge("cache_size", "10", page_size=4096) is PASS
    True

Executor-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from apsw import SQLITE_NOTICE, log

from quire.core.events import emit

JOURNAL_MODE = "memory"
"""The rollback journal lives in memory; what is on disk is quire's own log, and has a transaction whole or not at all."""

EPOCH = "quire_epoch"
"""Our own: the version that a connection reads, as an lsn."""

_HELD = (
    "a transaction is there whole or not at all whatever the mode, and no journal is written beside the store's own log"
)
NOTES = {
    "wal": "readers and the writer never wait for each other here, as in WAL mode; the log is the store's own",
    "delete": _HELD,
    "truncate": _HELD,
    "persist": _HELD,
}
"""Journal modes that are answered with ours, and why that is enough."""
EXCLUSIVE = (
    "a database of a store is never locked for one connection; one writes at a time, and its process owns the store"
)

ANSWERED = frozenset({"journal_mode", "locking_mode", "mmap_size", EPOCH})
"""Pragmas that are answered here, and not by SQLite."""

OFF, NORMAL, FULL, EXTRA = range(4)
LEVELS = {"off": OFF, "no": OFF, "false": OFF, "full": FULL, "extra": EXTRA}
"""Of `PRAGMA synchronous`. From FULL on a commit waits for the disk (Q2)."""


@dataclass(frozen=True, slots=True)
class PragmaAnswer:
    """What becomes of a pragma: a reply in SQLite's place, a refusal, or, if neither, SQLite's own answer. A note says why the
    reply is not what was asked for."""

    reply: str | None = None
    refusal: str | None = None
    note: str | None = None


PASS = PragmaAnswer()


def judge(name: str, value: str | None, *, page_size: int) -> PragmaAnswer:
    """The verdict on one pragma of a database; `page_size` is 0 while it has none."""
    asked = None if value is None else value.strip().lower()
    if asked is None:
        return PASS
    match name.lower():
        case "journal_mode" if asked == "off":
            what = "journal_mode=off would leave nothing to roll back to"
            return PragmaAnswer(refusal=f"{what}; it stays {JOURNAL_MODE!r}, which costs no write to disk either")
        case "journal_mode" if asked == JOURNAL_MODE or asked in NOTES:
            return PragmaAnswer(reply=JOURNAL_MODE, note=NOTES.get(asked))
        case "locking_mode" if asked == "exclusive":
            return PragmaAnswer(reply="normal", note=EXCLUSIVE)
        case "page_size" if page_size and asked.isdecimal() and int(asked) != page_size:
            what = f"the page size of a quire database is fixed: {page_size}, not {asked}"
            return PragmaAnswer(
                refusal=f"{what}; create another database with page_size={asked} and copy this one into it"
            )
        case "mmap_size":
            return PragmaAnswer(reply="0")
    return PASS


@cache
def log_once(pragma: str, asked: str, answered: str, note: str) -> None:
    """Say that something else holds than what a program has asked for, where people look: in the log."""
    log(SQLITE_NOTICE, f"PRAGMA {pragma}={asked} is answered with {answered!r}: {note}")
    emit("warning", "sqlite.pragma", pragma=pragma, asked=asked, answered=answered, note=note)


def synchronous(value: str) -> int:
    """The level that a value of `PRAGMA synchronous` means, as SQLite reads it: any other word is NORMAL.

    >>> [synchronous(value) for value in ("Normal", "2", "off", "sometimes", "EXTRA")]
    [1, 2, 0, 1, 3]
    """
    asked = value.strip().lower()
    if asked[:1].isdigit():
        return min(int(asked), EXTRA) if asked.isdecimal() else NORMAL
    return LEVELS.get(asked, NORMAL)
