"""Both runners give the same results: threads of this process and Spark's workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quire.core.errors import Corruption, InternalError, InvalidConfig, InvalidInput, SparkUnavailable
from quire.core.limits import MIB
from quire.durable.files import OsDisk
from quire.jobs.checkpoint.run import join_slot
from quire.jobs.runner import AUTO_BYTES, Runner, Runners, TaskResult, ThreadRunner, Tools
from quire.objects.open import open_store
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.spark.runner import (
    PARTITION_WEIGHT,
    PARTITIONS_MAX,
    TASKS_PER_CORE,
    WIDTH_UNKNOWN,
    SparkRunner,
    spread,
    width_of,
)
from tests.spark.runner_functions import HIGH, Task, Words, by_length, crash, double, gather, numbers_of, sleep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Stopped(Exception):
    """Raised by a progress callback to end the run."""


@pytest.fixture(params=["threads", "spark"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    objects = str(tmp_path / "objects")
    if request.param == "spark":
        yield SparkRunner(request.getfixturevalue("spark"), root=str(tmp_path), objects_url=objects)
        return
    sources = Sources(root=str(tmp_path), disk=OsDisk(), open_store=open_store, cache=PageCache(0))
    yield ThreadRunner(Tools(sources, open_store, OsDisk(), str(tmp_path)), 2)


def outcomes(results: Iterator[TaskResult[Any, Any]]) -> dict[Any, Any]:
    """Key → value, or the text of the error."""
    return {
        result.key: result.value if result.error is None else str(result.error).partition(";")[0] for result in results
    }


def test_each_task_has_a_result_and_an_error_is_a_result(runner: Runner) -> None:
    results = outcomes(runner.map(double, [1, -1, 3]))
    assert results == {0: 2, 1: "a negative number (number=-1)", 2: 6}
    assert outcomes(runner.map(double, [])) == {}


def test_values_of_one_key_are_joined_together(runner: Runner) -> None:
    inputs = [Words(1, ("a", "bb", "c")), Words(2, ("dd",)), Words(1, ("ee", "f"))]
    results = outcomes(runner.regroup(by_length, inputs, gather))
    assert results == {(1, 1): ("", ["a", "c", "f"]), (1, 2): ("", ["bb", "ee"]), (2, 2): ("", ["dd"])}


def test_every_task_is_joined_even_without_a_value(runner: Runner) -> None:
    tasks = {(1, 1): Task("one"), (1, 9): Task("nine"), (2, 2): Task("refused")}
    results = outcomes(runner.regroup(by_length, [Words(1, ("a",)), Words(2, ("dd",))], gather, tasks))
    assert results == {(1, 1): ("one", ["a"]), (1, 9): ("nine", []), (2, 2): "a refused task (key=(2, 2))"}
    assert outcomes(runner.regroup(by_length, [], gather, {(1, 9): Task("nine")})) == {(1, 9): ("nine", [])}


def test_an_input_that_cannot_be_split_is_an_error_of_its_database(runner: Runner) -> None:
    inputs = [Words(1, ("a",)), Words(2, ("dd", "bad")), Words(3, ("c",))]
    results = {result.key: result for result in runner.regroup(by_length, inputs, gather)}
    assert isinstance(results[2, -1].error, Corruption)
    assert results[2, -1].error.hint == "take another", "the error arrives complete"
    assert results[1, 1].value == ("", ["a"])
    assert results[3, 1].value == ("", ["c"])


def test_a_value_without_a_task_is_a_bug(runner: Runner) -> None:
    with pytest.raises((InternalError, SparkUnavailable, KeyError)):
        list(runner.regroup(by_length, [Words(1, ("a", "bb"))], gather, {(1, 1): Task("one")}))


def test_an_unexpected_error_ends_the_run(runner: Runner) -> None:
    with pytest.raises((ZeroDivisionError, SparkUnavailable), match="a bug"):
        list(runner.map(crash, [1, 2]))
    assert outcomes(runner.map(double, [4])) == {0: 8}, "the runner stays usable"


def test_progress_is_reported_and_can_stop_the_run(runner: Runner) -> None:
    reports: list[tuple[int, int]] = []
    list(runner.map(double, [1, 2, 3], tick=lambda *each: reports.append(each)))
    assert reports[0] == (0, 3)
    assert reports[-1] == (3, 3)
    began = time.monotonic()

    def stop(done: int, total: int) -> None:
        if time.monotonic() - began > 1:
            raise Stopped

    with pytest.raises(Stopped):
        list(runner.map(sleep, [0.3] * 200, tick=stop))
    assert time.monotonic() - began < 25, "the run ended long before the work was done"


def test_only_differences_are_returned(runner: Runner) -> None:
    inputs = [Words(1, ("a", "bbbb", "cc")), Words(2, ("eeeee", "dd"))]
    expected = np.array([HIGH + 1, HIGH + 2, HIGH + 3, HIGH + 9], np.uint64)
    differences = list(runner.unmatched(numbers_of, inputs, expected))
    expected_differences = {(HIGH + 4, "bbbb"), (HIGH + 5, "eeeee"), (None, "3 words"), (None, "2 words")}
    assert set(differences) == expected_differences | {(HIGH + 3, None), (HIGH + 9, None)}
    assert len(differences) == len(expected_differences) + 2
    assert list(runner.unmatched(numbers_of, [], expected[:1])) == [(HIGH + 1, None)]
    differences = list(runner.unmatched(numbers_of, [Words(1, ("a",))], expected[:0]))
    assert set(differences) == {(HIGH + 1, "a"), (None, "1 words")}
    with pytest.raises(Corruption, match="a bad word"):
        list(runner.unmatched(numbers_of, [Words(1, ("a", "bad"))], expected))


def test_the_callers_session_stays_the_active_one(spark: SparkSession, tmp_path: Path) -> None:
    """Otherwise `df.write.format("quire.kv")` after a checkpoint looks for the source in the runner's session."""
    spark.createDataFrame([(1,)], "n int")  # makes this session the active one
    runner = SparkRunner(spark, root=str(tmp_path), objects_url=str(tmp_path / "objects"))
    assert outcomes(runner.map(double, [1, 2])) == {0: 2, 1: 4}
    assert list(runner.unmatched(numbers_of, [Words(1, ())], np.array([HIGH], np.uint64)))
    assert outcomes(runner.regroup(by_length, [Words(1, ("a",))], gather)) == {(1, 1): ("", ["a"])}
    active: Any = type(spark).getActiveSession()
    assert active._jsparkSession.equals(spark._jsparkSession)


