"""Closing many things, of which some may fail; and what is abandoned instead when a `with` block fails."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

from quire.core.errors import QuireError


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Give back what is held."""


class AbandonedOnError:
    """A context manager that closes; after an exception in its block it abandons: a close that fails on top of it must not hide
    it."""

    __slots__ = ()

    def close(self) -> None:
        """Complete what was begun, and give back what is held."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Give back what is held, and nothing more."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def close_all(resources: Iterable[Closable]) -> None:
    """Close everything; the first failure is raised after all of it is closed."""
    failures: list[QuireError] = []
    for resource in resources:
        try:
            resource.close()
        except QuireError as error:
            failures.append(error)
    if failures:
        raise failures[0]
