"""The registry of job handlers by kind. A job whose kind is not listed stays pending.

A handler is imported with the first job of its kind: together they need numpy, Arrow and all engines, which take longer to
load than a round of maintenance that finds nothing to do.
"""

from __future__ import annotations

from importlib import import_module

from quire.jobs.context import JobContext
from quire.jobs.handler import Handler, Outcome, Progress
from quire.manifest.jobqueue import Job
from quire.manifest.records import JobKind


def _handler(module: str, function: str) -> Handler:
    def handle(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
        handler: Handler = getattr(import_module(f"quire.jobs.{module}"), function)
        return handler(ctx, job, progress)

    return handle


HANDLERS: dict[JobKind, Handler] = {
    JobKind.AUDIT: _handler("audit.job", "audit_job"),
    JobKind.BUNDLE: _handler("bundle.job", "bundle_job"),
    JobKind.CHECKPOINT: _handler("checkpoint.job", "checkpoint_job"),
    JobKind.COMPACTION: _handler("compaction.job", "compaction_job"),
    JobKind.DELETE: _handler("delete.job", "delete_job"),
    JobKind.EVICT: _handler("tiers.job", "evict_job"),
    JobKind.HYDRATE: _handler("tiers.job", "hydrate_job"),
    JobKind.MERGE: _handler("checkpoint.job", "merge_job"),
    JobKind.MIRROR: _handler("mirror.job", "mirror_job"),
    JobKind.RESTORE: _handler("restore.job", "restore_job"),
    JobKind.RETENTION: _handler("retention", "retention_job"),
    JobKind.STATS: _handler("stats.job", "stats_job"),
    JobKind.SWEEP: _handler("sweep.job", "sweep_job"),
    JobKind.TRUNCATE: _handler("truncate.job", "truncate_job"),
    JobKind.UPLOAD: _handler("tiers.job", "upload_job"),
    JobKind.VERIFY: _handler("verify.job", "verify_job"),
}
