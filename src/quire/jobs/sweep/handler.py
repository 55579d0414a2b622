"""The sweep job: object listings compared with the manifest, both ways; orphans are deleted if that was asked for.

Rules
  1. `plan.py` says what is an orphan. Nothing can come to refer to one: generations are burned before anything is written under
     them and never used again (M5, P10), so deleting it needs no intent.
  2. Listings are made by the runner, a range of keys in each task, and joined there with the names that the manifest knows:
     only differences come here, a few thousand at a time, and are looked up in the manifest as it is then.
  3. What was deleted stays deleted if an attempt is interrupted; the next one finds what is left.
  4. Where an object store is a directory, what puts that crashed left in its staging goes too, if it is old.
  5. The result names the first `LISTED_MAX` of each sort, and says whether there were more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.names import object_key
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.runner import Runner, Runners
from quire.jobs.sweep.plan import Space, ranges, real_orphans, really_missing, spaces
from quire.jobs.sweep.run import Listed, ListTask, Stray, list_range
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job
from quire.objects.local import LocalStore

WAVE_RANGES = 256
"""Compared in one run of the runner: 4 million names at most, 8 bytes of each in memory."""

SETTLED_AT_ONCE = 4_096
"""Differences that are looked up, and deleted, together."""

LISTED_MAX = 1_000
GRACE_SECONDS = 3_600.0
"""Objects younger than this, by their store's clock, are left alone: clocks differ (M8)."""

THREADS = Runners()


@dataclass(slots=True)
class _Sweep:
    """A sweep that runs: what it goes by, and what it has found."""

    ctx: JobContext
    spaces: dict[int, Space]
    before_ms: int
    delete: bool
    strays: list[Stray] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    total: dict[str, Any] = field(
        default_factory=lambda: {
            **dict.fromkeys(("objects", "bytes_listed", "orphaned", "bytes", "deleted", "lost", "staged"), 0),
            "more": False,
            "orphans": [],
            "missing": [],
        }
    )


def sweep_job(ctx: JobContext, job: Job, progress: Progress, *, runners: Runners = THREADS) -> Outcome:
    """Find objects that nothing speaks of, and rows whose objects are gone."""
    given = options(job, delete=False, runner="", grace_seconds=GRACE_SECONDS)
    before_ms = ctx.clock.now_ms() - int(given["grace_seconds"] * 1000)
    with ctx.manifest.read() as txn:
        sweep = _Sweep(ctx, spaces(ctx, txn), before_ms, given["delete"])
    for number, space in sweep.spaces.items():
        with ctx.manifest.read() as txn:
            planned = list(ranges(txn, number, space))
        size = sum(len(known) for _, known in planned) * 1024
        runner = runners.choose(given["runner"], size, partial(thread_runner, ctx, label="quire-sweep"))
        rest = iter(planned)
        while wave := list(islice(rest, WAVE_RANGES)):
            _compare(sweep, runner, wave, progress)
    if sweep.delete:
        sweep.total["staged"] = sum(_unstage(ctx, url) for url in {url for url, _ in sweep.spaces.values()})
    return Done(sweep.total)


def _unstage(ctx: JobContext, url: str) -> int:
    """Rule 4; the number of files removed."""
    store = ctx.open_store(url)
    return store.sweep_temporary() if isinstance(store, LocalStore) else 0


def _compare(sweep: _Sweep, runner: Runner, wave: Sequence[tuple[ListTask, list[int]]], progress: Progress) -> None:
    """Rule 2."""
    total = sweep.total
    names = np.sort(np.array([number for _, known in wave for number in known], np.uint64))
    found = runner.unmatched(
        list_range, [task for task, _ in wave], names, tick=lambda *_: progress(total["objects"], 0)
    )
    for number, told in found:
        if isinstance(told, Listed):
            total["objects"] += told.objects
            total["bytes_listed"] += told.size_bytes
        elif told is not None:
            sweep.strays.append(told)
        elif number is not None:
            sweep.missing.add(number)
        if len(sweep.strays) + len(sweep.missing) >= SETTLED_AT_ONCE:
            _settle(sweep)
    _settle(sweep)
    progress(total["objects"], 0)


def _settle(sweep: _Sweep) -> None:
    """What became of the differences, by the manifest as it is after the listing."""
    ctx, total = sweep.ctx, sweep.total
    with ctx.manifest.read() as txn:
        orphans = list(real_orphans(txn, sweep.strays, sweep.spaces, sweep.before_ms))
        lost = list(really_missing(ctx, txn, sweep.missing, sweep.spaces, ctx.open_store))
    sweep.strays, sweep.missing = [], set()
    total["lost"] += len(lost)
    for key, name, size in lost[: LISTED_MAX - len(total["missing"])]:
        total["missing"].append({"artifact": object_key(key), "object": name, "size_bytes": size})
    for stray, key in orphans:
        total["orphaned"] += 1
        total["bytes"] += stray.size_bytes
        if len(total["orphans"]) < LISTED_MAX:
            told = {"artifact": object_key(key), "object": stray.key, "size_bytes": stray.size_bytes, "url": stray.url}
            total["orphans"].append(told)
    total["more"] = total["orphaned"] > len(total["orphans"]) or total["lost"] > len(total["missing"])
    if sweep.delete and orphans:
        for url in {stray.url for stray, _ in orphans}:
            ctx.open_store(url).delete_many([stray.key for stray, _ in orphans if stray.url == url])
        hit("jobs.sweep.deleted")
        total["deleted"] += len(orphans)
    for stray, _ in orphans:
        emit(
            "warning",
            "sweep.orphan",
            object=stray.key,
            store=stray.url,
            size_bytes=stray.size_bytes,
            deleted=sweep.delete,
        )
