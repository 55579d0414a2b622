"""The writer thread: takes batches from a bounded queue, applies them in order, commits them in groups (M3).

Terms
  batch    what one `submit` brings: applied whole or not at all
  group    the batches of one LMDB transaction, one sync
  doubt    after a failed sync nobody knows what is on disk

Rules
  1. Batches are applied in the order of `submit`; each sees those before it.
  2. A batch that raises fails alone: the overlay forgets it, the rest of the group commits.
  3. Rows, change record, generations and idempotency answer of a batch are in one transaction.
  4. A guard resolves after the transaction is durable, never before.
  5. A full map is grown and the same group flushed again; a full disk fails the group, and the writer goes on if the
     environment says that nothing was committed; any other failure of a commit poisons the writer (doubt stops writes).
  6. The queue holds one group: while one is being committed the next one gathers, then `submit` blocks, and raises
     `Overloaded` after its timeout. So memory is bounded by two groups and one batch.

What is on disk at each step of a group, and what recovery does:
  begin … flush     the previous transaction (LMDB is copy-on-write): the group never happened
  commit            the previous transaction or the group's, whole: LMDB's meta page decides
  durable           the group's; guards may not have been told, so a caller that repeats needs an idempotency key

Threads: `submit`, `when_generation` from any thread; everything named `_…` below the line belongs to the writer thread.
Fields under "shared" are guarded by `_lock`; the others are constant after construction or the writer's own.
"""

from __future__ import annotations

import resource
import struct
import threading
from collections.abc import Iterable
from typing import Any

import lmdb

from quire.core.clock import Clock
from quire.core.errors import (
    DiskFull,
    InternalError,
    InvalidInput,
    OutOfRange,
    Overloaded,
    QuireError,
    StoreClosed,
    StoreUnusable,
)
from quire.core.events import emit, listening
from quire.core.limits import BATCH_OPS_MAX, IDEMPOTENCY_KEY_BYTES
from quire.durable.failpoints import hit
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.env import ManifestEnv, translate
from quire.manifest.guard import Bell, Generations, GenerationWait, ManifestGuard
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.local import NEXT_SEQUENCE, sequence_bounds
from quire.manifest.overlay import KeysTaken, Overlay
from quire.manifest.records import GenerationRecord, IdempotencyRecord, MetaRecord
from quire.manifest.stats import WriterStats

_BLOCK_BYTES = 512
"""The unit of `ru_oublock`."""


