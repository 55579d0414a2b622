"""`df.write.format("quire.sqlite")`: all rows of a job or none, once, whatever happens to its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.types import LongType, StructField, StructType

from quire.spark.sources.base import Options
from quire.spark.sources.sqlite_write import WRITING, SqliteTarget
from quire.spark.sources.writers import PartMessage, PartWriter
from tests.spark.served_store import ServedStore, serve_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path / "store") as owner:
        owner.run("shop", "CREATE TABLE t(id INTEGER PRIMARY KEY, who TEXT)", "INSERT INTO t VALUES (0, 'before')")
        yield owner


def write(owner: ServedStore, frame: DataFrame, mode: str = "append", **options: Any) -> None:
    all_options = {"database": "shop", "table": "t", **options}
    frame.write.format("quire.sqlite").mode(mode).options(**owner.options, **all_options).save()


def staged(owner: ServedStore) -> list[Path]:
    return list(Path(owner.store.path, "scratch").glob("*"))


def test_rows_of_all_tasks_are_appended_in_one_transaction(owner: ServedStore) -> None:
    before = owner.query("shop", "PRAGMA quire_epoch")
    frame = owner.spark.range(1, 1_001, numPartitions=3).selectExpr("id", "concat('w', id) AS who")
    write(owner, frame)
    assert owner.query("shop", "SELECT count(*), min(who), sum(id) FROM t") == [(1_001, "before", sum(range(1_001)))]
    assert owner.query("shop", "SELECT rows FROM quire_loads") == [(1_000,)]
    assert owner.query("shop", "PRAGMA quire_epoch") != before
    assert staged(owner) == []


def test_overwriting_replaces_the_rows_and_columns_are_matched_by_name(owner: ServedStore) -> None:
    write(owner, owner.spark.range(5, 7).selectExpr("'x' AS who", "id"), "overwrite")
    assert owner.query("shop", "SELECT * FROM t") == [(5, "x"), (6, "x")]


def test_a_new_table_has_the_types_of_the_frame_and_is_read_back_unchanged(owner: ServedStore) -> None:
    frame = owner.spark.sql(
        "SELECT 1 AS n, 2.5D AS r, 'é' AS s, true AS b, X'00FF' AS x, DATE'2024-02-29' AS d, "
        "TIMESTAMP'2024-02-29 12:30:00.5' AS t, CAST(1.25 AS DECIMAL(8,2)) AS m, CAST(NULL AS INT) AS z"
    )
    write(owner, frame, table="made")
    (sql,) = owner.query("shop", "SELECT sql FROM sqlite_schema WHERE name = 'made'")[0]
    assert '"n" INTEGER' in sql
    assert '"d" DATE' in sql
    back = owner.spark.read.format("quire.sqlite").options(**owner.options, database="shop", table="made")
    assert back.schema(frame.schema).load().collect() == frame.collect()


def test_an_empty_frame_writes_nothing_and_succeeds(owner: ServedStore) -> None:
    write(owner, owner.spark.range(0).selectExpr("id", "'x' AS who"))
    assert owner.query("shop", "SELECT count(*) FROM t") == [(1,)]


def test_a_job_that_fails_leaves_nothing(owner: ServedStore) -> None:
    frame = owner.spark.range(1, 101, numPartitions=2).selectExpr(
        "id", "if(id = 99, raise_error('no luck'), 'x') AS who"
    )
    with pytest.raises(Exception, match="no luck"):
        write(owner, frame)
    assert owner.query("shop", "SELECT count(*) FROM t") == [(1,)]
    assert staged(owner) == []


def test_rows_that_the_table_refuses_fail_the_job_and_leave_nothing(owner: ServedStore) -> None:
    with pytest.raises(Exception, match=r"Conflict.*UNIQUE"):
        write(owner, owner.spark.range(0, 10).selectExpr("id", "'x' AS who"))
    assert owner.query("shop", "SELECT * FROM t") == [(0, "before")]
    assert staged(owner) == []


def test_rows_are_written_into_a_new_fork(owner: ServedStore) -> None:
    owner.store.snapshot("shop", "monday")
    owner.run("shop", "DELETE FROM t")
    frame = owner.spark.range(1, 3).selectExpr("id", "'x' AS who")
    write(owner, frame, database="copy", fork_of="shop", fork_at="monday")
    assert owner.query("copy", "SELECT * FROM t") == [(0, "before"), (1, "x"), (2, "x")]
    assert owner.query("shop", "SELECT * FROM t") == []
    write(owner, owner.spark.range(3, 4).selectExpr("id", "'y' AS who"), database="copy", fork_of="shop")
    assert owner.query("copy", "SELECT count(*) FROM t") == [(4,)]


def test_a_repeated_attempt_and_a_repeated_commit_duplicate_nothing(
    owner: ServedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Spark does when an executor dies, or when the response to a commit is lost."""
    import pyarrow as pa

    source_options = {**owner.options, "database": "shop", "table": "t"}
    schema = StructType([StructField("id", LongType())])
    options = Options(source_options, source="test", known=WRITING)
    writer = PartWriter(options.access(), SqliteTarget(options, schema, overwrite=False))
    batch = pa.RecordBatch.from_pydict({"id": [1, 2, 3]})

    class Context:
        def __init__(self, attempt: int) -> None:
            self.attempt = attempt

        def partitionId(self) -> int:  # noqa: N802 - Spark's names
            return 0

        def taskAttemptId(self) -> int:  # noqa: N802
            return self.attempt

    sent = []
    for attempt in (1, 2):
        monkeypatch.setattr("pyspark.TaskContext.get", lambda attempt=attempt: Context(attempt))
        sent.append(writer.write(iter([batch])))
    assert sent == [PartMessage("0-1", 3, writer.load), PartMessage("0-2", 3, writer.load)]
    for _ in range(2):
        writer.commit([sent[1]])
    assert owner.query("shop", "SELECT id FROM t ORDER BY id") == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ("array(1) AS a", {}, r"cannot store array"),
        ("1 AS a", {"database": "nope"}, "UnknownDatabase"),
        ("1 AS a", {"table": "nope", "create": "false"}, "no such table"),
        ("1 AS a", {}, "no such column"),
        ("1 AS a", {"snapshot": "monday"}, "has no such option"),
    ],
)
def test_invalid_options_are_refused_with_a_reason(
    owner: ServedStore, columns: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        write(owner, owner.spark.sql(f"SELECT {columns}"), **options)
