"""The stats job: what each database and snapshot takes, added up by the runner.

Rules
  1. It reads rows of one transaction, a wave at a time, and changes nothing; what it holds meanwhile is said in `compute.py`.
  2. The job's result has the first `LISTED_MAX` databases and snapshots; `store.heavy.stats()` all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.core.json_values import plain
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.row_groups import part
from quire.jobs.runner import Runners
from quire.jobs.stats.compute import Totals, Usage, described, waves
from quire.jobs.stats.run import join_shares, split_rows
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job

LISTED_MAX = 1_000
BYTES_A_ROW = 256
"""What adding a row costs, as if it were so many bytes of a file: a million rows are worth a cluster."""

THREADS = Runners()


def stats_job(
    ctx: JobContext,
    job: Job,
    progress: Progress,
    *,
    runners: Runners = THREADS,
    into: Callable[[list[Usage]], object] = len,
) -> Outcome:
    """Add up where the bytes are; `into` gets all of it."""
    wish = options(job, runner="")["runner"]
    with ctx.manifest.read() as txn:
        found = waves(txn, ctx.clock.now_ms())
        total, done, sums = max(found.rows, 1), 0, Totals()
        progress(0, total)
        runner = runners.choose(wish, found.rows * BYTES_A_ROW, partial(thread_runner, ctx, label="quire-stats"))
        for wave in found:
            ends = done + sum(len(each.rows) for each in wave)
            for answer in runner.regroup(split_rows, wave, join_shares, tick=part(progress, done, ends, total)):
                sums.add(answer.result())
            done = ends
        told = described(txn, sums)
    into(told)
    progress(total, total)
    listed = [plain(each) for each in told[:LISTED_MAX]]
    return Done({"rows": found.rows, "holders": len(told), "usage": listed, "runner": runner.name})
