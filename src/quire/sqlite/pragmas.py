"""What a pragma means here, where it cannot mean what it means for a file.

SQLite shows every pragma to the file first (`SQLITE_FCNTL_PRAGMA`). `Verdict` is the answer: leave it to SQLite, say
something in its place, or refuse it with a message of ours. The table for users is in docs/sqlite.md.

    >>> look("journal_mode", "wal", page_size=4096)
    Verdict(reply='memory', refusal=None)
    >>> look("journal_mode", "off", page_size=4096).refusal[:50]
    'journal_mode=off would leave nothing to roll back '
    >>> look("cache_size", "10", page_size=4096) is PASS
    True

Executor-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

JOURNAL_MODE = "memory"
"""The rollback journal lives in memory; what is on disk is quire's own log, and has a transaction whole or not at all."""

EPOCH = "quire_epoch"
"""Our own: the version that a connection reads, as an lsn."""

OFF, NORMAL, FULL, EXTRA = range(4)
LEVELS = {"off": OFF, "no": OFF, "false": OFF, "full": FULL, "extra": EXTRA}
"""Of `PRAGMA synchronous`. From FULL on a commit waits for the disk (Q2)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a pragma: a reply in SQLite's place, a refusal, or, if neither, SQLite's own answer."""

    reply: str | None = None
    refusal: str | None = None


PASS = Verdict()


def look(name: str, value: str | None, *, page_size: int) -> Verdict:
    """The verdict on one pragma of a database; `page_size` is 0 while it has none."""
    asked = None if value is None else value.strip().lower()
    if asked is None:
        return PASS
    match name.lower():
        case "journal_mode" if asked == "off":
            what = "journal_mode=off would leave nothing to roll back to"
            return Verdict(refusal=f"{what}; it stays {JOURNAL_MODE!r}, which costs no write to disk either")
        case "journal_mode" if asked in ("delete", "truncate", "persist", "memory", "wal"):
            return Verdict(reply=JOURNAL_MODE)
        case "locking_mode" if asked == "exclusive":
            return Verdict(reply="normal")
        case "page_size" if page_size and asked.isdecimal() and int(asked) != page_size:
            what = f"the page size of a quire database is fixed: {page_size}, not {asked}"
            return Verdict(refusal=f"{what}; create another database with page_size={asked} and copy this one into it")
        case "mmap_size":
            return Verdict(reply="0")
    return PASS


def synchronous(value: str) -> int:
    """The level that a value of `PRAGMA synchronous` means, as SQLite reads it: any other word is NORMAL.

    >>> [synchronous(value) for value in ("Normal", "2", "off", "sometimes", "EXTRA")]
    [1, 2, 0, 1, 3]
    """
    asked = value.strip().lower()
    if asked[:1].isdigit():
        return min(int(asked), EXTRA) if asked.isdecimal() else NORMAL
    return LEVELS.get(asked, NORMAL)
