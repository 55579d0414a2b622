"""The sweep job: object listings compared with the manifest, both ways; orphans are deleted if that was asked for.

Rules
  1. `plan.py` says what is an orphan. Nothing can come to refer to one: generations are burned before anything is written under
     them and never used again (M5, P10), so deleting it needs no intent.
  2. A wave of ranges is listed, then compared, then swept; an attempt that is interrupted has swept whole waves or none, and
     the next one finds what is left.
  3. The result names the first `LISTED_MAX`; a sweep that found more than a range tells (`more`) is to be run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.names import object_key
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.runner import Runners
from quire.jobs.sweep.plan import Space, ranges, real_orphans, really_missing, spaces
from quire.jobs.sweep.run import Listed, list_range
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job

WAVE_RANGES = 256
"""Listed in one run of the runner: 4 million names at most."""

LISTED_MAX = 1_000
GRACE_SECONDS = 3_600.0
"""Objects younger than this, by their store's clock, are left alone: clocks differ (M8)."""

THREADS = Runners()


def sweep_job(ctx: JobContext, job: Job, progress: Progress, *, runners: Runners = THREADS) -> Outcome:
    """Find objects that nothing speaks of, and rows whose objects are gone."""
    given = options(job, delete=False, runner="", grace_seconds=GRACE_SECONDS)
    with ctx.manifest.read() as txn:
        found = spaces(ctx, txn)
    total: dict[str, Any] = {"objects": 0, "bytes_listed": 0, "orphaned": 0, "bytes": 0, "deleted": 0, "more": False}
    total |= {"orphans": [], "missing": []}
    before_ms = ctx.clock.now_ms() - int(given["grace_seconds"] * 1000)
    for number, space in found.items():
        with ctx.manifest.read() as txn:
            tasks = list(ranges(txn, number, space))
        size = sum(len(task.known) for task in tasks) // 8 * 1024
        runner = runners.choose(given["runner"], size, partial(thread_runner, ctx, label="quire-sweep"))
        rest = iter(tasks)
        while wave := list(islice(rest, WAVE_RANGES)):
            answers = runner.map(list_range, wave, tick=lambda *_: progress(total["objects"], 0))
            listed = [answer.result() for answer in answers]
            _settle(ctx, listed, found, before_ms, total, delete=given["delete"])
            progress(total["objects"], 0)
    return Done(total)


def _settle(
    ctx: JobContext,
    listed: Sequence[Listed],
    found: dict[int, Space],
    before_ms: int,
    total: dict[str, Any],
    *,
    delete: bool,
) -> None:
    """What a wave has found, by the manifest as it is after the listing."""
    for each in listed:
        total["objects"] += each.objects
        total["bytes_listed"] += each.size_bytes
        total["more"] = total["more"] or each.is_cut
    with ctx.manifest.read() as txn:
        orphans = list(real_orphans(txn, (stray for each in listed for stray in each.strays), found, before_ms))
        missing = {name for each in listed for name in each.missing}
        lost = list(really_missing(ctx, txn, missing, found, ctx.open_store))
    for key, name, size in lost[: LISTED_MAX - len(total["missing"])]:
        total["missing"].append({"artifact": object_key(key), "object": name, "size_bytes": size})
    for stray, key in orphans:
        total["orphaned"] += 1
        total["bytes"] += stray.size_bytes
        if len(total["orphans"]) < LISTED_MAX:
            told = {"artifact": object_key(key), "object": stray.key, "size_bytes": stray.size_bytes, "url": stray.url}
            total["orphans"].append(told)
    if delete:
        for url in {stray.url for stray, _ in orphans}:
            ctx.open_store(url).delete_many([stray.key for stray, _ in orphans if stray.url == url])
        hit("jobs.sweep.deleted")
        total["deleted"] += len(orphans)
    for stray, _ in orphans:
        emit("warning", "sweep.orphan", object=stray.key, store=stray.url, size_bytes=stray.size_bytes, deleted=delete)
