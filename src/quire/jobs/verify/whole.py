"""Verifying a whole store, a bit at a time: what was not looked at for longest comes first (payload `{"scope": "store"}`).

Terms
  wave      artifacts that are looked at between two commits of verdicts, in one run of the runner
  horizon   what was verified since then is not looked at again: the moment it was asked for, or `max_age_seconds` before

Rules
  1. A verification ends when nothing older than the horizon is left, or when its time (`max_duration_seconds`) is over: then
     the result says how much is left, and the next one goes on there, because what was seen when is in the rows.
  2. Verdicts are given as in `handler.py`: bad ones only after a second look, and only about what the row still says.
  3. An executor that does not see the store's files looks at objects; artifacts with files are then this process's.
  4. What could not be read keeps nothing else from being verified, and is not verified: at the end the attempt has failed, if
     its time is not over.
  5. A wave's first tasks are large, one for each core with two thirds of its share, and so on with the rest, until a core's
     share of it is less than a second's work: that is cut evenly, so that cores are done at about the same moment.
     Few tasks in all, because what Spark needs to start one (23 ms) is worth 25 MiB of digests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from quire.core.errors import QuireError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import GIB, MIB
from quire.durable.names import object_key
from quire.jobs.context import JobContext
from quire.jobs.handler import Done, Outcome, Progress
from quire.jobs.locations import Place
from quire.jobs.runner import Answer, Runner, balanced
from quire.jobs.threads import thread_runner
from quire.jobs.verify.plan import LISTED_MAX, PLANNED_MAX, bitmap_of, is_meant, place_to_verify
from quire.jobs.verify.run import Finding, VerifyTask, run_task
from quire.manifest.jobqueue import Job
from quire.manifest.reads import ReadTxn
from quire.manifest.verification import artifacts

WAVE_BYTES = 4 * GIB
WAVE_ARTIFACTS = 4_096
TASK_BYTES_MIN, TASK_BYTES_MAX = 128 * MIB, GIB
"""A wave ends at the first two. It is cut into tasks of at least and at most so much (rule 5)."""

EVEN_BYTES = 768 * MIB
"""A core's share of what is left that is cut no further (rule 5)."""

ARTIFACT_BYTES = MIB // 4
"""What opening an artifact costs, as if it were so many more bytes."""

Settle = Callable[[list[Finding]], list[Finding]]
"""Looks at bad ones again, records the verdicts; the findings as they are then."""


@dataclass(slots=True)
class Seen:
    """What a verification has found so far."""

    verified: int = 0
    missing: int = 0
    altered: int = 0
    unreadable: int = 0
    size_bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    kinds: dict[str, dict[str, int]] = field(default_factory=dict)
    """Artifacts, bytes and problems of each kind."""
    first: QuireError | None = None


@dataclass(frozen=True, slots=True)
class Aged:
    """What is older than the horizon."""

    keys: tuple[ArtifactKey, ...]
    """The oldest of them, in order; as many as one plan takes."""
    left: int
    size_bytes: int
    oldest_ms: int
    """When the oldest was verified; 0: never."""


def plan_aged(txn: ReadTxn, asked_at_ms: int, max_age_seconds: float) -> Aged:
    """What has to be looked at, oldest first."""
    horizon = asked_at_ms - int(max_age_seconds * 1000)
    size, due = 0, []
    for key, row in artifacts(txn):
        if row.verified_at_ms < horizon and is_meant(txn, key, row, asked_at_ms):
            due.append((row.verified_at_ms, key))
            size += getattr(row, "used_bytes", 0) or getattr(row, "size_bytes", 0)
    first = heapq.nsmallest(PLANNED_MAX, due)
    return Aged(tuple(key for _, key in first), len(due), size, first[0][0] if first else 0)


def verify_store(
    ctx: JobContext, job: Job, progress: Progress, runner: Runner, limits: tuple[float, float], settle: Settle
) -> Outcome:
    """Look at what is due. `limits` are (max_age_seconds, max_duration_seconds; 0: no end)."""
    max_age, max_duration = limits
    began, asked_at = ctx.clock.monotonic(), job.record.created_at_ms
    with ctx.manifest.read() as txn:
        aged = plan_aged(txn, asked_at, max_age)
    seen, done = Seen(), 0
    for wave in waves(ctx, aged.keys):
        progress(done, aged.left)
        if max_duration and ctx.clock.monotonic() - began >= max_duration:
            break
        _count(seen, settle(look(ctx, runner, wave, partial(progress, done, aged.left))))
        done += len(wave)
    else:
        if seen.first is not None:
            raise seen.first
    progress(done, aged.left)
    return Done({**summary(seen), "left": aged.left - done, "complete": done == aged.left})


