"""Counts the requests of a store to its object stores, by what providers charge for them. Threads: any."""

from __future__ import annotations

from quire.core.hourly import HourlyTotals


class RequestCount(HourlyTotals):
    """Requests that change or list objects, and requests that read them; deletions are free. A call counts as one request:
    attempts that are repeated, and the parts of a large upload, are not known here."""

    def count_write(self) -> None:
        """Count a put, or a page of a listing."""
        self._add(1, 0)

    def count_read(self) -> None:
        """Count a read of an object, or of its size."""
        self._add(0, 1)

    @property
    def writes(self) -> int:
        """Puts and pages of listings."""
        return self._first

    @property
    def reads(self) -> int:
        """Reads of objects and of their sizes."""
        return self._second
