"""The commands standby, promote, clone and clones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import quire
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.store.config_edit import change_config
from tests.cli.conftest import Run


@pytest.fixture
def archived(tmp_path: Path) -> Path:
    settings = quire.StoreSettings(
        object_store=str(tmp_path / "bucket"), archive=quire.ArchiveSettings(mode="async", interval_seconds=0.05)
    )
    with quire.open(tmp_path / "origin", settings=settings) as store:
        with store.sqlite("shop", create=True) as connection:
            connection.execute("create table item(name)")
            connection.execute("insert into item values('apples')")
        store.kv("cart", create=True).put(b"alice", b"3 apples")
    return tmp_path


def test_a_standby_follows_once_and_is_promoted(run: Run, archived: Path) -> None:
    bucket, path = str(archived / "bucket"), str(archived / "standby")
    result = run("standby", bucket, path, "--once", at=None)
    assert result.code == 0
    assert "following" in result.out
    assert "has the state of" in result.out
    refused = run("promote", path, at=None, answer="n\n")
    assert (refused.code, "nothing was promoted" in refused.out) == (1, True)
    result = run("promote", path, "--yes", "--json", at=None)
    assert result.code == 0
    assert json.loads(result.out)["promoted"]["owner_epoch"] == 2
    repeated = run("promote", path, "--yes", at=None)
    assert repeated.code == 2
    assert "not a standby" in repeated.err
    with quire.open(path) as store:
        assert store.kv("cart").get(b"alice") == b"3 apples"
        assert store.sqlite("shop").execute("select name from item").fetchall() == [("apples",)]


def test_a_standby_that_is_being_updated_is_not_promoted(run: Run, archived: Path) -> None:
    bucket, path = str(archived / "bucket"), str(archived / "standby")
    with quire.Standby(bucket, path):
        refused = run("promote", path, "--yes", at=None)
    assert refused.code == 5
    assert "another process updates this standby" in refused.err
    assert "stop it" in refused.err


def test_a_standby_completes_its_own_promotion(run: Run, archived: Path) -> None:
    """Hazard: after a promotion that was interrupted, the restarted command asked for `quire promote`."""
    bucket, path = str(archived / "bucket"), str(archived / "standby")
    with (
        quire.Standby(bucket, path) as standby,
        armed("standby.claimed", "1*raise:EIO"),
        pytest.raises(OSError, match="failpoint"),
    ):
        standby.promote()
    refused = run("standby", bucket, path, at=None)
    assert (refused.code, "quire promote" in refused.err) == (2, True)
    completed = run("standby", bucket, path, "--promote-after", "15", at=None)
    assert completed.code == 0
    assert "is now the owner, in owner epoch 2" in completed.out


def test_an_interval_that_is_too_short_is_refused(run: Run, archived: Path) -> None:
    result = run("standby", str(archived / "bucket"), str(archived / "standby"), "--promote-after", "10", at=None)
    assert result.code == 2
    assert "more than 10 seconds" in result.err


def test_a_clone_is_created_listed_and_released(run: Run, archived: Path) -> None:
    result = run("clone", str(archived / "bucket"), str(archived / "copy"), "--json", at=None)
    assert result.code == 0
    clone_id = json.loads(result.out)["store_id"]
    listed = run("clones", "ls", "--json", at=archived / "origin")
    assert [entry["clone_id"] for entry in json.loads(listed.out)] == [clone_id]
    with quire.open(archived / "copy") as store:
        assert store.kv("cart").get(b"alice") == b"3 apples"
    released = run("clones", "release", at=archived / "copy")
    assert released.code == 0
    assert run("clones", "ls", at=archived / "origin").out.strip() == "no clones"
    unknown = run("clones", "forget", clone_id, "--yes", at=archived / "origin")
    assert unknown.code == 3
    assert "quire clones ls" in unknown.err


def test_the_archive_of_a_new_clone_is_empty_and_not_unclean(run: Run, archived: Path) -> None:
    """Regression: its state was `not closed cleanly`, restorable "to never" from a bucket that "could not be asked"."""
    run("clone", str(archived / "bucket"), str(archived / "copy"), at=None)
    change_config(OsDisk(), str(archived / "copy"), {("archive", "mode"): "async"})
    status = run("archive", "status", at=archived / "copy")
    assert status.code == 1, "nothing of it is safe yet"
    assert "nothing is archived yet: the next owner uploads the whole store" in status.out
    assert "restorable   nothing: this bucket has no archive of the store\n" in status.out
    run("kv", "put", "cart", "bob", "1", at=archived / "copy")
    assert run("archive", "status", at=archived / "copy").code == 0


def test_the_archive_of_a_closed_owner_names_the_directory_that_took_over(run: Run, archived: Path) -> None:
    """Regression: its status was that everything is in the bucket, as if it still were the owner."""
    change_config(OsDisk(), str(archived / "origin"), {("archive", "mode"): "async"})
    assert run("archive", "status", at=archived / "origin").code == 0
    run("restore-store", str(archived / "bucket"), str(archived / "next"), "--takeover", at=None)
    status = run("archive", "status", at=archived / "origin")
    assert status.code == 1
    assert "state          another owner has taken the store over" in status.out
    assert run("archive", "status", "--json", at=archived / "origin").data["safe"] is False
    assert run("archive", "status", at=archived / "next").code == 0


def test_a_parent_forgets_a_named_clone(run: Run, archived: Path) -> None:
    clone_id = json.loads(run("clone", str(archived / "bucket"), str(archived / "copy"), "--json", at=None).out)[
        "store_id"
    ]
    result = run("clones", "forget", clone_id, "--yes", at=archived / "origin")
    assert result.code == 0
    assert json.loads(run("clones", "ls", "--json", at=archived / "origin").out) == []
