"""A whole store, simulated from a seed: every engine, every fault, against a model.

    python -m quire.testing.simulation --seed 7
    python -m quire.testing.simulation --seconds 600
    python -m quire.testing.simulation --archive

A *life* goes from opening a store to its end: closed, killed, without power, on a full or failing disk. It is a few dozen
steps (`Steps`), and a process of its own, forked from one that never opens a store. A *branch* is a life on a copy whose bytes
are damaged, at rest or by a disk that loses or misplaces a write; afterwards the run goes on with the original. A seed decides
everything: steps, their arguments, faults and what power loss keeps. Time stands still unless a step moves it, and nothing
runs in the background.

After a fault the store holds the model before the interrupted step or after it; `DiskFull` means before. Whatever damage a
branch does, everything that is read is as the model says or is refused with a typed error. When everything was dropped and
maintenance has run, no byte of any database is left (`leftovers`).

LMDB does not write through the `Disk`; its commits are durable when they return, so a crash keeps its newest commit.

Raises `SimulationFailed` with the seed, the steps and the findings.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import quire
from quire.durable.files import OsDisk
from quire.durable.names import MANIFEST
from quire.store.store import Store
from quire.testing.clock import ManualClock
from quire.testing.crashdisk import Chooser, CrashDisk, CrashOutcome, keep_all
from quire.testing.faults import Fault, FaultyDisk, ObjectFault, ObjectFaults, PowerCut
from quire.testing.simulation_damage import KINDS, ROW, WRITTEN, choose_damage, inflict
from quire.testing.simulation_lives import SETTINGS, START_MS, Ending, SimulationFailed, held, in_process, judge
from quire.testing.simulation_losses import simulate_losses
from quire.testing.simulation_steps import Doubt, Model, Reader, Steps, is_refusal, observe

NO_CALL = 10**9
BETWEEN_LIVES = (0.0,) * 8 + (-86_400.0, -60.0, 60.0, 86_400.0)
"""Seconds by which the wall clock may be set while nobody has the store open."""
LIVES = 12
STEPS = 30


@dataclass(frozen=True)
class Trouble:
    """What may happen once in a life."""

    weight: int
    fault: Fault | ObjectFault | None
    operation: str = "*"
    """To which calls of the disk: a pattern."""
    calls: int = 1_500
    """At one of the first so many of these calls."""
    path: str = "*"
    """Of files with such paths."""


FAULTS: tuple[Trouble, ...] = (
    Trouble(6, None),
    Trouble(4, Fault.POWER_CUT),
    Trouble(1, Fault.ENOSPC, "[aw]*", 300),  # allocate, write
    Trouble(1, Fault.SHORT_WRITE, "write", 300),
    Trouble(1, Fault.EIO),
    Trouble(1, Fault.LOST_ANSWER),
    *(Trouble(1, fault, calls=20) for fault in ObjectFault),
)


def simulate(
    seed: int,
    *,
    lives: int = LIVES,
    steps: int = STEPS,
    branches: float = 0.5,
    kinds: Collection[str] = (),
    faults: Sequence[Trouble] = FAULTS,
    plant: Callable[[], None] | None = None,
) -> int:
    """One run; the number of steps done.

    `branches` is how likely damage is tried before a life, `kinds` are the kinds of files that it is done to (all, if empty),
    one of `faults` is drawn for each life. `plant` is called in every process, to put a bug into the engines.
    """
    draw = random.Random(f"quire {seed}")
    with tempfile.TemporaryDirectory(prefix="quire-simulation-") as base:
        first = os.path.join(base, "0")
        os.mkdir(first)
        last = Ending([{}], START_MS, first)
        done = 0
        for number in range(lives + 1):
            if number and draw.random() < branches:
                _branch(seed, number, last, kinds, plant)
            drawn: Sequence[Trouble] = faults if number < lives else (Trouble(1, None),)
            last = in_process(partial(_live, f"{seed}/{number}", last, number, steps, number == lives, drawn, plant))
            judge(seed, number, last)
            done += len(last.steps)
        return done


# ── a life ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _live(
    seed: str,
    before: Ending,
    number: int,
    steps: int,
    final: bool,
    faults: Sequence[Trouble],
    plant: Callable[[], None] | None,
) -> Ending:
    """Open the store as the last life left it, check it, work, and end in one way or another."""
    draw = random.Random(seed)
    clock = ManualClock(before.now_ms)
    clock.jump(draw.choice(BETWEEN_LIVES) if number else 0.0)
    here = before.directory
    if not os.path.exists(os.path.join(here, "store", MANIFEST)):
        # made without the crash disk: LMDB's file is not on it
        quire.open(os.path.join(here, "store"), settings=SETTINGS, clock=clock).close()
    if plant is not None:
        plant()
    trouble = draw.choices(faults, [trouble.weight for trouble in faults])[0]
    fault = trouble.fault
    inner = CrashDisk(here)
    disk = FaultyDisk(
        inner, fault if isinstance(fault, Fault) else Fault.EIO, operation=trouble.operation, path=trouble.path
    )
    objects = ObjectFaults(fault if isinstance(fault, ObjectFault) else ObjectFault.UNAVAILABLE)
    objects.install()
    faulty = objects if isinstance(fault, ObjectFault) else disk
    fails_in = draw.randint(1, trouble.calls)
    if fault is Fault.POWER_CUT:  # recovery too may be cut off; an error in it is a refusal, and nothing to go on with
        disk.fail_in(fails_in)
    ending = Ending(before.models, before.now_ms, here, [], [f"life {number}: {fault.name if fault else 'no fault'}"])
    reader = Reader(os.path.join(here, "store"))
    life: Steps | None = None
    cut = False
    try:
        store = quire.open(os.path.join(here, "store"), settings=SETTINGS, clock=clock, disk=disk)
        model, ending.findings = held(store, before.models)
        if model is None:
            return ending
        life = Steps(store, model, clock, draw, ending.steps, reader, number)
        if fault is not None and fault is not Fault.POWER_CUT:
            faulty.fail_in(fails_in)
        life.run(steps)
        faulty.fail_in(NO_CALL)  # what did not happen during the steps does not happen while they are checked
        ending.findings += life.findings or observe(store, life.model)
        if final and not ending.findings:
            ending.findings += life.drop_everything(here)
        if draw.random() < 0.3 and fault is None and not final:  # killed without a word, between two steps
            raise PowerCut
        store.close()
    except BaseException as error:
        ending.steps.append(f"ends with {type(error).__name__}: {error}"[:300])
        is_expected = isinstance(error, PowerCut) or (faulty.fired and (isinstance(error, Doubt) or is_refusal(error)))
        if not is_expected and not disk.has_power_cut:
            ending.findings.append("".join(traceback.format_exception(error))[-3_000:])
        cut = isinstance(error, PowerCut)
    if life is not None:
        ending.models = life.possible
    if (cut or disk.has_power_cut) and not ending.findings:
        disk.cut()
        ending.directory = _crash(inner, here, number, _chooser(draw))
    ending.now_ms = clock.now_ms()
    return ending


def _chooser(draw: random.Random) -> Chooser:
    """What power loss does: nothing (a kill), anything, or mostly one thing."""
    kind = draw.choice(("kill", "any", CrashOutcome.KEEP, CrashOutcome.DROP))
    if kind == "kill":
        return keep_all
    if kind == "any":
        return draw.choice
    return lambda options: draw.choice(options) if draw.random() < 0.1 or kind not in options else kind  # type: ignore[return-value]


def _crash(disk: CrashDisk, here: str, number: int, choose: Chooser) -> str:
    """The directory as the crash left it, under a new name; LMDB's file as it is."""
    after = f"{here.partition('.')[0]}.{number}"
    disk.crash(after, choose)
    shutil.copyfile(os.path.join(here, "store", MANIFEST), os.path.join(after, "store", MANIFEST))
    return after


