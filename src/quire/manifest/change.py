"""The values of the change feed: one record (what one batch did), its form in JSON, a page of records, a cursor.

The bytes are those of every msgpack table (u16 version + array). The operations are exactly the values that were
applied, each as an array that begins with its tag, so a subscriber replays them without special adapters. Layout:
docs/formats/manifest.md; the form in JSON: docs/feed.md. It is as stable as the bytes: operations and fields keep their
names, new ones are added at the end, readers ignore unknown ones. `change_from_json(change_json(record)) == record`,
through text too.

Threads: pure functions, callable from any thread. `change_from_json` raises `InvalidInput`, which names the location.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from quire.core.decoding import UNDECODABLE
from quire.core.errors import InvalidInput, ManifestDamaged
from quire.core.json_values import from_plain, plain
from quire.core.timeline import Gaps, distance
from quire.manifest import tables as t
from quire.manifest.ops.base import Component
from quire.manifest.ops.registry import AnyOp
from quire.manifest.records import CursorRecord, CursorState, Record, UInt


class ChangeRecord(Record, frozen=True):
    """The ops of one batch, when they were committed, and the generations they produced."""

    sequence: UInt
    committed_at_ms: UInt
    operations: tuple[AnyOp, ...]
    generation_updates: tuple[tuple[int, int], ...]
    trace_id: str = ""


CHANGE_LOG = t.Table("change_log", "sequence u64", ChangeRecord, t.Policy.LOCAL, "committed batches, in order")


def decode_changes(raws: list[bytes]) -> list[ChangeRecord]:
    """Return the records of plain rows of the log; the codec inlined, which saves a call per row."""
    head, body, decode = CHANGE_LOG.codec.head, CHANGE_LOG.codec.decode_body, CHANGE_LOG.codec.decode
    assert body is not None, "the change log is not packed"
    try:
        return [body(raw[2:]) if raw[:2] == head else decode(raw) for raw in raws]
    except UNDECODABLE:
        return [decode(raw) for raw in raws]  # finds the damaged row, and raises


# ── cursors and pages ─────────────────────────────────────────────────────────────────────────────────────────────────
class Start(Enum):
    """Where a new cursor begins; a number means after this sequence."""

    OLDEST = "oldest"
    LATEST = "latest"


class CursorInfo(msgspec.Struct, frozen=True):
    """A cursor and the bounds of the feed, in one snapshot (the design document's `ChangeCursorSnapshot`)."""

    cursor_id: int
    name: str
    state: CursorState
    acked_sequence: int
    oldest_sequence: int
    head_sequence: int
    created_at_ms: int
    updated_at_ms: int
    ttl_ms: int
    max_lag: int
    lost_reason: str
    gap_sequences: int = 0
    """Sequences between its position and the head that takeovers skipped."""

    @classmethod
    def of(cls, cursor_id: int, row: CursorRecord, bounds: tuple[int, int], gaps: Gaps) -> CursorInfo:
        """Return the information in a cursor's row, within these bounds."""
        oldest, head = bounds
        acked = row.acked_sequence
        return cls(
            cursor_id=cursor_id,
            oldest_sequence=oldest,
            head_sequence=head,
            gap_sequences=max(head - acked, 0) - distance(gaps, acked, head),
            **msgspec.structs.asdict(row),
        )

    @property
    def next_sequence(self) -> int:
        """The first sequence that a fetch returns."""
        return max(self.acked_sequence + 1, self.oldest_sequence)

    @property
    def lag(self) -> int:
        """Number of changes that this cursor has yet to acknowledge."""
        return max(self.head_sequence - self.acked_sequence - self.gap_sequences, 0)

    def why_given_up(self, now_ms: int) -> str:
        """Return why its policy, or the log, gives this cursor up; empty if neither does."""
        if self.acked_sequence < self.oldest_sequence - 1:
            return f"the log begins with {self.oldest_sequence:,}, it had read up to {self.acked_sequence:,}"
        silent_ms = now_ms - self.updated_at_ms
        if self.ttl_ms and self.lag and silent_ms > self.ttl_ms:
            return f"no acknowledgement for {silent_ms / 1000:.0f} s, allowed are {self.ttl_ms / 1000:g} s"
        if self.max_lag and self.lag > self.max_lag:
            return f"{self.lag:,} changes behind, allowed are {self.max_lag:,}"
        return ""


class ChangePage(msgspec.Struct, frozen=True):
    """Changes in order, and the bounds of the feed when they were read."""

    changes: tuple[ChangeRecord, ...]
    next_sequence: int
    """Where the next page begins: after the last change examined, whether it passed a filter or not."""
    oldest_sequence: int
    head_sequence: int

    @property
    def at_head(self) -> bool:
        """Whether nothing follows, as of this snapshot."""
        return self.next_sequence > self.head_sequence


# ── in JSON ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def change_json(record: ChangeRecord) -> dict[str, Any]:
    """Return a change in JSON form: every operation in full, generations by the names of their components."""
    return {
        "sequence": record.sequence,
        "committed_at_ms": record.committed_at_ms,
        "operations": plain(record.operations),
        "generations": {_component_name(number): reached for number, reached in record.generation_updates},
        "trace_id": record.trace_id,
    }


def change_text(record: ChangeRecord) -> str:
    """Return the JSON form as one line of text."""
    return msgspec.json.encode(change_json(record)).decode()


def change_from_json(form: Mapping[str, Any] | str | bytes) -> ChangeRecord:
    """Return the change in JSON form, given as a mapping or as text."""
    form_fields: Any = form
    if isinstance(form, str | bytes):
        try:
            form_fields = msgspec.json.decode(form)
        except UNDECODABLE as error:
            raise InvalidInput(f"not JSON: {error}", text=form[:60]) from error
    if not isinstance(form_fields, Mapping) or not isinstance(form_fields.get("generations"), Mapping):
        raise InvalidInput("not a change: that is an object with `generations`", found=str(form_fields)[:60])
    reached = [[_component_number(name), generation] for name, generation in form_fields["generations"].items()]
    record = from_plain(ChangeRecord, {**form_fields, "generation_updates": reached})
    try:  # numbers have the limits of the stored bytes
        return CHANGE_LOG.codec.decode(CHANGE_LOG.codec.encode(record))
    except (ManifestDamaged, OverflowError) as error:
        raise InvalidInput(f"not a change: {error.__cause__ or error}", sequence=record.sequence) from error


def _component_name(number: int) -> str:
    """Return the name of a component; for one of a newer quire, its number."""
    return Component(number).name.lower() if number in Component.__members__.values() else str(number)


def _component_number(name: str) -> int:
    component = Component.__members__.get(name.upper())
    if component is not None:
        return int(component)
    if not name.isdecimal():
        raise InvalidInput("no component has this name", at="generations", name=name)
    return int(name)
