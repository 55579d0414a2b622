"""The whole-store simulation: it passes on the engines as they are, is repeatable from a seed, and detects planted
bugs."""

from __future__ import annotations

import os
import shlex
import time
from functools import partial
from pathlib import Path

import pytest

import quire
from quire.manifest import tables as t
from quire.testing import simulation
from quire.testing.faults import ObjectFault
from quire.testing.simulation import simulate
from quire.testing.simulation_damage import KINDS, WRITTEN, files_by_kind
from quire.testing.simulation_lives import SimulationFailed
from quire.testing.simulation_steps import Model, ModelDatabase, observe
from tests.manifest.test_check import Vandal
from tests.store.test_closed_databases import flip
from tests.testing import planted_bugs

SECONDS = float(os.environ.get("QUIRE_SIMULATION_SECONDS", "300"))


def test_a_short_run_has_no_findings() -> None:
    assert simulate(4, lives=2, steps=20, branches=1.0) > 30


def test_a_seed_repeats_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of every life, including their arguments, are determined by the seed."""
    runs: list[list[str]] = []
    for _ in range(2):
        steps: list[str] = []
        monkeypatch.setattr(simulation, "raise_findings", lambda *args, steps=steps: steps.extend(args[-1].steps))
        simulate(3, lives=1, steps=15, branches=0)
        runs.append(steps)
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--lives", "2", "--steps", "9"],
        ["--damage", "write of kv log", "--damage", "kv log"],
        ["--archive", "--lives", "3"],
    ],
    ids=" ".join,
)
def test_a_run_that_fails_prints_the_command_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """Hazard: options were missing, and for a run with an archive the command was that of a run without one."""
    calls: list[tuple[object, ...]] = []

    def fail(name: str, seed: int, **arguments: object) -> int:
        calls.append((name, seed, arguments))
        raise SimulationFailed("as if")

    monkeypatch.setattr(simulation, "simulate", partial(fail, "plain"))
    monkeypatch.setattr(simulation, "simulate_losses", partial(fail, "archive"))
    assert simulation.main(options) == 1
    command = shlex.split(capsys.readouterr().err.partition("again: ")[2])
    assert command[:3] == ["python", "-m", "quire.testing.simulation"]
    assert simulation.main(command[3:]) == 1
    assert calls[0] == calls[1]


def test_a_listing_may_leave_out_what_is_reported_as_damaged_and_nothing_else(tmp_path: Path) -> None:
    """Hazard: a damaged row of a database was a finding, because the other databases are listed without it; seeds
    700014 and 700024."""
    model: Model = {name: ModelDatabase("lsm", {b"key": name.encode()}) for name in ("one", "two", "three")}
    with quire.open(tmp_path / "store") as store:
        for name in model:
            store.kv(name, create=True).put(b"key", name.encode())
        db_id = store.database("one").db_id
    vandal = Vandal(str(tmp_path / "store" / "manifest.lmdb"))
    flip(vandal, t.DB, db_id)
    vandal.done()
    with quire.open(tmp_path / "store") as store:
        assert observe(store, model, damaged=True) == []
        assert observe(store, model) == ["databases are ['three', 'two'], not ['one', 'three', 'two']"]
        store.drop("two")
        assert observe(store, model, damaged=True) == ["databases are ['one', 'three'], not ['one', 'three', 'two']"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*ObjectFault], ids=lambda fault: fault.name)
def test_an_object_store_that_fails_in_every_life_causes_no_findings(fault: ObjectFault) -> None:
    simulate(5, faults=(simulation.Trouble(1, fault, calls=10),), branches=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITTEN)
def test_writes_that_the_disk_loses_or_misplaces_are_detected(kind: str) -> None:
    """After a clean close: the same data, or a typed error."""
    simulate(6, lives=6, kinds=[kind], branches=1.0)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 900)
@pytest.mark.parametrize("options", [[], ["--archive"]], ids=["alone", "archived"])
def test_runs_for_a_given_time_have_no_findings(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """`make torture SECONDS=3600` runs both for an hour together. The seeds are printed, so that a failing run can be
    repeated."""
    seed = int(time.time())
    with capsys.disabled():
        print(f"\nsimulation from seed {seed} {' '.join(options)}")
    assert simulation.main([*options, "--seed", str(seed), "--seconds", str(SECONDS / 2)]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", planted_bugs.ALL, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_detected(bug: planted_bugs.Bug) -> None:
    """Each class of defect, reintroduced into the engines, is detected within a few seeds."""
    setting = planted_bugs.ALL[bug]

    def run_seeds() -> None:
        for seed in range(planted_bugs.SEEDS):
            branches = 1.0 if setting.kinds else 0.0
            simulate(seed, plant=bug, kinds=setting.kinds, faults=setting.faults, branches=branches)

    with pytest.raises(SimulationFailed, match="findings:"):  # any other error is a failure of the planted bug itself
        run_seeds()


@pytest.mark.slow
def test_every_kind_of_file_of_a_store_can_be_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of file that no run produces would never be damaged: a name has changed, or a step is missing."""
    kinds: set[str] = set()
    monkeypatch.setattr(simulation, "raise_findings", lambda *args: kinds.update(files_by_kind(args[-1].directory)))
    for seed in range(3):
        simulate(seed, branches=0)
    assert kinds == KINDS.keys()
