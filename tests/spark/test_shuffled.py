"""What moves between executors and to the driver, as Spark counts it: rows of an index, names and sums; no bodies of pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import quire
from quire.manifest.records import JobState
from quire.spark.runner import SparkRunner
from quire.store.store import Store
from tests.spark.runs import Words, by_length, gather

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = 4_096
PAGES = 1_500
ROUND = 128 << 10
"""Bytes of a run that do not depend on how many pages there are: tasks, headers of shuffled blocks, what each task tells."""


@dataclass
class Moved:
    """What stages of Spark have moved."""

    stages: int = 0
    shuffled: int = 0
    """Bytes that went from one stage to another."""
    returned: int = 0
    """Bytes that came back to the driver."""


@contextmanager
def watched(spark: SparkSession) -> Iterator[Moved]:
    """What the stages that run meanwhile move, by Spark's own book-keeping."""
    before, moved = _stages(spark), Moved()
    yield moved
    for number, (shuffled, returned) in _stages(spark).items():
        if number not in before:
            moved.stages += 1
            moved.shuffled += shuffled
            moved.returned += returned


def _stages(spark: SparkSession) -> dict[int, tuple[int, int]]:
    """Number of a stage → bytes it shuffled, bytes it returned."""
    context: Any = spark.sparkContext
    inner, jvm = context._jsc.sc(), context._jvm
    inner.listenerBus().waitUntilEmpty()
    nothing = jvm.java.util.ArrayList()
    quantiles = context._gateway.new_array(jvm.double, 0)
    stages = inner.statusStore().stageList(nothing, False, False, quantiles, nothing)
    found = [stages.apply(place) for place in range(stages.size())]
    return {each.stageId(): (each.shuffleWriteBytes(), each.resultSize()) for each in found}


@pytest.fixture
def store(lent_spark: SparkSession, tmp_path: Path) -> Iterator[Store]:
    """Two databases of pages that cannot be compressed, all of them in the WAL."""
    with quire.open(tmp_path / "store") as made:
        for name in ("shop", "blog"):
            made.create(name, "pages")
            fill(made, name, range(PAGES))
        yield made


def fill(store: Store, name: str, pages: range) -> None:
    with store.pages.open(name).begin() as txn:
        txn.write_pages({page: random.randbytes(PAGE) for page in pages})
    store.pages.flush(store.pages.open(name).db_id)


def test_bodies_that_move_are_seen(spark: SparkSession, tmp_path: Path) -> None:
    """What the other test does not see is not there: words that are shuffled, and come back, are counted."""
    words = tuple(random.randbytes(PAGE // 2).hex() for _ in range(100))
    runner = SparkRunner(spark, root=str(tmp_path), objects_url=str(tmp_path / "objects"))
    with watched(spark) as moved:
        (answer,) = runner.regroup(by_length, [Words(1, words)], gather)
    assert len(answer.result()[1]) == 100
    assert min(moved.shuffled, moved.returned) > 100 * PAGE // 2


def test_jobs_move_rows_and_names_and_no_pages(store: Store, spark: SparkSession, tmp_path: Path) -> None:
    heavy, bodies = store.heavy, 2 * PAGES * PAGE

    with watched(spark) as moved:
        assert [job.state for job in heavy.checkpoint_all(runner="spark")] == [JobState.SUCCEEDED] * 2
    need_only_rows(moved, 2 * PAGES, bodies)
    assert moved.shuffled > 2 * PAGES, "rows do go through Spark, compressed: what is counted here is what moves"

    for name in ("shop", "blog"):
        fill(store, name, range(100))
    heavy.checkpoint_all(runner="spark")
    with watched(spark) as moved:
        assert [job.state for job in heavy.merge_all(runner="spark")] == [JobState.SUCCEEDED] * 2
    need_only_rows(moved, 2 * PAGES, bodies)

    with watched(spark) as moved:
        assert heavy.verify(runner="spark").result["altered"] == 0
    assert moved.shuffled == 0, "verifying brings nothing together"
    need_only_rows(moved, 0, bodies)

    with watched(spark) as moved:
        assert heavy.recount(runner="spark") == []
    need_only_rows(moved, 2 * PAGES, bodies)
    with watched(spark) as moved:
        assert heavy.sweep(runner="spark").result["lost"] == 0
    need_only_rows(moved, 100, bodies)
    with watched(spark) as moved:
        assert len(heavy.stats(runner="spark")) == 2
    need_only_rows(moved, 100, bodies)

    store.snapshot("shop", "now")
    with watched(spark) as moved:
        heavy.restore("shop", "now", str(tmp_path / "file"), runner="spark")
    assert moved.shuffled == 0
    need_only_rows(moved, 0, bodies)


def need_only_rows(moved: Moved, rows: int, bodies: int) -> None:
    """It moved about as much as so many rows are; which is nothing beside the bodies."""
    assert moved.stages > 0
    assert moved.shuffled <= 64 * rows + ROUND
    assert moved.returned <= 64 * rows + ROUND
    assert moved.shuffled + moved.returned < bodies // 20
