"""The writer's inbox: a queue bounded in operations, from which all batches are taken at once, in the order of `put`.

Nothing is lost: every queued batch is taken, or returned by `refuse`; after that every `put` raises the refusal.

A signal handler may raise anywhere in `put`. It can leave behind a batch that is queued although its caller got an
exception, or a taker that wakes for nothing, but no more: `lock` is taken and released only in C, and the order of the
lines under it matters. A handler may also call `put` or `refuse` itself: `lock` knows its owner, so that a call that
would wait for its own thread is refused.

Threads: `put` from any thread, `take` from the writer alone. `lock` guards the fields. Raises `Overloaded`,
`InvalidInput` for such a call of a signal handler, and the refusal.
"""

from __future__ import annotations

import threading
import time

from quire.core.errors import InternalError, InvalidInput, Overloaded, QuireError
from quire.core.waiting import Ring, Waiters
from quire.manifest.guard import ManifestGuard


class BatchQueue:
    """Batches that wait for the writer."""

    def __init__(self, operations_max: int, taker: threading.Thread | None = None) -> None:
        self.lock = threading.RLock()
        self.taker = taker
        """The thread that takes; it must not put, or it would wait for itself."""
        self.refusal: QuireError | None = None
        self._operations_max = operations_max
        self._batches: list[ManifestGuard] = []
        self._operations = 0
        self._waiting_for_room = Waiters()
        self._wake = Ring()
        self._wake_at = 0
        """Number of batches that the sleeping taker waits for; 0 if it is awake."""

    def put(self, guard: ManifestGuard, operations: int, timeout: float | None) -> None:
        """Append a batch; blocks while the queue is full, and raises `Overloaded` after `timeout`."""
        deadline: float | None = None
        self.refuse_nested()
        while True:
            with self.lock:
                # Room for one operation admits any batch: one larger than the bound would never enter otherwise.
                if self.refusal is None and self._operations < self._operations_max:
                    if self._wake_at and len(self._batches) + 1 >= self._wake_at:
                        self._wake_at = 0
                        self._wake.wake()  # before the append: the taker waits for `lock`, then finds the batch
                    # The batch before its count: a count without a batch, left by a signal handler's exception, could
                    # make the queue look full while the taker finds nothing to take, and no thread would wake the
                    # other. `take` resets the count.
                    self._batches.append(guard)
                    self._operations += operations
                    return
            deadline = self._wait_for_room(timeout, deadline)

    def refuse_nested(self) -> None:
        """Refuse a call of a signal handler that interrupted this thread under the lock: the writer, for which the handler
        would wait, needs the lock."""
        if self.lock._is_owned():  # type: ignore[attr-defined]  # `threading.Condition` relies on it, too
            raise InvalidInput(
                "this signal handler interrupted its thread while that queued a commit, which must end first",
                hint="let the handler set a flag or raise, and commit or close the store after it",
            )

    def _wait_for_room(self, timeout: float | None, deadline: float | None) -> float | None:
        """Wait until there may be room; return the caller's deadline, for another wait if another thread took the room."""
        if threading.current_thread() is self.taker:
            raise InternalError("the writer thread may not submit")
        if deadline is None and timeout is not None:
            deadline = time.monotonic() + timeout
        rest = None if deadline is None else deadline - time.monotonic()
        is_there_room = self._waiting_for_room.sleep_until(self._may_enter, rest)
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)  # one instance for many callers: it must not collect their frames
        if not is_there_room:
            raise Overloaded(
                "the manifest's queue stayed full",
                hint="submit more slowly, or raise manifest.queue_ops_max",
                seconds=timeout,
            )
        return deadline

    def _may_enter(self) -> bool:
        return self.refusal is not None or self._operations < self._operations_max

    def take(self, answered: int, patience_seconds: float) -> list[ManifestGuard] | None:
        """Return everything that is queued; wait if there is nothing. `None` when refusing and drained.

        Callers that were just answered are likely to submit again at once, so `take` waits until as many batches are
        queued as callers were answered, or for `patience_seconds`. Otherwise the first to return would be committed
        alone and the other thirty-one would wait for the next sync. With one caller, or none waiting, it does not wait.
        """
        if answered > 1:
            self._sleep(answered, patience_seconds)
        while True:
            with self.lock:
                if self._batches:
                    taken, self._batches = self._batches, []
                    self._operations = 0
                    return taken
                if self.refusal is not None:
                    return None
            self._sleep(1, None)

    def admit(self) -> None:
        """Admit the threads that wait for room.

        The writer calls this when it is about to sync: they fill the queue while the disk works, and do not compete for
        the GIL while the writer does.
        """
        if self._waiting_for_room:
            self._waiting_for_room.wake()

    def _sleep(self, until: int, timeout: float | None) -> None:
        """Sleep until `until` batches are queued, a refusal, or the timeout."""
        with self.lock:
            if len(self._batches) >= until or self.refusal is not None:
                return
            self._wake_at = until
        self.admit()  # threads that still wait for room (a group failed before its sync) must not wait for this one
        if not self._wake.sleep(timeout):
            with self.lock:
                if self._wake_at:
                    self._wake_at = 0
                    return
            self._wake.sleep()  # a thread rang after the timeout: consume the ring, or it would end the next sleep

    def refuse(self, refusal: QuireError, *, drain: bool) -> list[ManifestGuard]:
        """Accept nothing more. With `drain`, also return what is queued instead of leaving it to `take`."""
        self.refuse_nested()
        with self.lock:
            # Closing keeps an earlier reason. A drain replaces it: that the store is fenced or in doubt matters more.
            self.refusal = self.refusal if self.refusal is not None and not drain else refusal
            left: list[ManifestGuard] = []
            if drain:
                left, self._batches = self._batches, []
                self._operations = 0
            if self._wake_at:
                self._wake_at = 0
                self._wake.wake()
        self._waiting_for_room.wake()
        return left
