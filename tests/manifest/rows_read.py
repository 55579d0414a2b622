"""Counts the rows that are read from a manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.manifest.reads import ReadTxn


class RowsRead:
    """Counts the rows that this process has read since the last `take`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        rows_of, get, steps = ReadTxn._rows, ReadTxn.get, ReadTxn.steps

        def counted_rows(txn: ReadTxn, rows: Iterator[Any], end: bytes | None) -> Iterator[Any]:
            for row in rows_of(txn, rows, end):
                self._count += 1
                yield row

        def counted_get(txn: ReadTxn, *key: Any) -> Any:
            self._count += 1
            return get(txn, *key)

        def counted_steps(txn: ReadTxn, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for step in steps(txn, *args, **kwargs):
                self._count += len(step[0])
                yield step

        monkeypatch.setattr(ReadTxn, "_rows", counted_rows)
        monkeypatch.setattr(ReadTxn, "get", counted_get)
        monkeypatch.setattr(ReadTxn, "steps", counted_steps)

    def take(self) -> int:
        """Return the count and reset it."""
        count, self._count = self._count, 0
        return count
