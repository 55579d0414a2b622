"""An owner loses its bucket while Spark works for it: executors cannot check the ownership, the driver does (decision
017).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import quire
from quire.core.errors import StoreFenced
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.objects.api import list_objects
from quire.objects.open import open_store
from quire.testing.clock import ManualClock
from tests.store.test_shared_bucket import settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 200


def fill(store: quire.Store, word: str) -> None:
    with store.sqlite("shop", create=True) as connection:
        connection.execute("create table if not exists t (word)")
        connection.executemany("insert into t values (?)", [(f"{word} {number}",) for number in range(ROWS)])


def chunks(store: quire.Store) -> int:
    with store.manifest.read() as txn:
        return txn.count(t.CHUNK_CATALOG)


def bases(bucket: Path) -> set[str]:
    return {info.key for info in list_objects(open_store(str(bucket))) if "base:" in info.key}


@pytest.mark.parametrize(("step", "written"), [("planned", 0), ("written", 1)])
def test_a_driver_that_lost_its_bucket_starts_no_task_and_publishes_nothing(
    shared_spark: SparkSession, tmp_path: Path, step: str, written: int
) -> None:
    bucket, clock = tmp_path / "bucket", ManualClock()
    with quire.open(tmp_path / "first", settings=settings(str(bucket)), clock=clock) as store:
        fill(store, "both")
        store.checkpoint("shop")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    with quire.open(tmp_path / "first", settings=settings(str(bucket)), clock=clock) as store:
        fill(store, "first")
        store.pages.flush(store.database("shop").db_id)
        before, objects_before = chunks(store), bases(bucket)

        def take_over(_: object) -> None:
            quire.open(tmp_path / "second", settings=settings(str(bucket)), clock=clock, takeover=True).close()
            clock.advance(120.0)  # the driver's last check is more than a minute old

        with armed(f"jobs.checkpoint.{step}", take_over), pytest.raises(StoreFenced):
            store.heavy.checkpoint_all(runner="spark")
        assert chunks(store) == before, "nothing is published"
        assert len(bases(bucket) - objects_before) == written
        assert all("/e/00000001/" in key for key in bases(bucket)), (
            "executors use names of the epoch that they were given"
        )
        with pytest.raises(StoreFenced):
            store.create("late", "pages")
    with pytest.raises(StoreFenced):
        quire.open(tmp_path / "first", settings=settings(str(bucket)), clock=clock)
    with quire.open(tmp_path / "second", settings=settings(str(bucket)), clock=clock) as store:
        fill(store, "second")
        store.heavy.checkpoint_all(runner="spark")
        assert any("/e/00000002/" in key for key in bases(bucket))
        with store.sqlite("shop") as connection:
            words = {row[0].split()[0] for row in connection.execute("select word from t")}
        assert words == {"both", "second"}
        store.heavy.verify()
        assert store.heavy.damaged() == []
