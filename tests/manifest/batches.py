"""Random batches of operations for a manifest.

A story is a few related operations, planned on the state of the manifest; most are valid, some are intentionally not. A batch
has one or more stories, and an earlier one may invalidate a later one. `BatchMaker` takes all its choices from the `Random`
that it is constructed with: a seed repeats a run, and the random source of a property-testing library lets it shrink one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import TypeVar

from quire.core.errors import QuireError
from quire.core.ids import ArtifactKind
from quire.core.timeline import range_start
from quire.manifest import records as r
from quire.manifest import tables as t
from quire.manifest.guard import ManifestGuard, Receipt
from quire.manifest.ops.artifacts import BeginOwnerEpoch, DropNamespace, PutNamespace, UpdateArtifact
from quire.manifest.ops.base import LOCAL_COUNTERS, Counter, Op, ReserveLocalIds
from quire.manifest.ops.cursors import (
    AcknowledgeChanges,
    ClampCursor,
    DropCursor,
    LoseCursor,
    RegisterCursor,
    ResumeCursor,
)
from quire.manifest.ops.databases import (
    DropDb,
    FoldLsm,
    PruneAudit,
    RecordLsmEnds,
    RecordRollback,
    RegisterDb,
    RemoveDb,
    RenameDb,
    ReserveGeneration,
    SetDbOptions,
    SetRetention,
    SoftDropDb,
    UndropDb,
    UpdateDbStatus,
)
from quire.manifest.ops.jobs import CompleteJob, EnqueueJob, EnsureJob, ForgetJob, RenewJobLease, RequeueJob, StartJob
from quire.manifest.ops.local import (
    DropReplicaPositions,
    FollowSqliteFile,
    PutReader,
    PutReplicaPosition,
    RecordMetric,
    RecordVerification,
    SetFloor,
    SetObjectPlace,
)
from quire.manifest.ops.mirrors import AdoptMirrorBatch, BeginMirrorBatch, DropMirror, MarkMirror, PutMirror
from quire.manifest.ops.pageindex import ROW, VERSION_NAME, DropPageVersions, ForgetPages, PublishPages
from quire.manifest.ops.refs import RemoveArtifact, unpack_artifact
from quire.manifest.ops.slots import CollectLeaf
from quire.manifest.ops.snapshots import (
    DropSnapshot,
    ExtendSnapshot,
    ForkDb,
    PublishSnapshot,
    SoftDropSnapshot,
    UndropSnapshot,
)
from quire.manifest.ops.timeline import Timeline
from quire.manifest.ops.wal import AdvanceWal, AppendWalChunk, MoveWalState, OpenSegment
from quire.manifest.reads import ReadTxn
from quire.manifest.records import LsmEndsRecord, LsmLogEnd, LsmTableRecord, NamespaceRecord
from quire.manifest.store import ManifestStore
from tests.manifest.checkpoints import ChunkMutation, DeltaChunk, FullChunk, checkpoint_ops

T = TypeVar("T")


def outcome(guard: ManifestGuard, timeout: float = 60.0) -> Receipt | QuireError:
    """The receipt of a batch, or its error as a value."""
    try:
        return guard.result(timeout)
    except QuireError as error:
        return error


HOLDER = "holds-the-feed"
"""The name of a cursor that never acknowledges; `BatchMaker` does not use it."""


def hold_feed(manifest: ManifestStore) -> None:
    """Keep the whole change log, so that it can be replayed at the end."""
    with manifest.read() as txn:
        is_registered = txn.get(t.CURSOR_NAMES, HOLDER) is not None
    if not is_registered:
        manifest.feed.register(name=HOLDER)


class BatchMaker:
    """Makes random batches with few names, slots, segments and jobs, so that they collide."""

    STORIES = (
        "register", "rename", "rollback", "status", "retention", "prune_audit", "drop", "undrop", "remove", "namespace",
        "checkpoint", "update", "segment", "move", "pages", "drop_pages", "snapshot", "drop_snapshot", "fork", "collect",
        "enqueue", "ensure", "work", "metric", "cursor", "reader", "lsm", "followed_file", "clamp", "reserve", "verified",
        "mirror",
    )  # fmt: skip
    NAMES = ("ash", "birch", "cedar", "élan", "fir")

    def __init__(self, rng: Random, *, databases_max: int = 6, spare: Collection[int] = ()) -> None:
        """Databases in `spare` belong to the test: no batch concerns them."""
        self.rng = rng
        self._databases_max = databases_max
        self._spare = spare
        self.stories: dict[str, Callable[[ReadTxn], list[Op]]] = {name: getattr(self, name) for name in self.STORIES}

    def batch(self, manifest: ManifestStore, stories: int = 1) -> list[Op]:
        """A batch of `stories` stories, planned on the current state of the manifest; never empty."""
        with manifest.read() as txn:
            ops = [op for _ in range(stories) for op in self.story(txn)]
        return ops or [RecordMetric(1, 1, [1.0])]

    def story(self, txn: ReadTxn, name: str | None = None) -> list[Op]:
        """One story, with the given name or a random one."""
        return self.stories[name or self.rng.choice(list(self.stories))](txn)

    # ── choices ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _chance(self, one_in: int) -> bool:
        return self.rng.randint(1, one_in) == 1

    def _any(self, items: list[T]) -> T | None:
        return self.rng.choice(items) if items else None

    def _db(self, txn: ReadTxn) -> int:
        """Usually a database that accepts writes, sometimes a dropped or an unknown one."""
        if self._chance(12):
            unknown = self.rng.randint(0, self._databases_max + 1)
            return 0 if unknown in self._spare else unknown
        alive = [db_id for db_id, record in txn.databases() if record.status is not r.DbStatus.TOMBSTONED]
        return self._any([db_id for db_id in alive if db_id not in self._spare]) or 0

    def _next(self, txn: ReadTxn, counter: Counter) -> int:
        upcoming = txn.next_id(counter)
        return self.rng.randint(0, upcoming) if self._chance(10) else upcoming

    # ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def register(self, txn: ReadTxn) -> list[Op]:
        if txn.count(t.DB) >= self._databases_max:
            return self.remove(txn)
        record = r.DbRecord(
            name=self.rng.choice(self.NAMES),
            kind=self.rng.choice((r.DbKind.STREAM, r.DbKind.LSM)) if self._chance(4) else r.DbKind.PAGES,
            created_at_ms=self.rng.randint(0, 2**40),
            page_size=4096,
            namespace_id=self._any([key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)] if self._chance(3) else []) or 0,
        )
        return [RegisterDb(self._next(txn, Counter.DB), record)]

    def rollback(self, txn: ReadTxn) -> list[Op]:
        return [RecordRollback(self._db(txn), to_lsn=1, to_ms=2, lsn=9, before_lsn=8, snapshot="s", changed_pages=3)]

    def rename(self, txn: ReadTxn) -> list[Op]:
        return [SetDbOptions(self._db(txn), {"a": "b"}), RenameDb(self._db(txn), self.rng.choice(self.NAMES))]

    def status(self, txn: ReadTxn) -> list[Op]:
        return [UpdateDbStatus(self._db(txn), self.rng.choice(list(r.DbStatus)))]

    def retention(self, txn: ReadTxn) -> list[Op]:
        policy = r.RetentionRecord(self.rng.randint(0, 3), schedules=["hourly"])
        return [SetRetention(self._db(txn), None if self._chance(3) else policy)]

    def prune_audit(self, txn: ReadTxn) -> list[Op]:
        db_id, at_ms, _, _ = self._any([key for key, _ in txn.scan(t.AUDIT)]) or (self._db(txn), 0, 0, 0)
        return [PruneAudit(db_id, at_ms + self.rng.randint(0, 1))]

    def drop(self, txn: ReadTxn) -> list[Op]:
        if not self._chance(3):
            return self.segment(txn)
        db_id = self._db(txn)
        snapshots: list[Op] = [DropSnapshot(*key) for key, _ in txn.scan(t.SNAPSHOT_INDEX, db_id)]
        return [*(snapshots if self._chance(2) else []), DropDb(db_id)]

    def undrop(self, txn: ReadTxn) -> list[Op]:
        dropped = [db_id for db_id, record in txn.databases() if record.former_name]
        if dropped and self._chance(2):
            return [UndropDb(self._any(dropped) or 0, self.rng.choice(("", *self.NAMES)))]
        return [DropDb(self._db(txn), only_dropped=True)] if self._chance(3) else [SoftDropDb(self._db(txn))]

    def remove(self, txn: ReadTxn) -> list[Op]:
        dropped = [db_id for db_id, record in txn.databases() if record.status is r.DbStatus.TOMBSTONED]
        op_type = ForgetPages if self._chance(3) else RemoveDb
        return [op_type(self._any(dropped) or self._db(txn))]

    def namespace(self, txn: ReadTxn) -> list[Op]:
        number, epoch = self._next(txn, Counter.NAMESPACE), txn.owner_epoch() + self.rng.randint(0, 1)
        if self._chance(3):
            return [BeginOwnerEpoch(epoch, [(number, NamespaceRecord("", "s", owner_epoch=epoch))])]
        if self._chance(4):
            _, head = txn.feed_bounds()
            last = head - self.rng.randint(0, 1) * (head > 0)
            return [Timeline(epoch, max(epoch, 1) - 1, 0, 0, last, range_start(epoch, last))]
        put = PutNamespace(number, NamespaceRecord(f"memory://{number}", name=f"n{number}"))
        return [put, DropNamespace(self.rng.randint(0, number))][: self.rng.randint(1, 2)]

    # ── chunks and slots ──────────────────────────────────────────────────────────────────────────────────────────────
    def checkpoint(self, txn: ReadTxn) -> list[Op]:
        db_id = self._db(txn)
        record, wal = txn.database(db_id), txn.wal_state(db_id)
        if record is None or wal is None:
            return self.register(txn)
        lsn = max(wal.last_applied_lsn, wal.checkpointed_lsn) + self.rng.randint(1, 3)
        generation = record.next_generation
        mutations = [self._mutation(txn, db_id, slot) for slot in self._slots()]
        ops: list[Op] = [ReserveGeneration(db_id, generation), AdvanceWal(db_id, 0, lsn, lsn, lsn)]
        ops += checkpoint_ops(txn, db_id, generation, mutations, lsn)
        if self._chance(15):
            self.rng.shuffle(ops)
        return ops

    def _slots(self) -> list[int]:
        return sorted({self.rng.choice((0, 1, 255, 256, 300)) for _ in range(self.rng.randint(1, 3))})

    def _mutation(self, txn: ReadTxn, db_id: int, slot: int) -> ChunkMutation:
        chain = txn.chain(db_id, slot)
        namespaces = [key[0] for key, _ in txn.scan(t.REMOTE_NAMESPACE)]
        namespace_id = (self._any(namespaces) or 0) if self._chance(3) else 0
        if chain and self._chance(2):
            base = chain[0].generation + (7 if self._chance(15) else 0)
            delta = r.DeltaRecord(base, r.Residency.LOCAL, self.rng.randint(0, 2**32), 0, namespace_id=namespace_id)
            return DeltaChunk(slot=slot, delta_id=len(chain), record=delta)
        size = self.rng.randint(0, 2**40)
        return FullChunk(slot=slot, record=r.ChunkRecord(r.Residency.LOCAL, size, 0, namespace_id=namespace_id))

    def update(self, txn: ReadTxn) -> list[Op]:
        keys = [unpack_artifact(key) for key, _ in txn.raw_scan(t.GC_REFCOUNTS)]
        key = self._any(keys)
        if key is None:
            return self.checkpoint(txn)
        namespaces = [row_key[0] for row_key, _ in txn.scan(t.REMOTE_NAMESPACE)]
        return [
            UpdateArtifact(
                key.origin_db_id,
                key.kind,
                key.id,
                key.generation,
                key.delta_id,
                residency=self.rng.choice(list(r.Residency)),
                namespace_id=self._any([None, 0, *namespaces]),
                verify_state=self.rng.choice(list(r.VerifyState)),
            )
        ]

    def collect(self, txn: ReadTxn) -> list[Op]:
        """The collector's steps: leaves at zero, then artifacts at zero; sometimes an artifact that is still needed."""
        table = t.GC_REFCOUNTS if self._chance(8) else t.GC_ZERO
        ops: list[Op] = []
        for raw, _ in list(txn.raw_scan(table))[: self.rng.randint(1, 8)]:
            key = unpack_artifact(raw)
            if key.kind is ArtifactKind.LEAF:
                ops.append(CollectLeaf(key.origin_db_id, key.id, key.generation))
            else:
                ops.append(RemoveArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id))
        return ops or self.drop_snapshot(txn)

    # ── write-ahead log and pages ─────────────────────────────────────────────────────────────────────────────────────
    def segment(self, txn: ReadTxn) -> list[Op]:
        db_id = self._db(txn)
        wal = txn.wal_state(db_id)
        if wal is None:
            return self.register(txn)
        opened = [key[1] for key, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is r.WalState.OPEN]
        lsn = wal.lsn_reserved + self.rng.randint(1, 5)
        if opened and self._chance(2):
            return [AppendWalChunk(db_id, 0, opened[0], 1, lsn, lsn + self.rng.randint(0, 4), 4096)]
        segment_id = wal.next_segment_id - (1 if self._chance(10) else 0)
        if self._chance(3):
            return [AppendWalChunk(db_id, 0, segment_id, 1, lsn, lsn + self.rng.randint(-1, 4), 4096)]
        return [OpenSegment(db_id, segment_id, r.WalFormat.PAGER, 65536, b"salt", lsn)]

    def move(self, txn: ReadTxn) -> list[Op]:
        choice = self._any(list(txn.scan(t.WAL_CATALOG)))
        if choice is None:
            return self.segment(txn)
        (db_id, segment_id), row = choice
        following = r.WalState(min(row.state + 1, r.WalState.TRUNCATED))
        state = self.rng.choice(list(r.WalState)) if self._chance(4) else following
        return [MoveWalState(db_id, segment_id, state)]

    def pages(self, txn: ReadTxn) -> list[Op]:
        rows = [
            ROW.pack(self.rng.randint(1, 3), frame, self.rng.randint(1, 9), 0, 7, 1, 1, 0, 0)
            for frame in range(self.rng.randint(1, 4))
        ]
        return [PublishPages(self._db(txn), b"".join(rows)[: -1 if self._chance(15) else None])]

    def drop_pages(self, txn: ReadTxn) -> list[Op]:
        db_id = self._db(txn)
        keys = [key for key, _ in txn.scan(t.PAGE_VERSION_INDEX, db_id)][: self.rng.randint(1, 9)]
        return [DropPageVersions(db_id, b"".join(VERSION_NAME.pack(page, lsn) for _, page, lsn in keys))]

    # ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────────
    def _pins(self, txn: ReadTxn, db_id: int) -> list[r.Pin]:
        rows = [
            r.Pin(row.origin_db_id, key[1], row.last_lsn, row.used_bytes)
            for key, row in txn.scan(t.WAL_CATALOG, db_id)
            if row.state not in (r.WalState.OPEN, r.WalState.TRUNCATED)
        ]
        return rows if self._chance(2) else []

    def snapshot(self, txn: ReadTxn) -> list[Op]:
        db_id = self._db(txn)
        record = txn.database(db_id)
        snapshot_id = record.next_snapshot_id if record is not None and not self._chance(12) else 1
        kind = self.rng.choice(list(r.SnapshotKind))
        name = self.rng.choice(self.NAMES) if kind is r.SnapshotKind.NAMED else ""
        return [PublishSnapshot(db_id, snapshot_id, kind, name, self._anchor(txn, db_id), pins=self._pins(txn, db_id))]

    def _anchor(self, txn: ReadTxn, db_id: int) -> int:
        """An lsn at which a view of the database can be taken; sometimes one that a checkpoint has passed."""
        wal = txn.wal_state(db_id)
        return 0 if wal is None or self._chance(12) else wal.last_applied_lsn

    def drop_snapshot(self, txn: ReadTxn) -> list[Op]:
        chosen = self._any([key for key, _ in txn.scan(t.SNAPSHOT_INDEX)])
        if chosen and self._chance(5):
            return [ExtendSnapshot(chosen[0], chosen[1], self.rng.randint(0, 1 << 41))]
        if chosen and self._chance(3):
            name = self.rng.choice(("", *self.NAMES))
            soft_drop = SoftDropSnapshot(chosen[0], chosen[1], self.rng.randint(0, 1 << 41))
            return [soft_drop] if self._chance(2) else [UndropSnapshot(chosen[0], chosen[1], name)]
        if chosen and self._chance(4):
            return [DropSnapshot(chosen[0], chosen[1], self.rng.choice((0, 1)))]
        return [DropSnapshot(*chosen)] if chosen and not self._chance(10) else [DropSnapshot(self._db(txn), 1)]

    def fork(self, txn: ReadTxn) -> list[Op]:
        if txn.count(t.DB) >= self._databases_max:
            return self.drop_snapshot(txn)
        source = self._db(txn)
        snapshots = [key[1] for key, _ in txn.scan(t.SNAPSHOT_INDEX, source)]
        snapshot_id = (self._any(snapshots) or 0) if self._chance(2) else 0
        pins = [] if snapshot_id else self._pins(txn, source)
        anchor = max([self._anchor(txn, source), *(pin.upto_lsn for pin in pins)])
        name = self.rng.choice(self.NAMES)
        return [ForkDb(self._next(txn, Counter.DB), source, name, snapshot_id, anchor, 0, 8, pins)]

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def enqueue(self, txn: ReadTxn) -> list[Op]:
        kind = self.rng.choice(list(r.JobKind))
        artifact = None
        if kind is r.JobKind.UPLOAD:
            target = self._any([unpack_artifact(key) for key, _ in txn.raw_scan(t.GC_REFCOUNTS)])
            if target is not None:
                artifact = (
                    target.origin_db_id,
                    int(target.kind),
                    target.id,
                    target.generation,
                    target.delta_id,
                )
        job = r.JobRecord(kind, self._db(txn), 1, artifact=artifact)
        return [EnqueueJob(self._next(txn, Counter.JOB), job)]

    def ensure(self, txn: ReadTxn) -> list[Op]:
        kind = r.JobKind.DELETE if self._chance(2) else self.rng.choice(sorted(r.EXCLUSIVE_JOBS))
        return [EnsureJob(self._next(txn, Counter.JOB), r.JobRecord(kind, self._db(txn), 1, max_attempts=0))]

    def work(self, txn: ReadTxn) -> list[Op]:
        choice = self._any(list(txn.scan(t.JOB_QUEUE)))
        if choice is None:
            return self.enqueue(txn)
        (job_id,), job = choice
        requeue = RequeueJob(job_id, job.attempt, 5, "again", deferred=self._chance(2))
        complete = CompleteJob(job_id, r.JobState.SUCCEEDED, job.attempt)
        any_step: list[Op] = [
            StartJob(job_id, "w", 99),
            RenewJobLease(job_id, "w", 100, 1, 2),
            requeue,
            CompleteJob(job_id, self.rng.choice(list(r.JobState)), self.rng.randint(0, job.attempt)),
            ForgetJob(job_id),
        ]
        usual = {r.JobState.PENDING: any_step[0], r.JobState.IN_FLIGHT: self.rng.choice((requeue, complete))}
        return [usual.get(job.state, any_step[-1]) if self._chance(2) else self.rng.choice(any_step)]

    # ── mirrors ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def mirror(self, txn: ReadTxn) -> list[Op]:
        mirrors = list(txn.scan(t.MIRROR))
        choice = self.rng.randint(1, 6)
        if not mirrors or choice == 1:
            record = r.MirrorRecord(self.rng.choice(self.NAMES), ["a*"], "orders", "parquet:/srv/lake", 1)
            return [PutMirror(self.rng.randint(1, 3), record)]
        (mirror_id,), record = self.rng.choice(mirrors)
        batch_id = record.last_batch_id + self.rng.randint(0, 2)
        row = r.MirrorDatabaseRecord("ash", self.rng.randint(1, 9), files=["a"], is_gone=self._chance(4))
        begin = BeginMirrorBatch(mirror_id, batch_id, [(self.rng.randint(1, 4), row) for _ in range(3)])
        if choice == 2:
            return [DropMirror(mirror_id)]
        if choice == 3:
            return [MarkMirror(mirror_id, self._chance(2))]
        if choice == 4:
            return [begin]
        return [begin, AdoptMirrorBatch(mirror_id, batch_id - self.rng.randint(0, 1))]

    # ── local ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    def metric(self, txn: ReadTxn) -> list[Op]:
        return [RecordMetric(self._db(txn), 1, [self.rng.uniform(-10, 1e6) for _ in range(3)])]

    def cursor(self, txn: ReadTxn) -> list[Op]:
        cursors = [key[0] for key, row in txn.scan(t.CHANGE_CURSORS) if row.name != HOLDER]
        cursor_id = self._any(cursors) or 0
        choice = self.rng.randint(1, 5)
        if choice == 1 or not cursors:
            name = self.rng.choice(("", "tail", "sink"))
            return [RegisterCursor(self._next(txn, Counter.CURSOR), self.rng.randint(0, 50), name)]
        if choice == 2:
            return [DropCursor(cursor_id)]
        if choice == 3:
            return [LoseCursor(cursor_id, "too slow"), *([ResumeCursor(cursor_id)] if self._chance(2) else [])]
        return [AcknowledgeChanges(cursor_id, self.rng.randint(0, 60))]

    def clamp(self, txn: ReadTxn) -> list[Op]:
        """As at open: usually a cursor whose position is valid, sometimes one that has missed changes."""
        cursors = [key[0] for key, row in txn.scan(t.CHANGE_CURSORS) if row.name != HOLDER]
        return [ClampCursor(self._any(cursors) or 0)]

    def reserve(self, txn: ReadTxn) -> list[Op]:
        counter = self.rng.choice(list(LOCAL_COUNTERS))
        return [ReserveLocalIds(counter, txn.next_id(counter) + self.rng.randint(0, 3))]

    def verified(self, _: ReadTxn) -> list[Op]:
        return [RecordVerification(["a chunk is missing"] if self._chance(2) else [])]

    def lsm(self, txn: ReadTxn) -> list[Op]:
        kv_sets = [
            db_id for db_id, record in txn.databases() if record.kind is r.DbKind.LSM and db_id not in self._spare
        ]
        db_id = self._any(kv_sets) or self._db(txn)  # rejected if the database is not a key-value set
        ends = LsmEndsRecord(LsmLogEnd(0, 1, self.rng.randint(72, 900), 3), last_lsn=self.rng.randint(0, 99))
        table = (self.rng.randint(1, 4), LsmTableRecord(0, 9, 0, 100, 1, 9))
        return [FoldLsm(db_id, [table], [self.rng.randint(1, 4)]), RecordLsmEnds(db_id, ends)]

    def reader(self, txn: ReadTxn) -> list[Op]:
        db_id = self._db(txn)
        return [
            PutReader(db_id, self.rng.randint(1, 3), 5, 99),
            SetFloor(db_id, 1, 9),
            SetObjectPlace("objects"),
            PutReplicaPosition(db_id, 7, self.rng.randint(0, 3), 5, 0),
            DropReplicaPositions(db_id, [(7, self.rng.randint(0, 3))]),
        ]

    def followed_file(self, txn: ReadTxn) -> list[Op]:
        return [FollowSqliteFile(self._db(txn), self.rng.choice(("", "/srv/app.db")), 250)]
