"""Who runs the heavy part of a job: threads of this process, or executors elsewhere. The work itself does not know which
(K1).

Terms
  run      a function of a task and the tools it needs; it asks no manifest, so it can be sent anywhere
  tools    the bytes of the store, as this process reaches them: segments and chunks, object stores, the disk
  split    takes one input apart into (key, value) pairs; those of one key are brought together
  join     makes one result of all values of a key
  tell     gives (number, value) pairs of what a task finds; a number that is `None` matches nothing

An error of a task (`QuireError`) is its result and ends nothing else: a run over a thousand databases does not fail with one
of them. Anything else ends the run. Results come in any order, and only so many tasks are under way that memory stays
bounded.

`tick(done, total)` is called now and then and may raise: then nothing more is started, what is under way is ended or waited
for, and the error is the caller's. The same if the caller stops asking for results.

A task may be run more than once, two at a time even (an executor that was lost, a speculative copy): both write the same
names, and the second adopts what is there.

Threads: a runner is for one caller at a time. Raises what `tick` raises, and `SparkUnavailable` where Spark was asked for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from quire.core.errors import InternalError, InvalidInput, QuireError, SparkUnavailable
from quire.core.events import emit
from quire.core.limits import MIB
from quire.durable.files import Disk
from quire.jobs.locations import OpenStore
from quire.pages.sources import Sources

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers: TypeAlias = NDArray[np.uint64]

AUTO_BYTES = 256 * MIB
"""Work below this is done by threads unless somebody says otherwise (docs/decisions/006-runner-auto.md)."""

RUNNERS = ("auto", "threads", "spark")
"""What a person or `maintenance.runner` can ask for."""

T = TypeVar("T")
P = TypeVar("P")
V = TypeVar("V")
R = TypeVar("R")
K = TypeVar("K")

Key = tuple[int, int]
"""What `regroup` brings together by: (database, slot)."""

Tick = Callable[[int, int], None]

BLOCK = 4_096
"""Numbers that are looked up together."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What a task reads and writes with."""

    sources: Sources
    open_store: OpenStore
    disk: Disk
    root: str
    """The store's directory, where this process sees it; else empty."""


@dataclass(frozen=True, slots=True)
class TaskResult(Generic[K, R]):
    """What became of a task: its result or its `QuireError`, which ends nothing else."""

    key: K
    value: R | None = None
    error: QuireError | None = None

    def result(self) -> R:
        """The result; raises the error instead, if there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # a task without an error has answered


Split = Callable[[P, Tools], Iterable[tuple[Key, V]]]
Join = Callable[[Key, T | None, list[V], Tools], R]
Run = Callable[[T, Tools], R]
Tell = Callable[[T, Tools], Iterable[tuple[int | None, V]]]


def no_tick(_done: int, _total: int) -> None:
    """Nobody wants to know."""


def balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Which of so many parts each piece of work goes to: the costliest first, each to the part that has least by then.

    >>> balanced([1, 7, 3, 4], 2)
    [0, 0, 1, 1]
    """
    loads, chosen = [(0, part) for part in range(parts)], [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda piece: -costs[piece]):
        load, part = loads[0]
        chosen[piece] = part
        heapq.heapreplace(loads, (load + costs[piece], part))
    return chosen