# ── a branch ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _branch(seed: int, number: int, before: Ending, kinds: Collection[str], plant: Callable[[], None] | None) -> None:
    """Damage a copy, and see that nothing wrong is read from it."""
    copy = f"{before.directory}.branch"
    shutil.copytree(before.directory, copy)
    name = f"branch {seed}/{number}"
    try:
        ending = in_process(partial(_recover, name, replace(before, directory=copy), kinds, plant))
        judge(seed, number, ending)
        assert ending.damage is not None
        if ending.damage.is_written:
            ending = in_process(partial(_write_astray, name, ending, number, plant))
            judge(seed, number, ending)
        if ending.models:
            judge(seed, number, in_process(partial(_look, name, ending, plant)))
    finally:
        shutil.rmtree(copy)


def _recover(name: str, before: Ending, kinds: Collection[str], plant: Callable[[], None] | None) -> Ending:
    """Open and close the copy, so that what is on disk is whole, and choose what happens to it."""
    if plant is not None:
        plant()
    with quire.open(
        os.path.join(before.directory, "store"), settings=SETTINGS, clock=ManualClock(before.now_ms)
    ) as store:
        models = [model for model in before.models if not observe(store, model)]
        store.maintain()  # what retention takes now, it does not take after the damage
        models = [{name: database.retained() for name, database in model.items()} for model in models]
    damage = choose_damage(before.directory, random.Random(f"damage {name}"), kinds)
    return Ending(models[:1], before.now_ms, before.directory, [], [f"branch: {damage}"], damage)


