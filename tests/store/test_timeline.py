"""A store taken over after a restore that lost its last changes: no position of the lost range refers to other data
(A10)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import quire
from quire.cli.main import run
from quire.core.clock import SystemClock
from quire.core.errors import CursorLost, EpochLost, OutOfRange, SnapshotGone, UnknownSnapshot
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.namespaces import Parent
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.ops.timeline import Timeline
from quire.manifest.records import DbKind, DbRecord
from quire.manifest.store import ManifestStore
from quire.stream.state import Retention
from quire.stream.stream import Stream
from quire.stream.verify import problems

RANGE_START = 2 << 40


class TakenOver:
    """A restored directory, and the positions that the previous owner gave to consumers and that were lost. Each test
    takes it over anew."""

    store: quire.Store

    def __init__(self, directory: Path) -> None:
        bucket = str(directory / "bucket")
        settings = quire.StoreSettings(
            object_store=bucket, archive=quire.ArchiveSettings(mode="async", interval_seconds=0.02)
        )
        with quire.open(directory / "former", settings=settings) as former:
            former.manifest.feed.register(name="reader")
            former.create("kept", "pages")
            shop = former.sqlite("shop", create=True)
            shop.execute("CREATE TABLE t(a)")
            self.versions = [_insert(shop, number) for number in range(3)]
            """The lsn after each row."""
            events = former.stream("events", create=True)
            events.append([b"kept %d" % number for number in range(7)]).result()
            events.register("etl", 3)
            events.register("idle", 8)
            former.stream("quiet", create=True)
            pairs = former.kv("pairs", create=True)
            pairs.put(b"a", b"kept")
            former.snapshot("shop", "kept")
            assert former.archive is not None
            former.archive.wait(30)
            former_at_ms = SystemClock().now_ms()
            self.last = former.manifest.feed.head()
            quire.restore(bucket, directory / "successor")
            self.lost_versions = [_insert(shop, number) for number in range(100, 103)]
            shop.close()
            events.append([b"lost %d" % number for number in range(5)]).result()
            events.ack("idle", 12)
            former.stream("quiet").append([b"lost", b"lost"]).result()
            self.lost_lsn = pairs.write({b"a": b"lost"})
            self.lost_snapshot = former.snapshot("shop", "lost").snapshot_id
            for number in range(5):
                former.create(f"lost-{number}", "pages")
            self.lost = former.manifest.feed.head()
            """A position that a consumer of the former owner has stored."""
            self.lost_db = former.database("lost-4").db_id
            former.archive.wait(30)
        self.path = directory / "successor"
        self.former_at_ms = former_at_ms
        self._kept = (directory / "bucket", self.path)
        for path in self._kept:
            _copy(path, f"{path}.kept")

    def take_over(self) -> quire.Store:
        """Take over a fresh copy of the directory."""
        for path in self._kept:
            _copy(f"{path}.kept", path)
        self.store = quire.open(self.path, takeover=True, discard=True)
        return self.store


def _copy(source: Path | str, target: Path | str) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", "--sparse=always", source, target], check=True)


def _insert(connection: apsw.Connection, number: int) -> int:
    """Insert a row; returns the lsn of the commit."""
    connection.execute("INSERT INTO t VALUES (?)", (number,))
    ((epoch,),) = connection.execute("PRAGMA quire_epoch").fetchall()
    return int(str(epoch))


def _rows(store: quire.Store, at: int | None = None) -> list[int]:
    with closing(store.sqlite("shop", at=at)) as connection:
        return [row[0] for row in connection.execute("SELECT a FROM t ORDER BY a")]


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> TakenOver:
    return TakenOver(tmp_path_factory.mktemp("taken-over"))


@pytest.fixture
def taken_over(restored: TakenOver) -> Iterator[TakenOver]:
    with restored.take_over() as store:
        assert store.manifest.check() == []
        yield restored


def test_the_takeover_records_where_the_previous_owner_ended(taken_over: TakenOver) -> None:
    with taken_over.store.manifest.read() as txn:
        (restored, before), (first, row) = txn.timelines()
        assert before.last_sequence == taken_over.last
        assert taken_over.lost < restored < RANGE_START
        assert (first, row.owner_epoch, row.parent_epoch) == (RANGE_START, 2, 1)
        assert row.parent_number == before.parent_number >= 0
        assert 0 < row.ended_at_ms <= taken_over.former_at_ms
        changes = [
            change for change in txn.changes(RANGE_START) if any(isinstance(op, Timeline) for op in change.operations)
        ]
    assert [change.sequence for change in changes] == [RANGE_START]


def test_a_follower_that_read_lost_changes_is_notified_and_another_continues(taken_over: TakenOver) -> None:
    feed = taken_over.store.manifest.feed
    for position in range(taken_over.last + 1, taken_over.lost + 1):
        with pytest.raises(CursorLost) as caught:
            feed.fetch("reader", after=position)
    assert caught.value.where["last_sequence"] == taken_over.last
    taken_over.store.create("new", "pages")
    page = feed.fetch("reader", after=taken_over.last)
    assert page.changes[0].sequence > taken_over.lost
    assert RANGE_START in [change.sequence for change in page.changes]
    assert page.at_head
    sequences = [change.sequence for change in feed.follow("reader", timeout=0)]
    assert sequences[-1] == feed.head()
    assert feed.lag() == {"reader": 0}


def test_a_database_of_the_lost_range_shares_its_id_with_no_other(taken_over: TakenOver) -> None:
    assert taken_over.store.create("new", "pages").db_id > taken_over.lost_db + 2**15


def test_the_newest_changes_include_both_sides_of_the_gap(
    taken_over: TakenOver, capsys: pytest.CaptureFixture[str]
) -> None:
    taken_over.store.create("new", "pages")
    with taken_over.store.manifest.read() as txn:
        known = [change.sequence for change in txn.changes()]
    wanted = known[known.index(taken_over.last) - 1 :]
    assert wanted[-1] > RANGE_START
    taken_over.store.close()
    store_option = ["--store", str(taken_over.path), "--json"]
    assert run(["feed", "tail", "--limit", str(len(wanted)), *store_option]) == 0
    shown = capsys.readouterr().out
    for sequence in wanted:
        assert f'"sequence": {sequence}' in shown or f'"sequence":{sequence}' in shown
    assert run(["feed", "tail", "--from", str(taken_over.lost), *store_option]) != 0
    assert "were lost when the store was taken over" in capsys.readouterr().err


def test_reopening_starts_no_range_and_a_second_takeover_starts_the_next(taken_over: TakenOver) -> None:
    taken_over.store.close()
    with quire.open(taken_over.path) as store, store.manifest.read() as txn:
        assert len(txn.gaps()) == 2
    with quire.open(taken_over.path, takeover=True) as store, store.manifest.read() as txn:
        rows = dict(txn.timelines())
        assert [*rows][1:] == [RANGE_START, 3 << 40]
        assert rows[3 << 40].parent_number == 0  # it lost nothing of the archive
        assert store.manifest.check() == []


def test_versions_on_both_sides_of_the_gap_are_readable_and_lost_ones_are_refused(taken_over: TakenOver) -> None:
    store, last = taken_over.store, taken_over.versions[-1]
    assert _rows(store) == [0, 1, 2]
    for lsn in (
        *taken_over.lost_versions,
        last + 1,
        RANGE_START - 1,
    ):  # also before the first write after the takeover
        with pytest.raises(EpochLost):
            _rows(store, lsn)
    with closing(store.sqlite("shop")) as shop:
        written = [_insert(shop, number) for number in range(3, 5)]
    assert written[0] >= RANGE_START
    for lsn in (*taken_over.lost_versions, last + 1, RANGE_START - 1):
        with pytest.raises(EpochLost, match="lost when the store was taken over") as caught:
            _rows(store, lsn)
        assert caught.value.where["last_lsn"] == last
    assert [_rows(store, lsn) for lsn in taken_over.versions] == [[0], [0, 1], [0, 1, 2]]
    assert [_rows(store, lsn) for lsn in written] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    with pytest.raises(OutOfRange):
        _rows(store, written[-1] + 1)
    store.checkpoint("shop")
    assert _rows(store) == [0, 1, 2, 3, 4]
    for lsn in taken_over.lost_versions:
        with pytest.raises(SnapshotGone):
            _rows(store, lsn)


def test_a_store_that_was_never_taken_over_has_plain_sequences(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store") as store:
        store.create("shop", "pages")
        with store.manifest.read() as txn:
            assert txn.gaps() == ()
            assert txn.count(t.TIMELINE) == 0
            assert txn.feed_bounds()[1] < 1000


def test_a_hundred_thousand_databases_are_taken_over_by_one_small_change(tmp_path: Path) -> None:
    count, step = 100_000, 20_000
    with ManifestStore.open(str(tmp_path / "manifest.lmdb")) as manifest:
        for start in range(1, count + 1, step):
            manifest.submit(
                [RegisterDb(number, DbRecord(f"db-{number}", DbKind.PAGES, 0)) for number in range(start, start + step)]
            ).result()
        manifest.begin_owner_epoch()
        before = manifest.writer.stats.rows
        manifest.begin_owner_epoch(parent=Parent(1, 1))
        assert manifest.writer.stats.rows - before < 40
        with manifest.read() as txn:
            assert txn.count(t.DB) == count
            row = dict(txn.raw_scan(CHANGE_LOG))[CHANGE_LOG.key.pack(RANGE_START)]
        assert len(row) < 1_000


def _payloads(stream: Stream, start: int | None = None) -> list[bytes]:
    return [record.payload for record in stream.read(start)]


def test_no_position_in_lost_records_of_a_stream_refers_to_other_records(taken_over: TakenOver) -> None:
    """Before the first append, after it, after a reopening, after the records before the gap are removed, and for
    readers."""
    store = taken_over.store

    def check(stream: Stream, new: list[bytes]) -> None:
        for position in range(9, 13):
            for refused in (
                lambda position=position: list(stream.read(position)),
                lambda position=position: list(stream.read_batches(position)),
                lambda position=position: next(stream.tail(position, timeout=0)),
            ):
                with pytest.raises(CursorLost, match="were lost when the store was taken over") as caught:
                    refused()
            assert caught.value.where["last_record"] == 7
            assert caught.value.where["first_record"] == RANGE_START
        assert [record.id for record in stream.read(8)] == list(range(RANGE_START, RANGE_START + len(new)))
        assert _payloads(stream, 8) == _payloads(stream, RANGE_START) == new
        assert [record.payload for record in stream.tail(8, timeout=0)] == new
        with pytest.raises(OutOfRange):
            list(stream.read(RANGE_START + len(new) + 1))
        assert (stream.end_record, stream.position("idle")) == (RANGE_START + len(new), 8)

    stream = store.stream("events")
    check(stream, [])
    assert (stream.info().records, stream.info().lag("etl"), stream.info().lag("idle")) == (7, 5, 0)
    assert stream.append([b"new", b"newer"]).result() == RANGE_START
    check(stream, [b"new", b"newer"])
    assert (stream.info().records, stream.info().appended, stream.info().lag("etl")) == (9, 9, 7)
    for position in range(9, 13):
        with pytest.raises(CursorLost, match="were lost"):
            stream.ack("etl", position)
        with pytest.raises(CursorLost, match="were lost"):
            stream.register("another", position)
    batches = list(stream.read_batches(6))
    assert [number for batch in batches for number in batch.column("id").to_pylist()] == [
        6,
        7,
        RANGE_START,
        RANGE_START + 1,
    ]
    assert stream.seek(next(stream.read(RANGE_START)).timestamp_ms) == RANGE_START
    assert stream.seek(1 << 50) == RANGE_START + 2
    stream.ack("etl", 8)
    assert stream.info().lag("etl") == 2
    stream.seal()
    assert [problem for problem in problems(stream) if not problem.leak] == []
    store.close()
    with quire.open(taken_over.path, "r") as reader:
        check(reader.stream("events"), [b"new", b"newer"])
    with quire.open(taken_over.path) as reopened:
        stream = reopened.stream("events")
        check(stream, [b"new", b"newer"])
        stream.retain(Retention(consumed=True))
        assert stream.retire() == 1, "the records that every consumer has read"
        check(stream, [b"new", b"newer"])
        assert reopened.manifest.check() == []


def test_tails_and_record_counts_exclude_the_gap(taken_over: TakenOver, capsys: pytest.CaptureFixture[str]) -> None:
    taken_over.store.stream("events").append([b"new", b"newer"]).result()
    taken_over.store.close()
    store_option = ["--store", str(taken_over.path), "--json"]
    for command in (["tail", "events", "-n", "4"], ["read", "events", "--from", "6", "-n", "4"]):
        assert run(["stream", *command, *store_option]) == 0
        assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [
            6,
            7,
            RANGE_START,
            RANGE_START + 1,
        ]
    assert run(["stream", "read", "events", "--from", "10", *store_option]) != 0
    assert "were lost when the store was taken over" in capsys.readouterr().err


def test_an_empty_stream_and_a_later_one_start_with_the_range(taken_over: TakenOver) -> None:
    for name in ("quiet", "later"):
        stream = taken_over.store.stream(name, create=True)
        with pytest.raises(CursorLost, match="were lost"):
            list(stream.read(2))
        assert stream.append(b"new").result() == RANGE_START
        assert _payloads(stream, 1) == [b"new"]


def test_ranges_without_records_keep_positions_valid(taken_over: TakenOver) -> None:
    assert list(taken_over.store.stream("events").read(RANGE_START)) == []
    taken_over.store.close()
    with quire.open(taken_over.path, takeover=True) as store:
        stream = store.stream("events")
        assert stream.append(b"new").result() == 3 << 40
        for position in (8, RANGE_START, 3 << 40):
            assert _payloads(stream, position) == [b"new"]
        for position in (9, RANGE_START - 1, RANGE_START + 1, (3 << 40) - 1):
            with pytest.raises(CursorLost, match="were lost"):
                list(stream.read(position))
        assert (stream.info().records, stream.info().lag("etl")) == (8, 6)


def test_a_gap_is_recovered_when_the_streams_own_file_is_lost(taken_over: TakenOver) -> None:
    stream = taken_over.store.stream("events")
    stream.append(b"new").result()
    state = Path(stream.files.state)
    taken_over.store.close()
    state.unlink()
    with quire.open(taken_over.path) as store:
        assert _payloads(store.stream("events"), 8) == [b"new"]
        with pytest.raises(CursorLost, match="were lost"):
            list(store.stream("events").read(9))


def test_an_lsn_and_a_snapshot_of_the_lost_range_are_never_reused(taken_over: TakenOver) -> None:
    store = taken_over.store
    pairs = store.kv("pairs")
    assert (pairs.get(b"a"), pairs.last_lsn) == (b"kept", taken_over.lost_lsn - 1)
    assert pairs.write({b"a": b"new"}) == RANGE_START
    assert pairs.begin_load() == RANGE_START + 1
    pairs.end_load(RANGE_START + 1)
    first, second = store.snapshot("shop", "new"), store.snapshot("shop", "newer")
    assert taken_over.lost_snapshot < first.snapshot_id == second.snapshot_id - 1
    with pytest.raises(UnknownSnapshot):
        store.sqlite("shop", at=f"#{taken_over.lost_snapshot}")
    with pytest.raises(UnknownSnapshot):
        store.manifest.snapshots.get("shop", taken_over.lost_snapshot)
    store.close()
    with quire.open(taken_over.path) as reopened:
        assert reopened.kv("pairs").write({b"a": b"newest"}) == RANGE_START + 2
        assert reopened.snapshot("shop").snapshot_id == second.snapshot_id + 1
        assert reopened.manifest.check() == []
