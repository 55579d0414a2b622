"""Snapshots, forks, checkpoints, drops and the collector in random order, over a real store with real bytes.

After every step: reference counts equal those recomputed from scratch, no reachable object was deleted, no object is unknown.
At the end, when everything was dropped: no object and no row remains, and the feed replays. See `invariants.py`.
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
from tests.machine import invariants, snapshot_steps, steps
from tests.machine.model import StoreModel
from tests.machine.planted_faults import HIDDEN, QUICK, Fault

RANDOMS = st.randoms(use_true_random=False)
EXAMPLES = settings.get_profile(settings.get_current_profile_name()).max_examples


class SnapshotMachine(RuleBasedStateMachine):
    """Drives one store through random steps."""

    graces: tuple[float, ...] = (0, 60)

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp()
        self.model: StoreModel | None = None

    @initialize(data=st.data(), remote=st.booleans(), rng=RANDOMS)
    def begin(self, data: Any, remote: bool, rng: Random) -> None:
        grace = data.draw(st.sampled_from(self.graces))
        self.model = StoreModel(os.path.join(self.directory, "store"), grace_seconds=grace, remote=remote)
        for step in (steps.create, steps.checkpoint, steps.seal):
            step(self.model, rng)

    def run_step(self, step: Callable[[StoreModel, Random], None], rng: Random) -> None:
        assert self.model is not None
        self.model.is_settled = False
        step(self.model, rng)

    # ── databases and their engines ───────────────────────────────────────────────────────────────────────────────────
    @rule(rng=RANDOMS)
    def create(self, rng: Random) -> None:
        self.run_step(steps.create, rng)

    @rule(rng=RANDOMS)
    def rename(self, rng: Random) -> None:
        self.run_step(steps.rename, rng)

    @rule(rng=RANDOMS)
    def drop(self, rng: Random) -> None:
        self.run_step(steps.drop, rng)

    @rule(rng=RANDOMS)
    def seal(self, rng: Random) -> None:
        self.run_step(steps.seal, rng)

    @rule(rng=RANDOMS)
    def checkpoint(self, rng: Random) -> None:
        self.run_step(steps.checkpoint, rng)

    @rule(rng=RANDOMS)
    def checkpoint_again(self, rng: Random) -> None:
        self.run_step(steps.checkpoint, rng)

    @rule(rng=RANDOMS)
    def truncate(self, rng: Random) -> None:
        self.run_step(steps.truncate, rng)

    @rule(rng=RANDOMS)
    def shrink(self, rng: Random) -> None:
        self.run_step(steps.shrink, rng)

    @rule(rng=RANDOMS)
    def abandon(self, rng: Random) -> None:
        self.run_step(steps.abandon, rng)

    @rule(rng=RANDOMS, uploads=st.booleans())
    def hold_or_finish_upload(self, rng: Random, uploads: bool) -> None:
        self.run_step(steps.start_upload if uploads else steps.finish_upload, rng)

    @rule(rng=RANDOMS)
    def evict_or_hydrate(self, rng: Random) -> None:
        self.run_step(steps.evict_or_hydrate, rng)

    # ── snapshots, forks, retention ───────────────────────────────────────────────────────────────────────────────────
    @rule(rng=RANDOMS)
    def snapshot(self, rng: Random) -> None:
        self.run_step(snapshot_steps.snapshot, rng)

    @rule(rng=RANDOMS)
    def drop_snapshot(self, rng: Random) -> None:
        self.run_step(snapshot_steps.drop_snapshot, rng)

    @rule(rng=RANDOMS)
    def fork(self, rng: Random) -> None:
        self.run_step(snapshot_steps.fork, rng)

    @rule(rng=RANDOMS)
    def set_policy(self, rng: Random) -> None:
        self.run_step(snapshot_steps.set_policy, rng)

    @rule(rng=RANDOMS)
    def apply_retention(self, rng: Random) -> None:
        self.run_step(snapshot_steps.apply_retention, rng)

    # ── the collector, time, reopening ────────────────────────────────────────────────────────────────────────────────
    @rule(rng=RANDOMS)
    def maintain(self, rng: Random) -> None:
        self.run_step(snapshot_steps.maintain, rng)

    @rule(rng=RANDOMS)
    def one_job(self, rng: Random) -> None:
        self.run_step(snapshot_steps.one_job, rng)

    @rule(rng=RANDOMS, deadly=st.booleans())
    def unlucky_round(self, rng: Random, deadly: bool) -> None:
        self.run_step(snapshot_steps.round_with_dying_worker if deadly else snapshot_steps.round_with_failing_job, rng)

    @rule(rng=RANDOMS, back=st.booleans())
    def time(self, rng: Random, back: bool) -> None:
        self.run_step(snapshot_steps.set_clock_back if back else snapshot_steps.pass_time, rng)

    @rule(rng=RANDOMS)
    def reopen(self, rng: Random) -> None:
        self.run_step(snapshot_steps.reopen, rng)

    # ── invariants and teardown ───────────────────────────────────────────────────────────────────────────────────────
    @invariant()
    def invariants_hold(self) -> None:
        if self.model is not None:
            invariants.verify(self.model)

    def teardown(self) -> None:
        try:
            if self.model is not None:
                invariants.drop_everything(self.model)
                invariants.verify_nothing_remains(self.model)
                invariants.verify_audit(self.model)
        finally:
            if self.model is not None:
                self.model.store.close()
            shutil.rmtree(self.directory)


TestSnapshotMachine = pytest.mark.timeout(3600)(SnapshotMachine.TestCase)  # time to shrink a failing example
TestSnapshotMachine.settings = settings(max_examples=max(24, EXAMPLES // 5))


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "fault",
    [*QUICK, *(pytest.param(fault, marks=pytest.mark.slow) for fault in HIDDEN)],
    ids=lambda fault: fault.__name__,
)
def test_the_machine_detects_the_planted_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a broken invariant, or through an operation that refuses to break one."""
    fault(monkeypatch)
    search = settings(
        max_examples=300, stateful_step_count=30, database=None, derandomize=True, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, QuireError)):
        run_state_machine_as_test(SnapshotMachine, settings=search)