def _write_astray(name: str, before: Ending, number: int, plant: Callable[[], None] | None) -> Ending:
    """Live on a disk that loses or misplaces a write without a word. Only what was closed cleanly is looked at afterwards.

    A process that ends otherwise leaves the newest bytes without a witness: they cannot be told from what it never wrote.
    """
    if plant is not None:
        plant()
    assert before.damage is not None
    draw = random.Random(f"{name} writes")
    clock = ManualClock(before.now_ms)
    disk = FaultyDisk(OsDisk(), Fault[before.damage.how], operation="write", path=before.damage.path)
    reader = Reader(os.path.join(before.directory, "store"))
    ending = replace(before, models=[], steps=list(before.steps))
    life: Steps | None = None
    try:
        with quire.open(os.path.join(before.directory, "store"), settings=SETTINGS, clock=clock, disk=disk) as store:
            life = Steps(store, before.models[0], clock, draw, ending.steps, reader, 500 + number, lambda: disk.fired)
            disk.fail_in(draw.randint(1, 20))
            with suppress(Doubt):
                life.run(STEPS)
            disk.fail_in(NO_CALL)
            ending.findings += life.findings or observe(store, life.model, damaged=True)
        ending.models = life.possible
    except Exception as error:
        ending.steps.append(f"refused: {type(error).__name__}: {error}"[:300])
        if not is_refusal(error):
            ending.findings.append("".join(traceback.format_exception(error))[-3_000:])
    if not disk.fired:
        ending.models = []  # nothing of this kind was written
    ending.now_ms = clock.now_ms()
    return ending


def _look(name: str, before: Ending, plant: Callable[[], None] | None) -> Ending:
    """Open what was damaged, twice: what recovery decides the first time holds the second time."""
    if plant is not None:
        plant()
    assert before.damage is not None
    clock, draw = ManualClock(before.now_ms), random.Random(f"{name} look")
    ending = replace(before, steps=list(before.steps), findings=[])
    disk = inflict(before.damage, before.directory, draw, OsDisk())
    models = before.models
    try:
        for _ in range(2):
            with quire.open(
                os.path.join(before.directory, "store"), settings=SETTINGS, clock=clock, disk=disk
            ) as store:
                ending.findings += _differences(store, models, "")
                clock.advance(120.0)
                store.maintain()
                models = [{name: database.retained() for name, database in model.items()} for model in models]
                ending.findings += _differences(store, models, "after maintenance, ")
    except Exception as error:
        ending.steps.append(f"refused: {type(error).__name__}: {error}"[:300])
        if not is_refusal(error):
            ending.findings.append("".join(traceback.format_exception(error))[-3_000:])
    return ending


def _differences(store: Store, models: list[Model], when: str) -> list[str]:
    """What a damaged store has of none of the models."""
    differences = [observe(store, model, damaged=True) for model in models]
    return [] if [] in differences else [f"{when}{finding}" for findings in differences for finding in findings]


def main(arguments: list[str] | None = None) -> int:
    """The command: one seed, or as many as fit into a time."""
    parser = argparse.ArgumentParser(prog="python -m quire.testing.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="the (first) seed; by default a new one")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with the seeds that follow for so long")
    parser.add_argument("--lives", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="in each life")
    parser.add_argument(
        "--archive",
        action="store_true",
        help="the store is archived, and its disk is lost now and then and restored from the bucket",
    )
    parser.add_argument(
        "--damage",
        action="append",
        default=[],
        metavar="KIND",
        choices=[*KINDS, *WRITTEN, ROW],
        help="do only damage of this kind, before every life; may be repeated",
    )
    options = parser.parse_args(arguments)
    if options.archive and options.damage:
        parser.error("--damage is for stores without an archive")
    sizes = {name: getattr(options, name) for name in ("lives", "steps") if getattr(options, name) is not None}
    run: Callable[[int], int] = partial(
        simulate, branches=1.0 if options.damage else 0.5, kinds=options.damage, **sizes
    )
    if options.archive:
        run = partial(simulate_losses, **sizes)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**9)
    end = time.monotonic() + options.seconds
    while True:
        begun = time.monotonic()
        try:
            done = run(seed)
        except SimulationFailed as failure:
            words = ["python", "-m", "quire.testing.simulation", "--seed", str(seed)]
            words += ["--archive"] * options.archive
            words += [word for name, number in sizes.items() for word in (f"--{name}", str(number))]
            words += [word for kind in options.damage for word in ("--damage", kind)]
            sys.stderr.write(f"{failure}\nagain: {shlex.join(words)}\n")
            return 1
        what = "disks lost" if options.archive else "steps"
        sys.stdout.write(f"seed {seed}: {done} {what} in {time.monotonic() - begun:.1f} s\n")
        sys.stdout.flush()
        if time.monotonic() >= end:
            return 0
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
