"""The retention job: applies a database's policy to its snapshots, now.

The owner's upkeep applies policies by itself; this job is for a person, or a program, that wants it done now, and knows whether
it may take the last snapshots (payload `{"force": true}`).

Durable is one batch: the drops, with the delete jobs of what they let go. A crash before it leaves everything, a crash after it
leaves nothing to drop: the repeat finds that out.
"""

from __future__ import annotations

from quire.durable.failpoints import hit
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.manifest.jobqueue import Job

NAMED_MAX = 100
"""Dropped snapshots that a job's result names."""


def retention_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Drop the snapshots that no rule keeps; `WouldDropEverything` if that is all of them and nobody said that it is meant."""
    force = options(job, force=False)["force"]
    retention = ctx.manifest.retention
    plan = retention.plan(job.db_id)
    progress(0, len(plan.dropped))
    dropped = retention.apply(plan, force=force)
    hit("jobs.retention.applied")
    names = [each.name or f"#{each.snapshot_id}" for each in dropped[:NAMED_MAX]]
    return Done({"dropped": len(dropped), "kept": len(plan.decisions) - len(dropped), "snapshots": names})
