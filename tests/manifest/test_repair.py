"""Damaged rows are reported and restored from other information; a count is never lowered because a holder is
unreadable."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.errors import CursorLost, ManifestDamaged
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.checked_point import forget_point
from quire.manifest.env import ManifestEnv
from quire.manifest.records import DbKind, RetentionRecord
from quire.manifest.repair import propose
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean, assert_replays
from tests.manifest.helpers import checkpoint, commit, register


def flip(path: str, table: t.Table[Any], key: bytes | None = None) -> bytes:
    """Flip a bit of a row, the first one if no key is given; returns its key. The next open checks everything."""
    env = ManifestEnv(path, ManifestSettings(), write=True)
    forget_point(env)
    with env.begin_write() as txn:
        with txn.cursor(db=env.handles[table.name]) as cursor:
            assert cursor.set_key(key) if key is not None else cursor.first()
            row_key, raw = bytes(cursor.key()), bytes(cursor.value())
        txn.put(row_key, raw[:3] + bytes([raw[3] ^ 1]) + raw[4:], db=env.handles[table.name])
    env.close()
    return row_key


def trim_log(path: str) -> None:
    """Trim the change log, so that it no longer begins with the first change."""
    with ManifestStore.open(path) as manifest:
        cursor = manifest.feed.register(name="trim")
        manifest.feed.acknowledge("trim", manifest.feed.head())
        manifest.feed.drop(cursor.cursor_id)
        with manifest.read() as txn:
            assert txn.feed_bounds()[0] > 1


def problems_of(path: str) -> list[Any]:
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        return propose(txn, manifest.check())


def test_a_damaged_policy_does_not_prevent_opening_and_is_restored_from_the_change_log(path: str) -> None:
    """The store opens, the policy cannot be read until it is repaired, and the repair restores its value."""
    policy = RetentionRecord(keep_last=6, schedules=["daily"])
    with ManifestStore.open(path) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        manifest.retention.set("shop", RetentionRecord(keep_last=2))
        manifest.retention.set("shop", policy)
    flip(path, t.RETENTION)
    (problem,) = problems_of(path)
    assert (problem.rule, problem.where["table"], problem.where["key"]) == ("K1", "retention", (1,))
    assert problem.contained
    with ManifestStore.open(path) as manifest, pytest.raises(ManifestDamaged):
        manifest.retention.get("shop")
    with ManifestStore.open(path, repair=True) as manifest:
        assert manifest.retention.get("shop") == policy
        assert_clean(manifest)
        assert_replays(manifest)


def test_a_policy_that_is_no_longer_in_the_log_is_removed_by_a_repair_or_replaced_by_setting_it(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        manifest.register_db("blog", DbKind.PAGES)
        for name in ("shop", "blog"):
            manifest.retention.set(name, RetentionRecord(keep_last=6))
    trim_log(path)
    for db_id in (1, 2):
        flip(path, t.RETENTION, t.RETENTION.key.pack(db_id))
    assert [("set it again" in problem.what, problem.fix is not None) for problem in problems_of(path)] == [
        (True, True)
    ] * 2
    with ManifestStore.open(path) as manifest:
        manifest.retention.set("blog", RetentionRecord(keep_last=3))
        assert manifest.retention.get("blog") == RetentionRecord(keep_last=3)
    with ManifestStore.open(path, repair=True) as manifest:
        assert manifest.retention.get("shop") is None
        assert manifest.retention.get("blog") == RetentionRecord(keep_last=3)
        assert_clean(manifest)


def test_a_damaged_cursor_is_lost_with_a_reason(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        manifest.register_db("shop", DbKind.PAGES)
        manifest.feed.register(name="tail")
    flip(path, t.CHANGE_CURSORS)
    with ManifestStore.open(path, repair=True) as manifest:
        with pytest.raises(CursorLost, match="damaged"):
            manifest.feed.fetch("tail")
        assert_clean(manifest)


@pytest.mark.parametrize("table", [t.SLOT_LEAF, t.LIVE_LEAF, t.CHUNK_CATALOG, t.DB])
def test_any_logged_row_is_restored_from_the_complete_log(path: str, table: t.Table[Any]) -> None:
    with ManifestStore.open(path) as manifest:
        commit(manifest, register(1, "a"))
        checkpoint(manifest, 1, 0)
        manifest.jobs.ensure_deletions([1])
        with manifest.read() as txn:
            before = list(txn.raw_scan(table))
    flip(path, table)
    with ManifestStore.open(path) as manifest, manifest.read() as txn, pytest.raises(ManifestDamaged, match=table.name):
        txn.live("a", DbKind.PAGES)
    with ManifestStore.open(path, repair=True) as manifest:
        with manifest.read() as txn:
            assert list(txn.raw_scan(table)) == before
        assert_clean(manifest)
        assert_replays(manifest)


def test_counts_are_not_lowered_because_a_holder_cannot_be_read(path: str) -> None:
    """Hazard: a repair that counts without the unreadable leaf would give its chunks to the collector."""
    with ManifestStore.open(path) as manifest:
        commit(manifest, register(1, "a"))
        checkpoint(manifest, 1, 0)
    trim_log(path)
    flip(path, t.SLOT_LEAF)
    problems = problems_of(path)
    assert any(problem.rule == "R1" for problem in problems)
    assert not [problem for problem in problems if problem.fix is not None]
    with ManifestStore.open(path, repair=True) as manifest:
        assert set(manifest.env.refused) == {("database", 1)}
    with ManifestStore.open(path, mode="r") as manifest, manifest.read() as txn:
        assert all(row.in_use for _, row in txn.scan(t.GC_REFCOUNTS))
