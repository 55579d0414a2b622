"""The test helpers for manifests detect what they are meant to detect."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from quire.manifest import tables as t
from quire.manifest.records import DbKind, RefcountRecord
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays, difference, dump, replay
from tests.manifest.batches import BatchMaker, hold_feed, outcome
from tests.manifest.helpers import chunk, commit, register


@pytest.fixture
def manifest(tmp_path: Path) -> ManifestStore:
    return ManifestStore.open(str(tmp_path / "manifest.lmdb"))


def tamper(manifest: ManifestStore, table: t.Table[Any], key: bytes, value: bytes) -> None:
    with manifest.env.begin_write() as txn:
        txn.put(key, value, db=manifest.env.handles[table.name])


def test_a_dump_has_every_table_and_a_difference_names_the_row(manifest: ManifestStore) -> None:
    before = dump(manifest)
    assert set(before) == set(t.TABLES)
    assert set(dump(manifest, t.Policy.DERIVED)) == {n for n, x in t.TABLES.items() if x.policy is t.Policy.DERIVED}
    commit(manifest, register(1, "a"))
    changed = difference(before, dump(manifest))
    assert {"db", "db_names", "wal_state", "change_log", "id_watermarks", "generation_watermarks"} <= set(changed)
    assert changed["db"][0][0] == t.DB.key.pack(1)
    manifest.close()


def test_assert_clean_distinguishes_leaks_from_damage(manifest: ManifestStore) -> None:
    commit(manifest, register(1), chunk(1))
    assert_clean(manifest, leaks=True)
    with pytest.raises(AssertionError, match="R4"):
        assert_clean(manifest)
    tamper(manifest, t.GC_REFCOUNTS, b"\x00" * 15, t.GC_REFCOUNTS.codec.encode(RefcountRecord(1)))
    with pytest.raises(AssertionError, match="R1"):
        assert_clean(manifest, leaks=True)
    manifest.close()


def test_assert_replays_detects_a_row_that_is_not_in_the_feed(manifest: ManifestStore) -> None:
    commit(manifest, register(1), chunk(1))
    assert_replays(manifest)
    key = t.CHUNK_CATALOG.key.pack(1, 2, 3)
    tamper(manifest, t.CHUNK_CATALOG, key, t.CHUNK_CATALOG.codec.encode(chunk(1).record))
    with pytest.raises(AssertionError, match="chunk_catalog"):
        assert_replays(manifest)
    manifest.close()


def test_replay_creates_a_separate_environment(manifest: ManifestStore, tmp_path: Path) -> None:
    commit(manifest, register(1), chunk(1))
    replay(manifest, str(tmp_path / "replica.lmdb")).close()
    with ManifestStore.open(str(tmp_path / "replica.lmdb")) as replica:
        assert not difference(dump(manifest, t.Policy.LOGGED), dump(replica, t.Policy.LOGGED))
        assert dump(manifest)["change_log"] == dump(replica)["change_log"]
        assert_clean(replica, leaks=True)
        assert replica.register_db("promoted", DbKind.PAGES) == 2, "a replica can be promoted"
    manifest.close()


def test_a_batch_maker_is_repeatable_and_every_story_yields_a_batch(manifest: ManifestStore, tmp_path: Path) -> None:
    hold_feed(manifest)
    makers = [BatchMaker(Random(7)), BatchMaker(Random(7))]
    rejected = 0
    for _ in range(150):
        first, second = (maker.batch(manifest, 2) for maker in makers)
        assert first == second
        rejected += isinstance(outcome(manifest.submit(first)), Exception)
    assert 10 < rejected < 120, "batches are a mix of valid and invalid ones"
    with manifest.read() as txn:
        for name in makers[0].stories:
            assert isinstance(makers[0].story(txn, name), list)
    assert_clean(manifest, leaks=True)
    assert_replays(manifest)
    manifest.close()
