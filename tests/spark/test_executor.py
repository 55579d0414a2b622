"""The executor's side, without Spark: rows in, results out."""

from __future__ import annotations

import gc
import pickle
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from quire.core.errors import Corruption
from quire.spark import executor
from quire.spark.executor import ERROR, TASK, VALUE, Row, StoreLocation, batch_of, joiner, mapper, tools_of

Rows = list[Row]


@pytest.fixture(autouse=True)
def _as_a_new_worker() -> None:
    """Reset only the marker. Objects stay frozen: a collection of everything that the tests have imported takes a
    second.
    """
    executor._frozen = 0


def rows_of(keys: int) -> Rows:
    """A task and two values for each key."""
    rows: Rows = []
    for key in range(keys):
        rows.append((0, 1, key, TASK, pickle.dumps(f"task {key}")))
        rows += [(0, 1, key, VALUE, pickle.dumps(value)) for value in (key, 2 * key)]
    return rows


def results_of(rows: Rows, join: Any, root: Path, threads: int) -> dict[Any, Any]:
    run = joiner(StoreLocation(root=str(root)), join, needs_task=True, threads=threads)
    batches = run(iter([batch_of(rows[:5]), batch_of(rows[5:])]))
    results = [pickle.loads(batch.column(2)[0].as_py()) for batch in batches]
    assert len({result.key for result in results}) == len(results)
    return {result.key: result for result in results}


@pytest.mark.parametrize("threads", [1, 4])
def test_each_key_is_joined_once_and_fails_alone(tmp_path: Path, threads: int) -> None:
    def join(key: Any, task: str, values: list[int], tools: Any) -> Any:
        if key == (1, 3):
            raise Corruption("a bad key", hint="take another", key=key)
        return task, sum(values)

    rows = [*rows_of(9), (0, 2, -1, ERROR, pickle.dumps(Corruption("not read", hint="read it")))]
    results = results_of(rows, join, tmp_path, threads)
    assert len(results) == 10
    assert results[1, 7].value == ("task 7", 21)
    assert str(results[1, 3].error).startswith("a bad key")
    assert str(results[2, -1].error).startswith("not read")


def test_light_keys_are_joined_concurrently(tmp_path: Path) -> None:
    barrier = threading.Barrier(4, timeout=30)

    def join(key: Any, task: str, values: list[int], tools: Any) -> int:
        return barrier.wait()

    results = results_of(rows_of(8), join, tmp_path, 4)
    assert sorted(result.value for result in results.values()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_unexpected_error_ends_the_task(tmp_path: Path) -> None:
    def join(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        results_of(rows_of(3), join, tmp_path, 2)


def test_the_modules_of_a_worker_are_frozen_once(tmp_path: Path) -> None:
    """PySpark collects after every task."""
    before, _made_since = gc.get_freeze_count(), [[number] for number in range(1_000)]
    with tools_of(StoreLocation(root=str(tmp_path))):
        frozen = gc.get_freeze_count()
    assert frozen >= before + 1_000
    with tools_of(StoreLocation(root=str(tmp_path))):
        assert gc.get_freeze_count() <= frozen


def test_modules_that_a_task_loads_are_frozen_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that loaded pandas left 34,000 objects to each later collection: 12 ms and more per task."""
    with tools_of(StoreLocation(root=str(tmp_path))):
        module = ModuleType("quire_test_loaded")
        vars(module)["made"] = [[number] for number in range(10_000)]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        frozen = gc.get_freeze_count()
    assert gc.get_freeze_count() > frozen + 9_000


def test_tasks_sent_with_their_function_are_identified_by_number(tmp_path: Path) -> None:
    def run(task: str, _tools: Any) -> str:
        if task == "bad":
            raise Corruption("a bad task", hint="take another")
        return task.upper()

    work = mapper(StoreLocation(root=str(tmp_path)), run, [pickle.dumps(result) for result in ("a", "bad", "c")])
    batches = iter([pa.RecordBatch.from_pydict({"id": [2, 0]}), pa.RecordBatch.from_pydict({"id": [1]})])
    results = {task.key: task for task in (pickle.loads(batch.column(2)[0].as_py()) for batch in work(batches))}
    assert (results[0, 0].value, results[2, 0].value) == ("A", "C")
    assert str(results[1, 0].error).startswith("a bad task")
