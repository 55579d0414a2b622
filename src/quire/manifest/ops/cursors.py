"""Operations on the subscribers of the change feed and on the changes kept for them. All are local: none enters the feed.

Terms
  bounds   the oldest retained and the next sequence; between them the log has no gap
  tail     rows below the oldest sequence: no longer in the feed, still on disk

A cursor's acknowledgement only moves forward, and never beyond the head. The oldest sequence only rises, and never
above what a live cursor has yet to acknowledge. It moves in the transaction that permits it, which also removes a first
part of the tail; the rest follows in separate commits, so that no writer waits for more than one of them (M9).

A lost cursor keeps its row: it holds nothing back, and using it raises `CursorLost`. There is never a silent gap.
"""

from msgspec.structs import replace

from quire.core.errors import AlreadyExists, CursorLost, ManifestDamaged, NameTaken, OutOfRange, UnknownCursor
from quire.core.timeline import Gaps, gap_at
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.ops.base import Counter, Op, raise_watermark
from quire.manifest.overlay import OLDEST_SEQUENCE, Overlay
from quire.manifest.records import CursorRecord, CursorState, IndexRecord, MetaRecord, UInt

TRIM_ROWS = 2_048
"""Rows of the tail removed per operation: less than a millisecond. With a hundred acknowledgements a second that keeps
up with 200,000 changes, and no commit is needed for trimming alone."""


def sequence_bounds(tables: Overlay) -> tuple[int, int]:
    """Return (oldest retained, next to be assigned) change sequence."""
    oldest = tables.meta.get(OLDEST_SEQUENCE)
    return (oldest.number if oldest else 1), tables.head + 1


def _retained(tables: Overlay, sequence: int) -> int:
    """Return a position clamped to the range that a cursor may have."""
    oldest, following = sequence_bounds(tables)
    return min(max(sequence, oldest - 1), following - 1)


def cursor_of(tables: Overlay, cursor_id: int) -> tuple[bytes, CursorRecord]:
    """Return key and row of a cursor."""
    key = t.CHANGE_CURSORS.key.pack(cursor_id)
    row = tables.change_cursors.get(key)
    if row is None:
        raise UnknownCursor("no change cursor has this id", hint="register one first", cursor_id=cursor_id)
    return key, row


def lost(cursor_id: int, row: CursorRecord) -> CursorLost:
    """Return the error for a cursor that fell behind."""
    return CursorLost(
        f"the cursor is lost: {row.lost_reason}",
        hint="the changes it had not read are lost: start again from a snapshot, or skip them with `quire feed resume`",
        cursor_id=cursor_id,
        name=row.name,
        acked_sequence=row.acked_sequence,
    )


def refuse_lost(gaps: Gaps, position: int, **where: object) -> None:
    """Raise `CursorLost` for a position inside changes that a takeover has given up."""
    gap = gap_at(gaps, position)
    if gap is not None:
        raise CursorLost(
            f"the changes {gap.last + 1:,} to {position:,} were lost when the store was taken over",
            hint=f"undo their effects and continue after {gap.last}, or start again from a snapshot",
            position=position,
            last_sequence=gap.last,
            first_sequence=gap.first,
            **where,
        )


def settle_oldest(tables: Overlay, requested: int = 0) -> None:
    """Raise the oldest sequence as far as live cursors allow, or to `requested` if there are none; begin to trim."""
    oldest, following = sequence_bounds(tables)
    try:
        needed = [row.acked_sequence + 1 for _, row in tables.change_cursors.scan() if row.state is CursorState.LIVE]
    except ManifestDamaged:
        return  # the position of that cursor is unknown: keep everything until it is repaired
    # `requested` counts only without live cursors: otherwise acknowledgements alone decide (M9).
    target = min(min(needed) if needed else requested, following)
    if target > oldest:
        tables.meta.put(OLDEST_SEQUENCE, MetaRecord(target))
    trim_tail(tables)


def trim_tail(tables: Overlay) -> None:
    """Remove the first rows below the oldest sequence with this transaction."""
    tables.trim_rows += TRIM_ROWS


