"""A database that is closed because its rows break a rule keeps every byte: it is not known which of them are garbage
(decision 028)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.ids import ArtifactKind
from quire.core.settings import MaintenanceSettings, StoreSettings, StreamSettings
from quire.manifest import tables as t
from quire.manifest.ops.local import FollowSqliteFile
from quire.manifest.records import JobKind, JobState
from quire.store.info import StoreReader
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.manifest.test_check import Vandal

QUIET = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False), stream=StreamSettings(segment_bytes=4096, upload=True)
)
KINDS = ("sqlite", "stream", "kv")
YEAR = 365 * 86_400.0


def flip(vandal: Vandal, table: t.Table[Any], *key: Any) -> None:
    packed = table.key.pack(*key)
    raw = vandal.txn.get(packed, db=vandal.env.handles[table.name])
    vandal.put(table, raw[:-1] + bytes([raw[-1] ^ 1]), *key)


def lose_rows(vandal: Vandal, db_id: int) -> None:
    """Remove the catalog row and the reference count of one chunk or segment: only its holders refer to its object."""
    for (origin, kind, number, generation, delta), count in list(rows(vandal, t.GC_REFCOUNTS)):
        if origin == db_id and kind in (ArtifactKind.BASE, ArtifactKind.WAL) and count.in_use:
            vandal.delete(t.GC_REFCOUNTS, origin, kind, number, generation, delta)
            if kind == ArtifactKind.BASE:
                vandal.delete(t.CHUNK_CATALOG, origin, number, generation)
            else:
                vandal.delete(t.WAL_CATALOG, origin, number)
            return
    vandal.delete(t.WAL_STATE, db_id, 0)  # a key-value set has no artifacts


def rows(vandal: Vandal, table: t.Table[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    with vandal.txn.cursor(db=vandal.env.handles[table.name]) as cursor:
        for key, raw in cursor:
            yield table.key.unpack(key), table.rows.decode(key, raw)


DAMAGES: dict[str, Callable[[Vandal, int], None]] = {
    "its row is gone": lambda vandal, db_id: vandal.delete(t.DB, db_id),
    "a bit of its row is flipped": lambda vandal, db_id: flip(vandal, t.DB, db_id),
    "its WAL state is gone": lambda vandal, db_id: vandal.delete(t.WAL_STATE, db_id, 0),
    "its name is gone": lambda vandal, _: vandal.delete(t.DB_NAMES, "closed"),
    "the rows of an artifact are gone": lose_rows,
}


def open_store(root: Path, clock: ManualClock) -> Store:
    return quire.open(root / "store", settings=QUIET, clock=clock)


def fill(store: Store, kind: str, name: str) -> int:
    """Create a database with files, objects if its kind has them, and a version that a snapshot holds; returns its
    id."""
    if kind == "sqlite":
        with store.sqlite(name, create=True) as connection:
            connection.execute("create table t (x)")
            connection.execute("insert into t values (randomblob(100000))")
        store.checkpoint(name)
    elif kind == "stream":
        stream = store.stream(name, create=True)
        for number in range(200):
            stream.append(b"%04d" % number * 40)
        store.streams.tick()
    else:
        kv = store.kv(name, create=True)
        kv.put(b"key", b"value" * 1000)
        kv.flush()
    store.snapshot(name, "first")
    return store.database(name).db_id


def files(root: Path) -> dict[str, int]:
    """Sizes of all stored files, without the manifest's own files and those that only describe running processes."""
    sizes = {}
    for folder, _, names in os.walk(root / "store"):
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), root / "store")
            if path.split("/")[0] in ("pages", "streams", "lsm", "objects") and "/readers/" not in path:
                sizes[path] = os.path.getsize(os.path.join(folder, name))
    return sizes


