"""Both runners give the same answers: threads of this process and Spark's workers."""

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
from tests.spark.runs import HIGH, Task, Words, by_length, crash, double, gather, numbers_of, sleep

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Stopped(Exception):
    """What a tick raises that wants the work to end."""


@pytest.fixture(params=["threads", "spark"])
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    objects = str(tmp_path / "objects")
    if request.param == "spark":
        yield SparkRunner(request.getfixturevalue("spark"), root=str(tmp_path), objects_url=objects)
        return
    sources = Sources(root=str(tmp_path), disk=OsDisk(), open_store=open_store, cache=PageCache(0))
    yield ThreadRunner(Tools(sources, open_store, OsDisk(), str(tmp_path)), 2)


def told(answers: Iterator[TaskResult[Any, Any]]) -> dict[Any, Any]:
    """Key → value, or the words of the error."""
    return {each.key: each.value if each.error is None else str(each.error).partition(";")[0] for each in answers}


def test_each_task_has_its_answer_and_an_error_is_one(runner: Runner) -> None:
    found = told(runner.map(double, [1, -1, 3]))
    assert found == {0: 2, 1: "a negative number (number=-1)", 2: 6}
    assert told(runner.map(double, [])) == {}


def test_values_of_one_key_come_together(runner: Runner) -> None:
    inputs = [Words(1, ("a", "bb", "c")), Words(2, ("dd",)), Words(1, ("ee", "f"))]
    found = told(runner.regroup(by_length, inputs, gather))
    assert found == {(1, 1): ("", ["a", "c", "f"]), (1, 2): ("", ["bb", "ee"]), (2, 2): ("", ["dd"])}


def test_every_task_is_joined_even_without_a_value(runner: Runner) -> None:
    tasks = {(1, 1): Task("one"), (1, 9): Task("nine"), (2, 2): Task("refused")}
    found = told(runner.regroup(by_length, [Words(1, ("a",)), Words(2, ("dd",))], gather, tasks))
    assert found == {(1, 1): ("one", ["a"]), (1, 9): ("nine", []), (2, 2): "a refused task (key=(2, 2))"}
    assert told(runner.regroup(by_length, [], gather, {(1, 9): Task("nine")})) == {(1, 9): ("nine", [])}


def test_an_input_that_cannot_be_split_answers_for_its_database(runner: Runner) -> None:
    inputs = [Words(1, ("a",)), Words(2, ("dd", "bad")), Words(3, ("c",))]
    answers = {each.key: each for each in runner.regroup(by_length, inputs, gather)}
    assert isinstance(answers[2, -1].error, Corruption)
    assert answers[2, -1].error.hint == "take another", "the error came through whole"
    assert answers[1, 1].value == ("", ["a"])
    assert answers[3, 1].value == ("", ["c"])


def test_a_value_without_a_task_is_a_bug(runner: Runner) -> None:
    with pytest.raises((InternalError, SparkUnavailable, KeyError)):
        list(runner.regroup(by_length, [Words(1, ("a", "bb"))], gather, {(1, 1): Task("one")}))


def test_what_is_no_error_of_ours_ends_the_run(runner: Runner) -> None:
    with pytest.raises((ZeroDivisionError, SparkUnavailable), match="a bug"):
        list(runner.map(crash, [1, 2]))
    assert told(runner.map(double, [4])) == {0: 8}, "the runner goes on"


def test_progress_is_told_and_may_stop_the_run(runner: Runner) -> None:
    heard: list[tuple[int, int]] = []
    list(runner.map(double, [1, 2, 3], tick=lambda *each: heard.append(each)))
    assert heard[0] == (0, 3)
    assert heard[-1] == (3, 3)
    began = time.monotonic()

    def stop(done: int, total: int) -> None:
        if time.monotonic() - began > 1:
            raise Stopped

    with pytest.raises(Stopped):
        list(runner.map(sleep, [0.3] * 200, tick=stop))
    assert time.monotonic() - began < 25, "it ended long before the work was over"


