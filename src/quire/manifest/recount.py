"""The recount: the part of the check that an open postpones, done rule by rule in short rounds, alongside other work (N3).

An open after a clean close checks only the rows of the store itself; one after a crash also what the change log names
since the checked point. The rest is recounted in rounds of upkeep, each at most `ROUND_SECONDS` long, or at once by a
caller that is about to delete: nothing of any database is deleted before the recount since the open has completed.
Anything it finds broken is closed, as at an open; a broken rule about the whole store stops the writer, and the next
open refuses.

Threads: any; one thread recounts at a time. `finish` and `round` raise `ManifestDamaged` if the recount finds the store
broken."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from quire.core.clock import Clock
from quire.core.events import emit
from quire.manifest.check import Problem, check
from quire.manifest.checked_point import forget_point, point_of, write_point
from quire.manifest.env import ManifestEnv
from quire.manifest.reads import ReadTxn

ROUND_SECONDS = 0.25
"""How long one round of upkeep recounts, in seconds; a check that has begun is finished."""


class Recount:
    """The checks that are left. `close_broken` is called once a problem is found, and checks everything again."""

    def __init__(
        self, env: ManifestEnv, clock: Clock, checks: Iterable[str], *, close_broken: Callable[[], None]
    ) -> None:
        self._env = env
        self._clock = clock
        self._close_broken = close_broken
        # guarded by _lock
        self._lock = threading.Lock()
        self._left: deque[str] = deque(checks)

    @property
    def is_done(self) -> bool:
        """Whether every rule has been checked since the open."""
        return not self._left

    def round(self) -> None:
        """Recount for at most `ROUND_SECONDS`."""
        if self._left:
            self._run(self._clock.monotonic() + ROUND_SECONDS)

    def finish(self) -> None:
        """Recount everything that is left, now: for a caller that is about to delete."""
        if self._left:
            self._run(None)

    def _run(self, until: float | None) -> None:
        with self._lock:
            while self._left:
                problems = self._run_check(self._left[0])
                if problems:
                    emit("error", "manifest.recount_failed", problems=len(problems), first=str(problems[0]))
                    # First: if the process dies during the check below, the next open must not believe the point.
                    forget_point(self._env)
                    self._close_broken()  # checks everything; raises if the whole store is broken
                    self._left.clear()  # not before: `finish` checks without the lock, and its caller deletes
                    return
                # Only when it has passed: a check that raised is left, and `finish` does not let its caller delete.
                self._left.popleft()
                if not self._left:
                    write_point(self._env, point_of(self._env))
                elif until is not None and self._clock.monotonic() >= until:
                    return

    def _run_check(self, name: str) -> list[Problem]:
        """Run one check in a transaction of its own: transactions must be short (M4)."""
        with ReadTxn(self._env) as txn:
            return [problem for problem in check(txn, checks=(name,)) if not (problem.leak or problem.contained)]
