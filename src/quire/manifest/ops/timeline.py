"""A takeover in the manifest: one operation, however many databases there are (A10).

The batch that contains it is the first change of a new range of sequences. Other numbers that consumers keep (lsns of page and
key-value databases, record ids of streams) follow at the first use after it: they are max(own, `first_number`).

Ids that only the store hands out move on too, so that one of a lost range is never given to something else; those of snapshots
when the first one of a database is made in the new range.
"""

from quire.core.errors import InvalidInput, StalePlan
from quire.core.ids import some_u32
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.overlay import Overlay
from quire.manifest.records import TimelineRecord, UInt

SKIPPED_IDS = {Counter.DB: 1 << 16, Counter.JOB: 1 << 32, Counter.CURSOR: 1 << 32, Counter.READER: 1 << 32}
"""How many ids of a counter a takeover leaves out: more than the former owner can have given in what was lost."""
SKIPPED_SNAPSHOTS = 1 << 10
"""How many snapshot ids of a database are left out."""


class Timeline(Op, frozen=True, tag=175):
    """The store was taken over, or restored: changes continue with `first_number`."""

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
                "a range begins above the last sequence", last=self.last_sequence, first_number=self.first_number
            )
        newest = max([gap.first for gap in tables.gaps()], default=0)
        # A second one in the same batch would share its sequence, and their gaps would overlap.
        if tables.head != self.last_sequence or newest > tables.head:
            raise StalePlan(
                "the change feed has moved on, or the store was taken over meanwhile",
                hint="look again",
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