def test_only_differences_come_back(runner: Runner) -> None:
    inputs = [Words(1, ("a", "bbbb", "cc")), Words(2, ("eeeee", "dd"))]
    expected = np.array([HIGH + 1, HIGH + 2, HIGH + 3, HIGH + 9], np.uint64)
    found = list(runner.unmatched(numbers_of, inputs, expected))
    wanted = {(HIGH + 4, "bbbb"), (HIGH + 5, "eeeee"), (None, "3 words"), (None, "2 words")}
    assert set(found) == wanted | {(HIGH + 3, None), (HIGH + 9, None)}
    assert len(found) == len(wanted) + 2
    assert list(runner.unmatched(numbers_of, [], expected[:1])) == [(HIGH + 1, None)]
    found = list(runner.unmatched(numbers_of, [Words(1, ("a",))], expected[:0]))
    assert set(found) == {(HIGH + 1, "a"), (None, "1 words")}
    with pytest.raises(Corruption, match="a bad word"):
        list(runner.unmatched(numbers_of, [Words(1, ("a", "bad"))], expected))


def test_the_callers_session_stays_the_active_one(spark: SparkSession, tmp_path: Path) -> None:
    """Else `df.write.format("quire.kv")` after a checkpoint looks for the source in the runner's session."""
    spark.createDataFrame([(1,)], "n int")  # makes it the active one
    runner = SparkRunner(spark, root=str(tmp_path), objects_url=str(tmp_path / "objects"))
    assert told(runner.map(double, [1, 2])) == {0: 2, 1: 4}
    assert list(runner.unmatched(numbers_of, [Words(1, ())], np.array([HIGH], np.uint64)))
    assert told(runner.regroup(by_length, [Words(1, ("a",))], gather)) == {(1, 1): ("", ["a"])}
    active: Any = type(spark).getActiveSession()
    assert active._jsparkSession.equals(spark._jsparkSession)


# ── placing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_heavy_key_has_a_partition_of_its_own() -> None:
    tasks: dict[tuple[int, int], Any] = {(1, slot): Task("light") for slot in range(100)}
    tasks |= {(2, slot): Task("heavy", dirty=16_384) for slot in range(5)}
    places = spread(tasks, 4)
    heavy = [places[2, slot] for slot in range(5)]
    assert len(set(heavy)) == 5
    assert not set(heavy) & {place for key, place in places.items() if key[0] == 1}
    assert max(places.values()) + 1 == 4 * TASKS_PER_CORE


def test_there_are_a_few_tasks_for_each_core_and_none_is_large() -> None:
    slots = {(1, slot): Task("heavy", dirty=16_384) for slot in range(256)}
    assert max(spread(slots, 2).values()) + 1 == 256 * 64 * MIB // PARTITION_WEIGHT
    assert max(spread(slots, 3).values()) + 1 == 33, "in each round, every core has a partition"
    assert max(spread(slots, 50).values()) + 1 == 50 * TASKS_PER_CORE
    loads = Counter(spread(slots, 2).values())
    assert max(loads.values()) - min(loads.values()) <= 1


def test_there_are_never_more_partitions_than_one_stage_takes() -> None:
    places = spread({(db, 0): Task("light", dirty=80_000) for db in range(5_000)}, 2)
    assert max(places.values()) + 1 == PARTITIONS_MAX
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
    made: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: settings.get(name, default)))
    assert width_of(made) == expected


# ── choosing ──────────────────────────────────────────────────────────────────────────────────────────────────────────
class Named:
    """A runner that is only a name."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.mark.parametrize(
    ("wish", "usual", "size", "expected"),
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
def test_who_runs_what(wish: str, usual: str, size: int, expected: str) -> None:
    made: Any = Runners(lambda: Named("spark"), usual)  # type: ignore[arg-type, return-value]
    assert made.choose(wish, size, lambda: Named("threads")).name == expected


def test_where_there_is_no_spark_threads_do_it_unless_spark_was_asked_for() -> None:
    asked: list[int] = []

    def none() -> Runner:
        asked.append(1)
        raise SparkUnavailable("no Java", hint="install one")

    made: Any = Runners(none)
    threads: Any = Named("threads")
    for _ in range(3):
        assert made.choose("auto", AUTO_BYTES, lambda: threads) is threads
    assert len(asked) == 1, "it is looked for once"
    with pytest.raises(SparkUnavailable):
        made.choose("spark", 0, lambda: threads)
    with pytest.raises(InvalidInput, match="unknown runner"):
        made.choose("cluster", 0, lambda: threads)
    with pytest.raises(SparkUnavailable, match="not available in this process"):
        Runners().choose("spark", 0, lambda: threads)


@pytest.mark.parametrize(("url", "shares"), [("memory://x", True), ("/objects", False), ("file:///objects", False)])
def test_an_object_store_that_executors_do_not_reach_is_refused(spark: SparkSession, url: str, shares: bool) -> None:
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
