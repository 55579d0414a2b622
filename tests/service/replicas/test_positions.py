"""Positions of libSQL's replicas: a pair of generation and frame number means one version, also after old ones were removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import AlreadyExists
from quire.jobs import replica_positions
from quire.manifest import tables as t
from quire.manifest.ops.local import PutReplicaPosition
from quire.service.replicas.frames import EndOfFrames, FrameAnswers, FramesPlan
from quire.service.replicas.held_versions import HeldVersions
from quire.service.replicas.positions import Positions, next_generation
from quire.service.replicas.pulls import history_of
from quire.service.replicas.revisions import HistoryId
from quire.store.store import Store
from quire.testing.clock import ManualClock

DAY = 24 * 3600.0
KEPT_SECONDS = replica_positions.KEPT_MS / 1000
FRAME_MAX = 1 << 30


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with quire.open(str(tmp_path / "store"), clock=clock) as store:
        with store.sqlite("shop", create=True) as connection:
            connection.execute("CREATE TABLE t(a)")
        yield store


@pytest.fixture
def history(store: Store) -> HistoryId:
    return history_of(store.manifest, store.database("shop").db_id)


def _write(store: Store) -> None:
    with store.sqlite("shop") as connection:
        connection.execute("INSERT INTO t VALUES (1)")


def _rows(store: Store, db_id: int) -> int:
    with store.manifest.read() as txn:
        return sum(not row.used_below for _, row in txn.scan(t.REPLICA_POSITIONS, db_id))


def test_a_frame_number_whose_position_was_removed_never_means_another_version(
    store: Store, clock: ManualClock, history: HistoryId
) -> None:
    """Hazard: replica A was at frame 100 and away for longer than positions are kept. Replica B of the same generation then
    reached frame 100 at a later version, and A was taken for a replica that has that version."""
    positions = Positions(store.manifest)
    generation = positions.exported(history, 10)
    assert positions.reach(history, generation, 100, FRAME_MAX, 50) == 100
    clock.advance(KEPT_SECONDS - DAY)
    assert positions.reach(history, generation, 90, FRAME_MAX, 900) == 90
    clock.advance(2 * DAY)
    store.maintain()
    assert positions.find(history, generation, 100) is None
    assert positions.find(history, generation, 90) == 900, "it is not old"
    assert positions.reach(history, generation, 100, FRAME_MAX, 1000) == 101
    assert positions.find(history, generation, 100) is None
    assert positions.find(history, generation, 0) == 0, "a replica that has only the export needs every page"
    assert not positions.is_export(history, generation)
    with pytest.raises(AlreadyExists):
        store.manifest.submit([PutReplicaPosition(history.db_id, generation, 99, 1000, history.range_start)]).result()


def test_a_generation_without_positions_still_knows_which_numbers_it_had(
    store: Store, clock: ManualClock, history: HistoryId
) -> None:
    """Hazard: a generation that begins without an export has no row of frame 0, which could keep the number."""
    positions = Positions(store.manifest)
    generation = next_generation(history, 1)
    assert positions.reach(history, generation, 5, FRAME_MAX, 50) == 5
    for free in (6, 7):
        clock.advance(KEPT_SECONDS + 1)
        store.maintain()
        assert _rows(store, history.db_id) == 0
        assert positions.find(history, generation, 5) is None
        assert positions.reach(history, generation, 5, FRAME_MAX, 1000) == free


def test_old_positions_of_every_database_are_removed(store: Store, clock: ManualClock) -> None:
    """Hazard: only each 4,096th position since the server's start removed old ones, and only those of its database."""
    positions = Positions(store.manifest)
    histories = []
    for name in ("a", "b"):
        store.sqlite(name, create=True).close()
        histories.append(history_of(store.manifest, store.database(name).db_id))
        positions.reach(histories[-1], positions.exported(histories[-1], 1), 1, FRAME_MAX, 2)
    clock.advance(KEPT_SECONDS + 1)
    store.maintain()
    assert [_rows(store, history.db_id) for history in histories] == [0, 0]


def test_a_database_keeps_the_newest_positions(
    store: Store, clock: ManualClock, history: HistoryId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_positions, "POSITIONS_MAX", 3)
    positions = Positions(store.manifest)
    generation = positions.exported(history, 1)
    for frame in range(1, 8):
        clock.advance(1)
        positions.reach(history, generation, frame, FRAME_MAX, frame)
    store.maintain()
    assert [positions.find(history, generation, frame) for frame in range(3, 8)] == [None, None, 5, 6, 7]
    assert positions.exported(history, 9) != generation, "its frame 0 is gone, so it cannot be exported"


def test_a_replica_that_keeps_asking_keeps_its_position(store: Store, clock: ManualClock, history: HistoryId) -> None:
    """Hazard: a replica of a database that does not change got every page again whenever its position was too old."""
    positions = Positions(store.manifest)
    generation = positions.exported(history, 10)
    for _ in range(10):
        clock.advance(2 * DAY)
        assert positions.find(history, generation, 0) == 10
        store.maintain()


def test_a_replica_enters_the_next_generation_if_reaching_a_free_number_costs_more(
    store: Store, clock: ManualClock, history: HistoryId
) -> None:
    """Hazard: to avoid numbers that were used before, a replica would get its last page as often as it takes."""
    positions = Positions(store.manifest)
    answers = FrameAnswers(store.manifest, HeldVersions(), positions)
    pages = store.pages.open("shop")
    generation = positions.exported(history, pages.durable_version()[0])
    positions.reach(history, generation, 10_001, FRAME_MAX, pages.durable_version()[0])
    clock.advance(KEPT_SECONDS - DAY)
    assert answers.plan(pages, generation, 1) == EndOfFrames(generation), "nothing is new"
    clock.advance(2 * DAY)
    store.maintain()
    _write(store)
    following = next_generation(history, generation)
    assert answers.plan(pages, generation, 1) == EndOfFrames(following)
    plan = answers.plan(pages, following, 1)
    assert isinstance(plan, FramesPlan)
    plan.reader.close()
    assert positions.find(history, following, len(plan.pages)) == pages.durable_version()[0]
