"""Handles pragmas that cannot have the same meaning here as for a file.

SQLite passes every pragma to the file first (`SQLITE_FCNTL_PRAGMA`). `PragmaAnswer` is the response: leave it to SQLite,
reply instead of SQLite, or refuse it with a message. The table for users is in docs/sqlite.md.

A program that sets another journal mode keeps working: by SQLite's own rule the reply `memory` means that the mode has not
changed, and the guarantees of the requested mode hold anyway. Since programs rarely read that reply, a note is emitted as
well, once per process and mode: the event `sqlite.pragma`, and a line in SQLite's own log (`SQLITE_NOTICE`), to which
programs that use apsw can subscribe.

    >>> answer_pragma("journal_mode", "wal", page_size=4096).reply
    'memory'
    >>> answer_pragma("journal_mode", "wal", page_size=4096).note
    "readers and the writer never wait for each other, as in WAL mode; the log is the store's own"
    >>> answer_pragma("journal_mode", "off", page_size=4096).refusal[:50]
    'journal_mode=off would leave nothing to roll back '
    >>> answer_pragma("cache_size", "10", page_size=4096) is PASS
    True

Executor-safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from apsw import SQLITE_NOTICE, log

from quire.core.events import emit

JOURNAL_MODE = "memory"
"""The rollback journal is kept in memory. On disk there is only quire's own log, where a transaction is atomic."""

EPOCH = "quire_epoch"
"""A pragma of quire: the version that a connection reads, as an lsn."""

_HELD = "transactions are atomic in every mode, and the store's own log is the only journal"
NOTES = {
    "wal": "readers and the writer never wait for each other, as in WAL mode; the log is the store's own",
    "delete": _HELD,
    "truncate": _HELD,
    "persist": _HELD,
}
"""Journal modes that are answered with `JOURNAL_MODE`, and why that is sufficient."""
EXCLUSIVE = "a quire database cannot be locked for one connection; only one connection writes at a time"

ANSWERED = frozenset({"journal_mode", "locking_mode", "mmap_size", EPOCH})
"""Pragmas that are answered here, not by SQLite."""

OFF, NORMAL, FULL, EXTRA = range(4)
LEVELS = {"off": OFF, "no": OFF, "false": OFF, "full": FULL, "extra": EXTRA}
"""Words for the levels of `PRAGMA synchronous`. From FULL on a commit waits for the disk (Q2)."""


@dataclass(frozen=True, slots=True)
class PragmaAnswer:
    """The response to a pragma: a reply instead of SQLite's, a refusal, or, if neither is set, SQLite's own answer. A note
    explains why the reply differs from the request."""

    reply: str | None = None
    refusal: str | None = None
    note: str | None = None


PASS = PragmaAnswer()


def answer_pragma(name: str, value: str | None, *, page_size: int) -> PragmaAnswer:
    """Decide how to answer one pragma of a database; `page_size` is 0 while it has none."""
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
    """Log that a pragma is answered with a value other than the one requested; once per process."""
    log(SQLITE_NOTICE, f"PRAGMA {pragma}={asked} is answered with {answered!r}: {note}")
    emit("warning", "sqlite.pragma", pragma=pragma, asked=asked, answered=answered, note=note)


def synchronous(value: str) -> int:
    """Return the level of a value of `PRAGMA synchronous`, parsed as SQLite does: any unknown word is NORMAL.

    >>> [synchronous(value) for value in ("Normal", "2", "off", "sometimes", "EXTRA")]
    [1, 2, 0, 1, 3]
    """
    asked = value.strip().lower()
    if asked[:1].isdigit():
        return min(int(asked), EXTRA) if asked.isdecimal() else NORMAL
    return LEVELS.get(asked, NORMAL)
