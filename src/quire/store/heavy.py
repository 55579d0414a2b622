"""Jobs that a user starts and that read or write many bytes: `store.heavy`.

Terms
  runner   what reads and writes the bytes: "threads", "spark", or "auto" (threads below 256 MiB of work, else Spark)

Each is a job in the manifest whose driver side runs now, in the calling thread: `quire jobs` shows it, it can be cancelled, and
it continues after a crash. Work over many databases is one job per database, and one run for up to `WAVE` of them. Results of
many databases are spooled: they are counted and summed in memory, and read one by one.

Threads: any. Raises the errors of the jobs, and `SparkUnavailable` if Spark was requested.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from quire.archive.store_choice import choose_store
from quire.core.barrier import changes
from quire.core.clock import SystemClock
from quire.core.errors import ManifestDamaged
from quire.durable.files import OsDisk
from quire.durable.space import measure
from quire.durable.spool import Spool
from quire.jobs.archive_window import remove_abandoned
from quire.jobs.audit.table import COUNTED_RULES, audit_table, damaged, write_report
from quire.jobs.checkpoint.many import run_many
from quire.jobs.enqueue import start
from quire.jobs.handler import Handler, Progress
from quire.jobs.job_results import JobResults
from quire.jobs.locations import StorePool
from quire.jobs.restore.job import need_no_file
from quire.jobs.retention import apply_many
from quire.jobs.row_groups import MonotonicProgress, part
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
from quire.store.bulk import checked_names
from quire.store.object_access import options_of

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.jobs.archive_audit.audit import ArchiveAudit
    from quire.manifest.reads import ReadTxn
    from quire.objects.options import StoreOptions
    from quire.store.store import Store
    from quire.store.wiring import Wiring

HALF = 1_000
"""Progress units for each half of an audit: first recounting, then listing."""
WAVE = 2_000
"""Databases in one run: bounds the plans in memory and the job leases held at once."""
UNABSORBED = frozenset({WalState.OPEN, WalState.SEALED, WalState.INDEXED, WalState.CHECKPOINT_READY})
AUDIT_THREADS = 8
"""Threads of an archive audit, whose time is spent on round trips to the bucket."""


class Heavy:
    """The heavy jobs of one opened store."""

    def __init__(self, store: Store, wiring: Wiring) -> None:
        self._store = store
        self._wiring = wiring
        self._manifest = store.manifest
        self._manifest.cover(self)

    @changes
    def compact(self, name: str, *, runner: str = "") -> Job:
        """Merge all tables of a key-value database into one level and return the finished job."""
        payload = {"major": True, "runner": runner}
        with self._manifest.read() as txn:
            db_id, _ = txn.live(name, DbKind.LSM)
        return self._wiring.worker.run_new(JobKind.COMPACTION, db_id, payload)

    @changes
    def checkpoint_all(
        self, names: Iterable[str] | None = None, *, runner: str = "", progress: Progress = no_tick
    ) -> JobResults:
        """Checkpoint these page databases, or all that have WAL of their own, and return the finished jobs.

        Databases are processed in waves of `WAVE`, each of which is one run. A fork that was never written to has nothing to
        absorb: it is checkpointed only if it is named.
        """

        def run(db_ids: list[int], watch: Progress) -> list[Job]:
            return self._run_many(JobKind.CHECKPOINT, db_ids, runner, watch)

        return self._in_waves(self._ids_of(names) if names is not None else self._unabsorbed(), run, progress)

    @changes
    def merge_all(
        self, names: Iterable[str] | None = None, *, runner: str = "", progress: Progress = no_tick
    ) -> JobResults:
        """Merge the chains of these page databases, or of all that have chunks, in waves of `WAVE`, and return the jobs."""

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
        """Read every byte of every tier, compare it with the manifest, and return the finished job.

        Artifacts verified within `max_age_seconds` are skipped, and the job stops after `max_duration_seconds`. Those not
        verified for the longest time come first, so that short runs add up.
        """
        payload = {
            "scope": "store",
            "runner": runner,
            "max_age_seconds": float(max_age_seconds),
            "max_duration_seconds": float(max_duration_seconds),
        }
        return self._wiring.worker.run_new(JobKind.VERIFY, 0, payload, watch=progress)

    @changes
    def sweep(
        self,
        *,
        delete: bool = False,
        runner: str = "",
        grace_seconds: float = 3_600.0,
        progress: Progress = no_tick,
    ) -> Job:
        """Compare listings of objects with the manifest, in both directions; with `delete`, delete orphans. Return the job."""
        payload = {"delete": delete, "runner": runner, "grace_seconds": float(grace_seconds)}
        return self._wiring.worker.run_new(JobKind.SWEEP, 0, payload, watch=progress)

    @changes
    def bundle(self, name: str = "", *, runner: str = "", period_seconds: float = 0.0) -> Job:
        """Bundle old chunks of a stream's manifest log, or of all streams' logs, and return the finished job.

        The chunks of each past period of `period_seconds` (default: `manifest_log.bundle_seconds`, a week) become one object.
        """
        payload = {"runner": runner, "period_seconds": float(period_seconds)}
        return self._wiring.worker.run_new(JobKind.BUNDLE, self._id_of(name) if name else 0, payload)

    def damaged(self) -> list[dict[str, Any]]:
        """Return every artifact that was found missing or altered and has not been verified successfully since."""
        with self._manifest.read() as txn:
            return list(damaged(txn))

    def write_report(self, path: str, more: Iterable[dict[str, Any]] = ()) -> None:
        """Write the damaged artifacts, and `more` rows with the same columns (orphans, for example), to a Parquet file."""
        write_report(path, [*self.damaged(), *more])

    @changes
    def audit(self, *, runner: str = "", progress: Progress = no_tick) -> pa.Table:
        """Return a table of all differences between rows and objects.

        The runner recomputes reference counts, heads and floors from rows, and compares listings of objects with the rows. In
        addition, the other rules of the manifest are checked in this process, and known damage is included. An object store
        that cannot be listed is an error: a table without its differences would look as if there were none.
        """
        counted = self.recount(runner=runner, progress=part(progress, 0, HALF, 2 * HALF))
        swept = self._run_to_end(JobKind.SWEEP, 0, {"runner": runner}, part(progress, HALF, 2 * HALF, 2 * HALF))
        with self._manifest.read() as txn:
            problems = list(check(txn, without=COUNTED_RULES))
        return audit_table(problems, self.damaged(), swept.result or {}, counted)

    def audit_archive(self, *, runner: str = "", progress: Progress = no_tick) -> ArchiveAudit:
        """Check that every archived moment can be restored, by reading all of the archive from the bucket, and report what else
        the bucket has. `audit.table()` returns the differences as Arrow.

        Only the bucket is read: `quire archive audit URL` does the same when the store's directory is lost.
        """
        url = self._store.objects_url
        with self._manifest.read() as txn:
            store_id, options = txn.store_id(), options_of(txn, self._store.settings, url)
        return audit_bucket(url, store_id=store_id, options=options, runner=runner, progress=progress)

    def remove_abandoned(self, owner_epoch: int) -> int:
        """Delete all objects of an abandoned owner epoch (`quire archive abandoned`) and return their number."""
        return remove_abandoned(self._wiring.context, owner_epoch)

    @changes
    def recount(self, *, runner: str = "", progress: Progress = no_tick) -> list[dict[str, Any]]:
        """Return the reference counts, heads and floors that differ from what rows add up to, as rows of the audit's table."""
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
        """Write a snapshot of a page database to a file, in parallel, and return the job's result."""
        db_id, path = self._id_of(name), os.path.abspath(target)
        with self._manifest.read() as txn:
            snapshot_id, _ = txn.require_snapshot(db_id, snapshot)
        if not replace:
            need_no_file(self._wiring.context.disk, path)
        payload = {"snapshot": snapshot_id, "path": path, "replace": replace, "runner": runner}
        result: dict[str, Any] = self._run_to_end(JobKind.RESTORE, db_id, payload, progress).result
        return result

    @changes
    def stats(self, *, runner: str = "", progress: Progress = no_tick) -> Spool[Usage]:
        """Return the space used by each database, followed by its snapshots: exclusive, shared, and by tier.

        `len()` of the result counts them, and iteration reads them one by one.
        """
        rows = Spool(Usage)

        def keep(usages: Iterable[Usage]) -> None:
            rows.extend(with_disk(usages, measure(self._store.path)))

        self._run_to_end(JobKind.STATS, 0, {"runner": runner}, progress, partial(stats_job, into=keep))
        return rows

    @changes
    def retention_all(
        self,
        names: Iterable[str] | None = None,
        *,
        force: bool = False,
        only: Mapping[int, Collection[int]] | None = None,
        progress: Progress = no_tick,
    ) -> JobResults:
        """Apply the policies of these databases, or of all that have one, in waves of `WAVE`, and return the finished jobs.

        With `only` (database id → snapshot ids), no other snapshots and no other databases are touched. `force` also drops the
        last snapshots of a database. Bytes are deleted after the grace period, as always. A database whose retention job
        another worker is running is not in the result. All of it is work on rows of the manifest, so it always runs in this
        process.
        """
        if only is not None:
            db_ids: Iterable[int] = only
        elif names is None:
            db_ids = self._owners(t.RETENTION)
        else:
            db_ids = self._ids_of(names)

        def run(some: list[int], watch: Progress) -> list[Job]:
            return apply_many(self._manifest, some, force=force, only=only, progress=watch)

        return self._in_waves(db_ids, run, progress)

    @changes
    def start(self, kind: JobKind, db_id: int, *, runner: str = "") -> int:
        """Enqueue a job of an exclusive kind and return its id, or the id of the one that is already outstanding."""
        return start(self._wiring.context, kind, db_id, runner=runner)

    @changes
    def run_now(self, kind: JobKind, name: str, *, runner: str = "") -> Job:
        """Run a job of an exclusive kind on a database, or the outstanding one, and return the finished job."""
        return self._wiring.worker.run_or_wait(self.start(kind, self._id_of(name), runner=runner))

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _run_to_end(
        self, kind: JobKind, db_id: int, payload: dict[str, Any], progress: Progress, handler: Handler | None = None
    ) -> Job:
        """Run a new job in this thread. If it fails, its error is raised and it is not retried."""
        return self._wiring.worker.run_new(kind, db_id, payload, handler=handler, watch=progress, reraise=True)

    def _run_many(self, kind: JobKind, db_ids: list[int], runner: str, progress: Progress) -> list[Job]:
        return run_many(self._wiring.context, kind, db_ids, runner_name=runner, progress=progress)

    def _id_of(self, name: str) -> int:
        with self._manifest.read() as txn:
            return txn.database_id(name)

    def _ids_of(self, names: Iterable[str]) -> array[int]:
        # All names are looked up before anything is done: an unknown one must not end a run halfway.
        return array("Q", (self._id_of(name) for name in checked_names(names)))

    def _in_waves(
        self, db_ids: Iterable[int], run: Callable[[list[int], Progress], list[Job]], progress: Progress
    ) -> JobResults:
        """Call `run` for many databases, `WAVE` at a time, which bounds what one run plans and holds in memory."""
        with self._manifest.read() as txn:
            total = txn.count(t.DB)
        results = JobResults()
        rest, done, monotonic = iter(db_ids), 0, MonotonicProgress(progress)
        while wave := list(islice(rest, WAVE)):
            is_all = not done and len(wave) < WAVE
            results.add(run(wave, monotonic if is_all else part(monotonic, done, done + len(wave), total)))
            done += len(wave)
        monotonic.over()  # also after no wave, and if fewer databases than `total` were processed
        results.skipped = done - len(results)
        return results

    def _owners(self, table: t.Table[Any]) -> Iterator[int]:
        """Yield the databases that have rows in a table, without holding a transaction between two steps."""
        start = 0
        while True:
            with self._manifest.read() as txn:
                step = list(islice(txn.owners(table, start=start), WAVE))
            yield from step
            if len(step) < WAVE:
                return
            start = step[-1] + 1

    def _unabsorbed(self) -> Iterator[int]:
        """Yield the page databases with WAL of their own that no checkpoint has absorbed.

        One with a damaged row is yielded, too: its job fails and reports the row, and those of the others go on.
        """
        for db_id in self._owners(t.WAL_CATALOG):
            with self._manifest.read() as txn:
                if db_id in txn.refused_databases():  # reported when it was closed
                    continue
                try:
                    is_waiting = _is_unabsorbed(txn, db_id)
                except ManifestDamaged:
                    is_waiting = True
            if is_waiting:
                yield db_id


def _is_unabsorbed(txn: ReadTxn, db_id: int) -> bool:
    """Return whether this is a live page database with WAL that no checkpoint has absorbed, not counting inherited segments."""
    record = txn.database(db_id)
    if record is None or record.kind is not DbKind.PAGES or record.status is DbStatus.TOMBSTONED:
        return False
    return any(row.origin_db_id == db_id and row.state in UNABSORBED for _, row in txn.scan(t.WAL_CATALOG, db_id))


def audit_bucket(
    url: str,
    *,
    store_id: str = "",
    options: StoreOptions | None = None,
    runner: str = "",
    now_ms: int | None = None,
    progress: Tick = no_tick,
) -> ArchiveAudit:
    """Check that every moment of the archive in a bucket can be restored. Reads nothing but the bucket.

    `runner` is "threads", "spark" or "auto", as in `store.heavy`; `store_id` selects one of several stores in the bucket.
    """
    from quire.jobs.archive_audit.audit import audit_archive  # here: it loads Arrow, which other commands do not need

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
        return audit_archive(bucket, choose_store(bucket, store_id), choose, now_ms=now, progress=progress)
    finally:
        stores.close()
