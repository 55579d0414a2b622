"""The location of the objects is recorded: an edited quire.toml is reported at once, and a moved location is
checked."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import quire
from quire.core.errors import ConfigMismatch, ObjectNotFound
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.store.object_location import place_of
from quire.store.store import Store
from tests.store.test_write_permission import insert_and_checkpoint, rows

QUIET = MaintenanceSettings(enabled=False)


def edit(path: Path, object_store: str) -> None:
    config = path / "quire.toml"
    text = re.sub(r'(?m)^#? ?object_store = ".*"$', f'object_store = "{object_store}"', config.read_text())
    assert object_store in text
    config.write_text(text)


def opened(path: Path) -> Store:
    return quire.open(path, create=False, settings=StoreSettings(maintenance=QUIET))


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A store whose objects are in a separate directory."""
    path = tmp_path / "store"
    settings = StoreSettings(object_store=str(tmp_path / "one"), maintenance=QUIET)
    with quire.open(path, settings=settings) as store:
        insert_and_checkpoint(store, 1)
    return path


def test_an_edited_location_is_refused_with_a_hint_how_to_go_back(shop: Path, tmp_path: Path) -> None:
    """The store opened, and reading a chunk failed with a missing object."""
    edit(shop, str(tmp_path / "two"))
    for mode in ("rw", "r"):
        with pytest.raises(ConfigMismatch, match="not at the location") as caught:
            quire.open(shop, mode, create=False)
        assert caught.value.where["objects"] == str(tmp_path / "one")
        assert f'object_store = "{tmp_path / "one"}"' in caught.value.hint
        assert "quire objects moved" in caught.value.hint
    edit(shop, str(tmp_path / "one"))
    with opened(shop) as store:
        assert rows(store) == [1]


def test_a_location_without_objects_can_be_edited(tmp_path: Path) -> None:
    with quire.open(tmp_path / "s", settings=StoreSettings(maintenance=QUIET)) as store:
        store.create("shop", "pages")
    edit(tmp_path / "s", str(tmp_path / "elsewhere"))
    with opened(tmp_path / "s") as store:
        insert_and_checkpoint(store, 1)
    assert any((tmp_path / "elsewhere").rglob("*"))


def test_a_directory_that_contains_its_objects_can_be_moved(tmp_path: Path) -> None:
    with quire.open(tmp_path / "s", settings=StoreSettings(maintenance=QUIET)) as store:
        insert_and_checkpoint(store, 1)
    os.rename(tmp_path / "s", tmp_path / "t")
    with opened(tmp_path / "t") as store:
        assert rows(store) == [1]
    edit(tmp_path / "t", str(tmp_path / "t" / "objects"))  # the same location in another notation
    with opened(tmp_path / "t") as store:
        insert_and_checkpoint(store, 2)
        assert rows(store) == [1, 2]


def test_copied_objects_are_accepted_once_all_are_present(shop: Path, tmp_path: Path) -> None:
    two = tmp_path / "two"
    edit(shop, str(two))
    with pytest.raises(ObjectNotFound, match="missing from the new location") as caught:
        quire.open(shop, create=False, moved=True)
    assert "nothing was changed" in caught.value.hint
    with pytest.raises(ConfigMismatch):
        opened(shop)
    shutil.copytree(tmp_path / "one", two)
    chunk = next(path for path in two.rglob("*") if "base" in path.name)
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-1])
    with pytest.raises(ObjectNotFound):
        quire.open(shop, create=False, moved=True)
    chunk.write_bytes(whole)
    with quire.open(shop, create=False, moved=True) as store:
        assert store.moved_objects == 1
    shutil.rmtree(tmp_path / "one")
    with opened(shop) as store:
        assert rows(store) == [1]
        insert_and_checkpoint(store, 2)
    with opened(shop) as store:
        assert rows(store) == [1, 2]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3://bucket/a", "S3://bucket//a/"),
        ("/mnt/x", "file:///mnt/x"),
        ("/mnt/x", "/mnt/y/../x/"),
        ("", "objects/"),
        ("", "/data/store/objects"),
        ("../shared", ".././shared/"),
    ],
)
def test_one_location_has_one_normal_form(one: str, other: str) -> None:
    assert place_of("/data/store", one) == place_of("/data/store", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("s3://bucket/a", "s3://bucket/b"), ("s3://a", "gs://a"), ("/mnt/x", "/mnt/X"), ("", "/data/other/objects")],
)
def test_two_locations_have_two_normal_forms(one: str, other: str) -> None:
    assert place_of("/data/store", one) != place_of("/data/store", other)


def test_a_location_never_contains_credentials() -> None:
    assert "secret" not in place_of("/data/store", "s3://key:secret@bucket/a")
