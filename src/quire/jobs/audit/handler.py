"""The audit job: reference counts, heads and floors computed again from rows, by the runner, and compared with what is stored.

Rules
  1. It changes nothing. `quire manifest check --fix` mends what can be mended.
  2. Rows are read in one transaction, and sent to the runner as numbers; grouping and comparing is done there, and only
     differences come back. The result has the first `LISTED_MAX` of them, and how many there were.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.jobs.audit.plan import blocks, floors, told
from quire.jobs.audit.run import join_blocks, split_block
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.runner import Runners
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job

LISTED_MAX = 1_000
BYTES_A_ROW = 256
"""What comparing a row costs, as if it were so many bytes of a file: a million rows are worth a cluster."""

THREADS = Runners()


def audit_job(ctx: JobContext, job: Job, progress: Progress, *, runners: Runners = THREADS) -> Outcome:
    """Compare what rows say with what they add up to."""
    wish = options(job, runner="")["runner"]
    with ctx.manifest.read() as txn:
        given = list(blocks(txn))
        found: list[dict[str, Any]] = [told(each) for each in floors(txn)]
    rows = sum(len(each.rows) for each in given)
    runner = runners.choose(wish, rows * BYTES_A_ROW, partial(thread_runner, ctx, label="quire-audit"))
    differences = len(found)
    for answer in runner.regroup(split_block, given, join_blocks, tick=progress):
        result = answer.result()
        differences += len(result)
        found += [told(each) for each in result[: max(0, LISTED_MAX - len(found))]]
    return Done({"rows": rows, "differences": differences, "found": found, "runner": runner.name})
