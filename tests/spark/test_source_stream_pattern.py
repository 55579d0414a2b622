"""`quire.stream` as a streaming query over a pattern: every record of every stream once, with a consumer per stream.

Most tests drive a reader as Spark's micro-batches do; the last one runs on Spark.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows

import quire
from quire.core.errors import CursorLost, InvalidInput
from quire.core.settings import MaintenanceSettings, StoreSettings, StreamSettings
from quire.manifest.namespaces import Parent
from quire.spark.access import options_of
from quire.spark.sources import stream_pattern
from quire.spark.sources.base import HeldQueryReader, default_partitions
from quire.spark.sources.stream import StreamSource
from quire.spark.sources.stream_pattern import divided
from quire.store.store import Store
from quire.stream.state import Retention
from quire.stream.stream import Stream
from quire.testing.clock import ManualClock
from tests.spark.served_store import rows_of, run_available

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=0.0),
    stream=StreamSettings(segment_bytes=16 << 10, record_bytes_max=8 << 10, open_max=3),
)
"""Few streams stay open: polls must not depend on it."""

ALL = ReadAllAvailable()

Row = tuple[str, int]

_readers: list[HeldQueryReader] = []


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stream_pattern, "WAIT_SECONDS", 0)
    monkeypatch.setattr(stream_pattern, "PAUSE_FACTOR", 0)
    monkeypatch.setattr(stream_pattern, "POLLED_AT_ONCE", 2)
    yield
    while _readers:
        _readers.pop().stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        options_of(store)
        yield store
        assert store.manifest.check() == []


def append(store: Store, name: str, count: int = 1) -> None:
    stream = store.stream(name, create=True)
    stream.append([b"%d" % number for number in range(stream.end_record, stream.end_record + count)]).result()


class Query:
    """What Spark does with a reader: an offset is recorded, as JSON, before its batch is planned, and committed when the
    next one is planned.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        given = {"databases": "clicks-*", "consumer": "etl", "columns": "id", **options}
        self.options = {"store": store.path, **{name: str(value) for name, value in given.items()}}
        self.offsets: list[str] = []
        self.restart()

    def restart(self) -> None:
        """Start again with the same checkpoint."""
        source = StreamSource(self.options)
        self.reader: Any = pickle.loads(pickle.dumps(source.streamReader(source.schema())))
        _readers.append(self.reader)

    def plan(self, limit: ReadLimit = ALL) -> bool:
        """Whether there is a next batch; if so, its offset is recorded."""
        if not self.offsets:
            self.offsets.append(json.dumps(self.reader.initialOffset()))
        end = json.dumps(self.reader.latestOffset(json.loads(self.offsets[-1]), limit))
        if end == self.offsets[-1]:
            return False
        if len(self.offsets) > 1:
            self.reader.commit(json.loads(self.offsets[-1]))
        self.offsets.append(end)
        return True

    def parts(self) -> Any:
        """What the tasks of the last batch read."""
        return self.reader.partitions(*map(json.loads, self.offsets[-2:]))

    def rows(self) -> list[Row]:
        """The records of the last batch."""
        parts = self.parts()
        return sorted(
            (row["_database"], row["id"])
            for part in parts
            for batch in pickle.loads(pickle.dumps(self.reader)).read(part)
            for row in batch.to_pylist()
        )

    def next(self, limit: ReadLimit = ALL) -> list[Row]:
        """The records of the next batch, or an empty list."""
        return self.rows() if self.plan(limit) else []

    def positions(self) -> dict[str, int]:
        """The positions of the last offset, by stream id."""
        positions: dict[str, int] = json.loads(self.offsets[-1])["streams"]
        return positions


def records(name: str, first: int, last: int) -> list[Row]:
    return [(name, number) for number in range(first, last + 1)]


# ── limits ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_limit_is_divided_equally_and_completely() -> None:
    assert divided({1: 10, 2: 10, 3: 10}, 9) == {1: 3, 2: 3, 3: 3}
    assert divided({1: 1, 2: 100, 3: 4}, 15) == {1: 1, 2: 10, 3: 4}
    assert divided({1: 2, 2: 2}, 100) == {1: 2, 2: 2}
    for limit in range(1, 40):
        waiting = {number: 1 + number * 7 % 11 for number in range(1, 8)}
        taken = divided(waiting, limit)
        assert sum(taken.values()) == min(limit, sum(waiting.values()))
        assert all(0 < count <= waiting[number] for number, count in taken.items())


