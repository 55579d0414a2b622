"""The executor's side of the Spark runner: its tools, and the functions that Spark calls with Arrow batches.

Terms
  location   how an executor reaches the bytes of a store: its directory, if the executor sees it, and how to open object
             stores; small, picklable, without a secret that the environment does not have
  row        (place, db, slot, kind, data): the unit that is sent, with its content pickled in `data`. The values of a key
             are consecutive, preceded by its task

A `QuireError` that a task raises is its result. Rows are streamed: a worker has the values of one key in memory, and one
Arrow batch. Imports neither pyspark nor a manifest. Threads: Spark's Python workers have one; light keys are joined in
several.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import pyarrow as pa

from quire.core.background import thread_pool
from quire.core.errors import InternalError, QuireError
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.jobs.runner import BLOCK, Key, TaskResult, Tools, owner_of
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.spark.access import disk_at

CACHE_BYTES = 4 * MIB
"""Jobs read each page once: the cache helps only occasional neighbours."""

TASK, VALUE, ERROR = 0, 1, 2
"""Kinds of rows, in the order in which those of one key arrive."""

ROWS = pa.schema(
    [("place", pa.int32()), ("db", pa.int64()), ("slot", pa.int64()), ("kind", pa.int8()), ("data", pa.binary())]
)
ANSWERS = pa.schema([("db", pa.int64()), ("slot", pa.int64()), ("data", pa.binary())])
FOUND = pa.schema([("number", pa.int64()), ("data", pa.binary())])
FOUND_DDL = "number bigint, data binary"
ROWS_DDL = "place int, db bigint, slot bigint, kind tinyint, data binary"
ANSWERS_DDL = "db bigint, slot bigint, data binary"

BATCH_BYTES = 8 * MIB
"""Rows are sent in batches of about this size."""

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLocation:
    """How an executor reaches a store."""

    root: str = ""
    """The store's directory; empty if executors do not share the disk."""
    options: Mapping[str, StoreOptions] = field(default_factory=dict)
    """By URL of an object store; others are reached by the executor's environment."""


_clients: dict[tuple[str, bytes], ObjectStore] = {}
"""(URL, options) → client of a remote object store, shared in this process."""


_frozen = 0
"""Number of modules that were loaded when they were last frozen."""


def _freeze() -> None:
    """Freeze the loaded modules: PySpark collects garbage after every task, and traversing them takes 12 ms and more."""
    global _frozen
    if len(sys.modules) != _frozen:
        _frozen = len(sys.modules)
        gc.collect()
        gc.freeze()


@contextmanager
def tools_of(location: StoreLocation) -> Iterator[Tools]:
    """Yield the tools for one task.

    Clients of remote object stores are kept for all tasks of a Python worker. Files and directories are opened again by each
    task: a worker lives as long as its session, and would otherwise hold the space of deleted files, or keep using a
    directory that another store has replaced.
    """
    _freeze()
    stores: dict[str, ObjectStore] = {}

    def opened(url: str) -> ObjectStore:
        is_remote = "://" in url and not url.startswith("file:")
        kept: dict[Any, ObjectStore] = _clients if is_remote else stores
        options = location.options.get(url)
        name = (url, pickle.dumps(options)) if is_remote else url
        if name not in kept:
            kept[name] = open_store(url, options=options)
        return kept[name]

    disk = disk_at(location.root, location.options) if location.root else OsDisk()
    # Without a directory there are no files: `Sources` gets the name of one that cannot exist.
    sources = Sources(root=location.root or "/nonexistent", disk=disk, open_store=opened, cache=PageCache(CACHE_BYTES))
    try:
        yield Tools(sources, opened, disk, location.root)
    finally:
        sources.close()
        for store in stores.values():
            store.close()
        _freeze()


# ── functions that Spark calls ────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True)
class InlineInputs:
    """Inputs that travel with a splitter; the frame then contains only their numbers."""

    inputs: Sequence[bytes]
    tasks: Sequence[Row]
    """Rows that are sent with the first input, whether or not there is an input with that number."""


def splitter(
    location: StoreLocation,
    split: Callable[..., Any],
    places: dict[Key, int] | None,
    inline: InlineInputs | None = None,
) -> Callable[[Batches], Batches]:
    """Return a function from inputs to rows of their values. `places` defines the partition in which each key is joined;
    without it Spark decides."""

    def rows(batches: Batches, tools: Tools) -> Iterator[Row]:
        if inline is None:
            yield from _split(_column(batches, "data"), split, tools, places)
            return
        for number in _numbers(batches):
            if number == 0:
                yield from inline.tasks
            yield from _split(inline.inputs[number : number + 1], split, tools, places)

    def run(batches: Batches) -> Batches:
        with tools_of(location) as tools:
            yield from _batched(rows(batches, tools))

    return run


def _split(
    inputs: Iterable[bytes], split: Callable[..., Any], tools: Tools, places: dict[Key, int] | None
) -> Iterator[Row]:
    for data in inputs:
        given = pickle.loads(data)
        try:
            for key, value in split(given, tools):
                place = places[key] if places is not None else 0
                yield place, *key, VALUE, pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except QuireError as error:
            # Values that this input has already yielded are on their way. Their slots then have fewer parts than
            # planned, and are refused instead of being written incompletely (decision 007).
            yield 0, owner_of(given), -1, ERROR, _packed(error)


