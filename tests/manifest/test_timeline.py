"""A takeover in the manifest: one change, a gap in the sequences that no distance counts, and no position inside it
(A10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from quire.core.errors import CursorLost, InvalidInput, StalePlan
from quire.core.timeline import Gap
from quire.manifest.change import CHANGE_LOG, Start
from quire.manifest.env import ManifestEnv
from quire.manifest.namespaces import Parent
from quire.manifest.ops.base import Counter, ReserveIds
from quire.manifest.ops.cursors import TRIM_ROWS
from quire.manifest.ops.timeline import Timeline
from quire.manifest.records import CursorState, DbKind
from quire.manifest.replica import Replica
from quire.manifest.store import ManifestStore
from tests.manifest.helpers import eventually

FIRST = 2 << 40


@pytest.fixture
def manifest(tmp_path: Path) -> Iterator[ManifestStore]:
    with ManifestStore.open(str(tmp_path / "manifest.lmdb")) as manifest:
        manifest.ensure_owner_epoch()
        yield manifest
        assert manifest.check() == []


def commit(manifest: ManifestStore, count: int = 1) -> None:
    for _ in range(count):
        manifest.reserve_db_id()


def take_over(manifest: ManifestStore, parent: Parent | None = None) -> int:
    """Begin a new owner epoch; returns the last sequence of the former range."""
    head = manifest.feed.head()
    manifest.begin_owner_epoch(parent=parent or Parent())
    return head


def test_a_takeover_is_one_change_at_the_beginning_of_a_new_range(manifest: ManifestStore) -> None:
    commit(manifest, 3)
    last = take_over(manifest, Parent(17, 1234))
    assert manifest.feed.head() == FIRST
    with manifest.read() as txn:
        ((first, row),) = txn.timelines()
        assert (first, row.owner_epoch) == (FIRST, 2)
        assert (row.parent_epoch, row.parent_number, row.ended_at_ms) == (1, 17, 1234)
        assert txn.gaps() == (Gap(last, FIRST),)
        assert [change.sequence for change in txn.changes()][-2:] == [last, FIRST]
    commit(manifest)
    assert manifest.feed.head() == FIRST + 1


def test_the_first_epoch_of_a_store_is_not_a_takeover(manifest: ManifestStore) -> None:
    with manifest.read() as txn:
        assert txn.owner_epoch() == 1
        assert txn.gaps() == ()


def test_lag_and_max_lag_count_changes_and_not_the_gap(manifest: ManifestStore) -> None:
    manifest.feed.register(Start.LATEST, name="reader", max_lag=10)
    commit(manifest, 2)
    take_over(manifest)
    commit(manifest, 2)
    assert manifest.feed.lag() == {"reader": 5}
    manifest.feed.maintain(lag_reported=10)
    assert manifest.feed.cursor("reader").state is CursorState.LIVE
    commit(manifest, 6)
    manifest.feed.maintain(lag_reported=100)
    assert manifest.feed.cursor("reader").state is CursorState.LOST


@pytest.mark.parametrize("limit", [1, 2, 3, 256])
def test_a_follower_continues_across_the_gap(manifest: ManifestStore, limit: int) -> None:
    start = manifest.feed.head()
    manifest.feed.register(Start.LATEST, name="reader")
    commit(manifest, 3)
    last = take_over(manifest)
    commit(manifest, 3)
    sequences = [change.sequence for change in manifest.feed.follow("reader", limit=limit, timeout=0)]
    assert sequences == [*range(start + 1, last + 1), *range(FIRST, FIRST + 4)]
    assert manifest.feed.cursor("reader").lag == 0


def test_a_position_in_the_lost_range_is_cursor_lost_wherever_it_is_given(manifest: ManifestStore) -> None:
    manifest.feed.register(Start.LATEST, name="reader")
    commit(manifest, 3)
    last = take_over(manifest)
    commit(manifest)
    for position in (last + 1, last + 100, FIRST - 1):
        with pytest.raises(CursorLost, match=f"{last + 1:,} to {position:,} were lost") as caught:
            manifest.feed.fetch("reader", after=position)
        assert caught.value.where["first_sequence"] == FIRST
        with pytest.raises(CursorLost):
            next(manifest.feed.follow("another", after=position, timeout=0))
        with pytest.raises(CursorLost):
            manifest.feed.register(position)
        with pytest.raises(CursorLost):
            manifest.feed.acknowledge("reader", position)
    assert [change.sequence for change in manifest.feed.fetch("reader", after=last).changes] == [FIRST, FIRST + 1]
    assert [change.sequence for change in manifest.feed.fetch("reader", after=FIRST).changes] == [FIRST + 1]


def test_several_takeovers_leave_several_gaps(manifest: ManifestStore) -> None:
    manifest.feed.register(Start.LATEST, name="reader")
    start = manifest.feed.head()
    expected = []
    for epoch in (2, 3, 4):
        commit(manifest, epoch)
        expected += [*range(start + 1, start + 1 + epoch), epoch << 40]
        take_over(manifest)
        start = epoch << 40
    assert [change.sequence for change in manifest.feed.fetch("reader", 100).changes] == expected
    assert manifest.feed.lag() == {"reader": len(expected)}


def test_trimming_across_the_gap_removes_rows_and_does_not_count_the_gap(manifest: ManifestStore) -> None:
    manifest.feed.register(Start.OLDEST, name="reader")
    commit(manifest, TRIM_ROWS + 10)
    take_over(manifest)
    commit(manifest, 3)
    assert manifest.feed.tail_rows() == 0
    manifest.feed.acknowledge("reader", FIRST + 1)
    assert eventually(lambda: not manifest.feed.tail_rows())
    with manifest.read() as txn:
        assert txn.count(CHANGE_LOG) == 2
        assert txn.feed_bounds() == (FIRST + 2, FIRST + 3)


def test_a_reader_continues_after_a_log_was_trimmed_up_to_the_takeover(manifest: ManifestStore) -> None:
    manifest.feed.register(Start.OLDEST, name="reader")
    commit(manifest, 2)
    last = manifest.feed.head()
    manifest.feed.acknowledge("reader", last)
    take_over(manifest)
    assert manifest.check() == []
    assert [change.sequence for change in manifest.feed.fetch("reader").changes] == [FIRST]
    assert manifest.feed.cursor("reader").why_given_up(2**50) == ""


def test_retention_by_time_and_by_bytes_considers_changes_only(
    manifest: ManifestStore,
) -> None:
    commit(manifest, 20)
    take_over(manifest)
    commit(manifest, 5)
    with manifest.read() as txn:
        manifest.feed.settings = replace(manifest.feed.settings, retain_seconds=10**6)
        assert manifest.feed._retained_from(txn, manifest.clock.now_ms()) == 0
        assert manifest.feed._retained_from(txn, manifest.clock.now_ms() + 2 * 10**9) == FIRST + 6
        manifest.feed.settings = replace(manifest.feed.settings, retain_bytes=4 * 60)
        oldest = manifest.feed._retained_from(txn, manifest.clock.now_ms())
        assert FIRST < oldest <= FIRST + 5


def test_replaying_the_feed_across_the_gap_yields_the_same_tables(manifest: ManifestStore, tmp_path: Path) -> None:
    with Replica.from_copy(manifest, str(tmp_path / "replica.lmdb"), name="replica") as replica:
        manifest.register_db("shop", DbKind.PAGES)
        replica.catch_up(manifest.feed, "replica")
        take_over(manifest)
        commit(manifest, 2)
        assert replica.catch_up(manifest.feed, "replica") == FIRST + 2
        replica.verify_against(manifest)
        take_over(manifest)
        assert replica.catch_up(manifest.feed, "replica", limit=1) == 3 << 40
        assert replica.catch_up(manifest.feed, "replica") == 3 << 40
        replica.trim(keep=2)
        with replica.read() as txn:
            assert [change.sequence for change in txn.changes()] == [FIRST + 2, 3 << 40]


def test_a_replica_of_the_lost_range_is_rejected(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.lmdb")
    with ManifestStore.open(path) as manifest:
        manifest.ensure_owner_epoch()
        manifest.env.copy(str(tmp_path / "restored.lmdb"))
        replica = Replica.from_copy(manifest, str(tmp_path / "replica.lmdb"), name="replica")
        commit(manifest, 3)
        replica.catch_up(manifest.feed, "replica")
    with replica, ManifestStore.open(str(tmp_path / "restored.lmdb")) as successor:
        take_over(successor)
        with pytest.raises(CursorLost):
            replica.catch_up(successor.feed, "replica")


def test_ids_of_the_lost_range_are_not_reused(manifest: ManifestStore) -> None:
    before = {counter: manifest.allocate(counter) for counter in Counter}
    take_over(manifest)
    after = {counter: manifest.allocate(counter) for counter in Counter}
    assert after[Counter.DB] - before[Counter.DB] >= 2**16
    for counter in (Counter.JOB, Counter.CURSOR, Counter.READER):
        assert after[counter] - before[counter] >= 2**32
    assert manifest.register_db("later", DbKind.PAGES) > 2**16


def test_a_timeline_that_does_not_follow_the_head_is_rejected(manifest: ManifestStore) -> None:
    head = manifest.feed.head()
    with pytest.raises(StalePlan):
        manifest.submit([Timeline(2, 1, 0, 0, head - 1, FIRST)]).result()
    with pytest.raises(InvalidInput):
        manifest.submit([Timeline(2, 1, 0, 0, head, head)]).result()
    with pytest.raises(StalePlan):  # two in one batch would have the same sequence
        manifest.submit([Timeline(2, 1, 0, 0, head, FIRST), Timeline(3, 2, 0, 0, head, 3 << 40)]).result()
    assert manifest.feed.head() == head
    manifest.submit([ReserveIds(Counter.DB, 5)]).result()
    assert manifest.feed.head() == head + 1


def test_a_failed_batch_after_a_takeover_in_one_group_leaves_correct_sequences(manifest: ManifestStore) -> None:
    head = manifest.feed.head()
    guards = [
        manifest.submit([Timeline(2, 1, 0, 0, head, FIRST)]),
        manifest.submit([Timeline(2, 1, 0, 0, head, FIRST)]),
        manifest.submit([ReserveIds(Counter.DB, 900)]),
    ]
    assert guards[0].result().sequence == FIRST
    with pytest.raises(StalePlan):
        guards[1].result()
    assert guards[2].result().sequence == FIRST + 1


def test_a_gap_without_a_takeover_is_damage(tmp_path: Path) -> None:
    path = str(tmp_path / "manifest.lmdb")
    with ManifestStore.open(path) as manifest:
        manifest.ensure_owner_epoch()
        take_over(manifest)
        commit(manifest, 3)
    env = ManifestEnv(path, manifest.env.settings, write=True)
    key = CHANGE_LOG.key.pack(FIRST + 2)
    env.transact(lambda txn: txn.delete(key, db=env.handles[CHANGE_LOG.name]))
    env.close()
    with ManifestStore.open(path, mode="r") as damaged:
        assert [problem.rule for problem in damaged.check()] == ["F1"]
