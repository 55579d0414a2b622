"""`archive status` and `doctor` promise only what the bucket confirms, and a failed drill is seen by everything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import quire
from quire.archive.status import read_drill
from quire.durable.files import OsDisk
from tests.archive.archived_store import ArchivedStore, archived_store, fill
from tests.cli.conftest import Run
from tests.cli.test_archive import owned


@pytest.fixture
def closed(tmp_path: Path) -> ArchivedStore:
    """A store that was closed with everything in its bucket; its own interval would hide nothing."""
    (tmp_path / "archived").mkdir()
    with archived_store(tmp_path / "archived") as archived:
        fill(archived.store, 0)
        archived.reopen()
        fill(archived.store, 100)
        archived.store.kv("pairs").put(b"last", b"1")
    (archived.root / "quire.toml").write_text(f'object_store = "{archived.bucket}"\n[archive]\nmode = "async"\n')
    return archived


def log_objects(archived: ArchivedStore) -> list[Path]:
    return sorted(archived.bucket.glob("*/archive/*/log/*"))


def lose(archived: ArchivedStore, part: str) -> None:
    for directory in archived.bucket.glob(f"*/archive/*/{part}"):
        shutil.rmtree(directory)


def is_doubted(run: Run, archived: ArchivedStore, because: str) -> None:
    status = run("archive", "status", at=archived.root)
    assert status.code == 1
    assert "do not rely on it" in status.out
    assert because in status.out
    assert "would lose nothing" not in status.out
    assert run("archive", "status", "--json", at=archived.root).data["safe"] is False
    rows = {row["check"]: row for row in run("doctor", "--json", at=archived.root).data}
    assert rows["archive"]["state"] == "fail"
    assert "`quire archive base`" in rows["archive"]["next"]


def test_a_whole_archive_is_confirmed(run: Run, closed: ArchivedStore) -> None:
    status = run("archive", "status", at=closed.root)
    assert status.code == 0, status.out
    assert "would lose nothing" in status.out
    data = run("archive", "status", "--json", at=closed.root).data
    assert (data["safe"], data["bucket_error"]) == (True, "")
    assert data["bucket_objects"] >= len(log_objects(closed)) > 0


def test_a_lost_log_object_is_noticed(run: Run, closed: ArchivedStore) -> None:
    log_objects(closed)[-1].unlink()
    is_doubted(run, closed, "it can be restored only to")


def test_a_log_object_that_is_lost_in_the_middle_is_noticed(run: Run, closed: ArchivedStore, tmp_path: Path) -> None:
    """The newest moment was there, so the archive was confirmed; a restore needs every object after the base."""
    with closed.open() as store:
        assert store.archive is not None
        for number in range(4):
            store.kv("pairs").put(b"more", b"%d" % number)
            store.archive.wait(30)
    log_objects(closed)[-2].unlink()
    is_doubted(run, closed, "an object of the log is missing")
    with pytest.raises(quire.ObjectNotFound, match="missing in the middle"):
        quire.restore(str(closed.bucket), tmp_path / "restored")


def test_a_lost_base_is_noticed(run: Run, closed: ArchivedStore) -> None:
    lose(closed, "base")
    is_doubted(run, closed, "a part of the newest base is missing")


def test_a_lost_archive_is_noticed(run: Run, closed: ArchivedStore) -> None:
    for archive in closed.bucket.glob("*/archive"):
        shutil.rmtree(archive)
    is_doubted(run, closed, "no archive of the store")


def test_figures_that_an_unclean_end_leaves_unknown_are_not_shown(run: Run, closed: ArchivedStore) -> None:
    (closed.root / "archive.json").unlink()
    status = run("archive", "status", at=closed.root)
    assert "losing this disk now may lose changes" in status.out
    assert "waiting        unknown" in status.out
    assert "lag" not in status.out
    assert "last error" not in status.out


def test_a_drill_whose_restore_fails_is_recorded(run: Run, closed: ArchivedStore) -> None:
    assert run("archive", "drill", at=closed.root).code == 0
    with closed.open() as store:
        assert store.archive is not None
        store.archive.wait(30)
        lose(closed, "base")
        with pytest.raises(quire.ObjectNotFound, match="base is missing"):
            store.archive.drill()
    record = read_drill(OsDisk(), str(closed.root))
    assert record is not None
    assert not record.is_good
    assert "the drill stopped" in record.problems[0]
    assert "FAILED" in run("archive", "status", at=closed.root).out
    rows = {row["check"]: row for row in run("doctor", "--json", at=closed.root).data}
    assert rows["archive"]["state"] == "fail"


def test_a_forced_base_makes_the_store_restorable_again(run: Run, closed: ArchivedStore, tmp_path: Path) -> None:
    with closed.open() as store:
        assert store.archive is not None
        fill(store, 200)
        store.kv("pairs").flush()  # tables are objects that a base names
        store.archive.wait(30)
        expected = dict(store.kv("pairs").scan())
        lose(closed, "base")
        lose(closed, "file")
        store.archive.base()
        quire.restore(str(closed.bucket), tmp_path / "restored")
    with quire.open(tmp_path / "restored", "r") as restored:
        assert dict(restored.kv("pairs").scan()) == expected
    result = run("archive", "base", at=closed.root)
    assert result.code == 0, result.err
    assert "uploaded the whole store again" in result.out
    assert run("archive", "drill", at=closed.root).code == 0


def test_a_forced_base_needs_an_archive(run: Run, path: Path) -> None:
    result = run("archive", "base", at=path)
    assert result.code == 4
    assert "`quire archive on`" in result.err


def test_the_cost_counts_every_request_of_the_store(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        before, puts = archived.store.rights.requests.writes, archived.archiver.traffic.puts
        archived.store.objects.put("elsewhere/object", b"not of the archive")
        archived.store.objects.get("elsewhere/object")
        list(archived.store.objects.list_pages("nothing/"))
        status = archived.archiver.status()
        assert archived.archiver.traffic.puts == puts
        assert archived.store.rights.requests.writes >= before + 2, "a put, and a listing without results"
        assert archived.store.rights.requests.reads >= 1
        assert status.writes_per_hour > status.puts_per_hour
        assert status.dollars_per_month > 0


def test_a_serving_owner_uploads_the_base(run: Run, closed: ArchivedStore) -> None:
    with owned(closed.root, serving=True):
        result = run("archive", "base", at=closed.root)
        assert result.code == 0, result.err
        status = run("archive", "status", at=closed.root)
        assert "US$" in status.out
        assert "lag" in status.out
