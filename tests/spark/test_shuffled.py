"""What Spark moves between executors and to the driver: index rows, names and sums, but no page bodies."""

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
from tests.spark.runner_functions import Words, by_length, gather

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = 4_096
PAGES = 1_500
ROUND = 128 << 10
"""Bytes of a run that do not depend on the number of pages: tasks, headers of shuffled blocks, results of tasks."""


@dataclass
class StageTraffic:
    """The bytes that Spark's stages have moved."""

    stages: int = 0
    shuffled: int = 0
    """Bytes shuffled from one stage to another."""
    returned: int = 0
    """Bytes returned to the driver."""


@contextmanager
def recorded_traffic(spark: SparkSession) -> Iterator[StageTraffic]:
    """Records what the stages in the block move, according to Spark's status store."""
    before, traffic = _stages(spark), StageTraffic()
    yield traffic
    for number, (shuffled, returned) in _stages(spark).items():
        if number not in before:
            traffic.stages += 1
            traffic.shuffled += shuffled
            traffic.returned += returned


def _stages(spark: SparkSession) -> dict[int, tuple[int, int]]:
    """Stage number → (bytes shuffled, bytes returned)."""
    context: Any = spark.sparkContext
    inner, jvm = context._jsc.sc(), context._jvm
    inner.listenerBus().waitUntilEmpty()
    nothing = jvm.java.util.ArrayList()
    quantiles = context._gateway.new_array(jvm.double, 0)
    stages = inner.statusStore().stageList(nothing, False, False, quantiles, nothing)
    stage_list = [stages.apply(i) for i in range(stages.size())]
    return {stage.stageId(): (stage.shuffleWriteBytes(), stage.resultSize()) for stage in stage_list}


@pytest.fixture
def store(shared_spark: SparkSession, tmp_path: Path) -> Iterator[Store]:
    """Two databases of incompressible pages, all of them in the WAL."""
    with quire.open(tmp_path / "store") as store:
        for name in ("shop", "blog"):
            store.create(name, "pages")
            fill(store, name, range(PAGES))
        yield store


def fill(store: Store, name: str, pages: range) -> None:
    with store.pages.open(name).begin() as txn:
        txn.write_pages({page: random.randbytes(PAGE) for page in pages})
    store.pages.flush(store.pages.open(name).db_id)


def test_moved_bodies_are_detected(spark: SparkSession, tmp_path: Path) -> None:
    """Proves that the other test can detect bodies: words that are shuffled and returned are counted."""
    words = tuple(random.randbytes(PAGE // 2).hex() for _ in range(100))
    runner = SparkRunner(spark, root=str(tmp_path), objects_url=str(tmp_path / "objects"))
    with recorded_traffic(spark) as traffic:
        (answer,) = runner.regroup(by_length, [Words(1, words)], gather)
    assert len(answer.result()[1]) == 100
    assert min(traffic.shuffled, traffic.returned) > 100 * PAGE // 2


def test_jobs_move_rows_and_names_and_no_pages(store: Store, spark: SparkSession, tmp_path: Path) -> None:
    heavy, bodies = store.heavy, 2 * PAGES * PAGE

    with recorded_traffic(spark) as traffic:
        assert [job.state for job in heavy.checkpoint_all(runner="spark")] == [JobState.SUCCEEDED] * 2
    assert_only_rows_moved(traffic, 2 * PAGES, bodies)
    assert traffic.shuffled > 2 * PAGES, "rows are shuffled, compressed: the counters work"

    for name in ("shop", "blog"):
        fill(store, name, range(100))
    heavy.checkpoint_all(runner="spark")
    with recorded_traffic(spark) as traffic:
        assert [job.state for job in heavy.merge_all(runner="spark")] == [JobState.SUCCEEDED] * 2
    assert_only_rows_moved(traffic, 2 * PAGES, bodies)

    with recorded_traffic(spark) as traffic:
        assert heavy.verify(runner="spark").result["altered"] == 0
    assert traffic.shuffled == 0, "verification shuffles nothing"
    assert_only_rows_moved(traffic, 0, bodies)

    with recorded_traffic(spark) as traffic:
        assert heavy.recount(runner="spark") == []
    assert_only_rows_moved(traffic, 2 * PAGES, bodies)
    with recorded_traffic(spark) as traffic:
        assert heavy.sweep(runner="spark").result["lost"] == 0
    assert_only_rows_moved(traffic, 100, bodies)
    with recorded_traffic(spark) as traffic:
        assert len(heavy.stats(runner="spark")) == 2
    assert_only_rows_moved(traffic, 100, bodies)

    store.snapshot("shop", "now")
    with recorded_traffic(spark) as traffic:
        heavy.restore("shop", "now", str(tmp_path / "file"), runner="spark")
    assert traffic.shuffled == 0
    assert_only_rows_moved(traffic, 0, bodies)


def assert_only_rows_moved(traffic: StageTraffic, rows: int, bodies: int) -> None:
    """Assert that about `rows` rows were moved, which is little compared with the bodies."""
    assert traffic.stages > 0
    assert traffic.shuffled <= 64 * rows + ROUND
    assert traffic.returned <= 64 * rows + ROUND
    assert traffic.shuffled + traffic.returned < bodies // 20
