"""The bundle job: old chunks of manifest logs become weekly bundles, of one stream or of all.

Payload: `period_seconds` instead of a week, `runner`.

What is there after a crash, step by step
  looked                   nothing; the next attempt looks again
  bundles made             objects that nobody needs yet; the next attempt adopts them, byte for byte
  queued, some deleted     a queue in the stream's log, which its next tick drains
  done                     bundles instead of chunks

Rules
  1. Listing, reading and writing is the runner's, threads or Spark; the records are the owner's.
  2. A log that cannot be bundled keeps no other from it; the attempt has then failed, and the next one does what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from quire.core.errors import QuireError, StoreClosed, StoreUnusable, UnknownDatabase
from quire.core.events import emit
from quire.jobs.bundle.plan import STREAM_BYTES, looks
from quire.jobs.bundle.publish import retire
from quire.jobs.bundle.run import Looked, MakeTask, look, make
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.runner import Runners
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job
from quire.stream.engine import StreamEngine
from quire.stream.mlog_bundle import BundleResult

THREADS = Runners()
WEEK_SECONDS = 7 * 86_400.0


def bundle_job(
    ctx: JobContext,
    job: Job,
    progress: Progress,
    *,
    streams: Callable[[], StreamEngine],
    runners: Runners = THREADS,
    period_seconds: float = WEEK_SECONDS,
) -> Outcome:
    """Make the bundles that are due, and retire what they hold."""
    given = options(job, runner="", period_seconds=0.0)
    with ctx.manifest.read() as txn:
        tasks = looks(ctx, txn, job.db_id, given["period_seconds"] or period_seconds)
    threads = partial(thread_runner, ctx, label="quire-bundle")
    total: dict[str, Any] = {"streams": len(tasks), "bundles": 0, "records": 0, "bytes": 0, "retired": 0, "failed": []}
    first: QuireError | None = None
    found: list[Looked] = []
    runner = runners.choose(given["runner"], len(tasks) * STREAM_BYTES, threads)
    for answer in runner.map(look, tasks, tick=progress):
        if answer.error is not None:
            first = _note(total, tasks[answer.key].stream_id, answer.error, first)
        else:
            found.append(answer.result())
    urls = {task.stream_id: task.url for task in tasks}
    wanted = [MakeTask(urls[looked.stream_id], due) for looked in found for due in looked.due]
    results = [BundleResult(task=each, key="", record_count=0, size_bytes=0) for it in found for each in it.left_over]
    runner = runners.choose(given["runner"], sum(each.size_bytes for each in found), threads)
    if wanted:
        ctx.before_put()  # tasks on executors cannot ask
    for made in runner.map(make, wanted, tick=progress):
        if made.error is not None:
            first = _note(total, wanted[made.key].task.stream_id, made.error, first)
            continue
        result = made.result()
        results.append(result)
        total["bundles"] += 1
        total["records"] += result.record_count
        total["bytes"] += result.size_bytes
    for done, result in enumerate(results):
        progress(done, len(results))
        try:
            total["retired"] += retire(streams(), result)
        except (StoreClosed, StoreUnusable):
            raise
        except UnknownDatabase:
            continue  # it was dropped meanwhile: its objects go with it
        except QuireError as error:
            first = _note(total, result.task.stream_id, error, first)
    if first is not None:
        raise first
    return Done(total)


def _note(total: dict[str, Any], stream_id: int, error: QuireError, first: QuireError | None) -> QuireError:
    """Record that a log could not be bundled; the others go on, and the attempt fails at its end (rule 2)."""
    total["failed"].append(stream_id)
    emit("warning", "stream.mlog.bundle_failed", stream=stream_id, error=str(error))
    return first or error
