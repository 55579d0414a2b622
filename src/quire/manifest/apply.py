"""Apply a group of batches to the overlay and build its change records.

Terms
  group     the batches of one transaction, as guards
  run       consecutive batches of a group that consist of one kind of logged operation, or of local ones. Pipelines
            send runs, with an occasional acknowledgement in between.

Batches are applied in order; a batch that raises fails alone, with its own error. Every batch with logged operations
gets the next sequence, one change record, and the next generation of every component it touches; a batch of local
operations only gets none of these.

A group of few runs takes a fast path. If anything in it fails, the whole group is applied again on the slow path, which
identifies the failing batch.

Threads: called by the writer thread alone. Pure, apart from the overlay and the guards passed in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from quire.core.errors import InternalError, InvalidInput, ManifestDamaged, OutOfRange, QuireError
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.guard import Generations, ManifestGuard
from quire.manifest.ops.base import Op
from quire.manifest.overlay import Overlay
from quire.manifest.records import IdempotencyRecord

RUN = 8
"""Average number of batches per run from which the fast path pays off."""

SLICE = 64
"""Batches applied between two checks of the clock."""


class Applied(msgspec.Struct):
    """The result of applying a group."""

    head: int
    """The last sequence assigned."""
    generations: dict[int, int]
    at_ms: int
    changes: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    """Rows of the change log."""
    operations: int = 0
    batches: int = 0
    """Number of batches that were decided (applied or failed); the rest are left for the next group."""


class Applier:
    """Applies groups to one overlay."""

    def __init__(self, overlay: Overlay, idempotency_ms: int) -> None:
        self._overlay = overlay
        self._idempotency_ms = idempotency_ms

    def apply(self, group: list[ManifestGuard], state: Applied, in_time: Callable[[], bool]) -> None:
        """Apply the batches until `in_time` returns False; the rest are left for another group."""
        self._overlay.head = state.head
        runs = _runs(group) if len(group) > 1 and not self._overlay.strict else []
        if runs and (len(runs) == 1 or len(runs) <= len(group) // RUN):
            start = state.head, dict(state.generations)
            try:
                for kind, run in runs:
                    if kind is not None:
                        before = state.batches
                        self._apply_run(kind, run, state, in_time)
                        if state.batches - before < len(run):
                            return  # out of time: the rest belong to the next group
                    else:
                        self._apply_local(run, state)
                return
            except Exception:  # the slow path finds the batch that caused it
                self._overlay.discard()
                state.head, state.generations = start
                state.changes, state.operations, state.batches = [], 0, 0
                self._overlay.head = state.head
        self._apply_one_by_one(group, state, in_time)

    def _apply_local(self, run: list[ManifestGuard], state: Applied) -> None:
        """Apply batches of local operations, which get no sequence and no change record."""
        for guard in run:
            for op in guard.ops:
                op.apply(self._overlay, state.at_ms)
            _require_decodable(guard.ops)
            state.operations += len(guard.ops)
            state.batches += 1
            guard.sequence, guard.generations, guard.committed_at_ms = 0, (), state.at_ms

    def _apply_run(
        self, kind: type[Op], group: list[ManifestGuard], state: Applied, in_time: Callable[[], bool]
    ) -> None:
        operations = batches = 0
        # The first slice ignores the clock: a group that decides nothing would be taken again and again.
        while batches < len(group) and (not (batches or state.batches) or in_time()):
            ops = [op for guard in group[batches : batches + SLICE] for op in guard.ops]
            kind.apply_all(ops, self._overlay, state.at_ms)
            operations += len(ops)
            batches = min(batches + SLICE, len(group))
        pack, records = CHANGE_LOG.key.fast, list[tuple[bytes, ChangeRecord]]()
        component, touched, at_ms = kind.component, (kind.component,), state.at_ms
        # Within a run, sequence and generation advance together: their distance is constant.
        ahead = state.generations.get(component, 0) - state.head
        sequence = state.head
        for guard in group[:batches]:
            done: Any = guard.ops
            sequence += 1
            reached = sequence + ahead
            record = ChangeRecord(sequence, at_ms, done, ((component, reached),), guard.trace_id)
            records.append((pack(sequence), record))
            guard.sequence, guard.reached, guard.touched, guard.committed_at_ms = sequence, reached, touched, at_ms
        state.changes += CHANGE_LOG.rows.encode_all(records)
        state.generations[component] = sequence + ahead
        state.head = self._overlay.head = sequence
        state.operations += operations
        state.batches += batches

    def _apply_one_by_one(self, group: list[ManifestGuard], state: Applied, in_time: Callable[[], bool]) -> None:
        overlay, at_ms, head = self._overlay, state.at_ms, state.head
        for index, guard in enumerate(group):
            if index and not index % SLICE and not in_time():
                break
            state.batches += 1
            try:
                if guard.key is not None and self._answered(guard, at_ms):
                    continue
                for op in guard.ops:
                    op.apply(overlay, at_ms)
                logged: Any = tuple([op for op in guard.ops if op.logged])
                touched = sorted({op.component for op in logged})
                updates = tuple([(component, state.generations.get(component, 0) + 1) for component in touched])
                sequence = _sequence(state.head, logged) if logged else 0
                change = ChangeRecord(sequence, at_ms, logged, updates, guard.trace_id)
                # Encoded here and not at `flush`: a record that cannot be encoded fails its own batch, not the group.
                row = CHANGE_LOG.codec.encode(change) if logged else b""
                _require_decodable(guard.ops, row if len(logged) == len(guard.ops) else None)
                if overlay.notes:
                    overlay.write_notes(sequence, updates, at_ms)
                if guard.key is not None:
                    self._remember(guard.key, sequence, updates, at_ms, guard.result_bytes)
            except Exception as error:
                guard.error = error if isinstance(error, QuireError) else as_input_error(error)
                self._undo(group[:index], at_ms, head)
                continue
            state.operations += len(guard.ops)
            if logged:
                state.head = overlay.head = sequence
                state.generations.update(updates)
                key = CHANGE_LOG.key.pack(sequence)
                state.changes.append((key, CHANGE_LOG.rows.sealed(key, row)))
            guard.sequence, guard.generations, guard.committed_at_ms = sequence, updates, at_ms
            if overlay.tracking:
                overlay.undo.clear()

    def _undo(self, before: list[ManifestGuard], at_ms: int, head: int) -> None:
        """Remove a failed batch from the overlay: by its undo log, or by applying the batches before it again."""
        overlay = self._overlay
        if overlay.tracking:
            overlay.rollback()
            return
        strict = overlay.strict
        overlay.discard()
        overlay.switch(tracking=True, strict=strict)
        overlay.head = head
        # Sequences and generations in the guards stay valid: ops are pure, so the second pass gives the same rows.
        for guard in before:
            if guard.error is None and not guard.repeated:
                for op in guard.ops:
                    op.apply(overlay, at_ms)
                overlay.write_notes(guard.sequence, guard.generations, at_ms)
                overlay.head = guard.sequence or overlay.head
                if guard.key is not None:
                    self._remember(guard.key, guard.sequence, guard.generations, at_ms, guard.result_bytes)
        overlay.undo.clear()

    def _answered(self, guard: ManifestGuard, at_ms: int) -> bool:
        """Return whether the key was used before; if so, the guard gets the stored answer."""
        assert guard.key is not None
        row = self._overlay.idempotency.get(t.IDEMPOTENCY.key.pack(guard.key))
        # An expired answer counts as absent, whether or not its row has been pruned yet.
        if row is None or row.expires_at_ms <= at_ms:
            return False
        guard.sequence, guard.generations, guard.committed_at_ms = row.sequence, row.generations, at_ms
        # Not `result_bytes`: if the group is abandoned, this batch may be applied after all, with its own result.
        guard.stored_result, guard.repeated = row.result, True
        return True

    def _remember(self, key: bytes, sequence: int, updates: Generations, at_ms: int, result: bytes) -> None:
        answer = IdempotencyRecord(sequence, at_ms + self._idempotency_ms, updates, result)
        self._overlay.idempotency.put(t.IDEMPOTENCY.key.pack(key), answer)


def _sequence(head: int, ops: tuple[Any, ...]) -> int:
    """Return the sequence of the next batch; after a takeover, the first number of the new range."""
    jumps: list[int] = [op.first_number for op in ops if op.jumps]
    return max([head + 1, *jumps])


def _runs(group: list[ManifestGuard]) -> list[tuple[type[Op] | None, list[ManifestGuard]]]:
    """Split a group into runs of one kind of logged operation or of local ones (`None`); empty if a batch is neither."""
    if {guard.key for guard in group} != {None}:
        return []
    kinds = {type(op) for guard in group for op in guard.ops}
    if not all(kind.quick or not kind.logged for kind in kinds):
        return []
    if len(kinds) == 1:  # the usual case of a pipeline; inspecting each batch would cost a tenth of its rate
        (kind,) = kinds
        return [(kind if kind.logged else None, group)]
    runs: list[tuple[type[Op] | None, list[ManifestGuard]]] = []
    for guard in group:
        kind = type(guard.ops[0])
        if len(guard.ops) > 1 and {type(op) for op in guard.ops} != {kind}:
            return []
        run_kind = kind if kind.logged else None
        if runs and runs[-1][0] is run_kind:
            runs[-1][1].append(guard)
        else:
            runs.append((run_kind, [guard]))
    return runs


def _require_decodable(ops: Any, row: bytes | None = None) -> None:
    """Refuse operations that cannot be decoded again: a field of the wrong type would make the store permanently unusable.

    `row` is their change record, if one contains all of them. Quick operations check their fields themselves in
    `apply_all`, many at once: decoding each change record again was measured to cost a pipeline a quarter of its rate.
    """
    try:
        CHANGE_LOG.codec.decode(CHANGE_LOG.codec.encode(ChangeRecord(0, 0, ops, ())) if row is None else row)
    except ManifestDamaged as error:
        raise InvalidInput(f"an operation has a field of the wrong type or range: {error.__cause__}") from error


def as_input_error(error: Exception) -> QuireError:
    """Convert an error raised by an operation: a value that no codec accepts is the caller's mistake, anything else a bug."""
    kind: type[QuireError] = InternalError
    if isinstance(error, struct.error):
        kind = OutOfRange
    elif isinstance(error, (OverflowError, TypeError, ValueError)):
        kind = InvalidInput
    failure = kind(f"the batch cannot be applied: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
