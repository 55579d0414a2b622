"""Mirrors on Spark: executors write the files, wherever they run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from pyspark import SparkContext

from quire.spark import session
from tests.jobs.mirrored_store import MirroredStore, fill


@pytest.fixture
def mirrored(tmp_path: Path) -> MirroredStore:
    session("local[2]")
    return MirroredStore(tmp_path, "delta", {"file_bytes": "65536"})


def test_executors_write_the_files_that_the_driver_commits(
    mirrored: MirroredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[str] = []
    monkeypatch.setattr(SparkContext, "setJobDescription", lambda _, title: described.append(title))
    with mirrored.open() as store:
        for number in range(12):
            fill(store, f"tenant-{number:02}", 30)
        mirrored.define(store)
        first = store.mirrors.run("lake", runner="spark")
        assert (first.runner, first.rows_written) == ("spark", 360)
        assert first.files_added > 1
        mirrored.check(store)
        with closing(store.sqlite("tenant-03")) as connection:
            connection.execute("ALTER TABLE orders ADD COLUMN note TEXT")
            connection.execute("UPDATE orders SET note = 'late' WHERE id = 1")
        store.drop("tenant-07")
        second = store.mirrors.run("lake", runner="spark")
        assert (second.full, second.changed, second.dropped) == (False, 1, 1)
        databases = "tenant-00, tenant-01, tenant-02 and 9 more"
        assert described[0] == f"quire mirror lake, batch 1 to delta:{mirrored.root}/lake, write files: {databases}"
        assert len(described) == 2
        mirrored.check(store)
