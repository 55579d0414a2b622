"""The part of the check that an open has left for later: one rule after the other, a little at a time, beside the work (N3).

An open after a clean close looks at the rows of the store itself only; one after a crash at everything but the older part of
the change log. The rest is recounted from upkeep's rounds, each for at
most `ROUND_SECONDS`, or at once by whoever is about to delete something: nothing of any database is deleted before the recount
since the open is done. What it finds broken closes what it is about, as at an open; a rule that is about the whole store stops
the writer, and the next open refuses.

Threads: any; one at a time recounts. Raises `ManifestDamaged` to whoever waits for a recount that finds the store broken."""

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
"""How long one round of upkeep recounts; a look that has begun is finished."""


class Recount:
    """What is left to check. `close_broken` is called once something is broken, with everything to be looked at again."""

    def __init__(
        self, env: ManifestEnv, clock: Clock, looks: Iterable[str], *, close_broken: Callable[[], None]
    ) -> None:
        self._env = env
        self._clock = clock
        self._close_broken = close_broken
        # guarded by _lock
        self._lock = threading.Lock()
        self._left: deque[str] = deque(looks)

    @property
    def is_done(self) -> bool:
        """Whether every rule has been looked at since the open."""
        return not self._left

    def round(self) -> None:
        """Recount for a moment."""
        if self._left:
            self._run(self._clock.monotonic() + ROUND_SECONDS)

    def finish(self) -> None:
        """Recount what is left, now: for whoever is about to delete."""
        if self._left:
            self._run(None)

    def _run(self, until: float | None) -> None:
        with self._lock:
            while self._left:
                problems = self._look(self._left[0])
                if problems:
                    emit("error", "manifest.recount_failed", problems=len(problems), first=str(problems[0]))
                    forget_point(self._env)
                    self._left.clear()  # `close_broken` looks at everything
                    self._close_broken()
                    return
                self._left.popleft()
                if not self._left:
                    write_point(self._env, point_of(self._env))
                elif until is not None and self._clock.monotonic() >= until:
                    return

    def _look(self, name: str) -> list[Problem]:
        """One rule in a transaction of its own: a transaction is for a moment (M4)."""
        with ReadTxn(self._env) as txn:
            return [problem for problem in check(txn, looks=(name,)) if not (problem.leak or problem.contained)]
