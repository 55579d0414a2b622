"""The commands takeover and objects moved, and what the others say about who owns the objects."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from tests.cli.conftest import Run
from tests.store.test_object_location import edit
from tests.store.test_write_permission import put_some

QUIET = MaintenanceSettings(enabled=False)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A store with an object outside its directory."""
    settings = StoreSettings(object_store=str(tmp_path / "bucket"), maintenance=QUIET)
    with quire.open(tmp_path / "shop", settings=settings) as store:
        put_some(store, 1)
    return tmp_path / "shop"


@pytest.fixture
def copy(shop: Path, tmp_path: Path) -> Path:
    """A copy that is behind, and knows it."""
    shutil.copytree(shop, tmp_path / "copy")
    with quire.open(shop) as store:
        put_some(store, 2)
    with quire.open(tmp_path / "copy") as store, pytest.raises(quire.StoreFenced):
        put_some(store, 3)
    return tmp_path / "copy"


def test_a_copy_that_is_behind_is_told_everywhere(run: Run, copy: Path) -> None:
    ended = run("create", "more", at=copy)
    assert ended.code == 9
    assert "another owner has claimed the store's objects" in ended.err
    assert "`quire takeover`" in ended.err
    assert run("info", "--json", at=copy).data["owner_state"] == "fenced"
    assert "epoch 1, session 1, fenced" in run("info", at=copy).out
    rows = {row["check"]: row for row in run("doctor", "--json", at=copy).data}
    assert (rows["session"]["state"], "quire takeover" in rows["session"]["next"]) == ("fail", True)
    assert run("ls", at=copy).code == 0, "looking goes on"


def test_doctor_finds_a_newer_owner_before_a_put_does(run: Run, shop: Path, tmp_path: Path) -> None:
    shutil.copytree(shop, tmp_path / "copy")
    with quire.open(shop) as store:
        put_some(store, 2)
    rows = {row["check"]: row for row in run("doctor", "--json", at=tmp_path / "copy").data}
    assert rows["session"]["state"] == "fail"
    assert "00000001.00000002" in rows["session"]["detail"]
    rows = {row["check"]: row for row in run("doctor", "--json", at=shop).data}
    assert rows["session"]["state"] == "ok"
    assert "session 2, confirmed" in rows["session"]["detail"]


def test_a_takeover_asks_and_says_what_came_of_it(run: Run, copy: Path, shop: Path, tmp_path: Path) -> None:
    refused = run("takeover", at=copy, answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was taken over\n")
    ended = run("takeover", "--yes", "--json", at=copy)
    assert ended.data == {"taken_over": True, "owner_epoch": 2, "object_store": str(tmp_path / "bucket")}
    assert run("create", "more", at=copy).code == 0
    with quire.open(shop) as store, pytest.raises(quire.StoreFenced):
        put_some(store, 4)
    assert run("create", "more", at=shop).code == 9


def test_a_store_with_its_own_objects_has_nothing_to_take_over(run: Run, path: Path) -> None:
    ended = run("takeover", "--yes", at=path)
    assert ended.code == 2
    assert "nothing to take over" in ended.err
    assert "objects are local to the store" in run("info", at=path).out
    rows = {row["check"]: row for row in run("doctor", "--json", at=path).data}
    assert rows["session"]["state"] == "ok"


def test_a_takeover_waits_for_the_directorys_own_owner(run: Run, shop: Path) -> None:
    with quire.open(shop):
        ended = run("takeover", "--yes", at=shop)
    assert ended.code == 5
    assert "stop that process first" in ended.err


def test_moved_objects_are_looked_for(run: Run, shop: Path, tmp_path: Path) -> None:
    edit(shop, str(tmp_path / "new"))
    ended = run("create", "more", at=shop)
    assert ended.code == 8
    assert "quire objects moved" in ended.err
    assert run("objects", "moved", "--yes", at=shop).code == 3
    assert run("objects", "moved", at=shop, answer="n\n").code == 1
    shutil.copytree(tmp_path / "bucket", tmp_path / "new")
    ended = run("objects", "moved", "--yes", "--json", at=shop)
    assert ended.data == {"moved": True, "object_store": str(tmp_path / "new"), "looked_for": 1}
    assert run("create", "more", at=shop).code == 0