class Runner(Protocol):
    """Runs tasks."""

    @property
    def name(self) -> str:
        """ "threads" or "spark"."""

    @property
    def shares_disk(self) -> bool:
        """Whether tasks see the files of the store; if not, they need objects of what they read."""

    @property
    def width(self) -> int:
        """About how many tasks run at once: work that can be cut anywhere is cut into a few times as many."""

    def map(
        self, run: Run[T, R], tasks: Sequence[T], *, tick: Tick = no_tick, title: str = ""
    ) -> Iterator[TaskResult[int, R]]:
        """Run each task; answers carry the task's place in `tasks`. `title` says what they do, where somebody watches."""

    def regroup(
        self,
        split: Split[P, V],
        inputs: Sequence[P],
        join: Join[T, V, R],
        tasks: Mapping[Key, T] | None = None,
        *,
        tick: Tick = no_tick,
    ) -> Iterator[TaskResult[Key, R]]:
        """Split every input, bring values of one key together, join them.

        With `tasks` there is one answer for each of them, whether values came or not, and a value without a task is a bug.
        Without, there is one for each key that came up. An input that cannot be split answers for its whole database: its
        error comes under (the first part of the keys it would have had, -1), see `owner_of`.
        """

    def unmatched(
        self, tell: Tell[T, V], tasks: Sequence[T], expected: Numbers, *, tick: Tick = no_tick
    ) -> Iterator[tuple[int | None, V | None]]:
        """Compare what tasks find with what is expected, and give only the differences: what is told under a number that is
        not expected, or under none, and (number, `None`) for each expected number under which nothing was told.

        `expected` are rising u64. What is told stays where it was found, and differences come a few at a time; an error of a
        task is raised, because without its answer nothing is known to be missing.
        """


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────────────
class ThreadRunner:
    """Runs tasks in threads of this process."""

    name = "threads"
    shares_disk = True

    def __init__(self, tools: Tools, threads: int = 1, *, label: str = "quire-run") -> None:
        self._tools = tools
        self._threads = self.width = max(threads, 1)
        self._label = label

    def map(
        self,
        run: Run[T, R],
        tasks: Sequence[T],
        *,
        tick: Tick = no_tick,
        title: str = "",  # noqa: ARG002 - threads are watched by their job's progress
    ) -> Iterator[TaskResult[int, R]]:
        """See `Runner`."""
        return self._each(enumerate(tasks), lambda task: run(task, self._tools), len(tasks), tick)

    def regroup(
        self,
        split: Split[P, V],
        inputs: Sequence[P],
        join: Join[T, V, R],
        tasks: Mapping[Key, T] | None = None,
        *,
        tick: Tick = no_tick,
    ) -> Iterator[TaskResult[Key, R]]:
        """See `Runner`. The values of all keys are in memory meanwhile: plans for threads are bounded for that reason."""
        values: dict[Key, list[V]] = {key: [] for key in tasks or {}}
        spoilt: dict[int, QuireError] = {}
        done = self._each(enumerate(inputs), lambda task: list(split(task, self._tools)), len(inputs), no_tick)
        for answer in done:
            if answer.error is not None:
                spoilt.setdefault(owner_of(inputs[answer.key]), answer.error)
                continue
            for key, value in answer.result():
                if tasks is not None and key not in tasks:
                    raise InternalError("a value came up for which there is no task", key=key)
                values.setdefault(key, []).append(value)
            tick(0, len(tasks or ()))
        for owner, error in spoilt.items():
            yield TaskResult((owner, -1), error=error)
        sound = [(key, (key, parts)) for key, parts in sorted(values.items()) if key[0] not in spoilt]

        def run(item: tuple[Key, list[V]]) -> R:
            key, parts = item
            return join(key, tasks[key] if tasks is not None else None, parts, self._tools)

        yield from self._each(sound, run, len(sound), tick)

    def unmatched(
        self, tell: Tell[T, V], tasks: Sequence[T], expected: Numbers, *, tick: Tick = no_tick
    ) -> Iterator[tuple[int | None, V | None]]:
        """See `Runner`."""
        seen = np.zeros(len(expected), np.bool_)

        def run(task: T) -> list[tuple[int | None, V]]:
            unknown, pairs = list[tuple[int | None, V]](), iter(tell(task, self._tools))
            while block := list(islice(pairs, BLOCK)):
                numbers = np.array([number or 0 for number, _ in block], np.uint64)
                places = np.searchsorted(expected, numbers)
                matches = places < len(expected)
                matches[matches] = expected[places[matches]] == numbers[matches]
                matches &= np.array([number is not None for number, _ in block], np.bool_)
                seen[places[matches]] = True
                unknown += [pair for pair, known in zip(block, matches.tolist()) if not known]
            return unknown

        for answer in self._each(enumerate(tasks), run, len(tasks), tick):
            yield from answer.result()
        for number in expected[~seen].tolist():
            yield number, None

    def _each(
        self, tasks: Iterable[tuple[K, T]], run: Callable[[T], R], total: int, tick: Tick
    ) -> Iterator[TaskResult[K, R]]:
        """Run tasks, a bounded number at a time; `tick` may raise, and then no more are started."""
        waiting, under_way, done = iter(tasks), dict[Future[R], K](), 0
        tick(0, total)
        with ThreadPoolExecutor(self._threads, thread_name_prefix=self._label) as pool:
            try:
                while True:
                    for key, task in islice(waiting, self._threads - len(under_way)):
                        under_way[pool.submit(run, task)] = key
                    if not under_way:
                        return
                    ended, _ = wait(under_way, return_when=FIRST_COMPLETED)
                    for future in ended:
                        answer = _answer(under_way.pop(future), future)
                        done += 1
                        yield answer
                        tick(done, total)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def owner_of(task: Any) -> int:
    """The database an input belongs to."""
    return int(task.db_id)


def _answer(key: K, future: Future[R]) -> TaskResult[K, R]:
    try:
        return TaskResult(key, future.result())
    except QuireError as error:
        return TaskResult(key, error=error)


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Runners:
    """The runners a store has: threads always, Spark if somebody gave it one."""

    spark: Callable[[], Runner] | None = None
    """Makes (or finds) the session and gives its runner; called only when Spark is what is wanted."""
    usual: str = "auto"
    """`maintenance.runner`: for jobs whose payload says nothing else."""
    missing: list[str] = field(default_factory=list)
    """Why there is no Spark, once that was found out: it is not looked for again for `auto`."""

    def choose(self, name: str, size_bytes: int, threads: Callable[[], Runner]) -> Runner:
        """The runner for so many bytes of work."""
        name = name or self.usual
        if name not in RUNNERS:
            raise InvalidInput("unknown runner", hint=f"one of: {', '.join(RUNNERS)}", runner=name)
        if name == "threads" or (name == "auto" and (size_bytes < AUTO_BYTES or self.spark is None or self.missing)):
            return threads()
        if self.spark is None:
            raise SparkUnavailable("this process has no Spark", hint="open the store with `quire.open`")
        try:
            return self.spark()
        except SparkUnavailable as error:
            if name == "spark":
                raise
            self.missing.append(str(error))
            emit("warning", "spark.unavailable", error=str(error), instead="threads", size_bytes=size_bytes)
            return threads()
