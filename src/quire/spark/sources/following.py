"""What streaming queries over a feed and over records have in common: Spark's progress is the position of who reads (K4).

Terms
  offset     what Spark keeps of a query's progress: whose it is, and how far it has read
  position   the number in an offset
  end        how far there is something to read

Rules
  1. Spark commits batch N while it plans batch N + 1, never after the last one: the acknowledgement trails by one batch, and
     a query that idles or ends leaves its last batch unacknowledged. It is read again by nobody: Spark's checkpoint knows.
  2. Acknowledging is idempotent and moves forward only: a restarted query repeats it without harm.
  3. A restart asks for no initial offset. Its first range is checked instead: one that begins below what is acknowledged, or
     below what is kept, is of an older checkpoint; reading on would double, or leave a gap. `CursorLost`.

One process of Spark's for each query, one thread; executors get a reader without its connection.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

WAIT_SECONDS = 0.2
"""How long a query that has read everything waits at the owner for more before it says so: it would ask a hundred times
a second otherwise."""

Offset = dict[str, Any]


def next_end(position: int, end: int, limit: ReadLimit) -> int:
    """How far the next batch goes.

    >>> next_end(10, 100, ReadMaxRows(5)), next_end(10, 12, ReadMinRows(5)), next_end(10, 8, ReadAllAvailable())
    (15, 10, 10)
    """
    if isinstance(limit, ReadMaxRows):
        end = min(end, position + limit.max_rows)
    if isinstance(limit, ReadMinRows) and end - position < limit.min_rows:
        end = position
    return max(end, position)


class FollowingReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A query's offsets; who reads what adds batches and acknowledgements."""

    def __init__(self, rows_max: int) -> None:
        self._rows_max = rows_max
        self._target: int | None = None
        """Where a query of what is there now ends."""

    @abstractmethod
    def end(self) -> int:
        """How far there is something now."""

    @abstractmethod
    def end_beyond(self, position: int) -> int:
        """The same, after waiting a little if there is nothing beyond `position`."""

    @abstractmethod
    def offset(self, position: int) -> Offset:
        """As Spark keeps it."""

    @abstractmethod
    def position(self, offset: Offset) -> int:
        """Of an offset that is this query's; another's is refused."""

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark gives these names
        """How far the next batch goes."""
        position = self.position(start)
        end = self._target if self._target is not None else self.end_beyond(position)
        return self.offset(next_end(position, end, limit))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The most rows of a batch, if an option says so."""
        return ReadMaxRows(self._rows_max) if self._rows_max else ReadAllAvailable()

    def reportLatestOffset(self) -> Offset:  # noqa: N802
        """The end, for the query's progress."""
        return self.offset(self.end())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What comes from here on is not this query's."""
        self._target = self.end()
