"""Runners execute the heavy part of a job, in threads of this process or on Spark executors. The work is the same on both
(K1).

Terms
  run      a function of a task and the tools it needs; it does not read the manifest, so it can run anywhere
  tools    access to the bytes of the store from this process: segments and chunks, object stores, the disk
  split    turns one input into (key, value) pairs; the values of one key are brought together
  join     makes one result from all values of a key
  find     yields (number, value) pairs for what a task finds; a number that is `None` matches nothing

A `QuireError` of a task is the result of that task and ends nothing else: a run over a thousand databases does not fail because
of one of them. Any other exception ends the run. Results come in any order, and the number of tasks in progress is bounded, so
that memory is.

`tick(done, total)` is called periodically and may raise. In that case no further task is started, tasks in progress are ended
or waited for, and the error is raised to the caller. The same happens if the caller stops consuming results.

A task may run more than once, even twice concurrently (a lost executor, speculative execution): both copies write the same
object names, and the second adopts the objects that exist.

Threads: a runner serves one caller at a time. Raises what `tick` raises, and `SparkUnavailable` if Spark was requested.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from quire.core.background import thread_pool
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
"""Bytes of work below which `auto` uses threads (docs/decisions/006-runner-auto.md)."""

RUNNERS = ("auto", "threads", "spark")
"""The runners that a caller or `maintenance.runner` can name."""

T = TypeVar("T")
P = TypeVar("P")
V = TypeVar("V")
R = TypeVar("R")
K = TypeVar("K")

Key = tuple[int, int]
"""The key by which `regroup` groups values: (database, slot)."""

Tick = Callable[[int, int], None]

BLOCK = 4_096
"""Numbers that are looked up in one step."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The sources, object stores and disk that a task reads and writes."""

    sources: Sources
    open_store: OpenStore
    disk: Disk
    root: str
    """The store's directory, if this process can see it; otherwise empty."""


