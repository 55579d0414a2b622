"""Operations on local tables: readers, replicas, metrics, answers to keyed batches, followed files, the location of
objects.

None of them enters the feed.
"""

import math
from itertools import islice

import msgspec
from msgspec.structs import replace

from quire.core.errors import AlreadyExists, InvalidInput, WrongKind
from quire.manifest import tables as t
from quire.manifest.metrics import observe
from quire.manifest.ops.base import Counter, Op, raise_watermark
from quire.manifest.overlay import Overlay
from quire.manifest.records import (
    DbKind,
    FloorRecord,
    FollowedFileRecord,
    MetaRecord,
    ReaderRecord,
    ReplicaPositionRecord,
    UInt,
)


class RecordMetric(Op, frozen=True, tag=90):
    """Merge observations into a rolling metric."""

    logged = False
    scope: UInt
    metric_kind: UInt
    values: list[float]

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if not self.values or not all(map(math.isfinite, self.values)):
            raise InvalidInput("metric observations must be finite", values=self.values[:5])
        observe(tables, self.scope, self.metric_kind, self.values, at_ms)


class PutReader(Op, frozen=True, tag=95):
    """Open or renew the lease of a remote reader; an empty `view` leaves the stored one."""

    logged = False
    db_id: UInt
    reader_id: UInt
    snapshot_lsn: UInt
    expires_at_ms: UInt
    tags: dict[str, str] = {}
    view: bytes = b""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key = t.SNAPSHOT_READERS.key.pack(self.db_id, self.reader_id)
        before = tables.snapshot_readers.get(key)
        # A renewal keeps the first time: what reached zero since then is kept for this reader (decision 014).
        opened = before.opened_at_ms if before else at_ms
        view = self.view or (before.view if before else b"")
        record = ReaderRecord(self.snapshot_lsn, opened, at_ms, self.expires_at_ms, self.tags, view)
        # Renewals and marks outlive the database: its tombstone is removed as soon as it has no artifacts of its own.
        if before is None and not record.marks_drop:
            tables.database(self.db_id)
        tables.snapshot_readers.put(key, record)
        raise_watermark(tables, Counter.READER, self.reader_id)


class DropReader(Op, frozen=True, tag=96):
    """Remove a remote reader; a missing one is ignored."""

    logged = False
    db_id: UInt
    reader_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.snapshot_readers.delete(t.SNAPSHOT_READERS.key.pack(self.db_id, self.reader_id))


class SetFloor(Op, frozen=True, tag=97):
    """Set the lowest version that readers of a database may request."""

    logged = False
    db_id: UInt
    min_snapshot_lsn: UInt
    writer_high_lsn: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key = t.SNAPSHOT_FLOOR.key.pack(self.db_id)
        tables.snapshot_floor.put(key, FloorRecord(self.min_snapshot_lsn, self.writer_high_lsn))


class PruneIdempotency(Op, frozen=True, tag=98):
    """Remove the expired ones among the first `limit` answers above a key."""

    logged = False
    limit: UInt
    after: bytes = b""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        # The rows looked at are limited, not those removed: a day's answers are millions, and all commits wait for this scan.
        for key, row in list(islice(tables.idempotency.scan(after=self.after), self.limit)):
            if row.expires_at_ms <= at_ms:
                tables.idempotency.delete(key)


class PutReplicaPosition(Op, frozen=True, tag=190):
    """Record the version behind a frame number given to an embedded replica; one number never stands for two versions."""

    logged = False
    db_id: UInt
    generation: UInt
    frame: UInt
    lsn: UInt
    range_start: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key = t.REPLICA_POSITIONS.key.pack(self.db_id, self.generation, self.frame)
        before = tables.replica_positions.get(key)
        first = tables.replica_positions.get(t.REPLICA_POSITIONS.key.pack(self.db_id, self.generation, 0))
        was_used = before is not None or (first is not None and self.frame < first.used_below)
        known = None if before is None else (before.lsn, before.range_start, before.used_below)
        if was_used and known != (self.lsn, self.range_start, 0):
            raise AlreadyExists("this frame number belongs to another version", db_id=self.db_id, frame=self.frame)
        tables.replica_positions.put(key, ReplicaPositionRecord(self.lsn, self.range_start, at_ms))


class DropReplicaPositions(Op, frozen=True, tag=191):
    """Remove frame numbers that no replica is expected to present again: (generation, frame) of each.

    A replica may present one in spite of that, and must not be taken for one that has another version. So the row of frame 0
    stays, and keeps numbers that may have been assigned from being assigned again.
    """

    logged = False
    db_id: UInt
    positions: list[tuple[int, int]]

    def apply(self, tables: Overlay, at_ms: int) -> None:
        used_below: dict[int, int] = {}
        for generation, frame in self.positions:
            key = t.REPLICA_POSITIONS.key.pack(self.db_id, generation, frame)
            if tables.replica_positions.get(key) is None:  # removed with its database
                continue
            used_below[generation] = max(used_below.get(generation, 0), frame + 1)
            if frame:
                tables.replica_positions.delete(key)
        for generation, below in used_below.items():
            key = t.REPLICA_POSITIONS.key.pack(self.db_id, generation, 0)
            first = tables.replica_positions.get(key) or ReplicaPositionRecord(0, 0, at_ms)
            tables.replica_positions.put(key, replace(first, used_below=max(first.used_below, below)))


class SetObjectPlace(Op, frozen=True, tag=120):
    """Set the location of the store's objects, in the notation of `quire.store.object_location`."""

    logged = False
    place: str

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.meta.put(t.META.key.pack(t.OBJECT_PLACE), MetaRecord(text=self.place))


class FollowSqliteFile(Op, frozen=True, tag=170):
    """Follow a SQLite file into a page database from now on; with an empty path, stop following."""

    logged = False
    db_id: UInt
    path: str = ""
    interval_ms: UInt = 0
    configured: bool = False

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key = t.FOLLOWED_FILES.key.pack(self.db_id)
        if not self.path:
            tables.followed_files.delete(key)
            return
        record = tables.writable(self.db_id)
        if record.kind is not DbKind.PAGES:
            raise WrongKind("not a page database", db_id=self.db_id, kind=record.kind.name.lower())
        tables.followed_files.put(key, FollowedFileRecord(self.path, self.interval_ms, at_ms, self.configured))


class RecordVerification(Op, frozen=True, tag=158):
    """Record what a verification of the whole store found in files that are not artifacts; it outlives the job's row."""

    logged = False
    problems: list[str]

    def apply(self, tables: Overlay, at_ms: int) -> None:
        text = msgspec.json.encode(self.problems).decode()
        tables.meta.put(t.META.key.pack(t.LAST_VERIFICATION), MetaRecord(at_ms, text))
