"""`quire.changes` as a stream: Spark's progress is the acknowledgement, and restarts lose and duplicate nothing (K4)."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

from quire.core.errors import CursorLost, InvalidInput, OutOfRange, UnknownSnapshot
from quire.manifest.namespaces import Parent
from quire.spark.sources import changes
from quire.spark.sources.base import Options
from quire.spark.sources.changes import SCHEMA, ChangesQueryReader
from tests.service.owners import reserve
from tests.spark.served_store import ServedStore, run_available, serve_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KNOWN = ("cursor", "start", "database", "snapshot", "max_changes", "first", "last", "partitions")


@pytest.fixture
def owner(spark: SparkSession, tmp_path: Path) -> Iterator[ServedStore]:
    with serve_store(spark, tmp_path / "store") as owner:
        yield owner


def commit(owner: ServedStore, changes: int) -> None:
    for _ in range(changes):
        owner.store.manifest.submit(reserve(owner.store.feed.head() + 1_000)).result()


class Stream:
    """The reader as in Spark's process."""

    def __init__(self, owner: ServedStore, **options: Any) -> None:
        all_options = {**owner.options, **{name: str(value) for name, value in options.items()}}
        self.reader = ChangesQueryReader(Options(all_options, source="quire.changes", known=KNOWN), SCHEMA)

    def __enter__(self) -> ChangesQueryReader:
        return self.reader

    def __exit__(self, *_: object) -> None:
        self.reader.stop()


def spans(reader: ChangesQueryReader, start: Any, end: Any) -> list[tuple[int, int]]:
    return [(part.value.first, part.value.last) for part in reader.partitions(start, end)]


# ── the reader ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_new_query_registers_its_cursor_and_an_old_one_finds_it(owner: ServedStore) -> None:
    commit(owner, 5)
    with Stream(owner, cursor="mine") as reader:
        assert reader.initialOffset()["sequence"] == 0
        reader.commit({**reader.initialOffset(), "sequence": 3})
    with Stream(owner, cursor="mine", start="latest") as reader:
        assert reader.initialOffset()["sequence"] == 3, "a cursor's position takes precedence over `start`"
    with Stream(owner, cursor="new", start="latest") as reader:
        assert reader.initialOffset()["sequence"] == owner.store.feed.head()
    with Stream(owner, cursor="at", start="4") as reader:
        assert reader.initialOffset()["sequence"] == 4


def test_a_batch_ends_at_the_head_or_at_its_limit(owner: ServedStore) -> None:
    commit(owner, 10)
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadAllAvailable())["sequence"] == 10
        assert reader.latestOffset(start, ReadMaxRows(4))["sequence"] == 4
        assert reader.latestOffset(start, ReadMinRows(11)) == start
        assert reader.reportLatestOffset()["sequence"] == 10
        assert reader.getDefaultReadLimit() == ReadAllAvailable()
        end = reader.latestOffset(start, ReadAllAvailable())
        assert reader.latestOffset(end, ReadAllAvailable()) == end, "nothing new, so the same offset"
    with Stream(owner, cursor="mine", max_changes=4) as reader:
        assert reader.getDefaultReadLimit() == ReadMaxRows(4)


def test_batches_cross_a_takeover_and_a_checkpoint_of_lost_changes_is_refused(owner: ServedStore) -> None:
    commit(owner, 10)
    last = owner.store.feed.head()
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        owner.store.manifest.begin_owner_epoch(parent=Parent())
        first = owner.store.feed.head()
        assert first >> 40 > 0
        for _ in range(3):
            owner.store.manifest.submit(reserve(1_000_000)).result()
        ends, offset = [], start
        while offset["sequence"] < first + 3:
            offset = reader.latestOffset(offset, ReadMaxRows(4))
            ends.append(offset["sequence"])
        assert ends == [4, 8, first + 1, first + 3], "four changes each, none from the gap"
        assert reader.latestOffset({**start, "sequence": last}, ReadMinRows(5))["sequence"] == last
        assert spans(reader, start, offset) == [(1, last), (first, first + 3)]
        assert spans(reader, {**start, "sequence": last}, offset) == [(first, first + 3)]
        rows = [
            row for part in reader.partitions(start, offset) for batch in reader.read(part) for row in batch.to_pylist()
        ]
        assert [row["sequence"] for row in rows] == [*range(1, last + 1), *range(first, first + 4)]
        for position in (last + 1, first - 1):
            with pytest.raises(CursorLost, match="lost when the store was taken over"):
                reader.partitions({**start, "sequence": position}, offset)
            with pytest.raises(CursorLost, match="lost when the store was taken over"):
                reader.commit({**start, "sequence": position})


