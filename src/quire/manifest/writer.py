"""The writer thread: takes batches from a bounded queue, applies them in order, and commits them in groups (M3).

Terms
  batch    the operations of one `submit`: applied whole or not at all
  group    the batches of one LMDB transaction, one sync
  doubt    the state after a failed sync: what is on disk is unknown

The path of a group: `_take` cuts it from the queue, `_commit` handles failures, `_transact` is the transaction:
`Applier.apply` makes rows and change records, `_flush` writes both, `txn.commit()` makes them durable, and `_resolve`
answers the waiters after that, never before. Rows, change record, generations and idempotency answer of a batch are in
one transaction.

What is on disk at each step of a group, and what recovery does:
  begin … flush     the previous transaction (LMDB is copy-on-write): the group never happened
  commit            the previous transaction or the group's, whole: LMDB's meta page decides
  durable           the group's; its guards may not be resolved yet, so a caller that repeats needs an idempotency key

Threads: `submit`, `when_generation`, `when_change`, `fence` from any thread; everything below "the writer thread" runs
on that thread. The queue has its own lock; everything else is constant after construction or owned by the writer
thread.
"""

from __future__ import annotations

import errno
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import lmdb

from quire.core.clock import Clock
from quire.core.errors import (
    DiskFull,
    InvalidInput,
    QuireError,
    StorageFault,
    StoreClosed,
    StoreFenced,
    StoreUnusable,
    TimedOut,
    Unavailable,
    poisoned_by,
)
from quire.core.events import emit_safely, listening
from quire.core.limits import BATCH_OPS_MAX, IDEMPOTENCY_KEY_BYTES
from quire.core.tracing import TRACE_API, span, trace_id
from quire.durable.failpoints import hit
from quire.manifest import tables as t
from quire.manifest.apply import Applied, Applier, as_input_error
from quire.manifest.change import CHANGE_LOG
from quire.manifest.env import ManifestEnv, translate
from quire.manifest.guard import CommitNotifier, GenerationWait, ManifestGuard, current
from quire.manifest.metrics import WriterStats
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.cursors import sequence_bounds
from quire.manifest.overlay import KeysTaken, Overlay, TableRows
from quire.manifest.queue import BatchQueue
from quire.manifest.reads import ReadTxn
from quire.manifest.records import GenerationRecord

LOOK_SECONDS = 1.0
"""Interval at which the writer looks for read transactions that have been open for too long, in seconds."""

EARLY_GROWTH_WAIT_SECONDS = 0.05
"""How long growing at the watermark waits for read transactions to end, in seconds; no other can begin meanwhile."""

EARLY_GROWTH_PAUSE_SECONDS = 5.0
"""How long growing at the watermark is postponed if they did not end, in seconds."""

_BLOCK_BYTES = 512
"""The unit of `ru_oublock`, in bytes."""


class CommitLog(Protocol):
    """Receives the rows of every commit, in order (quire.archive)."""

    def reserve(self) -> Any:
        """Reserve the next place, before the commit."""

    def fill(self, slot: Any, written: list[TableRows]) -> None:
        """Fill the place with the rows of the commit, once it is durable."""


