"""The whole-store simulation with a standby, which dies at every failpoint that it reaches, and is promoted; planted bugs are
found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from quire.archive import sealing
from quire.archive.replay import Replay
from quire.archive.state_files import StandbyState
from quire.store import standby as standby_module
from quire.store.standby import Standby
from quire.testing.simulation_lives import SimulationFailed
from quire.testing.simulation_losses import simulate_losses

SEEDS = 12
"""How many seeds may be needed to find a planted bug."""
POINT_SEEDS = 40
"""How many seeds may be needed for a standby to die at a failpoint."""
_patch = pytest.MonkeyPatch()


# ── planted bugs: each is applied in a process that ends with its run, so nothing is reset ────────────────────────────
def files_are_not_synced_before_rows() -> None:
    flush = Replay._flush

    def flush_unsynced(self: Replay) -> None:
        self._dirty.clear()
        flush(self)

    _patch.setattr(Replay, "_flush", flush_unsynced)


def names_are_not_synced_before_rows() -> None:
    flush = Replay._flush

    def flush_unsynced(self: Replay) -> None:
        self._folders.clear()
        flush(self)

    _patch.setattr(Replay, "_flush", flush_unsynced)


def positions_are_saved_before_objects_are_applied() -> None:
    apply = Standby._apply

    def save_first(self: Standby, header: Any, digest: bytes, events: Any) -> None:
        self._save(replace(self._state, position=header.position, digest=digest, at_ms=header.at_ms))
        apply(self, header, digest, events)

    _patch.setattr(Standby, "_apply", save_first)


def rebuilds_do_not_count_as_swaps() -> None:
    save = Standby._save

    def save_uncounted(self: Standby, state: StandbyState) -> None:
        save(self, replace(state, swaps=0))

    _patch.setattr(Standby, "_save", save_uncounted)


def leftovers_of_rebuilds_are_kept() -> None:
    _patch.setattr(Standby, "_remove", lambda *_: None)


def promotions_leave_out_what_the_owner_writes_meanwhile() -> None:
    seal = sealing.seal

    def seal_only(*given: Any, **options: Any) -> Any:
        return seal(*given, **{**options, "overtaken": None})

    _patch.setattr(standby_module, "seal", seal_only)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "plant",
    [
        files_are_not_synced_before_rows,
        names_are_not_synced_before_rows,
        positions_are_saved_before_objects_are_applied,
        rebuilds_do_not_count_as_swaps,
        leftovers_of_rebuilds_are_kept,
        promotions_leave_out_what_the_owner_writes_meanwhile,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_bug_is_found(plant: Callable[[], None]) -> None:
    def run_seeds() -> None:
        for seed in range(SEEDS):
            simulate_losses(seed, standbys=1.0, plant=plant)

    with pytest.raises(SimulationFailed, match="findings:"):
        run_seeds()