class RegisterCursor(Op, frozen=True, tag=91):
    """Register a subscriber that has seen everything up to `acked_sequence`, clamped to the retained range."""

    logged = False
    cursor_id: UInt
    acked_sequence: UInt
    name: str = ""
    ttl_ms: UInt = 0
    max_lag: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        refuse_lost(tables.gaps(), self.acked_sequence)
        acked = _retained(tables, self.acked_sequence)
        key = t.CHANGE_CURSORS.key.pack(self.cursor_id)
        if self.cursor_id == 0 or tables.change_cursors.has(key):
            raise AlreadyExists("a cursor with this id already exists", cursor_id=self.cursor_id)
        if self.name:
            check_name("cursor", self.name)
            name_key = t.CURSOR_NAMES.key.pack(self.name)
            if (holder := tables.cursor_names.get(name_key)) is not None:
                raise NameTaken("a cursor with this name already exists", name=self.name, cursor_id=holder.value)
            tables.cursor_names.put(name_key, IndexRecord(self.cursor_id))
        row = CursorRecord(acked, at_ms, at_ms, self.name, ttl_ms=self.ttl_ms, max_lag=self.max_lag)
        tables.change_cursors.put(key, row)
        raise_watermark(tables, Counter.CURSOR, self.cursor_id)


class AcknowledgeChanges(Op, frozen=True, tag=92):
    """Acknowledge that a subscriber has processed everything up to `upto_sequence`."""

    logged = False
    cursor_id: UInt
    upto_sequence: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, cursor = cursor_of(tables, self.cursor_id)
        if cursor.state is CursorState.LOST:
            raise lost(self.cursor_id, cursor)
        refuse_lost(tables.gaps(), self.upto_sequence)
        oldest, following = sequence_bounds(tables)
        if self.upto_sequence >= following:
            raise OutOfRange(
                "acknowledged beyond the head of the feed",
                hint="acknowledge only changes that `fetch` returned",
                upto=self.upto_sequence,
                head=following - 1,
            )
        acked = max(self.upto_sequence, cursor.acked_sequence)
        tables.change_cursors.put(key, replace(cursor, acked_sequence=acked, updated_at_ms=at_ms))
        if cursor.acked_sequence < oldest:
            settle_oldest(tables)
        else:  # this cursor did not hold the log back: no need to scan the others
            trim_tail(tables)


class DropCursor(Op, frozen=True, tag=93):
    """Remove a subscriber. What it held back is trimmed with the next acknowledgement, or by retention."""

    logged = False
    cursor_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, cursor = cursor_of(tables, self.cursor_id)
        tables.change_cursors.delete(key)
        if cursor.name:
            tables.cursor_names.delete(t.CURSOR_NAMES.key.pack(cursor.name))
        settle_oldest(tables)


class TrimChanges(Op, frozen=True, tag=94):
    """Remove the next part of the tail."""

    logged = False

    def apply(self, tables: Overlay, at_ms: int) -> None:
        trim_tail(tables)


class LoseCursor(Op, frozen=True, tag=99):
    """Mark a subscriber as lost, as a policy demands."""

    logged = False
    cursor_id: UInt
    reason: str

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, cursor = cursor_of(tables, self.cursor_id)
        if cursor.state is CursorState.LIVE:
            given_up = replace(cursor, state=CursorState.LOST, lost_reason=self.reason, updated_at_ms=at_ms)
            tables.change_cursors.put(key, given_up)
            settle_oldest(tables)


class ClampCursor(Op, frozen=True, tag=155):
    """Move a cursor into the retained range; a cursor that has missed changes is lost."""

    logged = False
    cursor_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, cursor = cursor_of(tables, self.cursor_id)
        before, after = cursor.acked_sequence, _retained(tables, cursor.acked_sequence)
        if cursor.state is CursorState.LOST or after == before:
            return
        clamped = replace(cursor, acked_sequence=after, updated_at_ms=at_ms)
        if after > before:
            reason = f"the changes {before + 1:,} to {after:,} are no longer kept"
            clamped = replace(clamped, state=CursorState.LOST, lost_reason=reason)
        tables.change_cursors.put(key, clamped)
        settle_oldest(tables)


class ResumeCursor(Op, frozen=True, tag=156):
    """Resume a lost cursor where it was, or at the oldest retained change: its subscriber accepts the gap."""

    logged = False
    cursor_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, cursor = cursor_of(tables, self.cursor_id)
        if cursor.state is CursorState.LOST:
            acked = _retained(tables, cursor.acked_sequence)
            live = replace(cursor, acked_sequence=acked, state=CursorState.LIVE, lost_reason="", updated_at_ms=at_ms)
            tables.change_cursors.put(key, live)


class RetainChanges(Op, frozen=True, tag=100):
    """Keep changes from `from_sequence` on, if there are no live cursors."""

    logged = False
    from_sequence: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        settle_oldest(tables, requested=self.from_sequence)
