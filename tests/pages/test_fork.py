"""Forks, and forks of forks: they begin with the version of their origin, share its artifacts, and then diverge."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.errors import NameTaken, UnknownSnapshot
from quire.manifest import tables as t
from quire.manifest.records import WalState
from tests.pages.engine_harness import Model, Pages, assert_reads, image, small_segments, write
from tests.pages.test_wal import rows


@pytest.fixture
def small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def test_a_fork_begins_with_the_version_of_its_origin_and_then_diverges(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
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


def test_forks_of_forks_read_pages_of_all_their_ancestors(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    lineage = [("shop", model, store)]
    for depth in range(4):
        name, its_model, parent = lineage[-1]
        write(parent, its_model, {page: image() for page in range(depth * 3, depth * 3 + 8)})
        if depth == 2:
            pages.checkpoint(parent)
            write(parent, its_model, {0: image()})
        child = f"child-{depth}"
        pages.engine.fork(name, child)
        lineage.append((child, its_model.copy(its_model.newest.lsn), pages.engine.open(child)))
    for name, its_model, parent in lineage:
        write(parent, its_model, {page: image() for page in range(2)})
        with parent.open_snapshot() as reader:
            assert_reads(reader, its_model.newest)
        assert pages.engine.snapshot(name, "kept").anchor_lsn == its_model.newest.lsn
    pages.reopen()
    for name, its_model, _ in lineage:
        with pages.engine.open(name).open_snapshot() as reader:
            assert_reads(reader, its_model.newest)
        assert_reads(pages.engine.open_view(name, "kept"), its_model.newest)
    pages.stop()


def test_a_forks_first_checkpoint_absorbs_and_releases_inherited_segments(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
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
        assert txn.get(t.DB, store.db_id) is None, "the origin is removed completely"
    pages.reopen()
    with pages.engine.open("fork").open_snapshot() as reader:
        assert_reads(reader, fork_model.newest)
    pages.stop()


def test_a_fork_outlives_its_origin_whose_segments_it_still_needs(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(10)})
    fork = pages.engine.open(pages.engine.fork("shop", "fork"))
    pages.manifest.drop_db(store.db_id).result()
    pages.engine.tick(store)
    pages.clock.advance(1000)
    pages.worker().drain()
    with fork.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


def test_a_fork_at_a_snapshot_has_its_version(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(10)})
    snapshot_version = model.newest
    pages.engine.snapshot("shop", "kept")
    write(store, model, {page: image() for page in range(14)})
    pages.checkpoint(store)
    fork = pages.engine.open(pages.engine.fork("shop", "fork", at="kept"))
    with fork.open_snapshot() as reader:
        assert_reads(reader, snapshot_version)
    fork_model = Model(versions=[snapshot_version])
    write(fork, fork_model, {0: image()})
    with fork.open_snapshot() as reader:
        assert_reads(reader, fork_model.newest)
    with pytest.raises(UnknownSnapshot):
        pages.engine.fork("shop", "other", at="nobody")
    with pytest.raises(NameTaken):
        pages.engine.fork("shop", "fork")
    pages.stop()


def test_forks_share_cached_pages_of_shared_objects(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
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
