"""`ManifestStore`: the manifest as everyone else sees it.

Reads are snapshots (`with manifest.read() as txn`), writes are batches of operations (`manifest.submit(ops)` → guard). The
typed methods below build the batches that the catalog has. Those that hand out an identifier wait until it is durable and
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
from typing import TYPE_CHECKING

import lmdb

from quire.core.barrier import Barrier, changes
from quire.core.clock import Clock, SystemClock
from quire.core.errors import InvalidInput, ManifestDamaged, ReadOnly, StillReferenced, UnknownDatabase
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


class ManifestStore:
    """The opened manifest. Make one with `ManifestStore.open`."""

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
        """What public calls wait behind in mode `sync` of the archive; set once, by `stand_behind`."""
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
        """Which snapshots are kept, which are made by themselves."""
        self.leases = VersionLeases(self)
        """Versions lent to readers that read files and objects by themselves."""
        self.feed = ChangeFeed(self)
        """Everything that was committed, in order, for subscribers."""
        self.recount = Recount(env, clock, left, close_broken=lambda: close_broken(env, self.writer))
        """What the open has left to check (N3)."""

    # ── life ──────────────────────────────────────────────────────────────────────────────────────────────────────────
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
        """Open the manifest at `path`, making it if `mode` is "rw", `create` is true and there is none.

        Raises `ManifestDamaged` if the file or its rules are broken (`repair=True` mends what can be recomputed),
        `FormatTooNew`, `NotWritable`, and `StoreNotFound` where there is nothing and nothing may be made.
        """
        clock = clock or SystemClock()
        env = ManifestEnv(path, settings or ManifestSettings(), write=mode != "r", create=create)
        try:
            if mode == "r":
                with ReadTxn(env) as txn:
                    refuse_newer(txn._txn, env)
                # Readers hand out no ids, and a damaged manifest must open for `manifest check`.
                return cls(env, clock, None, {})
            writer, next_ids, left = take_ownership(env, clock, repair=repair)
            try:
                manifest = cls(env, clock, writer, next_ids, left=left)
                manifest.leases.load()
                manifest.feed.trim_behind()
            except BaseException:
                writer.close()
                raise
            return manifest
        except lmdb.Error as error:  # LMDB met a page that makes no sense
            env.close()
            raise ManifestDamaged(
                f"the manifest is damaged: {error}", hint="restore it from a backup", path=path
            ) from error
        except BaseException:
            env.close()
            raise

    def close(self) -> None:
        """Commit what is queued, stop the writer, close the environment."""
        if self._writer is not None:
            was_sound = self._writer.failure is None
            self._writer.close()
            if was_sound:
                self.remember_checked()
        self.env.close()

    def remember_checked(self) -> None:
        """Note how far the manifest is known to be in order: the next open begins there (N3)."""
        if not self.env.refused:
            write_point(self.env, point_of(self.env))

    def __enter__(self) -> ManifestStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def read_only(self) -> bool:
        """Whether this process only reads."""
        return self._writer is None

    @property
    def writer(self) -> ManifestWriter:
        """The writer thread; `ReadOnly` if the manifest was opened for reading."""
        if self._writer is None:
            raise ReadOnly("the manifest was opened for reading", hint='open the store with mode="rw"')
        return self._writer

    def _refuse(self, *_: object, **__: object) -> ManifestGuard:
        return self.writer.submit(())

    def stand_behind(self, barrier: Barrier) -> None:
        """Have every call that changes something wait for the archive. Guards do not: they speak of this disk."""
        self.barrier = barrier
        self.cover(self, self.snapshots, self.jobs, self.retention, self.feed)

    def cover(self, *parts: object) -> None:
        """The marked methods of these parts of the store are public calls, too (core/barrier.py)."""
        if self.barrier is not None:
            self.barrier.cover(*parts)

    # ── reading and writing ───────────────────────────────────────────────────────────────────────────────────────────
    def read(self) -> ReadTxn:
        """A snapshot of the manifest, for a moment."""
        return ReadTxn(self.env)

    def export(self, table: str) -> Iterator[pa.RecordBatch]:
        """A table as Arrow batches of at most 64 Ki rows, each read in a transaction of its own (M4).

        For readers that may be slow: nothing is held between two batches, so rows committed meanwhile are seen if their
        keys lie ahead. For one consistent view use `read().to_arrow(table)`.
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
        """Every broken rule, now."""
        with self.read() as txn:
            return list(check(txn))

    # ── what happened ─────────────────────────────────────────────────────────────────────────────────────────────────
    def audit(
        self, db: int | str | None = None, *, since_ms: int = 0, until_ms: int | None = None, newest: int = 0
    ) -> list[AuditEntry]:
        """What happened to a database (or to all, those that are gone included) in [since, until), oldest first.

        With `newest` the last so many of these, and no others are decoded or kept.
        """
        with self.read() as txn:
            db_id = txn.database_id(db) if isinstance(db, str) else db
            return audit_entries(txn, db_id, since_ms=since_ms, until_ms=until_ms, newest=newest)

    # ── identifiers ───────────────────────────────────────────────────────────────────────────────────────────────────
    def allocate(self, counter: Counter) -> int:
        """The next id of a sequence. It must reach the manifest with the batch that uses it, or be reserved (M5)."""
        _ = self.writer  # a reader hands out no ids: `ReadOnly`
        self.env.check_sound("counter", counter)
        with self._ids_lock:
            allocated = self._next_ids[counter]
            self._next_ids[counter] = allocated + 1
            return allocated

    @changes
    def reserve_db_id(self) -> int:
        """A database id that will never be given again: for a fork, whose op needs it."""
        db_id = self.allocate(Counter.DB)
        self.submit([ReserveIds(Counter.DB, db_id)]).result()
        return db_id

    @changes
    def reserve_job_id(self) -> int:
        """A job id that will never be given again: for `enqueue_job`, in this process."""
        return self.jobs.reserve()

    @changes
    def reserve_generation(self, db_id: int) -> int:
        """A generation of the database that will never be given again."""
        with self.read() as txn:
            _, record = txn.require_database(db_id)
        with self._ids_lock:
            generation = max(record.next_generation, self._next_generations.get(db_id, 0))
            self._next_generations[db_id] = generation + 1
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
        """A new database; its id."""
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

    def update_db_status(self, db_id: int, status: DbStatus) -> ManifestGuard:
        """Open or close a database for writing, or (TOMBSTONED) drop it."""
        if not isinstance(status, DbStatus):
            raise InvalidInput("not a database status", hint=f"one of {', '.join(DbStatus.__members__)}", status=status)

        return self.drop_db(db_id) if status is DbStatus.TOMBSTONED else self.submit([UpdateDbStatus(db_id, status)])

    def rename_db(self, db_id: int, name: str) -> ManifestGuard:
        """Give a database another name."""
        return self.submit([RenameDb(db_id, name)])

    def drop_db(self, db_id: int, *, snapshots: bool = False, only_dropped: bool = False) -> ManifestGuard:
        """Tombstone a database, with its snapshots if `snapshots` says so; what only it held will be deleted."""
        with self.read() as txn:
            kept = txn.scan(t.SNAPSHOT_INDEX, db_id)
            # What no person keeps goes with its database: a window of time travel, what was dropped and could come back.
            held = [key[1] for key, row in kept if snapshots or WINDOW_TAG in row.tags or is_dropped(row)]
            origins = {leaf.origin_db_id for _, leaf in txn.scan(t.LIVE_LEAF, db_id)}
            origins |= {row.origin_db_id for _, row in txn.scan(t.WAL_CATALOG, db_id)}
        origins |= self.snapshots.origins(db_id, held)
        drops: list[Op] = [DropSnapshot(db_id, snapshot_id) for snapshot_id in held]
        return self.submit([*drops, DropDb(db_id, only_dropped), *self.jobs.deletions(origins)])

    def soft_drop_db(self, db_id: int, *, snapshots: bool = False) -> ManifestGuard:
        """Drop a database so that `undrop_db` can bring it back; one that has snapshots only if `snapshots` says so."""
        with self.read() as txn:
            kept = txn.scan(t.SNAPSHOT_INDEX, db_id)
            held = [key[1] for key, row in kept if WINDOW_TAG not in row.tags and not is_dropped(row)]
            record = txn.database(db_id)
        if held and not snapshots:
            raise StillReferenced(
                "the database has snapshots",
                hint="drop them first, or drop it with them: `--snapshots`, over HTTP `?snapshots=true`",
                database=record.name if record is not None else "",
            )
        return self.submit([SoftDropDb(db_id)])

    def undrop_db(self, db_id: int, name: str = "") -> ManifestGuard:
        """Bring a database back, under its former name or another."""
        return self.submit([UndropDb(db_id, name)])

    def find_dropped(self, name: str | int) -> int:
        """The id of a dropped database that can be brought back: the last one that had this name, or by its id (#7)."""
        with self.read() as txn:
            db_id = txn.dropped_id(name)
        if not db_id:
            hint = "`quire ls --dropped` lists those that can be brought back"
            raise UnknownDatabase("no dropped database has this name", hint=hint, name=str(name))
        return db_id

    @changes
    def put_namespace(self, url: str, prefix: str = "", *, encryption_profile: str = "", name: str = "") -> int:
        """Register a bucket and prefix; its id. With a name it stays until it is dropped."""
        record = NamespaceRecord(url, prefix, encryption_profile, self.clock.now_ms(), name=name)
        return namespaces.put_namespace(self, t.REMOTE_NAMESPACE.codec.checked(record))

    def begin_owner_epoch(self, at_least: int = 1, parent: namespaces.Parent | None = None) -> int:
        """The store has a new owner: objects get names that no owner before it wrote (A1); the epoch's number.

        `parent` says where the owner before ended: numbers that consumers keep continue in a new range (A10).
        """
        return namespaces.begin_owner_epoch(self, at_least, parent)

    def skip_ids(self) -> None:
        """Hand out no id below the marks: a takeover has raised them."""
        with self.read() as txn, self._ids_lock:
            for counter, marked in next_ids(txn).items():
                self._next_ids[counter] = max(self._next_ids.get(counter, 0), marked)

    def ensure_owner_epoch(self) -> None:
        """Have an owner epoch: whoever is about to put an object asks for this before it chooses the name."""
        namespaces.ensure_owner_epoch(self)

    # ── metrics ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def record_metric(self, scope: int, metric_kind: int, observation: float | Sequence[float]) -> ManifestGuard:
        """Merge observations into a rolling metric, inside the manifest's transaction."""
        values = [float(observation)] if isinstance(observation, (int, float)) else [float(v) for v in observation]
        return self.submit([RecordMetric(scope, metric_kind, values)])
