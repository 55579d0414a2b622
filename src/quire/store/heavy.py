"""The jobs that a person starts and that read or write many bytes: `store.heavy`.

Terms
  runner   who does the reading and writing: "threads", "spark", or "auto" (threads below 256 MiB of work, else Spark)

Rules
  1. Each is a job of the manifest, run now, in this thread as far as the driver's side goes: it is seen by `quire jobs`, may be
     cancelled, and goes on after a crash.
  2. What runs over many databases is one job for each of them and one run of the runner for all (`jobs/checkpoint/many.py`).

Threads: any. Raises what the jobs raise, `SparkUnavailable` where Spark was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.core.errors import JobAlreadyPending
from quire.jobs.audit.table import audit_table, damaged, write_report
from quire.jobs.checkpoint.many import run_many
from quire.jobs.handler import Progress
from quire.jobs.restore.export import restore
from quire.jobs.runner import no_tick
from quire.jobs.stats.compute import Usage, usage
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job
from quire.manifest.records import DbKind, JobKind
from quire.store.info import has_open_segment, live_databases

if TYPE_CHECKING:
    import pyarrow as pa

    from quire.store.rooms import Rooms
    from quire.store.store import Store


class Heavy:
    """The heavy jobs of one opened store."""

    def __init__(self, store: Store, rooms: Rooms) -> None:
        self._store = store
        self._rooms = rooms
        self._manifest = store.manifest

    def checkpoint(self, name: str, *, runner: str = "") -> Job:
        """Bring what is in a database's WAL into chunks; the job, as it ended."""
        db_id = self._id_of(name)
        self._recover(db_id)
        return self._run_now(JobKind.CHECKPOINT, db_id, runner)

    def merge(self, name: str, *, runner: str = "") -> Job:
        """Rewrite slots of a database that consist of several chunks; the job, as it ended."""
        return self._run_now(JobKind.MERGE, self._id_of(name), runner)

    def checkpoint_all(
        self, names: Iterable[str] | None = None, *, runner: str = "", progress: Progress = no_tick
    ) -> list[Job]:
        """Checkpoint these page databases, or all of them, in one run; their jobs, as they ended (rule 2)."""
        db_ids = self._ids_of(names)
        for db_id in db_ids:
            self._recover(db_id, leave_open=False)
        return self._run_many(JobKind.CHECKPOINT, db_ids, runner, progress)

    def merge_all(
        self, names: Iterable[str] | None = None, *, runner: str = "", progress: Progress = no_tick
    ) -> list[Job]:
        """Merge the chains of these page databases, or of all, in one run; their jobs, as they ended."""
        return self._run_many(JobKind.MERGE, self._ids_of(names), runner, progress)

    def verify(self, *, max_age_seconds: float = 0, max_duration_seconds: float = 0, runner: str = "") -> Job:
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
        return self._run_job(self._manifest.jobs.enqueue(JobKind.VERIFY, 0, payload))

    def sweep(self, *, delete: bool = False, runner: str = "", grace_seconds: float = 3_600.0) -> Job:
        """Compare listings of objects with the manifest, both ways; with `delete`, orphans go. The job, as it ended."""
        payload = {"delete": delete, "runner": runner, "grace_seconds": float(grace_seconds)}
        return self._run_job(self._manifest.jobs.enqueue(JobKind.SWEEP, 0, payload))

    def damaged(self) -> list[dict[str, Any]]:
        """Every artifact that was found missing or altered, and was not found good since."""
        with self._manifest.read() as txn:
            return list(damaged(txn))

    def write_report(self, path: str, more: Iterable[dict[str, Any]] = ()) -> None:
        """What is damaged, and `more` of the same columns (orphans, say), as a Parquet file."""
        write_report(path, [*self.damaged(), *more])

    def audit(self, *, runner: str = "") -> pa.Table:
        """Everything that rows and objects disagree about, as a table.

        That is broken rules of the manifest (reference counts, heads and floors are computed again from rows), artifacts that
        are damaged, and objects that are missing or orphaned by their listings.
        """
        swept = self.sweep(runner=runner)
        return audit_table(self._manifest.check(), self.damaged(), swept.result or {})

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
        view, context = self._store.view(name, snapshot), self._rooms.context
        size = view.size_pages * view.page_size
        chosen = self._rooms.runners.choose(runner, size, partial(thread_runner, context, label="quire-restore"))
        return restore(view, target, chosen, context.disk, replace=replace, tick=progress)

    def stats(self) -> list[Usage]:
        """What each database and snapshot takes: alone, shared, by tier."""
        with self._manifest.read() as txn:
            return usage(txn, self._manifest.clock.now_ms())

    # ── how ───────────────────────────────────────────────────────────────────────────────────────────────────────────
    def _run_now(self, kind: JobKind, db_id: int, runner: str) -> Job:
        """Run a job of an exclusive kind in this thread: the outstanding one, if there is one."""
        jobs = self._manifest.jobs
        try:
            job_id = jobs.enqueue(kind, db_id, {"runner": runner} if runner else None)
        except JobAlreadyPending:
            job_id = jobs.outstanding(db_id, kind)
        return self._run_job(job_id)

    def _run_job(self, job_id: int) -> Job:
        self._rooms.worker.run(job_id)
        return self._manifest.jobs.get(job_id)

    def _run_many(self, kind: JobKind, db_ids: list[int], runner: str, progress: Progress) -> list[Job]:
        return run_many(self._rooms.context, kind, db_ids, self._rooms.runners, wish=runner, progress=progress)

    def _recover(self, db_id: int, *, leave_open: bool = True) -> None:
        """A crashed owner may have left a segment that must be recovered before anything of it can be absorbed."""
        pages = self._rooms.pages
        with self._manifest.read() as txn:
            if not has_open_segment(txn, db_id):
                return
        is_open = any(store.db_id == db_id for store in pages.stores())
        if not is_open:
            pages.open(db_id)
            if not leave_open:  # ten thousand open databases would be as many open files
                pages.flush(db_id)
                pages.close_database(db_id)

    def _id_of(self, name: str) -> int:
        with self._manifest.read() as txn:
            return txn.database_id(name)

    def _ids_of(self, names: Iterable[str] | None) -> list[int]:
        if names is not None:
            return [self._id_of(name) for name in names]
        with self._manifest.read() as txn:
            return [each.db_id for each in live_databases(txn) if each.kind is DbKind.PAGES]
