"""Mistakes around restores, standbys and backups: each is refused before anything is left behind, and says what to do."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import quire
from tests.archive.archived_store import ArchivedStore, archived_store, fill
from tests.cli.conftest import Run


@pytest.fixture
def archived(tmp_path: Path) -> ArchivedStore:
    home = tmp_path / "archived"
    home.mkdir()
    with archived_store(home) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
    return archived


def test_the_directory_of_a_store_is_not_its_bucket(run: Run, archived: ArchivedStore, tmp_path: Path) -> None:
    refused = run("restore-store", str(archived.root), str(tmp_path / "new"), at=None)
    assert (refused.code, "`object_store` in its quire.toml" in refused.err) == (3, True)


@pytest.mark.parametrize("command", ["restore-store", "clone", "standby"])
def test_a_path_where_no_directory_can_be_created_is_named(run: Run, archived: ArchivedStore, command: str) -> None:
    """It was reported as a bug in quire."""
    refused = run(command, str(archived.bucket), "/proc/new", at=None)
    assert (refused.code, "no directory can be created at this path (path='/proc/new')" in refused.err) == (2, True)


def test_a_promotion_is_refused_before_it_asks(run: Run, archived: ArchivedStore) -> None:
    for directory in (archived.root, archived.root / "nothing"):
        refused = run("promote", str(directory), at=None)
        assert (refused.code, "this directory is not a standby" in refused.err) == (2, True)
        assert "[y/N]" not in refused.err


def test_a_moment_before_the_window_names_the_oldest_one(run: Run, archived: ArchivedStore, tmp_path: Path) -> None:
    result = run("restore-store", str(archived.bucket), str(tmp_path / "new"), "--at", "5h", at=None)
    assert result.code == 2
    assert "does not reach back" in result.err
    at = result.err.partition("the oldest moment that can be restored is ")[2].partition(" UTC")[0]
    # The moment is rounded up to a second, which may not have passed yet.
    datetime.strptime(at, "%Y-%m-%dT%H:%M:%S")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [["restore-store"], ["clone"]])
def test_a_moment_in_the_future_is_refused(run: Run, archived: ArchivedStore, tmp_path: Path, words: list[str]) -> None:
    result = run(*words, str(archived.bucket), str(tmp_path / "new"), "--at", "2090-01-01", at=None)
    assert result.code == 2
    assert "the time is in the future" in result.err
    assert "leave `--at` out" in result.err


def test_python_takes_times_texts_and_milliseconds(archived: ArchivedStore, tmp_path: Path) -> None:
    newest = quire.restore(str(archived.bucket), tmp_path / "newest")
    now = datetime.now(UTC)
    moments: dict[str, datetime | str | int] = {
        "aware": now,
        "naive": now.replace(tzinfo=None),
        "text": "now",
        "number": int(now.timestamp() * 1000),
    }
    for name, at in moments.items():
        assert quire.restore(str(archived.bucket), tmp_path / name, at=at).position == newest.position
    with quire.open_archive(str(archived.bucket), at="now") as copy:
        assert copy.databases()
    assert quire.clone(str(archived.bucket), tmp_path / "clone", at=now).position == newest.position
    with pytest.raises(quire.InvalidInput, match="does not reach back"):
        quire.restore(str(archived.bucket), tmp_path / "before", at=now - timedelta(hours=5))
    with pytest.raises(quire.InvalidInput, match="both name a moment"):
        quire.restore(str(archived.bucket), tmp_path / "both", at=now, at_ms=1)


def test_a_restored_database_has_a_valid_name(run: Run, path: Path, archived: ArchivedStore) -> None:
    bad = run("restore-db", str(archived.bucket), "pairs", "--as", "bad/name", at=path)
    assert bad.code == 2
    assert "'bad/name'" in bad.err
    assert ".restoring" not in bad.err
    long = run("restore-db", str(archived.bucket), "pairs", "--as", "x" * 195, at=path)
    assert long.code == 2
    assert "1 to 190 bytes" in long.err


def test_a_standby_of_a_wrong_url_leaves_nothing(run: Run, tmp_path: Path) -> None:
    result = run("standby", str(tmp_path / "nowhere"), str(tmp_path / "standby"), "--once", at=None)
    assert result.code == 3
    assert not (tmp_path / "standby").exists()


def test_a_short_silence_is_refused_before_anything_is_restored(
    run: Run, archived: ArchivedStore, tmp_path: Path
) -> None:
    result = run("standby", str(archived.bucket), str(tmp_path / "standby"), "--promote-after", "10", at=None)
    assert result.code == 2
    assert not (tmp_path / "standby").exists()


def test_a_damaged_tar_file_is_not_blamed_on_the_manifest(run: Run, archived: ArchivedStore, tmp_path: Path) -> None:
    backup = tmp_path / "backup.tar"
    assert run("backup", str(backup), at=archived.root).code == 0
    os.truncate(backup, 3_000)
    result = run("restore-store", str(backup), str(tmp_path / "new"), at=None)
    assert result.code == 7
    assert "restore another backup" in result.err


def test_a_backup_without_its_parent_names_it(run: Run, archived: ArchivedStore, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    text = run("backup", str(first), at=archived.root).out
    assert "the store's state and" in text
    assert run("backup", str(second), "--since", str(first), at=archived.root).code == 0
    first.rename(tmp_path / "elsewhere")
    result = run("restore-store", str(second), str(tmp_path / "new"), at=None)
    assert result.code == 3
    assert f"put {first} back" in result.err


def test_a_restored_backup_needs_no_bucket(run: Run, archived: ArchivedStore, tmp_path: Path) -> None:
    assert run("backup", str(tmp_path / "backup"), at=archived.root).code == 0
    result = run("restore-store", str(tmp_path / "backup"), str(tmp_path / "new"), at=None)
    assert result.code == 0
    assert "everything is in the directory" in result.out
    assert "left in the bucket" not in result.out


def test_the_first_write_after_a_takeover_explains_it_once(run: Run, archived: ArchivedStore, tmp_path: Path) -> None:
    (archived.root / "quire.toml").write_text(f'object_store = "{archived.bucket}"\n[archive]\nmode = "async"\n')
    quire.restore(str(archived.bucket), tmp_path / "new", takeover=True)
    result = run("kv", "put", "pairs", "key", "value", at=archived.root)
    assert result.code != 0
    assert result.err.count("to continue from this directory") == 1
    assert "archive.stopped" not in result.err
