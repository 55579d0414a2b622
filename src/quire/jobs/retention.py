"""The retention job: applies a database's policy to its snapshots immediately, for one database or for many in one run.

The owner's maintenance applies policies periodically; this job is for users and programs that want it done now. Its payload
states whether it may drop the last snapshots (`force`), and which snapshots were confirmed (`only`: ids; without it, all may
be dropped).

The drops, the delete jobs for the references they release, and the end of the job are one batch: a job that was taken away
drops nothing, and a repeated job finds nothing to drop. A crash leaves either all of it or nothing.

Threads: one caller, see `jobs/batches.py`. Raises what interrupts the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from quire.core.errors import (
    DatabaseTombstoned,
    InvalidInput,
    QuireError,
    StalePlan,
    StoreClosed,
    StoreUnusable,
    UnknownSnapshot,
)
from quire.durable.failpoints import hit
from quire.jobs.batches import BatchRun
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.jobs.leases import LeasedJob
from quire.jobs.runner import no_tick
from quire.manifest.jobqueue import LEASE_SECONDS, Job
from quire.manifest.ops.base import Op
from quire.manifest.ops.jobs import CompleteJob
from quire.manifest.records import DbStatus, JobKind, JobState
from quire.manifest.store import ManifestStore

NAMED_MAX = 100
"""Dropped snapshots that the result of a job lists by name."""

PLANS_MAX = 5
"""How often a database is planned while its snapshots change concurrently."""

Batch = tuple[LeasedJob, list[Op]]


def retention_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Drop the snapshots that no rule keeps; raise `WouldDropEverything` if these are all of them, unless `force` is set."""
    done = work_of(ctx.manifest, job)
    progress(0, done.result["dropped"])
    hit("jobs.retention.planned")
    return done


def work_of(manifest: ManifestStore, job: Job, *, force: bool = False, only: Collection[int] = ()) -> Completed:
    """Return the operations and the result of a job. A caller may also set `force`, and `only` in place of the payload's."""
    asked = options(job, force=False, only=[])
    if not all(type(snapshot_id) is int for snapshot_id in asked["only"]):
        raise InvalidInput("a retention job takes snapshot ids", job_id=job.job_id, only=asked["only"])
    with manifest.read() as txn:
        record = txn.database(job.db_id)
    if record is not None and record.status is DbStatus.TOMBSTONED:
        raise DatabaseTombstoned("the database was dropped", db_id=job.db_id, name=record.name)
    plan = manifest.retention.plan(job.db_id)
    if chosen := only or asked["only"]:
        plan = plan.only(set(chosen))
    ops, dropped = manifest.retention.drops(plan, force=force or asked["force"]), plan.dropped
    names = [snapshot.name or f"#{snapshot.snapshot_id}" for snapshot in dropped[:NAMED_MAX]]
    result = {"dropped": len(dropped), "kept": len(plan.decisions) - len(dropped), "snapshots": names}
    return Completed(result, tuple(ops))


def apply_many(
    manifest: ManifestStore,
    db_ids: Iterable[int],
    *,
    force: bool = False,
    only: Mapping[int, Collection[int]] | None = None,
    progress: Progress = no_tick,
) -> list[Job]:
    """Apply the policies of these databases now; return the jobs as they ended, except those that another worker holds.

    With `force`, the last snapshots may be dropped, too. `only` (database → ids) lists the snapshots that may be dropped; for a
    database that is not in it, all may be.
    """
    if only and not all(only.values()):
        raise InvalidInput(
            "no snapshot to drop was given for a database: omit the database",
            databases=[db_id for db_id in only if not only[db_id]],
        )
    run = _RetentionRun(manifest, force, only or {})
    with run.alive():
        asked = run.claim(run.enqueue(db_ids))
        hit("jobs.retention.claimed")
        run.drop(progress)
    return [manifest.jobs.get(job_id) for job_id in asked]


class _RetentionRun(BatchRun[LeasedJob]):
    """One run over the retention jobs of many databases."""

    def __init__(self, manifest: ManifestStore, force: bool, only: Mapping[int, Collection[int]]) -> None:
        super().__init__(manifest, JobKind.RETENTION, LeasedJob, payload=self._payload_of, lease_seconds=LEASE_SECONDS)
        self._force = force
        self._only = only
        self._failures: list[tuple[LeasedJob, QuireError]] = []

    def _payload_of(self, db_id: int) -> dict[str, object] | None:
        asked: dict[str, object] = {"force": True} if self._force else {}
        if db_id in self._only:
            asked["only"] = sorted(self._only[db_id])
        return asked or None

    def drop(self, progress: Progress) -> None:
        """Plan each database, and commit its drops while the next one is planned.

        A database is planned again if one of its snapshots was dropped or undropped after the plan was made, or if its
        expiry was postponed.
        """
        waiting, total = list(self.held.values()), len(self.held)
        progress(0, total)
        for plans_left in reversed(range(PLANS_MAX)):
            overtaken: list[LeasedJob] = []
            for held, error in self.commit(self._batches(waiting)):
                if error is None:
                    self.held.pop(held.db_id, None)
                    hit("jobs.retention.published")
                    progress(total - len(self.held), total)
                elif isinstance(error, (UnknownSnapshot, StalePlan)) and plans_left:
                    overtaken.append(held)
                else:
                    self._failures.append((held, error))
            if not (waiting := overtaken):
                break
        self.fail_all(self._failures)
        progress(total, total)

    def _batches(self, waiting: Iterable[LeasedJob]) -> Iterator[Batch]:
        """Yield the batch of each database; one that cannot be planned has none, and fails at the end."""
        for held in waiting:
            job = held.job
            try:
                done = work_of(self._manifest, job, force=self._force, only=self._only.get(held.db_id, ()))
            except (StoreClosed, StoreUnusable):
                raise
            except QuireError as error:
                self._failures.append((held, error))
                continue
            hit("jobs.retention.planned")
            packed = msgspec.msgpack.encode(done.result)
            yield held, [*done.ops, CompleteJob(job.job_id, JobState.SUCCEEDED, job.record.attempt, result=packed)]
