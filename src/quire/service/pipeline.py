"""Queues batches of operations for an owner, with guards like those of the local manifest.

Terms
  guard   what `submit` returns: resolves when the batch is durable at the owner
  call    sends the batches that were submitted during the previous call

Rules
  1. Batches are sent and applied in the order of `submit`; one call is in progress at a time, so the order survives retries.
  2. Every batch has an idempotency key: a call whose response was lost is sent again, and batches already applied are not
     applied again.
  3. The queue is bounded in operations: `submit` blocks while it is full, and raises `Overloaded` after its timeout.
  4. A call that fails as a whole fails the guards of its batches; later calls are tried independently.

Threads: `submit` from any; one thread sends, started with the first batch. Guards wait in any thread.
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
from quire.core.tracing import current_traceparent
from quire.core.waiting import in_thread
from quire.manifest.guard import Receipt
from quire.manifest.ops.base import Op
from quire.service import messages as m
from quire.service.channel import Channel
from quire.service.client_forks import reset_after_fork
from quire.service.wire import error_of

QUEUED_OPS_MAX = 16_384
CALL_BYTES_MAX = 4 << 20
CALL_BATCHES_MAX = 2_048

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
        """Wait until the batch is durable and return its receipt. Raises the batch's error, the channel's, or `TimedOut`."""
        if not self._done.wait(timeout):
            raise TimedOut("timed out waiting for a manifest commit", hint="it may still be committed", seconds=timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        assert self._receipt is not None, "a guard that is done has one or the other"
        return self._receipt

    def is_done(self) -> bool:
        """Whether the batch is durable or has failed."""
        return self._done.is_set()

    def settle(self, receipt: Receipt | None, error: QuireError | None) -> None:
        """Resolve the guard. Called by the pipeline."""
        self._receipt, self._error = receipt, error
        self._done.set()

    def __await__(self) -> Generator[Any, None, Receipt]:
        return in_thread(self.result)


class _QueuedBatch(msgspec.Struct):
    batch: m.Batch
    ops: int
    size: int
    guard: RemoteGuard


class Pipeline:
    """The queue of batches. See the rules above."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        reset_after_fork(self, Pipeline._reset)

    def _reset(self) -> None:
        """Start with an empty queue: see `client_forks.py`."""
        # guarded by _changed
        self._changed = threading.Condition()
        self._queue: deque[_QueuedBatch] = deque()
        self._ops = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(
        self, ops: Iterable[Op], *, key: bytes | None = None, result: bytes = b"", timeout: float | None = None
    ) -> RemoteGuard:
        """Queue a batch (rule 3). With a `key` the caller may repeat it, too; without one the batch gets a random key."""
        batch: Any = tuple(ops)
        if not 0 < len(batch) <= BATCH_OPS_MAX:
            raise InvalidInput("a batch must have 1 to 65,536 operations", operations=len(batch))
        if key is not None and len(key) != IDEMPOTENCY_KEY_BYTES:
            raise InvalidInput("an idempotency key must be 16 bytes", bytes=len(key))
        try:
            packed = msgspec.msgpack.encode(batch)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"the batch cannot be sent: {error}") from error
        message = m.Batch(key or os.urandom(16), msgspec.Raw(packed), result, current_traceparent())
        queued = _QueuedBatch(message, len(batch), len(packed) + len(result), RemoteGuard())
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._closed or not self._queue or self._has_room(len(batch)), timeout
            ):
                raise Overloaded(
                    "too many calls to the owner are queued",
                    hint="wait for earlier calls with `guard.result()`",
                    operations=self._ops,
                )
            if self._closed:
                raise StoreClosed("the client is closed", hint="connect again")
            self._queue.append(queued)
            self._ops += len(batch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-client-pipeline", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return queued.guard

    def _has_room(self, ops: int) -> bool:
        return self._ops + ops <= QUEUED_OPS_MAX

    def close(self) -> None:
        """Send the queued batches and stop the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    # ── the sending thread ────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        while batches := self._take():
            try:
                self._send(batches)
            except QuireError as error:
                self._fail(batches, error)
            except Exception as error:  # whatever the error is, every waiting guard must get one
                self._fail(batches, InternalError(f"a bug in quire: {type(error).__name__}: {error}"))

    def _take(self) -> list[_QueuedBatch]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            batches, size = list[_QueuedBatch](), 0
            while self._queue and len(batches) < CALL_BATCHES_MAX:
                size += self._queue[0].size
                if batches and size > CALL_BYTES_MAX:
                    break
                batches.append(self._queue.popleft())
                self._ops -= batches[-1].ops
            self._changed.notify_all()
            return batches

    def _send(self, batches: list[_QueuedBatch]) -> None:
        request = m.Submit(tuple([queued.batch for queued in batches]))
        outcomes: list[m.BatchOutcome] = self._channel.call("submit", request, attempt_seconds=ATTEMPT_SECONDS)
        for queued, outcome in zip(batches, outcomes, strict=True):
            queued.guard.settle(outcome.receipt, error_of(outcome.error) if outcome.error is not None else None)

    def _fail(self, batches: list[_QueuedBatch], error: QuireError) -> None:
        for queued in batches:
            if not queued.guard.is_done():
                queued.guard.settle(None, error)
