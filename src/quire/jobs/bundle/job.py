"""The bundle job: old chunks of manifest logs become weekly bundles, of one stream or of all.

Payload: `period_seconds` instead of a week, `runner`.

What is there after a crash, step by step
  looked                   nothing; the next attempt looks again
  bundles made             objects that nobody needs yet; the next attempt adopts them, byte for byte
  queued, some deleted     a queue in the stream's log, which its next tick drains
  done                     bundles instead of chunks

  - Listing, reading and writing is the runner's, threads or Spark; the records are the owner's.
  - A log that cannot be bundled keeps no other from it; the attempt has then failed, and the next one does what is left.

Which manifest logs a bundle job looks at: those of the live streams, or of one.

  - The manifest says which streams there are; what is in tier 2 is looked at by the runner (`run.look`): ten thousand
    listings are no work for a driver.

Retiring what a bundle supersedes, by records in the stream's own log.

    Tier2DeleteQueued ──▶ the objects are deleted ──▶ Tier2Deleted

  - The log is the owner's: a stream that is open is asked, another one is opened for the moment and closed again.
  - Objects of a stream that is not open are deleted while nobody is kept from opening it; if somebody has, it goes on itself.
  - A crash anywhere leaves chunks that are there although a bundle holds them, or a queue in the log: the next job, or the
    next tick of the stream, goes on.

Raises `StalePlan`, and what log and object store raise.
"""

from __future__ import annotations

from typing import Any

from quire.core.errors import QuireError, StoreClosed, StoreUnusable, UnknownDatabase, WrongKind
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.jobs.bundle.run import Looked, LookTask, MakeTask, look, make
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.manifest.jobqueue import Job
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbStatus
from quire.stream.engine import StreamEngine
from quire.stream.mlog_bundle import BundleResult
from quire.stream.mlog_bundle import publish as queue
from quire.stream.mlog_modes import Mode


def bundle_job(ctx: JobContext, job: Job, progress: Progress) -> Outcome:
    """Make the bundles that are due, and retire what they hold."""
    given = options(job, runner="", period_seconds=0.0)
    with ctx.manifest.read() as txn:
        tasks = looks(ctx, txn, job.db_id, given["period_seconds"] or ctx.bundle_seconds)
    assert ctx.streams is not None, "a worker of a store has the stream engine"
    total: dict[str, Any] = {"streams": len(tasks), "bundles": 0, "records": 0, "bytes": 0, "retired": 0, "failed": []}
    first: QuireError | None = None
    found: list[Looked] = []
    runner = ctx.choose_runner(given["runner"], len(tasks) * STREAM_BYTES, label="quire-bundle")
    for answer in runner.map(look, tasks, tick=progress):
        if answer.error is not None:
            first = _note(total, tasks[answer.key].stream_id, answer.error, first)
        else:
            found.append(answer.result())
    urls = {task.stream_id: task.url for task in tasks}
    wanted = [MakeTask(urls[looked.stream_id], due) for looked in found for due in looked.due]
    results = [BundleResult(task=each, key="", record_count=0, size_bytes=0) for it in found for each in it.left_over]
    runner = ctx.choose_runner(given["runner"], sum(each.size_bytes for each in found), label="quire-bundle")
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
            total["retired"] += retire(ctx.streams(), result)
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
    """Record that a log could not be bundled; the others go on, and the attempt fails at its end."""
    total["failed"].append(stream_id)
    emit("warning", "stream.mlog.bundle_failed", stream=stream_id, error=str(error))
    return first or error


# ── planning ──────────────────────────────────────────────────────────────────────────────────────────────────────────
STREAM_BYTES = 1 << 20
"""What looking at one stream counts for when a runner is chosen: from 256 streams on it is Spark's, if that is left open."""


def looks(ctx: JobContext, txn: ReadTxn, db_id: int, period_seconds: float) -> list[LookTask]:
    """One task for each log; `db_id` 0: of all streams."""
    now = ctx.clock.now_ms()
    found = []
    for stream_id, record in txn.databases():
        if record.kind is DbKind.STREAM and record.status is not DbStatus.TOMBSTONED and db_id in (0, stream_id):
            place_id, url = txn.place_of(stream_id, ctx.objects_url)
            found.append(
                LookTask(
                    stream_id=stream_id,
                    url=url,
                    now_ms=now,
                    period_seconds=period_seconds,
                    prefixes=txn.object_prefixes(place_id)[:1],
                )
            )
    if db_id and not found:
        raise WrongKind("only streams have a manifest log", hint="`quire ls` shows the kinds", db_id=db_id)
    return found


# ── publishing ────────────────────────────────────────────────────────────────────────────────────────────────────────
def retire(engine: StreamEngine, result: BundleResult) -> int:
    """Let go the chunks that a bundle holds; how many. None, if the stream's log is switched off."""
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
