"""Visits all databases of a store, some at a time: a round of upkeep takes as long with a million databases as with a
thousand, and reaches each of them eventually.

Threads: any, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.core.clock import Clock
from quire.manifest.reads import ReadTxn
from quire.manifest.tables import Table

AT_LEAST = 64
"""Databases that a step visits however long they take, so that the walk also progresses on a busy machine."""


class DatabaseWalk:
    """A walk over the databases that have rows in a table; each step continues where the previous one ended."""

    def __init__(self, table: Table[Any], clock: Clock, seconds: float) -> None:
        self._table = table
        self._clock = clock
        self._seconds = seconds
        self._next = 0

    def step(self, txn: ReadTxn, *, whole: bool = False) -> Iterator[int]:
        """Yield ids of databases until the step's time, which includes the caller's work, is over; with `whole`, yield all."""
        until = self._clock.monotonic() + self._seconds
        for visited, db_id in enumerate(txn.owners(self._table, start=0 if whole else self._next)):
            self._next = db_id
            if not whole and visited >= AT_LEAST and self._clock.monotonic() >= until:
                return
            self._next = db_id + 1  # before the yield: the caller may stop here
            yield db_id
        self._next = 0