def test_a_limit_below_the_number_of_streams_serves_them_in_turn() -> None:
    waiting, after, served = dict.fromkeys(range(1, 8), 100), 0, list[int]()
    for _ in range(7):
        taken = divided(waiting, 3, after=after)
        assert set(taken.values()) == {1}
        served += taken
        after = served[-1]
    assert served == [*range(1, 8)] * 3


def test_a_batch_has_at_most_max_records_and_reads_every_stream(store: Store) -> None:
    for name, count in (("clicks-a", 40), ("clicks-b", 3), ("clicks-c", 20)):
        append(store, name, count)
    query = Query(store)
    assert query.next(ReadMaxRows(10)) == records("clicks-a", 1, 4) + records("clicks-b", 1, 3) + records(
        "clicks-c", 1, 3
    )
    rest = list[Row]()
    while batch := query.next(ReadMaxRows(10)):
        assert len(batch) <= 10
        rest += batch
    assert sorted(rest) == records("clicks-a", 5, 40) + records("clicks-c", 4, 20)
    one_each = Query(store, consumer="slow")
    assert sorted(one_each.next(ReadMaxRows(2)) + one_each.next(ReadMaxRows(1))) == [
        ("clicks-a", 1),
        ("clicks-b", 1),
        ("clicks-c", 1),
    ]
    assert Query(store, max_records=7).reader.getDefaultReadLimit() == ReadMaxRows(7)
    append(store, "clicks-b", 2)
    assert not query.plan(ReadMinRows(3))
    assert query.next(ReadMinRows(2)) == records("clicks-b", 4, 5)


# ── streams that come and go ──────────────────────────────────────────────────────────────────────────────────────────
def test_new_streams_are_read_from_their_first_record_and_dropped_ones_end(store: Store) -> None:
    append(store, "clicks-a", 2)
    append(store, "other", 5)
    query = Query(store)
    assert query.next() == records("clicks-a", 1, 2)
    assert not query.plan(), "nothing new, so the same offset"
    for number in range(6):
        append(store, f"clicks-{number}", 3)
    assert query.next() == [row for number in range(6) for row in records(f"clicks-{number}", 1, 3)]
    store.drop("clicks-0")
    assert not query.plan(), "a dropped stream is no reason for a batch"
    append(store, "clicks-1")
    append(store, "clicks-2")
    assert query.plan()
    store.drop("clicks-2")
    assert query.rows() == records("clicks-1", 4, 4), "also one that is dropped after its batch was planned"
    assert store.maintain().total, "the rows of dropped streams are deleted"
    append(store, "clicks-a")
    assert query.next() == records("clicks-a", 3, 3)
    assert len(query.positions()) == 5, "positions of dropped streams are not kept forever"
    append(store, "clicks-0", 2)
    assert query.next() == records("clicks-0", 1, 2), "a stream that is created again is another one"


def test_a_renamed_stream_and_one_that_is_brought_back_continue(store: Store) -> None:
    append(store, "clicks-a", 2)
    append(store, "clicks-b", 2)
    query = Query(store)
    assert len(query.next()) == 4
    store.rename("clicks-a", "clicks-z")
    append(store, "clicks-z")
    assert query.next() == records("clicks-z", 3, 3)
    store.rename("clicks-z", "archived")
    append(store, "archived")
    append(store, "clicks-b")
    assert query.next() == records("clicks-b", 3, 3), "it matches no more"
    store.rename("archived", "clicks-a")
    assert query.next() == records("clicks-a", 4, 4), "it continues where it was, although it was acknowledged later"
    store.drop("clicks-a", undoable=True)
    append(store, "clicks-b")
    assert query.next() == records("clicks-b", 4, 4)
    store.undrop("clicks-a")
    append(store, "clicks-a")
    assert query.next() == records("clicks-a", 5, 5)
    append(store, "clicks-a")
    assert query.plan()
    store.rename("clicks-a", "elsewhere")
    assert query.rows() == records("elsewhere", 6, 6), "a planned batch is complete"


