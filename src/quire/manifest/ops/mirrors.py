"""Operations on mirrors: their definitions, and which versions of which databases their targets hold (L3).

A run begins a batch here before it commits to the target, and the target's own log names the batch. Any run that reads
that number there adopts the batch here, repeatedly if necessary, so a driver that is killed between the two commits
does no harm. A batch that never reached the target is dropped when a later one is adopted.
"""

from itertools import islice

from msgspec.structs import replace

from quire.core.errors import InvalidInput, NameTaken, NotFound, StalePlan
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay, TableView
from quire.manifest.records import MirrorDatabaseRecord, MirrorRecord, UInt

ADOPTED_ROWS = 4096
"""Maximum number of rows that one operation moves or removes: a commit of a few milliseconds."""


def _mirror(tables: Overlay, mirror_id: int) -> tuple[bytes, MirrorRecord]:
    key = t.MIRROR.key.pack(mirror_id)
    record = tables.mirror.get(key)
    if record is None:
        raise NotFound("no such mirror", hint="`quire mirror ls` lists them", mirror_id=mirror_id)
    return key, record


def _remove(view: TableView[MirrorDatabaseRecord], prefix: bytes, limit: int) -> int:
    keys = [key for key, _ in islice(view.scan(prefix), limit)]
    for key in keys:
        view.delete(key)
    return len(keys)


class PutMirror(Op, frozen=True, tag=210):
    """Add a mirror, or replace the definition of one."""

    component = int(Component.MIRROR)
    mirror_id: UInt
    record: MirrorRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        check_name("mirror", self.record.name)
        key = t.MIRROR.key.pack(self.mirror_id)
        for other, record in tables.mirror.scan():
            if other != key and record.name == self.record.name:
                raise NameTaken(
                    "a mirror with this name already exists", hint="choose another name", name=self.record.name
                )
        tables.mirror.put(key, self.record)


class DropMirror(Op, frozen=True, tag=211):
    """Remove the rows of a mirror, up to `ADOPTED_ROWS` per operation; the last operation removes the mirror itself."""

    component = int(Component.MIRROR)
    mirror_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, _ = _mirror(tables, self.mirror_id)
        left = ADOPTED_ROWS - _remove(tables.mirror_batch, t.MIRROR_BATCH.key.prefix(self.mirror_id), ADOPTED_ROWS)
        left -= _remove(tables.mirror_database, t.MIRROR_DATABASE.key.prefix(self.mirror_id), left)
        if left:
            tables.mirror.delete(key)


class MarkMirror(Op, frozen=True, tag=212):
    """Record that a run has begun, or has ended with the target up to date."""

    component = int(Component.MIRROR)
    mirror_id: UInt
    is_synced: bool = False

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, record = _mirror(tables, self.mirror_id)
        times = {"synced_at_ms": at_ms} if self.is_synced else {"started_at_ms": at_ms}
        tables.mirror.put(key, replace(record, **times))


class BeginMirrorBatch(Op, frozen=True, tag=213):
    """Record what a run is about to commit to the target; several operations may add to one batch."""

    component = int(Component.MIRROR)
    mirror_id: UInt
    batch_id: UInt
    databases: list[tuple[int, MirrorDatabaseRecord]]

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, record = _mirror(tables, self.mirror_id)
        if not max(record.batch_id + 1, record.last_batch_id) <= self.batch_id:
            raise StalePlan(
                "another run of the mirror finished first",
                hint="plan it again",
                batch_id=self.batch_id,
                name=record.name,
            )
        tables.mirror.put(key, replace(record, last_batch_id=self.batch_id))
        for db_id, row in self.databases:
            tables.mirror_batch.put(t.MIRROR_BATCH.key.pack(self.mirror_id, self.batch_id, db_id), row)


class AdoptMirrorBatch(Op, frozen=True, tag=214):
    """Adopt a batch that the target holds: its rows replace those of its databases, and earlier batches are dropped.

    A batch of `ADOPTED_ROWS` rows or more takes several operations; the last one advances the mirror.
    """

    component = int(Component.MIRROR)
    mirror_id: UInt
    batch_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, record = _mirror(tables, self.mirror_id)
        if self.batch_id > record.last_batch_id:
            raise InvalidInput("the mirror has not started this batch", batch_id=self.batch_id, name=record.name)
        if self.batch_id < record.batch_id:
            raise StalePlan("the target already has a later batch", hint="plan it again", batch_id=self.batch_id)
        prefix = t.MIRROR_BATCH.key.prefix(self.mirror_id)
        moved = 0
        for batch_key, row in list(islice(tables.mirror_batch.scan(prefix), ADOPTED_ROWS)):
            _, batch_id, db_id = t.MIRROR_BATCH.key.unpack(batch_key)
            if batch_id > self.batch_id:
                break
            tables.mirror_batch.delete(batch_key)
            moved += 1
            if batch_id == self.batch_id:
                here = t.MIRROR_DATABASE.key.pack(self.mirror_id, db_id)
                if row.is_gone:
                    tables.mirror_database.delete(here)
                else:
                    tables.mirror_database.put(here, row)
        if moved < ADOPTED_ROWS:
            tables.mirror.put(key, replace(record, batch_id=self.batch_id, synced_at_ms=at_ms))