def waves(ctx: JobContext, keys: Sequence[ArtifactKey]) -> Iterator[list[tuple[Place, int]]]:
    """(place, bitmap hash) of artifacts as they are when their turn comes, a wave at a time."""
    rest = iter(keys)
    while taken := list(islice(rest, WAVE_ARTIFACTS)):
        with ctx.manifest.read() as txn:
            placed = [
                (place, bitmap_of(txn, key)) for key in taken if (place := place_to_verify(ctx, txn, key)) is not None
            ]
        wave: list[tuple[Place, int]] = []
        size = 0
        for each in placed:
            wave.append(each)
            size += each[0].size_bytes
            if size >= WAVE_BYTES:
                yield wave
                wave, size = [], 0
        if wave:
            yield wave


def look(
    ctx: JobContext, runner: Runner, wave: Sequence[tuple[Place, int]], alive: Callable[[], None]
) -> list[Finding]:
    """What the artifacts of a wave are. `alive` is called now and then, and may raise."""
    here = [each for each in wave if each[0].has_local and not runner.shares_disk]
    there = [each for each in wave if not (each[0].has_local and not runner.shares_disk)]

    def tick(*_: int) -> None:
        alive()

    answers: list[Answer[int, list[Finding]]] = list(runner.map(run_task, tasks(there, runner.width), tick=tick))
    if here:
        local = thread_runner(ctx, label="quire-verify")
        answers += local.map(run_task, tasks(here, local.width), tick=tick)
    return [finding for answer in answers for finding in answer.result()]


def tasks(wave: Sequence[tuple[Place, int]], width: int) -> list[VerifyTask]:
    """Rule 5: a wave, in pieces that become smaller; the last ones of one size."""
    costs = [place.size_bytes + ARTIFACT_BYTES for place, _ in wave]
    left, made = sum(costs), list[VerifyTask]()
    begin = size = 0
    wanted = _wanted(left, width)
    for end, cost in enumerate(costs):
        if begin < end and size + cost > wanted:
            made.append(_task(wave[begin:end]))
            left, begin, size = left - size, end, 0
            if len(made) % width == 0:
                wanted = _wanted(left, width)
        if begin == end and left <= EVEN_BYTES * width and len(made) % width == 0:
            break
        size += cost
    return made + _evenly(wave[begin:], costs[begin:], width)


def _wanted(left: int, width: int) -> int:
    """Of so much that is left, how much each of the next tasks takes."""
    return min(max(2 * left // (3 * width), TASK_BYTES_MIN), TASK_BYTES_MAX)


def _evenly(wave: Sequence[tuple[Place, int]], costs: Sequence[int], width: int) -> list[VerifyTask]:
    """One task for each core, if there is work for so many."""
    parts: list[list[tuple[Place, int]]] = [[] for _ in range(min(-(-sum(costs) // TASK_BYTES_MIN), width))]
    for each, part in zip(wave, balanced(costs, len(parts)), strict=True):
        parts[part].append(each)
    return [_task(part) for part in parts if part]


def _task(group: Sequence[tuple[Place, int]]) -> VerifyTask:
    return VerifyTask(tuple(place for place, _ in group), tuple(bitmap for _, bitmap in group))


def _count(seen: Seen, findings: Sequence[Finding]) -> None:
    for each in findings:
        name = "unreadable" if each.error is not None else each.state.name.lower()
        setattr(seen, name, getattr(seen, name) + 1)
        seen.size_bytes += each.place.size_bytes
        count = seen.kinds.setdefault(_kind(each.place), {"files": 0, "bytes": 0, "problems": 0})
        count["files"] += 1
        count["bytes"] += each.place.size_bytes
        count["problems"] += each.is_bad
        seen.first = seen.first or each.error
        if each.is_bad and len(seen.damaged) < LISTED_MAX:
            seen.damaged.append(f"{object_key(each.place.key)} {each.state.name}")


def _kind(place: Place) -> str:
    if place.key.kind is ArtifactKind.WAL:
        return "page-WAL segment" if place.is_page_segment else "stream segment"
    return {ArtifactKind.BASE: "chunk", ArtifactKind.DELTA: "delta"}[place.key.kind]


def summary(seen: Seen) -> dict[str, Any]:
    """As a job's result has it."""
    counts = {name: getattr(seen, name) for name in ("verified", "missing", "altered", "unreadable")}
    return {**counts, "bytes": seen.size_bytes, "damaged": seen.damaged, "kinds": seen.kinds}
