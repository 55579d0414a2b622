"""Lives of the whole-store simulation with an archive: the disk is kept, or lost and restored from the bucket.

    python -m quire.testing.simulation --archive --seed 7

Each life is a process of its own that ends with a close or without a word. Then the next one opens the directory, or that is
gone: the bucket is restored with a takeover, and must hold the model as it was when `wait` last returned, or one of those that
came after it. Sometimes the former owner's directory is opened once more: it is fenced before anything is archived.

Thread: one. Raises `SimulationFailed`.
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
from quire.testing.simulation_lives import SETTINGS, START_MS, Ending, held, in_process, judge
from quire.testing.simulation_steps import Model, NoReader, Steps

WAIT = 60.0
LIVES, STEPS = 6, 25
WAITS = 0.15


@dataclass
class ArchivedEnding(Ending):
    """How a life ended."""

    archived: list[Model] = field(default_factory=list)
    """What the bucket may hold: the model when `wait` last returned, and those after it."""
    is_restorable: bool = False
    """Whether `wait` has ever returned: before that, a lost disk is a lost store."""


class ArchivedSteps(Steps):
    """Steps that wait for the bucket now and then."""

    archived: list[Model]
    is_restorable: bool

    def _change(self, after: Model, act: Callable[[], object], what: str = "") -> bool:
        self.archived.append(after)
        done = super()._change(after, act, what)
        self.archived.append(self.model)
        assert self.store.archive is not None
        if self._draw.random() < WAITS:
            self.store.archive.wait(WAIT)
            self.archived[:] = [self.model]
            self.is_restorable = True
        return done


def simulate_losses(
    seed: int, *, lives: int = LIVES, steps: int = STEPS, plant: Callable[[], None] | None = None
) -> int:
    """One run; how many disks were lost."""
    draw = random.Random(f"losses {seed}")
    lost = 0
    with tempfile.TemporaryDirectory(prefix="quire-losses-") as base:
        last = ArchivedEnding([{}], START_MS, os.path.join(base, "0"), archived=[{}])
        for number in range(lives):
            is_lost = number > 0 and draw.random() < 0.5 and last.is_restorable
            lost += is_lost
            last = _life_of(in_process(partial(_live, f"{seed}/{number}", last, number, steps, is_lost, base, plant)))
            judge(seed, number, last)
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
    archive = ArchiveSettings(mode="async", interval_seconds=0.01, base_seconds=draw.choice((0.2, 3600.0)))
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
        model, findings = held(store, before.archived if is_lost else before.models)
        ending.findings += findings
        if model is None or ending.findings:
            return ending
        life = ArchivedSteps(store, model, clock, draw, ending.steps, NoReader(), 1 + number)
        life.archived = list(before.archived) if not is_lost else [model]
        life.archived.append(model)
        life.is_restorable = before.is_restorable
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
    """The deposed owner: whatever it does, nobody is told that it is archived."""
    try:
        with quire.open(directory, settings=settings, clock=clock) as store:  # type: ignore[arg-type]
            try:
                store.create("came-back", "lsm")
            except StoreFenced:
                return []
            except QuireError:
                pass  # the name is taken, say
            assert store.archive is not None
            store.archive.wait(WAIT)
    except StoreFenced:
        return []
    return ["a deposed owner archived something"]
