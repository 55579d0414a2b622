"""The sweep job: object listings compared with the manifest, both ways; orphans are deleted if that was asked for.

Rules
  1. `plan.py` says what is an orphan. Nothing can come to refer to one: generations are burned before anything is written under
     them and never used again (M5, P10), so deleting it needs no intent.
  2. Listings are made by the runner, a range of keys in each task, and joined there with the names that the manifest knows:
     only differences come here, a few thousand at a time, and are looked up in the manifest as it is then.
  3. What was deleted stays deleted if an attempt is interrupted; the next one finds what is left.
  4. Where an object store is a directory, what puts that crashed left in its staging goes too, if it is old.
  5. The result names the first `LISTED_MAX` of each sort, and says whether there were more.
  6. What is missing is looked up, and asked for once more, when its wave is listed: rows of a wave are read twice at most.
  7. An object store that fails ends the attempt: without a whole listing nothing is known to be missing.
  8. Orphans that are not this store's to delete, in a place that it shares and has no claim to, are told and stay (A3).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from quire.core.errors import ObjectNotFound
from quire.core.events import emit
from quire.durable.failpoints import hit
from quire.durable.names import object_key
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress, options
from quire.jobs.locations import Place
from quire.jobs.row_groups import part
from quire.jobs.runner import Runner, Runners
from quire.jobs.sweep.plan import Mark, Range, Space, promising, ranges, real_orphans, spaces, still_promised
from quire.jobs.sweep.run import Listed, Stray, list_range
from quire.jobs.threads import thread_runner
from quire.manifest.jobqueue import Job
from quire.objects.guarded import path_store

WAVE_RANGES = 256
"""Compared in one run of the runner: 4 million names at most, 8 bytes of each in memory."""

SETTLED_AT_ONCE = 4_096
"""Differences that are looked up, asked for or deleted together."""

ASKED_AT_ONCE = 16
"""Objects that are asked for at a time: what takes time is the way there and back."""

LISTED_MAX = 1_000
GRACE_SECONDS = 3_600.0
"""Objects younger than this, by their store's clock, are left alone: clocks differ (M8)."""

THREADS = Runners()


@dataclass(slots=True)
class _Sweep:
    """A sweep that runs: what it goes by, and what it has found."""

    ctx: JobContext
    before_ms: int
    delete: bool
    total: dict[str, Any] = field(
        default_factory=lambda: {
            **dict.fromkeys(("objects", "bytes_listed", "orphaned", "bytes", "deleted", "lost", "staged"), 0),
            "more": False,
            "orphans": [],
            "missing": [],
        }
    )


@dataclass(frozen=True, slots=True)
class _Wave:
    """Ranges of one space that are compared together."""

    ranges: Sequence[Range]
    space: Space
    namespaces: set[int]
    since: Mark

    @property
    def next(self) -> Mark | None:
        return self.ranges[-1].next

    @property
    def names(self) -> int:
        return sum(len(each.known) for each in self.ranges)


def sweep_job(ctx: JobContext, job: Job, progress: Progress, *, runners: Runners = THREADS) -> Outcome:
    """Find objects that nothing speaks of, and rows whose objects are gone."""
    given = options(job, delete=False, runner="", grace_seconds=GRACE_SECONDS)
    sweep = _Sweep(ctx, ctx.clock.now_ms() - int(given["grace_seconds"] * 1000), given["delete"])
    with ctx.manifest.read() as txn:
        found, rows = spaces(ctx, txn), promising(txn)
    total, done = len(found) * (rows + 1), 0
    progress(0, total)
    runner = runners.choose(given["runner"], rows * 1024, partial(thread_runner, ctx, label="quire-sweep"))
    for number, (space, namespaces) in enumerate(found.items(), 1):
        for wave in _waves(ctx, space, namespaces):
            ends = min(done + wave.names, number * (rows + 1)) if wave.next else number * (rows + 1)
            _compare(sweep, runner, wave, part(progress, done, ends, total))
            done = ends
    if sweep.delete:
        sweep.total["staged"] = sum(_unstage(ctx, url) for url in {url for url, _ in found})
    progress(total, total)
    return Done(sweep.total)


