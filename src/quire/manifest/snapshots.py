"""Snapshots and forks: keep the current version of a database, branch it, compare two versions, show the lineage of forks.

Terms
  anchor   the version that a snapshot shows: an lsn, with the WAL segments that hold what no chunk holds yet
  view     leaves (the slot map) + pins (WAL segments up to the anchor): everything needed to read that version
  lineage  which database was forked from which, at which version

Publishing and forking are one transaction that copies keys and raises counts, whatever the size of the database (M7).
Dropping lowers counts; artifacts that reach zero are left to the database's delete job, enqueued in the same
transaction (M8).

Threads: any. Raises `UnknownSnapshot`, `NameTaken`, `DatabaseTombstoned`, `UnknownDatabase`, `StalePlan` (checkpoints
come faster than an anchor can be taken). With an anchor from the caller also `ArtifactGone` and `UnknownArtifact`: a
segment that it pins was truncated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from quire.core.barrier import changes
from quire.core.errors import ArtifactGone, InvalidInput, ManifestDamaged, StalePlan, UnknownArtifact, UnknownSnapshot
from quire.core.ids import ArtifactKey, Epoch
from quire.core.limits import CHUNK_BYTES
from quire.core.time_parsing import parse_version
from quire.durable.names import check_name
from quire.manifest import tables as t
from quire.manifest.differences import View, compare, read_leaves
from quire.manifest.ops.base import Counter
from quire.manifest.ops.databases import SetDbOptions
from quire.manifest.ops.refs import artifact_bytes
from quire.manifest.ops.snapshots import (
    DropSnapshot,
    ForkDb,
    PublishSnapshot,
    SoftDropSnapshot,
    UndropSnapshot,
    is_dropped,
)
from quire.manifest.ops.timeline import SKIPPED_SNAPSHOTS
from quire.manifest.reads import ReadTxn
from quire.manifest.records import (
    DROPPED_TAG,
    Compression,
    DbRecord,
    DbStatus,
    Pin,
    SnapshotKind,
    SnapshotRecord,
    WalState,
)
from quire.manifest.slots import artifacts

if TYPE_CHECKING:
    from quire.manifest.differences import SnapshotDiff
    from quire.manifest.guard import ManifestGuard
    from quire.manifest.store import ManifestStore

ANCHOR_TRIES = 8
"""How often an anchor is taken before giving up; each failure means that a checkpoint came in between."""

LIVE: int = 0
"""Stands for a snapshot id: the database as it is now."""

_IN_WAL = (WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY)

_OVERTAKEN = (StalePlan, ArtifactGone, UnknownArtifact)
"""Errors of an anchor that a checkpoint has overtaken: it went beyond the anchor, or its segments were truncated after it."""


class Anchor(msgspec.Struct, frozen=True):
    """The version to keep."""

    lsn: int
    segment_id: int = 0
    size_pages: int = 0
    pins: tuple[Pin, ...] = ()
    time_ms: int = 0


class ForkOptions(msgspec.Struct, frozen=True):
    """Options that a fork has from the beginning."""

    tags: dict[str, str] = {}
    compression: Compression | None = None
    """`None`: the same as the source."""


class SnapshotInfo(msgspec.Struct, frozen=True):
    """A snapshot, without its leaves."""

    db_id: int
    snapshot_id: int
    name: str
    kind: SnapshotKind
    created_at_ms: int
    generation: int
    anchor_lsn: int
    size_pages: int
    page_size: int
    leaves: int
    pins: int
    expires_at_ms: int
    anchor_time_ms: int
    tags: dict[str, str]


def before_rollback(lsn: int) -> str:
    """Return the name of the snapshot of a database as it was before a rollback.

    >>> before_rollback(4711)
    'before-rollback-4711'
    """
    return f"before-rollback-{lsn}"


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a rollback."""

    database: str
    db_id: int
    to_lsn: int
    """The version that the database now equals."""
    to_ms: int
    """When that version was committed."""
    lsn: int
    """The new version."""
    before_lsn: int
    """The version before the rollback."""
    snapshot: str
    """Name of the snapshot of the version before; empty if nothing had to be changed."""
    changed_pages: int
    changed_keys: int = 0
    """Number of changed keys of a key-value set."""


class SnapshotDetail(msgspec.Struct, frozen=True):
    """A snapshot, and the size of what it holds."""

    info: SnapshotInfo
    slots: int
    artifacts: int
    chunk_bytes: int
    """Bytes of the chunks and deltas that its chains name."""
    wal_bytes: int
    """Bytes of the WAL that it pins."""


class LineageNode(msgspec.Struct, frozen=True):
    """A database and its forks."""

    db_id: int
    name: str
    status: DbStatus | None
    """`None`: it is gone, and known only as the parent of a fork; or, if it has a name, its row is damaged."""
    parent_db_id: int
    parent_snapshot_id: int
    parent_generation: int
    parent_lsn: int
    created_at_ms: int
    forks: tuple[LineageNode, ...]


