"""Looks at all databases of a store, some at a time: a round of upkeep takes as long with a million databases as with a
thousand, and comes round to each of them in time.

Any thread, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.core.clock import Clock
from quire.manifest.reads import ReadTxn
from quire.manifest.tables import Table

AT_LEAST = 64
"""Databases that a step visits, however long each of them takes: a busy machine gets round, too."""


class DatabaseWalk:
    """Goes through the databases that have rows in a table; each step continues where the one before has ended."""

    def __init__(self, table: Table[Any], clock: Clock, seconds: float) -> None:
        self._table = table
        self._clock = clock
        self._seconds = seconds
        self._next = 0

    def step(self, txn: ReadTxn, *, whole: bool = False) -> Iterator[int]:
        """Ids of databases, until the time is up that a step may take, whoever uses it; `whole`: of all of them."""
        until = self._clock.monotonic() + self._seconds
        for visited, db_id in enumerate(txn.owners(self._table, start=0 if whole else self._next)):
            self._next = db_id
            if not whole and visited >= AT_LEAST and self._clock.monotonic() >= until:
                return
            self._next = db_id + 1  # also for whoever takes no more
            yield db_id
        self._next = 0
