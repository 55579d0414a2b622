"""Writers that wait: too many memtables wait for their flush, or too many tables of level 0 for a compaction.

Rules
  1. A writer waits without the write lock: whoever flushes, reads or takes a snapshot does not wait behind it.
  2. It waits at most `stall_seconds`, and not for a background that has stopped, failed, or cannot get on.

Threads: any. Raises `Overloaded`, `StoreClosed`, and what stopped the background.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.core.errors import Overloaded, StoreClosed

if TYPE_CHECKING:
    import threading

    from quire.lsm.kv import Kv


class Stalls:
    """The writers of one database that wait for room, and how long they ever did."""

    def __init__(self, kv: Kv) -> None:
        self._kv = kv
        # guarded by the condition that is given to `wait`
        self.waiting = 0
        """Writers that wait, now."""
        self.count = 0
        self.seconds = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a writer that needs a new memtable has to wait."""
        return self._kv.upkeep.is_running and self._is_full()

    def _is_full(self) -> bool:
        view, settings = self._kv.view, self._kv.settings
        return len(view.frozen) >= settings.frozen_max or len(view.levels.level0) >= settings.level0_stop

    def wait(self, changed: threading.Condition) -> None:
        """Return when there is room; `changed` is notified with every change of the view."""
        kv = self._kv
        began = kv.clock.monotonic()
        deadline = began + kv.settings.stall_seconds
        with changed:
            if not self.is_due:
                return
            self.waiting += 1
            self.count += 1
            try:
                while self._is_full():
                    left = deadline - kv.clock.monotonic()
                    self._require_progress(left)
                    changed.wait(min(left, 1.0))
            finally:
                self.waiting -= 1
                self.seconds += kv.clock.monotonic() - began

    def _require_progress(self, seconds_left: float) -> None:
        kv = self._kv
        kv.require()
        kv.upkeep.raise_trouble()
        if not kv.upkeep.is_running:
            raise StoreClosed("the database is being closed", hint="open it again")
        if seconds_left <= 0:
            raise Overloaded(
                "flushes and compactions do not keep up with the writers",
                hint="write less at a time, or look at the disk",
                frozen=len(kv.view.frozen),
                level0=len(kv.view.levels.level0),
            )
