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

In half of the runs a standby follows the bucket (`simulation_standby`). There half of the lost disks are not restored: the
standby is promoted, now and then together with a second one, and must have the same.
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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

import quire
from quire.archive.log_reader import epochs, log_positions
from quire.core.errors import InvalidInput, QuireError, StoreFenced
from quire.core.settings import ArchiveSettings, StoreSettings
from quire.durable.failpoints import EVERY, armed
from quire.durable.files import Disk
from quire.durable.names import MANIFEST
from quire.durable.object_names import owner_prefix
from quire.store.store import Store
from quire.testing.clock import ManualClock
from quire.testing.simulation_archive_steps import WAIT, ArchivedSteps, FollowedSteps, archive_of
from quire.testing.simulation_deaths import (
    CLAIM_POINTS,
    FOLLOW_POINTS,
    OWNER_POINTS,
    POINTS,
    PROMOTION_POINTS,
    RESTORE_POINTS,
    UNNAMED_BASE,
    Death,
    Fate,
    draw_fate,
    remove_directory,
    take_what_is_left,
)
from quire.testing.simulation_lives import (
    SETTINGS,
    START_MS,
    Ending,
    Report,
    in_mortal_process,
    matching_model,
    raise_findings,
)
from quire.testing.simulation_standby import (
    Machine,
    Rival,
    StandbyFollower,
    Trail,
    is_promoted,
    left_behind,
    promote_one,
)
from quire.testing.simulation_steps import Model, NoReader, StepInterrupted

LIVES, STEPS = 6, 25
MEMORY_BYTES = 16 << 10
"""Smaller than the settings allow, so that a few changes during an outage wait on disk."""
BACKLOG_BYTES = (16 << 10, 4 << 30)
ABANDONED = 0.2
"""Probability that a life loses its disk, takes over and dies before its first base, and that the next one loses its disk, too:
nothing of the epoch in between can be restored, so it is abandoned."""
STANDBYS = 0.5
"""Probability that a standby follows in a run."""
PROMOTIONS, RIVALS = 0.5, 0.25
"""Probabilities that a standby is promoted after the loss of a disk, and that a second one is at the
same time."""


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
    standby: Trail | None = None


@dataclass(frozen=True)
class LifeStart:
    """How a life begins."""

    seed: str
    number: int
    base: str
    """The directory of the run."""
    fate: Fate | None
    is_lost: bool
    is_promoted: bool
    """Whether the lost disk is replaced by the standby."""
    machine: Machine | None
    points: Collection[str]

    @property
    def bucket(self) -> str:
        return os.path.join(self.base, "bucket")

    @property
    def after(self) -> str:
        """The directory that a loss of power leaves."""
        return _after(self.base, self.number)


@dataclass(frozen=True)
class Losses:
    """The result of a run."""

    disks: int
    """Disks that were lost and restored from the bucket."""
    deaths: tuple[str, ...]
    """Failpoints at which lives died."""
    promotions: int = 0
    """Disks that were lost, after which the standby was promoted, or its promotion died."""
    sessions: int = 0
    """How often a standby was opened to follow."""
    standby_deaths: tuple[str, ...] = ()
    """Failpoints at which a standby died."""

    def __str__(self) -> str:
        text = f"{self.disks} disks lost, {len(self.deaths)} deaths at failpoints"
        if self.sessions or self.promotions:
            text += f", {self.promotions} promotions, {self.sessions} sessions of a standby"
            text += f" with {len(self.standby_deaths)} deaths"
        return text


