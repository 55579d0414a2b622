"""Simulates a store with an archive, whose disk is kept, or lost and restored from the bucket.

    python -m quire.testing.simulation --archive --seed 7

Each life is a process of its own that ends with a close or a kill. Either the next one opens the directory, or the directory is
lost: the bucket is then restored with a takeover, must match the model as of the last time `wait` returned, or a later one, and
must pass `check` and `verify`.
A life archives in mode `async` or `sync`; in mode `sync` every change that was acknowledged must be there. Sometimes the former
owner's directory is opened again: it must be fenced before it archives anything.

Threads: one. Raises `SimulationFailed`.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

import quire
from quire.core.errors import QuireError, StoreFenced
from quire.core.settings import ArchiveSettings
from quire.testing.clock import ManualClock
from quire.testing.simulation_lives import SETTINGS, START_MS, Ending, in_process, matching_model, raise_findings
from quire.testing.simulation_steps import Model, NoReader, Steps

WAIT = 60.0
LIVES, STEPS = 6, 25
WAITS = 0.15


@dataclass
class ArchivedEnding(Ending):
    """The result of a life of an archived store."""

    archived: list[Model] = field(default_factory=list)
    """What the bucket may hold: the model when `wait` last returned, and all later ones."""
    is_restorable: bool = False
    """Whether `wait` has ever returned: before that, a lost disk means a lost store."""


class ArchivedSteps(Steps):
    """Steps that occasionally wait for the bucket."""

    archived: list[Model]
    is_restorable: bool

    def _change(self, after: Model, act: Callable[[], object], what: str = "") -> bool:
        is_change = after is not self.model
        self.archived.append(after)
        done = super()._change(after, act, what)
        self.archived.append(self.model)
        assert self.store.archive is not None
        is_acknowledged = done and is_change and self.store.archive.settings.mode == "sync"
        if not is_acknowledged and self._draw.random() < WAITS:
            self.store.archive.wait(WAIT)
            is_acknowledged = True
        if is_acknowledged:
            self.archived[:] = [self.model]
            self.is_restorable = True
        return done


def simulate_losses(
    seed: int, *, lives: int = LIVES, steps: int = STEPS, plant: Callable[[], None] | None = None
) -> int:
    """Simulate one seed and return the number of disks lost."""
    draw = random.Random(f"losses {seed}")
    lost = 0
    with tempfile.TemporaryDirectory(prefix="quire-losses-") as base:
        last = ArchivedEnding([{}], START_MS, os.path.join(base, "0"), archived=[{}])
        for number in range(lives):
            is_lost = number > 0 and draw.random() < 0.5 and last.is_restorable
            lost += is_lost
            last = _life_of(in_process(partial(_live, f"{seed}/{number}", last, number, steps, is_lost, base, plant)))
            raise_findings(seed, number, last)
    return lost


def _life_of(ending: Ending) -> ArchivedEnding:
    assert isinstance(ending, ArchivedEnding)
    return ending


def _live(
    seed: str,
    before: ArchivedEnding,
    number: int,
    steps: int,
    is_lost: bool,
    base: str,
    plant: Callable[[], None] | None,
) -> ArchivedEnding:
    draw, clock = random.Random(seed), ManualClock(before.now_ms)
    archive = ArchiveSettings(
        mode=draw.choice(("async", "sync")), interval_seconds=0.01, base_seconds=draw.choice((0.2, 3600.0))
    )
    settings = msgspec.structs.replace(SETTINGS, object_store=os.path.join(base, "bucket"), archive=archive)
    if plant is not None:
        plant()
    here = os.path.join(base, str(number)) if is_lost else before.directory
    ending = ArchivedEnding(
        before.models, before.now_ms, here, [], [f"life {number}{', disk lost' if is_lost else ''}"]
    )
    try:
        if is_lost:
            quire.restore(os.path.join(base, "bucket"), here, takeover=True, clock=clock)
        store = quire.open(here, settings=settings, clock=clock)
        if is_lost and os.path.exists(before.directory):
            if draw.random() < 0.5:
                ending.findings += _comes_back(before.directory, settings, clock)
            shutil.rmtree(before.directory)
        model, findings = matching_model(store, before.archived if is_lost else before.models)
        ending.findings += findings
        if model is None or ending.findings:
            return ending
        life = ArchivedSteps(store, model, clock, draw, ending.steps, NoReader(), 1 + number)
        life.archived = list(before.archived) if not is_lost else [model]
        life.archived.append(model)
        life.is_restorable = before.is_restorable
        if is_lost:  # every byte of the restored store and every rule, not only what the model has
            life.verify()
        life.run(steps)
        ending.findings += life.findings
        ending.models, ending.archived, ending.now_ms = life.possible, life.archived, clock.now_ms()
        ending.is_restorable = life.is_restorable
        if draw.random() < 0.5:
            store.close()
            ending.archived, ending.is_restorable = [life.model], True
    except BaseException:
        ending.findings.append(traceback.format_exc()[-4_000:])
    return ending


def _comes_back(directory: str, settings: object, clock: ManualClock) -> list[str]:
    """Open the deposed owner's directory and write: nothing it does may be reported as archived. Return the findings."""
    try:
        with quire.open(directory, settings=settings, clock=clock) as store:  # type: ignore[arg-type]
            try:
                store.create("came-back", "lsm")
            except StoreFenced:
                return []
            except QuireError:
                pass  # the name may be taken, for example
            assert store.archive is not None
            store.archive.wait(WAIT)
    except StoreFenced:
        return []
    return ["a deposed owner archived something"]
