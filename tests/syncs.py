"""Syncs of a database's log that a test holds back."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from quire.pages.wal import Wal


class HeldSyncs:
    """Within its block every wait for the disk begins and does not end. Waits of quire's own threads are not held back."""

    def __init__(self, wal: Wal) -> None:
        self._wal = wal
        self._wait_durable = wal.wait_durable
        self._begun = threading.Semaphore(0)
        self._released = threading.Event()

    def _hold(self, lsn: int) -> None:
        if not threading.current_thread().name.startswith("quire-"):
            self._begun.release()
            self._released.wait(60)
        self._wait_durable(lsn)

    def wait_for_one(self) -> None:
        """Return when one more thread waits for the disk."""
        assert self._begun.acquire(timeout=60)

    def __enter__(self) -> Self:
        self._wal.wait_durable = self._hold
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wal.wait_durable = self._wait_durable
        self._released.set()
