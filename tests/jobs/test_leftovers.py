"""Files that killed processes and dropped databases leave behind are removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import AccessDenied
from quire.durable.failpoints import armed
from quire.durable.files import Disk, OsDisk
from quire.durable.names import FollowFile
from quire.jobs import leftovers
from quire.jobs.leftovers import sweep_leftovers
from quire.jobs.residency import request_hydrate
from quire.manifest.ops.base import Counter
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.records import DbKind, DbRecord
from quire.objects.local import TEMPORARY_AGE_SECONDS
from tests.jobs.job_store import EVICTED, JobStore, drop, is_known


class Killed(BaseException):
    """The process ends here."""


def kill(_: str) -> None:
    raise Killed


def _age(path: Path, job_store: JobStore, seconds: float = TEMPORARY_AGE_SECONDS + 1) -> None:
    at = job_store.clock.now_ms() / 1000 - seconds
    os.utime(path, (at, at))


def _files_below(root: str, part: str) -> set[str]:
    directory = Path(root) / part
    return (
        {str(path.relative_to(root)) for path in directory.rglob("*") if path.is_file()}
        if directory.exists()
        else set()
    )


@pytest.mark.parametrize("point", ["jobs.hydrate.begun", "jobs.hydrate.staged"])
def test_the_file_of_a_killed_hydration_is_removed_when_it_is_old(local_store: JobStore, point: str) -> None:
    key = local_store.artifact(EVICTED)
    staged = Path(local_store.location(key).staged)
    request_hydrate(local_store.manifest, key)
    with armed(point, kill), pytest.raises(Killed):
        local_store.worker.drain()
    assert staged.exists()
    _age(staged, local_store, seconds=10)
    assert sweep_leftovers(local_store.ctx) == 0, "a process may still be writing it"
    _age(staged, local_store)
    assert local_store.upkeep.round(everything=True).leftovers == 1
    assert not staged.exists()
    local_store.settle()
    assert local_store.file(key) == local_store.bodies[key], "the job hydrates it again"


def test_the_file_of_a_running_hydration_is_not_removed(local_store: JobStore) -> None:
    key = local_store.artifact(EVICTED)
    staged = Path(local_store.location(key).staged)
    removed_counts = []

    def sweep(_: str) -> None:
        _age(staged, local_store, seconds=0)
        removed_counts.append(sweep_leftovers(local_store.ctx))

    request_hydrate(local_store.manifest, key)
    with armed("jobs.hydrate.staged", sweep):
        local_store.worker.drain()
    assert removed_counts == [0]
    assert local_store.file(key) == local_store.bodies[key]


def test_the_follow_position_of_a_dropped_database_is_removed(local_store: JobStore) -> None:
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    position = Path(local_store.root) / FollowFile(db_id=db_id).path
    position.parent.mkdir(parents=True, exist_ok=True)
    position.write_text("{}")
    drop(local_store, db_id)
    local_store.settle()
    assert not is_known(local_store, db_id)
    assert not position.parent.exists()


@pytest.mark.parametrize("point", ["jobs.delete.planned", "jobs.leftovers.removed", "jobs.delete.emptied"])
def test_a_drop_that_is_killed_at_any_step_leaves_nothing(local_store: JobStore, point: str) -> None:
    db_id = local_store.database()
    local_store.chunks(db_id, 1)
    position = Path(local_store.root) / FollowFile(db_id=db_id).path
    position.parent.mkdir(parents=True, exist_ok=True)
    position.write_text("{}")
    drop(local_store, db_id)
    local_store.clock.advance(1000)
    with armed(point, kill), pytest.raises(Killed):
        local_store.settle()
    local_store.clock.advance(1000)
    local_store.settle()
    assert not is_known(local_store, db_id)
    assert not position.parent.exists()


def test_files_that_earlier_versions_left_of_dropped_databases_are_removed(local_store: JobStore) -> None:
    """Its tombstone is gone, so no delete job cleans its directory."""
    db_id, kept_id = local_store.database(), local_store.database("kept")
    drop(local_store, db_id)
    local_store.settle()
    for number in (db_id, kept_id):
        position = Path(local_store.root) / FollowFile(db_id=number).path
        position.parent.mkdir(parents=True, exist_ok=True)
        position.write_text("{}")
    notes = Path(local_store.root) / f"pages/{db_id:08x}/notes.txt"
    notes.write_text("mine")
    assert local_store.upkeep.round(everything=True).leftovers == 1
    assert _files_below(local_store.root, "pages") == {
        f"pages/{db_id:08x}/notes.txt",
        f"pages/{kept_id:08x}/follow.json",
    }
    notes.unlink()
    local_store.upkeep.round(everything=True)
    assert not notes.parent.exists()


def test_files_of_a_database_that_the_manifest_never_had_are_kept(local_store: JobStore) -> None:
    """The manifest may have been restored from a copy that is older than the database."""
    local_store.database()
    newer = Path(local_store.root) / "pages/00000063/wal/00000001.seg"
    newer.parent.mkdir(parents=True)
    newer.write_bytes(b"commits")
    local_store.upkeep.round(everything=True)
    assert newer.read_bytes() == b"commits"


def test_files_of_a_database_that_is_created_during_the_sweep_are_kept(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: ids are allocated before their commits, which may come in another order. A database with a low id that committed
    between the sweep's look at the rows and its listing of the directories lost its segments."""
    manifest = local_store.manifest
    db_id = manifest.allocate(Counter.DB)
    assert local_store.database("other") > db_id
    pages = Path(local_store.root) / "pages"
    pages.mkdir(exist_ok=True)
    segment = pages / f"{db_id:08x}/wal/00000001.seg"
    original, listings = leftovers._names, list[str]()

    def create_first(disk: Disk, folder: str) -> list[str]:
        listings.append(folder)
        if listings.count(str(pages)) == 2 and not segment.exists():  # the first listing looks for temporary files
            manifest.submit([RegisterDb(db_id, DbRecord("shop", DbKind.PAGES, manifest.clock.now_ms()))]).result()
            segment.parent.mkdir(parents=True)
            segment.write_bytes(b"commits")
        return original(disk, folder)

    monkeypatch.setattr(leftovers, "_names", create_first)
    sweep_leftovers(local_store.ctx)
    assert segment.read_bytes() == b"commits"
    segment.unlink()


