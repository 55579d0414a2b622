"""Follow: any steps of the other program in any order, drawn from a seed, with kills and new followers in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.sqlite.follow import load
from quire.store.store import Store
from tests.sqlite.followed import Obedient, content, follower, truth

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
    with quire.open(tmp_path / "store") as opened:
        yield opened
        assert opened.manifest.check() == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "live").mkdir()
    return tmp_path / "live" / "app.db"


def assert_follows(store: Store, path: Path, seed: int, rounds: int) -> None:
    rng = random.Random(seed)
    app, ours = Obedient(path), follower(store, path)
    try:
        app.do("PRAGMA cache_size=10", "PRAGMA journal_mode=wal", TABLE)
        for _ in range(rounds):
            app.do(*rng.choices(STEPS, k=rng.randrange(1, 7)))
            fate = rng.random()
            if fate < 0.08:
                app.kill()
                app = Obedient(path)
            elif fate < 0.16:
                app.close()
                app = Obedient(path)
            elif fate < 0.24:
                ours = follower(store, path)
            ours.look()
            assert content(store) == truth(path)
        known = load(ours._disk, store.path, store.database("copy").db_id)
        assert known is not None
        assert known.lsn == store.pages.open("copy").durable_version()[0]
    finally:
        app.close()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_in_between(store: Store, path: Path, seed: int) -> None:
    assert_follows(store, path, seed, rounds=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_long_whatever_happens_in_between(store: Store, path: Path, seed: int) -> None:
    assert_follows(store, path, seed, rounds=150)