class ManifestWriter:
    """Owns the write transaction. Start it with `start`, end it with `close`."""

    def __init__(self, env: ManifestEnv, clock: Clock) -> None:
        # constant after construction
        self.notifier = CommitNotifier()
        self.stats = WriterStats()
        self._env = env
        self._clock = clock
        self._settings = env.settings
        self.owner_check: Callable[[], None] | None = None
        """Raises if this process has lost the store; set once, by the holder of its lock."""
        self.archive: CommitLog | None = None
        """Receives the rows of every commit; set once, before the first commit."""
        self._queue = BatchQueue(env.settings.queue_ops_max)
        # owned by the writer thread; `generations`, `head` and `oldest` are replaced whole, so any thread may read them
        self._overlay = Overlay(env.handles)
        self._overlay.require_not_refused = env.require_not_refused if env.refused else None
        self._applier = Applier(self._overlay, int(env.settings.idempotency_seconds * 1000))
        self._carry: list[ManifestGuard] = []
        self._answered = 0
        self._next_look = 0.0
        self._next_growth = 0.0
        self._is_growth_overdue = False
        self._last_ms = 0
        self._has_new_refusals = False
        """Whether databases or counters were closed since the last group; set by `watch_refused`."""
        self._earliest_ms = 0
        """No commit has an earlier time; set by `commit_not_before`, read by the writer thread."""
        self.generations: dict[int, int] = {}
        self.head = 0
        self.oldest = 1
        self._thread = threading.Thread(target=self._run, name="quire-manifest-writer", daemon=True)
        self.notifier.thread = self._queue.taker = self._thread
        env.fork_hooks.append(self._forked)

    def start(self, reached: Mapping[int, int] | None = None) -> None:
        """Load the marks and start the thread; `reached` are generations that the change log has assigned already."""
        with ReadTxn(self._env) as txn:
            self.oldest, self.head = txn.feed_bounds()
            for (component,), row in txn.scan(t.GENERATION_WATERMARKS):
                self.generations[component] = row.generation
                # Times in the change log must not fall after the clock was set back: retention bisects them.
                self._last_ms = max(self._last_ms, row.updated_at_ms)
        # If a watermark is behind the log (G1), continue from the log: a generation is never assigned twice.
        for component, generation in (reached or {}).items():
            self.generations[component] = max(self.generations.get(component, 0), generation)
        self._thread.start()

    # ── any thread ────────────────────────────────────────────────────────────────────────────────────────────────────
    def submit(
        self, ops: Iterable[Op], *, key: bytes | None = None, result: bytes = b"", timeout: float | None = None
    ) -> ManifestGuard:
        """Queue a batch. Blocks while the queue is full; raises `Overloaded` if that takes longer than `timeout`.

        With a `key` the batch is applied once, however often it is submitted (M11); `result` is the answer that is
        stored with the key and returned to repeated submissions.
        """
        batch = ops if type(ops) is tuple else tuple(ops)
        call = current.call if key is None else None
        if call is not None and (effect := call.effect_in(batch)) is not None:
            key, result = call.key, call.answer(effect)
        guard = ManifestGuard(batch, key, self.notifier)
        count = len(guard.ops)
        if not 0 < count <= BATCH_OPS_MAX:
            raise InvalidInput("a batch must have 1 to 65,536 operations", operations=count)
        if key is not None and len(key) != IDEMPOTENCY_KEY_BYTES:
            raise InvalidInput("an idempotency key must be 16 bytes", bytes=len(key))
        if result:
            guard.result_bytes = result
        if TRACE_API in sys.modules:
            guard.trace_id = trace_id()
        self._queue.put(guard, count, timeout)
        if call is not None and key is not None:
            call.guard = guard
        return guard

    def when_generation(self, component: Component, target: int) -> GenerationWait:
        """Return a wait that resolves once `component` has reached generation `target`."""

        def reached() -> int | None:
            now = self.generations.get(component, 0)
            return now if now >= target else None

        return GenerationWait(self.notifier, reached, f"generation {target} of {component.name}")

    def when_change(self, after: int) -> GenerationWait:
        """Return a wait that resolves to the head of the feed once it is above `after`."""
        return GenerationWait(self.notifier, lambda: self.head if self.head > after else None, "a change")

    def record_rows(self) -> None:
        """Start to record what each transaction writes, for the archive."""
        self._overlay.written = []

    def commit_not_before(self, at_ms: int) -> None:
        """Give no later commit an earlier time than this, even if the clock is set back.

        For the archive's last moment: an object that is retired after a moment is needed by that moment. And for stored
        leases: what reaches zero after a lease was opened is kept for its reader.
        """
        self._earliest_ms = max(self._earliest_ms, at_ms)

    @property
    def failure(self) -> QuireError | None:
        """Why no more batches are accepted; `None` while they are."""
        return self._queue.refusal

    def check_owner(self) -> None:
        """Raise `StoreFenced` if the store has another owner."""
        if isinstance(self._queue.refusal, StoreFenced):
            raise self._queue.refusal.with_traceback(None)
        if self.owner_check is not None:
            self.owner_check()

    def fence(self, error: StoreFenced) -> None:
        """Commit nothing more, not even queued batches: the store has another owner."""
        if isinstance(self._queue.refusal, StoreFenced):
            return  # the first reason stays
        # The group in progress is not drained: it meets the refusal in `check_owner`, inside its transaction.
        queued = self._queue.refuse(error, drain=True)
        self.notifier.failure = error
        self._fail(queued, error)
        emit_safely("error", "manifest.fenced", error=error.what)  # callers get the whole error

    def close(self) -> None:
        """Refuse new batches, commit the queued ones, end the thread."""
        self._queue.refuse(StoreClosed("the manifest is closed", hint="open the store again"), drain=False)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self._end_waits()  # if the thread never ran

    def refuse_nested(self) -> None:
        """Raise `InvalidInput` in a signal handler that interrupted its thread while that queued a batch."""
        self._queue.refuse_nested()

    def watch_refused(self) -> None:
        """Refuse operations on databases and counters that were closed since the writer started, from the next group on."""
        self._has_new_refusals = True

    def stop_for(self, error: QuireError) -> None:
        """Commit the queued batches and nothing more, because of a broken rule; the manifest can still be read."""
        what = f"the manifest accepts no more changes: {error}"
        self._queue.refuse(poisoned_by(error, what, hint="close the store and run `quire manifest check`"), drain=False)

    def _forked(self) -> None:
        """Reset in the child of a fork(), which has no writer thread and may have inherited a lock that the thread held."""
        refusal = StoreClosed("the manifest was opened by the parent of a fork()", hint="open the store again")
        self._queue = BatchQueue(self._settings.queue_ops_max)
        self._queue.refuse(refusal, drain=True)
        self._carry = []
        self.notifier.abandon(refusal)

    # ── the writer thread ─────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        group: list[ManifestGuard] | None = None
        try:
            while (group := self._take()) is not None:
                self._commit(group)
            self._end_waits()
        except BaseException as error:  # all waiters must be woken, including those of the current group
            self._stop_with_error(error, group)

    def _end_waits(self) -> None:
        """End the waits for a change: there will be none. After the last commit, because its waiters must get receipts."""
        self.notifier.failure = self.notifier.failure or self._queue.refusal
        self.notifier.notify()

    def _take(self) -> list[ManifestGuard] | None:
        """Return the next group: the rest of what was taken last, or else from the queue; `None` when closed and drained."""
        taken = self._carry or self._queue.take(self._answered, self._settings.group_wait_seconds)
        if taken is None:
            return None
        self._carry = taken  # until the group is cut: if this raises, `_stop_with_error` finds every guard
        budget, count = self._settings.group_ops_max, len(taken)
        if count > 1 and sum([len(guard.ops) for guard in taken[: budget + 1]]) > budget:
            for index, guard in enumerate(taken):
                budget -= len(guard.ops)
                # `index`: a first batch above the budget is a group of its own, because batches are not divided.
                if budget < 0 and index:
                    count = index
                    break
        group, self._carry = taken[:count], taken[count:]
        return group

    def _commit(self, group: list[ManifestGuard]) -> None:
        started = self._clock.monotonic()
        # Read before the transaction begins: if it fails and the id is still the same, nothing was committed.
        committed, before = self._env.last_txn_id(), self.generations
        try:
            with span("Manifest.commit", batches=len(group)) if TRACE_API in sys.modules else nullcontext():
                applied, rows, pages = self._transact_until_it_fits(group, started)
        except (QuireError, lmdb.Error, OSError) as error:
            self._overlay.discard()
            self._handle_failed_commit(group, error, committed)
            return
        except Exception as error:
            # Not an LMDB error, e.g. a row that cannot be encoded. Redo one batch per transaction (M3): only the
            # culprit fails.
            self._overlay.discard()
            if len(group) == 1:
                self._fail(group, as_input_error(error))
            else:
                for index, guard in enumerate(group):
                    if isinstance(self._queue.refusal, StoreUnusable):  # in doubt, nothing more is written
                        self._fail(group[index:], self._queue.refusal)
                        return
                    # The outcome of a batch in the abandoned pass may depend on the culprit: apply each again.
                    guard.error, guard.repeated = None, False
                    self._commit([guard])
            return
        self._overlay.settle()
        raised = {number: reached for number, reached in self.generations.items() if reached != before.get(number)}
        self._report(group, applied.operations, rows, pages, started, raised)

    def _transact_until_it_fits(self, group: list[ManifestGuard], started: float) -> tuple[Applied, int, int]:
        """Run the transaction, again if the map was full or a key that was assumed to be new exists: ops are pure."""
        strict = False
        while True:
            # Between transactions: LMDB cannot replace the map under an open one.
            if self._env.is_nearly_full():
                self._grow_early(started)
            try:
                return self._transact(group, started)
            except KeysTaken:
                strict = True
            except lmdb.MapFullError:
                self._env.grow()
            self._overlay.discard()
            self._overlay.switch(strict=strict)
            for guard in group:
                guard.error, guard.repeated = None, False

    def _grow_early(self, now: float) -> None:
        """Grow the map at its watermark, where the group still fits.

        An open read transaction postpones this and must not fail the group: only a full map waits for readers at length.
        """
        if now < self._next_growth:
            return
        try:
            self._env.grow(EARLY_GROWTH_WAIT_SECONDS)
            self._is_growth_overdue = False
        except TimedOut as error:
            self._next_growth = now + EARLY_GROWTH_PAUSE_SECONDS
            if not self._is_growth_overdue:
                self._is_growth_overdue = True
                emit_safely("warning", "manifest.map_nearly_full", error=str(error))

    def _transact(self, group: list[ManifestGuard], started: float) -> tuple[Applied, int, int]:
        """Run one transaction, durable on return; return what was applied, and the number of rows and pages written."""
        overlay = self._overlay
        blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_oublock
        deadline = started + self._settings.group_seconds_max
        # Never earlier than the commit before, even if the clock is set back: a lease compares its own time with the
        # one at which an artifact reached zero (decision 014).
        self._last_ms = at_ms = max(self._last_ms, self._earliest_ms, self._clock.now_ms())
        txn = self._env.begin_write()
        try:
            overlay.begin(txn)
            if self._has_new_refusals:
                self._has_new_refusals = False
                overlay.require_not_refused = self._env.require_not_refused
                overlay.active_ids.clear()  # its databases are accepted without a lookup
            overlay.checked_sequence = self._env.checked_sequence
            applied = Applied(self.head, dict(self.generations), at_ms)
            self._applier.apply(group, applied, lambda: self._clock.monotonic() < deadline)
            for component, generation in applied.generations.items():
                if generation != self.generations.get(component):
                    key = t.GENERATION_WATERMARKS.key.pack(component)
                    overlay.generation_watermarks.put(key, GenerationRecord(generation, at_ms))
            hit("manifest.commit.applied")
            rows = self._flush(txn, applied.changes)
            oldest = sequence_bounds(overlay)[0] if overlay.meta.pending else self.oldest
            hit("manifest.commit.flushed")
            self._queue.admit()
            self.check_owner()  # inside the transaction, for whose end the first step of a second owner waits
            self._commit_and_hand_over(txn, applied.changes)
            hit("manifest.commit.durable")
        except BaseException:
            txn.abort()
            raise
        # Durable from here on: only now may other threads see the new marks.
        self.generations, self.head, self.oldest = applied.generations, applied.head, oldest
        if applied.batches < len(group):
            # In front of the rest: batches are committed in the order of `submit`.
            self._carry = group[applied.batches :] + self._carry
            del group[applied.batches :]
        # After the marks: a caller that has its receipt must find its generation and sequence reached.
        self._resolve(group)
        written = (resource.getrusage(resource.RUSAGE_THREAD).ru_oublock - blocks) * _BLOCK_BYTES
        return applied, rows, written // self._env.page_bytes

    def _commit_and_hand_over(self, txn: lmdb.Transaction, changes: list[tuple[bytes, bytes]]) -> None:
        """Commit. The archive gets the rows in a place of its queue that is reserved before any thread can see them."""
        if self.archive is None:
            txn.commit()
            return
        written = self._overlay.written or []
        # `_flush` writes these rows itself, so the overlay has not noted them.
        if changes:
            written.append((CHANGE_LOG.name, changes, []))
        slot = self.archive.reserve()
        try:
            txn.commit()
        except BaseException:
            slot.cancel()  # in doubt the writer stops, and the next owner archives a new base
            raise
        self.archive.fill(slot, written)

    def _flush(self, txn: lmdb.Transaction, changes: list[tuple[bytes, bytes]]) -> int:
        """Write all pending rows into the transaction; return how many.

        py-lmdb releases the GIL for every row. If producers wait for the GIL, each hand-over costs more than the row;
        if they wait for the queue's lock instead, it costs nothing.
        """
        with self._queue.lock:
            try:
                rows = self._overlay.flush() + len(changes)
            except lmdb.BadValsizeError as error:  # a mistake of one batch, which leaves no doubt about the disk
                raise ValueError("a key is empty or too long") from error
            log = self._env.handles[CHANGE_LOG.name]
            if len(changes) == 1:
                appended = txn.put(*changes[0], db=log, append=True)
                assert appended, "sequences only rise"
            elif changes:
                with txn.cursor(db=log) as cursor:
                    cursor.putmulti(changes, append=True)
        return rows

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _resolve(self, group: list[ManifestGuard]) -> None:
        answered = 0
        for guard in group:
            # Released here, because callers keep guards: a pipeline holds a million of them.
            guard.ops = ()
            # Before `waiter` is read: a thread that leaves its wakeup later checks `done` next, and does not sleep.
            guard.done = True
            if (waiter := guard.waiter) is not None:  # read once: the waiting thread may give up at this moment
                answered += 1
                waiter.wake()
        self._answered = answered
        self.notifier.notify()

    def _fail(self, group: list[ManifestGuard], error: QuireError) -> None:
        for guard in group:
            guard.error, guard.repeated = error, False  # outcomes in the abandoned transaction do not count
        self._resolve(group)

    def _handle_failed_commit(
        self, group: list[ManifestGuard], error: QuireError | lmdb.Error | OSError, committed: int
    ) -> None:
        """Handle a failed transaction.

        If it is certain that nothing was committed (a full disk), the group fails and the writer continues; in doubt it
        commits nothing more.
        """
        failure = error if isinstance(error, QuireError) else translate(error, self._env.path)
        if isinstance(error, lmdb.Error) and type(failure) is StorageFault and self._env.cannot_grow_file():
            failure = translate(OSError(errno.ENOSPC, str(error)), self._env.path)
        # Both conditions: the error alone does not show whether LMDB had already written the meta page.
        if isinstance(failure, (DiskFull, Unavailable)) and self._env.last_txn_id() == committed:
            emit_safely("error", "manifest.commit_failed", error=str(failure), batches=len(group))
            self._fail(group, failure)
            return
        group.extend(self._carry)
        self._stop_with_error(failure, group)

    def _stop_with_error(self, cause: BaseException, group: list[ManifestGuard] | None = None) -> None:
        what = f"the manifest's writer stopped: {type(cause).__name__}: {cause}"
        refusal = poisoned_by(cause, what, hint="close the store and open it again")
        queued = self._queue.refuse(refusal, drain=True)
        # Each guard once, and none that is resolved already: its batch is durable.
        unsettled = (guard for guard in (*(group or ()), *self._carry, *queued) if not guard.done)
        waiting = list({id(guard): guard for guard in unsettled}.values())
        self._carry = []
        self.notifier.failure = refusal
        self._fail(waiting, refusal)  # first of all: threads are waiting
        emit_safely("error", "manifest.writer_stopped", error=str(cause))

    def _report(
        self, group: list[ManifestGuard], ops: int, rows: int, pages: int, started: float, raised: dict[int, int]
    ) -> None:
        seconds = self._clock.monotonic() - started
        failed = sum([guard.error is not None for guard in group])
        self.stats.add(len(group), failed, ops, rows, pages, seconds)
        if started >= self._next_look:
            self._next_look = started + LOOK_SECONDS
            self._env.report_long_reads()
        if listening():
            emit_safely(
                "debug",
                "manifest.commit",
                batches=len(group),
                failed=failed,
                operations=ops,
                rows=rows,
                pages=pages,
                generations={Component(number).name.lower(): reached for number, reached in raised.items()},
                sequence=self.head,
                seconds=round(seconds, 6),
            )
