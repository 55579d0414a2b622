"""The audit job: reference counts, heads and floors computed again from rows, by the runner, and compared with what is stored.

Rules
  1. It changes nothing. `quire manifest check --fix` mends what can be mended.
  2. Rows are read in one transaction, and sent to the runner as numbers, a wave at a time (`plan.py`), so that the driver's
     memory does not grow with them; grouping and comparing is done there, and only differences come back. The result has the
     first `LISTED_MAX` of them, and how many there were.
  3. Who runs it is chosen by the sizes of the tables that are read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from quire.jobs.audit.plan import floors, told, told_unread, waves, work
from quire.jobs.audit.run import join_blocks, split_block
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.row_groups import part
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
        total, done, rows = work(txn), 0, 0
        progress(0, total)
        runner = runners.choose(wish, total * BYTES_A_ROW, partial(thread_runner, ctx, label="quire-audit"))
        found: list[dict[str, Any]] = [told(each) for each in floors(txn)]
        differences = len(found)
        for wave in waves(txn):
            rows += wave.rows
            if wave.unread:
                differences += 1
                found.append(told_unread(wave))
            tick = part(progress, done, wave.done, total)
            for answer in runner.regroup(split_block, wave.blocks, join_blocks, tick=tick) if wave.blocks else ():
                result = answer.result()
                differences += len(result)
                found += [told(each) for each in result[: max(0, LISTED_MAX - len(found))]]
            done = wave.done
    progress(total, total)
    return Done({"rows": rows, "differences": differences, "found": found, "runner": runner.name})
