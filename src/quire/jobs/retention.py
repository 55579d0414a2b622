"""The retention job: applies a database's policy to its snapshots, now; of one database, or of many in one run.

The owner's maintenance applies policies by itself; this job is for a person, or a program, that wants it done now. Its
payload says whether it may take the last snapshots (`force`), and which ones somebody was asked about (`only`: ids; without
it, all may go).

A job's drops, the delete jobs of what they let go and the job's own end are one batch: a job that was taken away drops
nothing, and one that is repeated finds nothing to drop. A crash leaves all or nothing of it.

Threads: one caller, see `jobs/batches.py`. Raises what interrupts the caller.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from quire.core.errors import DatabaseTombstoned, InvalidInput, QuireError, StoreClosed, StoreUnusable, UnknownSnapshot
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
"""Dropped snapshots that a job's result names."""

PLANS_MAX = 5
"""How often a database is planned whose snapshots others drop meanwhile."""

Batch = tuple[LeasedJob, list[Op]]


def retention_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Drop the snapshots that no rule keeps; `WouldDropEverything` if that is all of them and nobody said that it is meant."""
    done = work_of(ctx.manifest, job)
    progress(0, done.result["dropped"])
    hit("jobs.retention.planned")
    return done


def work_of(manifest: ManifestStore, job: Job, *, force: bool = False, only: Collection[int] = ()) -> Completed:
    """What a job has to do, and what it will have done. Whoever runs it now may say `force` too, and `only` other ones."""
    asked = options(job, force=False, only=[])
    if not all(type(snapshot_id) is int for snapshot_id in asked["only"]):
        raise InvalidInput("a retention job takes ids of snapshots", job_id=job.job_id, only=asked["only"])
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
    """Apply the policies of these databases now; their jobs, as they ended. Those that somebody else is at are not among them.

    With `force` also where that takes the last snapshots. `only` has the snapshots (database → ids) that may go; of a database
    that is not in it, all may.
    """
    if only and not all(only.values()):
        raise InvalidInput(
            "no snapshot may go: leave the database out", databases=[db_id for db_id in only if not only[db_id]]
        )
    run = _RetentionRun(manifest, force, only or {})
    with run.alive():
        asked = run.claim(run.enqueue(db_ids))
        hit("jobs.retention.claimed")
        run.drop(progress)
    return [manifest.jobs.get(job_id) for job_id in asked]


class _RetentionRun(BatchRun[LeasedJob]):
    """One run."""

    def __init__(self, manifest: ManifestStore, force: bool, only: Mapping[int, Collection[int]]) -> None:
        super().__init__(manifest, JobKind.RETENTION, LeasedJob, payload=self._asked, lease_seconds=LEASE_SECONDS)
        self._force = force
        self._only = only
        self._failures: list[tuple[LeasedJob, QuireError]] = []

    def _asked(self, db_id: int) -> dict[str, object] | None:
        asked: dict[str, object] = {"force": True} if self._force else {}
        if db_id in self._only:
            asked["only"] = sorted(self._only[db_id])
        return asked or None

    def drop(self, progress: Progress) -> None:
        """Plan each database, and commit what comes of it, while the next one is planned.

        A database of which a snapshot went since its plan was made is planned again.
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
                elif isinstance(error, UnknownSnapshot) and plans_left:
                    overtaken.append(held)
                else:
                    self._failures.append((held, error))
            if not (waiting := overtaken):
                break
        self.fail_all(self._failures)
        progress(total, total)

    def _batches(self, waiting: Iterable[LeasedJob]) -> Iterator[Batch]:
        """The batch of each database; one that cannot be planned has none, and fails at the end."""
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