def _waves(ctx: JobContext, space: Space, namespaces: set[int]) -> Iterator[_Wave]:
    """The ranges of a space, so many at a time: no transaction is open meanwhile."""
    mark: Mark | None = Mark()
    while mark is not None:
        with ctx.manifest.read() as txn:
            wave = _Wave(list(islice(ranges(txn, namespaces, space, mark), WAVE_RANGES)), space, namespaces, mark)
        yield wave
        mark = wave.next


def _unstage(ctx: JobContext, url: str) -> int:
    """Remove old staging files of puts that crashed, where the object store is a directory; how many there were."""
    store = ctx.open_store(url)
    return local.sweep_temporary() if (local := path_store(store)) is not None else 0


def _compare(sweep: _Sweep, runner: Runner, wave: _Wave, tick: Progress) -> None:
    """Have the runner join listings with known names, and look up the differences that come back (rule 2)."""
    total, strays, missing = sweep.total, list[Stray](), array("Q")
    names = np.unique(np.concatenate([each.known for each in wave.ranges]))
    for number, told in runner.unmatched(list_range, [each.task for each in wave.ranges], names, tick=tick):
        if isinstance(told, Listed):
            total["objects"] += told.objects
            total["bytes_listed"] += told.size_bytes
        elif told is not None:
            strays.append(told)
        elif number is not None:
            missing.append(number)
        if len(strays) >= SETTLED_AT_ONCE:
            _settle(sweep, strays, wave)
            strays.clear()
    _settle(sweep, strays, wave)
    _tell_missing(sweep, np.sort(np.array(missing, np.uint64)), wave)
    total["more"] = total["orphaned"] > len(total["orphans"]) or total["lost"] > len(total["missing"])


def _tell_missing(sweep: _Sweep, missing: Any, wave: _Wave) -> None:
    """Look missing objects up once more, and report those that are still missing (rule 6)."""
    ctx, total = sweep.ctx, sweep.total
    with ctx.manifest.read() as txn:
        places = still_promised(ctx, txn, missing, wave.namespaces, wave.space, wave.since, wave.next)
        for place in _not_there(ctx, places):
            total["lost"] += 1
            if len(total["missing"]) < LISTED_MAX:
                told = {"artifact": object_key(place.key), "object": place.object_key, "size_bytes": place.size_bytes}
                total["missing"].append(told)


def _not_there(ctx: JobContext, places: Iterator[Place]) -> Iterator[Place]:
    """Those whose object is not there when it is asked for by its name."""

    def is_there(place: Place) -> bool:
        try:
            ctx.open_store(place.url).head(place.object_key)
        except ObjectNotFound:
            return False
        return True

    with ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="quire-sweep-ask") as pool:
        while some := list(islice(places, SETTLED_AT_ONCE)):
            yield from (place for place, there in zip(some, pool.map(is_there, some)) if not there)


def _settle(sweep: _Sweep, strays: Iterable[Stray], wave: _Wave) -> None:
    """What became of strays, by the manifest as it is after the listing."""
    ctx, total = sweep.ctx, sweep.total
    with ctx.manifest.read() as txn:
        orphans = list(real_orphans(txn, strays, wave.space[1], sweep.before_ms))
    for stray, key in orphans:
        total["orphaned"] += 1
        total["bytes"] += stray.size_bytes
        if len(total["orphans"]) < LISTED_MAX:
            told = {"artifact": object_key(key), "object": stray.key, "size_bytes": stray.size_bytes, "url": stray.url}
            total["orphans"].append(told)
    gone: set[str] = set()
    if sweep.delete and orphans:
        for url in {stray.url for stray, _ in orphans}:
            may_go = ctx.collector.deletable(url, [stray.key for stray, _ in orphans if stray.url == url])
            ctx.collector.delete(url, may_go)
            gone |= {f"{url} {key}" for key in may_go}
        hit("jobs.sweep.deleted")
        total["deleted"] += len(gone)
    for stray, _ in orphans:
        emit(
            "warning",
            "sweep.orphan",
            object=stray.key,
            store=stray.url,
            size_bytes=stray.size_bytes,
            deleted=f"{stray.url} {stray.key}" in gone,
        )