def clean_up(store: Store, clock: ManualClock) -> None:
    """Run everything that deletes data, long after every grace period."""
    for _ in range(3):
        clock.advance(YEAR)
        store.maintain()
        store.streams.sweep()
        store.kvs.sweep()
    assert store.heavy.sweep(delete=True, grace_seconds=-20 * YEAR).state is JobState.SUCCEEDED


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_closed_database_is_deleted_and_others_are_cleaned_up(
    tmp_path: Path, kind: str, damage: str
) -> None:
    clock = ManualClock(1_750_000_000_000)
    with open_store(tmp_path, clock) as store:
        closed = fill(store, kind, "closed")
        before = files(tmp_path)
        assert any(f"{closed:08x}" in path for path in before)
        other = fill(store, "sqlite", "other")
    vandal = Vandal(str(tmp_path / "store" / "manifest.lmdb"))
    DAMAGES[damage](vandal, closed)
    vandal.done()
    with open_store(tmp_path, clock) as store:
        with store.manifest.read() as txn:
            assert txn.refused_databases() - {0} == {
                closed
            }  # 0: the count of a lost chunk's namespace, which is too high
        store.drop("other", snapshots=True)
        clean_up(store, clock)
        with store.manifest.read() as txn:
            assert txn.database(other) is None, "a closed database does not stop deletions of others"
    after = files(tmp_path)
    assert [path for path in before if path not in after] == []
    assert [path for path in after if path.startswith(f"pages/{other:08x}/")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_and_closed_database_keeps_its_bytes_and_its_job_explains_why(tmp_path: Path, kind: str) -> None:
    """The counts that a delete job relies on break a rule: it fails with the rule and the repair, and other jobs
    continue."""
    clock = ManualClock(1_750_000_000_000)
    with open_store(tmp_path, clock) as store:
        closed = fill(store, kind, "closed")
        store.manifest.drop_db(closed, snapshots=True).result()  # killed before the engine's sweep
        before = files(tmp_path)
    vandal = Vandal(str(tmp_path / "store" / "manifest.lmdb"))
    vandal.delete(t.WAL_STATE, closed, 0)
    vandal.done()
    with open_store(tmp_path, clock) as store:
        clean_up(store, clock)
        (job,) = [job for job in store.manifest.jobs.jobs() if job.kind is JobKind.DELETE and job.db_id == closed]
        assert "the database is closed" in job.record.error
        assert "quire manifest check" in job.record.error
    after = files(tmp_path)
    assert [path for path in before if path not in after] == []


def test_deletions_that_lost_their_jobs_continue_beside_a_closed_database(tmp_path: Path) -> None:
    """The single commit that creates the delete jobs of all databases failed for all of them."""
    clock = ManualClock(1_750_000_000_000)
    with open_store(tmp_path, clock) as store:
        closed, other = (fill(store, "sqlite", name) for name in ("closed", "other"))
        for db_id in (closed, other):
            store.manifest.drop_db(db_id, snapshots=True).result()
        for job in store.manifest.jobs.jobs(JobState.PENDING):
            store.manifest.jobs.cancel(job.job_id)
    vandal = Vandal(str(tmp_path / "store" / "manifest.lmdb"))
    vandal.delete(t.WAL_STATE, closed, 0)
    vandal.done()
    with open_store(tmp_path, clock) as store:
        clean_up(store, clock)
        with store.manifest.read() as txn:
            assert txn.database(closed) is not None
            assert txn.database(other) is None


@pytest.mark.parametrize("table", [t.DB, t.FOLLOWED_FILES], ids=lambda table: table.name)
def test_a_reader_lists_the_other_databases_and_names_the_damaged_one(
    tmp_path: Path, table: t.Table[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock(1_750_000_000_000)
    with open_store(tmp_path, clock) as store:
        closed = store.create("closed", "pages").db_id
        store.manifest.submit([FollowSqliteFile(closed, "app.db", 1000)]).result()
        store.fork("closed", "child")
    vandal = Vandal(str(tmp_path / "store" / "manifest.lmdb"))
    flip(vandal, table, closed)
    vandal.done()
    openers: list[Callable[[str], StoreReader | Store]] = [StoreReader, lambda path: quire.open(path, "r")]
    for opener in openers:
        with opener(str(tmp_path / "store")) as reader:
            assert [info.name for info in reader.databases()] == ["child"]
            assert reader.info().databases["pages"] == (1 if table is t.DB else 2)
        output = capsys.readouterr().err
        assert "database.row_damaged" in output
        assert "name='closed'" in output
        assert "quire manifest check" in output
    with open_store(tmp_path, clock) as store:
        assert [info.name for info in store.databases()] == ["child"]
