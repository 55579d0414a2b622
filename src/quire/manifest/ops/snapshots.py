"""Operations on snapshots and forks: views that share all data and copy only keys (M7, P12).

A snapshot holds one reference on each leaf of its database and one on each pinned WAL segment; so does a fork.
Publishing and forking read the live leaves in the transaction itself, so the op stays small and is never stale. A fork
continues its parent's numbering (lsn, segment, generation), so one name never has two meanings along a line.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.core.errors import (
    AlreadyExists,
    IllegalTransition,
    InvalidInput,
    NameTaken,
    StalePlan,
    UnknownArtifact,
    UnknownSnapshot,
    WrongKind,
)
from quire.core.ids import ArtifactKind, some_u32
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.metrics import observe_snapshots
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.ops.databases import claim_name
from quire.manifest.ops.refs import leaf_count_key, release, retain, retain_namespace, wal_count_key
from quire.manifest.ops.wal import wal_state_of
from quire.manifest.overlay import Overlay
from quire.manifest.records import (
    DROPPED_TAG,
    AuditAction,
    DbKind,
    DbRecord,
    DbStatus,
    IndexRecord,
    LeafRef,
    Pin,
    RefcountRecord,
    SnapshotKind,
    SnapshotRecord,
    UInt,
    WalRecord,
    WalState,
    WalStateRecord,
)

if TYPE_CHECKING:
    from quire.manifest.snapshots import SnapshotInfo


def live_leaves(tables: Overlay, db_id: int) -> list[tuple[int, int, int]]:
    """Return (leaf, origin, generation) of every leaf that a database holds now."""
    unpack = t.LIVE_LEAF.key.fast_unpack
    return [
        (unpack(key)[1], leaf.origin_db_id, leaf.generation)
        for key, leaf in tables.live_leaf.scan(t.LIVE_LEAF.key.prefix(db_id))
    ]


def hold_view(tables: Overlay, leaves: list[tuple[int, int, int]], pins: list[Pin]) -> None:
    """Take the references of a snapshot or fork."""
    counts, key_of, kind = tables.gc_refcounts, t.GC_REFCOUNTS.key.fast, int(ArtifactKind.LEAF)
    for leaf, origin, generation in leaves:
        key = key_of(origin, kind, leaf, generation, 0)
        row = counts.get(key)
        if row is None or not row.in_use:
            retain(tables, key)  # adds the first reference, or raises
        else:  # `retain` inlined: a snapshot of 1 TiB does little else
            counts.put(key, RefcountRecord(row.in_use + 1, row.pending_upload))
    if len({pin.segment_id for pin in pins}) < len(pins):
        # Segment numbers continue along a line, and a fork tracks each segment with one row: one reference.
        raise InvalidInput("a view may pin each segment only once", segments=[pin.segment_id for pin in pins])
    for pin in pins:
        segment = tables.wal_catalog.get(t.WAL_CATALOG.key.pack(pin.origin_db_id, pin.segment_id))
        if segment is None or segment.origin_db_id != pin.origin_db_id:
            raise UnknownArtifact("a pinned WAL segment is not in the catalog of its origin", pin=pin)
        retain(tables, wal_count_key(pin.origin_db_id, pin.segment_id))


def refuse_overtaken(wal: WalStateRecord, db_id: int, anchor_lsn: int) -> None:
    """Refuse an anchor that a checkpoint has overtaken meanwhile: the live leaves would hold more than the anchor (P13)."""
    if wal.checkpointed_lsn > anchor_lsn:
        raise StalePlan(
            "a checkpoint has passed the anchor of this snapshot or fork",
            hint="take a new anchor, at the checkpointed lsn or later",
            db_id=db_id,
            anchor_lsn=anchor_lsn,
            checkpointed_lsn=wal.checkpointed_lsn,
        )


class PublishSnapshot(Op, frozen=True, tag=50):
    """Keep the live set of a database under an id and, for a named snapshot, a name."""

    component = int(Component.SNAPSHOT)
    db_id: UInt
    snapshot_id: UInt
    kind: SnapshotKind
    name: str = ""
    anchor_lsn: UInt = 0
    anchor_segment_id: UInt = 0
    size_pages: UInt = 0
    pins: list[Pin] = []
    expires_at_ms: UInt = 0
    anchor_time_ms: UInt = 0
    tags: dict[str, str] = {}

    def apply(self, tables: Overlay, at_ms: int) -> None:
        db = tables.writable(self.db_id, even="read_only")
        some_u32("snapshot_id", self.snapshot_id)
        key = t.SNAPSHOT_INDEX.key.pack(self.db_id, self.snapshot_id)
        if self.snapshot_id < db.next_snapshot_id:
            raise AlreadyExists("snapshot ids are never reused", snapshot_id=self.snapshot_id, next=db.next_snapshot_id)
        if self.kind is SnapshotKind.NAMED:
            _claim_name(tables, self.db_id, self.snapshot_id, self.name)
        _, wal = wal_state_of(tables, self.db_id, 0)
        refuse_overtaken(wal, self.db_id, self.anchor_lsn)
        leaves = live_leaves(tables, self.db_id)
        hold_view(tables, leaves, self.pins)
        record = SnapshotRecord(
            name=self.name,
            kind=self.kind,
            created_at_ms=at_ms,
            generation=wal.last_checkpoint_generation,
            anchor_lsn=self.anchor_lsn,
            anchor_segment_id=self.anchor_segment_id,
            size_pages=self.size_pages,
            page_size=db.page_size,
            leaves=leaves,
            pins=self.pins,
            expires_at_ms=self.expires_at_ms,
            anchor_time_ms=self.anchor_time_ms or at_ms,
            tags=self.tags,
        )
        tables.snapshot_index.put(key, record)
        observe_snapshots(tables, self.db_id, +1, at_ms)
        tables.notes.append((self.component, self.db_id, AuditAction.SNAPSHOT_CREATED, self.name, self.snapshot_id, 0))
        newest = max([gap.first for gap in tables.gaps()], default=0)
        tables.put_db(self.db_id, replace(db, next_snapshot_id=self.snapshot_id + 1, snapshot_range=newest))


class DropSnapshot(Op, frozen=True, tag=51):
    """Remove a snapshot and release its references.

    With `expected_expires_at_ms`, it is refused if the expiry has changed since: by an undrop, a drop that can be undone,
    or an extension for a reader.
    """

    component = int(Component.SNAPSHOT)
    db_id: UInt
    snapshot_id: UInt
    expected_expires_at_ms: UInt | None = None

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.database(self.db_id)
        key, record = _snapshot(tables, self.db_id, self.snapshot_id)
        if self.expected_expires_at_ms not in (None, record.expires_at_ms):
            raise StalePlan(
                "the snapshot was dropped, undropped or extended after its drop was planned",
                hint="try again",
                db_id=self.db_id,
                snapshot_id=self.snapshot_id,
                expires_at_ms=record.expires_at_ms,
                expected=self.expected_expires_at_ms,
            )
        for leaf, origin, generation in record.leaves:
            release(tables, leaf_count_key(origin, leaf, generation), at_ms)
        for pin in record.pins:
            release(tables, wal_count_key(pin.origin_db_id, pin.segment_id), at_ms)
        _free_name(tables, self.db_id, record)
        tables.snapshot_index.delete(key)
        observe_snapshots(tables, self.db_id, -1, at_ms)
        tables.notes.append(
            (self.component, self.db_id, AuditAction.SNAPSHOT_DROPPED, record.name, self.snapshot_id, 0)
        )


class SoftDropSnapshot(Op, frozen=True, tag=53):
    """Drop a snapshot so that it can be undropped.

    Its name is free, and it keeps its references until it expires. `UndropSnapshot` brings it back, `DropSnapshot`
    drops it permanently.
    """

    component = int(Component.SNAPSHOT)
    db_id: UInt
    snapshot_id: UInt
    expires_at_ms: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        key, record = _snapshot(tables, self.db_id, self.snapshot_id)
        if record.expires_at_ms or not self.expires_at_ms:
            raise IllegalTransition(
                "the snapshot expires on its own",
                db_id=self.db_id,
                snapshot_id=self.snapshot_id,
                hint="drop it permanently",
            )
        _free_name(tables, self.db_id, record)
        tags = {**record.tags, DROPPED_TAG: record.name}
        hidden = replace(record, name="", kind=SnapshotKind.ANONYMOUS, expires_at_ms=self.expires_at_ms, tags=tags)
        tables.snapshot_index.put(key, hidden)
        tables.notes.append(
            (self.component, self.db_id, AuditAction.SNAPSHOT_DROPPED, record.name, self.snapshot_id, 0)
        )


class UndropSnapshot(Op, frozen=True, tag=54):
    """Undrop a snapshot, under its former name or another."""

    component = int(Component.SNAPSHOT)
    db_id: UInt
    snapshot_id: UInt
    name: str = ""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.db_id, even="read_only")
        key, record = _snapshot(tables, self.db_id, self.snapshot_id)
        if not is_dropped(record):
            raise IllegalTransition("the snapshot was not dropped", db_id=self.db_id, snapshot_id=self.snapshot_id)
        tags = dict(record.tags)
        name = self.name or tags[DROPPED_TAG]
        del tags[DROPPED_TAG]
        if name:
            _claim_name(tables, self.db_id, self.snapshot_id, name)
        kind = SnapshotKind.NAMED if name else SnapshotKind.ANONYMOUS
        tables.snapshot_index.put(key, replace(record, name=name, kind=kind, expires_at_ms=0, tags=tags))
        tables.notes.append((self.component, self.db_id, AuditAction.SNAPSHOT_UNDROPPED, name, self.snapshot_id, 0))


def is_dropped(snapshot: "SnapshotRecord | SnapshotInfo") -> bool:
    """Return whether a snapshot was dropped and can be undropped."""
    return snapshot.kind is SnapshotKind.ANONYMOUS and snapshot.expires_at_ms > 0 and DROPPED_TAG in snapshot.tags


def _snapshot(tables: Overlay, db_id: int, snapshot_id: int) -> tuple[bytes, SnapshotRecord]:
    key = t.SNAPSHOT_INDEX.key.pack(db_id, snapshot_id)
    record = tables.snapshot_index.get(key)
    if record is None:
        hint = "`quire snapshot ls` lists them"
        raise UnknownSnapshot(
            "the database has no snapshot with this id", hint=hint, db_id=db_id, snapshot_id=snapshot_id
        )
    return key, record


def _claim_name(tables: Overlay, db_id: int, snapshot_id: int, name: str) -> None:
    check_name("snapshot", name)
    key = t.SNAPSHOT_NAMES.key.pack(db_id, name)
    if (holder := tables.snapshot_names.get(key)) is not None:
        hint = "choose another name, or drop that snapshot"
        raise NameTaken(
            "the database already has a snapshot with this name",
            hint=hint,
            name=name,
            snapshot_id=holder.value,
            db_id=db_id,
        )
    tables.snapshot_names.put(key, IndexRecord(snapshot_id))


def _free_name(tables: Overlay, db_id: int, record: SnapshotRecord) -> None:
    if record.kind is SnapshotKind.NAMED:
        tables.snapshot_names.delete(t.SNAPSHOT_NAMES.key.pack(db_id, record.name))


class ExtendSnapshot(Op, frozen=True, tag=151):
    """Postpone the expiry of a snapshot whose reader still reads it; never moves it earlier."""

    component = int(Component.SNAPSHOT)
    db_id: UInt
    snapshot_id: UInt
    expires_at_ms: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, record = _snapshot(tables, self.db_id, self.snapshot_id)
        if record.expires_at_ms:
            later = max(record.expires_at_ms, self.expires_at_ms)
            tables.snapshot_index.put(key, replace(record, expires_at_ms=later))


class ForkDb(Op, frozen=True, tag=52):
    """Add a database that begins as another one is now (`snapshot_id` 0) or was at a snapshot.

    `pins` are the WAL segments that a live fork point needs; a snapshot has its own.
    """

    component = int(Component.SNAPSHOT)
    db_id: UInt
    source_db_id: UInt
    name: str
    snapshot_id: UInt = 0
    anchor_lsn: UInt = 0
    anchor_segment_id: UInt = 0
    size_pages: UInt = 0
    pins: list[Pin] = []
    anchor_time_ms: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        source = tables.writable(self.source_db_id, even="read_only")
        if source.kind is not DbKind.PAGES:
            raise WrongKind(
                "only page databases can be forked in the manifest",
                hint="streams cannot be forked; key-value databases have their own fork",
                db_id=self.source_db_id,
                kind=source.kind.name,
            )
        some_u32("db_id", self.db_id)
        key = t.DB.key.pack(self.db_id)
        if tables.db.has(key):
            raise AlreadyExists("a database with this id already exists", db_id=self.db_id)
        claim_name(tables, self.name, self.db_id)
        view = self._fork_point(tables, source)
        hold_view(tables, view.leaves, view.pins)
        live_key = t.LIVE_LEAF.key.fast
        for leaf, origin, generation in view.leaves:
            tables.live_leaf.put(live_key(self.db_id, leaf), LeafRef(origin, generation))
        self._inherit_wal(tables, view, at_ms)
        if source.namespace_id:
            retain_namespace(tables, source.namespace_id)
        tables.put_db(
            self.db_id,
            replace(
                source,
                name=self.name,
                created_at_ms=at_ms,
                status=DbStatus.ACTIVE,
                parent_db_id=self.source_db_id,
                parent_snapshot_id=self.snapshot_id,
                parent_generation=view.generation,
                parent_lsn=view.anchor_lsn,
                next_snapshot_id=1,
                tags={},
                # The source may have been dropped after the fork was planned; the fork must not inherit that.
                dropped_at_ms=0,
                former_name="",
                former_status=DbStatus.ACTIVE,
            ),
        )
        raise_watermark(tables, Counter.DB, self.db_id)
        forked, origin = AuditAction.FORKED, AuditAction.FORKED_FROM
        tables.notes.append((self.component, self.source_db_id, forked, self.name, self.db_id, 0))
        tables.notes.append((self.component, self.db_id, origin, source.name, self.source_db_id, 0))

    def _fork_point(self, tables: Overlay, source: DbRecord) -> SnapshotRecord:
        if self.snapshot_id:
            return _snapshot(tables, self.source_db_id, self.snapshot_id)[1]
        _, wal = wal_state_of(tables, self.source_db_id, 0)
        refuse_overtaken(wal, self.source_db_id, self.anchor_lsn)
        return SnapshotRecord(
            name="",
            kind=SnapshotKind.ANONYMOUS,
            created_at_ms=0,
            generation=wal.last_checkpoint_generation,
            anchor_lsn=self.anchor_lsn,
            anchor_segment_id=self.anchor_segment_id,
            size_pages=self.size_pages,
            page_size=source.page_size,
            leaves=live_leaves(tables, self.source_db_id),
            pins=self.pins,
            anchor_time_ms=self.anchor_time_ms,
        )

    def _inherit_wal(self, tables: Overlay, view: SnapshotRecord, at_ms: int) -> None:
        newest = view.anchor_segment_id
        for pin in view.pins:
            origin = tables.wal_catalog.get(t.WAL_CATALOG.key.pack(pin.origin_db_id, pin.segment_id))
            assert origin is not None, "hold_view has just seen this row"
            newest = max(newest, pin.segment_id)
            inherited = WalRecord(
                origin_db_id=pin.origin_db_id,
                state=WalState.INDEXED,
                format=origin.format,
                created_at_ms=origin.created_at_ms,
                sealed_at_ms=origin.sealed_at_ms,
                first_lsn=origin.first_lsn,
                last_lsn=pin.upto_lsn,
                used_bytes=pin.used_bytes,
                frame_count=origin.frame_count,
                size_pages=view.size_pages,
            )
            tables.wal_catalog.put(t.WAL_CATALOG.key.pack(self.db_id, pin.segment_id), inherited)
        tables.wal_state.put(
            t.WAL_STATE.key.pack(self.db_id, 0),
            WalStateRecord(
                next_segment_id=newest + 1,
                lsn_reserved=view.anchor_lsn,
                last_sealed_segment=newest,
                last_applied_lsn=view.anchor_lsn,
                indexed_upto_lsn=view.anchor_lsn,
                # With pins, 0: the fork's first checkpoint takes the segments above this mark, inherited ones included
                # (P9, P12).
                checkpointed_lsn=0 if view.pins else view.anchor_lsn,
                last_checkpoint_generation=view.generation,
                size_pages=view.size_pages,
                # If unknown, the time of the fork: a time too late hides a version, one too early gives a wrong version.
                last_commit_ms=view.anchor_time_ms or at_ms,
            ),
        )
