"""Replaying the feed: repeatedly, in pieces, with gaps, into the wrong tables, into a small map."""

from __future__ import annotations

from random import Random

import pytest

from quire.core.clock import SystemClock
from quire.core.errors import InvalidInput, ManifestDamaged
from quire.core.limits import MIB
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.change import ChangeRecord
from quire.manifest.env import ManifestEnv
from quire.manifest.migrations import migrate
from quire.manifest.reads import ReadTxn
from quire.manifest.replay import replay
from quire.manifest.store import ManifestStore
from quire.testing.manifest import Dump, dump
from tests.manifest.batches import BatchMaker, outcome
from tests.manifest.helpers import chunk, commit, register


@pytest.fixture
def changes(manifest: ManifestStore) -> list[ChangeRecord]:
    maker = BatchMaker(Random(12))  # a seed whose cursors leave the first change in the feed
    for _ in range(80):
        outcome(manifest.submit(maker.batch(manifest, 2)))
    with manifest.read() as txn:
        return list(txn.changes())


@pytest.fixture
def replica(path: str) -> ManifestEnv:
    env = ManifestEnv(path + ".replica", ManifestSettings(map_bytes=MIB), write=True)
    migrate(env, SystemClock())
    return env


def logged(env: ManifestEnv) -> Dump:
    with ReadTxn(env) as txn:
        return {n: list(txn.raw_scan(table)) for n, table in t.TABLES.items() if table.policy is t.Policy.LOGGED}


@pytest.mark.parametrize("step", [1, 7, 1024])
def test_a_feed_can_be_replayed_in_pieces_and_repeatedly(
    manifest: ManifestStore, changes: list[ChangeRecord], replica: ManifestEnv, step: int
) -> None:
    half = len(changes) // 2
    assert replay(changes[:half], replica, step=step) == half
    assert replay(changes[: half - 3], replica, step=step) == half, "already applied"
    assert replay(changes, replica, step=step) == len(changes)
    assert logged(replica) == dump(manifest, t.Policy.LOGGED)
    replica.close()


def test_a_gap_is_rejected(changes: list[ChangeRecord], replica: ManifestEnv) -> None:
    with pytest.raises(InvalidInput, match="gap") as caught:
        replay([*changes[:3], *changes[4:]], replica)
    assert caught.value.where == {"expected": 4, "found": 5}
    assert replay([], replica) == 0, "nothing of the step was applied"
    replica.close()


def test_a_change_that_cannot_be_applied_rolls_back_its_step(changes: list[ChangeRecord], replica: ManifestEnv) -> None:
    before = logged(replica)
    foreign = ChangeRecord(2, 1, (chunk(1, db_id=77),), ())
    with pytest.raises(ManifestDamaged, match="does not apply") as caught:
        replay([changes[0], foreign], replica)
    assert caught.value.where["sequence"] == 2
    assert logged(replica) == before
    assert replay(changes, replica) == len(changes)
    replica.close()


def test_a_small_map_grows(manifest: ManifestStore, replica: ManifestEnv) -> None:
    commit(manifest, register(1))
    for start in range(0, 20_000, 5_000):
        commit(manifest, *[chunk(start + n) for n in range(5_000)])
    with manifest.read() as txn:
        assert replay(txn.changes(), replica) == 5
    assert logged(replica) == dump(manifest, t.Policy.LOGGED)
    assert replica.info()["map_size"] > MIB
    replica.close()