def joiner(
    location: StoreLocation, join: Callable[..., Any], *, needs_task: bool, threads: int = 1
) -> Callable[[Batches], Batches]:
    """Return a function from rows, in the order of their keys, to one answer per key. Light keys are joined several at a
    time: they wait for the disk more than they compute."""

    def run(batches: Batches) -> Batches:
        with tools_of(location) as tools, thread_pool(threads, "quire-executor") as pool:
            under_way: set[Future[TaskResult[Key, Any]]] = set()
            for key, rows in groupby(_rows(batches), key=itemgetter(0, 1)):
                under_way.add(pool.submit(_joined, key, list(rows), join, tools, needs_task))
                if len(under_way) >= threads:
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    yield from _results(done)
            yield from _results(as_completed(under_way))

    return run


def _results(done: Iterable[Future[TaskResult[Key, Any]]]) -> Batches:
    for future in done:
        answer = future.result()
        yield _answered(answer.key, answer)


def _joined(
    key: Key, rows: Iterable[Any], join: Callable[..., Any], tools: Tools, needs_task: bool
) -> TaskResult[Key, Any]:
    task, values = None, []
    for _, _, kind, data in rows:
        if kind == ERROR:
            return TaskResult(key, error=pickle.loads(data))
        if kind == TASK:
            task = pickle.loads(data)
        else:
            values.append(pickle.loads(data))
    try:
        if needs_task and task is None:
            raise InternalError("a value came up for which there is no task", key=key)
        return TaskResult(key, join(key, task, values, tools))
    except QuireError as error:
        return TaskResult(key, error=error)


def numbered_mapper(location: StoreLocation, find: Callable[..., Any]) -> Callable[[Batches], Batches]:
    """Return a function from tasks to the numbered values they find; an error has no number."""

    def run(batches: Batches) -> Batches:
        with tools_of(location) as tools:
            for data in _column(batches, "data"):
                yield from _numbered(_pairs(pickle.loads(data), find, tools))

    return run


def _pairs(task: Any, find: Callable[..., Any], tools: Tools) -> Iterator[tuple[int | None, Any]]:
    try:
        yield from find(task, tools)
    except QuireError as error:
        yield None, error


def _numbered(pairs: Iterator[tuple[int | None, Any]]) -> Batches:
    while block := list(islice(pairs, BLOCK)):
        numbers = pa.array([number for number, _ in block], pa.uint64()).view(pa.int64())
        values = pa.array([_packed(value) for _, value in block], pa.binary())
        yield pa.RecordBatch.from_arrays([numbers, values], schema=FOUND)


def mapper(
    location: StoreLocation, run: Callable[..., Any], tasks: Sequence[bytes] | None = None
) -> Callable[[Batches], Batches]:
    """Return a function from tasks to one answer each. With `tasks`, the frame contains only their numbers."""

    def given(batches: Batches) -> Iterator[tuple[int, bytes]]:
        if tasks is None:
            return ((number, data) for number, _, _, data in _rows(batches))
        return ((number, tasks[number]) for number in _numbers(batches))

    def work(batches: Batches) -> Batches:
        with tools_of(location) as tools:
            for number, data in given(batches):
                try:
                    answer = TaskResult((number, 0), run(pickle.loads(data), tools))
                except QuireError as error:
                    answer = TaskResult((number, 0), error=error)
                yield _answered((number, 0), answer)

    return work


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
Row = tuple[int, int, int, int, bytes]


def _column(batches: Batches, name: str) -> Iterator[bytes]:
    for batch in batches:
        for data in batch.column(batch.schema.get_field_index(name)):
            yield data.as_py()


def _numbers(batches: Batches) -> Iterator[int]:
    for batch in batches:
        yield from batch.column(0).to_pylist()


def _rows(batches: Batches) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (db, slot, kind, data) for each row."""
    for batch in batches:
        columns = [batch.column(batch.schema.get_field_index(name)) for name in ("db", "slot", "kind")]
        heads = zip(*(column.to_pylist() for column in columns))
        data = batch.column(batch.schema.get_field_index("data"))
        for place, (db, slot, kind) in enumerate(heads):
            yield db, slot, kind, data[place].as_py()


def _batched(rows: Iterator[Row]) -> Batches:
    taken: list[Row] = []
    size = 0
    for row in rows:
        taken.append(row)
        size += len(row[4]) + 32
        if size >= BATCH_BYTES:
            yield batch_of(taken)
            taken, size = [], 0
    if taken:
        yield batch_of(taken)


def batch_of(rows: list[Row]) -> pa.RecordBatch:
    """Return rows as an Arrow batch."""
    columns = list(zip(*rows)) if rows else [()] * len(ROWS)
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, ROWS)], schema=ROWS
    )


def _answered(key: Key, answer: TaskResult[Key, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"db": [key[0]], "slot": [key[1]], "data": [_packed(answer)]}, schema=ANSWERS)


def _packed(value: Any) -> bytes:
    """Pickle an answer; one that cannot be pickled becomes an `InternalError`."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling a foreign object may raise anything
        failure = InternalError(f"an answer cannot be sent: {type(error).__name__}: {error}")
        sent: Any = TaskResult(value.key, error=failure) if isinstance(value, TaskResult) else failure
        return pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)
