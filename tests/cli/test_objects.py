"""The commands takeover and objects moved, and what other commands report about the owner of the objects."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from tests.cli.conftest import Run
from tests.store.test_object_location import edit
from tests.store.test_write_permission import insert_and_checkpoint

QUIET = MaintenanceSettings(enabled=False)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A store whose object store is outside its directory."""
    settings = StoreSettings(object_store=str(tmp_path / "bucket"), maintenance=QUIET)
    with quire.open(tmp_path / "shop", settings=settings) as store:
        insert_and_checkpoint(store, 1)
    return tmp_path / "shop"


@pytest.fixture
def copy(shop: Path, tmp_path: Path) -> Path:
    """A stale copy that knows that it is fenced."""
    shutil.copytree(shop, tmp_path / "copy")
    with quire.open(shop) as store:
        insert_and_checkpoint(store, 2)
    with quire.open(tmp_path / "copy") as store, pytest.raises(quire.StoreFenced):
        insert_and_checkpoint(store, 3)
    return tmp_path / "copy"


def test_a_fenced_copy_is_reported_everywhere(run: Run, copy: Path) -> None:
    result = run("create", "more", at=copy)
    assert result.code == 9
    assert "another owner has claimed the store's objects" in result.err
    assert "`quire takeover`" in result.err
    assert run("info", "--json", at=copy).data["owner_state"] == "fenced"
    assert "epoch 1, session 1, fenced" in run("info", at=copy).out
    rows = {row["check"]: row for row in run("doctor", "--json", at=copy).data}
    assert (rows["session"]["state"], "quire takeover" in rows["session"]["next"]) == ("fail", True)
    assert run("ls", at=copy).code == 0, "reading still works"


def test_doctor_finds_a_newer_owner_before_a_write_does(run: Run, shop: Path, tmp_path: Path) -> None:
    shutil.copytree(shop, tmp_path / "copy")
    with quire.open(shop) as store:
        insert_and_checkpoint(store, 2)
    rows = {row["check"]: row for row in run("doctor", "--json", at=tmp_path / "copy").data}
    assert rows["session"]["state"] == "fail"
    assert "00000001.00000002" in rows["session"]["detail"]
    rows = {row["check"]: row for row in run("doctor", "--json", at=shop).data}
    assert rows["session"]["state"] == "ok"
    assert "session 2, confirmed" in rows["session"]["detail"]


def test_doctor_finds_no_problem_in_a_new_store_with_a_bucket(run: Run, tmp_path: Path) -> None:
    """Regression: until its first put the owner epoch is 0, and the check of the session failed on it."""
    (tmp_path / "bucket").mkdir()
    run("init", str(tmp_path / "new"), "--object-store", str(tmp_path / "bucket"))
    doctor = run("doctor", "--json", at=tmp_path / "new")
    rows = {row["check"]: row for row in doctor.data}
    assert (doctor.code, rows["session"]["state"]) == (0, "ok"), rows["session"]
    assert "not claimed yet" in rows["session"]["detail"]


def test_a_takeover_asks_and_reports_its_result(run: Run, copy: Path, shop: Path, tmp_path: Path) -> None:
    refused = run("takeover", at=copy, answer="n\n")
    assert (refused.code, refused.out) == (1, "nothing was taken over\n")
    result = run("takeover", "--yes", "--json", at=copy)
    assert result.data == {"taken_over": True, "owner_epoch": 2, "object_store": str(tmp_path / "bucket")}
    assert run("create", "more", at=copy).code == 0
    with quire.open(shop) as store, pytest.raises(quire.StoreFenced):
        insert_and_checkpoint(store, 4)
    assert run("create", "more", at=shop).code == 9


def test_a_store_with_its_own_objects_has_nothing_to_take_over(run: Run, path: Path) -> None:
    result = run("takeover", "--yes", at=path)
    assert result.code == 2
    assert "nothing to take over" in result.err
    assert "objects are local to the store" in run("info", at=path).out
    rows = {row["check"]: row for row in run("doctor", "--json", at=path).data}
    assert rows["session"]["state"] == "ok"


def test_a_takeover_is_refused_while_the_directory_has_an_owner(run: Run, shop: Path) -> None:
    with quire.open(shop):
        result = run("takeover", "--yes", at=shop)
    assert result.code == 5
    assert "stop that process first" in result.err


def test_moved_objects_are_checked(run: Run, shop: Path, tmp_path: Path) -> None:
    edit(shop, str(tmp_path / "new"))
    result = run("create", "more", at=shop)
    assert result.code == 8
    assert "quire objects moved" in result.err
    assert run("objects", "moved", "--yes", at=shop).code == 3
    assert run("objects", "moved", at=shop, answer="n\n").code == 1
    shutil.copytree(tmp_path / "bucket", tmp_path / "new")
    result = run("objects", "moved", "--yes", "--json", at=shop)
    assert result.data == {"moved": True, "object_store": str(tmp_path / "new"), "looked_for": 1}
    assert run("create", "more", at=shop).code == 0
