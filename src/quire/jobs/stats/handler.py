"""The stats job: what each database and snapshot takes, added up by the runner.

It reads rows of one transaction and changes nothing. The result has the first `LISTED_MAX` of them; `store.heavy.stats()` all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from quire.core.plain import plain
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.runner import Runners
from quire.jobs.stats.compute import Usage, blocks, described, total
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
        given = list(blocks(txn, ctx.clock.now_ms()))
        rows = sum(len(each.rows) for each in given)
        runner = runners.choose(wish, rows * BYTES_A_ROW, partial(thread_runner, ctx, label="quire-stats"))
        answers = runner.regroup(split_rows, given, join_shares, tick=progress)
        found = described(txn, total(answer.result() for answer in answers))
    into(found)
    told = [plain(each) for each in found[:LISTED_MAX]]
    return Done({"rows": rows, "holders": len(found), "usage": told, "runner": runner.name})
