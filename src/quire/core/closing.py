"""Helpers for closing: at the end of a `with` block, abandoning if it fails, and several resources of which some may fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self


class Closable(Protocol):
    """A resource that can be closed."""

    def close(self) -> None:
        """Release the resource."""


class ClosedOnExit:
    """A context manager that closes at the end of its block."""

    __slots__ = ()

    def close(self) -> None:
        """Release resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AbandonedOnError:
    """A context manager that closes at the end of its block, and abandons if the block raises, so that a failing close does not
    hide the exception."""

    __slots__ = ()

    def close(self) -> None:
        """Complete pending work and release resources."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Release resources without completing pending work."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def close_all(resources: Iterable[Closable]) -> None:
    """Close every resource, then raise the first error, if any."""
    failures: list[Exception] = []
    for resource in resources:
        try:
            resource.close()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
