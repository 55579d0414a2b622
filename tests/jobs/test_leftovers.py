"""What killed processes and dropped databases leave behind has an owner that removes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import AccessDenied
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.durable.names import FollowFile
from quire.jobs import leftovers
from quire.jobs.leftovers import sweep_leftovers
from quire.jobs.residency import request_hydrate
from quire.objects.local import TEMPORARY_AGE_SECONDS
from tests.jobs.world import EVICTED, World, drop, is_known


class Killed(BaseException):
    """The process ends here."""


def kill(_: str) -> None:
    raise Killed


def _age(path: Path, world: World, seconds: float = TEMPORARY_AGE_SECONDS + 1) -> None:
    at = world.clock.now_ms() / 1000 - seconds
    os.utime(path, (at, at))


def _below(root: str, part: str) -> set[str]:
    home = Path(root) / part
    return {str(path.relative_to(root)) for path in home.rglob("*") if path.is_file()} if home.exists() else set()


@pytest.mark.parametrize("point", ["jobs.hydrate.begun", "jobs.hydrate.staged"])
def test_the_file_of_a_killed_hydration_goes_when_it_is_old(local: World, point: str) -> None:
    key = local.artifact(EVICTED)
    staged = Path(local.place(key).staged)
    request_hydrate(local.manifest, key)
    with armed(point, kill), pytest.raises(Killed):
        local.worker.drain()
    assert staged.exists()
    _age(staged, local, seconds=10)
    assert sweep_leftovers(local.ctx) == 0, "somebody may be writing it"
    _age(staged, local)
    assert local.upkeep.round(everything=True).leftovers == 1
    assert not staged.exists()
    local.settle()
    assert local.file(key) == local.bodies[key], "the job does it again"


def test_a_hydration_that_goes_on_is_left_alone(local: World) -> None:
    key = local.artifact(EVICTED)
    staged = Path(local.place(key).staged)
    seen = []

    def look(_: str) -> None:
        _age(staged, local, seconds=0)
        seen.append(sweep_leftovers(local.ctx))

    request_hydrate(local.manifest, key)
    with armed("jobs.hydrate.staged", look):
        local.worker.drain()
    assert seen == [0]
    assert local.file(key) == local.bodies[key]


def test_the_follow_position_of_a_dropped_database_goes_with_it(local: World) -> None:
    db_id = local.database()
    local.chunks(db_id, 1)
    position = Path(local.root) / FollowFile(db_id=db_id).path
    position.parent.mkdir(parents=True, exist_ok=True)
    position.write_text("{}")
    drop(local, db_id)
    local.settle()
    assert not is_known(local, db_id)
    assert not position.parent.exists()


@pytest.mark.parametrize("point", ["jobs.delete.planned", "jobs.leftovers.removed", "jobs.delete.emptied"])
def test_a_drop_that_is_killed_at_any_step_leaves_nothing(local: World, point: str) -> None:
    db_id = local.database()
    local.chunks(db_id, 1)
    position = Path(local.root) / FollowFile(db_id=db_id).path
    position.parent.mkdir(parents=True, exist_ok=True)
    position.write_text("{}")
    drop(local, db_id)
    local.clock.advance(1000)
    with armed(point, kill), pytest.raises(Killed):
        local.settle()
    local.clock.advance(1000)
    local.settle()
    assert not is_known(local, db_id)
    assert not position.parent.exists()


def test_what_an_earlier_version_left_of_dropped_databases_goes(local: World) -> None:
    """Its tombstone is gone since long, so no delete job looks there any more."""
    db_id, kept = local.database(), local.database("kept")
    drop(local, db_id)
    local.settle()
    for number in (db_id, kept):
        position = Path(local.root) / FollowFile(db_id=number).path
        position.parent.mkdir(parents=True, exist_ok=True)
        position.write_text("{}")
    notes = Path(local.root) / f"pages/{db_id:08x}/notes.txt"
    notes.write_text("mine")
    assert local.upkeep.round(everything=True).leftovers == 1
    assert _below(local.root, "pages") == {f"pages/{db_id:08x}/notes.txt", f"pages/{kept:08x}/follow.json"}
    notes.unlink()
    local.upkeep.round(everything=True)
    assert not notes.parent.exists()


def test_files_of_a_database_that_the_manifest_never_knew_stay(local: World) -> None:
    """The manifest may have been restored from a copy that is older than the database."""
    local.database()
    newer = Path(local.root) / "pages/00000063/wal/00000001.seg"
    newer.parent.mkdir(parents=True)
    newer.write_bytes(b"commits")
    local.upkeep.round(everything=True)
    assert newer.read_bytes() == b"commits"


def test_what_killed_puts_left_in_staging_goes_when_it_is_old(local: World) -> None:
    staging = Path(local.objects_url) / ".tmp"
    staging.mkdir(parents=True)
    (staging / f"{1:013x}-00").write_bytes(b"old")
    (staging / f"{(1 << 44):013x}-00").write_bytes(b"of the future")
    assert local.upkeep.round(everything=True).leftovers == 1
    assert [path.name for path in staging.iterdir()] == [f"{(1 << 44):013x}-00"]


def test_a_store_with_remote_objects_has_no_staging(world: World) -> None:
    assert sweep_leftovers(world.ctx) == 0


def test_a_directory_that_cannot_be_read_is_reported_and_the_others_are_gone_through(
    local: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round ended there."""
    pages = Path(local.root) / "pages"
    for name in ("00000001", "00000002"):
        cache = pages / name / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "chunk.tmp").write_bytes(b"x")
    listed, events = OsDisk.names, list[tuple[str, object]]()

    def names(disk: OsDisk, folder: str) -> list[str]:
        if folder.endswith("00000001"):
            raise AccessDenied("permission denied", path=folder)
        return listed(disk, folder)

    monkeypatch.setattr(type(local.ctx.disk), "names", names)
    monkeypatch.setattr(leftovers, "emit", lambda _, event, **fields: events.append((event, fields.get("path"))))
    walked = list(leftovers._files(local.ctx.disk, str(pages)))
    assert str(pages / "00000002" / "cache" / "chunk.tmp") in walked
    assert ("leftovers.not_read", str(pages / "00000001")) in events
    sweep_leftovers(local.ctx)
