"""Follow: random steps of the other program, from a seed, with kills and new followers in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.sqlite.follow import load
from quire.store.store import Store
from tests.sqlite.follow_helpers import SqlProgram, content, follower, sqlite_content

TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, x)"
ROW = "INSERT INTO t (x) VALUES (randomblob(3000))"
STEPS = (
    ROW,
    ROW,
    f"BEGIN; {ROW}; {ROW}; {ROW}; COMMIT",
    f"BEGIN; {'; '.join([ROW] * 60)}; ROLLBACK",
    "UPDATE t SET x = randomblob(length(x)) WHERE id % 3 = 0",
    "DELETE FROM t WHERE id % 5 = 2",
    "PRAGMA wal_checkpoint(PASSIVE)",
    "PRAGMA wal_checkpoint(RESTART)",
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "VACUUM",
    "PRAGMA journal_mode=delete",
    "PRAGMA journal_mode=wal",
    "PRAGMA wal_autocheckpoint=3",
    "PRAGMA wal_autocheckpoint=30",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store") as store:
        yield store
        assert store.manifest.check() == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path / "live" / "app.db"


def assert_follows(store: Store, path: Path, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    app, file_follower = SqlProgram(path), follower(store, path)
    try:
        app.run_sql("PRAGMA cache_size=10", "PRAGMA journal_mode=wal", TABLE)
        for _ in range(rounds):
            app.run_sql(*rng.choices(STEPS, k=rng.randrange(1, 7)))
            draw = rng.random()
            if draw < 0.08:
                app.kill()
                app = SqlProgram(path)
            elif draw < 0.16:
                app.close()
                app = SqlProgram(path)
            elif draw < 0.24:
                file_follower = follower(store, path)
            file_follower.look()
            assert content(store) == sqlite_content(path)
        position = load(file_follower._disk, store.path, store.database("copy").db_id)
        assert position is not None
        assert position.lsn == store.pages.open("copy").durable_version()[0]
    finally:
        app.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_are_followed(store: Store, path: Path, seed: int) -> None:
    assert_follows(store, path, seed, rounds=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_long_random_programs_are_followed(store: Store, path: Path, seed: int) -> None:
    assert_follows(store, path, seed, rounds=150)
