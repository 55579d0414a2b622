"""Files that the owner follows in the background: until stopped, across restarts, alongside everything else."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import Conflict, NotFound, WrongKind
from quire.manifest import tables as t
from quire.manifest.ops.local import FollowSqliteFile
from quire.sqlite.dbfile import DbFile
from quire.store.store import Store
from tests.manifest.helpers import eventually
from tests.programs import Program
from tests.rules.tree import SRC


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None, check_same_thread=False)) as app:
        app.executescript("PRAGMA journal_mode=wal; create table t(x); insert into t values(1);")
        yield app


def rows(store: Store, name: str = "app") -> int:
    with store.sqlite(name) as db:
        count = db.execute("select count(*) from t").get
    return int(count)


def has(expected: int, count: Callable[[], int]) -> bool:
    return count() == expected


def test_a_file_is_followed_while_snapshots_are_created(path: Path, tmp_path: Path, app: sqlite3.Connection) -> None:
    with quire.open(path) as store:
        followed = store.followers.follow(tmp_path / "app.db", interval_seconds=0.01)
        assert (followed.database, followed.path, followed.running) == ("app", str(tmp_path / "app.db"), True)
        for expected in (2, 3):
            app.execute("insert into t values(0)")
            assert eventually(partial(has, expected, partial(rows, store)))
            store.snapshot("app", f"at {expected}")
        assert store.database("app").follows == followed.path
        assert store.info().followed_files == 1
        assert [snapshot.name for snapshot in store.manifest.snapshots.of("app")] == ["at 2", "at 3"]
        with pytest.raises(Conflict, match="another file"):
            store.followers.follow(tmp_path / "other.db", "app")
        store.followers.stop("app")
        assert store.database("app").follows == ""
        app.execute("insert into t values(0)")
        assert store.followers.files() == []
        with pytest.raises(NotFound, match="follows no file"):
            store.followers.stop("app")
        assert rows(store) == 3
        assert store.manifest.check() == []


def test_a_file_that_cannot_be_followed_is_not_registered(path: Path, tmp_path: Path) -> None:
    with quire.open(path) as store:
        with pytest.raises(NotFound):
            store.followers.follow(tmp_path / "nowhere.db")
        assert store.followers.files() == []
        store.create("clicks", "stream")
        with pytest.raises(WrongKind):
            store.manifest.submit([FollowSqliteFile(store.database("clicks").db_id, "/x.db", 1)]).result()


def test_a_file_that_disappears_is_awaited_and_reported(path: Path, tmp_path: Path, app: sqlite3.Connection) -> None:
    with quire.open(path) as store:
        store.followers.follow(tmp_path / "app.db", interval_seconds=0.01)
        app.close()
        os.rename(tmp_path / "app.db", tmp_path / "aside.db")
        assert eventually(lambda: "does not exist yet" in store.followers.file("app").trouble)
        os.rename(tmp_path / "aside.db", tmp_path / "app.db")
        assert eventually(lambda: not store.followers.file("app").trouble)
        assert store.followers.file("app").running


@pytest.mark.parametrize(("owner", "call"), [(os.path, "getsize"), (DbFile, "signature")])
def test_a_file_that_disappears_during_a_look_is_awaited_and_reported(
    path: Path, tmp_path: Path, app: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str
) -> None:
    """Hazard: the follower's thread ends, and nothing says why."""
    file, aside, original = tmp_path / "app.db", tmp_path / "aside.db", getattr(owner, call)

    def after_removal(of: Any) -> Any:
        monkeypatch.undo()
        file.rename(aside)
        return original(of)

    with quire.open(path) as store:
        store.followers.follow(file, interval_seconds=0.01)
        monkeypatch.setattr(owner, call, after_removal)
        app.execute("insert into t values(2)")
        assert eventually(lambda: "does not exist" in store.followers.file("app").trouble)
        aside.rename(file)
        assert eventually(partial(has, 2, partial(rows, store)))
        assert store.followers.file("app").running


