"""The base of all operations: a small frozen value with a tag, a component, and a pure `apply`.

`apply(tables, at_ms)` depends only on its arguments (M2): no clock, no randomness, no I/O. Identifiers are in the op
and the time is that of the batch, so replaying a log gives the same bytes. `apply` may raise a `QuireError` before or
after its writes: the batch is rolled back as a whole. Tags are never reused and fields are only appended, with
defaults, so that old change records stay readable.
"""

# No `from __future__ import annotations`: msgspec would evaluate the text of each field's type in each process that
# reads or writes a row. For all types of the manifest that takes 10 ms, an eighth of a short command.

from enum import IntEnum
from typing import ClassVar

import msgspec

from quire.core.errors import InternalError
from quire.core.ids import some_u32
from quire.manifest import tables as t
from quire.manifest.overlay import Overlay
from quire.manifest.records import MetaRecord, UInt, WatermarkRecord


class Component(IntEnum):
    """The parts of the manifest that a batch can touch; each has a generation that can be awaited."""

    DATABASE = 1
    WAL = 2
    CHUNK = 3
    SLOT = 4
    SNAPSHOT = 5
    JOB = 6
    REMOTE = 7
    REFCOUNT = 8
    PAGE_INDEX = 9
    MIRROR = 10
    LOCAL = 255
    """The component of local ops; has no watermark."""


class Counter(IntEnum):
    """Store-wide id sequences (M5)."""

    DB = 1
    JOB = 2
    NAMESPACE = 3
    CURSOR = 4
    READER = 5


class Op(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all operations."""

    component: ClassVar[int] = int(Component.LOCAL)
    logged: ClassVar[bool] = True

    jumps: ClassVar[bool] = False
    """Whether its batch gets the sequence `first_number` instead of the next one."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        raise InternalError("this operation has no apply", op=type(self).__name__)


LOCAL_COUNTERS: dict[Counter, str] = {Counter.CURSOR: "next_cursor_id", Counter.READER: "next_reader_id"}
"""Counters of local rows, with the `meta` row of each: `id_watermarks` is logged, and a local op must not write it (M2)."""


def raise_watermark(tables: Overlay, counter: Counter, used: int) -> None:
    """Record that ids up to `used` were assigned; ids below the watermark are never assigned again."""
    if (name := LOCAL_COUNTERS.get(counter)) is not None:
        meta_key = t.META.key.pack(name)
        mark = tables.meta.get(meta_key)
        if mark is None or mark.number <= used:
            tables.meta.put(meta_key, MetaRecord(used + 1))
        return
    key = t.ID_WATERMARKS.key.pack(counter)
    row = tables.id_watermarks.get(key)
    if row is None or row.next_id <= used:
        tables.id_watermarks.put(key, WatermarkRecord(used + 1))


class ReserveLocalIds(Op, frozen=True, tag=157):
    """Reserve ids as `ReserveIds` does, for counters of local rows, which are not in the feed."""

    logged = False
    counter: Counter
    upto: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if self.counter not in LOCAL_COUNTERS:
            raise InternalError("not a local counter", counter=self.counter.name)
        raise_watermark(tables, self.counter, self.upto)


class ReserveIds(Op, frozen=True, tag=1):
    """Reserve ids up to and including `upto` before the batches that use them exist (M5)."""

    component = int(Component.DATABASE)
    counter: Counter
    upto: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if self.counter is not Counter.JOB and self.counter is not Counter.READER:
            some_u32(self.counter.name.lower() + "_id", self.upto)
        raise_watermark(tables, self.counter, self.upto)
