"""The bundle job: combines old chunks of manifest logs into weekly bundles, for one stream or for all live ones.

Payload: `period_seconds` instead of a week, `runner`. The runner lists, reads and writes (ten thousand listings are too much
for a driver); the owner writes the records. A log that cannot be bundled does not prevent the bundling of other logs, but the
attempt then fails.

    Tier2DeleteQueued ──▶ the objects are deleted ──▶ Tier2Deleted

The chunks that a bundle supersedes are retired by records in the stream's own log; a stream that is closed is opened
temporarily. The state after a crash:
  bundles made             objects that nothing needs yet; the next attempt adopts them, byte for byte
  queued, some deleted     a queue in the stream's log, which its next tick drains

Raises `StalePlan`, and what log and object store raise.
"""

from __future__ import annotations

from typing import Any

from quire.core.errors import QuireError, StoreClosed, StoreUnusable, UnknownDatabase, WrongKind
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.jobs.bundle.run import ListedLog, ListLogTask, MakeTask, list_log_objects, make
from quire.jobs.context import JobContext
from quire.jobs.handler import Completed, Outcome, Progress, options
from quire.manifest.jobqueue import Job
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus
from quire.stream.engine import StreamEngine
from quire.stream.mlog_bundle import BundleResult
from quire.stream.mlog_bundle import publish as queue
from quire.stream.mlog_modes import Mode


def bundle_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Make the bundles that are due, and retire the chunks that they contain."""
    given = options(job, runner="", period_seconds=0.0)
    with ctx.manifest.read() as txn:
        tasks = listing_tasks(ctx, txn, job.db_id, given["period_seconds"] or ctx.bundle_seconds)
    assert ctx.streams is not None, "a worker of a store has the stream engine"
    total: dict[str, Any] = {"streams": len(tasks), "bundles": 0, "records": 0, "bytes": 0, "retired": 0, "failed": []}
    first: QuireError | None = None
    logs: list[ListedLog] = []
    runner = ctx.choose_runner(given["runner"], len(tasks) * STREAM_BYTES, label="quire-bundle")
    for answer in runner.map(list_log_objects, tasks, tick=progress):
        if answer.error is not None:
            first = _note(total, tasks[answer.key].stream_id, answer.error, first)
        else:
            logs.append(answer.result())
    urls = {task.stream_id: task.url for task in tasks}
    wanted = [MakeTask(urls[log.stream_id], due) for log in logs for due in log.due]
    results = [BundleResult(task=task, key="", record_count=0, size_bytes=0) for log in logs for task in log.left_over]
    runner = ctx.choose_runner(given["runner"], sum(log.size_bytes for log in logs), label="quire-bundle")
    if wanted:
        ctx.before_put()  # tasks on executors cannot check for fencing themselves
    for bundled in runner.map(make, wanted, tick=progress):
        if bundled.error is not None:
            first = _note(total, wanted[bundled.key].task.stream_id, bundled.error, first)
            continue
        result = bundled.result()
        results.append(result)
        total["bundles"] += 1
        total["records"] += result.record_count
        total["bytes"] += result.size_bytes
    for done, result in enumerate(results):
        progress(done, len(results))
        try:
            total["retired"] += retire(ctx.streams(), result)
        except (StoreClosed, StoreUnusable):
            raise
        except UnknownDatabase:
            continue  # the stream was dropped in the meantime, and its objects with it
        except QuireError as error:
            first = _note(total, result.task.stream_id, error, first)
    if first is not None:
        raise first
    return Completed(total)


def _note(total: dict[str, Any], stream_id: int, error: QuireError, first: QuireError | None) -> QuireError:
    """Record that a log could not be bundled; the run continues with other logs, and the attempt fails at its end."""
    total["failed"].append(stream_id)
    emit("warning", "stream.mlog.bundle_failed", stream=stream_id, error=str(error))
    return first or error


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
STREAM_BYTES = 1 << 20
"""Bytes of work that the listing of one stream counts as when a runner is chosen: `auto` uses Spark from 256 streams on."""


def listing_tasks(ctx: JobContext, txn: ReadTxn, db_id: int, period_seconds: float) -> list[ListLogTask]:
    """Return one task for each log; `db_id` 0 means all streams."""
    now = ctx.clock.now_ms()
    tasks = []
    for stream_id, record in txn.databases():
        if record.kind is DbKind.STREAM and record.status is not DbStatus.TOMBSTONED and db_id in (0, stream_id):
            place_id, url = txn.place_of(stream_id, ctx.objects_url)
            tasks.append(
                ListLogTask(
                    stream_id=stream_id,
                    url=url,
                    now_ms=now,
                    period_seconds=period_seconds,
                    prefixes=txn.object_prefixes(place_id)[:1],
                )
            )
    if db_id and not tasks:
        raise WrongKind("only streams have a manifest log", hint="`quire ls` shows the kinds", db_id=db_id)
    return tasks


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def retire(engine: StreamEngine, result: BundleResult) -> int:
    """Retire the chunks that a bundle contains; return how many: 0 if the stream's log is switched off."""
    stream_id = result.task.stream_id
    with engine.borrowed(stream_id) as (stream, is_open):
        if stream.mode is Mode.OFF:
            return 0
        keys = queue(stream.ledger.log, result)
        hit("jobs.bundle.queued")
    if is_open:
        stream.ledger.log.tick()
        return len(keys)
    engine.collect_of(stream_id, keys)
    hit("jobs.bundle.deleted")
    with engine.borrowed(stream_id) as (stream, is_open):
        if is_open:
            stream.ledger.log.tick()
        else:
            stream.ledger.log.drain_own_deletes()
    return len(keys)