def test_dropping_the_database_ends_following(path: Path, tmp_path: Path, app: sqlite3.Connection) -> None:
    with quire.open(path) as store:
        store.followers.follow(tmp_path / "app.db", interval_seconds=0.01)
        db_id = store.database("app").db_id
        store.drop("app")
        assert store.followers.files() == []
        with store.manifest.read() as txn:
            assert txn.get(t.FOLLOWED_FILES, db_id) is None
        app.execute("insert into t values(0)")
        assert "app" not in [database.name for database in store.databases()]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_server_continues_to_follow(
    path: Path, tmp_path: Path, app: sqlite3.Connection, end: signal.Signals
) -> None:
    with quire.open(path) as store:
        store.followers.follow(tmp_path / "app.db", interval_seconds=0.01)
        store.rename("app", "site")
    app.execute("insert into t values(2)")
    for expected in (2, 3):
        with served_by(path) as serving:
            assert eventually(partial(has, expected, partial(published, path)))
            serving.send_signal(end)
            serving.wait(30)
        app.execute("insert into t values(3)")
    with quire.open(path) as store:
        assert not store.followers.file("site").running, "opening a store does not start followers"
        assert store.followers.stop("site").path == str(tmp_path / "app.db")
    with served_by(path) as serving:
        with quire.open(path, mode="r") as reader:
            assert reader.database("site").follows == ""
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(30) == 0


def served_by(path: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    command = ["-m", "quire", "serve", "--store", str(path)]
    serving = Program(command, stdout=subprocess.PIPE, env=env)
    assert serving.stdout is not None
    assert serving.stdout.readline().startswith("listening on")
    return serving


def published(path: Path) -> int:
    """The rows that another process reads."""
    with quire.open(path, mode="r") as reader, reader.sqlite("site") as db:
        count = db.execute("select count(*) from t").get
    return int(count)


def has_polled(store: Store, name: str) -> bool:
    result = store.followers.file(name).done
    return result is not None and result.lsn > 0


def configured(*entries: quire.FollowSettings) -> quire.StoreSettings:
    return quire.StoreSettings(follow=entries)


def test_files_of_quire_toml_are_followed_with_snapshots_forks_and_retention(
    path: Path, tmp_path: Path, app: sqlite3.Connection
) -> None:
    settings = configured(
        quire.FollowSettings(file="../app.db", database="shop", interval_seconds=0.01),
        quire.FollowSettings(file=str(tmp_path / "later.db"), interval_seconds=0.01),
        quire.FollowSettings(file="../app.db", database="clicks"),
    )
    with quire.open(path, settings=settings) as store:
        store.create("clicks", "stream")
        followed = store.followers.resume()
        assert [(file.database, file.configured, file.running) for file in followed] == [
            ("later", True, True),
            ("shop", True, True),
        ], "a file that cannot be followed does not affect the others"
        count = partial(rows, store, "shop")
        assert eventually(lambda: has_polled(store, "shop"))
        assert count() == 1
        store.manifest.retention.set("shop", quire.RetentionRecord(keep_last=1, keep_named=False))
        store.snapshot("shop", "monday")
        store.fork("shop", "trial")
        app.execute("insert into t values(2)")
        assert eventually(partial(has, 2, count))
        store.snapshot("shop", "tuesday")
        store.maintain()
        assert [snapshot.name for snapshot in store.manifest.snapshots.of("shop")] == ["tuesday"]
        app.execute("insert into t values(3)")
        assert eventually(partial(has, 3, count))
        assert rows(store, "trial") == 1
        with closing(sqlite3.connect(tmp_path / "later.db")) as later:
            later.executescript("create table t(x); insert into t values (1)")
        assert eventually(lambda: has_polled(store, "later"))
        assert eventually(partial(has, 1, partial(rows, store, "later")))
        with pytest.raises(Conflict, match=r"quire\.toml"):
            store.followers.stop("shop")
    with quire.open(path, settings=configured(settings.follow[1])) as store:
        assert [file.database for file in store.followers.resume()] == ["later"], (
            "a file removed from quire.toml is no longer followed"
        )
        assert store.database("shop").follows == ""


def test_an_invalid_follow_block_is_refused(path: Path) -> None:
    path.mkdir()
    (path / "quire.toml").write_text('[[follow]]\nfile = ""\n', "utf-8")
    with pytest.raises(quire.InvalidConfig, match=r"follow\.file"):
        quire.open(path)
