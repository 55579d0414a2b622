"""The tables as the writer sees them: committed rows under a layer of pending ones.

Terms
  pending   rows written by the batches of the current group, not yet in LMDB; `None` marks a deletion
  inserted  pending rows that their op claims are new
  undo      the pending rows as they were before the current batch
  kept      decoded rows of small, hot tables that stay in memory across groups
  encoded   a pending row that is already `bytes`, without its checksum: numpy makes thousands of rows at once

A batch reads its own writes and those of the batches before it. A batch that fails leaves no trace. Ops are pure, so
nothing is recorded for that before the first failure of a group. Then the pending rows are dropped and the good batches
are applied again, from then on with an undo log (`tracking`). Groups without failures pay nothing, and the cost of
failures does not grow with their number (docs/decisions/001-write-overlay.md).

LMDB is not written before `flush`, so cursors opened by `scan` stay valid while an op writes.

Threads: owned by the writer thread (or by the thread that replays a feed), never shared.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, Final, Generic, Literal

from quire.core.errors import DatabaseTombstoned, ReadOnly, UnknownDatabase
from quire.core.ids import ArtifactKey
from quire.core.timeline import Gap
from quire.manifest import tables as t
from quire.manifest.codec import R
from quire.manifest.keys import prefix_end
from quire.manifest.records import AuditAction, AuditRecord, DbRecord, DbStatus

KEPT_ROWS_MAX = 65_536
"""Maximum number of kept rows per table; a full one is emptied. Bounds the writer's memory at a few tens of MB."""

OLDEST_SEQUENCE = t.META.key.pack("oldest_sequence")

TRIM_ROWS_PER_GROUP = 4_096
"""Maximum number of rows of the change log's tail that one transaction removes: a millisecond or two."""

KEPT_CHANGES = 1 << 17
"""Changes that trimming keeps at most for the next open: a minute of 2,000 commits a second."""


def trimmed_below(oldest: int, checked_sequence: int | None, head: int) -> int:
    """Return the sequence below which the rows of the change log's tail may be removed.

    The next open needs the changes after the checked point, to know what they were about (changed_rows.py).
    """
    if checked_sequence is None:
        return oldest
    # Without upkeep no later point is recorded, and the tail must not grow forever.
    return min(oldest, max(checked_sequence + 1, head - KEPT_CHANGES))


_ABSENT: Final = object()

_key_of = itemgetter(0)

Note = tuple[int, int, AuditAction, str, int, int]
"""(component, db_id, action, subject, number, size in bytes): an audit record before its generation is known."""


TableRows = tuple[str, list[tuple[bytes, bytes]], list[bytes]]
"""(table, rows put, keys deleted): the effect of a transaction on one table."""


class KeysTaken(Exception):  # never leaves the manifest: the writer retries with a strict pass
    """An optimistic insert found an existing row."""


