"""Snapshots, forks and checkpoints through the store: they include everything committed, wherever it is."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import JobState
from quire.testing.manifest import assert_clean

QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))


def image(text: str) -> bytes:
    return text.encode().ljust(4096)


def write(store: quire.Store, page: int, text: str) -> None:
    with store.pages.open("shop").begin() as transaction:
        transaction.write_page(page, image(text))


def test_a_snapshot_and_a_fork_include_the_latest_commit(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        store.create("shop", "pages")
        write(store, 9, "first")
        assert store.snapshot("shop", "one").size_pages == 10
        write(store, 19, "second")
        fork = store.fork("shop", "now")
        store.fork("shop", "then", at="one")
        for name, size in ((fork.name, 20), ("then", 10)):
            with store.pages.open(name).open_snapshot() as reader:
                assert reader.size_pages == size
                assert reader.read_page(9) == image("first")
        assert_clean(store.manifest)


def test_the_size_of_a_snapshot_is_that_of_its_anchor(tmp_path: Path) -> None:
    """Hazard: the manifest has the size of the newest published version, and the anchor may be an older one."""
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        store.create("shop", "pages")
        shop = store.pages.open("shop")
        write(store, 9, "sealed")
        store.pages.flush(shop.db_id)
        write(store, 19, "in the open segment")
        shop.wal.sync()
        shop.wal.publish()
        info = store.manifest.snapshots.publish("shop", "sealed")
        assert (info.anchor_lsn, info.size_pages) == (10, 10)
        assert_clean(store.manifest)


def test_a_checkpoint_absorbs_commits_of_a_crashed_owner(tmp_path: Path) -> None:
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        store.create("shop", "pages")
        write(store, 0, "kept")
        store.pages.open("shop").wal.failure = quire.StoreUnusable("as if the process had been killed")
    with quire.open(tmp_path / "store", settings=QUIET) as store:
        job = store.checkpoint("shop")
        assert (job.state, job.result["pages"]) == (JobState.SUCCEEDED, 1)
        assert store.merge("shop").state is JobState.SUCCEEDED
        with store.pages.open("shop").open_snapshot() as reader:
            assert reader.read_page(0) == image("kept")
        assert_clean(store.manifest)
