"""What the simulations share: the settings of their stores, how a life ends, its process, and what its end says.

Raises `SimulationFailed`, which has the seed, the life, its steps and the findings.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module

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
"""Seconds: longer than any run, so that timers of the engines do nothing by themselves."""

SETTINGS = StoreSettings(
    object_store="../bucket",
    feed=FeedSettings(retain_seconds=3_600.0),
    maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=60.0, runner="threads", merge_chain=3),
    pages=PagesSettings(page_size=1024, publish_seconds=NEVER, seal_seconds=NEVER),
    manifest_log=ManifestLogSettings(chunk_bytes=16 << 10, record_bytes_max=1024, snapshot_chunks=2),
    stream=StreamSettings(segment_bytes=8 << 10, sync_seconds=0, tick_seconds=NEVER, seal_seconds=600.0),
    lsm=LsmSettings(
        memtable_bytes=8 << 10, table_bytes=8 << 10, block_bytes=512, level0_tables=2, level_bytes=32 << 10
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
"""What a store loads when it is first needed; each life would load it anew, for a third of its time."""
START_MS = 4_102_444_800_000
"""In 2100: what the file system has stamped with the real time is old, so that its age keeps nothing."""


class SimulationFailed(AssertionError):
    """Something was not as promised; the message has the seed, the life, its steps and what was found."""


@dataclass
class Ending:
    """How a life ended, as its process tells the next one."""

    models: list[Model]
    """The model, or both sides of a doubt."""
    now_ms: int
    directory: str
    findings: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    damage: Damage | None = None
    """What is done to the copy of a branch."""


def judge(seed: int, number: int, ending: Ending) -> None:
    """Fail if anything was found."""
    if ending.findings:
        steps = "\n".join(f"  {step}" for step in ending.steps[-40:])
        findings = "\n".join(f"  {finding}" for finding in ending.findings)
        raise SimulationFailed(f"seed {seed}, life {number}\nsteps:\n{steps}\nfindings:\n{findings}")


def held(store: Store, models: Sequence[Model]) -> tuple[Model | None, list[str]]:
    """Which of the models a store holds; if none, how it differs from each."""
    differences = [observe(store, model) for model in models]
    for model, findings in zip(models, differences):
        if not findings:
            return model, []
    return None, [
        f"if the interrupted step was {'done' if index else 'not done'}: {finding}"
        for index, findings in enumerate(differences)
        for finding in findings
    ]


def in_process(run: Callable[[], Ending]) -> Ending:
    """The result of `run` in a forked process, which ends without a goodbye."""
    for name in LOADED_ON_USE:
        with suppress(ImportError):  # pandas is pyarrow's choice, if it is there
            import_module(name)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            # What the engines log about faults is no news. By its number: `sys.stderr` may be a test's.
            os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
            try:
                answer: object = run()
            except BaseException:
                answer = traceback.format_exc()
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(pid, 0)
    ending = pickle.loads(raw) if raw else f"the process ended with {os.waitstatus_to_exitcode(status)}"
    if not isinstance(ending, Ending):
        raise SimulationFailed(ending)
    return ending
