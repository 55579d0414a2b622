"""Shared by the simulations: settings of their stores, running a life in its own process, and the result of a life.

Raises `SimulationFailed` with the seed, the life, its steps and the findings.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import BinaryIO

from quire.core.settings import (
    FeedSettings,
    LsmSettings,
    MaintenanceSettings,
    ManifestLogSettings,
    PagesSettings,
    StoreSettings,
    StreamSettings,
)
from quire.store.store import Store
from quire.testing.simulation_damage import Damage
from quire.testing.simulation_steps import Model, observe

NEVER = 1e9
"""Seconds, longer than any run, so that the engines' timers never fire."""

SETTINGS = StoreSettings(
    object_store="../bucket",
    feed=FeedSettings(retain_seconds=3_600.0),
    maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=60.0, runner="threads", merge_chain=3),
    pages=PagesSettings(page_size=1024, publish_seconds=NEVER, seal_seconds=NEVER),
    manifest_log=ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=2),
    stream=StreamSettings(segment_bytes=8 << 10, sync_seconds=0, tick_seconds=NEVER, seal_seconds=600.0),
    lsm=LsmSettings(
        memtable_bytes=8 << 10,
        table_bytes=8 << 10,
        block_bytes=512,
        level0_tables=2,
        level_bytes=32 << 10,
        manifest_log_bytes=300,
    ),
)

STDERR = 2
LOADED_ON_USE = (
    "quire.store.opening",
    "quire.store.archiving",
    "quire.pages.engine",
    "quire.sqlite.connect",
    "quire.lsm.backup",
    "quire.archive.artifacts",
    "quire.jobs.verify.job",
    "quire.jobs.sweep.job",
    "awscrt.checksums",
    "pyarrow.compute",
    "pandas",
)
"""Modules that a store loads on first use. They are loaded before the fork: otherwise loading takes a third of each life."""
START_MS = 4_102_444_800_000
"""A time in 2100: files that the file system stamps with the real time count as old, so that their age protects none."""


class SimulationFailed(AssertionError):
    """A guarantee was violated. The message has the seed, the life, its steps and the findings."""


@dataclass
class Ending:
    """The result of a life, passed from its process to the next life."""

    models: list[Model]
    """The model; after an interrupted step, the models before and after it."""
    now_ms: int
    directory: str
    findings: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    damage: Damage | None = None
    """The damage done to the copy of a branch."""
    is_killed: bool = False
    """Whether the process was killed: this is the last state that it reported."""


Report = Callable[[object], None]
"""Called by a life with its `Ending` as far as it has come."""


def raise_findings(seed: int, number: int, ending: Ending) -> None:
    """Raise `SimulationFailed` if the life has findings."""
    if ending.findings:
        steps = "\n".join(f"  {step}" for step in ending.steps[-40:])
        findings = "\n".join(f"  {finding}" for finding in ending.findings)
        raise SimulationFailed(f"seed {seed}, life {number}\nsteps:\n{steps}\nfindings:\n{findings}")


def matching_model(store: Store, models: Sequence[Model]) -> tuple[Model | None, list[str]]:
    """Return which of the models a store matches, or `None` and how it differs from each."""
    differences: list[list[str]] = []
    for model in models:
        differences.append(observe(store, model))
        if not differences[-1]:
            return model, []
    return None, [
        f"if the interrupted step was {'done' if index else 'not done'}: {finding}"
        for index, findings in enumerate(differences)
        for finding in findings
    ]


def in_process(run: Callable[[], Ending]) -> Ending:
    """Return the result of `run` in a forked process, which exits without any cleanup."""
    return in_mortal_process(lambda _: run())


def in_mortal_process(run: Callable[[Report], Ending]) -> Ending:
    """Return the result of `run` in a forked process that may be killed: then the last result that it has reported."""
    ending, is_killed = begin_process(run)()
    if not isinstance(ending, Ending):
        raise SimulationFailed(f"the process ended without a report, killed: {is_killed}")
    ending.is_killed = is_killed
    return ending


def begin_process(run: Callable[[Report], object]) -> Callable[[], tuple[object, bool]]:
    """Run `run` in a forked process. Return a function that waits for its end and returns its last report, and whether it was
    killed.

    A report is in the pipe, and survives the kill, before `run` continues; what `run` returns is the last one. REQUIRES that
    this process has no threads.
    """
    for name in LOADED_ON_USE:
        with suppress(ImportError):  # pyarrow uses pandas only if it is installed
            import_module(name)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            # Hide what the engines log about injected faults. By descriptor: `sys.stderr` may be replaced by a test.
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
            with os.fdopen(writing, "wb") as pipe:
                report = partial(_send, pipe)
                try:
                    report(run(report))
                except BaseException:
                    report(_Failure(traceback.format_exc()[-4_000:]))
        finally:
            os._exit(0)
    os.close(writing)
    return partial(_end_of, pid, reading)


def _end_of(pid: int, reading: int) -> tuple[object, bool]:
    with os.fdopen(reading, "rb") as pipe:
        last = _last_report(pipe)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if isinstance(last, _Failure) or code not in (0, -signal.SIGKILL):
        raise SimulationFailed(last.text if isinstance(last, _Failure) else f"the process ended with {code}")
    return last, code != 0


@dataclass
class _Failure:
    """The last report of a process that failed."""

    text: str


def _send(pipe: BinaryIO, report: object) -> None:
    pickle.dump(report, pipe)
    pipe.flush()


def _last_report(pipe: BinaryIO) -> object:
    """Return the last complete report of a process, when it has ended; `None` if there is none."""
    report: object = None
    while True:
        try:
            report = pickle.load(pipe)
        except (EOFError, pickle.UnpicklingError):  # the end, or a report that a kill has interrupted
            return report
