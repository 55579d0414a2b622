"""An owner of the small world that runs in a process of its own, takes random steps, and is killed for it.

It tells what it is about to do, what it is about to write, and after each step what the world is then: what was told is the
kernel's when the process dies, so whoever listens knows which step was cut off.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random

from quire.durable.failpoints import armed
from tests.machine import keeping, promises, steps
from tests.machine.world import EPOCH_MS, Place, World
from tests.nursery import Line

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

STEPS: tuple[tuple[Callable[[World, Random], None], int], ...] = (
    (steps.create, 2),
    (steps.drop, 2),
    (steps.seal, 3),
    (steps.checkpoint, 6),
    (steps.truncate, 2),
    (steps.shrink, 1),
    (steps.abandon, 1),
    (keeping.snapshot, 4),
    (keeping.drop_snapshot, 3),
    (keeping.fork, 3),
    (keeping.maintain, 6),
    (keeping.one_job, 2),
    (keeping.pass_time, 2),
)
"""Step → weight. Steps that make the schedules work, or move bytes that are needed, are for the other machine."""


@dataclass(frozen=True, slots=True)
class Life:
    """What an owner is told, once."""

    path: str
    number: int
    seed: int
    steps: int
    point: str = ""
    """Where it dies by itself."""
    passes: int = 0
    """How often it passes that point before."""

    @property
    def begins_ms(self) -> int:
        return EPOCH_MS + self.number * 10**9


@dataclass(frozen=True, slots=True)
class Doing:
    """A step begins; `db_id` is the one database that it changes, 0 if none of those that are there."""

    step: str
    db_id: int


@dataclass(frozen=True, slots=True)
class Writing:
    """Bytes are about to be written."""

    place: Place


@dataclass(frozen=True, slots=True)
class Done:
    """A step is over, and this is the world."""

    facts: dict[int, tuple[object, ...]]


def main(line: Line) -> None:
    """One life."""
    message = line.receive()
    if message is None:
        return
    life: Life = pickle.loads(message)
    world = World(life.path, grace_seconds=30 * (life.seed % 2), now_ms=life.begins_ms)
    world.with_expiry = False  # a round that was cut off would have changed any database
    world.learn()
    line.send(pickle.dumps(Done(world.facts())))
    world.doing = lambda step, db_id: _tell(line, Doing(step, db_id))
    world.writing = lambda place: _tell(line, Writing(place))
    rng = Random(life.seed)
    kinds, weights = zip(*STEPS)
    with armed(life.point, f"{life.passes}*off->kill") if life.point else nullcontext():
        for step in rng.choices(kinds, weights, k=life.steps):
            step(world, rng)
            _tell(line, Done(world.facts()))
    world.store.close()


def _tell(line: Line, what: object) -> None:
    line.send(pickle.dumps(what))


def warm_up() -> None:
    """A short life: everything is imported once."""
    with tempfile.TemporaryDirectory() as directory:
        world, rng = World(f"{directory}/store"), Random(1)
        for step, _ in STEPS:
            step(world, rng)
        promises.verify(world)
        world.store.close()
