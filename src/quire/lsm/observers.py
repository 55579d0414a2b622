"""Who is told of a database's compactions and tables: the store's job queue and manifest, or nobody.

Only shapes: no thread, raises nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from quire.lsm.compaction import Job
    from quire.lsm.sst_reader import Table
    from quire.manifest.lsm_records import LsmEndsRecord


class CompactionLedger(Protocol):
    """Who writes down what is compacted."""

    def begin(self, job: Job) -> None:
        """A compaction begins, or is tried again."""

    def done(self, result: dict[str, Any]) -> None:
        """It is published."""

    def close(self) -> None:
        """None will be tried again."""


class Follower(Protocol):
    """Who follows a database's tables: the store's manifest (projection.py)."""

    def fold(self, tables: Callable[[], Iterable[Table]], ends: Callable[[], LsmEndsRecord]) -> bool:
        """They may have changed, and the logs have come so far; whether that is recorded now."""

    def record(self, ends: LsmEndsRecord) -> None:
        """The logs have come so far."""

    def differences(self, tables: Iterable[Table]) -> Iterator[str]:
        """What it knows otherwise."""


class NoLedger:
    """Of a database that belongs to no store."""

    def begin(self, job: Job) -> None:
        pass

    def done(self, result: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
