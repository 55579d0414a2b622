"""The interface of a mirror's target: a Delta table, an Iceberg table, or Parquet files with a manifest, opened by URL.

A target is read, then committed to, through one handle. If any other commit is made in between, the commit fails (`StalePlan`),
and the run is planned again on the new state. The target's own log has the number of the batch that the target holds: a commit
and its number exist together or not at all (L3).

Used on the driver; tasks only write files below `location`. Threads: one caller at a time.
Raises `StalePlan`, `InvalidInput` (a URL, or a table that the mirror did not make), `InvalidConfig` (a missing package).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

from quire.core.clock import Clock
from quire.core.errors import InvalidConfig, InvalidInput, StalePlan
from quire.core.packages import install_command
from quire.jobs.mirror.run import Column, WrittenFile

FORMATS = ("delta", "iceberg", "parquet")
DATA = "data"
"""Directory of the data files, below a target's location."""


class FileSize(NamedTuple):
    """The size of a target's file."""

    size_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class TargetState:
    """The current state of a target."""

    batch_id: int
    """The last batch of this mirror that it holds; 0 if there is none."""
    columns: tuple[Column, ...]
    """Its columns, without the one for the database's name."""
    files: Mapping[str, FileSize]
    """Its files, by path below the location."""


class Target(Protocol):
    """A table that a mirror writes."""

    @property
    def location(self) -> str:
        """The URL of its directory; known once the table exists."""

    def read(self) -> TargetState | None:
        """Return the current state; `None` if there is no table. Later calls refer to this state."""

    def create(self) -> None:
        """Create an empty table, with the database's name as its only column."""

    def add_columns(self, columns: Sequence[Column]) -> None:
        """Add columns in a separate commit, so that readers never see data without its column."""

    def commit(self, batch_id: int, add: Sequence[WrittenFile], remove: Sequence[str]) -> None:
        """Add and remove files in one commit that carries the batch's number."""


def require_same(before: TargetState | None, after: TargetState | None, target: str) -> None:
    """Raise `StalePlan` if rows have been committed since the plan was made."""
    if before is None or after is None or (before.batch_id, before.files) != (after.batch_id, after.files):
        raise StalePlan("the target has changed in the meantime", hint="plan it again", target=target)


def unsupported_type(column: str, kind: str) -> InvalidInput:
    """Return the error for a column of the target whose type mirrors cannot write."""
    hint = "use a new table: the mirror creates it"
    return InvalidInput("the table has a column type that mirrors do not support", hint=hint, column=column, type=kind)


def split_target(target: str) -> tuple[str, str]:
    """Return (format, location) of a target.

    >>> split_target("delta:s3://lake/orders")
    ('delta', 's3://lake/orders')
    """
    kind, colon, where = target.partition(":")
    if not colon or kind not in FORMATS or not where:
        hint = "use delta:URL, iceberg:CATALOG.NAMESPACE.TABLE or parquet:URL"
        raise InvalidInput("this is not a mirror target", hint=hint, target=target)
    return kind, where


def open_target(target: str, app_id: str, options: Mapping[str, str], clock: Clock) -> Target:
    """Open the target with this URL; `app_id` identifies the mirror in the target's log."""
    kind, where = split_target(target)
    try:
        module = import_module(f"quire.jobs.mirror.{kind}_target")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("quire"):
            raise
        raise InvalidConfig(
            f"{kind} needs the package {error.name}", hint=install_command("lakehouse"), target=target
        ) from error
    opened: Target = module.open_table(where, app_id, options, clock)
    return opened