class TableView(Generic[R]):
    """One table of the overlay. Keys are packed bytes: callers pack once and use the key several times."""

    __slots__ = (
        "_decode",
        "_decode_plain",
        "_deleted",
        "_handle",
        "_kept",
        "_ordered",
        "_overlay",
        "_scanned",
        "insert",
        "inserted",
        "pending",
        "put",
        "table",
    )

    def __init__(self, table: t.Table[R], handle: Any, overlay: Overlay, *, keep: bool) -> None:
        self.table = table
        self.pending: dict[bytes, R | None] = {}
        self.inserted: dict[bytes, R] = {}
        self.put: Callable[[bytes, R], None] = self.pending.__setitem__
        """Insert or replace the row. A bound C method unless the overlay is tracking."""
        self.insert: Callable[[bytes, R], R | None] = self._insert_optimistic
        """Put a row that should be new; return the existing row, if there is one.

        It assumes that a key is new and checks only pending rows. If the key exists, LMDB reports it at `flush`
        (`KeysTaken`), and the group is done again with `strict` lookups. So inserting a million rows does not cost a
        million reads.
        """
        self._decode = table.rows.decode
        self._decode_plain = table.codec.decode
        self._deleted = False
        self._handle = handle
        self._scanned = (0, 0)
        """Numbers of pending and inserted rows at the last scan. Keys are only added until `forget_order`, so equal numbers
        mean equal keys."""
        self._ordered: list[bytes] | None = None
        """The keys of those rows in order; set by the second scan that finds the same numbers."""
        self._kept: dict[bytes, R] | None = {} if keep else None
        self._overlay = overlay

    def get(self, key: bytes) -> R | None:
        """Return the row, or `None`."""
        row: Any = self.pending.get(key, _ABSENT)
        if row is not _ABSENT:
            return self._decode_plain(row) if type(row) is bytes else row
        if key in self.inserted:
            return self.inserted[key]
        kept = self._kept
        if kept is not None and key in kept:
            return kept[key]
        raw = self._overlay.txn.get(key, db=self._handle)
        if raw is None:
            return None
        record = self._decode(key, raw)
        if kept is not None:
            if len(kept) >= KEPT_ROWS_MAX:
                kept.clear()
            # Safe even if the group is undone: LMDB has no row of this group before `flush`, so this one is committed.
            kept[key] = record
        return record

    def has(self, key: bytes) -> bool:
        """Return whether the row exists, without decoding it."""
        row: Any = self.pending.get(key, _ABSENT)
        if row is not _ABSENT:
            return row is not None
        if key in self.inserted or (self._kept is not None and key in self._kept):
            return True
        return self._overlay.txn.get(key, db=self._handle) is not None

    def put_encoded(self, rows: dict[bytes, bytes]) -> None:
        """Insert or replace rows of a packed table that are already encoded."""
        assert self.table.codec.packed is not None, "bytes stand for a record of a packed table"
        assert self._kept is None, "kept rows are decoded"
        encoded: dict[bytes, Any] = rows
        if self._overlay.tracking:
            for key, row in encoded.items():
                self.put(key, row)
        else:
            self.pending.update(encoded)

    def get_encoded(self, keys: list[bytes]) -> dict[bytes, bytes]:
        """Return the rows that exist, as plain bytes: in one call, 0.7 µs each."""
        with self._overlay.txn.cursor(db=self._handle) as cursor:
            stored = cursor.getmulti(keys)
        present = [key for key, _ in stored]
        rows = dict(zip(present, self.table.rows.opened_all(present, [raw for _, raw in stored]), strict=True))
        encode = self.table.codec.encode
        # `pending` last: it overrides `inserted`, as in `get`.
        for waiting in (self.inserted, self.pending):
            for key in keys if waiting else ():
                record: Any = waiting.get(key, _ABSENT)
                if record is None:
                    rows.pop(key, None)
                elif record is not _ABSENT:
                    rows[key] = record if type(record) is bytes else encode(record)
        return rows

    def _insert_optimistic(self, key: bytes, record: R) -> R | None:
        # It may be a deletion, after which the key is free again.
        if key in self.pending:
            return self._insert_careful(key, record)
        # Not `setdefault`: a batch may insert the same object twice, and only the first is new.
        if key in self.inserted:
            return self.inserted[key]
        self.inserted[key] = record
        return None

    def _insert_careful(self, key: bytes, record: R) -> R | None:
        overlay = self._overlay
        if overlay.strict or key in self.pending or key in self.inserted:
            if (before := self.get(key)) is None:
                self.put(key, record)
            return before
        overlay.undo.append((self.inserted, key, _ABSENT))
        self.inserted[key] = record
        return None

    def delete(self, key: bytes) -> None:
        """Remove the row; a missing one is ignored."""
        self.put(key, None)  # type: ignore[arg-type]  # None marks a deletion
        self._deleted = True

    def switch(self, *, tracking: bool, strict: bool) -> None:
        """Select whether to write with an undo log, and whether to look up keys before inserting."""
        self.put = self._put_tracked if tracking else self.pending.__setitem__
        self.insert = self._insert_careful if tracking or strict else self._insert_optimistic

    def _put_tracked(self, key: bytes, record: R) -> None:
        pending = self.pending
        self._overlay.undo.append((pending, key, pending.get(key, _ABSENT)))
        pending[key] = record

    def _row(self, key: bytes) -> R | None:
        """Return a pending row, `None` if deleted. REQUIRES that the key is pending."""
        row: Any = self.pending[key] if key in self.pending else self.inserted[key]
        return self._decode_plain(row) if type(row) is bytes else row

    def scan(self, prefix: bytes = b"", *, after: bytes | None = None) -> Iterator[tuple[bytes, R]]:
        """Yield the rows whose key starts with `prefix` (and lies above `after`), in key order."""
        merged = iter(self._waiting(prefix, after) if self.pending or self.inserted else ())
        ours = next(merged, None)
        for key, raw in self._committed(prefix, after):
            while ours is not None and ours < key:
                if (record := self._row(ours)) is not None:
                    yield ours, record
                ours = next(merged, None)
            if ours == key:
                if (record := self._row(key)) is not None:
                    yield key, record
                ours = next(merged, None)
            else:
                yield key, self._decode(key, raw)
        while ours is not None:
            if (record := self._row(ours)) is not None:
                yield ours, record
            ours = next(merged, None)

    def _waiting(self, prefix: bytes, after: bytes | None) -> list[bytes]:
        """Return the pending and inserted keys of a scan, in order. The order is cached for ops that scan a thousand times."""
        sizes = (len(self.pending), len(self.inserted))
        if sizes != self._scanned:
            self._scanned, self._ordered = sizes, None
            keys = self.pending.keys() | self.inserted.keys()
            return sorted(key for key in keys if key.startswith(prefix) and (after is None or key > after))
        if self._ordered is None:
            self._ordered = sorted(self.pending.keys() | self.inserted.keys())
        ordered, end = self._ordered, prefix_end(prefix)
        start = bisect_left(ordered, prefix)
        if after is not None:
            start = bisect_right(ordered, after, start)
        return ordered[start : bisect_left(ordered, end, start) if end is not None else None]

    def forget_order(self) -> None:
        """Discard the cached order, after keys were removed."""
        self._scanned, self._ordered = (0, 0), None

    def any(self, prefix: bytes) -> bool:
        """Return whether any row has this prefix."""
        return next(self.scan(prefix), None) is not None

    def remove_first(self, *, below: bytes, limit: int) -> int:
        """Remove the first committed rows below a bound from the LMDB transaction itself; return how many.

        A tenth of the cost of calling `delete` for each: the cursor is already at the next row.
        """
        deleted: list[bytes] = []
        with self._overlay.txn.cursor(db=self._handle) as cursor:
            cursor.first()
            while len(deleted) < limit and (key := cursor.key()) and key < below:
                deleted.append(key)
                cursor.delete()  # moves to the following row
        if deleted:
            self._note_written([], deleted)
        return len(deleted)

    def _committed(self, prefix: bytes, after: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        end = prefix_end(prefix)
        with self._overlay.txn.cursor(db=self._handle) as cursor:
            if not cursor.set_range(after if after is not None else prefix):
                return
            for key, raw in cursor.iternext():
                if end is not None and key >= end:
                    return
                if after is None or key > after:
                    yield key, raw

    def flush(self) -> int:
        """Write pending rows into the LMDB transaction, in key order; return the number of rows."""
        txn, codec, pending = self._overlay.txn, self.table.rows, self.pending
        if len(pending) + len(self.inserted) == 1 and not self._deleted:
            return self._flush_one()
        stored: list[tuple[bytes, bytes]] = []
        deleted: list[bytes] = []
        with txn.cursor(db=self._handle) as cursor:
            if self.inserted:
                fresh = sorted(self.inserted.items())
                if pending:
                    both = [key for key, _ in fresh if key in pending]
                    if any(txn.get(key, db=self._handle) is not None for key in both):
                        raise KeysTaken  # also pending, so `putmulti` below would not detect it
                    fresh = [item for item in fresh if item[0] not in pending]
                stored = codec.encode_all(fresh)
                consumed, added = cursor.putmulti(stored, overwrite=False)
                if added < consumed:
                    raise KeysTaken
            if pending:
                rows = sorted(pending.items(), key=_key_of) if len(pending) > 1 else [*pending.items()]
                if self._deleted:
                    deleted = [key for key, record in rows if record is None]
                    for key in deleted:
                        txn.delete(key, db=self._handle)
                    rows = [item for item in rows if item[1] is not None]
                replaced = codec.encode_all(rows)
                cursor.putmulti(replaced)
                stored = stored + replaced if stored else replaced
        self._note_written(stored, deleted)
        return len(pending) + len(self.inserted)

    def _flush_one(self) -> int:
        """Write a single row without a cursor: the usual case of an awaited commit."""
        record: Any
        ((key, record),) = (self.pending or self.inserted).items()
        assert record is not None, "deletions go the other way"
        ((key, row),) = self.table.rows.encode_all([(key, record)])
        # A pending row may replace one; an inserted row must be new.
        if not self._overlay.txn.put(key, row, db=self._handle, overwrite=bool(self.pending)):
            raise KeysTaken
        self._note_written([(key, row)], [])
        return 1

    def _note_written(self, stored: list[tuple[bytes, bytes]], deleted: list[bytes]) -> None:
        """Record the written rows for the archive, if there is one."""
        written = self._overlay.written
        if written is not None and self.table.name not in t.NOT_ARCHIVED:
            written.append((self.table.name, stored, deleted))

    def settle(self) -> None:
        """Keep the hot rows and discard the rest, after the pending rows became durable."""
        kept = self._kept
        if kept is not None:
            for key, record in (self.inserted | self.pending).items():
                if record is None:
                    kept.pop(key, None)
                else:
                    kept[key] = record
            if len(kept) > KEPT_ROWS_MAX:  # groups that only write never reach the check in `get`
                kept.clear()
        self.discard()

    def discard(self) -> None:
        """Discard the pending rows."""
        self.pending.clear()
        self.inserted.clear()
        self._deleted = False
        self.forget_order()


class Overlay:
    """All tables, with the shared undo log. `begin` sets `txn` for the duration of one group."""

    def __init__(self, handles: dict[str, Any]) -> None:
        self.txn: Any  # an lmdb.Transaction; the stubs allow memoryviews, which are never requested here
        self.undo: list[tuple[dict[bytes, Any], bytes, Any]] = []
        self.head = 0
        """The last change sequence assigned. Not a row: it is the last key of the change log, or just below the oldest."""
        self.require_not_refused: Callable[[str, int], None] | None = None
        """`ManifestEnv.require_not_refused`, if a database or counter is closed for breaking a rule."""
        self.written: list[TableRows] | None = None
        """The rows that `flush` has written in this transaction, if there is an archive."""
        self.trim_rows = 0
        """Number of rows of the change log's tail to remove with this transaction (`_trim`)."""
        self.checked_sequence: int | None = None
        """The last change before the checked point on disk; `None` if there is no point."""
        self.notes: list[Note] = []
        """Audit notes of the current batch; they become rows of `audit` once the batch has applied."""
        self.tracking = False
        self.strict = False
        """Whether inserts look into LMDB before they assume that a key is new."""
        self.active_ids: set[int] = set()
        """Databases known to be ACTIVE: saves a lookup per op. Emptied whenever a `db` row changes or is undone."""
        self.views: dict[str, TableView[Any]] = {}
        """Views by the names of their tables."""

        def view(table: t.Table[R], *, keep: bool = False) -> TableView[R]:
            opened = self.views[table.name] = TableView(table, handles[table.name], self, keep=keep)
            return opened

        self.db = view(t.DB, keep=True)
        self.wal_state = view(t.WAL_STATE, keep=True)
        self.wal_catalog = view(t.WAL_CATALOG)
        self.wal_manifest = view(t.WAL_MANIFEST)
        self.chunk_catalog = view(t.CHUNK_CATALOG)
        self.chunk_delta_index = view(t.CHUNK_DELTA_INDEX)
        self.checkpoint_plan = view(t.CHECKPOINT_PLAN)
        self.slot_leaf = view(t.SLOT_LEAF)
        self.live_leaf = view(t.LIVE_LEAF)
        self.remote_namespace = view(t.REMOTE_NAMESPACE, keep=True)
        self.timeline = view(t.TIMELINE)
        self.snapshot_index = view(t.SNAPSHOT_INDEX)
        self.retention = view(t.RETENTION)
        self.lsm_catalog = view(t.LSM_CATALOG)
        self.lsm_ends = view(t.LSM_ENDS)
        self.followed_files = view(t.FOLLOWED_FILES)
        self.mirror = view(t.MIRROR)
        self.mirror_database = view(t.MIRROR_DATABASE)
        self.mirror_batch = view(t.MIRROR_BATCH)
        self.audit = view(t.AUDIT)
        self.retired = view(t.RETIRED)
        self.job_queue = view(t.JOB_QUEUE)
        self.job_pending_index = view(t.JOB_PENDING_INDEX)
        self.gc_refcounts = view(t.GC_REFCOUNTS, keep=True)  # a snapshot raises 64 counts, the next one the same 64
        self.page_version_index = view(t.PAGE_VERSION_INDEX)
        self.page_version_head = view(t.PAGE_VERSION_HEAD)
        self.generation_watermarks = view(t.GENERATION_WATERMARKS, keep=True)
        self.id_watermarks = view(t.ID_WATERMARKS, keep=True)
        self.change_log: TableView[Any] = view(t.TABLES["change_log"])
        self.change_cursors = view(t.CHANGE_CURSORS)
        self.snapshot_readers = view(t.SNAPSHOT_READERS)
        self.snapshot_floor = view(t.SNAPSHOT_FLOOR)
        self.metrics = view(t.METRICS, keep=True)
        self.idempotency = view(t.IDEMPOTENCY)
        self.replica_positions = view(t.REPLICA_POSITIONS)
        self.job_leases = view(t.JOB_LEASES)
        self.meta = view(t.META, keep=True)
        self.db_names = view(t.DB_NAMES)
        self.snapshot_names = view(t.SNAPSHOT_NAMES)
        self.cursor_names = view(t.CURSOR_NAMES)
        self.jobs_by_state = view(t.JOBS_BY_STATE)
        self.gc_zero = view(t.GC_ZERO)

    def begin(self, txn: Any) -> None:
        """Use this transaction from now on."""
        self.txn = txn

    def switch(self, *, tracking: bool = False, strict: bool = False) -> None:
        """Select how the following batches write; see `TableView.switch`."""
        if (tracking, strict) != (self.tracking, self.strict):
            self.tracking, self.strict = tracking, strict
            for view in self.views.values():
                view.switch(tracking=tracking, strict=strict)

    def rollback(self) -> None:
        """Undo what the current batch wrote. REQUIRES `tracking`."""
        # Newest first: a key that the batch wrote twice must get back the value from before its first write.
        for pending, key, before in reversed(self.undo):
            if before is _ABSENT:
                del pending[key]
            else:
                pending[key] = before
        for view in self.views.values():
            view.forget_order()
        self.undo.clear()
        self.notes.clear()
        self.active_ids.clear()

    def flush(self) -> int:
        """Write everything pending into the transaction; return the number of rows. Raises `KeysTaken`."""
        rows = sum([view.flush() for view in self.views.values() if view.pending or view.inserted])
        return rows + self._trim() if self.trim_rows else rows

    def _trim(self) -> int:
        """Remove the first rows of the change log below the oldest sequence, as this transaction leaves it.

        Done here and not in the op that requests it: a batch may be undone after it has raised the oldest sequence, but
        rows removed from LMDB would stay removed.
        """
        oldest = self.meta.get(OLDEST_SEQUENCE)
        if oldest is None:
            return 0
        log, below = self.change_log, trimmed_below(oldest.number, self.checked_sequence, self.head)
        return log.remove_first(below=log.table.key.pack(below), limit=min(self.trim_rows, TRIM_ROWS_PER_GROUP))

    def settle(self) -> None:
        """Update the kept rows and discard pending ones, after the transaction became durable."""
        for view in self.views.values():
            if view.pending or view.inserted:
                view.settle()
        self._restart()

    def discard(self) -> None:
        """Discard all pending rows, after the transaction was aborted."""
        for view in self.views.values():
            view.discard()
        self.active_ids.clear()
        self._restart()

    def _restart(self) -> None:
        if self.written is not None:
            self.written = []
        self.undo.clear()
        self.notes.clear()
        self.trim_rows = 0
        self.switch()

    def write_notes(self, sequence: int, generations: tuple[tuple[int, int], ...], at_ms: int) -> None:
        """Add the notes of an applied batch to `audit`, under its position in the feed."""
        reached = dict(generations)
        for ordinal, (component, db_id, action, subject, number, size_bytes) in enumerate(self.notes):
            record = AuditRecord(action, component, reached[component], subject, number, size_bytes)
            self.audit.put(t.AUDIT.key.pack(db_id, at_ms, sequence, ordinal), record)
        self.notes.clear()

    # ── lookups that many ops share ───────────────────────────────────────────────────────────────────────────────────
    def catalog(self, artifact: ArtifactKey) -> tuple[TableView[Any], bytes]:
        """Return the view and the key of an artifact's row."""
        table, key = t.catalog_key(artifact)
        return self.views[table.name], table.key.pack(*key)

    def gaps(self) -> tuple[Gap, ...]:
        """Return the gaps in the sequences that takeovers left, in order."""
        unpack = t.TIMELINE.key.unpack
        return tuple([Gap(row.last_sequence, unpack(key)[0]) for key, row in self.timeline.scan()])

    def put_db(self, db_id: int, record: DbRecord) -> None:
        """Write a database's row."""
        self.active_ids.discard(db_id)
        self.db.put(t.DB.key.pack(db_id), record)

    def database(self, db_id: int) -> DbRecord:
        """Return the row of a database in any status; raises `ManifestDamaged` if it is closed for breaking a rule."""
        if self.require_not_refused is not None:
            self.require_not_refused("database", db_id)
        record = self.db.get(t.DB.key.pack(db_id))
        if record is None:
            raise UnknownDatabase("no database has this id", hint="`quire ls` lists the databases", db_id=db_id)
        return record

    def writable(self, db_id: int, *, even: Literal["read_only"] | None = None) -> DbRecord:
        """Return the row of a database that accepts writes. Upkeep passes `even="read_only"`."""
        record = self.database(db_id)
        if record.status is DbStatus.ACTIVE:
            self.active_ids.add(db_id)
        else:
            if record.status is DbStatus.TOMBSTONED:
                raise DatabaseTombstoned(
                    "the database was dropped and cannot be written", db_id=db_id, name=record.name
                )
            if even != "read_only":
                raise ReadOnly(
                    "the database is read-only",
                    hint="set its status to ACTIVE first",
                    db_id=db_id,
                    name=record.name,
                )
        return record
