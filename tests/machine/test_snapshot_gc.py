"""Snapshots, forks, checkpoints, drops and the collector in random order, over a real store with real bytes.

After every step: counts are those recomputed from scratch, no object that can be reached was deleted, no object is unknown.
In the end, with everything dropped: no object and no row is left, and the feed replays. See `promises.py`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from quire.core.errors import QuireError
from tests.machine import keeping, promises, steps
from tests.machine.plants import HIDDEN, QUICK, Plant
from tests.machine.world import World

RANDOMS = st.randoms(use_true_random=False)
EXAMPLES = settings.get_profile(settings.get_current_profile_name()).max_examples


class SnapshotMachine(RuleBasedStateMachine):
    """Drives one store through its whole life."""

    graces: tuple[float, ...] = (0, 60)

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.world: World | None = None

    @initialize(data=st.data(), remote=st.booleans(), rng=RANDOMS)
    def begin(self, data: Any, remote: bool, rng: Random) -> None:
        grace = data.draw(st.sampled_from(self.graces))
        self.world = World(os.path.join(self.directory, "store"), grace_seconds=grace, remote=remote)
        for step in (steps.create, steps.checkpoint, steps.seal):
            step(self.world, rng)

    def do(self, step: Callable[[World, Random], None], rng: Random) -> None:
        assert self.world is not None
        self.world.is_quiet = False
        step(self.world, rng)

    # ── databases and their engines ───────────────────────────────────────────────────────────────────────────────────
    @rule(rng=RANDOMS)
    def create(self, rng: Random) -> None:
        self.do(steps.create, rng)

    @rule(rng=RANDOMS)
    def rename(self, rng: Random) -> None:
        self.do(steps.rename, rng)

    @rule(rng=RANDOMS)
    def drop(self, rng: Random) -> None:
        self.do(steps.drop, rng)

    @rule(rng=RANDOMS)
    def seal(self, rng: Random) -> None:
        self.do(steps.seal, rng)

    @rule(rng=RANDOMS)
    def checkpoint(self, rng: Random) -> None:
        self.do(steps.checkpoint, rng)

    @rule(rng=RANDOMS)
    def checkpoint_again(self, rng: Random) -> None:
        self.do(steps.checkpoint, rng)

    @rule(rng=RANDOMS)
    def truncate(self, rng: Random) -> None:
        self.do(steps.truncate, rng)

    @rule(rng=RANDOMS)
    def shrink(self, rng: Random) -> None:
        self.do(steps.shrink, rng)

    @rule(rng=RANDOMS)
    def abandon(self, rng: Random) -> None:
        self.do(steps.abandon, rng)

    @rule(rng=RANDOMS, uploads=st.booleans())
    def hold_or_let_go(self, rng: Random, uploads: bool) -> None:
        self.do(steps.hold if uploads else steps.let_go, rng)

    @rule(rng=RANDOMS)
    def evict_or_hydrate(self, rng: Random) -> None:
        self.do(steps.evict_or_hydrate, rng)

    # ── snapshots, forks, retention ───────────────────────────────────────────────────────────────────────────────────
    @rule(rng=RANDOMS)
    def snapshot(self, rng: Random) -> None:
        self.do(keeping.snapshot, rng)

    @rule(rng=RANDOMS)
    def drop_snapshot(self, rng: Random) -> None:
        self.do(keeping.drop_snapshot, rng)

    @rule(rng=RANDOMS)
    def fork(self, rng: Random) -> None:
        self.do(keeping.fork, rng)

    @rule(rng=RANDOMS)
    def set_policy(self, rng: Random) -> None:
        self.do(keeping.set_policy, rng)

    @rule(rng=RANDOMS)
    def apply_retention(self, rng: Random) -> None:
        self.do(keeping.apply_retention, rng)

    # ── the collector, time, doors ────────────────────────────────────────────────────────────────────────────────────
    @rule(rng=RANDOMS)
    def maintain(self, rng: Random) -> None:
        self.do(keeping.maintain, rng)

    @rule(rng=RANDOMS)
    def one_job(self, rng: Random) -> None:
        self.do(keeping.one_job, rng)

    @rule(rng=RANDOMS, deadly=st.booleans())
    def unlucky_round(self, rng: Random, deadly: bool) -> None:
        self.do(keeping.deadly_round if deadly else keeping.failing_round, rng)

    @rule(rng=RANDOMS, back=st.booleans())
    def time(self, rng: Random, back: bool) -> None:
        self.do(keeping.set_clock_back if back else keeping.pass_time, rng)

    @rule(rng=RANDOMS)
    def reopen(self, rng: Random) -> None:
        self.do(keeping.reopen, rng)

    # ── what always holds, and what is left ───────────────────────────────────────────────────────────────────────────
    @invariant()
    def promises_hold(self) -> None:
        if self.world is not None:
            promises.verify(self.world)

    def teardown(self) -> None:
        try:
            if self.world is not None:
                promises.drop_everything(self.world)
                promises.nothing_is_left(self.world)
                promises.audit_tells(self.world)
        finally:
            if self.world is not None:
                self.world.store.close()
            shutil.rmtree(self.directory)


TestSnapshotMachine = pytest.mark.timeout(3600)(SnapshotMachine.TestCase)  # time to shrink what it finds
TestSnapshotMachine.settings = settings(max_examples=max(24, EXAMPLES // 5))


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "plant",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in HIDDEN)],
    ids=lambda plant: plant.__name__,
)
def test_the_machine_finds_what_was_planted(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a promise that is broken, or by an operation that refuses to break one."""
    plant(monkeypatch)
    search = settings(
        max_examples=300, stateful_step_count=30, database=None, derandomize=True, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, QuireError)):
        run_state_machine_as_test(SnapshotMachine, settings=search)
