"""Closing many things, of which some may fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from quire.core.errors import QuireError


class Closes(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Give back what is held."""


def close_all(things: Iterable[Closes]) -> None:
    """Close everything; the first failure is raised after all of it is closed."""
    failures: list[QuireError] = []
    for thing in things:
        try:
            thing.close()
        except QuireError as error:
            failures.append(error)
    if failures:
        raise failures[0]
