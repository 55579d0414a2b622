"""The whole-store simulation with an archive: lives die at every failpoint of the archive, disks are lost and restored from
the bucket; planted bugs are found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.archive import base_writer, sealing
from quire.archive.recorder import RecordedFile, Recorder, write_event
from quire.archive.replay import Replay
from quire.archive.uploader import Uploader
from quire.objects.collector import Collector
from quire.store import standby
from quire.store.standby import Standby
from quire.testing.simulation_deaths import (
    FOLLOW_POINTS,
    OWNER_POINTS,
    POINTS,
    PROMOTION_POINTS,
    RESTORE_POINTS,
    UNNAMED_BASE,
)
from quire.testing.simulation_lives import SimulationFailed
from quire.testing.simulation_losses import simulate_losses

SEEDS = 6
"""How many seeds may be needed to find a planted bug."""
STANDBY_SEEDS = 20
POINT_SEEDS = 40
"""How many seeds may be needed for a life to die at a failpoint; most need one or two."""
SOURCES = Path(quire.__file__).parent
HIT = re.compile(r'\bhit\(f?"((?:archive|restore|standby)\.[^"]+)"\)')
RARE_POINT_SEEDS = 120
"""The same where an epoch must be abandoned first: whether the disk is lost before the next base depends on the threads."""
FIRST = {f"archive.abandoned.{step}": (UNNAMED_BASE,) for step in ("before", "objects", "logs")}
"""Where lives must die to make a failpoint reachable: an epoch is abandoned if its owner dies before its first base."""
_patch = pytest.MonkeyPatch()


def test_a_short_run_finds_nothing() -> None:
    run = simulate_losses(671, lives=4, steps=12, points=("archive.log.put",))
    assert run.disks > 0
    assert run.deaths == ("archive.log.put", "archive.log.put")  # one killed, one without power


@pytest.mark.parametrize("seed", [3, 8])
def test_a_standby_follows_and_is_promoted(seed: int) -> None:
    run = simulate_losses(seed, lives=4, steps=10, points=("standby.noted",), standbys=1.0)
    assert run.promotions > 0
    assert run.sessions > 0


def test_the_simulation_knows_every_failpoint_of_the_archive_and_of_standbys() -> None:
    """A new failpoint must be added to the simulation. Below, lives or standbys must die at each one."""
    assert sorted(POINTS) == sorted(
        {point for path in SOURCES.rglob("*.py") for point in HIT.findall(path.read_text())}
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", [*RESTORE_POINTS, *OWNER_POINTS])
def test_lives_die_at_every_failpoint_and_nothing_is_found(point: str) -> None:
    deaths: list[str] = []
    for seed in range(RARE_POINT_SEEDS if point in FIRST else POINT_SEEDS):
        deaths += simulate_losses(seed, points=(point, *FIRST.get(point, ()))).deaths
        if point in deaths:
            return
    pytest.fail(f"no life died at {point}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", [*FOLLOW_POINTS, *PROMOTION_POINTS])
def test_standbys_die_at_every_failpoint_and_nothing_is_found(point: str) -> None:
    deaths: list[str] = []
    for seed in range(POINT_SEEDS):
        run = simulate_losses(seed, points=(point,), standbys=1.0)
        deaths += (*run.deaths, *run.standby_deaths)
        if point in deaths:
            return
    pytest.fail(f"no standby died at {point}")


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


def bases_count_before_their_parts_are_put() -> None:
    """A part is put when the next one is."""
    put_part = Uploader.put_part
    delayed: list[tuple[str, bytes]] = []

    def put_part_late(self: Uploader, key: str, data: bytes) -> None:
        delayed.append((key, data))
        if len(delayed) > 1:
            put_part(self, *delayed.pop(0))

    _patch.setattr(Uploader, "put_part", put_part_late)


def tables_are_not_handed_over() -> None:
    _patch.setattr(Recorder, "completed", lambda *_: None)


def objects_are_deleted_without_intent() -> None:
    """Objects are deleted at once: they are not retired until no archived moment needs them."""
    _patch.setattr(Collector, "delete", Collector.delete_now)


def seals_are_skipped() -> None:
    _patch.setattr(sealing, "_put_seal", lambda *_: True)


def standbys_skip_an_object_that_may_be_partly_applied() -> None:
    apply = Replay.apply

    def apply_new(self: Replay, events: Any, *, again: bool = False) -> None:
        apply(self, [] if again else events, again=again)

    _patch.setattr(Replay, "apply", apply_new)


def standbys_continue_after_a_break() -> None:
    _patch.setattr(standby, "is_continuous", lambda *_: True)


def promotions_give_up_what_is_archived_meanwhile() -> None:
    """A running owner archives changes between the last poll and the seal."""
    rebuild = Standby._rebuild_if_newer

    def seal_only(*arguments: Any, **_: Any) -> Any:
        return sealing.seal(*arguments)

    def rebuild_before_the_claim(self: Standby) -> bool:
        return not self.is_promoting and rebuild(self)

    _patch.setattr(standby, "seal", seal_only)
    _patch.setattr(Standby, "_rebuild_if_newer", rebuild_before_the_claim)


def promotions_claim_the_epoch_that_they_follow() -> None:
    _patch.setattr(Standby, "_highest_epoch", lambda self: self._state.position.epoch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "plant",
    [
        writes_of_streams_are_not_handed_over,
        events_come_after_the_acknowledgement,
        bases_count_before_their_files_are_read,
        bases_count_before_their_parts_are_put,
        tables_are_not_handed_over,
        objects_are_deleted_without_intent,
        seals_are_skipped,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_found(plant: Callable[[], None]) -> None:
    def run_seeds() -> None:
        for seed in range(SEEDS):
            simulate_losses(seed, plant=plant)

    with pytest.raises(SimulationFailed, match="findings:"):
        run_seeds()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "plant",
    [
        standbys_skip_an_object_that_may_be_partly_applied,
        standbys_continue_after_a_break,
        promotions_give_up_what_is_archived_meanwhile,
        promotions_claim_the_epoch_that_they_follow,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_of_standbys_is_found(plant: Callable[[], None]) -> None:
    def run_seeds() -> None:
        for seed in range(STANDBY_SEEDS):
            simulate_losses(seed, standbys=1.0, plant=plant)

    with pytest.raises(SimulationFailed, match="findings:"):
        run_seeds()