def simulate_losses(
    seed: int,
    *,
    lives: int = LIVES,
    steps: int = STEPS,
    points: Collection[str] = (*POINTS, *CLAIM_POINTS),
    standbys: float = STANDBYS,
    plant: Callable[[], None] | None = None,
) -> Losses:
    """Simulate one seed. Lives die at one of the `points`. `standbys` is the probability that a standby follows; `plant` is
    called in every process, to plant a bug."""
    draw, draw_abandoned = random.Random(f"losses {seed}"), random.Random(f"abandoned {seed}")
    draw_standby = random.Random(f"standby {seed}")
    has_standby = any(point in points for point in (*FOLLOW_POINTS, *PROMOTION_POINTS))
    has_standby = has_standby and draw_standby.random() < standbys
    lost, promotions, is_abandoned = 0, 0, False
    deaths: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quire-losses-") as base:
        last = ArchivedEnding([{}], START_MS, os.path.join(base, "0"), archived=[{}], is_opened=True)
        last.standby = Trail(_standby(base, 0), [{}]) if has_standby else None
        for number in range(lives):
            must_lose = is_abandoned or not last.is_opened
            is_abandoned = UNNAMED_BASE in points and draw_abandoned.random() < ABANDONED
            is_lost = number > 0 and (draw.random() < 0.5 or must_lose or is_abandoned) and last.is_restorable
            lost += is_lost
            promotes = is_lost and last.standby is not None and draw_standby.random() < PROMOTIONS
            promotions += promotes
            if is_lost and not promotes and last.standby is not None and is_promoted(last.standby.directory):
                # The life that promoted it died before it could report that, and is followed by another takeover.
                last.standby = last.standby.successor(_standby(base, number), last.archived)
            groups = [(*RESTORE_POINTS, *CLAIM_POINTS), OWNER_POINTS] if is_lost else [OWNER_POINTS]
            if promotes:
                groups = [(*PROMOTION_POINTS, *CLAIM_POINTS), (*RESTORE_POINTS, *FOLLOW_POINTS), OWNER_POINTS]
            fate = draw_fate(random.Random(f"fate {seed}/{number}"), points, groups)
            if is_abandoned and is_lost:
                fate = Fate(UNNAMED_BASE, 1, by_power_loss=draw_abandoned.random() < 0.5)
            machine = Machine(plant) if has_standby else None
            start = LifeStart(f"{seed}/{number}", number, base, fate, is_lost, promotes, machine, points)
            try:
                last = _life_of(in_mortal_process(partial(_live, start, last, steps, plant)), base, number)
            finally:
                if machine is not None:
                    machine.close()
            if last.is_killed:
                deaths.append(last.point)
            raise_findings(seed, number, last)
    if last.standby is None:
        return Losses(lost, tuple(deaths))
    return Losses(lost, tuple(deaths), promotions, last.standby.sessions, tuple(last.standby.deaths))


def _life_of(ending: Ending, base: str, number: int) -> ArchivedEnding:
    assert isinstance(ending, ArchivedEnding)
    if ending.is_killed:
        ending.steps.append(f"dies: {ending.fate}")
    if not os.path.exists(after := _after(base, number)):
        return ending
    if ending.is_opened:
        remove_directory(ending.directory)
        ending.directory = after
    else:
        assert ending.standby is not None, "a restore runs on a disk that does not lose power"
        take_what_is_left(ending.standby.directory, after)
    return ending


def _after(base: str, number: int) -> str:
    """Return the directory that a loss of power in a life leaves."""
    return os.path.join(base, f"{number}-after")


def _standby(base: str, number: int) -> str:
    """Return the directory of the standby that is new in a life."""
    return os.path.join(base, f"standby-{number}")


# ── a life ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _live(
    start: LifeStart, before: ArchivedEnding, steps: int, plant: Callable[[], None] | None, report: Report
) -> ArchivedEnding:
    draw, clock, fate = random.Random(start.seed), ManualClock(before.now_ms), start.fate
    settings = _draw_settings(draw, start.base)
    if plant is not None:
        plant()
    here = _directory_of(start, before)
    ending = replace(before, findings=[], steps=[f"before: {step}" for step in before.steps[-12:]])
    loss = ", disk lost, standby promoted" if start.is_promoted else ", disk lost" if start.is_lost else ""
    ending.steps.append(f"life {start.number}{loss}, {settings.archive.mode}")
    ending.fate, ending.point = (str(fate), fate.point) if fate is not None else ("", "")
    if start.number == 0:  # created without the crash disk, which does not cover LMDB's file
        quire.open(here, settings=settings, clock=clock).close()
    death = Death(fate, random.Random(f"death {start.seed}"))
    try:
        with armed(EVERY, death.hit):
            life = _begin(start, ending, settings, clock, draw, death, here, report)
            if life is not None:
                _run(ending, life, draw, steps)
    except BaseException:
        death.stop()
        ending.findings.append(traceback.format_exc()[-4_000:])
    death.stop()
    return ending


