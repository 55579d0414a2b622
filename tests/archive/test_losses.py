"""The whole-store simulation with an archive: disks are lost and restored from the bucket; planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire.archive import base_writer
from quire.archive.recorder import RecordedFile, Recorder, write_event
from quire.testing.simulation_lives import SimulationFailed
from quire.testing.simulation_losses import simulate_losses

SEEDS = 6
_patch = pytest.MonkeyPatch()


def test_a_short_run_finds_nothing() -> None:
    assert simulate_losses(3, lives=4, steps=12) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(200, 210))
def test_runs_find_nothing(seed: int) -> None:
    simulate_losses(seed)


# ── planted bugs: each is applied in a process that ends with its run, so nothing is reset ────────────────────────────
def writes_of_streams_are_not_handed_over() -> None:
    write_at = RecordedFile.write_at

    def write_unrecorded(self: RecordedFile, data: Any, offset: int) -> None:
        if "/hot/" in self.path:
            self._inner.write_at(data, offset)
        else:
            write_at(self, data, offset)

    _patch.setattr(RecordedFile, "write_at", write_unrecorded)
    _patch.setattr(RecordedFile, "write_synced_at", write_unrecorded)


def events_come_after_the_acknowledgement() -> None:
    """The event of a write is delayed until the next write."""
    delayed: list[Any] = []

    def write_delayed(self: RecordedFile, data: Any, offset: int) -> None:
        self._inner.write_at(data, offset)
        self._inner.sync()
        delayed.append(write_event(self.number, offset, data))
        if len(delayed) > 1:
            self._queue.append(delayed.pop(0))

    _patch.setattr(RecordedFile, "write_at", write_delayed)
    _patch.setattr(RecordedFile, "write_synced_at", write_delayed)


def bases_count_before_their_files_are_read() -> None:
    def no_paths(*_: Any) -> Iterator[str]:
        return iter(())

    _patch.setattr(base_writer, "_paths", no_paths)


def tables_are_not_handed_over() -> None:
    _patch.setattr(Recorder, "completed", lambda *_: None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "plant",
    [
        writes_of_streams_are_not_handed_over,
        events_come_after_the_acknowledgement,
        bases_count_before_their_files_are_read,
        tables_are_not_handed_over,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_found(plant: Callable[[], None]) -> None:
    def run_seeds() -> None:
        for seed in range(SEEDS):
            simulate_losses(seed, plant=plant)

    with pytest.raises(SimulationFailed, match="findings:"):
        run_seeds()
