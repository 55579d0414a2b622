"""What a running job tells the manifest on its way.

Rules
  1. A step commits only while its attempt holds the job's lease: the lease is renewed in the step's own transaction, so a
     worker that was given up (a zombie) changes nothing any more, whatever it still believes.
  2. What the job leads to is committed with its end instead: `Done(ops=…)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.core.errors import IllegalTransition
from quire.core.ids import ArtifactKey
from quire.jobs.context import JobContext
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.artifacts import UpdateArtifact
from quire.manifest.ops.base import Op
from quire.manifest.ops.jobs import RenewJobLease


def commit_step(ctx: JobContext, job: Job, ops: Iterable[Op]) -> None:
    """Commit effects of a job that goes on; `IllegalTransition` if it is no longer this attempt's."""
    with ctx.manifest.read() as txn:
        lease = txn.get(t.JOB_LEASES, job.job_id)
    if lease is None or job.lease is None or lease.worker != job.lease.worker:
        raise IllegalTransition("the job is no longer this worker's", hint="stop working on it", job_id=job.job_id)
    renewal = RenewJobLease(job.job_id, lease.worker, lease.expires_at_ms, lease.done, lease.total)
    ctx.manifest.submit([renewal, *ops]).result()


def update(key: ArtifactKey, **changes: Any) -> UpdateArtifact:
    """The operation that changes what an artifact's row says of its bytes."""
    return UpdateArtifact(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id, **changes)