def _directory_of(start: LifeStart, before: ArchivedEnding) -> str:
    """Return the directory that a life opens, if no other standby is promoted first."""
    if not start.is_lost:
        return before.directory
    if start.is_promoted:
        assert before.standby is not None
        return before.standby.directory
    return os.path.join(start.base, str(start.number))


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
    start: LifeStart,
    ending: ArchivedEnding,
    settings: StoreSettings,
    clock: ManualClock,
    draw: random.Random,
    death: Death,
    here: str,
    report: Report,
) -> ArchivedSteps | None:
    """Open the directory, or restore the bucket into a new one, or promote the standby, and compare the store with the models.
    Return its steps, or `None` if there are findings."""
    deposed: list[Store] = []
    disk = death.disk(here) if start.is_promoted or not start.is_lost else None
    if start.is_lost:
        rival, is_deposed = _draw_rival(start), not ending.is_opened
        if start.is_promoted:
            death.endanger_standby(start.after)
        ending.is_opened = False
        ending.former = tuple(dict.fromkeys((*ending.former, here, *([rival.directory] if rival is not None else []))))
        report(ending)
        take_over = partial(_take_over, start, here, clock, disk, rival, ending.steps)
        deposed, owner = _depose(start, ending, settings, clock, draw, take_over, report, is_deposed, rival is not None)
        disk = disk if start.is_promoted and owner == here else death.disk(owner)
        here = owner
    else:
        report(ending)
    store = quire.open(here, settings=settings, clock=clock, disk=disk)
    if draw.random() < 0.25:
        archive_of(store).queue.crowded_bytes = 1  # every event is a log object of its own
    model, findings = matching_model(store, ending.archived if start.is_lost else ending.models)
    death.stop()
    ending.findings += findings + (left_behind(here) if start.is_promoted else [])
    if model is None or ending.findings:
        return None
    former = [*ending.former, ending.directory] if start.is_lost else []
    ending.standby = _next_standby(start, ending.standby, model)
    archived = [model] if start.is_lost else [*ending.archived, model]
    follower = None
    if ending.standby is not None and start.machine is not None:
        follower = StandbyFollower(ending.standby, start.machine, start.bucket, start.points, start.seed)
    life = _steps(ending, store, model, clock, draw, 1 + start.number, archived, report, follower)
    ending.is_opened, ending.directory, ending.former = True, here, ()
    life.report()
    death.endanger(store, start.after)
    # after the report: if this life dies, nobody expects anything of these directories any more
    ending.findings += [finding for owner in deposed for finding in _is_not_fenced(owner)]
    followed = ending.standby.directory if ending.standby is not None else ""
    for directory in filter(os.path.exists, former):
        if directory in (here, followed):
            continue
        if not deposed and draw.random() < 0.5:
            ending.findings += _comes_back(directory, settings, clock)
        shutil.rmtree(directory, ignore_errors=bool(deposed))  # the threads of a deposed owner may still write
    if start.number:  # every byte of the store and every rule, not only what the model has
        life.verify()
        life.audit()
    return life


def _draw_rival(start: LifeStart) -> Rival | None:
    draw = random.Random(f"rival {start.seed}")
    if not start.is_promoted or draw.random() >= RIVALS:
        return None
    return Rival(os.path.join(start.base, f"rival-{start.number}"), is_met=draw.random() < 0.5)


def _next_standby(start: LifeStart, standby: Trail | None, model: Model) -> Trail | None:
    """Return the standby that follows the owner. A new one takes the place of one that was promoted."""
    if standby is None:
        return None
    if is_promoted(standby.directory):
        return standby.successor(_standby(start.base, start.number), [model])
    standby.models.append(model)
    return standby


