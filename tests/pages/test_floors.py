"""The floor: the minimum of memory, rows and files, never above what is published, never below what was granted."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import SnapshotGone
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.ops.local import PutReader
from quire.pages.snapshot import Snapshot
from quire.pages.view import ViewReader
from tests.pages.engine_harness import Model, Pages, assert_reads, image, small_segments, write


def row(pages: Pages, db_id: int) -> tuple[int, int]:
    with pages.manifest.read() as txn:
        record = txn.get(t.SNAPSHOT_FLOOR, db_id)
    assert record is not None
    return record.min_snapshot_lsn, record.writer_high_lsn


def test_the_floor_is_the_lowest_of_memory_rows_and_files(pages: Pages) -> None:
    store, model = pages.database(), Model()
    opened: list[tuple[int, object]] = []
    for number in range(3):
        lsn = write(store, model, {0: image()}).lsn
        store.wal.publish()
        if number == 0:
            opened.append((lsn, pages.engine.open_published("shop")))
        elif number == 1:
            opened.append((lsn, store.open_snapshot()))
        else:
            lease = pages.engine.lease_reader("shop")
            assert lease.lsn == lsn
    write(store, model, {0: image()})
    assert pages.engine.floor(store.db_id) == opened[0][0]
    for number, (_, reader) in enumerate(opened):
        assert isinstance(reader, Snapshot)
        reader.close()
        assert pages.engine.floor(store.db_id) == (opened[1][0] if number == 0 else lease.lsn)
    pages.engine.close_reader("shop", lease.reader_id)
    assert pages.engine.floor(store.db_id) == model.newest.lsn == row(pages, store.db_id)[0]


def test_the_floor_is_never_above_what_is_published(pages: Pages) -> None:
    """Otherwise a reader in another process could find a row that no published version satisfies."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    assert pages.engine.floor(store.db_id) == model.newest.lsn, "computing the floor publishes first"
    store.wal.abandon(RuntimeError("a doubtful sync"))  # type: ignore[arg-type]  # any failure
    with pages.manifest.read() as txn:
        wal = txn.wal_state(store.db_id)
    assert wal is not None
    assert pages.engine.floor(store.db_id) == wal.last_applied_lsn


def test_the_row_never_falls_not_even_with_the_next_owner(pages: Pages) -> None:
    store, model = pages.database(), Model()
    first = write(store, model, {0: image()}).lsn
    write(store, model, {0: image()})
    high = pages.engine.floor(store.db_id)
    assert row(pages, store.db_id) == (high, high)
    pages.manifest.submit([PutReader(store.db_id, 5, first, pages.clock.now_ms() + 10**6)]).result()
    pages.reopen()
    store = pages.database()
    write(store, model, {0: image()})
    assert pages.engine.floor(store.db_id) == first
    assert row(pages, store.db_id) == (high, model.newest.lsn)


def test_the_row_never_falls_under_concurrent_requests(pages: Pages) -> None:
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    pages.engine.floor(store.db_id)
    stop, floors = threading.Event(), list[int]()

    def compute_floor() -> None:
        while not stop.is_set():
            pages.engine.floor(store.db_id)

    threads = [threading.Thread(target=compute_floor) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            write(store, model, {0: image()})
            store.wal.publish()
            floors.append(row(pages, store.db_id)[0])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert floors == sorted(floors)
    assert pages.engine.floor(store.db_id) == model.newest.lsn


def test_no_reader_opens_below_what_a_stored_plan_covers(pages: Pages) -> None:
    """P10: the next owner runs a stored plan again, whatever readers exist by then."""
    store, model = pages.database(), Model()
    first = write(store, model, {0: image()}).lsn
    write(store, model, {0: image()})
    covered = model.newest.lsn
    pages.engine.flush(store.db_id)
    write(store, model, {0: image()})
    hold = store.readers.open(covered, ttl_seconds=None)
    pages.engine.flush(store.db_id)
    with armed("jobs.checkpoint.planned", "raise:EIO"):
        pages.checkpoint(store)
    store.readers.close(hold.reader_id)
    with pages.manifest.read() as txn:
        assert [plan.covered_lsn for _, plan in txn.scan(t.CHECKPOINT_PLAN, store.db_id)] == [covered]
    pages.reopen()
    store = pages.database()
    with pytest.raises(SnapshotGone):
        store.readers.open(first)
    with store.open_snapshot(at=covered) as reader:
        assert reader.lsn == covered


def _random_steps(base: Path, rng: random.Random, steps: int) -> None:
    """Readers of all three kinds, checkpoints and crashes in any order; every reader always sees its version."""
    pages = Pages(base)
    store, model = pages.database(), Model()
    readers: list[tuple[Snapshot, int]] = []
    clients: list[tuple[int, int]] = []
    for _ in range(steps):
        dice = rng.randrange(9)
        if dice < 3:
            write(store, model, {rng.randrange(12): image() for _ in range(rng.randint(1, 7))})
        elif dice == 3:
            opened: Snapshot = pages.engine.open_published("shop") if rng.random() < 0.6 else store.open_snapshot()
            readers.append((opened, opened.lsn))
        elif dice == 4 and len(clients) < 3:
            lease = pages.engine.lease_reader("shop")
            clients.append((lease.reader_id, lease.lsn))
        elif dice == 5 and readers:
            readers.pop(rng.randrange(len(readers)))[0].close()
        elif dice == 6:
            pages.checkpoint(store)
            pages.clock.advance(1)
        elif dice == 7:
            store.wal.publish()
            with suppress(SnapshotGone):
                published = pages.engine.open_published_at("shop", rng.choice(model.versions).lsn)
                if not isinstance(published, ViewReader):
                    readers.append((published, published.lsn))
        elif rng.random() < 0.3:
            for reader, _ in readers:
                reader.close()
            readers.clear()
            pages.crash()
            store = pages.database()
        pages.engine.cache._turn(10**9)
        for reader, lsn in readers:
            assert_reads(reader, model.at(lsn))
        for reader_id, lsn in clients:
            pages.engine.renew_reader("shop", reader_id)
            assert_reads(pages.engine.read_leased("shop", reader_id), model.at(lsn))
    for reader, _ in readers:
        reader.close()
    pages.stop()


@settings(max_examples=8)
@given(st.randoms(use_true_random=False))
def test_no_order_of_readers_and_checkpoints_loses_a_version(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_segments(patch, frames=5)
        _random_steps(tmp_path_factory.mktemp("floors"), rng, 30)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_long_no_order_of_readers_and_checkpoints_loses_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    small_segments(monkeypatch, frames=5)
    _random_steps(tmp_path, random.Random(seed), 120)
