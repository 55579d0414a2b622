"""Which handler does which kind of job. A kind that is not here stays pending until a worker that knows it comes.

A handler is loaded with the first job that it does: together they take longer to load (numpy, Arrow, the engines) than a round
of maintenance that finds nothing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.manifest.records import JobKind

if TYPE_CHECKING:
    from quire.jobs.context import JobContext
    from quire.jobs.handler import Handler, Outcome, Progress
    from quire.jobs.runner import Runners
    from quire.manifest.jobqueue import Job


def _audit(ctx: JobContext, job: Job, progress: Progress, **runner: Runners) -> Outcome:
    from quire.jobs.audit.handler import audit_job

    return audit_job(ctx, job, progress, **runner)


def _checkpoint(ctx: JobContext, job: Job, progress: Progress, **runner: Runners) -> Outcome:
    from quire.jobs.stream_checkpoint.handler import any_checkpoint_job

    return any_checkpoint_job(ctx, job, progress, **runner)


def _delete(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    from quire.jobs.delete.handler import delete_job

    return delete_job(ctx, job, progress)


def _evict(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    from quire.jobs.tiers.handler import evict_job

    return evict_job(ctx, job, progress)


def _hydrate(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    from quire.jobs.tiers.handler import hydrate_job

    return hydrate_job(ctx, job, progress)


def _merge(ctx: JobContext, job: Job, progress: Progress, **runner: Runners) -> Outcome:
    from quire.jobs.checkpoint.handler import merge_job

    return merge_job(ctx, job, progress, **runner)


def _restore(ctx: JobContext, job: Job, progress: Progress, **runner: Runners) -> Outcome:
    from quire.jobs.restore.handler import restore_job

    return restore_job(ctx, job, progress, **runner)


def _retention(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    from quire.jobs.retention import retention_job

    return retention_job(ctx, job, progress)


def _stats(ctx: JobContext, job: Job, progress: Progress, **runner: Any) -> Outcome:
    from quire.jobs.stats.handler import stats_job

    return stats_job(ctx, job, progress, **runner)


def _truncate(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    from quire.jobs.truncate.handler import truncate_job

    return truncate_job(ctx, job, progress)


def _upload(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    from quire.jobs.tiers.handler import upload_job

    return upload_job(ctx, job, progress)


def _verify(ctx: JobContext, job: Job, progress: Progress, **runner: Runners) -> Outcome:
    from quire.jobs.verify.handler import verify_job

    return verify_job(ctx, job, progress, **runner)


HANDLERS: dict[JobKind, Handler] = {
    JobKind.AUDIT: _audit,
    JobKind.CHECKPOINT: _checkpoint,
    JobKind.DELETE: _delete,
    JobKind.EVICT: _evict,
    JobKind.HYDRATE: _hydrate,
    JobKind.MERGE: _merge,
    JobKind.RESTORE: _restore,
    JobKind.RETENTION: _retention,
    JobKind.STATS: _stats,
    JobKind.TRUNCATE: _truncate,
    JobKind.UPLOAD: _upload,
    JobKind.VERIFY: _verify,
}
