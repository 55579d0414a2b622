"""Placeholders in read-only objects for parts that only the owner of the store has: their use raises `ReadOnly` with a hint."""

from __future__ import annotations

from typing import Any, NoReturn

from quire.core.errors import ReadOnly

HINT = (
    'open the store with mode="rw" where no other process owns it; `quire promote` makes a standby the owner, and '
    "`quire takeover` a restored directory"
)


def refusal(what: str, **where: object) -> ReadOnly:
    """Return the error for `what`, with the coordinates `where`."""
    return ReadOnly(f"{what} was opened for reading", hint=HINT, **where)


def refuse(what: str, **where: object) -> NoReturn:
    """Raise `ReadOnly` for `what`."""
    raise refusal(what, **where)


class OwnerOnly:
    """A part that is missing in a read-only object: any attribute raises `ReadOnly`."""

    def __init__(self, what: str, **where: object) -> None:
        self._refused = (what, where)

    def __getattr__(self, name: str) -> Any:
        what, where = self._refused
        refuse(what, **where)
