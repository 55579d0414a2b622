"""Snapshots of the published state: what they contain, what they hold, and every interleaving with a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import quire
from quire.core.errors import (
    DatabaseTombstoned,
    LeaseExpired,
    OutOfRange,
    ReadOnly,
    SnapshotGone,
    StoreClosed,
    UnknownDatabase,
    UnknownReader,
)
from quire.core.settings import MaintenanceSettings, PagesSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.records import DbKind
from quire.pages.leasefiles import FileLease
from quire.pages.pagestore import PageStore
from quire.pages.readers import LEASE_SECONDS
from quire.pages.snapshot import Snapshot
from quire.pages.view import ViewReader
from tests.pages.engine_harness import GRACE_SECONDS, PAGE, Model, Pages, assert_reads, image, small_segments, write


@pytest.fixture
def small_pages(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return pages


def leases(pages: Pages) -> list[str]:
    folder = os.path.join(pages.root, "readers")
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def absorb(pages: Pages, store: PageStore) -> None:
    """Run everything that a checkpoint, its truncation and recycling can do now."""
    pages.checkpoint(store)
    pages.clock.advance(1)


def drop_caches(pages: Pages) -> None:
    """Remove everything from the caches."""
    pages.engine.sources.close()
    pages.engine.cache._turn(10**9)
    pages.engine.cache._turn(10**9)
    for resolved in pages.engine.cache._resolved.values():
        resolved.clear()


# ── contents ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_published_snapshot_contains_what_is_published_and_nothing_else(pages: Pages) -> None:
    store, model = pages.database(), Model()
    with pages.engine.open_published("shop") as empty:
        assert (empty.size_pages, empty.lsn, empty.page_size) == (0, 0, PAGE)
    write(store, model, {page: image() for page in range(9)})
    store.wal.publish()
    published = model.newest
    write(store, model, {0: image(), 11: image()})
    with pages.engine.open_published(store.db_id, tags={"who": "report"}) as reader:
        assert (reader.db_id, reader.lsn) == (store.db_id, published.lsn)
        assert reader.time_ms == pages.clock.now_ms()
        assert reader.tags == {"who": "report"}
        assert_reads(reader, published)
        with pytest.raises(OutOfRange):
            reader.read_page(9)
        with pytest.raises(ReadOnly):
            reader.write_page(0, image())
        store.wal.publish()
        assert_reads(reader, published)
        with pages.engine.open_published("shop") as newer:
            assert_reads(newer, model.newest)
    with pytest.raises(UnknownReader):
        reader.read_page(0)
    reader.close()
    assert leases(pages) == []


def test_chains_forks_and_truncated_databases_are_read_the_same_way(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    for number in range(5):
        write(store, model, {page: image() for page in range(number, number + 9)})
        absorb(pages, store)
    write(store, model, {2: image()}, truncate=5)
    store.wal.publish()
    with pages.engine.open_published("shop") as reader:
        assert_reads(reader, model.newest)
    fork = pages.engine.open(pages.engine.fork("shop", "copy"))
    with pages.engine.open_published("copy") as reader:
        assert_reads(reader, model.newest)
        forked = model.copy(model.newest.lsn)
        write(fork, forked, {0: image(), 7: image()})
        fork.wal.publish()
        absorb(pages, fork)
        with pages.engine.open_published("copy") as newer:
            drop_caches(pages)
            assert_reads(newer, forked.newest)
        drop_caches(pages)
        assert_reads(reader, model.newest)


def test_a_database_that_is_not_open_or_was_never_opened_can_be_read(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    pages.engine.close_database("shop")
    with pages.engine.open_published("shop") as reader:
        assert_reads(reader, model.newest)
    pages.manifest.register_db("never", DbKind.PAGES)
    with pages.engine.open_published("never") as reader:
        assert (reader.size_pages, reader.page_size) == (0, PAGE)
    with pages.manifest.read() as txn:
        record = txn.database(txn.database_id("never"))
    assert record is not None
    assert record.page_size == 0, "reading does not fix the page size"
    with pytest.raises(UnknownDatabase):
        pages.engine.open_published(99)
    pages.manifest.drop_db(store.db_id).result()
    with pytest.raises(DatabaseTombstoned):
        pages.engine.open_published(store.db_id)
    assert leases(pages) == []


def test_earlier_versions_are_opened_by_lsn(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    for _ in range(4):
        write(store, model, {page: image() for page in range(5)})
    store.wal.publish()
    versions = list(model.versions[1:])
    for version in versions:
        with pages.engine.open_published_at("shop", version.lsn) as reader:
            assert isinstance(reader._lease, FileLease)
            assert_reads(reader, version)
    pages.engine.snapshot("shop", "kept")
    write(store, model, {0: image()})
    absorb(pages, store)
    with pages.engine.open_published_at("shop", versions[-1].lsn) as view:
        assert isinstance(view, ViewReader), "only the snapshot has this version"
        assert_reads(view, versions[-1])
    with pytest.raises(OutOfRange):
        pages.engine.open_published_at("shop", model.newest.lsn + 1)


def test_a_version_below_a_granted_floor_is_refused(pages: Pages) -> None:
    store, model = pages.database(), Model()
    first = write(store, model, {0: image()}).lsn
    write(store, model, {0: image()})
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    with pytest.raises(SnapshotGone, match="passed this version"):
        pages.engine.open_published_at("shop", first)
    assert leases(pages) == []


def test_a_process_that_only_reads_opens_versions_and_nothing_else(tmp_path: Path) -> None:
    settings = StoreSettings(maintenance=MaintenanceSettings(enabled=False), pages=PagesSettings(page_size=PAGE))
    model = Model()
    with quire.open(tmp_path / "store", settings=settings) as store:
        store.create("shop", "pages")
        shop = store.pages.open("shop")
        first = write(shop, model, {page: image() for page in range(9)})
        store.snapshot("shop", "monday")
        write(shop, model, {page: image() for page in range(3)})
    stray = tmp_path / "store" / "pages" / "00000001" / "wal" / "000000ff.seg"
    stray.write_bytes(b"the owner is just making it")
    with quire.open(tmp_path / "store", mode="r") as reading_store:
        with reading_store.pages.open_published("shop") as reader:
            assert_reads(reader, model.newest)
            assert len(list((tmp_path / "store" / "readers").glob("*.lease"))) == 1
        with reading_store.pages.open_view("shop", "monday") as view:
            assert_reads(view, first)
        with reading_store.pages.open_published_at("shop", first.lsn) as past:
            assert_reads(past, first)
        for call in (reading_store.pages.open, reading_store.pages.lease_reader, reading_store.pages.snapshot):
            with pytest.raises(ReadOnly):
                call("shop")
        with pytest.raises(ReadOnly):
            reading_store.pages.floor(1)
        forgotten = reading_store.pages.open_published("shop")
    with pytest.raises(UnknownReader):
        forgotten.read_page(0)
    assert stray.exists(), "a read-only store neither recovers nor sweeps"
    assert list((tmp_path / "store" / "readers").iterdir()) == []


# ── leases ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_published_snapshot_holds_the_floor_until_it_is_closed(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(9)})
    store.wal.publish()
    reader = pages.engine.open_published("shop", tags={"who": "report"})
    version = model.newest
    for _ in range(4):
        write(store, model, {page: image() for page in range(9)})
        absorb(pages, store)
    assert pages.engine.floor(store.db_id) == version.lsn
    assert [lease.tags["who"] for lease in store.readers.peek()] == ["report"]
    assert pages.engine.figures().databases[0].readers_active == 1
    assert pages.engine.figures().databases[0].segments_blocked > 0
    drop_caches(pages)
    assert_reads(reader, version)
    reader.close()
    absorb(pages, store)
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    assert pages.engine.figures().databases[0].segments_blocked == 0


def test_segments_recycled_under_a_reader_are_looked_up_again(small_pages: Pages) -> None:
    """P8: its handles refer to the previous use of the files."""
    pages, model, store = small_pages, Model(), small_pages.database()
    for _ in range(3):
        write(store, model, {page: image() for page in range(9)})
    pages.engine.flush(store.db_id)
    reader = pages.engine.open_published("shop")
    version, sources = model.newest, pages.engine.sources
    assert_reads(reader, version)
    stale_handles = dict(sources._segments._kept)
    assert stale_handles
    absorb(pages, store)
    for number in range(12):
        write(store, model, {page: image() for page in range(9)})
        pages.engine.tick(store)
        pages.clock.advance(GRACE_SECONDS + number)
        pages.worker().drain()
    assert store.wal.recycled, "no file was recycled: the test tests nothing"
    drop_caches(pages)
    sources._segments._kept.update(stale_handles)
    assert_reads(reader, version)
    reader.close()


@pytest.mark.parametrize("kind", ["published", "in memory"])
def test_a_database_dropped_under_a_reader_is_not_read_as_zeros(small_pages: Pages, kind: str) -> None:
    """Dropping empties the index and the slot map at once: pages missing from them must not be read as zeros."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(9)})
    absorb(pages, store)
    reader = pages.engine.open_published("shop") if kind == "published" else store.open_snapshot()
    pages.manifest.drop_db(store.db_id).result()
    drop_caches(pages)
    with pytest.raises(DatabaseTombstoned):
        reader.read_page(0)
    with pytest.raises(DatabaseTombstoned):
        reader.read_pages(range(9))
    reader.close()


