"""Runs tasks of jobs on Spark: the functions are the same as for threads, and Spark shuffles the rows between them.

    split stage:  inputs ──► split ──► rows of (partition, key, value)
    shuffle:      each row to the partition its key was given; there, rows in the order of their keys, a task before its values
    join stage:   rows ──► join ──► one result for each key

One action per call, whatever the number of databases (K1); results are small, and only they are collected. Uses only
sessions, DataFrames and `mapInArrow`, and no context, so that Spark Connect works (K3).

A runner has its own session next to the caller's, so that an interrupt ends nothing else. The caller's session stays the
active one, because Spark looks there for a data source that is written to. Whether executors see the store's directory is
known for local masters; otherwise the creator of the runner states it. If they do not, they must be able to reach the object
store: it cannot be a path or in memory.

Threads: one caller at a time. Raises `SparkUnavailable` (the cluster gave up), `InvalidConfig` (an object store that
executors cannot reach), and the errors of `tick`.
"""

from __future__ import annotations

import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from quire.core.errors import InvalidConfig, QuireError, SparkUnavailable
from quire.core.ids import U64_MAX
from quire.core.limits import MIB
from quire.core.tracing import span
from quire.jobs.runner import (
    BLOCK,
    Find,
    Join,
    Key,
    P,
    R,
    Run,
    Split,
    T,
    TaskResult,
    Tick,
    V,
    balanced,
    no_tick,
    some_names,
)
from quire.objects.options import StoreOptions
from quire.spark.active_session import is_connect, make_active
from quire.spark.executor import (
    ANSWERS_DDL,
    FOUND_DDL,
    ROWS_DDL,
    TASK,
    VALUE,
    InlineInputs,
    Row,
    StoreLocation,
    batch_of,
    joiner,
    mapper,
    numbered_mapper,
    splitter,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from quire.jobs.runner import Numbers

TICK_SECONDS = 0.2

SETTINGS = {
    "spark.sql.adaptive.enabled": "false",  # otherwise every stage of a plan is a separate job that is planned again
    "spark.sql.execution.arrow.localRelationThreshold": "0",  # else batches are merged; each must stay a partition
    "spark.sql.codegen.wholeStage": "false",  # compiling a plan takes longer than processing its few rows
}
"""Settings of the runner's own session."""

PARTITIONS_MAX = 1_024
"""Tasks of one stage, at most: enough for a few hundred cores, few enough for the cost of starting them (some 5 ms each)."""

TASKS_PER_CORE = 2
"""Tasks per core, if there is enough work: a core waits some 50 ms between two tasks, and keys are spread by weight."""

CARRIED_BYTES = 256 << 10
"""Bytes of all tasks of a call, pickled, at most, for them to travel with the function that runs them. The frame then has
only their numbers. This saves a table, which is a file between this process and the JVM."""

WIDTH_UNKNOWN = 16
"""Cores to assume if the session does not state how many it has."""

WEIGHT_MIN = MIB
"""Cost of a key, at least, in bytes: opening a file, putting an object."""

LIGHT_WEIGHT, LIGHT_THREADS = 2 * MIB, 8
"""Keys that weigh at most so many bytes on average are joined this many at a time: most time goes into syncing objects."""

PARTITION_WEIGHT = 512 * MIB
"""Bytes of work in a partition, about, so that a lost task is not expensive."""


class SparkRunner:
    """Runs tasks on a session's executors."""

    name = "spark"

    def __init__(
        self,
        spark: SparkSession,
        *,
        root: str,
        objects_url: str,
        shares_disk: bool | None = None,
        options: Mapping[str, StoreOptions] | None = None,
        name_of: Callable[[int], str] = str,
    ) -> None:
        self._name_of = name_of
        """Returns a database's name by its id, for descriptions."""
        self._spark = spark.newSession()  # so that an interrupt ends nothing else
        for name, value in SETTINGS.items():
            self._spark.conf.set(name, value)
        self._cuts = not is_connect(spark)  # without Connect each Arrow batch becomes a partition, which saves a stage
        self.shares_disk = is_local(spark) if shares_disk is None else shares_disk
        self.width = width_of(spark)
        self._location = StoreLocation(root=os.path.abspath(root) if self.shares_disk else "", options=options or {})
        _require_reachable(objects_url, self.shares_disk)

    def map(
        self, run: Run[T, R], tasks: Sequence[T], *, tick: Tick = no_tick, title: str = ""
    ) -> Iterator[TaskResult[int, R]]:
        """See `Runner`. The title is the description of the job in Spark's UI."""
        if not tasks:
            return
        frame, work = self._spread(run, [_pickled(task) for task in tasks])
        what = title or self._described(run, tasks)
        for answer in self._answers(frame.mapInArrow(work, _schema(ANSWERS_DDL)), len(tasks), tick, what):
            yield TaskResult(answer.key[0], answer.value, answer.error)

    def regroup(
        self,
        split: Split[P, V],
        inputs: Sequence[P],
        join: Join[T, V, R],
        tasks: Mapping[Key, T] | None = None,
        *,
        tick: Tick = no_tick,
    ) -> Iterator[TaskResult[Key, R]]:
        """See `Runner`."""
        if not inputs and not tasks:
            return
        places = spread(tasks, self.width) if tasks is not None else None
        partitions = max(places.values(), default=0) + 1 if places is not None else self._light_partitions(len(inputs))
        rows = self._split_rows(split, inputs, places, tasks or {})
        grouped = rows.repartitionById(partitions, "place") if places else rows.repartition(partitions, "db", "slot")
        joined = grouped.sortWithinPartitions("db", "slot", "kind").mapInArrow(
            joiner(self._location, join, needs_task=tasks is not None, threads=_threads(tasks)), _schema(ANSWERS_DDL)
        )
        yield from self._answers(joined, len(tasks or ()), tick, self._described(join, inputs))

    def unmatched(
        self, find: Find[T, V], tasks: Sequence[T], expected: Numbers, *, tick: Tick = no_tick
    ) -> Iterator[tuple[int | None, V | None]]:
        """See `Runner`: an outer join of two frames, of which only rows without a partner are collected."""
        tick(0, len(tasks))
        if not tasks:
            yield from ((number, None) for number in expected.tolist())
            return
        sent: list[Row] = [(0, 0, 0, TASK, _pickled(task)) for task in tasks]
        pairs = self._frame(sent, min(len(sent), PARTITIONS_MAX)).mapInArrow(
            numbered_mapper(self._location, find), _schema(FOUND_DDL)
        )
        if len(expected):  # an empty table would have no partition
            table = pa.table({"wanted": pa.array(expected, pa.uint64()).view(pa.int64())})
            wanted = self._made(table, "wanted bigint")
            joined = pairs.join(wanted, pairs["number"] == wanted["wanted"], "full_outer")
            pairs = joined.where("number is null or wanted is null")
        rows = pairs.toLocalIterator()
        while some := _watched(self._spark, lambda: list(islice(rows, BLOCK)), lambda: tick(0, len(tasks))):
            for row in some:
                if row["data"] is None:
                    yield row["wanted"] & U64_MAX, None
                    continue
                value = pickle.loads(row["data"])
                if isinstance(value, QuireError):
                    raise value
                yield (None if row["number"] is None else row["number"] & U64_MAX), value

    def _split_rows(
        self, split: Split[P, V], inputs: Sequence[P], places: dict[Key, int] | None, tasks: Mapping[Key, T]
    ) -> DataFrame:
        """Return rows of the values that inputs are split into, and of the tasks themselves."""
        sent: list[bytes] = [_pickled(value) for value in inputs]
        heads: list[Row] = [(places[key], *key, TASK, _pickled(task)) for key, task in tasks.items()] if places else []
        if sum(map(len, sent)) + sum(len(row[-1]) for row in heads) <= CARRIED_BYTES:
            numbers = self._numbers(max(len(sent), 1), self._light_partitions(len(sent)))
            return numbers.mapInArrow(
                splitter(self._location, split, places, InlineInputs(sent, heads)), _schema(ROWS_DDL)
            )
        rows: DataFrame | None = None
        if sent:
            read = self._frame([(0, 0, 0, VALUE, data) for data in sent], self._light_partitions(len(sent)))
            rows = read.mapInArrow(splitter(self._location, split, places), _schema(ROWS_DDL))
        if heads:
            rows = self._local(heads) if rows is None else rows.unionByName(self._local(heads))
        assert rows is not None, "there are inputs or tasks"
        return rows

    def _spread(self, run: Run[T, R], sent: list[bytes]) -> tuple[DataFrame, Callable[..., Any]]:
        """Return a frame of tasks, one per partition, and the function that runs them, in the order given."""
        if len(sent) <= PARTITIONS_MAX and sum(map(len, sent)) <= CARRIED_BYTES:
            return self._numbers(len(sent), len(sent)), mapper(self._location, run, sent)
        rows: list[Row] = [(0, number, 0, TASK, data) for number, data in enumerate(sent)]
        return self._frame(rows, min(len(rows), PARTITIONS_MAX)), mapper(self._location, run)

    def _numbers(self, count: int, partitions: int) -> DataFrame:
        with _active_as_before() if self._cuts else nullcontext():
            return self._spark.range(0, count, 1, partitions)

    # ── frames and actions ────────────────────────────────────────────────────────────────────────────────────────────
    def _local(self, *batches: list[Row]) -> DataFrame:
        table = pa.Table.from_batches([batch_of(rows) for rows in batches])
        return self._made(table, ROWS_DDL)

    def _made(self, table: pa.Table, schema: str) -> DataFrame:
        """Create a frame in the runner's session, without leaving that session active."""
        with _active_as_before() if self._cuts else nullcontext():
            return self._spark.createDataFrame(table, schema=schema)

    def _frame(self, rows: list[Row], partitions: int) -> DataFrame:
        """Return rows, dealt evenly to partitions in turn."""
        if self._cuts:
            return self._local(*(rows[place::partitions] for place in range(partitions)))
        placed: list[Row] = [(number % partitions, *row[1:]) for number, row in enumerate(rows)]
        return self._local(placed).repartitionById(partitions, "place")

    def _light_partitions(self, inputs: int) -> int:
        """Return the number of partitions for light inputs."""
        return max(1, min(inputs, PARTITIONS_MAX, max(self.width, inputs // 512)))

    def _answers(self, frame: DataFrame, total: int, tick: Tick, what: str) -> Iterator[TaskResult[Key, Any]]:
        tick(0, total)

        def collect() -> list[Any]:
            if self._cuts:  # in a separate thread, so no other jobs get this description
                self._spark.sparkContext.setJobDescription(what)
            return frame.collect()

        with span("Spark.run", tasks=total):
            rows = _watched(self._spark, collect, lambda: tick(0, total))
        for done, row in enumerate(rows, 1):
            yield pickle.loads(row["data"])
            tick(done, max(total, done))

    def _described(self, step: Callable[..., Any], tasks: Sequence[Any]) -> str:
        """Return a step's description in Spark's user interface: the kind of job, the function that runs last, the
        databases."""
        databases = sorted({db_id for task in tasks if (db_id := getattr(task, "db_id", 0))})
        names = some_names(map(self._name_of, databases), len(databases))
        return f"quire {_job_of(step)}{': ' if names else ''}{names}"


def _job_of(step: Callable[..., Any]) -> str:
    """Return the kind of job that a step belongs to, and its name: steps are functions of `quire.jobs.<kind>.run`.

    >>> from quire.jobs.checkpoint.run import join_slot
    >>> _job_of(join_slot)
    'checkpoint, join slot'
    """
    packages = step.__module__.split(".")
    kind = packages[2] if packages[:2] == ["quire", "jobs"] and len(packages) > 2 else packages[-1]
    return f"{kind.replace('_', ' ')}, {step.__name__.replace('_', ' ')}"


@cache
def _schema(ddl: str) -> StructType:
    """Parse a schema once: Spark calls its JVM each time, which takes 3 ms."""
    schema = StructType.fromDDL(ddl)
    assert isinstance(schema, StructType)
    return schema


@contextmanager
def _active_as_before() -> Iterator[None]:
    """Restore the active session afterwards: creating a frame changes it."""
    before = SparkSession.getActiveSession()
    try:
        yield
    finally:
        if before is not None:
            make_active(before)


def is_local(spark: SparkSession) -> bool:
    """Return whether a session's executors are processes of this machine."""
    return str(spark.conf.get("spark.master", "")).startswith("local")


def width_of(spark: SparkSession) -> int:
    """Return about how many tasks a session runs at once, from its settings."""
    master = str(spark.conf.get("spark.master", ""))
    if match := re.fullmatch(r"local\[(\d+|\*).*\]", master):
        return os.cpu_count() or 1 if match[1] == "*" else int(match[1])
    if match := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(match[1]) * int(match[2])
    if master == "local":
        return 1
    instances, cores = (str(spark.conf.get(f"spark.executor.{name}", "")) for name in ("instances", "cores"))
    return max(1, int(instances) * int(cores or 1)) if instances.isdigit() else WIDTH_UNKNOWN


def spread(tasks: Mapping[Key, Any], width: int) -> dict[Key, int]:
    """Return key → partition, for `width` cores: heavy keys first, each to the partition with the least work.

    There are several partitions per core, so a hot slot occupies one core while the others continue. More would not pay:
    starting a task takes as long as 50 MiB of checksums.

    >>> from types import SimpleNamespace as Task
    >>> spread({(1, 0): Task(weight_bytes=9 << 23), (1, 1): Task(weight_bytes=512)}, 2)
    {(1, 0): 0, (1, 1): 1}
    """
    keys = sorted(tasks)
    weights = [_weight(tasks[key]) for key in keys]
    rounds = max(TASKS_PER_CORE, -(-sum(weights) // (PARTITION_WEIGHT * width)))  # a round is one partition per core
    partitions = max(1, min(len(weights), PARTITIONS_MAX, rounds * width))
    return dict(zip(keys, balanced(weights, partitions), strict=True))


def _threads(tasks: Mapping[Key, Any] | None) -> int:
    """Return how many keys are joined at once in one task."""
    is_light = tasks and sum(map(_weight, tasks.values())) <= LIGHT_WEIGHT * len(tasks)
    return LIGHT_THREADS if is_light else 1


def _weight(task: Any) -> int:
    return max(WEIGHT_MIN, int(task.weight_bytes))


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _require_reachable(objects_url: str, shares_disk: bool) -> None:
    scheme = objects_url.partition("://")[0] if "://" in objects_url else "path"
    if scheme == "memory" or (scheme in ("path", "file") and not shares_disk):
        raise InvalidConfig(
            "executors cannot reach this object store",
            hint="use one with a URL (s3://, gs://, az://), or `--runner threads`",
            object_store=objects_url,
        )


def _watched(spark: SparkSession, action: Callable[[], list[Any]], tick: Callable[[], None]) -> list[Any]:
    """Run an action, calling `tick` in the meantime; interrupt it if that raises. (Interrupting by tags does not reach an
    action of another thread: tried with Spark 4.3.)"""
    outcome, failure = list[list[Any]](), list[BaseException]()

    def body() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="quire-spark-action", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(TICK_SECONDS)
            tick()
    except BaseException:
        while thread.is_alive():
            spark.interruptAll()  # repeatedly: a stage that has not begun is not interrupted
            thread.join(TICK_SECONDS)
        raise
    if failure:
        raise _translated(failure[0])
    return outcome[0]


def _translated(error: BaseException) -> BaseException:
    if not isinstance(error, (PySparkException, Py4JError)):
        return error
    lines = str(error).strip().splitlines()
    last = next((line for line in reversed(lines) if line and not line.startswith((" ", "\t"))), type(error).__name__)
    failure = SparkUnavailable(
        f"Spark failed: {last[:300]}", hint="see Spark's log for the cause; the job will be retried"
    )
    failure.__cause__ = error
    return failure
