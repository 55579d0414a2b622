"""`writeStream.format("quire.sqlite")`: every batch once, whatever Spark repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quire.core.errors import Conflict
from quire.service.loads import Loads
from tests.spark.served_store import ServedStore, serve_store
from tests.spark.sinks import FileQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path / "store") as owner:
        owner.run("shop", "CREATE TABLE t(id INTEGER PRIMARY KEY, who TEXT)")
        yield owner


def staged(owner: ServedStore) -> list[Path]:
    return list(Path(owner.store.path, "scratch").glob("*"))


@pytest.mark.slow
def test_batches_are_appended_once_although_spark_repeats_the_last(owner: ServedStore, tmp_path: Path) -> None:
    query = FileQuery(owner, tmp_path, "id long, who string", options={"database": "shop", "table": "log"})
    query.add({"id": 1, "who": "a"}, {"id": 2, "who": "b"})
    query.add({"id": 3, "who": "c"})
    query.run()
    everything = "SELECT id, who FROM log ORDER BY id"
    assert owner.query("shop", everything) == [(1, "a"), (2, "b"), (3, "c")]
    assert owner.query("shop", "SELECT batch, rows FROM quire_sinks") == [(1, 1)]
    query.forget_commit()
    query.run()
    assert owner.query("shop", everything) == [(1, "a"), (2, "b"), (3, "c")]
    query.add({"id": 4, "who": "d"})
    query.run()
    assert owner.query("shop", "SELECT count(*) FROM log") == [(4,)]
    assert staged(owner) == []
    query.checkpoint = "another"  # a new query, from batch 0
    query.run()
    assert owner.query("shop", "SELECT count(*) FROM log") == [(8,)]
    assert owner.query("shop", "SELECT batch FROM quire_sinks ORDER BY batch") == [(2,), (2,)]


def test_rows_are_replaced_by_key_and_deleted_by_flag_in_order(owner: ServedStore, tmp_path: Path) -> None:
    options = {"database": "shop", "table": "t", "key": "id", "delete": "gone"}
    query = FileQuery(owner, tmp_path, "id long, who string, gone boolean", options=options)
    query.add({"id": 1, "who": "a"}, {"id": 2, "who": "b"}, {"id": 3, "who": "c"})
    query.add({"id": 1, "who": "A"}, {"id": 2, "gone": True}, {"id": 3, "gone": True}, {"id": 3, "who": "back"})
    query.run()
    assert owner.query("shop", "SELECT * FROM t ORDER BY id") == [(1, "A"), (3, "back")]


@pytest.mark.slow
def test_complete_mode_replaces_the_table(owner: ServedStore, tmp_path: Path) -> None:
    options = {"database": "counts", "table": "n", "create": "database"}
    query = FileQuery(owner, tmp_path, "id long", options=options, mode="complete")
    query.add({"id": 1}, {"id": 2})
    query.add({"id": 1})
    query.run()
    assert owner.query("counts", 'SELECT id, "count" FROM n ORDER BY id') == [(1, 2), (2, 1)]


@pytest.mark.slow
def test_an_abort_after_a_commit_undoes_nothing(
    owner: ServedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has written the batch, but its response is an error: Spark aborts, and the query fails."""
    written = Loads.insert

    def fails(self: Loads, request: Any) -> int:
        written(self, request)
        raise Conflict("the answer is lost")

    query = FileQuery(owner, tmp_path, "id long, who string", options={"database": "shop", "table": "t"})
    query.add({"id": 1, "who": "a"})
    with monkeypatch.context() as patch:
        patch.setattr(Loads, "insert", fails)
        with pytest.raises(Exception, match="the answer is lost"):
            query.run()
    assert owner.query("shop", "SELECT * FROM t") == [(1, "a")]
    query.run()  # the table has a primary key: inserting twice would fail
    assert owner.query("shop", "SELECT * FROM t") == [(1, "a")]
    assert staged(owner) == []