@dataclass(frozen=True, slots=True)
class TaskResult(Generic[K, R]):
    """The outcome of a task: its result or its `QuireError`."""

    key: K
    value: R | None = None
    error: QuireError | None = None

    def result(self) -> R:
        """Return the result, or raise the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # a task without an error has a result


def results_of(answers: Iterator[TaskResult[K, R]]) -> Iterator[tuple[K, R]]:
    """Yield (key, result) of tasks that write. At the first error no further task is started, and it is raised when those in
    progress have ended: the next attempt may write the same files."""
    for answer in answers:
        if answer.error is not None and isinstance(answers, Generator):
            answers.throw(answer.error)  # a generator that is only abandoned does not wait (`thread_pool`)
        yield answer.key, answer.result()


Split = Callable[[P, Tools], Iterable[tuple[Key, V]]]
Join = Callable[[Key, T | None, list[V], Tools], R]
Run = Callable[[T, Tools], R]
Find = Callable[[T, Tools], Iterable[tuple[int | None, V]]]


def no_tick(_done: int, _total: int) -> None:
    """Ignore progress."""


NAMED_MAX = 3
"""Databases that the description of a job names, at most."""


def some_names(names: Iterable[str], count: int) -> str:
    """Return the first names of `count` databases, and how many others there are.

    >>> some_names(["shop", "blog"], 2), some_names(map(str, range(1_004)), 1_004)
    ('shop, blog', '0, 1, 2 and 1,001 more')
    """
    more = f" and {count - NAMED_MAX:,} more" if count > NAMED_MAX else ""
    return ", ".join(islice(names, NAMED_MAX)) + more


def balanced(costs: Sequence[int], parts: int) -> list[int]:
    """Assign each piece of work to one of `parts` parts: the costliest first, each to the part with the least work so far.

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
    """Runs the tasks of a job."""

    @property
    def name(self) -> str:
        """ "threads" or "spark"."""

    @property
    def shares_disk(self) -> bool:
        """Whether tasks see the files of the store; if not, everything they read must have an object."""

    @property
    def width(self) -> int:
        """Approximate number of tasks that run at once: work that can be cut anywhere is cut into a few times as many."""

    def map(
        self, run: Run[T, R], tasks: Sequence[T], *, tick: Tick = no_tick, title: str = ""
    ) -> Iterator[TaskResult[int, R]]:
        """Run each task; results carry the task's index in `tasks`. `title` describes the tasks for displays."""

    def regroup(
        self,
        split: Split[P, V],
        inputs: Sequence[P],
        join: Join[T, V, R],
        tasks: Mapping[Key, T] | None = None,
        *,
        tick: Tick = no_tick,
    ) -> Iterator[TaskResult[Key, R]]:
        """Split every input, group the values by key, and join each group.

        With `tasks` there is one result for each task, whether it has values or not, and a value without a task is a bug.
        Without `tasks` there is one result for each key that occurs. An input that cannot be split fails its whole database:
        its error is the result for (database, -1), see `owner_of`.
        """

    def unmatched(
        self, find: Find[T, V], tasks: Sequence[T], expected: Numbers, *, tick: Tick = no_tick
    ) -> Iterator[tuple[int | None, V | None]]:
        """Compare what the tasks find with the expected numbers, and yield only the differences: pairs whose number is `None`
        or not expected, and (number, `None`) for each expected number that no task found.

        `expected` are ascending u64. Pairs that match stay in the process that found them, and differences are yielded a few at
        a time. An error of a task is raised, because without its result no number is known to be missing.
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
        title: str = "",  # noqa: ARG002 - displays show the progress of the job instead
    ) -> Iterator[TaskResult[int, R]]:
        """See `Runner`."""
        return self._run_all(enumerate(tasks), lambda task: run(task, self._tools), len(tasks), tick)

    def regroup(
        self,
        split: Split[P, V],
        inputs: Sequence[P],
        join: Join[T, V, R],
        tasks: Mapping[Key, T] | None = None,
        *,
        tick: Tick = no_tick,
    ) -> Iterator[TaskResult[Key, R]]:
        """See `Runner`. The values of all keys are in memory at once, which is why plans for threads are bounded."""
        values: dict[Key, list[V]] = {key: [] for key in tasks or {}}
        failed_databases: dict[int, QuireError] = {}
        done = self._run_all(enumerate(inputs), lambda task: list(split(task, self._tools)), len(inputs), no_tick)
        for answer in done:
            if answer.error is not None:
                failed_databases.setdefault(owner_of(inputs[answer.key]), answer.error)
                continue
            for key, value in answer.result():
                if tasks is not None and key not in tasks:
                    raise InternalError("a value came up for which there is no task", key=key)
                values.setdefault(key, []).append(value)
            tick(0, len(tasks or ()))
        for owner, error in failed_databases.items():
            yield TaskResult((owner, -1), error=error)
        # Nothing of a failed database is joined: with an input missing, an older version of a page would pass for the
        # newest.
        intact = [(key, (key, parts)) for key, parts in sorted(values.items()) if key[0] not in failed_databases]

        def run(item: tuple[Key, list[V]]) -> R:
            key, parts = item
            return join(key, tasks[key] if tasks is not None else None, parts, self._tools)

        yield from self._run_all(intact, run, len(intact), tick)

    def unmatched(
        self, find: Find[T, V], tasks: Sequence[T], expected: Numbers, *, tick: Tick = no_tick
    ) -> Iterator[tuple[int | None, V | None]]:
        """See `Runner`."""
        seen = np.zeros(len(expected), np.bool_)

        def run(task: T) -> list[tuple[int | None, V]]:
            unknown, pairs = list[tuple[int | None, V]](), iter(find(task, self._tools))
            while block := list(islice(pairs, BLOCK)):
                # 0 stands for `None` only until the last mask below: 0 itself may be an expected number.
                numbers = np.array([number or 0 for number, _ in block], np.uint64)
                places = np.searchsorted(expected, numbers)
                matches = places < len(expected)
                matches[matches] = expected[places[matches]] == numbers[matches]
                matches &= np.array([number is not None for number, _ in block], np.bool_)
                # All threads write to this array without a lock: elements only become True, and it is read after the
                # last task.
                seen[places[matches]] = True
                unknown += [pair for pair, known in zip(block, matches.tolist()) if not known]
            return unknown

        for answer in self._run_all(enumerate(tasks), run, len(tasks), tick):
            yield from answer.result()
        for number in expected[~seen].tolist():
            yield number, None

    def _run_all(
        self, tasks: Iterable[tuple[K, T]], run: Callable[[T], R], total: int, tick: Tick
    ) -> Iterator[TaskResult[K, R]]:
        """Run tasks, a bounded number at a time. If `tick` raises, no further task is started."""
        waiting, under_way, done = iter(tasks), dict[Future[R], K](), 0
        tick(0, total)
        with thread_pool(self._threads, self._label) as pool:
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


def owner_of(task: Any) -> int:
    """Return the database that an input belongs to."""
    return int(task.db_id)


def _answer(key: K, future: Future[R]) -> TaskResult[K, R]:
    try:
        return TaskResult(key, future.result())
    except QuireError as error:
        return TaskResult(key, error=error)


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class Runners:
    """The runners of a store: threads always, Spark if it is configured."""

    spark: Callable[[], Runner] | None = None
    """Creates or finds the session and returns its runner; called only when Spark is chosen."""
    usual: str = "auto"
    """`maintenance.runner`: the runner for jobs whose payload names none."""
    missing: list[str] = field(default_factory=list)
    """Why Spark is unavailable, once an attempt has failed: `auto` does not try it again."""

    def choose(self, name: str, size_bytes: int, threads: Callable[[], Runner]) -> Runner:
        """Return the runner for `size_bytes` of work: the named one, else the usual one."""
        name = name or self.usual
        if name not in RUNNERS:
            raise InvalidInput("unknown runner", hint=f"one of: {', '.join(RUNNERS)}", runner=name)
        if name == "threads" or (name == "auto" and (size_bytes < AUTO_BYTES or self.spark is None or self.missing)):
            return threads()
        if self.spark is None:
            raise SparkUnavailable("Spark is not available in this process", hint="open the store with `quire.open`")
        try:
            return self.spark()
        except SparkUnavailable as error:
            if name == "spark":
                raise
            self.missing.append(str(error))
            emit("warning", "spark.unavailable", error=str(error), instead="threads", size_bytes=size_bytes)
            return threads()
