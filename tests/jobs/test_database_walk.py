"""Hazard: a round of upkeep takes longer the more idle databases a store has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.jobs.database_walk import AT_LEAST, DatabaseWalk
from quire.manifest import tables as t
from quire.testing.clock import ManualClock

DATABASES = 5 * AT_LEAST


@pytest.fixture
def store(tmp_path: Path) -> Iterator[quire.Store]:
    quiet = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    with quire.open(tmp_path / "store", settings=quiet) as opened:
        opened.create_many([f"tenant-{number}" for number in range(DATABASES)])
        yield opened


def step(store: quire.Store, walk: DatabaseWalk, clock: ManualClock, *, whole: bool = False) -> list[int]:
    """One step of a walk in which each visit takes a second, longer than a step may take."""
    visited = []
    with store.manifest.read() as txn:
        for db_id in walk.step(txn, whole=whole):
            visited.append(db_id)
            clock.advance(1.0)
    return visited


def test_a_step_is_bounded_and_the_next_one_continues(store: quire.Store) -> None:
    clock = ManualClock()
    walk = DatabaseWalk(t.DB, clock, 0.01)
    steps = [step(store, walk, clock) for _ in range(DATABASES // AT_LEAST)]
    assert [len(visited) for visited in steps] == [AT_LEAST] * len(steps)
    assert sorted(db_id for visited in steps for db_id in visited) == [
        info.db_id for info in sorted(store.databases(), key=lambda info: info.db_id)
    ]
    assert len(step(store, walk, clock, whole=True)) == DATABASES


def test_a_round_visits_a_bounded_part_of_the_idle_databases(
    store: quire.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has no time, so that every walk of the round ends as early as it may."""
    visits: list[int] = []
    whole_step = DatabaseWalk.step

    def counted(walk: DatabaseWalk, txn: object, *, whole: bool = False) -> Iterator[int]:
        assert not whole
        monkeypatch.setattr(walk, "_seconds", 0.0)
        count = 0
        for db_id in whole_step(walk, txn):  # type: ignore[arg-type]
            count += 1
            yield db_id
        visits.append(count)

    monkeypatch.setattr(DatabaseWalk, "step", counted)
    store.upkeep.round()
    assert visits
    assert max(visits) <= AT_LEAST
