"""`ManifestStore`: the manifest as the rest of quire uses it.

Reads are snapshots (`with manifest.read() as txn`), writes are batches of operations (`manifest.submit(ops)` → guard).
The typed methods below build the batches of the catalog. Methods that assign an identifier wait until it is durable and
return it (M5: an id must not leave the process before its batch has committed); the others return the guard.

    >>> import tempfile
    >>> from quire.manifest.records import DbKind
    >>> with ManifestStore.open(tempfile.mkdtemp() + "/manifest.lmdb") as manifest:
    ...     db_id = manifest.register_db("shop", DbKind.PAGES)
    ...     with manifest.read() as txn:
    ...         print(db_id, txn.database(db_id).name)
    1 shop

Threads: any. One `ManifestStore` per process and file; `mode="r"` for any number of other processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import lmdb

from quire.core.barrier import Barrier, changes
from quire.core.clock import Clock, SystemClock
from quire.core.closing import ClosedOnExit
from quire.core.errors import InvalidInput, ManifestDamaged, ReadOnly, StillReferenced, StoreClosed, UnknownDatabase
from quire.core.limits import SCAN_ROWS_MAX
from quire.core.settings import ManifestSettings
from quire.durable.names import check_name
from quire.manifest import namespaces
from quire.manifest import tables as t
from quire.manifest.audit import AuditEntry, audit_entries
from quire.manifest.check import check
from quire.manifest.checked_point import point_of, write_point
from quire.manifest.env import ManifestEnv
from quire.manifest.feed import ChangeFeed
from quire.manifest.jobqueue import JobQueue
from quire.manifest.leases import VersionLeases
from quire.manifest.migrations import refuse_newer
from quire.manifest.ops.base import Counter, ReserveIds
from quire.manifest.ops.databases import (
    DropDb,
    RegisterDb,
    RenameDb,
    ReserveGeneration,
    SoftDropDb,
    UndropDb,
    UpdateDbStatus,
)
from quire.manifest.ops.local import RecordMetric
from quire.manifest.ops.snapshots import DropSnapshot, is_dropped
from quire.manifest.ownership import close_broken, next_ids, take_ownership
from quire.manifest.reads import ReadTxn, table_named
from quire.manifest.records import WINDOW_TAG, Compression, DbKind, DbRecord, DbStatus, NamespaceRecord
from quire.manifest.recount import Recount
from quire.manifest.retention import SnapshotRetention
from quire.manifest.snapshots import Snapshots

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.manifest.check import Problem
    from quire.manifest.guard import ManifestGuard
    from quire.manifest.ops.base import Op
    from quire.manifest.writer import ManifestWriter


class ManifestStore(ClosedOnExit):
    """The open manifest. Make one with `ManifestStore.open`."""

    def __init__(
        self,
        env: ManifestEnv,
        clock: Clock,
        writer: ManifestWriter | None,
        next_ids: dict[Counter, int],
        *,
        left: Sequence[str] = (),
    ) -> None:
        self.env = env
        self.clock = clock
        self.first_db_id = next_ids.get(Counter.DB, 0)
        """The lowest id that a database created by this process can have; 0 for a reader."""
        self._writer = writer
        self.barrier: Barrier | None = None
        """What public calls wait for in mode `sync` of the archive; set once, by `set_barrier`."""
        self.submit: Callable[..., ManifestGuard] = writer.submit if writer is not None else self._refuse
        """`submit(ops, *, key=None, result=b"", timeout=None)` queues a batch: `ManifestWriter.submit` itself."""
        self._ids_lock = threading.Lock()
        self._next_ids = next_ids
        self._next_generations: dict[int, int] = {}
        self.snapshots = Snapshots(self)
        """Snapshots, forks, lineage."""
        self.jobs = JobQueue(self)
        """Work that survives crashes."""
        self.retention = SnapshotRetention(self)
        """Which snapshots are kept, and which are made automatically."""
        self.leases = VersionLeases(self)
        """Versions leased to readers that read files and objects directly."""
        self.feed = ChangeFeed(self)
        """Every committed change, in order, for subscribers."""
        self.recount = Recount(env, clock, left, close_broken=lambda: close_broken(env, self.writer))
        """The checks that the open postponed (N3)."""

    # ── opening and closing ───────────────────────────────────────────────────────────────────────────────────────────
    @classmethod
    def open(
        cls,
        path: str,
        *,
        mode: str = "rw",
        settings: ManifestSettings | None = None,
        clock: Clock | None = None,
        create: bool = True,
        repair: bool = False,
    ) -> ManifestStore:
        """Open the manifest at `path`; create it if there is none, `mode` is "rw" and `create` is true.

        Raises `ManifestDamaged` if the file is damaged or breaks a rule (`repair=True` repairs what can be recomputed),
        `FormatTooNew`, `NotWritable`, and `StoreNotFound` if there is no manifest and none may be created.
        """
        clock = clock or SystemClock()
        env = ManifestEnv(path, settings or ManifestSettings(), write=mode != "r", create=create)
        try:
            if mode == "r":
                with ReadTxn(env) as txn:
                    refuse_newer(txn._txn, env)
                # Readers assign no ids, and a damaged manifest must open for `manifest check`.
                return cls(env, clock, None, {})
            writer, next_ids, left = take_ownership(env, clock, repair=repair)
            try:
                manifest = cls(env, clock, writer, next_ids, left=left)
                # Before any job can run: readers that were lent versions by the last owner still read them.
                manifest.leases.load()
                manifest.feed.trim_behind()
            except BaseException:
                writer.close()
                raise
            return manifest
        except lmdb.Error as error:  # LMDB found an invalid page
            env.close()
            raise ManifestDamaged(
                f"the manifest is damaged: {error}", hint="restore it from a backup", path=path
            ) from error
        except BaseException:
            env.close()
            raise

    def close(self) -> None:
        """Commit the queued batches, stop the writer, close the environment."""
        is_certain = False
        if self._writer is not None:
            was_open = self._writer.failure is None
            self._writer.close()
            # Any other reason stands for a commit in doubt, which may be that of the last queued batches.
            is_certain = was_open and isinstance(self._writer.failure, StoreClosed)
        try:
            if is_certain:
                self.remember_checked()
        finally:
            self.env.close()

    def remember_checked(self) -> None:
        """Record how far the manifest is known to be in order: the next open checks from there (N3)."""
        if not self.env.refused:
            write_point(self.env, point_of(self.env))

    @property
    def read_only(self) -> bool:
        """Whether this process only reads."""
        return self._writer is None

    @property
    def writer(self) -> ManifestWriter:
        """The writer; raises `ReadOnly` if the manifest was opened for reading."""
        if self._writer is None:
            raise ReadOnly("the manifest was opened for reading", hint='open the store with mode="rw"')
        return self._writer

    def _refuse(self, *_: object, **__: object) -> ManifestGuard:
        return self.writer.submit(())

    def set_barrier(self, barrier: Barrier) -> None:
        """Make every call that changes something wait for the archive. Guards do not wait: they are about this disk."""
        self.barrier = barrier
        self.cover(self, self.snapshots, self.jobs, self.retention, self.feed)

    def cover(self, *parts: object) -> None:
        """Make the marked methods of these parts of the store wait as public calls (core/barrier.py)."""
        if self.barrier is not None:
            self.barrier.cover(*parts)

    # ── reading and writing ───────────────────────────────────────────────────────────────────────────────────────────
    def read(self) -> ReadTxn:
        """Return a snapshot of the manifest; keep it short."""
        return ReadTxn(self.env)

    def export(self, table: str) -> Iterator[pa.RecordBatch]:
        """Yield a table as Arrow batches of at most 64 Ki rows, each read in a transaction of its own (M4).

        For readers that may be slow: no transaction is open between two batches, so rows committed meanwhile are seen
        if their keys lie ahead. For one consistent view use `read().to_arrow(table)`.
        """
        from quire.manifest.arrow import one_batch

        after: bytes | None = None
        while True:
            with self.read() as txn:
                batch, after = one_batch(txn, table_named(table), after, SCAN_ROWS_MAX)
            if batch is None:
                return
            yield batch

    def check(self) -> list[Problem]:
        """Return every broken rule."""
        with self.read() as txn:
            return list(check(txn))

    # ── audit ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def audit(
        self, db: int | str | None = None, *, since_ms: int = 0, until_ms: int | None = None, newest: int = 0
    ) -> list[AuditEntry]:
        """Return the events of a database (or of all, including removed ones) in [since, until), oldest first.

        With `newest`, return only the last so many; no others are decoded or kept.
        """
        with self.read() as txn:
            db_id = txn.database_id(db) if isinstance(db, str) else db
            return audit_entries(txn, db_id, since_ms=since_ms, until_ms=until_ms, newest=newest)

    # ── identifiers ───────────────────────────────────────────────────────────────────────────────────────────────────
    def allocate(self, counter: Counter) -> int:
        """Return the next id of a counter. It must reach the manifest with the batch that uses it, or be reserved (M5)."""
        _ = self.writer  # raises `ReadOnly`: a reader assigns no ids
        self.env.require_not_refused("counter", counter)
        with self._ids_lock:
            allocated = self._next_ids[counter]
            self._next_ids[counter] = allocated + 1
            return allocated

    @changes
    def reserve_db_id(self) -> int:
        """Reserve a database id that will never be assigned again: for a fork, whose op needs it."""
        db_id = self.allocate(Counter.DB)
        self.submit([ReserveIds(Counter.DB, db_id)]).result()
        return db_id

    @changes
    def reserve_job_id(self) -> int:
        """Reserve a job id that will never be assigned again: for `jobs.enqueue(job_id=…)`, in this process."""
        return self.jobs.reserve()

    @changes
    def reserve_generation(self, db_id: int) -> int:
        """Reserve a generation of the database that will never be assigned again."""
        with self.read() as txn:
            _, record = txn.require_database(db_id)
        with self._ids_lock:
            generation = max(record.next_generation, self._next_generations.get(db_id, 0))
            self._next_generations[db_id] = generation + 1
            # Under the lock: generations must rise in the order of the queue, or the later one would be refused.
            guard = self.submit([ReserveGeneration(db_id, generation)])
        guard.result()
        return generation

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    @changes
    def register_db(
        self,
        name: str,
        kind: DbKind,
        *,
        config_hash: bytes = b"",
        page_size: int = 0,
        pages_per_chunk: int = 0,
        compression: Compression = Compression.ZSTD,
        namespace_id: int = 0,
        tags: dict[str, str] | None = None,
    ) -> int:
        """Register a database; return its id."""
        check_name("database", name)
        db_id = self.allocate(Counter.DB)
        record = DbRecord(
            name=name,
            kind=kind,
            created_at_ms=self.clock.now_ms(),
            config_hash=config_hash,
            page_size=page_size,
            pages_per_chunk=pages_per_chunk,
            compression=compression,
            namespace_id=namespace_id,
            tags=tags or {},
        )
        self.submit([RegisterDb(db_id, t.DB.codec.checked(record))]).result()
        return db_id

    def find_or_register(self, name: str, kind: DbKind) -> int:
        """Return the id of the database with this name; register one of this kind if there is none."""
        with suppress(UnknownDatabase), self.read() as txn:
            return txn.database_id(name)
        return self.register_db(name, kind)

    def update_db_status(self, db_id: int, status: DbStatus) -> ManifestGuard:
        """Make a database writable or read-only, or (TOMBSTONED) drop it."""
        if not isinstance(status, DbStatus):
            raise InvalidInput("not a database status", hint=f"one of {', '.join(DbStatus.__members__)}", status=status)

        return self.drop_db(db_id) if status is DbStatus.TOMBSTONED else self.submit([UpdateDbStatus(db_id, status)])

    def rename_db(self, db_id: int, name: str) -> ManifestGuard:
        """Give a database another name."""
        return self.submit([RenameDb(db_id, name)])

    def drop_db(self, db_id: int, *, snapshots: bool = False, only_dropped: bool = False) -> ManifestGuard:
        """Tombstone a database, including its snapshots if `snapshots` is true; what only it held will be deleted."""
        with self.read() as txn:
            kept = txn.scan(t.SNAPSHOT_INDEX, db_id)
            # Snapshots that no user keeps are dropped with the database: windows of time travel, and dropped snapshots.
            held = {key[1]: row for key, row in kept if snapshots or WINDOW_TAG in row.tags or is_dropped(row)}
            origins = {leaf.origin_db_id for _, leaf in txn.scan(t.LIVE_LEAF, db_id)}
            origins |= {row.origin_db_id for _, row in txn.scan(t.WAL_CATALOG, db_id)}
        origins |= self.snapshots.origins(db_id, held)
        # A snapshot that is undropped before the batch commits is one that a user keeps.
        drops: list[Op] = [
            DropSnapshot(db_id, snapshot_id, None if snapshots or not is_dropped(row) else row.expires_at_ms)
            for snapshot_id, row in held.items()
        ]
        return self.submit([*drops, DropDb(db_id, only_dropped), *self.jobs.deletions(origins)])

    def soft_drop_db(self, db_id: int, *, snapshots: bool = False) -> ManifestGuard:
        """Drop a database so that `undrop_db` can bring it back; a database with snapshots only if `snapshots` is true."""
        with self.read() as txn:
            kept = txn.scan(t.SNAPSHOT_INDEX, db_id)
            held = [key[1] for key, row in kept if WINDOW_TAG not in row.tags and not is_dropped(row)]
            record = txn.database(db_id)
        if held and not snapshots:
            raise StillReferenced(
                "the database has snapshots",
                hint="drop them first, or drop them with the database: `--snapshots`, over HTTP `?snapshots=true`",
                database=record.name if record is not None else "",
            )
        return self.submit([SoftDropDb(db_id)])

    def undrop_db(self, db_id: int, name: str = "") -> ManifestGuard:
        """Undrop a database, under its former name or another."""
        return self.submit([UndropDb(db_id, name)])

    def find_dropped(self, name: str | int) -> int:
        """Return the id of a dropped database that can be undropped: the last with this name, or by its id (#7)."""
        with self.read() as txn:
            db_id = txn.dropped_id(name)
        if not db_id:
            hint = "`quire ls --dropped` lists those that can be restored"
            raise UnknownDatabase("no dropped database has this name", hint=hint, name=str(name))
        return db_id

    @changes
    def put_namespace(self, url: str, prefix: str = "", *, encryption_profile: str = "", name: str = "") -> int:
        """Register a bucket and prefix; return its id. With a name it stays until it is dropped."""
        record = NamespaceRecord(url, prefix, encryption_profile, self.clock.now_ms(), name=name)
        return namespaces.put_namespace(self, t.REMOTE_NAMESPACE.codec.checked(record))

    def begin_owner_epoch(self, at_least: int = 1, parent: namespaces.Parent | None = None) -> int:
        """Begin an owner epoch for a new owner, whose objects get names that no earlier owner wrote (A1); return its
        number.

        `parent` is where the previous owner ended: numbers that consumers keep continue in a new range (A10).
        """
        return namespaces.begin_owner_epoch(self, at_least, parent)

    def skip_ids(self) -> None:
        """Skip ids below the watermarks, which a takeover has raised."""
        with self.read() as txn, self._ids_lock:
            for counter, marked in next_ids(txn).items():
                self._next_ids[counter] = max(self._next_ids.get(counter, 0), marked)

    def ensure_owner_epoch(self) -> None:
        """Begin an owner epoch if there is none. Call this before choosing the name of an object to put."""
        namespaces.ensure_owner_epoch(self)

    # ── metrics ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def record_metric(self, scope: int, metric_kind: int, observation: float | Sequence[float]) -> ManifestGuard:
        """Merge observations into a rolling metric, inside the manifest's transaction."""
        values = [float(observation)] if isinstance(observation, (int, float)) else [float(v) for v in observation]
        return self.submit([RecordMetric(scope, metric_kind, values)])