def _steps(
    ending: ArchivedEnding,
    store: Store,
    model: Model,
    clock: ManualClock,
    draw: random.Random,
    number: int,
    archived: list[Model],
    report: Report,
    follower: StandbyFollower | None = None,
) -> ArchivedSteps:
    """Return the steps of a life, which report what the store and the bucket may hold."""
    steps = ArchivedSteps if follower is None else FollowedSteps
    life = steps(
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
    life.follower = follower

    def report_state() -> None:
        ending.models, ending.archived, ending.now_ms = life.possible, life.archived, clock.now_ms()
        ending.is_restorable = life.is_restorable
        report(ending)

    life.report = report_state
    return life


def _run(ending: ArchivedEnding, life: ArchivedSteps, draw: random.Random, steps: int) -> None:
    """Run the steps, and close the store or leave it as it is."""
    life.run(steps)
    life.remove_abandoned()  # few lives do it by chance while there is such an epoch
    life.stop_following()
    ending.findings += life.findings
    life.report()
    if draw.random() < 0.5:
        life.store.close()
        ending.archived, ending.is_restorable = [life.model], True


# ── owners that are deposed ───────────────────────────────────────────────────────────────────────────────────────────
def _depose(
    start: LifeStart,
    ending: ArchivedEnding,
    settings: StoreSettings,
    clock: ManualClock,
    draw: random.Random,
    take_over: Callable[[], str],
    report: Report,
    is_deposed: bool,
    has_rival: bool,
) -> tuple[list[Store], str]:
    """Call `take_over`. The former owner runs, wakes up when its log has been read, or is dead. Return it if it is running, and
    the directory of the new owner. `is_deposed`: a takeover that died may have deposed the former owner."""
    owner = draw.choice(("dead", "dead", "runs", "wakes"))
    steps, waits = draw.randint(1, 4), draw.random() < 0.7
    if has_rival or (start.is_promoted and is_deposed):  # an epoch may be claimed at any moment, or is already
        owner = "dead"
    awake: list[Store] = []
    lives: list[ArchivedSteps] = []
    seals: list[str] = []
    restoring_thread = threading.get_ident()

    def wake() -> None:
        ending.steps.append(f"the former owner {owner}")
        try:
            awake.append(quire.open(ending.directory, settings=settings, clock=clock))
            if is_deposed:
                archive_of(awake[0]).base()  # an upload, by which it finds out
        except StoreFenced:
            if not is_deposed:
                raise
            return
        model, findings = matching_model(awake[0], ending.models)
        ending.findings += findings
        if model is not None:
            archived = [*ending.archived, model]
            lives.append(_steps(ending, awake[0], model, clock, draw, 500 + start.number, archived, report))

    def write(point: str) -> None:
        if threading.get_ident() != restoring_thread:  # an owner seals the log of the owner before it
            return
        seals.append(point)
        if len(seals) > 1:
            return
        if owner == "wakes":
            wake()
        for life in lives:
            with _fenced_by_claim():
                life.run(steps)
                if waits:
                    life.wait()
            ending.findings += life.findings

    if owner == "runs":
        wake()
    # A takeover claims its epoch before it seals the log: an owner that wakes up after that is fenced.
    point = "archive.seal.before"
    if owner == "wakes":
        point = "standby.promoting" if start.is_promoted else "restore.replayed"
    with armed(point, write):
        return awake, take_over()


@contextmanager
def _fenced_by_claim() -> Iterator[None]:
    """Let the former owner be fenced before its log is sealed: the next epoch is claimed first."""
    try:
        yield
    except (StepInterrupted, StoreFenced) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(
            cause, StoreFenced
        ):  # SQLite's commit puts an error of its own around it
            cause = cause.__cause__
        if cause is None:
            raise


def _take_over(
    start: LifeStart, here: str, clock: ManualClock, disk: Disk | None, rival: Rival | None, steps: list[str]
) -> str:
    """Restore the bucket with a takeover, or promote the standby. Return the directory of the new owner."""
    if start.is_promoted:
        return promote_one(start.bucket, here, clock, disk, rival, steps)
    quire.restore(start.bucket, here, takeover=True, clock=clock)
    return here


def _comes_back(directory: str, settings: StoreSettings, clock: ManualClock) -> list[str]:
    """Open the deposed owner's directory and write: nothing it does may be reported as archived. Return the findings."""
    if not os.path.exists(os.path.join(directory, MANIFEST)):  # of a standby that died before its first base
        return []
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
    archive, refusal = archive_of(store), ""
    before = archive.queue.end
    try:
        try:
            store.create("came-back", "lsm")
        except StoreFenced:
            raise
        except QuireError as error:  # the name may be taken, for example
            refusal = f"{type(error).__name__}: {error}"
        if archive.queue.end == before:
            archive.base()  # without a change there is nothing to archive but a base
        archive.wait(WAIT)
    except StoreFenced:
        return []
    with store.manifest.read() as txn:
        store_id, epoch = txn.store_id(), txn.owner_epoch()
    end = f"queue {before} to {archive.queue.end}, archived {archive.archived}, create: {refusal or 'done'}"
    owners = [info.key.split("/", 1)[1] for page in store.objects.list_pages(owner_prefix(store_id)) for info in page]
    logs = [f"{log_positions(store.objects, store_id, number)[-2:]}" for number in epochs(store.objects, store_id)]
    where = f"{store.path}, epoch {epoch}, {archive.status()}, {end}, owners {owners}, logs {logs}"
    return [f"a deposed owner archived something: {where}"]
