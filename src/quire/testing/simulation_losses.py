"""Simulates a store with an archive, whose disk is kept, or lost and restored from the bucket.

    python -m quire.testing.simulation --archive --seed 7

Each life is a process of its own that ends with a close or a kill, between two steps or, more often, at a failpoint of the
archive that is drawn from the seed (`simulation_deaths`): before or after a cut, an upload, a file of the backlog, a base, a
trim, a seal, or a replay; by SIGKILL, or by a loss of power that keeps some of what was not synced. In some lives every event
is a log object of its own, so that a death cuts the queue at any event; in others the bucket does not answer for a while, and
objects wait on disk, the backlog overflows, or the disk is full.

Either the next life opens the directory, or the directory is lost. Then the bucket, as it was at that moment, is restored with
a takeover, must match the model as of the last time `wait` returned, or a later one, and must pass `check`, `verify` and an
audit of all moments of the window.
A life archives in mode `async` or `sync`; in mode `sync` every change that was acknowledged must be there. The former owner may
still run while it is deposed, or wake up in the middle: what it archives before the seal must be restored. After that, it must
be fenced before it archives anything, and so must an owner whose directory is opened later.

Threads: one, and those of the store. Raises `SimulationFailed`.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

import quire
from quire.archive.archiver import Archiver
from quire.archive.window import abandoned_epochs
from quire.core.errors import InvalidInput, QuireError, StoreFenced
from quire.core.settings import ArchiveSettings, StoreSettings
from quire.durable.failpoints import EVERY, armed
from quire.store.store import Store
from quire.testing.clock import ManualClock
from quire.testing.simulation_deaths import POINTS, UNNAMED_BASE, Death, Fate, draw_fate
from quire.testing.simulation_lives import (
    SETTINGS,
    START_MS,
    Ending,
    Report,
    in_mortal_process,
    matching_model,
    raise_findings,
)
from quire.testing.simulation_steps import Model, NoReader, Steps

WAIT = 60.0
LIVES, STEPS = 6, 25
WAITS = 0.15
MEMORY_BYTES = 16 << 10
"""Smaller than the settings allow, so that a few changes during an outage wait on disk."""
BACKLOG_BYTES = (16 << 10, 4 << 30)
FULL_SPOOLS = 0.3
"""Probability that the disk has no space for objects that wait during an outage."""
ABANDONED = 0.2
"""Probability that a life loses its disk, takes over and dies before its first base, and that the next one loses its disk, too:
nothing of the epoch in between can be restored, so it is abandoned."""


@dataclass
class ArchivedEnding(Ending):
    """The result of a life of an archived store."""

    archived: list[Model] = field(default_factory=list)
    """What the bucket may hold: the model when `wait` last returned, and all later ones."""
    is_restorable: bool = False
    """Whether `wait` has ever returned: before that, a lost disk means a lost store."""
    is_opened: bool = False
    """Whether the life has opened the store of `directory`. If not, it died while it deposed the former owner."""
    former: tuple[str, ...] = ()
    """Directories of owners that were deposed, and of takeovers that died."""
    fate: str = ""
    point: str = ""
    """The failpoint at which the life dies, if it comes that far."""


@dataclass(frozen=True)
class Losses:
    """The result of a run."""

    disks: int
    """Disks that were lost and restored from the bucket."""
    deaths: tuple[str, ...]
    """Failpoints at which lives died."""

    def __str__(self) -> str:
        return f"{self.disks} disks lost, {len(self.deaths)} deaths at failpoints"


class ArchivedSteps(Steps):
    """Steps that occasionally wait for the bucket. Before and after each change, `report` is called."""

    def __init__(self, *given: object, archived: list[Model], is_restorable: bool) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.archived = archived
        self.is_restorable = is_restorable
        self.report: Callable[[], None] = _ignore
        self._is_out = False
        """Whether the bucket does not answer."""

    def _change(self, after: Model, act: Callable[[], object], what: str = "") -> bool:
        is_change = after is not self.model
        self.possible = [self.model, after]
        self.archived.append(after)
        self.report()
        done = super()._change(after, act, what)
        self.archived.append(self.model)
        is_acknowledged = done and is_change and _archive_of(self.store).settings.mode == "sync"
        if not is_acknowledged and not self._is_out and self._draw.random() < WAITS:
            _archive_of(self.store).wait(WAIT)
            is_acknowledged = True
        if is_acknowledged:
            self._note_archived()
        self.report()
        return done

    def wait(self) -> None:
        """Wait for the bucket."""
        _archive_of(self.store).wait(WAIT)
        self._note_archived()
        self.report()

    def _note_archived(self) -> None:
        self.archived[:] = [self.model]
        self.is_restorable = True

    def outage(self) -> None:
        """Change the store while the bucket does not answer. In mode `sync`, the first change would wait for the end of it."""
        writes = [self._draw.choice(WRITES) for _ in range(self._draw.randint(2, 10))]
        if _archive_of(self.store).settings.mode == "sync":
            return
        answers = threading.Event()
        spool = "raise:ENOSPC" if self._draw.random() < FULL_SPOOLS else "off"
        try:
            with armed("archive.log.before", lambda _: _wait_for(answers)), armed("archive.spool.before", spool):
                self._is_out = True
                for write in writes:
                    self._log.append(f"during an outage, {write.__name__}")
                    write(self)
        finally:
            self._is_out = False
            answers.set()

    def base(self) -> None:
        """Upload everything again. Then no former owner is needed any more."""
        self._work(_archive_of(self.store).base)
        self.remove_abandoned()

    def trim(self) -> None:
        """Let old moments leave the window."""
        self.release_reader()
        self._clock.advance(self._draw.choice((7_200.0, 100_000.0)))
        self.maintain()

    def leave_window(self) -> None:
        """Replace chunks, and let the old ones, and the moments that need them, leave the window: their objects are deleted."""
        for _ in range(2):
            self.write_rows()
            self.checkpoint()
        for step in (self.maintain, self.base):  # the first retires the old chunks, once no base is needed for them
            self.release_reader()
            self._clock.advance(120.0)
            step()
        self.trim()

    def audit(self) -> None:
        """Read everything that any moment of the window needs: nothing may be missing."""
        if self.is_restorable and not (audit := self.store.heavy.audit_archive(runner="threads")).is_sound:
            self.findings.append(f"the audit found problems: {audit.problems[:3]}")

    def remove_abandoned(self) -> None:
        """Remove the owner epochs that died before their first base, and were then abandoned."""
        with self.store.manifest.read() as txn:
            store_id = txn.store_id()
        for epoch in abandoned_epochs(self.store.objects, store_id):
            if epoch.after is None:
                self._work(partial(self.store.heavy.remove_abandoned, epoch.owner_epoch), str(epoch.owner_epoch))


WRITES: tuple[Callable[[ArchivedSteps], None], ...] = (
    ArchivedSteps.write_rows,
    ArchivedSteps.append_records,
    ArchivedSteps.write_pairs,
    ArchivedSteps.flush_or_compact,
    ArchivedSteps.checkpoint,
    ArchivedSteps.merge,
    ArchivedSteps.drop_snapshot,
    ArchivedSteps.trim,
)
"""Steps during an outage: none of them waits for the log."""
ArchivedSteps.choices = (
    *Steps.choices,
    (3, ArchivedSteps.outage),
    (3, ArchivedSteps.base),
    (3, ArchivedSteps.trim),
    (2, ArchivedSteps.leave_window),
    (1, ArchivedSteps.audit),
    (2, ArchivedSteps.remove_abandoned),
)


def _ignore() -> None:
    """Report nothing."""


def _wait_for(event: threading.Event) -> None:
    event.wait(WAIT)


def simulate_losses(
    seed: int,
    *,
    lives: int = LIVES,
    steps: int = STEPS,
    points: Collection[str] = POINTS,
    plant: Callable[[], None] | None = None,
) -> Losses:
    """Simulate one seed. Lives die at one of the `points`."""
    draw, draw_abandoned = random.Random(f"losses {seed}"), random.Random(f"abandoned {seed}")
    lost, is_abandoned = 0, False
    deaths: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quire-losses-") as base:
        last = ArchivedEnding([{}], START_MS, os.path.join(base, "0"), archived=[{}], is_opened=True)
        for number in range(lives):
            must_lose = is_abandoned or not last.is_opened
            is_abandoned = UNNAMED_BASE in points and draw_abandoned.random() < ABANDONED
            is_lost = number > 0 and (draw.random() < 0.5 or must_lose or is_abandoned) and last.is_restorable
            lost += is_lost
            fate = draw_fate(random.Random(f"fate {seed}/{number}"), points, is_lost=is_lost)
            if is_abandoned and is_lost:
                fate = Fate(UNNAMED_BASE, 1, by_power_loss=draw_abandoned.random() < 0.5)
            life = partial(_live, f"{seed}/{number}", last, number, steps, is_lost, base, fate, plant)
            last = _life_of(in_mortal_process(life), base, number)
            if last.is_killed:
                deaths.append(last.point)
            raise_findings(seed, number, last)
    return Losses(lost, tuple(deaths))


def _life_of(ending: Ending, base: str, number: int) -> ArchivedEnding:
    assert isinstance(ending, ArchivedEnding)
    if ending.is_killed:
        ending.steps.append(f"dies: {ending.fate}")
    if os.path.exists(after := _after(base, number)):
        shutil.rmtree(ending.directory)
        ending.directory = after
    return ending


def _after(base: str, number: int) -> str:
    """Return the directory that a loss of power in a life leaves."""
    return os.path.join(base, f"{number}-after")


# ── a life ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _live(
    seed: str,
    before: ArchivedEnding,
    number: int,
    steps: int,
    is_lost: bool,
    base: str,
    fate: Fate | None,
    plant: Callable[[], None] | None,
    report: Report,
) -> ArchivedEnding:
    draw, clock = random.Random(seed), ManualClock(before.now_ms)
    settings = _draw_settings(draw, base)
    if plant is not None:
        plant()
    here = os.path.join(base, str(number)) if is_lost else before.directory
    ending = replace(before, findings=[], steps=[f"before: {step}" for step in before.steps[-12:]])
    ending.steps.append(f"life {number}{', disk lost' if is_lost else ''}, {settings.archive.mode}")
    ending.fate, ending.point = (str(fate), fate.point) if fate is not None else ("", "")
    if number == 0:  # created without the crash disk, which does not cover LMDB's file
        quire.open(here, settings=settings, clock=clock).close()
    death = Death(fate, random.Random(f"death {seed}"))
    try:
        with armed(EVERY, death.hit):
            life = _begin(ending, settings, clock, draw, death, number, here, base, is_lost, report)
            if life is not None:
                _run(ending, life, draw, steps)
    except BaseException:
        death.stop()
        ending.findings.append(traceback.format_exc()[-4_000:])
    death.stop()
    return ending


def _draw_settings(draw: random.Random, base: str) -> StoreSettings:
    archive = ArchiveSettings(
        mode=draw.choice(("async", "sync")),
        interval_seconds=0.01,
        base_seconds=draw.choice((0.2, 3600.0)),
        retain_seconds=draw.choice((60.0, 86_400.0)),
        backlog_bytes=draw.choice(BACKLOG_BYTES),
    )
    msgspec.structs.force_setattr(archive, "memory_bytes", MEMORY_BYTES)
    return msgspec.structs.replace(SETTINGS, object_store=os.path.join(base, "bucket"), archive=archive)


def _begin(
    ending: ArchivedEnding,
    settings: StoreSettings,
    clock: ManualClock,
    draw: random.Random,
    death: Death,
    number: int,
    here: str,
    base: str,
    is_lost: bool,
    report: Report,
) -> ArchivedSteps | None:
    """Open the directory, or restore the bucket into a new one, and compare the store with the models. Return its steps, or
    `None` if there are findings."""
    deposed: list[Store] = []
    if is_lost:
        ending.is_opened = False
        ending.former = (*ending.former, here)
    report(ending)
    if is_lost:
        deposed = _depose(ending, settings, clock, draw, number, here, base, report)
    store = quire.open(here, settings=settings, clock=clock, disk=death.disk(here))
    if draw.random() < 0.25:
        _archive_of(store).queue.crowded_bytes = 1  # every event is a log object of its own
    model, findings = matching_model(store, ending.archived if is_lost else ending.models)
    death.stop()
    ending.findings += findings
    if model is None or ending.findings:
        return None
    archived = [model] if is_lost else [*ending.archived, model]
    life = _steps(ending, store, model, clock, draw, 1 + number, archived, report)
    former = [*ending.former[:-1], ending.directory] if is_lost else []
    ending.is_opened, ending.directory, ending.former = True, here, ()
    life.report()
    death.endanger(store, _after(base, number))
    # after the report: if this life dies, nobody expects anything of these directories any more
    ending.findings += [finding for owner in deposed for finding in _is_not_fenced(owner)]
    for directory in filter(os.path.exists, former):
        if not deposed and draw.random() < 0.5:
            ending.findings += _comes_back(directory, settings, clock)
        shutil.rmtree(directory, ignore_errors=bool(deposed))  # the threads of a deposed owner may still write
    if number:  # every byte of the store and every rule, not only what the model has
        life.verify()
        life.audit()
    return life


def _steps(
    ending: ArchivedEnding,
    store: Store,
    model: Model,
    clock: ManualClock,
    draw: random.Random,
    number: int,
    archived: list[Model],
    report: Report,
) -> ArchivedSteps:
    """Return the steps of a life, which report what the store and the bucket may hold."""
    life = ArchivedSteps(
        store,
        model,
        clock,
        draw,
        ending.steps,
        NoReader(),
        number,
        archived=archived,
        is_restorable=ending.is_restorable,
    )

    def report_state() -> None:
        ending.models, ending.archived, ending.now_ms = life.possible, life.archived, clock.now_ms()
        ending.is_restorable = life.is_restorable
        report(ending)

    life.report = report_state
    return life


def _run(ending: ArchivedEnding, life: ArchivedSteps, draw: random.Random, steps: int) -> None:
    """Run the steps, and close the store or leave it as it is."""
    life.run(steps)
    ending.findings += life.findings
    life.report()
    if draw.random() < 0.5:
        life.store.close()
        ending.archived, ending.is_restorable = [life.model], True


# ── owners that are deposed ───────────────────────────────────────────────────────────────────────────────────────────
def _depose(
    ending: ArchivedEnding,
    settings: StoreSettings,
    clock: ManualClock,
    draw: random.Random,
    number: int,
    here: str,
    base: str,
    report: Report,
) -> list[Store]:
    """Restore the bucket with a takeover. The former owner runs, wakes up when its log has been read, or is dead. Return it if
    it is running."""
    owner = draw.choice(("dead", "dead", "runs", "wakes"))
    steps, waits = draw.randint(1, 4), draw.random() < 0.7
    is_deposed = len(ending.former) > 1  # perhaps, by a takeover that died
    awake: list[Store] = []
    lives: list[ArchivedSteps] = []
    seals: list[str] = []
    restoring_thread = threading.get_ident()

    def wake() -> None:
        ending.steps.append(f"the former owner {owner}")
        try:
            awake.append(quire.open(ending.directory, settings=settings, clock=clock))
            if is_deposed:
                _archive_of(awake[0]).base()  # an upload, by which it finds out
        except StoreFenced:
            if not is_deposed:
                raise
            return
        model, findings = matching_model(awake[0], ending.models)
        ending.findings += findings
        if model is not None:
            archived = [*ending.archived, model]
            lives.append(_steps(ending, awake[0], model, clock, draw, 500 + number, archived, report))

    def write(point: str) -> None:
        if threading.get_ident() != restoring_thread:  # an owner seals the log of the owner before it
            return
        seals.append(point)
        if len(seals) > 1:
            return
        if owner == "wakes":
            wake()
        for life in lives:
            life.run(steps)
            ending.findings += life.findings
            if waits:
                life.wait()

    if owner == "runs":
        wake()
    with armed("archive.seal.before", write):
        quire.restore(os.path.join(base, "bucket"), here, takeover=True, clock=clock)
    return awake


def _archive_of(store: Store) -> Archiver:
    assert store.archive is not None
    return store.archive


def _comes_back(directory: str, settings: StoreSettings, clock: ManualClock) -> list[str]:
    """Open the deposed owner's directory and write: nothing it does may be reported as archived. Return the findings."""
    try:
        with quire.open(directory, settings=settings, clock=clock) as store:
            return _is_not_fenced(store)
    except StoreFenced:
        return []
    except InvalidInput as error:  # of a restore that died
        if "did not complete" in str(error):
            return []
        raise


def _is_not_fenced(store: Store) -> list[str]:
    """Return a finding if a deposed owner can archive a change."""
    try:
        store.create("came-back", "lsm")
    except StoreFenced:
        return []
    except QuireError:
        pass  # the name may be taken, for example
    try:
        _archive_of(store).wait(WAIT)
    except StoreFenced:
        return []
    return ["a deposed owner archived something"]
