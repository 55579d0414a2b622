"""Which handler does which kind of job. A kind that is not here stays pending until a worker that knows it comes."""

from __future__ import annotations

from quire.jobs.audit.handler import audit_job
from quire.jobs.checkpoint.handler import merge_job
from quire.jobs.delete.handler import delete_job
from quire.jobs.handler import Handler
from quire.jobs.restore.handler import restore_job
from quire.jobs.retention import retention_job
from quire.jobs.stats.handler import stats_job
from quire.jobs.stream_checkpoint.handler import any_checkpoint_job
from quire.jobs.tiers.handler import evict_job, hydrate_job, upload_job
from quire.jobs.truncate.handler import truncate_job
from quire.jobs.verify.handler import verify_job
from quire.manifest.records import JobKind

HANDLERS: dict[JobKind, Handler] = {
    JobKind.AUDIT: audit_job,
    JobKind.CHECKPOINT: any_checkpoint_job,
    JobKind.DELETE: delete_job,
    JobKind.EVICT: evict_job,
    JobKind.HYDRATE: hydrate_job,
    JobKind.MERGE: merge_job,
    JobKind.RESTORE: restore_job,
    JobKind.RETENTION: retention_job,
    JobKind.STATS: stats_job,
    JobKind.TRUNCATE: truncate_job,
    JobKind.UPLOAD: upload_job,
    JobKind.VERIFY: verify_job,
}