def test_a_stream_that_is_renamed_while_a_batch_is_planned_is_found(store: Store) -> None:
    """The names of a poll are outdated when the records are located; another stream may have one of them by then."""
    for name in ("clicks-a", "clicks-b"):
        append(store, name, 2)
    query = Query(store)
    assert query.plan()
    poll = query.reader._poll

    def poll_then_swap(*arguments: Any) -> Any:
        polled = poll(*arguments)
        if "clicks-a" in {stream.name for stream in polled.values()}:
            store.rename("clicks-a", "clicks-y")
            append(store, "clicks-a", 9)
        elif "clicks-b" in {stream.name for stream in polled.values()}:
            store.rename("clicks-b", "clicks-z")
        return polled

    query.reader._poll = poll_then_swap
    parts = query.parts()
    del query.reader._poll  # tasks get the reader as a pickle
    rows = [
        (row["_database"], row["id"])
        for part in parts
        for batch in query.reader.read(part)
        for row in batch.to_pylist()
    ]
    assert sorted(rows) == records("clicks-y", 1, 2) + records("clicks-z", 1, 2)


def test_tags_select_streams(store: Store) -> None:
    for name in ("clicks-a", "clicks-b"):
        append(store, name)
    store.set_options("clicks-b", tags={"team": "web"})
    assert Query(store, databases="", tags="team=web").next() == [("clicks-b", 1)]


# ── where a query begins and ends ─────────────────────────────────────────────────────────────────────────────────────
def test_latest_is_for_streams_that_exist_when_the_query_begins(store: Store) -> None:
    append(store, "clicks-a", 5)
    query = Query(store, start="latest")
    assert query.plan()
    assert query.rows() == [], "the first offset records where the query begins"
    append(store, "clicks-a")
    append(store, "clicks-b", 2)
    assert query.next() == [("clicks-a", 6), ("clicks-b", 1), ("clicks-b", 2)]
    early = Query(store, databases="taps-*", start="latest")
    assert early.plan()
    append(store, "taps-1", 2)
    early.restart()
    assert early.next() == records("taps-1", 1, 2), "no stream existed when it began"
    late = Query(store, consumer="again")
    assert late.reader.initialOffset() == late.reader.initialOffset()
    assert len(late.next()) == 8


def test_available_now_ends_where_the_streams_ended(store: Store) -> None:
    append(store, "clicks-a", 5)
    append(store, "clicks-b", 5)
    query = Query(store)
    query.reader.prepareForTriggerAvailableNow()
    append(store, "clicks-a", 5)
    append(store, "clicks-c", 5)
    assert len(query.next(ReadMaxRows(6))) == 6
    assert len(query.next(ReadMaxRows(6))) == 4
    assert not query.plan(ReadMaxRows(6))
    query.restart()
    assert query.next() == records("clicks-a", 6, 10) + records("clicks-c", 1, 5)


# ── exactly once ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_repeated_batch_has_the_same_records_and_the_acknowledgement_trails(store: Store) -> None:
    append(store, "clicks-a", 3)
    query = Query(store)
    assert query.plan()
    first = query.rows()
    append(store, "clicks-a", 3)
    append(store, "clicks-b", 3)
    query.restart()
    assert query.rows() == first == records("clicks-a", 1, 3)
    assert store.stream("clicks-a").position("etl") == 1, "not before Spark commits"
    assert query.plan()
    assert store.stream("clicks-a").position("etl") == 4
    second = query.rows()
    append(store, "clicks-b", 3)
    for _ in range(2):
        query.restart()
        assert query.rows() == second == records("clicks-a", 4, 6) + records("clicks-b", 1, 3)
    assert query.next() == records("clicks-b", 4, 6)
    query.offsets.pop()
    query.offsets.pop()
    with pytest.raises(CursorLost, match=r"older checkpoint.*stream='clicks-"):
        query.next()


def test_small_streams_share_tasks(store: Store) -> None:
    for number in range(20):
        append(store, f"clicks-{number:02}")
    query = Query(store)
    assert query.plan()
    parts = query.parts()
    assert 1 < len(parts) <= default_partitions()
    assert len(query.rows()) == 20


