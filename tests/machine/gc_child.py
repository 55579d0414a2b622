"""An owner of the store that runs in a separate process, takes random steps, and gets killed.

It sends a message before each step, before each write, and after each step with the state of the model. A message that was sent
is in the kernel when the process dies, so the receiver knows which step was interrupted.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random

from quire.durable.failpoints import armed
from tests.fork_server import Channel
from tests.machine import invariants, snapshot_steps, steps
from tests.machine.model import EPOCH_MS, Location, StoreModel

POINTS = (
    "manifest.commit.applied",
    "manifest.commit.flushed",
    "manifest.commit.durable",
    "jobs.worker.claimed",
    "jobs.delete.planned",
    "jobs.delete.files_gone",
    "jobs.delete.objects_gone",
    "jobs.delete.published",
    "jobs.worker.worked",
)

STEPS: tuple[tuple[Callable[[StoreModel, Random], None], int], ...] = (
    (steps.create, 2),
    (steps.drop, 2),
    (steps.seal, 3),
    (steps.checkpoint, 6),
    (steps.truncate, 2),
    (steps.shrink, 1),
    (steps.abandon, 1),
    (snapshot_steps.snapshot, 4),
    (snapshot_steps.drop_snapshot, 3),
    (snapshot_steps.fork, 3),
    (snapshot_steps.maintain, 6),
    (snapshot_steps.one_job, 2),
    (snapshot_steps.pass_time, 2),
)
"""Step → weight. Only `test_snapshot_gc.py` has the steps that use schedules or move bytes that are needed."""


@dataclass(frozen=True, slots=True)
class OwnerRun:
    """The parameters of one run of an owner."""

    path: str
    number: int
    seed: int
    steps: int
    point: str = ""
    """The failpoint at which it kills itself."""
    passes: int = 0
    """How often it passes that failpoint before."""

    @property
    def begins_ms(self) -> int:
        return EPOCH_MS + self.number * 10**9


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step begins; `db_id` is the one existing database that it changes, or 0."""

    step: str
    db_id: int


@dataclass(frozen=True, slots=True)
class WriteStarted:
    """Bytes are about to be written."""

    location: Location


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step is complete; `facts` describes the model."""

    facts: dict[int, tuple[object, ...]]


def main(channel: Channel) -> None:
    """One run of an owner."""
    message = channel.receive()
    if message is None:
        return
    run: OwnerRun = pickle.loads(message)
    model = StoreModel(run.path, grace_seconds=30 * (run.seed % 2), now_ms=run.begins_ms)
    model.with_expiry = False  # an interrupted round could have changed any database
    model.load()
    channel.send(pickle.dumps(StepFinished(model.facts())))
    model.on_step = lambda step, db_id: _send(channel, StepStarted(step, db_id))
    model.on_write = lambda location: _send(channel, WriteStarted(location))
    rng = Random(run.seed)
    functions, weights = zip(*STEPS)
    with armed(run.point, f"{run.passes}*off->kill") if run.point else nullcontext():
        for step in rng.choices(functions, weights, k=run.steps):
            step(model, rng)
            _send(channel, StepFinished(model.facts()))
    model.store.close()


def _send(channel: Channel, event: object) -> None:
    channel.send(pickle.dumps(event))


def warm_up() -> None:
    """A short run, so that everything is imported before children are forked."""
    with tempfile.TemporaryDirectory() as directory:
        model, rng = StoreModel(f"{directory}/store"), Random(1)
        for step, _ in STEPS:
            step(model, rng)
        invariants.verify(model)
        model.store.close()
