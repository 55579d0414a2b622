"""What a mirror's target is, and opening one by its URL: a Delta table, an Iceberg table, or Parquet files with a manifest.

A target is read, then committed to, through one handle: whoever has committed in between makes the commit fail (`StalePlan`),
and the run is planned again on what is there by then. Its own log carries the number of the batch that it holds: a commit and
its number are there together, or neither is (L3).

Used on the driver; tasks only write files below `location`. Threads: one caller at a time.
Raises `StalePlan`, `InvalidInput` (a URL, or a table that the mirror did not make), `MissingPackage`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple, Protocol

from quire.core.errors import InvalidConfig, InvalidInput, StalePlan
from quire.jobs.mirror.run import Column, WrittenFile

FORMATS = ("delta", "iceberg", "parquet")
DATA = "data"
"""Where files are, below a target's location."""
EXTRA = 'pip install "quire[lakehouse]"'


class FileSize(NamedTuple):
    """A file of a target."""

    size_bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class TargetState:
    """A target, as it is."""

    batch_id: int
    """The last batch of this mirror that it holds; 0 if there is none."""
    columns: tuple[Column, ...]
    """Without the database's name."""
    files: Mapping[str, FileSize]
    """By path below the location: what it is made of."""


class Target(Protocol):
    """A table that a mirror writes."""

    @property
    def location(self) -> str:
        """The URL of its directory; known once there is a table."""

    def read(self) -> TargetState | None:
        """What is there now; `None` if there is no table. Later calls speak of this state."""

    def create(self) -> None:
        """Make an empty table, with the database's name as its only column."""

    def add_columns(self, columns: Sequence[Column]) -> None:
        """Add columns, in a commit of its own: readers never see data without its column."""

    def commit(self, batch_id: int, add: Sequence[WrittenFile], remove: Sequence[str]) -> None:
        """Replace files by others, in one commit that carries the batch's number."""


def require_same(before: TargetState | None, after: TargetState | None, target: str) -> None:
    """Refuse to go on if somebody has committed rows since the plan was made."""
    if before is None or after is None or (before.batch_id, before.files) != (after.batch_id, after.files):
        raise StalePlan("the target has changed meanwhile", hint="plan it again", target=target)


def split_target(target: str) -> tuple[str, str]:
    """(format, where) of a target.

    >>> split_target("delta:s3://lake/orders")
    ('delta', 's3://lake/orders')
    """
    kind, colon, where = target.partition(":")
    if not colon or kind not in FORMATS or not where:
        hint = "use delta:URL, iceberg:CATALOG.NAMESPACE.TABLE or parquet:URL"
        raise InvalidInput("this is no target of a mirror", hint=hint, target=target)
    return kind, where


def open_target(target: str, app_id: str, options: Mapping[str, str], now_ms: int) -> Target:
    """The target of this URL; `app_id` is what its log calls the mirror."""
    kind, where = split_target(target)
    try:
        module = import_module(f"quire.jobs.mirror.{kind}_target")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("quire"):
            raise
        raise InvalidConfig(f"{kind} needs the package {error.name}", hint=EXTRA, target=target) from error
    opened: Target = module.open_table(where, app_id, options, now_ms)
    return opened
