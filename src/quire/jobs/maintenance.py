"""The owner's maintenance loop: schedules, retention, leases, trimming, and the jobs that follow from them.

A round is a handful of reads of the manifest and, where something is due, ordinary batches and jobs. A failure, of one database
or of a whole step, is reported and does not prevent the rest of the round. Steps that concern every database visit some of them
in each round, so that the cost of a round does not grow with their number (N1). Work that moves bytes is a job: a round
enqueues it, a worker runs it. Only the owner's clock decides what is due.

    >>> Round(snapshots=1).total
    1
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain, islice

from quire.core.errors import (
    Conflict,
    InvalidInput,
    JobAlreadyPending,
    ManifestDamaged,
    NameTaken,
    QuireError,
    StoreClosed,
    StoreUnusable,
    UnknownDatabase,
    WouldDropEverything,
)
from quire.core.events import emit
from quire.core.limits import IDEMPOTENCY_KEY_BYTES
from quire.durable.names import STREAMS
from quire.jobs.archive_window import ArchiveWindow
from quire.jobs.context import JobContext
from quire.jobs.database_walk import DatabaseWalk
from quire.jobs.leftovers import sweep_leftovers
from quire.jobs.mirror.change_detection import due_mirrors
from quire.jobs.replica_positions import prune_positions
from quire.jobs.residency import apply_policy
from quire.jobs.stream_checkpoint.job import unpublished
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.ops.databases import PruneAudit
from quire.manifest.ops.local import PruneIdempotency
from quire.manifest.reads import ReadTxn
from quire.manifest.records import SCHEDULE_TAG, DbKind, DbRecord, DbStatus, JobKind, WalRecord, WalState
from quire.manifest.retention import has_scheduled, scheduled

SLOW_SECONDS = 60.0
"""Time between two slow rounds, which read many rows."""

UNABSORBED = frozenset({WalState.INDEXED, WalState.CHECKPOINT_READY})
"""States of segments that wait for a checkpoint; the second one means a plan that runs, or whose job failed permanently."""

LOOK_SECONDS = 0.008
SLOW_LOOK_SECONDS = 0.02
"""How long one step of a round, and of a slow round, visits databases before it leaves the rest to the next round."""

HOURLY_SECONDS = 3600.0
"""Time between two sweeps for leftovers of killed processes, which list the directories of all databases, and for old positions
of replicas, which read all of them."""

PLANNED_PER_ROUND = 200
"""Databases whose retention is planned in one round."""

ANSWERS_PER_STEP = 4_096
"""Answers to keyed batches that one operation looks at: the writer needs 6 ms."""

ANSWER_WALK_ROUNDS = 60
"""Each slow round looks at this part of all answers: a walk over them takes an hour."""

BUNDLE_EVERY_MS = 86_400_000
"""Time between two bundle jobs: each lists the objects of every stream."""

MakeSnapshot = Callable[[int, str, dict[str, str]], object]
"""Creates a scheduled snapshot: (database, name, tags). An engine with an open segment seals it first."""


@dataclass(slots=True)
class Round:
    """Counts of what one round did."""

    snapshots: int = 0
    dropped: int = 0
    leases_lost: int = 0
    delete_jobs: int = 0
    jobs_forgotten: int = 0
    answers_forgotten: int = 0
    audit_pruned: int = 0
    checkpoints: int = 0
    bundles: int = 0
    mirrors: int = 0
    jobs: int = 0
    leftovers: int = 0
    moves: int = 0
    trimmed: int = 0
    collected: int = 0
    purged: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


class Upkeep:
    """The owner's maintenance loop."""

    def __init__(
        self,
        ctx: JobContext,
        worker: Worker,
        make_snapshot: MakeSnapshot | None = None,
        sweep_versions: Callable[[], int] | None = None,
        window: ArchiveWindow | None = None,
        close_idle: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ctx = ctx
        self._worker = worker
        self._window = window
        self._close_idle = close_idle
        """Closes idle databases of engines that have no thread for it."""
        self._make_snapshot = make_snapshot or self._publish
        self._sweep_versions = sweep_versions
        """Removes the files of dropped key-value snapshots; `None` without a key-value engine."""
        self._made: dict[tuple[int, str], str] = {}
        """(database, schedule) → name of the last snapshot, so that a scheduled snapshot that was dropped is not made again."""
        self._next_slow = 0.0
        self._next_hourly = 0.0
        # the position of each step in its walk over the databases
        clock = ctx.clock
        self._scheduling = DatabaseWalk(t.RETENTION, clock, LOOK_SECONDS)
        self._checkpointing = DatabaseWalk(t.WAL_CATALOG, clock, LOOK_SECONDS)
        self._retaining = DatabaseWalk(t.SNAPSHOT_INDEX, clock, SLOW_LOOK_SECONDS)
        self._reviewing = DatabaseWalk(t.SNAPSHOT_INDEX, clock, SLOW_LOOK_SECONDS)
        self._publishing = DatabaseWalk(t.DB, clock, SLOW_LOOK_SECONDS)
        self._evicting = DatabaseWalk(t.DB, clock, SLOW_LOOK_SECONDS)
        self._burying = DatabaseWalk(t.DB, clock, SLOW_LOOK_SECONDS)
        self._pruning = DatabaseWalk(t.AUDIT, clock, SLOW_LOOK_SECONDS)
        # A random start: if each walk began at the first key, an owner that restarts often would never reach the last ones.
        self._answers_after = os.urandom(IDEMPOTENCY_KEY_BYTES)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def start(self) -> None:
        """Start a thread that does a round every `interval_seconds`, and the worker after its first round."""
        if self._thread is None:
            self._stopping.clear()
            thread = threading.Thread(target=self._loop, name="quire-upkeep", daemon=True)
            thread.start()
            self._thread = thread  # after start(): `stop` can only join a thread that was started

    def stop(self) -> None:
        """End the loop and the worker."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._worker.stop()

    def _loop(self) -> None:
        while not self._stopping.wait(self._ctx.settings.interval_seconds):
            # The worker not before the first round: a command that takes a second needs no worker threads.
            for act in (self.round, self._worker.start):
                try:
                    act()
                except (StoreClosed, StoreUnusable):
                    return
                except Exception as error:  # a loop that ended silently would be worse than any failed round
                    emit("error", "upkeep.round_failed", error=error)

    def run_once(self) -> Round:
        """Run a complete round, and all jobs that are due, in this thread."""
        done = self.round(everything=True)
        done.jobs = self._worker.drain()
        return done

    # ── one round ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def round(self, *, everything: bool = False) -> Round:
        """Do what is due now; jobs are enqueued, not run. Steps that read many rows run once a minute. With `everything`, run
        all steps, over all databases. An error that is not quire's is raised after the last step."""
        done = Round()
        unexpected: list[Exception] = []
        steps: list[Callable[[Round, bool], None]] = [self._recount, self._schedules, self._leases, self._deletions]
        steps += [self._checkpoints, self._mirrors, self._idle]
        if everything or self._ctx.clock.monotonic() >= self._next_slow:
            self._next_slow = self._ctx.clock.monotonic() + SLOW_SECONDS
            steps += [
                self._set_aside,
                # Retention before the second look for deletions: it releases references.
                self._retention,
                self._deletions,
                self._tombstones,
                self._feed,
                self._stream_checkpoints,
            ]
            steps += [self._old_jobs, self._old_answers, self._old_audit, self._bundles, self._versions]
            steps += [self._evictions] if self._ctx.settings.evict_seconds else []
            steps.append(self._archive)
            if everything or self._ctx.clock.monotonic() >= self._next_hourly:
                self._next_hourly = self._ctx.clock.monotonic() + HOURLY_SECONDS
                steps += [self._leftovers, self._replica_positions]
        for step in steps:
            try:
                step(done, everything)
            except (StoreClosed, StoreUnusable):
                raise
            except QuireError as error:
                emit(
                    "warning",
                    "upkeep.step_failed",
                    step=step.__name__.removeprefix("_"),
                    error=str(error),
                )
            except (
                Exception
            ) as error:  # the other steps are needed all the same: without them garbage grows, leases stay
                unexpected.append(error)
        if unexpected:
            raise unexpected[0]
        return done

    def _recount(self, _: Round, _everything: bool) -> None:
        self._ctx.manifest.recount.round()

    def _schedules(self, done: Round, everything: bool) -> None:
        manifest = self._ctx.manifest
        with manifest.read() as txn:
            db_ids = list(self._scheduling.step(txn, whole=everything))
            dropped = {db_id for db_id, _ in txn.dropped()}
        for db_id, policy in manifest.retention.policies(db_ids):
            if db_id in dropped:
                continue
            try:
                snapshots = scheduled(policy, now_ms=self._ctx.clock.now_ms())
            except InvalidInput as error:  # such as a time zone unknown to this machine; other databases are unaffected
                emit("warning", "upkeep.snapshot_failed", db_id=db_id, error=str(error))
                continue
            for due in snapshots:
                schedule, name = due.schedule, due.name
                if self._made.get((db_id, schedule)) == name:
                    continue
                with manifest.read() as txn:
                    exists = has_scheduled(txn, db_id, schedule, due.since_ms)
                if not exists:
                    try:
                        self._make_snapshot(db_id, name, {SCHEDULE_TAG: schedule})
                        done.snapshots += 1
                    except NameTaken:
                        pass  # another thread has created it
                    except (StoreClosed, StoreUnusable):
                        raise
                    except QuireError as error:
                        emit("warning", "upkeep.snapshot_failed", db_id=db_id, name=name, error=str(error))
                        continue
                self._made[db_id, schedule] = name

    def _publish(self, db_id: int, name: str, tags: dict[str, str]) -> None:
        self._ctx.manifest.snapshots.publish(db_id, name, tags=tags)

    def _retention(self, done: Round, everything: bool) -> None:
        manifest = self._ctx.manifest
        with manifest.read() as txn:
            refused = txn.refused_databases()
            # A database that can still be undropped keeps its snapshots as they were.
            refused = refused | {db_id for db_id, _ in txn.dropped()}
            due = (db_id for db_id in self._retaining.step(txn, whole=everything) if self._may_drop(txn, db_id))
            db_ids = list(islice(due, None if everything else PLANNED_PER_ROUND))
        for db_id in sorted(set(db_ids) - refused):
            try:
                plan = manifest.retention.plan(db_id)
                try:
                    done.dropped += len(manifest.retention.apply(plan))
                except WouldDropEverything as error:
                    # Only a user may drop the last snapshots, by force.
                    emit("warning", "retention.refused", db_id=db_id, error=str(error))
                    done.dropped += len(manifest.retention.apply(plan.expired_only()))
            except (StoreClosed, StoreUnusable):
                raise
            except (
                QuireError
            ) as error:  # for example, a snapshot dropped in the meantime, or a damaged policy, which drops nothing
                emit("warning", "retention.failed", db_id=db_id, error=str(error))

    def _may_drop(self, txn: ReadTxn, db_id: int) -> bool:
        """Return whether retention may have something to drop: the database has a policy, or a snapshot that expires."""
        try:
            if txn.get(t.RETENTION, db_id) is not None:
                return True
            return any(row.expires_at_ms for _, row in txn.scan(t.SNAPSHOT_INDEX, db_id))
        except ManifestDamaged:
            return True  # planning reports the damage

    def _set_aside(self, done: Round, everything: bool) -> None:
        """Review the snapshots of readers that were set aside. Before retention: a version still in use must not expire."""
        # Imports pages and numpy, which stores of streams do not need
        from quire.jobs.checkpoint.plan import review_set_aside

        with self._ctx.manifest.read() as txn:
            db_ids = list(self._reviewing.step(txn, whole=everything))
        done.dropped += review_set_aside(self._ctx, db_ids)

    def _idle(self, _: Round, _everything: bool) -> None:
        self._close_idle()

    def _leases(self, done: Round, _everything: bool) -> None:
        done.leases_lost += self._ctx.manifest.jobs.expire()
        self._ctx.manifest.leases.expire()

    def _deletions(self, done: Round, _everything: bool) -> None:
        """Enqueue missing delete jobs: for artifacts released by hand-built batches, or whose job was cancelled."""
        manifest = self._ctx.manifest
        with manifest.read() as txn:
            origins = set(txn.owners(t.GC_ZERO)) - txn.refused_databases()
        done.delete_jobs += manifest.jobs.ensure_deletions(origins)

    def _checkpoints(self, done: Round, everything: bool) -> None:
        """Enqueue checkpoints of page databases with enough, or old enough, sealed WAL (docs/design.md, defaults). Every open
        database is checked, because only these can have become due since the last round, and some of the closed ones."""
        opened = [store.db_id for store in self._ctx.pages.stores()] if self._ctx.pages is not None else []
        due: set[int] = set()
        with self._ctx.manifest.read() as txn:
            refused = txn.refused_databases()
            for db_id in chain(opened, self._checkpointing.step(txn, whole=everything)):
                if db_id in refused:
                    continue
                try:
                    sealed = [row for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state in UNABSORBED]
                    if self._is_due(sealed, db_id) and self._is_live(txn.database(db_id), DbKind.PAGES):
                        due.add(db_id)
                except ManifestDamaged as error:
                    emit("error", "upkeep.skipped", db_id=db_id, step="checkpoints", error=str(error))
        self._checkpoint(sorted(due), {"sealed_only": True}, done)

    def _stream_checkpoints(self, done: Round, everything: bool) -> None:
        """Enqueue checkpoints of streams, once a minute: their sealed segments become chunks."""
        with self._ctx.manifest.read() as txn:
            refused, due = txn.refused_databases(), list[int]()
            for db_id in self._publishing.step(txn, whole=everything):
                if db_id in refused or not self._is_live(self._record(txn, db_id), DbKind.STREAM):
                    continue
                try:
                    if self._is_due([row for _, row in unpublished(txn, db_id)], db_id):
                        due.append(db_id)
                except ManifestDamaged as error:
                    emit("error", "upkeep.skipped", db_id=db_id, step="stream_checkpoints", error=str(error))
        self._checkpoint(due, None, done)

    def _record(self, txn: ReadTxn, db_id: int) -> DbRecord | None:
        """Return the row of a database; a damaged row is reported, and `None` returned."""
        try:
            return txn.database(db_id)
        except ManifestDamaged as error:
            txn.report_damage(db_id, error)
            return None

    def _is_due(self, sealed: Sequence[WalRecord], db_id: int) -> bool:
        """Return whether sealed segments are large enough, or old enough, for a checkpoint. Inherited segments do not age, so
        that a hundred thousand unwritten forks of a template share its segment instead of getting a chunk each."""
        settings = self._ctx.settings
        oldest_ms = self._ctx.clock.now_ms() - int(settings.checkpoint_seconds * 1000)
        heavy = sum(row.used_bytes for row in sealed) >= settings.checkpoint_bytes
        own = [row.sealed_at_ms for row in sealed if row.origin_db_id == db_id]
        return heavy or (bool(own) and min(own) <= oldest_ms)

    def _is_live(self, record: DbRecord | None, kind: DbKind) -> bool:
        return record is not None and record.kind is kind and record.status is not DbStatus.TOMBSTONED

    def _checkpoint(self, due: Iterable[int], payload: dict[str, bool] | None, done: Round) -> None:
        jobs = self._ctx.manifest.jobs
        for db_id in due:
            if not jobs.outstanding(db_id, JobKind.CHECKPOINT):
                with suppress(JobAlreadyPending):  # another thread has enqueued it
                    jobs.enqueue(JobKind.CHECKPOINT, db_id, payload)
                    done.checkpoints += 1

    def _mirrors(self, done: Round, _everything: bool) -> None:
        """Enqueue the mirrors that are due, each with at most one job at a time."""
        with self._ctx.manifest.read() as txn:
            due = due_mirrors(txn, self._ctx.clock.now_ms())
        for name in due:
            self._ctx.manifest.jobs.enqueue(JobKind.MIRROR, 0, {"mirror": name})
            done.mirrors += 1

    def _bundles(self, done: Round, _everything: bool) -> None:
        """Enqueue a bundle job once a day, if the store has streams: old chunks of their manifest logs become bundles."""
        manifest, now = self._ctx.manifest, self._ctx.clock.now_ms()
        if not self._ctx.disk.exists(os.path.join(self._ctx.root, STREAMS)):
            return
        with manifest.read() as txn:
            jobs = [record for _, record in txn.scan(t.JOB_QUEUE) if record.kind is JobKind.BUNDLE]
        if all(record.created_at_ms <= now - BUNDLE_EVERY_MS for record in jobs):
            manifest.jobs.enqueue(JobKind.BUNDLE, 0)
            done.bundles += 1

    def _evictions(self, done: Round, everything: bool) -> None:
        """Request the eviction of old copies: an upload first, if there is no object, and the eviction in a later round."""
        manifest, before = self._ctx.manifest, self._ctx.clock.now_ms() - int(self._ctx.settings.evict_seconds * 1000)
        with manifest.read() as txn:
            databases = {
                db_id
                for db_id in self._evicting.step(txn, whole=everything)
                if self._is_live(self._record(txn, db_id), DbKind.PAGES)
            } - txn.refused_databases()
        done.moves += apply_policy(manifest, sorted(databases), before)

    def _tombstones(self, done: Round, everything: bool) -> None:
        """Purge dropped databases whose undrop period is over, and enqueue delete jobs, which remove the remaining rows and
        files, for tombstoned databases that nothing refers to any more."""
        manifest = self._ctx.manifest
        before_ms = self._ctx.clock.now_ms() - int(self._ctx.settings.undrop_seconds * 1000)
        with manifest.read() as txn:
            kept, refused = list(txn.dropped()), txn.refused_databases()
        for db_id, row in kept:
            if row.dropped_at_ms <= before_ms and db_id not in refused:
                with suppress(Conflict, UnknownDatabase):  # a user has undropped or purged it in the meantime
                    manifest.drop_db(db_id, snapshots=True, only_dropped=True).result()
                    done.purged += 1
        with manifest.read() as txn:
            dropped = {
                db_id
                for db_id in self._burying.step(txn, whole=everything)
                if (record := self._record(txn, db_id)) is not None and record.status is DbStatus.TOMBSTONED
            }
            dropped -= txn.refused_databases()
            bare = [db_id for db_id in sorted(dropped) if next(iter(txn.raw_scan(t.GC_REFCOUNTS, db_id)), None) is None]
        done.delete_jobs += manifest.jobs.ensure_deletions(bare)

    def _versions(self, _: Round, _everything: bool) -> None:
        """Remove the files, directories of links, of dropped key-value snapshots. After retention, which drops snapshots."""
        if self._sweep_versions is not None:
            self._sweep_versions()

    def _archive(self, done: Round, everything: bool) -> None:
        """Trim the archive and delete objects that no archived moment needs any more."""
        if self._window is not None:
            looked = self._window.look(now=everything)
            done.trimmed += looked.trimmed
            done.collected += looked.deleted

    def _leftovers(self, done: Round, _everything: bool) -> None:
        done.leftovers += sweep_leftovers(self._ctx)

    def _replica_positions(self, _: Round, _everything: bool) -> None:
        prune_positions(self._ctx.manifest)

    def _feed(self, _: Round, _everything: bool) -> None:
        if self._ctx.manifest.recount.is_done:
            self._ctx.manifest.remember_checked()  # after a crash, changes are checked from this point on (N3)
        self._ctx.manifest.feed.maintain()  # after that: trimming keeps the changes since the point

    def _old_jobs(self, done: Round, _everything: bool) -> None:
        done.jobs_forgotten += self._ctx.manifest.jobs.forget(older_than_seconds=self._ctx.settings.jobs_keep_seconds)

    def _old_answers(self, done: Round, everything: bool) -> None:
        """Remove expired answers among the next ones: a part of all answers, so that removal keeps up with any rate."""
        manifest, now = self._ctx.manifest, self._ctx.clock.now_ms()
        with manifest.read() as txn:
            left = txn.count(t.IDEMPOTENCY)
        if everything:
            self._answers_after = b""
        else:
            left = left // ANSWER_WALK_ROUNDS + 1
        while left > 0:
            after = self._answers_after
            with manifest.read() as txn:
                answers = list(islice(txn.scan(t.IDEMPOTENCY, start=(after + b"\0",)), ANSWERS_PER_STEP))
            if expired := sum(row.expires_at_ms <= now for _, row in answers):
                manifest.submit([PruneIdempotency(ANSWERS_PER_STEP, after)]).result()
                done.answers_forgotten += expired
            left -= ANSWERS_PER_STEP
            if len(answers) < ANSWERS_PER_STEP:
                self._answers_after = b""
                return
            (self._answers_after,) = answers[-1][0]

    def _old_audit(self, done: Round, everything: bool) -> None:
        manifest = self._ctx.manifest
        horizon = self._ctx.clock.now_ms() - int(self._ctx.settings.audit_seconds * 1000)
        with manifest.read() as txn:
            aged = [
                db_id
                for db_id in self._pruning.step(txn, whole=everything)
                if next(iter(txn.scan(t.AUDIT, db_id)))[0][1] < horizon
            ]
        for db_id in aged:
            manifest.submit([PruneAudit(db_id, horizon)]).result()
            done.audit_pruned += 1
