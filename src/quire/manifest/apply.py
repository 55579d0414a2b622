"""Apply a group of batches to the overlay and build its change records.

A group is the batches of one transaction, as guards. Batches are applied in order; a batch that raises fails alone, with its
own error. Every batch with logged operations gets the next sequence, one change record, and the next generation of every
component it touches; a batch of local operations only gets none of these.

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
from quire.manifest.overlay import Overlay
from quire.manifest.records import IdempotencyRecord

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
        overlay, at_ms, head = self._overlay, state.at_ms, state.head
        overlay.head = head
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
                sequence, row = 0, b""
                updates: Generations = ()
                if logged:
                    touched = sorted({op.component for op in logged})
                    updates = tuple([(component, state.generations.get(component, 0) + 1) for component in touched])
                    sequence = _sequence(state.head, logged)
                    # Encoded here and not at `flush`: a record that cannot be encoded fails its own batch, not the group.
                    row = CHANGE_LOG.codec.encode(ChangeRecord(sequence, at_ms, logged, updates, guard.trace_id))
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


def _require_decodable(ops: Any, row: bytes | None = None) -> None:
    """Refuse operations that cannot be decoded again: a field of the wrong type would make the store permanently unusable.

    `row` is their change record, if one contains all of them.
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
