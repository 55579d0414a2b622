"""Earlier versions, by lsn and by time, as far as they are kept (P14)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidInput, OutOfRange, SnapshotGone
from quire.core.ids import Epoch
from quire.manifest import tables as t
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.records import JobKind, WalState
from quire.pages.snapshot import Snapshot
from tests.pages.engine_harness import GRACE_SECONDS, Model, Pages, assert_reads, image, small_segments, write


@pytest.fixture
def small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def _now(pages: Pages) -> datetime:
    return datetime.fromtimestamp(pages.clock.now_ms() / 1000, UTC)


def test_every_version_in_the_wal_can_be_opened_by_lsn_and_by_time(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    times = []
    for number in range(12):
        write(store, model, {page: image() for page in range(number, number + 3)})
        times.append(_now(pages))
        pages.clock.advance(10)
        if number == 4:
            pages.reopen()
            store = pages.database()
        if number == 7:
            store.wal.publish()
    for version, at in zip(model.versions[1:], times):
        with store.open_snapshot(at=version.lsn) as reader:
            assert reader.lsn == version.lsn
            assert_reads(reader, version)
        for moment in (at, at + timedelta(seconds=9)):
            with store.open_snapshot(at=moment) as reader:
                assert reader.lsn == version.lsn
        with store.open_snapshot(at=Epoch(version.lsn, 0)) as reader:
            assert reader.lsn == version.lsn
    pages.stop()


def test_an_lsn_between_two_commits_opens_the_earlier_one(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    first = write(store, model, {0: image(), 1: image()})
    second = write(store, model, {page: image() for page in range(10)})
    for lsn in range(first.lsn, second.lsn):
        with store.open_snapshot(at=lsn) as reader:
            assert reader.lsn == first.lsn
            assert_reads(reader, first)
    pages.stop()


def test_versions_that_a_checkpoint_has_passed_are_gone_unless_a_snapshot_keeps_them(small_pages: Pages) -> None:
    """The view at E consists of the leaves of the next anchor and its pins up to E."""
    pages, model, store = small_pages, Model(), small_pages.database()
    for _ in range(3):
        write(store, model, {page: image() for page in range(4)})
    pages.checkpoint(store)
    lost_versions = model.versions[1:3]
    for _ in range(4):
        write(store, model, {page: image() for page in range(2, 7)})
        pages.clock.advance(10)
    kept_versions = model.versions[4:]
    pages.engine.snapshot("shop", "anchor")
    write(store, model, {0: image()})
    pages.checkpoint(store)
    pages.clock.advance(1000)
    pages.checkpoint(store)
    for version in lost_versions:
        with pytest.raises(SnapshotGone):
            store.open_snapshot(at=version.lsn)
    for version in kept_versions:
        with store.open_snapshot(at=version.lsn) as reader:
            assert reader.lsn == version.lsn
            assert_reads(reader, version)
    with store.open_snapshot(at=model.newest.lsn) as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_time_between_an_anchor_and_the_next_version_opens_the_anchor(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(4)})
    first = model.newest
    pages.engine.snapshot("shop", "one")
    pages.checkpoint(store)
    at = _now(pages) + timedelta(seconds=5)
    pages.clock.advance(10)
    write(store, model, {page: image() for page in range(4)})
    pages.engine.snapshot("shop", "two")
    write(store, model, {page: image() for page in range(4)})
    pages.checkpoint(store)
    with store.open_snapshot(at=at) as reader:
        assert_reads(reader, first)
    pages.manifest.snapshots.drop("shop", "one")
    with pytest.raises(SnapshotGone):
        store.open_snapshot(at=at)
    pages.stop()


def test_a_checkpoint_during_the_publication_of_a_snapshot_does_not_make_earlier_versions_wrong(
    small_pages: Pages,
) -> None:
    """Found by stress: the snapshot then has chunks of its own version and pins from before it, and what was in between
    was read from the chunks. Such a version must be gone."""
    pages, model, store = small_pages, Model(), small_pages.database()
    first = write(store, model, {page: image() for page in range(4)})
    write(store, model, {page: image() for page in range(4)})
    original = pages.manifest.snapshots.publish

    def publish(*args: Any, **options: Any) -> Any:
        pages.manifest.jobs.enqueue(JobKind.CHECKPOINT, store.db_id)
        pages.worker(JobKind.CHECKPOINT).drain()
        return original(*args, **options)

    pages.manifest.snapshots.publish = publish  # type: ignore[method-assign]
    pages.engine.snapshot("shop", "kept")
    view = pages.engine.view("shop", "kept")
    assert view.pins
    assert view.links, "the race did not happen"
    assert_reads(pages.engine.open_view("shop", "kept"), model.newest)
    with pytest.raises(SnapshotGone):
        store.open_snapshot(at=first.lsn)
    with pytest.raises(SnapshotGone):
        replace(view, lsn=first.lsn).open(pages.engine.sources).read_page(0)
    pages.stop()


def test_future_or_invalid_versions_are_refused(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    with pytest.raises(OutOfRange):
        store.open_snapshot(at=model.newest.lsn + 1)
    for invalid in (datetime(2024, 1, 1), -1, True):
        with pytest.raises(InvalidInput):
            store.open_snapshot(at=invalid)
    with pytest.raises(SnapshotGone):
        store.open_snapshot(at=datetime(2001, 1, 1, tzinfo=UTC))
    with store.open_snapshot(at=_now(pages) + timedelta(days=1)) as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_an_earlier_version_is_a_lease_like_any_other(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    first = write(store, model, {0: image()})
    write(store, model, {0: image()})
    with store.open_snapshot(at=first.lsn, tags={"back": "then"}):
        assert pages.engine.floor(store.db_id) == first.lsn
        pages.checkpoint(store)
    assert pages.engine.floor(store.db_id) == model.newest.lsn
    with pytest.raises(SnapshotGone):
        store.open_snapshot(at=first.lsn)
    pages.stop()


def _checkpointed_and_deleted(pages: Pages) -> tuple[Model, list[datetime], int]:
    """Commit twice, an hour apart, with no segment left; return the model, a time before, between and after, and the id."""
    model, store, times = Model(), pages.database(), [_now(pages) - timedelta(minutes=30)]
    for _ in range(2):
        write(store, model, {page: image() for page in range(4)})
        times.append(_now(pages) + timedelta(minutes=30))
        pages.clock.advance(3600)
    pages.engine.flush(store.db_id)
    pages.checkpoint(store)
    pages.clock.advance(2 * GRACE_SECONDS)
    pages.worker().drain()
    with pages.manifest.read() as txn:
        assert not [row for _, row in txn.scan(t.WAL_CATALOG, store.db_id) if row.state is not WalState.TRUNCATED]
    return model, times, store.db_id


def _assert_only_the_newest_is_kept(pages: Pages, model: Model, times: list[datetime]) -> None:
    store = pages.database()

    def in_owner(at: datetime) -> Snapshot:
        return store.open_snapshot(at=at)

    def published(at: datetime) -> Snapshot:
        return pages.engine.open_published_at("shop", at)

    for open_at in (in_owner, published):
        for at in times[:2]:
            with pytest.raises(SnapshotGone):
                open_at(at)
        with open_at(times[2]) as reader:
            assert_reads(reader, model.newest)


def test_a_time_before_the_newest_commit_never_opens_it_after_its_segment_is_gone_and_the_database_reopened(
    small_pages: Pages,
) -> None:
    """Hazard: the time of a commit was only in its segment. Once that was deleted and the database reopened, every time
    opened the newest version: a rollback to a time did nothing, and a fork at a time was of the wrong version."""
    pages = small_pages
    model, times, _ = _checkpointed_and_deleted(pages)
    _assert_only_the_newest_is_kept(pages, model, times)
    pages.reopen()
    _assert_only_the_newest_is_kept(pages, model, times)
    pages.stop()


def test_a_commit_is_never_earlier_than_one_whose_segment_is_gone(small_pages: Pages) -> None:
    """Hazard: a clock that was set back gave later commits earlier times, and bisection by time needs them in order (P14)."""
    pages = small_pages
    _checkpointed_and_deleted(pages)
    before = pages.database().wal.durable.commit_ms
    pages.reopen()
    pages.clock.jump(-7200)
    write(pages.database(), Model(), {0: image()})
    assert pages.database().wal.durable.commit_ms >= before > pages.clock.now_ms()
    pages.stop()


def test_a_fork_knows_the_time_of_its_fork_point_without_a_segment(small_pages: Pages) -> None:
    """Hazard: a fork of chunks alone has no segment that tells the time, so every time opened it."""
    pages = small_pages
    model, times, _ = _checkpointed_and_deleted(pages)
    pages.engine.snapshot("shop", "kept")
    pages.engine.fork("shop", "live")
    pages.engine.fork("shop", "from-snapshot", at="kept")
    for name in ("live", "from-snapshot"):
        fork = pages.engine.open(name)
        with pytest.raises(SnapshotGone):
            fork.open_snapshot(at=times[1])
        with fork.open_snapshot(at=times[2]) as reader:
            assert_reads(reader, model.newest)
    pages.stop()


@pytest.mark.parametrize("segment", ["kept", "open", "deleted"])
def test_in_rows_without_the_time_of_the_last_commit_it_is_never_guessed_too_early(
    small_pages: Pages, segment: str
) -> None:
    """Hazard: rows of earlier versions have no time, and 0 would mean that the newest version existed at every time."""
    pages = small_pages
    if segment == "deleted":
        model, times, db_id = _checkpointed_and_deleted(pages)
        times[2] = _now(pages)
    else:
        model, store, times = Model(), pages.database(), [_now(pages) - timedelta(minutes=30)]
        write(store, model, {0: image()})
        db_id, times = store.db_id, [*times, _now(pages) - timedelta(milliseconds=1), _now(pages)]
        store.wal.publish()
        if segment == "kept":
            pages.engine.flush(db_id)
    with pages.manifest.read() as txn:
        wal = txn.wal_state(db_id)
    assert wal is not None
    assert wal.last_commit_ms
    pages.manifest.submit([AdvanceWal(db_id, 0, last_applied_lsn=wal.last_applied_lsn, commit_ms=0)]).result()
    if segment != "open":
        pages.reopen()
    published = pages.engine.open_published_at
    for at in times[:2]:
        with pytest.raises(SnapshotGone):
            published("shop", at)
    with published("shop", times[2]) as reader:
        assert_reads(reader, model.newest)
    pages.stop()
