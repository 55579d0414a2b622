"""A store taken over after a restore that lost its last changes: no position of the lost range means other data (A10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

import quire
from quire.cli.main import run
from quire.core.clock import SystemClock
from quire.core.errors import CursorLost, EpochLost, OutOfRange, SnapshotGone
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.namespaces import Parent
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.ops.timeline import Timeline
from quire.manifest.records import DbKind, DbRecord
from quire.manifest.store import ManifestStore

FIRST = 2 << 40


class TakenOver:
    """A successor, with what the owner before it gave to consumers and lost."""

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
            assert former.archive is not None
            former.archive.wait(30)
            former_at_ms = SystemClock().now_ms()
            self.last = former.manifest.feed.head()
            quire.restore(bucket, directory / "successor")
            self.lost_versions = [_insert(shop, number) for number in range(100, 103)]
            shop.close()
            for number in range(5):
                former.create(f"lost-{number}", "pages")
            self.lost = former.manifest.feed.head()
            """A position that a consumer of the former owner has stored."""
            self.lost_db = former.database("lost-4").db_id
            former.archive.wait(30)
        self.store = quire.open(directory / "successor", takeover=True, discard=True)
        self.path = directory / "successor"
        self.former_at_ms = former_at_ms


def _insert(connection: apsw.Connection, number: int) -> int:
    """Insert a row; the lsn of the commit."""
    connection.execute("INSERT INTO t VALUES (?)", (number,))
    ((epoch,),) = connection.execute("PRAGMA quire_epoch").fetchall()
    return int(str(epoch))


def _rows(store: quire.Store, at: int | None = None) -> list[int]:
    with closing(store.sqlite("shop", at=at)) as connection:
        return [row[0] for row in connection.execute("SELECT a FROM t ORDER BY a")]


@pytest.fixture
def taken_over(tmp_path: Path) -> Iterator[TakenOver]:
    taken = TakenOver(tmp_path)
    with taken.store:
        assert taken.store.manifest.check() == []
        yield taken


def test_the_takeover_says_where_the_owner_before_it_ended(taken_over: TakenOver) -> None:
    with taken_over.store.manifest.read() as txn:
        (restored, before), (first, row) = txn.timelines()
        assert before.last_sequence == taken_over.last
        assert taken_over.lost < restored < FIRST
        assert (first, row.owner_epoch, row.parent_epoch) == (FIRST, 2, 1)
        assert row.parent_number == before.parent_number >= 0
        assert 0 < row.ended_at_ms <= taken_over.former_at_ms
        changes = [change for change in txn.changes(FIRST) if any(isinstance(op, Timeline) for op in change.operations)]
    assert [change.sequence for change in changes] == [FIRST]


def test_a_follower_that_read_lost_changes_is_told_and_another_goes_on(taken_over: TakenOver) -> None:
    feed = taken_over.store.manifest.feed
    for position in range(taken_over.last + 1, taken_over.lost + 1):
        with pytest.raises(CursorLost) as caught:
            feed.fetch("reader", after=position)
    assert caught.value.where["last_sequence"] == taken_over.last
    taken_over.store.create("new", "pages")
    page = feed.fetch("reader", after=taken_over.last)
    assert page.changes[0].sequence > taken_over.lost
    assert FIRST in [change.sequence for change in page.changes]
    assert page.at_head
    seen = [change.sequence for change in feed.follow("reader", timeout=0)]
    assert seen[-1] == feed.head()
    assert feed.lag() == {"reader": 0}


def test_a_database_of_the_lost_range_shares_its_id_with_no_other(taken_over: TakenOver) -> None:
    assert taken_over.store.create("new", "pages").db_id > taken_over.lost_db + 2**15


def test_the_newest_changes_are_those_on_both_sides_of_the_gap(
    taken_over: TakenOver, capsys: pytest.CaptureFixture[str]
) -> None:
    taken_over.store.create("new", "pages")
    with taken_over.store.manifest.read() as txn:
        known = [change.sequence for change in txn.changes()]
    wanted = known[known.index(taken_over.last) - 1 :]
    assert wanted[-1] > FIRST
    taken_over.store.close()
    where = ["--store", str(taken_over.path), "--json"]
    assert run(["feed", "tail", "--limit", str(len(wanted)), *where]) == 0
    shown = capsys.readouterr().out
    for sequence in wanted:
        assert f'"sequence": {sequence}' in shown or f'"sequence":{sequence}' in shown
    assert run(["feed", "tail", "--from", str(taken_over.lost), *where]) != 0
    assert "were lost when the store was taken over" in capsys.readouterr().err


def test_reopening_begins_no_range_and_a_second_takeover_begins_the_next(taken_over: TakenOver) -> None:
    taken_over.store.close()
    with quire.open(taken_over.path) as store, store.manifest.read() as txn:
        assert len(txn.gaps()) == 2
    with quire.open(taken_over.path, takeover=True) as store, store.manifest.read() as txn:
        rows = dict(txn.timelines())
        assert [*rows][1:] == [FIRST, 3 << 40]
        assert rows[3 << 40].parent_number == 0  # it lost nothing of the archive
        assert store.manifest.check() == []


def test_versions_on_both_sides_of_the_gap_are_read_and_lost_ones_are_refused(taken_over: TakenOver) -> None:
    store, last = taken_over.store, taken_over.versions[-1]
    assert _rows(store) == [0, 1, 2]
    for lsn in (*taken_over.lost_versions, last + 1, FIRST - 1):  # before anything was written after the takeover, too
        with pytest.raises(EpochLost):
            _rows(store, lsn)
    with closing(store.sqlite("shop")) as shop:
        written = [_insert(shop, number) for number in range(3, 5)]
    assert written[0] >= FIRST
    for lsn in (*taken_over.lost_versions, last + 1, FIRST - 1):
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
            row = dict(txn.raw_scan(CHANGE_LOG))[CHANGE_LOG.key.pack(FIRST)]
        assert len(row) < 1_000