def test_staging_files_of_killed_puts_are_removed_when_they_are_old(local_store: JobStore) -> None:
    staging = Path(local_store.objects_url) / ".tmp"
    staging.mkdir(parents=True)
    (staging / f"{1:013x}-00").write_bytes(b"old")
    (staging / f"{(1 << 44):013x}-00").write_bytes(b"of the future")
    assert local_store.upkeep.round(everything=True).leftovers == 1
    assert [path.name for path in staging.iterdir()] == [f"{(1 << 44):013x}-00"]


def test_a_store_with_remote_objects_has_no_staging(job_store: JobStore) -> None:
    assert sweep_leftovers(job_store.ctx) == 0


def test_an_unreadable_directory_is_reported_and_the_others_are_swept(
    local_store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the maintenance round."""
    pages = Path(local_store.root) / "pages"
    for name in ("00000001", "00000002"):
        cache = pages / name / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "chunk.tmp").write_bytes(b"x")
    original, events = OsDisk.names, list[tuple[str, object]]()

    def names(disk: OsDisk, folder: str) -> list[str]:
        if folder.endswith("00000001"):
            raise AccessDenied("permission denied", path=folder)
        return original(disk, folder)

    monkeypatch.setattr(type(local_store.ctx.disk), "names", names)
    monkeypatch.setattr(leftovers, "emit", lambda _, event, **fields: events.append((event, fields.get("path"))))
    paths = list(leftovers._files(local_store.ctx.disk, str(pages)))
    assert str(pages / "00000002" / "cache" / "chunk.tmp") in paths
    assert ("leftovers.not_read", str(pages / "00000001")) in events
    sweep_leftovers(local_store.ctx)