DAMAGED_OFFSETS: dict[str, dict[str, Any]] = {
    "no positions": {"streams": None},
    "a list": {"streams": [1, 2]},
    "a text": {"streams": {"1": "7"}},
    "a fraction": {"streams": {"1": 2.5}},
    "a negative record": {"streams": {"1": -5}},
    "a huge record": {"streams": {"1": 1 << 70}},
    "a huge stream": {"streams": {str(1 << 70): 1}},
    "a name": {"streams": {"clicks-a": 1}},
    "a stream that never began": {"streams": {"77": 3}},
    "nothing begun": {"begun": None},
}


@pytest.mark.parametrize("damage", DAMAGED_OFFSETS.values(), ids=DAMAGED_OFFSETS)
def test_an_offset_that_the_query_did_not_write_is_refused_by_name(store: Store, damage: dict[str, Any]) -> None:
    append(store, "clicks-a", 5)
    query = Query(store)
    assert query.plan()
    query.offsets[-1] = json.dumps({**json.loads(query.offsets[-1]), **damage})
    query.restart()
    with pytest.raises(InvalidInput, match="an offset that this query did not write"):
        query.parts()


def test_a_checkpoint_ahead_of_a_stream_is_refused(store: Store) -> None:
    """Hazard: after a store was replaced by an older copy of itself, the query waited until the stream had grown up to its
    position, and passed over the records until there."""
    append(store, "clicks-a", 5)
    query = Query(store)
    assert query.plan()
    offset = json.loads(query.offsets[-1])
    query.offsets[-1] = json.dumps({**offset, "streams": {"1": 100}})
    query.restart()
    with pytest.raises(CursorLost, match="ahead of the store"):
        query.plan()
    with pytest.raises(CursorLost, match="ahead of the store"):
        query.parts()


def test_a_checkpoint_ahead_of_a_single_stream_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.spark.sources.stream.WAIT_SECONDS", 0.01)
    append(store, "clicks-a", 5)
    source = StreamSource({"store": store.path, "stream": "clicks-a", "consumer": "etl", "columns": "id"})
    reader: Any = source.streamReader(source.schema())
    _readers.append(reader)
    offset = reader.initialOffset()
    assert reader.latestOffset(offset, ALL)["record"] == 6
    assert reader.latestOffset({**offset, "record": 6}, ALL)["record"] == 6
    with pytest.raises(CursorLost, match="ahead of the store"):
        reader.latestOffset({**offset, "record": 100}, ALL)


def test_polls_do_not_open_streams_that_are_closed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        append(store, f"clicks-{number}")
    query = Query(store)
    assert len(query.next()) == 8
    recovered = list[int]()
    recover = store.streams._recover

    def counted(number: int) -> Stream:
        recovered.append(number)
        return recover(number)

    monkeypatch.setattr(store.streams, "_recover", counted)
    for _ in range(3):
        assert not query.plan()
    assert recovered == []
    assert len(store.streams.streams()) <= 3


# ── a position that is lost ───────────────────────────────────────────────────────────────────────────────────────────
def test_a_lost_position_is_an_error_that_names_the_stream(store: Store) -> None:
    append(store, "clicks-a", 2)
    append(store, "clicks-b", 2)
    query = Query(store)
    assert query.plan()
    clicks = store.stream("clicks-b")
    clicks.seal()
    clicks.retain(Retention(consumed=True))
    assert clicks.retire() == 0, "the consumer holds unread records"
    clicks.retain(Retention(bytes=1, hold_seconds=0.001))
    time.sleep(0.01)  # longer than that: times are milliseconds
    assert clicks.retire() == 1, "a consumer that is silent for too long holds nothing"
    with pytest.raises(CursorLost, match=r"no longer retained.*stream='clicks-b'"):
        query.rows()
    clicks.drop_consumer("etl")
    append(store, "clicks-a")
    with pytest.raises(CursorLost, match=r"dropped.*stream='clicks-b'"):
        query.plan()
    with pytest.raises(CursorLost, match=r"dropped.*stream='clicks-b'"):
        query.reader.commit(json.loads(query.offsets[-1]))


