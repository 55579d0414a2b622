"""Simulates a whole store from a seed: every engine and every fault, compared with a model.

    python -m quire.testing.simulation --seed 7
    python -m quire.testing.simulation --seconds 600
    python -m quire.testing.simulation --archive

Terms
  life     from opening a store until it is closed or killed, loses power, or its disk is full or fails: a few dozen steps
           (`Steps`) in a process of its own, forked from one that never opens a store
  branch   a life on a copy whose bytes are damaged, at rest or by a disk that loses or misplaces a write; afterwards the run
           continues with the original

The seed determines everything: steps, their arguments, faults, and what power loss keeps. Time moves only when a step moves it,
and nothing runs in the background.

Invariants
  1. After a fault the store matches the model before or after the interrupted step; after `DiskFull`, the one before.
  2. Whatever the damage of a branch, every read returns what the model has, or is refused with a typed error.
  3. When everything was dropped and maintenance has run, no byte of any database is left (`leftovers`).

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
from quire.testing.crashdisk import Chooser, CrashDisk
from quire.testing.faults import Fault, FaultyDisk, ObjectFault, ObjectFaults, PowerCut
from quire.testing.simulation_damage import KINDS, ROW, WRITTEN, choose_damage, inflict
from quire.testing.simulation_deaths import draw_chooser
from quire.testing.simulation_lives import (
    SETTINGS,
    START_MS,
    Ending,
    SimulationFailed,
    in_process,
    matching_model,
    raise_findings,
)
from quire.testing.simulation_losses import simulate_losses
from quire.testing.simulation_steps import Model, Reader, StepInterrupted, Steps, is_refusal, observe

NO_CALL = 10**9
BETWEEN_LIVES = (0.0,) * 8 + (-86_400.0, -60.0, 60.0, 86_400.0)
"""Seconds by which the wall clock may jump while the store is closed."""
LIVES = 12
STEPS = 30


@dataclass(frozen=True)
class Trouble:
    """A fault that may happen once in a life, and its probability."""

    weight: int
    fault: Fault | ObjectFault | None
    operation: str = "*"
    """Pattern of the disk calls that may fail."""
    calls: int = 1_500
    """One of this many first matching calls fails."""
    path: str = "*"
    """Pattern of the paths of the files."""


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
    """Simulate one seed and return the number of steps done.

    `branches` is the probability of a branch before each life, `kinds` are the kinds of files to damage in it (all, if empty),
    and one of `faults` is drawn for each life. `plant` is called in every process, to plant a bug in the engines.
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
            raise_findings(seed, number, last)
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
    """Open the store as the last life left it, check it, run the steps, and end with a close, a kill or a fault."""
    draw = random.Random(seed)
    clock = ManualClock(before.now_ms)
    clock.jump(draw.choice(BETWEEN_LIVES) if number else 0.0)
    here = before.directory
    if not os.path.exists(os.path.join(here, "store", MANIFEST)):
        # created without the crash disk, which does not cover LMDB's file
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
    if fault is Fault.POWER_CUT:  # may interrupt recovery too; any other fault there would only refuse the opening
        disk.fail_in(fails_in)
    ending = Ending(before.models, before.now_ms, here, [], [f"life {number}: {fault.name if fault else 'no fault'}"])
    reader = Reader(os.path.join(here, "store"))
    life: Steps | None = None
    cut = False
    try:
        store = quire.open(os.path.join(here, "store"), settings=SETTINGS, clock=clock, disk=disk)
        model, ending.findings = matching_model(store, before.models)
        if model is None:
            return ending
        life = Steps(store, model, clock, draw, ending.steps, reader, number)
        if fault is not None and fault is not Fault.POWER_CUT:
            faulty.fail_in(fails_in)
        life.run(steps)
        faulty.fail_in(NO_CALL)  # a fault that did not happen during the steps must not happen during the checks
        ending.findings += life.findings or observe(store, life.model)
        if final and not ending.findings:
            ending.findings += life.drop_everything(here)
        if draw.random() < 0.3 and fault is None and not final:  # killed between two steps
            raise PowerCut
        store.close()
    except BaseException as error:
        ending.steps.append(f"ends with {type(error).__name__}: {error}"[:300])
        is_expected = isinstance(error, PowerCut) or (
            faulty.fired and (isinstance(error, StepInterrupted) or is_refusal(error))
        )
        if not is_expected and not disk.has_power_cut:
            ending.findings.append("".join(traceback.format_exception(error))[-3_000:])
        cut = isinstance(error, PowerCut)
    if life is not None:
        ending.models = life.possible
    if (cut or disk.has_power_cut) and not ending.findings:
        disk.cut()
        ending.directory = _crash(inner, here, number, draw_chooser(draw))
    ending.now_ms = clock.now_ms()
    return ending


