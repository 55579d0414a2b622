"""Batches of operations on their way to an owner, with guards as the local manifest gives them.

Terms
  guard      what a caller holds while its batch is on the way
  carriage   the batches that travel in one call: those that were submitted while the former call was under way

Rules
  1. Batches are sent and applied in the order of `submit`; one call is under way at a time, so it holds over retries too.
  2. Every batch has an idempotency key: a carriage whose answer was lost is sent again, and what was applied stays as it is.
  3. The line is bounded in operations: `submit` blocks while it is full, and raises `Overloaded` after its timeout.
  4. A call that fails as a whole fails the guards of its carriage; the next ones are tried on their own.

Threads: `submit` from any; one thread sends, from the first batch on. Guards wait in any thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable
from typing import Any

import msgspec

from quire.core.errors import InternalError, InvalidInput, Overloaded, QuireError, StoreClosed, TimedOut
from quire.core.limits import BATCH_OPS_MAX, IDEMPOTENCY_KEY_BYTES
from quire.core.tracing import carried
from quire.core.waiting import in_thread
from quire.manifest.guard import Receipt
from quire.manifest.ops.base import Op
from quire.service import messages as m
from quire.service.channel import Channel
from quire.service.wire import error_of

LINE_OPS_MAX = 16_384
CARRIAGE_BYTES_MAX = 4 << 20
CARRIAGE_BATCHES_MAX = 2_048

ATTEMPT_SECONDS = 15.0
"""Longer than a batch may wait for a place in the owner's queue."""


class RemoteGuard:
    """A submitted batch. `guard.result()` blocks until it is durable at the owner, or has failed."""

    __slots__ = ("_done", "_error", "_receipt")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._receipt: Receipt | None = None
        self._error: QuireError | None = None

    def result(self, timeout: float | None = None) -> Receipt:
        """The receipt, once durable. Raises the batch's own error, what the channel raised, or `TimedOut`."""
        if not self._done.wait(timeout):
            raise TimedOut("timed out waiting for a manifest commit", hint="it may still happen", seconds=timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._receipt is not None, "a guard that is done has one or the other"
        return self._receipt

    def is_done(self) -> bool:
        """Whether the batch is durable or has failed."""
        return self._done.is_set()

    def settle(self, receipt: Receipt | None, error: QuireError | None) -> None:
        """For the pipeline."""
        self._receipt, self._error = receipt, error
        self._done.set()

    def __await__(self) -> Generator[Any, None, Receipt]:
        return in_thread(self.result)


class _Waiting(msgspec.Struct):
    batch: m.Batch
    ops: int
    size: int
    guard: RemoteGuard


class Pipeline:
    """See the rules above."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # guarded by _changed
        self._changed = threading.Condition()
        self._line: deque[_Waiting] = deque()
        self._ops = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self, ops: Iterable[Op], *, key: bytes | None = None, result: bytes = b"", timeout: float | None = None
    ) -> RemoteGuard:
        """Queue a batch (rule 3). `key` makes it safe to repeat by the caller, too; without one it gets one of its own."""
        batch: Any = tuple(ops)
        if not 0 < len(batch) <= BATCH_OPS_MAX:
            raise InvalidInput("a batch has at least one and at most 65,536 operations", operations=len(batch))
        if key is not None and len(key) != IDEMPOTENCY_KEY_BYTES:
            raise InvalidInput("an idempotency key has 16 bytes", bytes=len(key))
        try:
            packed = msgspec.msgpack.encode(batch)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"the batch cannot be sent: {error}") from error
        message = m.Batch(key or os.urandom(16), msgspec.Raw(packed), result, carried())
        waiting = _Waiting(message, len(batch), len(packed) + len(result), RemoteGuard())
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._closed or not self._line or self._has_room(len(batch)), timeout
            ):
                raise Overloaded("the line to the owner is full", hint="wait for guards", operations=self._ops)
            if self._closed:
                raise StoreClosed("the client is closed", hint="connect again")
            self._line.append(waiting)
            self._ops += len(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-client-pipeline", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return waiting.guard

    def _has_room(self, ops: int) -> bool:
        return self._ops + ops <= LINE_OPS_MAX

    def close(self) -> None:
        """Send what is queued, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    # ── the sending thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        while carriage := self._take():
            try:
                self._send(carriage)
            except QuireError as error:
                self._fail(carriage, error)
            except Exception as error:  # whatever it is, those who wait must hear of it
                self._fail(carriage, InternalError(f"a bug in quire: {type(error).__name__}: {error}"))

    def _take(self) -> list[_Waiting]:
        with self._changed:
            self._changed.wait_for(lambda: self._line or self._closed)
            carriage, size = list[_Waiting](), 0
            while self._line and len(carriage) < CARRIAGE_BATCHES_MAX:
                size += self._line[0].size
                if carriage and size > CARRIAGE_BYTES_MAX:
                    break
                carriage.append(self._line.popleft())
                self._ops -= carriage[-1].ops
            self._changed.notify_all()
            return carriage

    def _send(self, carriage: list[_Waiting]) -> None:
        request = m.Submit(tuple([waiting.batch for waiting in carriage]))
        outcomes: list[m.BatchOutcome] = self._channel.call("submit", request, attempt_seconds=ATTEMPT_SECONDS)
        for waiting, outcome in zip(carriage, outcomes, strict=True):
            waiting.guard.settle(outcome.receipt, error_of(outcome.error) if outcome.error is not None else None)

    def _fail(self, carriage: list[_Waiting], error: QuireError) -> None:
        for waiting in carriage:
            if not waiting.guard.is_done():
                waiting.guard.settle(None, error)