def test_polls_renew_the_hold_of_the_consumer(tmp_path: Path) -> None:
    clock = ManualClock(now_ms=1_750_000_000_000)
    with quire.open(tmp_path / "store", settings=SETTINGS, clock=clock) as store:
        options_of(store)
        for name in ("clicks-a", "clicks-b"):
            append(store, name)
            store.stream(name).retain(Retention(bytes=1, hold_seconds=100))
        query = Query(store)
        assert len(query.next()) == 2
        idle = store.stream("clicks-b")
        for _ in range(10):
            clock.advance(30)
            append(store, "clicks-a")
            query.next()
            assert idle.consumers["etl"].acked_ms == clock.now_ms(), "although only another stream has new records"
        acked_ms = idle.consumers["etl"].acked_ms
        clock.advance(20)
        assert not query.plan()
        assert idle.consumers["etl"].acked_ms == acked_ms, "not at every poll: each renewal is a synced write"


def test_batches_cross_a_takeover_and_a_checkpoint_of_lost_records_is_refused(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        options_of(store)
        append(store, "clicks-a", 5)
        append(store, "clicks-b", 5)
        query = Query(store)
        assert len(query.next(ReadMaxRows(6))) == 6
        lost = json.loads(query.offsets[-1])
        store.manifest.begin_owner_epoch(parent=Parent())
        query.reader.stop()
    with quire.open(tmp_path / "store", settings=SETTINGS) as store:
        options_of(store)
        append(store, "clicks-a", 2)
        first = store.stream("clicks-a").gaps[-1].first
        query.restart()
        assert query.next(ReadMaxRows(4)) == [*records("clicks-a", 4, 5), *records("clicks-b", 4, 5)]
        assert query.next() == records("clicks-a", first, first + 1)
        number = str(store.stream("clicks-a").stream_id)
        lost["streams"][number] = 8
        with pytest.raises(CursorLost, match=r"lost when the store was taken over.*stream='clicks-a'"):
            query.reader.partitions(lost, json.loads(query.offsets[-1]))


def test_invalid_options_and_checkpoints_are_refused(store: Store) -> None:
    append(store, "clicks-a")
    for options, message in (
        ({"consumer": ""}, "needs the option `consumer`"),
        ({"stream": "clicks-a"}, "`stream` is for one stream"),
        ({"end": 5}, "`end` is for ranges"),
        ({"since": "yesterday"}, "`since` is for ranges"),
        ({"start": 5}, "must be one of oldest, latest"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Query(store, **options)
    with pytest.raises(InvalidInput, match="`since` is for ranges"):
        Query(store, databases="", stream="clicks-a", since="yesterday")
    query, other = Query(store), Query(store, consumer="other")
    assert query.plan()
    with pytest.raises(InvalidInput, match="belongs to another consumer"):
        other.reader.latestOffset(json.loads(query.offsets[-1]), ALL)
    one = Query(store, databases="", stream="clicks-a")
    with pytest.raises(InvalidInput, match="belongs to another"):
        query.reader.latestOffset(one.reader.initialOffset(), ALL)


# ── on Spark ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.slow
def test_a_restarted_query_over_streams_that_come_and_go_loses_and_duplicates_nothing(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    options = {"store": store.path, "databases": "clicks-*", "consumer": "etl", "max_records": "50"}
    expected = list[Row]()
    for number in range(20):
        append(store, f"clicks-{number:02}", 4)
        expected += records(f"clicks-{number:02}", 1, 4)
    for run in range(3):
        frame = spark.readStream.format("quire.stream").options(**options).load()
        assert frame.schema.simpleString() == "struct<_database:string,id:bigint,timestamp:timestamp,payload:binary>"
        writer = frame.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        run_available(writer.option("checkpointLocation", str(tmp_path / "at")))
        store.drop("clicks-new-0") if run == 1 else None
        append(store, f"clicks-new-{run}", 60)
        append(store, f"clicks-{run:02}")
        if run < 2:  # the third run is the last
            expected += [*records(f"clicks-new-{run}", 1, 60), (f"clicks-{run:02}", 5)]
    frame = spark.read.parquet(str(tmp_path / "out"))
    rows = rows_of(frame.selectExpr("_database", "id", "cast(payload AS string) = id"), "_database", "id")
    assert rows == [(*row, True) for row in sorted(expected)]
    assert store.stream("clicks-02").position("etl") == 5, "acknowledged by the next batch"
