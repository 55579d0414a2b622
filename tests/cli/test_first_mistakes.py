"""Hazard: the error of a frequent first mistake does not say what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.core.errors import InvalidName, UnknownDatabase
from tests.cli.conftest import Run


@pytest.mark.parametrize("command", [("kv", "put", "nosuch", "k", "v"), ("stream", "append", "nosuch", "x")])
def test_an_unknown_database_can_be_created(run: Run, path: Path, command: tuple[str, ...]) -> None:
    refused = run(*command)
    assert refused.code == 3
    assert "--create" in refused.err
    assert run(*command, "--create").code == 0


def test_a_relative_path_of_objects_is_not_inside_the_store(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: `--object-store ./bucket` was a directory in the store, and was lost with it."""
    monkeypatch.chdir(tmp_path)
    created = run("init", "./shop", "--object-store", "./bucket", "--json", at=None)
    assert created.data["object_store"] == str(tmp_path / "bucket")
    assert run("archive", "on", at=tmp_path / "shop").code == 0


def test_a_time_before_the_database_existed_is_explained(run: Run, shop: Path) -> None:
    refused = run("sqlite", "shell", "shop", "SELECT 1", "--at", "2020-01-01")
    assert refused.code != 0
    assert "database='shop'" in refused.err
    assert "at='2020-01-01T00:00:00+00:00'" in refused.err
    assert "name a time after it was created" in refused.err


def test_an_empty_database_cannot_be_forked_at_a_time_before_it_existed(run: Run) -> None:
    """Regression: the fork was created, as the database "was" years before."""
    run("create", "empty")
    refused = run("fork", "empty", "then", "--at", "2020-01-01")
    assert (refused.code, "the database did not exist then" in refused.err) == (3, True)
    assert run("fork", "empty", "now").code == 0


def test_a_second_mirror_of_the_same_name_is_refused_by_its_name(run: Run, shop: Path, tmp_path: Path) -> None:
    wanted = ("--databases", "shop", "--table", "t", "--to", f"parquet:{tmp_path}/lake")
    created = run("mirror", "create", "lake", *wanted)
    assert "`quire mirror run lake` loads it" in created.out
    run("mirror", "run", "lake")
    assert "a mirror with this name already exists" in run("mirror", "create", "lake", *wanted).err
    assert run("mirror", "create", "--help").out.count("[required]") == 4


@pytest.mark.parametrize("engine", ["sqlite", "kv", "stream"])
def test_an_empty_name_is_refused_as_one(tmp_path: Path, engine: str) -> None:
    with quire.open(tmp_path / "store") as store:
        with pytest.raises(UnknownDatabase):
            getattr(store, engine)("")
        with pytest.raises(InvalidName, match="empty"):
            getattr(store, engine)("", create=True)
