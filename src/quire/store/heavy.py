"""The jobs that a person starts and that read or write many bytes: `store.heavy`.

Terms
  runner   who does the reading and writing: "threads", "spark", or "auto" (threads below 256 MiB of work, else Spark)

Each is a job of the manifest, run now, in this thread as far as the driver's side goes: `quire jobs` shows it, it may be
cancelled, and goes on after a crash. What runs over many databases is one job for each of them and one run for some thousands.

Threads: any. Raises what the jobs raise, `SparkUnavailable` where Spark was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.archive.log_reader import the_store
from quire.core.barrier import changes
from quire.core.clock import SystemClock
from quire.durable.files import OsDisk
from quire.durable.space import measure
from quire.jobs.archive_window import remove_abandoned
from quire.jobs.audit.table import COUNTED_RULES, audit_table, damaged, write_report
from quire.jobs.checkpoint.many import run_many
from quire.jobs.enqueue import prepare_checkpoint, start
from quire.jobs.handler import Handler, Progress
from quire.jobs.locations import StorePool
from quire.jobs.restore.job import need_no_file
from quire.jobs.retention import apply_many
from quire.jobs.row_groups import Steady, part
from quire.jobs.runner import Runner, Runners, ThreadRunner, Tick, Tools, no_tick
from quire.jobs.stats.job import Usage, stats_job, with_disk
from quire.manifest import tables as t
from quire.manifest.check import check
from quire.manifest.jobqueue import Job
from quire.manifest.records import DbKind, DbStatus, JobKind, WalState
from quire.objects.open import open_store
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.spark.sessions import spark_runner
from quire.store.object_access import options_of

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.jobs.archive_audit.audit import ArchiveAudit
    from quire.objects.options import StoreOptions
    from quire.store.store import Store
    from quire.store.wiring import Wiring

HALF = 1_000
"""Of what an audit tells of its progress: first the counting, then the listing."""
WAVE = 2_000
"""Databases that a run over many of them works on at once: their plans are in memory, and their jobs are leased."""
UNABSORBED = frozenset({WalState.OPEN, WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY})
AUDIT_THREADS = 8
"""What takes time is the way to the bucket and back."""


class Heavy:
    """The heavy jobs of one opened store."""

    def __init__(self, store: Store, wiring: Wiring) -> None:
        self._store = store
        self._wiring = wiring
        self._manifest = store.manifest
        self._manifest.cover(self)

    @changes
    def compact(self, name: str, *, runner: str = "") -> Job:
        """Merge all tables of a key-value database into one level; the job, as it ended."""
        payload = {"major": True, "runner": runner}
        with self._manifest.read() as txn:
            db_id, _ = txn.live(name, DbKind.LSM)
        return self._run_job(self._manifest.jobs.enqueue(JobKind.COMPACTION, db_id, payload))

    @changes
    def checkpoint_all(
        self, names: Iterable[str] | None = None, *, runner: str = "", progress: Progress = no_tick
    ) -> list[Job]:
        """Checkpoint these page databases, or all that have WAL of their own; their jobs, as they ended.

        They are worked on in waves of `WAVE`, each of which is one run. A fork that was never written has nothing to absorb: it
        is checkpointed when it is named.
        """

        def run(db_ids: list[int], watch: Progress) -> list[Job]:
            for db_id in db_ids:
                prepare_checkpoint(self._wiring.context, db_id, leave_open=False)
            return self._run_many(JobKind.CHECKPOINT, db_ids, runner, watch)

        return self._in_waves(self._ids_of(names) if names is not None else self._unabsorbed(), run, progress)

    @changes
    def merge_all(
        self, names: Iterable[str] | None = None, *, runner: str = "", progress: Progress = no_tick
    ) -> list[Job]:
        """Merge the chains of these page databases, or of all that have chunks, in waves of `WAVE`; their jobs."""

        def run(db_ids: list[int], watch: Progress) -> list[Job]:
            return self._run_many(JobKind.MERGE, db_ids, runner, watch)

        return self._in_waves(self._ids_of(names) if names is not None else self._owners(t.LIVE_LEAF), run, progress)

    @changes
    def verify(
        self,
        *,
        max_age_seconds: float = 0,
        max_duration_seconds: float = 0,
        runner: str = "",
        progress: Progress = no_tick,
    ) -> Job:
        """Read every byte of every tier and compare it with the manifest; the job, as it ended.

        What was verified within `max_age_seconds` is left out; after `max_duration_seconds` it ends where it is. What was not
        looked at for longest comes first, so that short runs add up.
        """
        payload = {
            "scope": "store",
            "runner": runner,
            "max_age_seconds": float(max_age_seconds),
            "max_duration_seconds": float(max_duration_seconds),
        }
        return self._run_job(self._manifest.jobs.enqueue(JobKind.VERIFY, 0, payload), progress)

    @changes
    def sweep(
        self,
        *,
        delete: bool = False,
        runner: str = "",
        grace_seconds: float = 3_600.0,
        progress: Progress = no_tick,
    ) -> Job:
        """Compare listings of objects with the manifest, both ways; with `delete`, orphans go. The job, as it ended."""
        payload = {"delete": delete, "runner": runner, "grace_seconds": float(grace_seconds)}
        return self._run_job(self._manifest.jobs.enqueue(JobKind.SWEEP, 0, payload), progress)

    @changes
    def bundle(self, name: str = "", *, runner: str = "", period_seconds: float = 0.0) -> Job:
        """Make bundles of old chunks of a stream's manifest log, or of all streams'; the job, as it ended.

        Chunks of one `period_seconds` (default: `manifest_log.bundle_seconds`, a week) that is over become one object.
        """
        payload = {"runner": runner, "period_seconds": float(period_seconds)}
        return self._run_job(self._manifest.jobs.enqueue(JobKind.BUNDLE, self._id_of(name) if name else 0, payload))

    def damaged(self) -> list[dict[str, Any]]:
        """Every artifact that was found missing or altered, and was not found good since."""
        with self._manifest.read() as txn:
            return list(damaged(txn))

    def write_report(self, path: str, more: Iterable[dict[str, Any]] = ()) -> None:
        """What is damaged, and `more` of the same columns (orphans, say), as a Parquet file."""
        write_report(path, [*self.damaged(), *more])

    @changes
    def audit(self, *, runner: str = "", progress: Progress = no_tick) -> pa.Table:
        """Everything that rows and objects disagree about, as a table.

        Reference counts, heads and floors are computed again from rows, and listings of objects are compared with what rows
        promise, both by the runner; besides, the other rules of the manifest are checked, and what was found damaged is told.
        What the runner counts is not counted here once more. An object store that cannot be listed is an error: a table without
        its differences would look as if there were none.
        """
        counted = self.recount(runner=runner, progress=part(progress, 0, HALF, 2 * HALF))
        swept = self._run_to_end(JobKind.SWEEP, 0, {"runner": runner}, part(progress, HALF, 2 * HALF, 2 * HALF))
        with self._manifest.read() as txn:
            problems = list(check(txn, without=COUNTED_RULES))
        return audit_table(problems, self.damaged(), swept.result or {}, counted)

    def audit_archive(self, *, runner: str = "", progress: Progress = no_tick) -> ArchiveAudit:
        """Whether every moment that the archive has can be restored, by reading all of it from the bucket; and what else is
        there. `audit.table()` has the differences as Arrow.

        It compares the bucket with itself: `quire archive audit URL` does the same where the store's directory is lost.
        """
        url = self._store.objects_url
        with self._manifest.read() as txn:
            store_id, options = txn.store_id(), options_of(txn, self._store.settings, url)
        return audit_bucket(url, store_id=store_id, options=options, runner=runner, progress=progress)

    def remove_abandoned(self, owner_epoch: int) -> int:
        """Delete everything that an abandoned owner epoch has in the bucket (`quire archive abandoned`); how many objects."""
        return remove_abandoned(self._wiring.context, owner_epoch)

    @changes
    def recount(self, *, runner: str = "", progress: Progress = no_tick) -> list[dict[str, Any]]:
        """Reference counts, heads and floors that are not what rows add up to: rows of the audit's table."""
        differences: list[dict[str, Any]]
        differences = self._run_to_end(JobKind.AUDIT, 0, {"runner": runner}, progress).result["found"]
        return differences

    @changes
    def restore(
        self,
        name: str,
        snapshot: int | str,
        target: str,
        *,
        runner: str = "",
        replace: bool = False,
        progress: Progress = no_tick,
    ) -> dict[str, Any]:
        """Write a snapshot of a page database to a file, in parallel; what was done."""
        db_id, path = self._id_of(name), os.path.abspath(target)
        with self._manifest.read() as txn:
            snapshot_id, _ = txn.require_snapshot(db_id, snapshot)
        if not replace:
            need_no_file(self._wiring.context.disk, path)
        payload = {"snapshot": snapshot_id, "path": path, "replace": replace, "runner": runner}
        result: dict[str, Any] = self._run_to_end(JobKind.RESTORE, db_id, payload, progress).result
        return result

    @changes
    def stats(self, *, runner: str = "", progress: Progress = no_tick) -> list[Usage]:
        """What each database and snapshot takes: alone, shared, by tier."""
        usage: list[Usage] = []
        handler = partial(stats_job, into=usage.extend)
        self._run_to_end(JobKind.STATS, 0, {"runner": runner}, progress, handler)
        return with_disk(usage, measure(self._store.path))

    @changes
    def retention_all(
        self,
        names: Iterable[str] | None = None,
        *,
        force: bool = False,
        only: Mapping[int, Collection[int]] | None = None,
        progress: Progress = no_tick,
    ) -> list[Job]:
        """Apply the policies of these databases, or of all that have one, in waves of `WAVE`; their jobs, as they ended.

        With `only` (database id → snapshot ids) no other snapshots are dropped, of no other databases. `force` also drops the
        last snapshots of a database. Bytes are deleted after their grace, as always. A database whose retention job another
        worker is running is not among the results.
        """
        if only is not None:
            db_ids: Iterable[int] = list(only)
        elif names is None:
            db_ids = self._owners(t.RETENTION)
        else:
            db_ids = self._ids_of(names)

        def run(some: list[int], watch: Progress) -> list[Job]:
            return apply_many(self._manifest, some, force=force, only=only, progress=watch)

        return self._in_waves(db_ids, run, progress)

    @changes
    def start(self, kind: JobKind, db_id: int, *, runner: str = "") -> int:
        """Enqueue a job of an exclusive kind, unless one is outstanding; the id of either."""
        return start(self._wiring.context, kind, db_id, runner=runner)

    @changes
    def run_now(self, kind: JobKind, name: str, *, runner: str = "") -> Job:
        """Run a job of an exclusive kind about a database: the outstanding one, if there is one. The job, as it ended."""
        return self._run_job(self.start(kind, self._id_of(name), runner=runner))

    # ── how ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _run_to_end(
        self, kind: JobKind, db_id: int, payload: dict[str, Any], progress: Progress, handler: Handler | None = None
    ) -> Job:
        """Run a new job in this thread; if it fails, its error is raised and it is not tried again."""
        job_id = self._manifest.jobs.enqueue(kind, db_id, payload)
        self._wiring.worker.run(job_id, handler=handler, watch=progress, reraise=True)
        return self._manifest.jobs.get(job_id)

    def _run_job(self, job_id: int, progress: Progress | None = None) -> Job:
        """Run a job in this thread; the job, as it ended."""
        self._wiring.worker.run(job_id, watch=progress)
        return self._manifest.jobs.get(job_id)

    def _run_many(self, kind: JobKind, db_ids: list[int], runner: str, progress: Progress) -> list[Job]:
        return run_many(self._wiring.context, kind, db_ids, runner_name=runner, progress=progress)

    def _id_of(self, name: str) -> int:
        with self._manifest.read() as txn:
            return txn.database_id(name)

    def _ids_of(self, names: Iterable[str]) -> list[int]:
        return [self._id_of(name) for name in names]

    def _in_waves(
        self, db_ids: Iterable[int], run: Callable[[list[int], Progress], list[Job]], progress: Progress
    ) -> list[Job]:
        """Run something for many databases, some thousands at a time: what a run plans and holds in memory is bounded."""
        with self._manifest.read() as txn:
            total = txn.count(t.DB)
        jobs: list[Job] = []
        rest, done, steady = iter(db_ids), 0, Steady(progress)
        while wave := list(islice(rest, WAVE)):
            is_all = not done and len(wave) < WAVE
            jobs += run(wave, steady if is_all else part(steady, done, done + len(wave), total))
            done += len(wave)
        steady.over()  # also of no wave, and of waves over fewer databases than there are
        return jobs

    def _owners(self, table: t.Table[Any]) -> Iterator[int]:
        """The databases that have rows in a table; no transaction is held between two steps."""
        start = 0
        while True:
            with self._manifest.read() as txn:
                step = list(islice(txn.owners(table, start=start), WAVE))
            yield from step
            if len(step) < WAVE:
                return
            start = step[-1] + 1

    def _unabsorbed(self) -> Iterator[int]:
        """The page databases with WAL of their own that no checkpoint has absorbed."""
        for db_id in self._owners(t.WAL_CATALOG):
            with self._manifest.read() as txn:
                record = txn.database(db_id) if db_id not in txn.refused_databases() else None
                if record is None or record.kind is not DbKind.PAGES or record.status is DbStatus.TOMBSTONED:
                    continue
                rows = txn.scan(t.WAL_CATALOG, db_id)
                is_waiting = any(row.origin_db_id == db_id and row.state in UNABSORBED for _, row in rows)
            if is_waiting:
                yield db_id


