"""Mirrors of stores with damaged rows or invalid jobs: the target keeps what it has of a database that cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import ManifestDamaged
from quire.manifest import tables as t
from quire.manifest.records import JobKind, JobState
from quire.store.store import Store
from quire.testing.manifest import assert_clean
from tests.jobs.mirrored_store import FORMATS, MirroredStore, fill, quiet_settings, read_target
from tests.jobs.test_damaged_rows import damaged


@pytest.fixture
def parquet_mirror(tmp_path: Path) -> MirroredStore:
    return MirroredStore(tmp_path, "parquet")


@pytest.fixture
def store(parquet_mirror: MirroredStore) -> Iterator[Store]:
    with parquet_mirror.open() as store:
        yield store
        assert_clean(store.manifest)


def row_of(store: Store, name: str) -> tuple[int, bytes, bytes]:
    """The id of a database, and key and value of its row."""
    with store.manifest.read() as txn:
        db_id = txn.database_id(name)
        return db_id, *next(iter(txn.raw_scan(t.DB, db_id)))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_load_removes_no_rows_of_a_damaged_database(tmp_path: Path, store: Store, kind: str) -> None:
    """Hazard: a database that was closed because it breaks a rule counted as dropped in a full load, which removed the last
    readable copy of its rows."""
    mirror = MirroredStore(tmp_path, kind)
    fill(store, "tenant-1")
    fill(store, "tenant-2")
    mirror.define(store)
    mirror.run(store)
    before = read_target(mirror.root, mirror.kind)
    closed = ("database", row_of(store, "tenant-1")[0])
    store.manifest.env.refused[closed] = ("", "")
    with pytest.raises(ManifestDamaged, match="tenant-1"):
        store.mirrors.run("lake", full=True)
    assert read_target(mirror.root, mirror.kind) == before
    assert not store.mirrors.run("lake").full, "increments of the others continue"
    del store.manifest.env.refused[closed]
    assert mirror.run(store, full=True).rows_written == 8


def test_a_first_load_leaves_out_a_damaged_database(parquet_mirror: MirroredStore, store: Store) -> None:
    fill(store, "tenant-1")
    fill(store, "tenant-2")
    parquet_mirror.define(store)
    closed = ("database", row_of(store, "tenant-1")[0])
    store.manifest.env.refused[closed] = ("", "")
    assert store.mirrors.run("lake").rows_written == 4
    del store.manifest.env.refused[closed]
    parquet_mirror.run(store)


def test_a_database_whose_row_cannot_be_read_keeps_its_rows_in_the_target(
    parquet_mirror: MirroredStore, store: Store
) -> None:
    """Hazard: a database whose row was damaged counted as dropped in every run, which removed its rows from the target."""
    fill(store, "tenant-1")
    fill(store, "tenant-2")
    parquet_mirror.define(store)
    parquet_mirror.run(store)
    before = read_target(parquet_mirror.root, parquet_mirror.kind)
    _, key, raw = row_of(store, "tenant-1")
    with damaged(store.manifest, t.DB, key, raw[:-1] + bytes([raw[-1] ^ 1])):
        result = store.mirrors.run("lake")
        assert (result.databases, result.dropped, store.mirrors.status("lake").dropped) == (2, 0, 0)
        assert read_target(parquet_mirror.root, parquet_mirror.kind) == before
        with pytest.raises(ManifestDamaged, match="tenant-1"):
            store.mirrors.run("lake", full=True)
    parquet_mirror.run(store)


@pytest.mark.parametrize("payload", [None, ["lake"], {"mirror": 7}])
def test_a_mirror_job_that_names_no_mirror_disturbs_no_other(tmp_path: Path, payload: Any) -> None:
    """Hazard: while the queue had such a job, outstanding or failed, `store.info()`, every list of mirrors and each round of
    maintenance ended with a decoder's error."""
    with quire.open(tmp_path / "other", settings=quiet_settings()) as store:
        fill(store, "tenant-1")
        store.mirrors.create("lake", "tenant-*", "orders", f"parquet:{tmp_path}/lake", every_seconds=600)
        job_id = store.manifest.jobs.enqueue(JobKind.MIRROR, 0, payload)
        assert store.upkeep.round().mirrors == 1
        store.worker.drain()
        assert store.manifest.jobs.get(job_id).state is JobState.FAILED_PERMANENT
        (status,) = store.info().mirrors
        assert (status.rows, status.failures) == (4, 0)