def test_a_waiting_query_is_notified_of_a_change_at_once(owner: ServedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr(changes, "WAIT_SECONDS", 30.0)
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        later = threading.Timer(0.3, commit, (owner, 1))
        later.start()
        assert reader.latestOffset(start, ReadAllAvailable())["sequence"] == 1
        later.join()


def test_a_run_of_the_available_changes_ends(owner: ServedStore) -> None:
    commit(owner, 3)
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        reader.prepareForTriggerAvailableNow()
        commit(owner, 3)
        end = reader.latestOffset(start, ReadAllAvailable())
        assert end["sequence"] == 3
        assert reader.latestOffset(end, ReadAllAvailable()) == end


def test_an_empty_range_has_no_partitions(owner: ServedStore) -> None:
    commit(owner, 3)
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        assert spans(reader, start, start) == []
        assert spans(reader, start, {**start, "sequence": 3}) == [(1, 3)]


def test_acknowledgements_are_idempotent_and_only_move_forward(owner: ServedStore) -> None:
    commit(owner, 9)
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        for sequence in (4, 4, 2, 9, 9):
            reader.commit({**start, "sequence": sequence})
        assert owner.store.feed.cursor("mine").acked_sequence == 9
        with pytest.raises(OutOfRange):
            reader.commit({**start, "sequence": 10_000})


def test_an_older_checkpoint_is_refused(owner: ServedStore) -> None:
    """`initialOffset` is not called on a restart: the first range must be checked."""
    commit(owner, 9)
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        reader.commit({**start, "sequence": 5})
    with Stream(owner, cursor="mine") as reader, pytest.raises(CursorLost, match="older checkpoint"):
        reader.partitions({**start, "sequence": 4}, {**start, "sequence": 9})
    with Stream(owner, cursor="mine") as reader:
        assert spans(reader, {**start, "sequence": 5}, {**start, "sequence": 9}) == [(6, 9)]


def test_a_dropped_or_abandoned_cursor_is_an_error(owner: ServedStore) -> None:
    from quire.manifest.ops.cursors import LoseCursor

    commit(owner, 5)
    with Stream(owner, cursor="mine") as reader:
        start = reader.initialOffset()
        end = {**start, "sequence": 5}
        owner.store.feed.drop("mine")
        with pytest.raises(CursorLost, match="was dropped"):
            reader.partitions(start, end)
    with Stream(owner, cursor="other") as reader:
        start = reader.initialOffset()
        cursor = owner.store.feed.cursor("other")
        owner.store.manifest.submit([LoseCursor(cursor.cursor_id, "too slow")]).result()
        with pytest.raises(CursorLost, match="too slow"):
            reader.partitions(start, end)
        with pytest.raises(CursorLost, match="too slow"):
            reader.initialOffset()


def test_a_checkpoint_of_another_store_is_refused(owner: ServedStore) -> None:
    commit(owner, 2)
    with Stream(owner, cursor="mine") as reader, pytest.raises(InvalidInput, match="belongs to another store"):
        reader.latestOffset({"store": "another", "sequence": 1}, ReadAllAvailable())


def test_a_trimmed_start_is_an_error(owner: ServedStore) -> None:
    commit(owner, 9)
    owner.store.feed.register(name="keeps")
    owner.store.feed.acknowledge("keeps", 6)
    with Stream(owner, cursor="mine", start="2") as reader, pytest.raises(CursorLost):
        reader.initialOffset()
    assert [cursor.name for cursor in owner.store.feed.cursors()] == ["keeps"], "no cursor is left behind"


def test_a_snapshot_and_the_stream_after_it_leave_no_gap(owner: ServedStore) -> None:
    owner.store.feed.register(name="keeps")
    owner.run("shop", "CREATE TABLE t(a)", "INSERT INTO t VALUES (1)")
    commit(owner, 3)
    owner.store.snapshot("shop", "monday")
    published = owner.store.feed.head()
    commit(owner, 4)
    options = {"start": "snapshot", "database": "shop", "snapshot": "monday"}
    with Stream(owner, cursor="mine", **options) as reader:
        start = reader.initialOffset()
        (change,) = [
            change for change in owner.store.feed.fetch("keeps", 1_000).changes if change.sequence == start["sequence"]
        ]
        assert "PublishSnapshot" in [type(op).__name__ for op in change.operations]
        assert start["sequence"] <= published
        assert spans(reader, start, reader.latestOffset(start, ReadAllAvailable()))[0][0] == start["sequence"] + 1
    with (
        Stream(owner, cursor="two", start="snapshot", database="shop", snapshot="nope") as reader,
        pytest.raises(UnknownSnapshot),
    ):
        reader.initialOffset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option `cursor`"),
        ({"cursor": "c", "start": "tomorrow"}, "oldest, latest, snapshot or a sequence"),
        ({"cursor": "c", "start": "snapshot"}, "needs the option `database`"),
        ({"cursor": "c", "first": "1"}, "is for ranges"),
    ],
)
def test_invalid_options_are_refused(owner: ServedStore, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Stream(owner, **options)


# ── with Spark ────────────────────────────────────────────────────────────────────────────────────────────────────────
def read_all(owner: ServedStore, base: Path, **options: Any) -> list[int]:
    """Run the query on the available data, with its checkpoint. Returns the content of its sink."""
    source_options = {"cursor": "sink", **{name: str(value) for name, value in options.items()}}
    frame = owner.spark.readStream.format("quire.changes").options(**owner.options, **source_options).load()
    writer = frame.select("sequence").writeStream.format("parquet").option("path", str(base / "out"))
    run_available(writer.option("checkpointLocation", str(base / "checkpoint")))
    return [row.sequence for row in owner.spark.read.parquet(str(base / "out")).orderBy("sequence").collect()]


def test_restarts_lose_and_duplicate_nothing_and_the_acknowledgement_trails(owner: ServedStore, tmp_path: Path) -> None:
    commit(owner, 40)
    assert read_all(owner, tmp_path, max_changes=15) == list(range(1, 41))
    acked = owner.store.feed.cursor("sink").acked_sequence
    assert acked == 30, "the last batch is acknowledged when the next one is planned, and there was none"
    commit(owner, 5)
    assert read_all(owner, tmp_path, max_changes=15) == list(range(1, 46))
    assert owner.store.feed.cursor("sink").acked_sequence == 40
    assert read_all(owner, tmp_path) == list(range(1, 46)), "nothing new, nothing is read"


def test_a_query_whose_cursor_was_abandoned_fails(owner: ServedStore, tmp_path: Path) -> None:
    commit(owner, 5)
    read_all(owner, tmp_path)
    owner.store.feed.drop("sink")
    commit(owner, 5)
    with pytest.raises(Exception, match=r"CursorLost.*was dropped"):
        read_all(owner, tmp_path)


DRIVER = """
import sys
from quire.spark.sessions import session
store, base = sys.argv[1:]
spark = session("local[2]", memory="1g")
query = (
    spark.readStream.format("quire.changes").option("store", store).option("cursor", "sink").option("max_changes", 40).load()
    .select("sequence").writeStream.format("parquet").option("path", base + "/out")
    .option("checkpointLocation", base + "/checkpoint").start()
)
print("started", flush=True)
query.awaitTermination()
"""


def acked(owner: ServedStore) -> int:
    """The acknowledged sequence of the query; -1 before it has started."""
    return next((cursor.acked_sequence for cursor in owner.store.feed.cursors() if cursor.name == "sink"), -1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_driver_loses_and_duplicates_nothing(owner: ServedStore, tmp_path: Path) -> None:
    rng = random.Random(7)
    for _ in range(3):
        before = acked(owner)
        with subprocess.Popen(
            [sys.executable, "-c", DRIVER, owner.store.path, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as driver:
            assert driver.stdout is not None
            assert driver.stdout.readline().strip() == "started"
            deadline = time.monotonic() + 120
            while acked(owner) <= max(before, 0) and time.monotonic() < deadline:  # until a batch is committed
                commit(owner, 20)
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 2))
            driver.send_signal(signal.SIGKILL)
        assert acked(owner) > max(before, 0), "it has read something before the kill"
    head = owner.store.feed.head()
    assert read_all(owner, tmp_path, max_changes=2_000) == list(range(1, head + 1))
