"""One record of the change feed: what one batch did.

The bytes are those of every msgpack table (u16 version + array); the operations are the very values that were applied,
each as an array that begins with its tag, so a subscriber replays them without special adapters (seed 000).
Layout: docs/formats/manifest.md.
"""

from __future__ import annotations

from quire.manifest import tables as t
from quire.manifest.ops.registry import AnyOp
from quire.manifest.records import Record, UInt


class ChangeRecord(Record, frozen=True):
    """The ops of one batch, when they were committed, and the generations they led to."""

    sequence: UInt
    committed_at_ms: UInt
    operations: tuple[AnyOp, ...]
    generation_updates: tuple[tuple[int, int], ...]
    trace_id: str = ""


CHANGE_LOG = t.Table("change_log", (("sequence", "u64"),), ChangeRecord, t.Policy.LOCAL, "committed batches, in order")
