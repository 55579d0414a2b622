"""Forks, and forks of forks: they begin as their origin was, share everything, and go their own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.errors import NameTaken, UnknownSnapshot
from quire.manifest import tables as t
from quire.manifest.records import WalState
from tests.pages.test_wal import rows
from tests.pages.world import Model, Pages, assert_reads, image, small_segments, write


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def test_a_fork_begins_as_its_origin_is_and_each_goes_its_own_way(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(10)})
    fork_model = model.copy(model.newest.lsn)
    fork = pages.engine.open(pages.engine.fork("shop", "fork"))
    write(store, model, {0: image(), 1: image()})
    write(fork, fork_model, {1: image(), 2: image(), 12: image()})
    for _ in range(2):
        with store.open_snapshot() as reader:
            assert_reads(reader, model.newest)
        with fork.open_snapshot() as reader:
            assert_reads(reader, fork_model.newest)
        pages.reopen()
        store, fork = pages.database(), pages.engine.open("fork")
    pages.stop()


def test_forks_of_forks_read_what_each_of_their_ancestors_left(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    line = [("shop", model, store)]
    for depth in range(4):
        name, of, parent = line[-1]
        write(parent, of, {page: image() for page in range(depth * 3, depth * 3 + 8)})
        if depth == 2:
            pages.checkpoint(parent)
            write(parent, of, {0: image()})
        child = f"child-{depth}"
        pages.engine.fork(name, child)
        line.append((child, of.copy(of.newest.lsn), pages.engine.open(child)))
    for name, of, parent in line:
        write(parent, of, {page: image() for page in range(2)})
        with parent.open_snapshot() as reader:
            assert_reads(reader, of.newest)
        assert pages.engine.snapshot(name, "kept").anchor_lsn == of.newest.lsn
    pages.reopen()
    for name, of, _ in line:
        with pages.engine.open(name).open_snapshot() as reader:
            assert_reads(reader, of.newest)
        assert_reads(pages.engine.open_view(name, "kept"), of.newest)
    pages.stop()


def test_a_forks_first_checkpoint_absorbs_what_it_inherited_and_lets_it_go(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(10)})
    fork, fork_model = pages.engine.open(pages.engine.fork("shop", "fork")), model.copy(model.newest.lsn)
    assert {row.origin_db_id for row in rows(pages, fork.db_id).values()} == {store.db_id}
    write(fork, fork_model, {3: image()})
    pages.checkpoint(fork)
    assert all(row.state is WalState.TRUNCATED for row in rows(pages, fork.db_id).values())
    with fork.open_snapshot() as reader:
        assert_reads(reader, fork_model.newest)
    pages.manifest.drop_db(store.db_id).result()
    pages.clock.advance(1000)
    pages.engine.tick(store)
    pages.worker().drain()
    with pages.manifest.read() as txn:
        assert txn.get(t.DB, store.db_id) is None, "nothing of the origin is left"
    pages.reopen()
    with pages.engine.open("fork").open_snapshot() as reader:
        assert_reads(reader, fork_model.newest)
    pages.stop()


def test_a_fork_outlives_its_origin_whose_segments_it_still_needs(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(10)})
    fork = pages.engine.open(pages.engine.fork("shop", "fork"))
    pages.manifest.drop_db(store.db_id).result()
    pages.engine.tick(store)
    pages.clock.advance(1000)
    pages.worker().drain()
    with fork.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_fork_at_a_snapshot_is_as_that_was(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(10)})
    kept = model.newest
    pages.engine.snapshot("shop", "kept")
    write(store, model, {page: image() for page in range(14)})
    pages.checkpoint(store)
    fork = pages.engine.open(pages.engine.fork("shop", "fork", at="kept"))
    with fork.open_snapshot() as reader:
        assert_reads(reader, kept)
    own = Model(versions=[kept])
    write(fork, own, {0: image()})
    with fork.open_snapshot() as reader:
        assert_reads(reader, own.newest)
    with pytest.raises(UnknownSnapshot):
        pages.engine.fork("shop", "other", at="nobody")
    with pytest.raises(NameTaken):
        pages.engine.fork("shop", "fork")
    pages.stop()


def test_forks_share_cached_pages_of_shared_objects(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    fork = pages.engine.open(pages.engine.fork("shop", "fork"))
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    misses = pages.engine.cache.misses
    with fork.open_snapshot() as reader:
        for page in range(20):
            assert reader.read_page(page) == model.newest.page(page)
    assert pages.engine.cache.misses == misses
    pages.stop()