# ── placing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_heavy_key_has_a_partition_of_its_own() -> None:
    tasks: dict[tuple[int, int], Any] = {(1, slot): Task("light") for slot in range(100)}
    tasks |= {(2, slot): Task("heavy", dirty=16_384) for slot in range(5)}
    partitions = spread(tasks, 4)
    heavy = [partitions[2, slot] for slot in range(5)]
    assert len(set(heavy)) == 5
    assert not set(heavy) & {partition for key, partition in partitions.items() if key[0] == 1}
    assert max(partitions.values()) + 1 == 4 * TASKS_PER_CORE


def test_there_are_a_few_tasks_for_each_core_and_none_is_large() -> None:
    slots = {(1, slot): Task("heavy", dirty=16_384) for slot in range(256)}
    assert max(spread(slots, 2).values()) + 1 == 256 * 64 * MIB // PARTITION_WEIGHT
    assert max(spread(slots, 3).values()) + 1 == 33, "every core has a partition in each round"
    assert max(spread(slots, 50).values()) + 1 == 50 * TASKS_PER_CORE
    loads = Counter(spread(slots, 2).values())
    assert max(loads.values()) - min(loads.values()) <= 1


def test_the_number_of_partitions_is_bounded() -> None:
    partitions = spread({(db, 0): Task("light", dirty=80_000) for db in range(5_000)}, 2)
    assert max(partitions.values()) + 1 == PARTITIONS_MAX
    assert spread({}, 2) == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"spark.master": "local[3]"}, 3),
        ({"spark.master": "local[2,4]"}, 2),
        ({"spark.master": "local"}, 1),
        ({"spark.master": "local-cluster[2,3,1024]"}, 6),
        ({"spark.master": "spark://head:7077"}, WIDTH_UNKNOWN),
        ({"spark.master": "k8s://x", "spark.executor.instances": "8", "spark.executor.cores": "4"}, 32),
        ({}, WIDTH_UNKNOWN),
    ],
)
def test_how_many_tasks_a_session_runs_at_once(settings: dict[str, str], expected: int) -> None:
    fake_session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: settings.get(name, default)))
    assert width_of(fake_session) == expected


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Named:
    """A runner that has only a name."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("requested", "default", "size", "expected"),
    [
        ("", "auto", AUTO_BYTES - 1, "threads"),
        ("", "auto", AUTO_BYTES, "spark"),
        ("", "threads", AUTO_BYTES, "threads"),
        ("", "spark", 0, "spark"),
        ("threads", "spark", AUTO_BYTES, "threads"),
        ("spark", "threads", 0, "spark"),
        ("auto", "spark", 0, "threads"),
    ],
)
def test_the_runner_is_chosen_by_request_default_and_size(
    requested: str, default: str, size: int, expected: str
) -> None:
    runners: Any = Runners(lambda: Named("spark"), default)  # type: ignore[arg-type, return-value]
    assert runners.choose(requested, size, lambda: Named("threads")).name == expected


def test_without_spark_threads_are_used_unless_spark_was_requested() -> None:
    attempts: list[int] = []

    def unavailable() -> Runner:
        attempts.append(1)
        raise SparkUnavailable("no Java", hint="install one")

    runners: Any = Runners(unavailable)
    threads: Any = Named("threads")
    for _ in range(3):
        assert runners.choose("auto", AUTO_BYTES, lambda: threads) is threads
    assert len(attempts) == 1, "Spark is tried once"
    with pytest.raises(SparkUnavailable):
        runners.choose("spark", 0, lambda: threads)
    with pytest.raises(InvalidInput, match="unknown runner"):
        runners.choose("cluster", 0, lambda: threads)
    with pytest.raises(SparkUnavailable, match="not available in this process"):
        Runners().choose("spark", 0, lambda: threads)


@pytest.mark.parametrize(("url", "shares"), [("memory://x", True), ("/objects", False), ("file:///objects", False)])
def test_an_object_store_that_executors_cannot_reach_is_refused(spark: SparkSession, url: str, shares: bool) -> None:
    with pytest.raises(InvalidConfig, match="cannot reach"):
        SparkRunner(spark, root="/store", objects_url=url, shares_disk=shares)


def test_jobs_are_described_by_what_they_do_and_for_which_databases() -> None:
    runner = object.__new__(SparkRunner)
    runner._name_of = {1: "shop", 2: "blog"}.get  # type: ignore[assignment]
    assert (
        runner._described(join_slot, [Words(2, ()), Words(1, ()), Words(1, ())])
        == "quire checkpoint, join slot: shop, blog"
    )
    runner._name_of = str
    many = runner._described(join_slot, [Words(number, ()) for number in range(1, 1_005)])
    assert many == "quire checkpoint, join slot: 1, 2, 3 and 1,001 more"
    assert runner._described(join_slot, [1, 2]) == "quire checkpoint, join slot"