def audit_bucket(
    url: str,
    *,
    store_id: str = "",
    options: StoreOptions | None = None,
    runner: str = "",
    now_ms: int | None = None,
    progress: Tick = no_tick,
) -> ArchiveAudit:
    """Whether every moment that the archive in a bucket has can be restored; reads nothing but the bucket.

    `runner` is "threads", "spark" or "auto", as of `store.heavy`; `store_id` names one of several stores.
    """
    from quire.jobs.archive_audit.audit import audit_archive  # loads Arrow, which a small stream does without

    url = url if "://" in url else os.path.abspath(url)
    stores = StorePool(lambda place: open_store(place, options=options if place == url else None))
    disk = OsDisk()
    tools = Tools(Sources(root="", disk=disk, open_store=stores, cache=PageCache(0)), stores, disk, "")

    def spark() -> Runner:
        named = {url: options} if options is not None else {}
        return spark_runner(root="", objects_url=url, options=named)

    def choose(size_bytes: int) -> Runner:
        threads = ThreadRunner(tools, AUDIT_THREADS, label="quire-archive-audit")
        return Runners(spark).choose(runner, size_bytes, lambda: threads)

    try:
        bucket = stores(url)
        now = SystemClock().now_ms() if now_ms is None else now_ms
        return audit_archive(bucket, store_id or the_store(bucket), choose, now_ms=now, progress=progress)
    finally:
        stores.close()
