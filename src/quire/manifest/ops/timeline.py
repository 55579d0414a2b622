"""The operation of a takeover: one, however many databases there are (A10).

The batch that contains it is the first change of a new range of sequences. Other numbers that consumers keep (lsns of
page and key-value databases, record ids of streams) follow at their first use after it: they become max(own,
`first_number`).

Ids that only the store assigns also skip ahead, so that an id of a lost range is never assigned to something else;
snapshot ids do when the first snapshot of a database is made in the new range.
"""

from quire.core.errors import InvalidInput, StalePlan
from quire.core.ids import some_u32
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.overlay import Overlay
from quire.manifest.records import TimelineRecord, UInt

SKIPPED_IDS = {Counter.DB: 1 << 16, Counter.JOB: 1 << 32, Counter.CURSOR: 1 << 32, Counter.READER: 1 << 32}
"""How many ids of each counter a takeover skips: more than the former owner can have assigned in the lost changes."""
SKIPPED_SNAPSHOTS = 1 << 10
"""How many snapshot ids of a database are skipped."""


class Timeline(Op, frozen=True, tag=175):
    """Record a takeover or a restore: changes continue with `first_number`."""

    component = int(Component.REMOTE)
    jumps = True
    owner_epoch: UInt
    parent_epoch: UInt
    parent_number: UInt
    ended_at_ms: UInt
    last_sequence: UInt
    first_number: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        some_u32("owner_epoch", self.owner_epoch)
        if self.first_number <= self.last_sequence:
            raise InvalidInput(
                "a range must start above the last sequence", last=self.last_sequence, first_number=self.first_number
            )
        newest = max([gap.first for gap in tables.gaps()], default=0)
        # A second Timeline in the same batch would share its sequence, and their gaps would overlap.
        if tables.head != self.last_sequence or newest > tables.head:
            raise StalePlan(
                "the change feed has advanced, or the store was taken over in the meantime",
                hint="read the state again and retry",
                head=tables.head,
                last_sequence=self.last_sequence,
                owner_epoch=self.owner_epoch,
            )
        record = TimelineRecord(
            self.owner_epoch, self.parent_epoch, self.parent_number, self.ended_at_ms, self.last_sequence, at_ms
        )
        tables.timeline.put(t.TIMELINE.key.pack(self.first_number), record)
        for counter in (Counter.DB, Counter.JOB):
            mark = tables.id_watermarks.get(t.ID_WATERMARKS.key.pack(counter))
            raise_watermark(tables, counter, (mark.next_id if mark is not None else 1) - 1 + SKIPPED_IDS[counter])