class Snapshots:
    """Snapshots and forks of one manifest: `manifest.snapshots`."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest
        self._lock = threading.Lock()
        self._next: dict[int, int] = {}

    # ── making and dropping ───────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def publish(
        self,
        db: int | str,
        name: str = "",
        *,
        anchor: Anchor | None = None,
        tags: dict[str, str] | None = None,
        expires_at_ms: int = 0,
    ) -> SnapshotInfo:
        """Keep the current version of the database (or the one at `anchor`), with or without a name. Durable on return."""
        db_id = self._db(db)
        for _ in range(ANCHOR_TRIES):
            taken = anchor or self._anchor(db_id)
            guard, snapshot_id = self._submit(db_id, name, taken, tags or {}, expires_at_ms)
            try:
                guard.result()
            except _OVERTAKEN:
                if anchor is not None:
                    raise
                continue
            return self.get(db_id, snapshot_id)
        raise StalePlan("checkpoints are running too often to take a snapshot", hint="try again", db_id=db_id)

    def _submit(
        self, db_id: int, name: str, anchor: Anchor, tags: dict[str, str], expires_at_ms: int
    ) -> tuple[ManifestGuard, int]:
        with self._manifest.read() as txn:
            record, newest = txn.database(db_id), txn.first_number()
        own = record.next_snapshot_id if record else 1
        if record is not None and record.snapshot_range != newest:  # the first one since a takeover (A10)
            own += SKIPPED_SNAPSHOTS
        with self._lock:  # ids must rise in queue order, or the later one would be refused
            snapshot_id = max(own, self._next.get(db_id, 1))
            op = PublishSnapshot(
                db_id,
                snapshot_id,
                SnapshotKind.NAMED if name else SnapshotKind.ANONYMOUS,
                name,
                anchor.lsn,
                anchor.segment_id,
                anchor.size_pages,
                list(anchor.pins),
                expires_at_ms,
                anchor.time_ms,
                tags,
            )
            guard = self._manifest.submit([op])
            self._next[db_id] = snapshot_id + 1
        return guard, snapshot_id

    @changes
    def drop(self, db: int | str, snapshot: int | str) -> SnapshotInfo:
        """Drop a snapshot, and have what only it held deleted; return the snapshot as it was."""
        info = self.get(db, snapshot)
        # Before the drop, which removes the row that names them.
        origins = self.origins(info.db_id, [info.snapshot_id])
        self._manifest.submit(
            [DropSnapshot(info.db_id, info.snapshot_id), *self._manifest.jobs.deletions(origins)]
        ).result()
        return info

    @changes
    def soft_drop(self, db: int | str, snapshot: int | str, *, until_ms: int) -> SnapshotInfo:
        """Drop a snapshot so that `undrop` can bring it back until `until_ms`; return the snapshot as it was.

        A snapshot with an expiry is dropped permanently.
        """
        info = self.get(db, snapshot)
        if is_dropped(info):
            hint = "`quire snapshot drop --now` deletes it permanently"
            raise UnknownSnapshot("the snapshot has already been dropped", hint=hint, snapshot_id=info.snapshot_id)
        if info.expires_at_ms:
            return self.drop(info.db_id, info.snapshot_id)
        self._manifest.submit([SoftDropSnapshot(info.db_id, info.snapshot_id, until_ms)]).result()
        return info

    @changes
    def undrop(self, db: int | str, snapshot: int | str, *, new_name: str = "") -> SnapshotInfo:
        """Undrop a snapshot, the last with this name or by its id, under its former name or another."""
        with self._manifest.read() as txn:
            db_id, _ = txn.require_database(db)
            dropped = [info for info in snapshots_of(txn, db_id) if is_dropped(info)]
        for info in reversed(dropped):
            if snapshot in (info.snapshot_id, f"#{info.snapshot_id}", info.tags[DROPPED_TAG] or None):
                self._manifest.submit([UndropSnapshot(db_id, info.snapshot_id, new_name)]).result()
                return self.get(db_id, info.snapshot_id)
        hint = "`quire snapshot ls` lists those that can be restored"
        raise UnknownSnapshot("no dropped snapshot has this name", hint=hint, snapshot=str(snapshot))

    def origins(self, db_id: int, snapshot_ids: Iterable[int]) -> set[int]:
        """Return the databases that made what these snapshots hold: dropping the snapshots gives their delete jobs work."""
        origins = {db_id}
        with self._manifest.read() as txn:
            for snapshot_id in snapshot_ids:
                if (record := txn.snapshot(db_id, snapshot_id)) is not None:
                    origins.update(origin for _, origin, _ in record.leaves)
                    origins.update(pin.origin_db_id for pin in record.pins)
        return origins

    @changes
    def fork(
        self,
        db: int | str,
        new_name: str,
        *,
        at: int | str | None = None,
        anchor: Anchor | None = None,
        options: ForkOptions | None = None,
    ) -> int:
        """Create a database that begins as `db` is now, or was at snapshot `at`; return its id. Shares everything until
        it diverges.

        It has the tags of `db`; those of `options` are added, or replace them.
        """
        source, options = self._db(db), options or ForkOptions()
        with self._manifest.read() as txn:
            record = txn.database(source)
        tags = {**(record.tags if record is not None else {}), **options.tags}
        snapshot_id = self.get(source, at).snapshot_id if at is not None else LIVE
        if snapshot_id and anchor is not None:
            raise InvalidInput("a fork starts at a snapshot or at an anchor, not both", snapshot=at)
        for _ in range(ANCHOR_TRIES):
            taken = anchor or (Anchor(0) if snapshot_id else self._anchor(source))
            db_id = self._manifest.allocate(Counter.DB)
            op = ForkDb(
                db_id,
                source,
                new_name,
                snapshot_id,
                taken.lsn,
                taken.segment_id,
                taken.size_pages,
                list(taken.pins),
                taken.time_ms,
            )
            is_plain = not tags and options.compression is None
            own = [] if is_plain else [SetDbOptions(db_id, tags or None, options.compression)]
            try:
                self._manifest.submit([op, *own]).result()
            except _OVERTAKEN:
                if anchor is not None:
                    raise
                continue
            return db_id
        raise StalePlan("checkpoints are running too often to create a fork", hint="try again", db_id=source)

    def _anchor(self, db_id: int) -> Anchor:
        with self._manifest.read() as txn:
            return published_anchor(txn, db_id)

    # ── queries ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def of(self, db: int | str) -> list[SnapshotInfo]:
        """Return the snapshots of a database, oldest first."""
        with self._manifest.read() as txn:
            db_id, _ = txn.require_database(db)
            return snapshots_of(txn, db_id)

    def get(self, db: int | str, snapshot: int | str) -> SnapshotInfo:
        """Return a snapshot by id or by name."""
        with self._manifest.read() as txn:
            db_id, _ = txn.require_database(db)
            return _info(db_id, *txn.require_snapshot(db_id, snapshot))

    def find(self, db: int | str, text: str) -> SnapshotInfo | Epoch | datetime:
        """Return the version that a text names: a snapshot, else an epoch (3:4711) or a moment (`core/time_parsing.py`)."""
        try:
            check_name("snapshot", text.replace("/", "-"))  # the time zone of a moment may have a slash
            return self.get(db, text)
        except UnknownSnapshot as unknown:
            return parse_version(text, now_ms=self._manifest.clock.now_ms(), unknown=unknown)

    def describe(self, db: int | str, snapshot: int | str) -> SnapshotDetail:
        """Return a snapshot and the sizes of what it holds."""
        with self._manifest.read() as txn:
            db_id, _ = txn.require_database(db)
            snapshot_id, record = txn.require_snapshot(db_id, snapshot)
            slots, named = 0, set[ArtifactKey]()
            for number, leaf in read_leaves(txn, record.leaves):
                slots += len(leaf)
                named.update(artifacts(leaf, number))
            chunk_bytes = sum(artifact_bytes(txn.artifact(key)) for key in named)
        wal_bytes = sum(pin.used_bytes for pin in record.pins)
        return SnapshotDetail(_info(db_id, snapshot_id, record), slots, len(named), chunk_bytes, wal_bytes)

    def diff(
        self, db: int | str, before: int | str | None, after: int | str | None = None, *, other: int | str | None = None
    ) -> SnapshotDiff:
        """Return the differences from version `before` of `db` to `after` (of `other`, if that is a fork). `None` means now."""
        with self._manifest.read() as txn:
            first = _view(txn, db, before)
            return compare(txn, first, _view(txn, db if other is None else other, after))

    def lineage(self) -> list[LineageNode]:
        """Return every database as a tree of forks; roots first, oldest first."""
        with self._manifest.read() as txn:
            return forest(dict(txn.databases()), txn.damaged_databases())

    def _db(self, db: int | str) -> int:
        if isinstance(db, int):
            return db
        with self._manifest.read() as txn:
            return txn.database_id(db)


def with_ancestors(
    txn: ReadTxn, databases: Iterable[tuple[int, DbRecord]]
) -> tuple[dict[int, DbRecord], dict[int, str]]:
    """Return these databases and their ancestors by id, and the names of ancestors whose rows are damaged.

    Reads one row for each: the cost depends on the number of databases requested and the depth of their forks, not on
    the size of the store.
    """
    records, damaged = dict(databases), dict[int, str]()
    todo = [record.parent_db_id for record in records.values()]
    for db_id in todo:  # grows while it is walked
        if not db_id or db_id in records or db_id in damaged:
            continue
        try:
            record = txn.database(db_id)
        except ManifestDamaged as error:
            txn.report_damage(db_id, error)
            damaged[db_id] = txn.indexed_name(db_id)
            continue
        if record is not None:
            records[db_id] = record
            todo.append(record.parent_db_id)
    return dict(sorted(records.items())), damaged


def forest(records: Mapping[int, DbRecord], damaged: Mapping[int, str]) -> list[LineageNode]:
    """Return the trees of forks: roots first, oldest first; a parent without a record is a root, after the others.

    No recursion: forks of forks may be many levels deep.
    """
    children: dict[int, list[int]] = {}
    for db_id, record in records.items():
        children.setdefault(record.parent_db_id, []).append(db_id)
    roots = [*children.get(0, ()), *sorted(parent for parent in children if parent and parent not in records)]
    order = list(roots)
    for db_id in order:  # grows while it is walked: parents before their forks
        order += sorted(children.get(db_id, ()))
    nodes: dict[int, LineageNode] = {}
    for db_id in reversed(order):
        forks = tuple(nodes[child] for child in sorted(children.get(db_id, ())))
        nodes[db_id] = _node(db_id, records.get(db_id), damaged.get(db_id, ""), forks)
    return [nodes[db_id] for db_id in roots]


def _node(db_id: int, record: DbRecord | None, damaged: str, forks: tuple[LineageNode, ...]) -> LineageNode:
    if record is None:
        return LineageNode(db_id, damaged, None, 0, 0, 0, 0, 0, forks)
    return LineageNode(
        db_id,
        record.title,  # of one that can be brought back, `name` and `status` are hidden ones
        DbStatus.TOMBSTONED if record.is_dropped else record.status,
        record.parent_db_id,
        record.parent_snapshot_id,
        record.parent_generation,
        record.parent_lsn,
        record.created_at_ms,
        forks,
    )


def published_anchor(txn: ReadTxn, db_id: int) -> Anchor:
    """Return the newest version of which every segment is sealed."""
    wal = txn.wal_state(db_id)
    if wal is None:
        return Anchor(0)  # the op raises for a database that does not exist
    rows = [
        (segment_id, row)
        for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id)
        if row.state in _IN_WAL and row.last_lsn > wal.checkpointed_lsn
    ]
    pins = tuple(Pin(row.origin_db_id, segment_id, row.last_lsn, row.used_bytes) for segment_id, row in rows)
    lsn = max((pin.upto_lsn for pin in pins), default=wal.checkpointed_lsn)
    # The size at the anchor, which may be older than the last published version.
    size_pages = max(rows, key=lambda item: item[1].last_lsn)[1].size_pages if rows else 0
    # Without pins the newest segment is absorbed in chunks; a fork's numbering continues after it all the same (P12).
    segment_id = max((pin.segment_id for pin in pins), default=wal.last_sealed_segment)
    time_ms = wal.last_commit_ms if lsn == wal.last_applied_lsn else 0
    return Anchor(lsn, segment_id, size_pages or wal.size_pages, pins, time_ms)


def snapshots_of(txn: ReadTxn, db_id: int) -> list[SnapshotInfo]:
    """Return the snapshots of a database, oldest first."""
    return [_info(db_id, key[1], record) for key, record in txn.scan(t.SNAPSHOT_INDEX, db_id)]


def _info(db_id: int, snapshot_id: int, record: SnapshotRecord) -> SnapshotInfo:
    return SnapshotInfo(
        db_id,
        snapshot_id,
        record.name,
        record.kind,
        record.created_at_ms,
        record.generation,
        record.anchor_lsn,
        record.size_pages,
        record.page_size,
        len(record.leaves),
        len(record.pins),
        record.expires_at_ms,
        record.anchor_time_ms,
        record.tags,
    )


def _view(txn: ReadTxn, db: int | str, snapshot: int | str | None) -> View:
    db_id, record = txn.require_database(db)
    pages = record.pages_per_chunk or (CHUNK_BYTES // record.page_size if record.page_size else 0)
    if snapshot is None:
        leaves = {key[1]: (leaf.origin_db_id, leaf.generation) for key, leaf in txn.scan(t.LIVE_LEAF, db_id)}
        anchor = published_anchor(txn, db_id)
        return View(leaves, anchor.pins, pages, anchor.size_pages)
    _, kept = txn.require_snapshot(db_id, snapshot)
    held = {number: (origin, gen) for number, origin, gen in kept.leaves}
    return View(held, tuple(kept.pins), pages, kept.size_pages)
