"""Which handler does which kind of job. A kind that is not here stays pending until a worker that knows it comes.

A handler is loaded with the first job that it does: together they take longer to load (numpy, Arrow, the engines) than a round
of maintenance that finds nothing to do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.manifest.records import JobKind

if TYPE_CHECKING:
    from quire.jobs.context import JobContext
    from quire.jobs.handler import Handler, Outcome, Progress
    from quire.manifest.jobqueue import Job


def _loaded_late(module: str, name: str) -> Handler:
    def handle(ctx: JobContext, job: Job, progress: Progress, **runner: Any) -> Outcome:
        done: Outcome = getattr(import_module(f"quire.jobs.{module}"), name)(ctx, job, progress, **runner)
        return done

    return handle


HANDLERS: dict[JobKind, Handler] = {
    JobKind.AUDIT: _loaded_late("audit.handler", "audit_job"),
    JobKind.CHECKPOINT: _loaded_late("stream_checkpoint.handler", "any_checkpoint_job"),
    JobKind.DELETE: _loaded_late("delete.handler", "delete_job"),
    JobKind.EVICT: _loaded_late("tiers.handler", "evict_job"),
    JobKind.HYDRATE: _loaded_late("tiers.handler", "hydrate_job"),
    JobKind.MERGE: _loaded_late("checkpoint.handler", "merge_job"),
    JobKind.RESTORE: _loaded_late("restore.handler", "restore_job"),
    JobKind.RETENTION: _loaded_late("retention", "retention_job"),
    JobKind.STATS: _loaded_late("stats.handler", "stats_job"),
    JobKind.TRUNCATE: _loaded_late("truncate.handler", "truncate_job"),
    JobKind.UPLOAD: _loaded_late("tiers.handler", "upload_job"),
    JobKind.VERIFY: _loaded_late("verify.handler", "verify_job"),
}