class ManifestWriter:
    """Owns the write transaction. Start it with `start`, end it with `close`."""

    def __init__(self, env: ManifestEnv, clock: Clock) -> None:
        # constant after construction
        self.bell = Bell()
        self.stats = WriterStats()
        self._env = env
        self._clock = clock
        self._settings = env.settings
        # shared
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._queue: list[ManifestGuard] = []
        self._queued_ops = 0
        self._idle = False
        self._waiting_for_room = 0
        self._refusal: QuireError | None = None
        self._closing = False
        # the writer's own; `generations`, `head` and `oldest` are replaced whole and may be read by anyone
        self._overlay = Overlay(env.handles)
        self._carry: list[ManifestGuard] = []
        self._last_ms = 0
        self._page_bytes = env.info()["page_size"]
        self.generations: dict[int, int] = {}
        self.head = 0
        self.oldest = 1
        self._thread = threading.Thread(target=self._run, name="quire-manifest-writer", daemon=True)
        self.bell.thread = self._thread

    def start(self) -> None:
        """Load the marks and begin to serve."""
        txn, ticket = self._env.begin_read()
        try:
            self._overlay.begin(txn)
            self.oldest, following = sequence_bounds(self._overlay)
            self.head = following - 1
            for key, row in self._overlay.generation_watermarks.scan():
                self.generations[t.GENERATION_WATERMARKS.key.unpack(key)[0]] = row.generation
                self._last_ms = max(self._last_ms, row.updated_at_ms)
        finally:
            self._env.end_read(txn, ticket)
        self._thread.start()

    # ── any thread ────────────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, ops: Iterable[Op], *, key: bytes | None = None, timeout: float | None = None) -> ManifestGuard:
        """Queue a batch. Blocks while the queue is full; `Overloaded` if that takes longer than `timeout`."""
        guard = ManifestGuard(ops if type(ops) is tuple else tuple(ops), key, self.bell)
        count = len(guard.ops)
        if not 0 < count <= BATCH_OPS_MAX:
            raise InvalidInput("a batch has at least one and at most 65,536 operations", operations=count)
        if key is not None and len(key) != IDEMPOTENCY_KEY_BYTES:
            raise InvalidInput("an idempotency key has 16 bytes", bytes=len(key))
        with self._lock:
            if self._refusal is not None or self._queued_ops >= self._settings.group_ops_max:
                self._wait_for_room(timeout)
            self._queue.append(guard)
            self._queued_ops += count
            if self._idle:
                self._idle = False
                self._work.notify()
        return guard

    def _wait_for_room(self, timeout: float | None) -> None:
        """REQUIRES `_lock`."""
        if threading.current_thread() is self._thread:
            raise InternalError("the writer thread may not submit")
        self._waiting_for_room += 1
        try:
            free = self._room.wait_for(
                lambda: self._refusal is not None or self._queued_ops < self._settings.group_ops_max, timeout
            )
        finally:
            self._waiting_for_room -= 1
        if self._refusal is not None:
            raise self._refusal
        if not free:
            raise Overloaded(
                "the manifest's queue stayed full", hint="slow down, or raise manifest.group_ops_max", seconds=timeout
            )

    def when_generation(self, component: Component, target: int) -> GenerationWait:
        """Resolves once `component` has reached generation `target`."""

        def reached() -> int | None:
            now = self.generations.get(component, 0)
            return now if now >= target else None

        return GenerationWait(self.bell, reached, f"generation {target} of {component.name}")

    @property
    def failure(self) -> QuireError | None:
        """Why nothing more is accepted, if so."""
        return self._refusal

    def close(self) -> None:
        """Refuse new batches, commit what is queued, end the thread."""
        with self._lock:
            self._closing = True
            if self._refusal is None:
                self._refusal = StoreClosed("the manifest is closed", hint="open the store again")
            self._work.notify_all()
            self._room.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self.bell.failure = self.bell.failure or self._refusal
        self.bell.ring()

    # ── the writer thread ─────────────────────────────────────────────────────────────────────────────────────────────
    def _run(self) -> None:
        try:
            while (group := self._take()) is not None:
                self._commit(group)
        except BaseException as error:  # whatever it is, waiters must hear of it
            self._die(error)

    def _take(self) -> list[ManifestGuard] | None:
        """The next group; `None` when closed and drained. The queue's bound is the group's, so all of it is taken."""
        if self._carry:
            taken, self._carry = self._carry, []
            return taken
        with self._lock:
            while not self._queue:
                if self._closing:
                    return None
                self._idle = True
                self._work.wait()
            self._idle = False
            taken, self._queue = self._queue, []
            self._queued_ops = 0
            if self._waiting_for_room:
                self._room.notify_all()
        return taken

    def _commit(self, group: list[ManifestGuard]) -> None:
        started = self._clock.monotonic()
        self._last_ms = at_ms = max(self._last_ms, self._clock.now_ms())
        committed = self._env.last_txn_id()
        try:
            try:
                ops, rows, pages = self._transact(group, at_ms, started)
            except KeysTaken:
                self._overlay.discard()
                self._overlay.switch(strict=True)
                for guard in group:
                    guard.error, guard.repeated = None, False
                ops, rows, pages = self._transact(group, at_ms, started)
        except (QuireError, lmdb.Error, OSError) as error:
            self._overlay.discard()
            self._give_up(group, error, committed)
            return
        except Exception as error:
            # Not of LMDB: a row that cannot be encoded, say. Redo one batch per transaction (M3): the culprit fails alone.
            self._overlay.discard()
            if len(group) == 1:
                self._fail(group, _as_input_error(error))
            else:
                for guard in group:
                    self._commit([guard])
            return
        self._resolve(group)
        self._report(group, ops, rows, pages, started)

    def _transact(self, group: list[ManifestGuard], at_ms: int, started: float) -> tuple[int, int, int]:
        """One transaction, durable on return; (operations, rows, pages) written."""
        overlay = self._overlay
        blocks = resource.getrusage(resource.RUSAGE_THREAD).ru_oublock
        txn = self._env.begin_write()
        try:
            overlay.begin(txn)
            generations = dict(self.generations)
            changes: list[tuple[bytes, bytes]] = []
            ops, head = self._apply(group, at_ms, started, generations, changes)
            for component, generation in generations.items():
                if generation != self.generations.get(component):
                    overlay.generation_watermarks.put(
                        t.GENERATION_WATERMARKS.key.pack(component), GenerationRecord(generation, at_ms)
                    )
            if changes:
                overlay.meta.put(NEXT_SEQUENCE, MetaRecord(head + 1))
            hit("manifest.commit.applied")
            rows, txn = self._flush(txn, changes)
            hit("manifest.commit.flushed")
            oldest, _ = sequence_bounds(overlay)
            txn.commit()
            hit("manifest.commit.durable")
        except BaseException:
            txn.abort()
            raise
        overlay.settle()
        self.generations, self.head, self.oldest = generations, head, oldest
        written = (resource.getrusage(resource.RUSAGE_THREAD).ru_oublock - blocks) * _BLOCK_BYTES
        return ops, rows, written // self._page_bytes

    def _apply(
        self,
        group: list[ManifestGuard],
        at_ms: int,
        started: float,
        generations: dict[int, int],
        changes: list[tuple[bytes, bytes]],
    ) -> tuple[int, int]:
        """Apply batches to the overlay; (operations, head of the feed). Those that come too late wait for the next group."""
        overlay, head = self._overlay, self.head
        encode, version = CHANGE_LOG.codec.body, CHANGE_LOG.codec.head
        pack = CHANGE_LOG.key.fast
        total = 0
        deadline = started + self._settings.group_seconds_max
        for index, guard in enumerate(group):
            if not index % 64 and index and self._clock.monotonic() > deadline:
                self._carry = group[index:]
                del group[index:]
                break
            ops: Any = guard.ops
            updates: Generations
            try:
                if guard.key is not None and self._answered(guard, at_ms):
                    continue
                for op in ops:
                    op.apply(overlay, at_ms)
                if len(ops) == 1 or len({*map(type, ops)}) == 1:
                    logged = ops if op.logged else ()
                    updates = ((op.component, generations.get(op.component, 0) + 1),) if op.logged else ()
                else:
                    logged = tuple([op for op in ops if op.logged])
                    touched = sorted({op.component for op in logged})
                    updates = tuple([(component, generations.get(component, 0) + 1) for component in touched])
                sequence = 0
                if logged:
                    sequence = head + 1
                    row = version + encode(ChangeRecord(sequence, at_ms, logged, updates))
                if guard.key is not None:
                    self._remember(guard.key, sequence, updates, at_ms)
            except Exception as error:
                guard.error = error if isinstance(error, QuireError) else _as_input_error(error)
                self._undo(group[:index], at_ms)
                continue
            total += len(ops)
            if logged:
                head = sequence
                generations.update(updates)
                changes.append((pack(sequence), row))
                guard.sequence = sequence
                guard.generations = updates
            guard.committed_at_ms = at_ms
            if overlay.tracking:
                overlay.undo.clear()
        return total, head

    def _undo(self, before: list[ManifestGuard], at_ms: int) -> None:
        """Make the overlay forget a failed batch: by its undo log, or by applying the batches before it once more."""
        overlay = self._overlay
        if overlay.tracking:
            overlay.rollback()
            return
        strict = overlay.strict
        overlay.discard()
        overlay.switch(tracking=True, strict=strict)
        for guard in before:
            if guard.error is None and not guard.repeated:
                for op in guard.ops:
                    op.apply(overlay, at_ms)
                if guard.key is not None:
                    self._remember(guard.key, guard.sequence, guard.generations, at_ms)
        overlay.undo.clear()

    def _answered(self, guard: ManifestGuard, at_ms: int) -> bool:
        """Whether the key was used before; then the guard gets the first answer (M11)."""
        assert guard.key is not None
        row = self._overlay.idempotency.get(t.IDEMPOTENCY.key.pack(guard.key))
        if row is None or row.expires_at_ms <= at_ms:
            return False
        guard.sequence = row.sequence
        guard.generations = row.generations
        guard.result_bytes = row.result
        guard.committed_at_ms = at_ms
        guard.repeated = True
        return True

    def _remember(self, key: bytes, sequence: int, updates: Generations, at_ms: int) -> None:
        expires = at_ms + int(self._settings.idempotency_seconds * 1000)
        self._overlay.idempotency.put(t.IDEMPOTENCY.key.pack(key), IdempotencyRecord(sequence, expires, updates))

    def _flush(self, txn: lmdb.Transaction, changes: list[tuple[bytes, bytes]]) -> tuple[int, lmdb.Transaction]:
        """Write all pending rows; a full map is grown and everything written again into a new transaction (rule 5)."""
        while True:
            try:
                if self._env.fill() > self._settings.map_watermark:
                    raise lmdb.MapFullError("watermark")
                # py-lmdb gives up the GIL for every row. With producers waiting for the GIL each hand-over costs more than
                # the row; with producers waiting for this lock instead, it costs nothing.
                with self._lock:
                    rows = self._overlay.flush() + len(changes)
                    if changes:
                        with txn.cursor(db=self._env.handles[CHANGE_LOG.name]) as cursor:
                            cursor.putmulti(changes, append=True)
                return rows, txn
            except lmdb.MapFullError:
                txn.abort()
                self._env.grow()
                txn = self._env.begin_write()
                self._overlay.begin(txn)

    # ── outcomes ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _resolve(self, group: list[ManifestGuard]) -> None:
        for guard in group:
            guard.ops = ()
            guard.done = True
        self.bell.ring()

    def _fail(self, group: list[ManifestGuard], error: QuireError) -> None:
        for guard in group:
            guard.error = guard.error or error
        self._resolve(group)

    def _give_up(self, group: list[ManifestGuard], error: QuireError | lmdb.Error | OSError, committed: int) -> None:
        """The transaction failed: certain that nothing was committed → fail the group; in doubt → poison (rule 5)."""
        failure = error if isinstance(error, QuireError) else translate(error, self._env.path)
        if isinstance(failure, DiskFull) and self._env.last_txn_id() == committed:
            emit("error", "manifest.commit_failed", error=str(failure), batches=len(group))
            self._fail(group, failure)
            return
        group.extend(self._carry)
        self._die(failure, group)

    def _die(self, cause: BaseException, group: list[ManifestGuard] | None = None) -> None:
        refusal = StoreUnusable(
            f"the manifest's writer stopped: {type(cause).__name__}: {cause}",
            hint="close the store and open it again",
        )
        refusal.__cause__ = cause
        with self._lock:
            self._refusal = refusal
            self._closing = True
            waiting = [*(group or ()), *self._carry, *self._queue]
            self._carry, self._queue = [], []
            self._room.notify_all()
        self.bell.failure = refusal
        emit("error", "manifest.writer_stopped", error=str(cause))
        self._fail(waiting, refusal)

    def _report(self, group: list[ManifestGuard], ops: int, rows: int, pages: int, started: float) -> None:
        seconds = self._clock.monotonic() - started
        failed = sum([guard.error is not None for guard in group])
        self.stats.add(batches=len(group), failed=failed, ops=ops, rows=rows, pages=pages, seconds=seconds)
        self._env.report_long_reads()
        if listening():
            emit(
                "debug",
                "manifest.commit",
                batches=len(group),
                failed=failed,
                operations=ops,
                rows=rows,
                pages=pages,
                generation=max(self.generations.values(), default=0),
                sequence=self.head,
                seconds=round(seconds, 6),
            )


def _as_input_error(error: Exception) -> QuireError:
    """A value that no codec takes is the caller's; anything else is ours."""
    kind: Any = InvalidInput if isinstance(error, (OverflowError, TypeError, ValueError)) else InternalError
    if isinstance(error, struct.error):
        kind = OutOfRange
    failure: QuireError = kind(f"the batch cannot be applied: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
