"""What every operation is: a small frozen value with a tag, a component, and a pure `apply`.

`apply(tables, at_ms)` depends on nothing but its arguments (M2): no clock, no randomness, no I/O. Identifiers are in the op,
the time is that of the batch; so a replayed log gives the same bytes. It raises a `QuireError` before or after its writes, it
does not matter which: the batch is rolled back as a whole. Tags are never reused and fields are only appended, with defaults:
old change records stay readable.
"""

# Not `from __future__ import annotations`: msgspec would evaluate the text of each field's type in each process that reads or
# writes a row. With all the others of the manifest that is 10 ms, an eighth of a short command.

from collections.abc import Iterable
from enum import IntEnum
from typing import ClassVar, Self

import msgspec

from quire.core.errors import InternalError
from quire.core.ids import some_u32
from quire.manifest import tables as t
from quire.manifest.overlay import Overlay
from quire.manifest.records import MetaRecord, UInt, WatermarkRecord


class Component(IntEnum):
    """What a batch touched; each has a generation that awaiters wait for."""

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
    """Carried by local ops; has no watermark."""


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
    audited: ClassVar[bool] = False
    """Whether `apply` may leave notes for the audit: they need the batch's own sequence, so such ops go one by one."""

    quick: ClassVar[bool] = False
    """Whether `apply_all` refuses fields of the wrong type or range itself, so that nobody need read the operation back."""

    jumps: ClassVar[bool] = False
    """Whether its batch gets the sequence `first_number` instead of the next one."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        raise InternalError("this operation has no apply", op=type(self).__name__)

    @classmethod
    def apply_all(cls, ops: Iterable[Self], tables: Overlay, at_ms: int) -> None:
        """Apply many operations of one kind. An op that comes by the thousand may do this better than one by one."""
        apply = cls.apply
        for op in ops:
            apply(op, tables, at_ms)


LOCAL_COUNTERS: dict[Counter, str] = {Counter.CURSOR: "next_cursor_id", Counter.READER: "next_reader_id"}
"""Counters of local things and the `meta` row of each: `id_watermarks` is logged, and a local op must not write it (M2)."""


def raise_watermark(tables: Overlay, counter: Counter, used: int) -> None:
    """Record that `used` has been handed out; ids below the watermark are never given again."""
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
    """The same as `ReserveIds` for counters of local things, which the feed knows nothing of."""

    logged = False
    counter: Counter
    upto: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if self.counter not in LOCAL_COUNTERS:
            raise InternalError("not a counter of local things", counter=self.counter.name)
        raise_watermark(tables, self.counter, self.upto)


class ReserveIds(Op, frozen=True, tag=1):
    """Hand out ids up to and including `upto` before the batches that use them exist (M5)."""

    component = int(Component.DATABASE)
    counter: Counter
    upto: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if self.counter is not Counter.JOB and self.counter is not Counter.READER:
            some_u32(self.counter.name.lower() + "_id", self.upto)
        raise_watermark(tables, self.counter, self.upto)
