"""The restore job: a snapshot of a page database becomes a file, in parallel.

Rules
  1. An existing file is not replaced unless that was asked for: then the job has failed for good, waiting does not help. Only a
     later attempt, which may find what an earlier one has made, looks whether it is the same (`export.py`).
  2. What is there after a crash is `<file>.tmp`, whole or in part, which the next attempt writes anew, or the file.
"""

from __future__ import annotations

from functools import partial

from quire.core.errors import AlreadyExists, InvalidInput
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.restore.export import restore
from quire.jobs.runner import Runners
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job
from quire.pages.anchors import find_snapshot
from quire.pages.view_build import view_of

THREADS = Runners()


def restore_job(ctx: JobContext, job: Job, progress: Progress, *, runners: Runners = THREADS) -> Outcome:
    """Write a snapshot (payload `snapshot`, an id) to a file (payload `path`)."""
    given = options(job, snapshot=0, path="", replace=False, runner="")
    with ctx.manifest.read() as txn:
        snapshot_id, record = find_snapshot(txn, job.db_id, given["snapshot"])
        view = view_of(txn, job.db_id, snapshot_id, record, ctx.objects_url)
    size = view.size_pages * view.page_size
    runner = runners.choose(given["runner"], size, partial(thread_runner, ctx, label="quire-restore"))
    how = {"replace": given["replace"], "adopt": job.record.attempt > 1}
    try:
        return Done(restore(view, given["path"], runner, ctx.disk, **how, tick=progress))
    except AlreadyExists as error:
        raise InvalidInput(error.what, hint=error.hint, path=given["path"]) from error  # rule 1