def _crash(disk: CrashDisk, here: str, number: int, choose: Chooser) -> str:
    """Write the directory as the crash left it, under a new name, with LMDB's file unchanged. Return the new directory."""
    after = f"{here.partition('.')[0]}.{number}"
    disk.crash(after, choose)
    shutil.copyfile(os.path.join(here, "store", MANIFEST), os.path.join(after, "store", MANIFEST))
    return after


# ── a branch ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def _branch(seed: int, number: int, before: Ending, kinds: Collection[str], plant: Callable[[], None] | None) -> None:
    """Damage a copy, and check that no wrong data is read from it."""
    copy = f"{before.directory}.branch"
    shutil.copytree(before.directory, copy)
    name = f"branch {seed}/{number}"
    try:
        ending = in_process(partial(_recover, name, replace(before, directory=copy), kinds, plant))
        raise_findings(seed, number, ending)
        assert ending.damage is not None
        if ending.damage.is_written:
            ending = in_process(partial(_write_astray, name, ending, number, plant))
            raise_findings(seed, number, ending)
        if ending.models:
            raise_findings(seed, number, in_process(partial(_reopen_damaged, name, ending, plant)))
    finally:
        shutil.rmtree(copy)


def _recover(name: str, before: Ending, kinds: Collection[str], plant: Callable[[], None] | None) -> Ending:
    """Open and close the copy, so that it is consistent on disk, and choose the damage."""
    if plant is not None:
        plant()
    with quire.open(
        os.path.join(before.directory, "store"), settings=SETTINGS, clock=ManualClock(before.now_ms)
    ) as store:
        models = [model for model in before.models if not observe(store, model)]
        store.maintain()  # apply retention now, so that it drops nothing after the damage
        models = [{name: database.retained() for name, database in model.items()} for model in models]
    damage = choose_damage(before.directory, random.Random(f"damage {name}"), kinds)
    return Ending(models[:1], before.now_ms, before.directory, [], [f"branch: {damage}"], damage)


def _write_astray(name: str, before: Ending, number: int, plant: Callable[[], None] | None) -> Ending:
    """Run a life on a disk that silently loses or misplaces a write. The result is checked only after a clean close.

    After any other end, the newest bytes have no witness: a lost write cannot be distinguished from one that never happened.
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
            with suppress(StepInterrupted):
                life.run(STEPS)
            disk.fail_in(NO_CALL)
            ending.findings += life.findings or observe(store, life.model, damaged=True)
        ending.models = life.possible
    except Exception as error:
        ending.steps.append(f"refused: {type(error).__name__}: {error}"[:300])
        if not is_refusal(error):
            ending.findings.append("".join(traceback.format_exception(error))[-3_000:])
    if not disk.fired:
        ending.models = []  # no such file was written, so no write was lost
    ending.now_ms = clock.now_ms()
    return ending


def _reopen_damaged(name: str, before: Ending, plant: Callable[[], None] | None) -> Ending:
    """Open the damaged store twice: what recovery decides the first time must hold the second time."""
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
    """Return how a damaged store differs from each of the models; empty if it matches one."""
    differences = [observe(store, model, damaged=True) for model in models]
    return [] if [] in differences else [f"{when}{finding}" for findings in differences for finding in findings]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line: simulate one seed, or as many as fit into `--seconds`. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quire.testing.simulation", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=None, help="the (first) seed; by default a new one")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on with the seeds that follow for so long")
    parser.add_argument("--lives", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None, help="in each life")
    parser.add_argument(
        "--archive",
        action="store_true",
        help="the store is archived, and dies at failpoints of the archive; lost disks are restored from the bucket",
    )
    parser.add_argument(
        "--standbys",
        type=float,
        default=None,
        metavar="P",
        help="with --archive: the share of the runs in which a standby follows (0.5)",
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
    if options.standbys is not None and not options.archive:
        parser.error("--standbys needs --archive")
    sizes = {
        name: getattr(options, name) for name in ("lives", "steps", "standbys") if getattr(options, name) is not None
    }
    run: Callable[[int], object] = partial(
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
        what = done if options.archive else f"{done} steps"
        sys.stdout.write(f"seed {seed}: {what} in {time.monotonic() - begun:.1f} s\n")
        sys.stdout.flush()
        if time.monotonic() >= end:
            return 0
        seed += 1


if __name__ == "__main__":
    sys.exit(main())
