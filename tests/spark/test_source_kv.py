"""`quire.kv`: bulk loads that are applied completely and once, and reads of one version, in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.functions import count, spark_partition_id
from pyspark.sql.functions import max as max_
from pyspark.sql.functions import min as min_
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

import quire
from quire.lsm.verify import problems
from quire.manifest.records import JobState
from quire.spark.sessions import session
from quire.spark.sources import kv
from quire.spark.sources.base import Options
from quire.spark.sources.kv import WRITING, KeyRange, KvWriter, TablesMessage, cut
from quire.spark.sources.kv_load import bulk_load, in_ranges
from tests.spark.served_store import ServedStore, serve_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAIRS = StructType([StructField("key", StringType()), StructField("value", StringType())])


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path / "store") as owner:
        cart = owner.store.kv("cart", create=True)
        cart.write({b"a": b"before", b"id-000007": b"before"})
        yield owner
        for database in owner.store.kvs.databases().values():
            assert list(problems(database)) == []


def write(owner: ServedStore, frame: DataFrame, mode: str = "append", **options: Any) -> None:
    all_options = {"database": "cart", **options}
    frame.write.format("quire.kv").mode(mode).options(**owner.options, **all_options).save()


def ids(owner: ServedStore, count: int, partitions: int) -> DataFrame:
    """Rows in no order, spread randomly across partitions."""
    frame = owner.spark.range(0, count, numPartitions=partitions)
    mixed = f"format_string('id-%06d', (id * 7919) % {count}) AS key"
    return frame.selectExpr(mixed, "CAST(id AS STRING) AS value")


def tables_of(owner: ServedStore, database: str = "cart") -> list[Path]:
    db_id = owner.store.database(database).db_id
    return sorted(Path(owner.store.path, "lsm", f"{db_id:08x}", "sst").glob("*.sst"))


def test_rows_in_any_order_are_loaded_atomically_and_read_back(owner: ServedStore) -> None:
    cart, before = owner.store.kv("cart"), owner.store.kv("cart").last_lsn
    write(owner, ids(owner, 1_000, 3))
    assert cart.last_lsn == before + 1, "one lsn for the whole load"
    assert cart.get(b"id-000007") != b"before", "newer than the existing value"
    assert cart.get(b"a") == b"before"
    read = owner.read("quire.kv", database="cart", keys="string", values="string")
    assert [field.dataType for field in read.schema.fields] == [StringType(), StringType()]
    rows = {row["key"]: row["value"] for row in read.collect()}
    assert rows == {key.decode(): value.decode() for key, value in cart.scan()}
    assert len(rows) == 1_001


def test_a_bulk_load_registers_the_sources_in_a_session_that_lacks_them(owner: ServedStore) -> None:
    other = owner.spark.newSession()
    bulk_load(other.range(0, 10).selectExpr("concat('new-', id) AS key", "'x' AS value"), owner.store, "cart")
    assert owner.store.kv("cart").get(b"new-7") == b"x"


def test_a_bulk_load_needs_no_compaction_and_null_deletes(owner: ServedStore) -> None:
    frame = ids(owner, 2_000, 3).unionByName(owner.spark.createDataFrame([("a", None)], PAIRS))
    bulk_load(frame, owner.store, "cart", partitions=4)
    cart = owner.store.kv("cart")
    assert cart.get(b"a") is None
    assert cart.stats().levels[0] == 1, "the table flushed for the load"
    assert cart.stats().levels[1] == 4
    assert sum(1 for _ in cart.scan()) == 2_000
    bulk_load(frame.selectExpr("key AS k", "'x' AS v"), owner.options, "other", key="k", value="v")
    assert dict(owner.store.kv("other").scan(prefix=b"id-000001")) == {b"id-000001": b"x"}


def test_another_thread_can_load_after_it_requested_the_session(owner: ServedStore) -> None:
    """Spark looks for the source in the active session, which is per thread."""

    def load() -> None:
        write(owner, ids(owner, 3, 1).sparkSession.sql("SELECT 'plain' AS key, 'x' AS value"))

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(Exception, match="DATA_SOURCE_NOT_FOUND"):
            pool.submit(load).result()
        pool.submit(session).result()
        pool.submit(load).result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(bulk_load, ids(owner, 10, 1), owner.store, "cart").result()
    assert owner.store.kv("cart").get(b"plain") == b"x"
    assert owner.store.kv("cart").get(b"id-000009") is not None


def test_ranges_are_disjoint_and_of_about_the_same_size_whatever_the_keys_are(owner: ServedStore) -> None:
    frame = owner.spark.range(0, 30_000, numPartitions=3).selectExpr(
        "if(id < 20000, concat('same-', id), string(id * id)) AS key", "'x' AS value"
    )
    ranged = in_ranges(frame, 8).withColumn("part", spark_partition_id())
    summary = ranged.groupBy("part").agg(
        count("*").alias("rows"), min_("key").alias("low"), max_("key").alias("high")
    )  # for ASCII text, Spark's order is ours
    parts = sorted(summary.collect(), key=lambda row: row["low"])
    assert sum(row["rows"] for row in parts) == 30_000
    assert len(parts) == 8
    assert all(part["high"] < next_part["low"] for part, next_part in pairwise(parts))
    assert max(row["rows"] for row in parts) < 2 * 30_000 / 8


def test_reads_of_a_snapshot_a_prefix_a_range_and_filters(owner: ServedStore) -> None:
    bulk_load(ids(owner, 1_000, 2), owner.store, "cart")
    owner.store.snapshot("cart", "monday")
    cart = owner.store.kv("cart")
    cart.delete(b"id-000500")
    cart.put(b"id-000501", b"new")
    text = {"database": "cart", "keys": "string", "values": "string"}
    monday = owner.read("quire.kv", snapshot="monday", **text)
    assert monday.count() == 1_001
    assert owner.read("quire.kv", **text).count() == 1_000
    some = owner.read("quire.kv", prefix="id-00050", columns="key", **text)
    assert [row["key"] for row in some.orderBy("key").collect()] == [f"id-{n:06d}" for n in (*range(501, 510),)]
    ranged = owner.read("quire.kv", low="hex:" + b"id-000500".hex(), high="id-000503", **text)
    assert {row["key"]: row["value"].encode() for row in ranged.collect()} == {
        "id-000501": b"new",
        "id-000502": cart.get(b"id-000502"),
    }
    filtered = monday.filter("key >= 'id-000998' OR key = 'a'").filter("key > 'b'")
    assert [row["key"] for row in filtered.orderBy("key").collect()] == ["id-000998", "id-000999"]
    binary = owner.read("quire.kv", database="cart")
    assert [bytes(row["value"]) for row in binary.filter("key = X'69642D303030353031'").collect()] == [b"new"]
    by_id = owner.store.manifest.snapshots.get("cart", "monday").snapshot_id
    assert owner.read("quire.kv", snapshot=by_id, low="id-000500", high="id-000501", **text).count() == 1


def test_pieces_are_disjoint_and_complete(owner: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cart = owner.store.kv("cart")
    for start in range(0, 6_000, 2_000):
        cart.write({b"%06d" % n: bytes(200) for n in range(start, start + 3_000)}, sync=False)
        cart.flush()
    info = owner.store.snapshot("cart", "now")
    version = owner.store.kvs.version("cart", info.snapshot_id)
    monkeypatch.setattr(kv, "PIECE_BYTES", 1)
    pieces = list(cut(version.directory, version.sst_ids, KeyRange(), 5))
    assert 4 <= len(pieces) <= 6
    assert all(piece_.range.high == next_piece.range.low for piece_, next_piece in pairwise(pieces))
    assert (pieces[0].range.low, pieces[-1].range.high) == (b"", None)
    assert min(len(piece.sst_ids) for piece in pieces) < len(version.sst_ids), "only tables with keys in the range"
    narrow = list(cut(version.directory, version.sst_ids, KeyRange(b"002500", b"002501"), 5))
    assert [(task.directory, task.range) for task in narrow] == [(version.directory, KeyRange(b"002500", b"002501"))]


def test_an_empty_frame_and_an_empty_database(owner: ServedStore) -> None:
    write(owner, owner.spark.createDataFrame([], PAIRS), database="new")
    assert owner.read("quire.kv", database="new").collect() == []
    assert owner.read("quire.kv", database="cart", low="z", high="b").collect() == []


def test_a_job_that_fails_leaves_nothing(owner: ServedStore) -> None:
    tables_before = tables_of(owner)
    # One task: a second one, not yet stopped by Spark, might write its table after the load was dropped.
    frame = owner.spark.range(1, 101, numPartitions=1).selectExpr(
        "CAST(id AS STRING) AS key", "if(id = 99, raise_error('no luck'), 'x') AS value"
    )
    with pytest.raises(Exception, match="no luck"):
        write(owner, frame)
    cart = owner.store.kv("cart")
    assert dict(cart.scan(prefix=b"1")) == {}
    assert not cart.loading
    assert len(tables_of(owner)) <= len(tables_before) + 1, "only the table flushed when the load began"


@pytest.mark.parametrize("partitions", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_duplicate_key_is_refused_wherever_it_is(owner: ServedStore, partitions: int) -> None:
    frame = owner.spark.range(0, 300, numPartitions=partitions).selectExpr(
        "CAST(id % 250 AS STRING) AS key", "'x' AS value"
    )
    with pytest.raises(Exception, match="occurs twice in a load"):
        write(owner, frame)
    assert [key for key, _ in owner.store.kv("cart").scan()] == [b"a", b"id-000007"]


def test_a_major_compaction_runs_on_executors(owner: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cart = owner.store.kv("cart")
    for number in range(3):
        cart.write({b"%05d" % (i * 2 + number): b"v%d" % number for i in range(400)})
        cart.flush()
    expected = dict(cart.scan())
    monkeypatch.setattr("quire.jobs.compaction.job.tasks_for", lambda _size, _workers: 3)
    cart.settings = msgspec.structs.replace(cart.settings, table_bytes=4_096)
    job = owner.store.heavy.compact("cart", runner="spark")
    assert job.state is JobState.SUCCEEDED, job.record.error
    assert (job.result["runner"], cart.stats().levels[0]) == ("spark", 0)
    assert dict(cart.scan()) == expected


def writer_of(owner: ServedStore, **options: str) -> KvWriter:
    all_options = {**owner.options, "database": "cart", **options}
    return KvWriter(Options(all_options, source="test", known=WRITING), PAIRS, overwrite=False)


def test_a_repeated_attempt_and_a_repeated_commit_duplicate_nothing(owner: ServedStore) -> None:
    """What Spark does when an executor dies, a task is slow, or the response to a commit is lost."""
    writer = writer_of(owner)
    batch = pa.RecordBatch.from_pydict({"key": ["x", "y"], "value": ["1", "2"]})
    first, second = writer.write(iter([batch])), writer.write(iter([batch]))
    assert isinstance(first, TablesMessage)
    assert set(first.ids).isdisjoint(second.ids), "each attempt has its own ids"
    for _ in range(2):
        writer.commit([second])
    cart = owner.store.kv("cart")
    assert dict(cart.scan(low=b"x")) == {b"x": b"1", b"y": b"2"}
    assert not any(f"{sst_id:06d}.sst" in {path.name for path in tables_of(owner)} for sst_id in first.ids)
    cart.put(b"x", b"later")
    cart.compact()
    writer.commit([second])
    assert cart.get(b"x") == b"later", "not even when its tables are gone"
    with pytest.raises(quire.NotFound, match="has ended"):
        writer.write(iter([batch]))


def test_an_attempt_that_outlives_its_job_is_swept(owner: ServedStore) -> None:
    writer = writer_of(owner)
    batch = pa.RecordBatch.from_pydict({"key": ["x"], "value": ["1"]})
    late: list[TablesMessage] = []

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch
        writer.abort([])  # the job has failed; this task is not aware of it

    cart = owner.store.kv("cart")
    with cart.upkeep.compaction_lock():  # the flush at the start of a load triggers a background sweep
        late.append(writer.write(batches()))
        assert f"{late[0].ids[0]:06d}.sst" in {path.name for path in tables_of(owner)}, "it is not swept yet"
    cart.compact()
    assert f"{late[0].ids[0]:06d}.sst" not in {path.name for path in tables_of(owner)}
    with pytest.raises(quire.NotFound, match="not running"):
        writer.commit([late[0]])


def test_concurrent_loads_never_collide_and_the_later_one_wins(owner: ServedStore) -> None:
    first, second = writer_of(owner), writer_of(owner)
    written = [
        (writer, writer.write(iter([pa.RecordBatch.from_pydict({"key": ["k", name], "value": [name, name]})])))
        for writer, name in ((first, "one"), (second, "other"))
    ]
    assert set(written[0][1].ids).isdisjoint(written[1][1].ids)
    for writer, message in reversed(written):
        writer.commit([message])
    cart = owner.store.kv("cart")
    assert dict(cart.scan(low=b"k")) == {b"k": b"other", b"one": b"one", b"other": b"other"}
    assert cart.get(b"k") == b"other", "it began later, although it was committed first"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        (["'x' AS key"], {}, "the columns `key` and `value`"),
        (["'x' AS key", "1 AS value"], {}, "binary or string, not int"),
        (["CAST(NULL AS STRING) AS key", "'x' AS value"], {}, "a key is null"),
        (["repeat('x', 70000) AS key", "'x' AS value"], {}, "a key is too long"),
        (["'x' AS key", "'x' AS value"], {"database": "absent", "create": "false"}, "no database has this name"),
        (["'x' AS key", "'x' AS value"], {"snapshot": "x"}, "no such option"),
    ],
)
def test_invalid_writes_are_refused_with_a_reason(
    owner: ServedStore, columns: list[str], options: dict[str, str], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        write(owner, owner.spark.range(1).selectExpr(*columns), **options)
    assert sum(1 for _ in owner.store.kv("cart").scan()) == 2


@pytest.mark.slow
def test_invalid_reads_are_refused_with_a_reason(owner: ServedStore) -> None:
    owner.store.kv("cart").put(b"\xff", b"\xff")
    with pytest.raises(Exception, match="not UTF-8"):
        owner.read("quire.kv", database="cart", keys="string").collect()
    for options, message in (
        ({"prefix": "a", "low": "b"}, "a prefix or a range"),
        ({"low": "hex:xy"}, "not hexadecimal"),
        ({"columns": "lsn"}, "no such column"),
        ({"snapshot": "absent"}, "no such snapshot"),
    ):
        with pytest.raises(Exception, match=message):
            owner.read("quire.kv", database="cart", **options).collect()
    with pytest.raises(Exception, match=r"mode\('append'\)"):
        write(owner, owner.spark.createDataFrame([("a", "b")], PAIRS), "overwrite")
    schema = owner.read("quire.kv", database="cart").schema
    assert [field.dataType for field in schema.fields] == [BinaryType(), BinaryType()]