def test_a_reader_whose_lease_the_owner_removed_gets_an_error(
    small_pages: Pages, capsys: pytest.CaptureFixture[str]
) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(9)})
    store.wal.publish()
    silent, alive = pages.engine.open_published("shop"), pages.engine.open_published("shop")
    version = model.newest
    write(store, model, {page: image() for page in range(9)})
    assert pages.engine.floor(store.db_id) == version.lsn
    pages.clock.advance(LEASE_SECONDS)
    alive.renew()
    assert pages.engine.floor(store.db_id) == version.lsn
    assert "reader.heartbeat_lost" in capsys.readouterr().err
    alive.close()
    absorb(pages, store)
    drop_caches(pages)
    was_open = silent.is_open
    with pytest.raises(LeaseExpired):
        silent.read_pages(range(9))
    assert (was_open, silent.is_open) == (True, False), "the reader notices when it needs a page that is gone"
    with pytest.raises(LeaseExpired):
        silent.renew()
    silent.close()


def test_heartbeats_renew_held_leases_and_report_lost_ones(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    store.wal.publish()
    reader, lost = pages.engine.open_published("shop"), pages.engine.open_published("shop")
    assert isinstance(lost._lease, FileLease)
    os.remove(lost._lease.path)
    for _ in range(20):
        pages.clock.advance(5)
        pages.engine._published.beat()
        assert pages.engine.floor(store.db_id) == reader.lsn
        assert len(pages.engine._files.look()) == 1
    assert capsys.readouterr().err.count("reader.lease_lost") == 1
    with pytest.raises(LeaseExpired):
        lost.read_page(0)
    assert len(pages.engine._published) == 1
    del reader, lost
    assert pages.engine._files.look() == [], "garbage-collected readers release their leases"


def test_closing_the_engine_closes_published_snapshots(tmp_path: Path) -> None:
    pages = Pages(tmp_path, ticking=True)
    store = pages.database()
    write(store, Model(), {0: image()})
    store.wal.publish()
    reader = pages.engine.open_published("shop")
    assert pages.engine._published._heart is not None
    pages.stop()
    assert leases(pages) == []
    with pytest.raises(UnknownReader):
        reader.read_page(0)
    with pytest.raises(StoreClosed):
        pages.engine.open_published("shop")


def test_after_a_process_fork_the_snapshot_belongs_to_the_parent(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    store.wal.publish()
    with pages.engine.open_published("shop") as reader:
        child = os.fork()
        if child == 0:
            try:
                reader.read_page(0)
            except LeaseExpired:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert_reads(reader, model.newest)
        assert pages.engine.floor(store.db_id) == reader.lsn
        assert len(leases(pages)) == 1


# ── concurrent checkpoints ────────────────────────────────────────────────────────────────────────────────────────────
def test_a_reader_overtaken_by_a_checkpoint_takes_the_current_version(small_pages: Pages) -> None:
    """The version it chose is checkpointed before its lease has a name."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(9)})
    store.wal.publish()
    passed_lsns = list[int]()

    def checkpoint(_: str) -> None:
        if not passed_lsns:
            passed_lsns.append(model.newest.lsn)
            write(store, model, {page: image() for page in range(9)})
            absorb(pages, store)

    with armed("pages.lease.written", checkpoint), pages.engine.open_published("shop") as reader:
        assert reader.lsn == model.newest.lsn > passed_lsns[0]
        assert len(leases(pages)) == 1, "the first lease was released"
        drop_caches(pages)
        assert_reads(reader, model.newest)


def test_a_reader_that_opens_between_the_floors_row_and_its_second_check_is_seen(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(9)})
    store.wal.publish()
    readers: list[Snapshot] = []

    def open_reader(_: str) -> None:
        if not readers:
            readers.append(pages.engine.open_published("shop"))

    version = model.newest
    write(store, model, {page: image() for page in range(9)})
    with armed("pages.floor.announced", open_reader):
        absorb(pages, store)
    assert readers[0].lsn > version.lsn, "the row rules out versions published before it"
    expected = model.newest
    write(store, model, {page: image() for page in range(9)})
    absorb(pages, store)
    drop_caches(pages)
    assert_reads(readers[0], expected)
    readers[0].close()


def test_a_reader_checked_before_the_row_is_seen_by_the_second_check(small_pages: Pages) -> None:
    """Its lease is taken and checked just before the row rises: the floor must fall back."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(9)})
    store.wal.publish()
    version, readers = model.newest, list[Snapshot]()
    submit = pages.manifest.submit

    def submit_late(ops: list[object], **options: object) -> object:
        if any(type(op).__name__ == "SetFloor" for op in ops) and not readers:
            readers.append(pages.engine.open_published_at("shop", version.lsn))
        return submit(ops, **options)

    write(store, model, {page: image() for page in range(9)})
    pages.engine.flush(store.db_id)
    pages.manifest.submit = submit_late  # type: ignore[assignment]  # for one call
    try:
        assert pages.engine.floor(store.db_id) == version.lsn
    finally:
        pages.manifest.submit = submit
    with pages.manifest.read() as txn:
        row = txn.get(t.SNAPSHOT_FLOOR, store.db_id)
    assert row is not None
    assert row.min_snapshot_lsn == model.newest.lsn, "the row stays where it is"
    absorb(pages, store)
    drop_caches(pages)
    assert_reads(readers[0], version)
    readers[0].close()


def test_the_next_owner_sees_the_leases_of_running_readers(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    store.wal.publish()
    reader = pages.engine.open_published("shop")
    write(store, model, {0: image()})
    pages.crash()
    store = pages.database()
    assert pages.engine.floor(store.db_id) == reader.lsn
    reader.close()
    assert pages.engine.floor(store.db_id) == model.newest.lsn


def test_a_heartbeat_that_fails_leaves_the_other_leases_alive(
    pages: Pages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: an unexpected error in one heartbeat ended the thread that writes them all."""
    write(pages.database(), Model(), {0: image()})
    pages.database().wal.publish()
    readers = [pages.engine.open_published("shop") for _ in range(3)]
    beat, beats = FileLease.beat, list[FileLease]()

    def fail_first(lease: FileLease) -> bool:
        beats.append(lease)
        if len(beats) == 1:
            raise ZeroDivisionError("a bug")
        return beat(lease)

    with monkeypatch.context() as patch:
        patch.setattr(FileLease, "beat", fail_first)
        pages.engine._published.beat()
    assert len(beats) == 3
    assert capsys.readouterr().err.count("reader.heartbeat_failed") == 1
    for reader in readers:
        reader.close()
