"""A standby of a simulated store with an archive: it follows the bucket, dies, is read, and is promoted.

Terms
  session   the standby is opened in a process of its own, polls, and is closed, or dies at a failpoint that is drawn from the
            seed, by SIGKILL or by a loss of power; another process may read it meanwhile, and one reads it afterwards
  sight     what a reader has found, as a model
  settled   the session has polled everything and was closed: the directory has one moment of the owner, from the first row
            to the last. In any other sight, each database by itself is as it was at some moment

A sight must match a model that the owner had, and never an older one than a sight before it. After the owner has waited for the
bucket, a settled standby must have everything. Versions of page databases are as new as the owner has published them: they are
looked up by their epoch, which never falls.

Threads: the machine's process has none, because it forks. Two promotions at once have one each. Raises `SimulationFailed`.
"""

from __future__ import annotations

import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO

import quire
from quire.archive.state_files import read_standby_state
from quire.archive.window import is_in_window
from quire.core.errors import ArchiveAhead, QuireError, StoreFenced
from quire.durable.failpoints import EVERY, armed
from quire.durable.files import Disk, OsDisk
from quire.durable.names import KEPT, MANIFEST, REPLAYED, STANDBY
from quire.manifest.check import check
from quire.objects.open import open_store
from quire.store import reader_files
from quire.store.standby import REPLACED, STAGED, Standby
from quire.store.store import Store
from quire.testing.clock import ManualClock
from quire.testing.simulation_deaths import (
    FOLLOW_POINTS,
    RESTORE_POINTS,
    Death,
    Fate,
    draw_fate,
    take_what_is_left,
)
from quire.testing.simulation_lives import Report, SimulationFailed, begin_process
from quire.testing.simulation_steps import Model, ModelDatabase, State, difference, is_refusal, read_rows, read_state

REPLAY_POINTS = tuple(point for point in RESTORE_POINTS if point.startswith("archive.replay."))
SIGHTS = 8
"""How often a standby is read during a session."""
PAUSE = 0.01
MEET_SECONDS = 2.0
"""How long a promotion waits for another one, which may be refused before that."""
EXCHANGE_SECONDS = 2.0
"""How long a reader waits for a standby that may have died while it exchanged its files."""


@dataclass(frozen=True)
class Sight:
    """What a reader has found."""

    model: Model
    """Of a page database, `epochs` has the version that was read."""
    ids: dict[str, int]
    head: int
    """The head of the change feed."""
    refused: list[str]
    """Reads that raised typed errors."""
    findings: list[str]
    is_behind: bool = False
    """Whether the standby is behind the window: the owner may have deleted objects that it reads."""


@dataclass(frozen=True)
class Order:
    """A session to run."""

    seed: str
    bucket: str
    directory: str
    now_ms: int
    polls: int
    fate: Fate | None
    is_read: bool
    """Whether it is read meanwhile."""


@dataclass
class Session:
    """The result of a session."""

    is_settled: bool = False
    is_killed: bool = False
    beside: list[Sight] = field(default_factory=list)
    after: Sight | None = None
    findings: list[str] = field(default_factory=list)


# ── the machine of the standby ────────────────────────────────────────────────────────────────────────────────────────
class Machine:
    """A process that runs the sessions of a standby, one at a time."""

    def __init__(self, plant: Callable[[], None] | None) -> None:
        """Fork the process. REQUIRES that this process has no threads."""
        asked, asking = os.pipe()
        answered, answering = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(asking)
            os.close(answered)
            try:
                if plant is not None:
                    plant()
                with os.fdopen(asked, "rb") as orders, os.fdopen(answering, "wb") as answers:
                    _serve(orders, answers)
            finally:
                os._exit(0)
        os.close(asked)
        os.close(answering)
        self._orders, self._answers = os.fdopen(asking, "wb"), os.fdopen(answered, "rb")

    def begin(self, order: Order) -> None:
        """Begin a session."""
        pickle.dump(order, self._orders)
        self._orders.flush()

    def end(self) -> Session:
        """Wait for the end of the session."""
        session = pickle.load(self._answers)
        assert isinstance(session, Session)
        return session

    def close(self) -> None:
        """Wait for the end of the process. An answer that nobody has read is lost."""
        self._answers.close()  # first: the process may be blocked in writing it
        self._orders.close()
        os.waitpid(self._pid, 0)


def _serve(orders: BinaryIO, answers: BinaryIO) -> None:
    while True:
        try:
            order = pickle.load(orders)
        except EOFError:
            return
        pickle.dump(_run_session(order), answers)
        answers.flush()


def _run_session(order: Order) -> Session:
    after, stop = f"{order.directory}-after", f"{order.directory}-stop"
    with suppress(FileNotFoundError):
        os.remove(stop)
    reading = begin_process(partial(_read_beside, order.directory, stop)) if order.is_read else None
    session = Session()
    try:
        session = _last_session(*begin_process(partial(_follow, order, after))())
    except SimulationFailed as failure:
        session.findings.append(f"the standby failed: {failure}")
    with open(stop, "w"):
        pass
    try:
        if reading is not None:
            session.beside = [sight for sight in _list(reading()[0]) if isinstance(sight, Sight)]
        take_what_is_left(order.directory, after)
        if os.path.exists(os.path.join(order.directory, MANIFEST)):
            sight = begin_process(partial(_read_once, order.directory))()[0]
            session.after = sight if isinstance(sight, Sight) else None
        if session.is_settled:
            session.findings += left_behind(order.directory, nameless=True)
    except SimulationFailed as failure:
        session.findings.append(f"a reader of the standby failed: {failure}")
    return session


def left_behind(directory: str, *, nameless: bool = False) -> list[str]:
    """Return what a rebuild or a promotion should have removed; with `nameless`, also files of a standby without a name."""
    names = [STAGED, REPLACED] if nameless else [STAGED, REPLACED, REPLAYED, KEPT]
    paths = [name for name in names if os.path.exists(os.path.join(directory, name))]
    files = os.path.join(directory, REPLAYED)
    if nameless and os.path.exists(files):
        single = [f"{REPLAYED}/{name}" for name in os.listdir(files) if os.stat(os.path.join(files, name)).st_nlink < 2]
        paths += single[1:]  # quire.toml is a changed copy of its file
    return [f"the standby has left {path} behind" for path in paths]


def _list(report: object) -> list[object]:
    return report if isinstance(report, list) else []


def _last_session(report: object, is_killed: bool) -> Session:
    session = report if isinstance(report, Session) else Session()
    session.is_killed = is_killed
    return session


def _follow(order: Order, after: str, _report: Report) -> Session:
    """Follow the bucket. A promotion that died, and was followed by a takeover of another directory, is given up first."""
    session = Session()
    death = Death(order.fate, random.Random(f"death {order.seed}"))
    clock = ManualClock(order.now_ms)
    with armed(EVERY, death.hit):
        disk = death.disk(order.directory)
        death.endanger_standby(after)
        with Standby(order.bucket, order.directory, disk=disk, clock=clock) as standby:
            if standby.is_promoting:
                with suppress(StoreFenced):
                    standby.promote()
                    session.findings.append("a promotion succeeded after another directory had taken over")
                    return session
            for _ in range(order.polls):
                standby.poll()
                time.sleep(PAUSE)
            session.is_settled = True
    return session


# ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _read_beside(directory: str, stop: str, _: Report) -> list[Sight]:
    """Read the standby through one open store until the file `stop` exists."""
    reader_files.EXCHANGE_SECONDS = EXCHANGE_SECONDS
    sights: list[Sight] = []
    while not os.path.exists(stop):
        if os.path.exists(os.path.join(directory, MANIFEST)):
            with quire.open(directory, "r") as store:
                while not os.path.exists(stop) and len(sights) < SIGHTS:
                    sights.append(_read(store))
                break
        time.sleep(PAUSE)
    return sights


def _read_once(directory: str, _: Report) -> Sight:
    reader_files.EXCHANGE_SECONDS = 0.0
    with quire.open(directory, "r") as store:
        sight = _read(store)
        with store.manifest.read() as txn:
            sight.findings.extend(
                f"the manifest breaks a rule: {problem}" for problem in check(txn) if not problem.leak
            )
    if sight.refused and (state := read_standby_state(OsDisk(), directory)) is not None:
        with closing(open_store(state.url)) as bucket:
            sight = replace(sight, is_behind=not is_in_window(bucket, state.store_id, state.position))
    return sight


def _read(store: Store) -> Sight:
    """Read everything that a model has. A transaction that is open meanwhile must see the same at its end."""
    sight = Sight({}, {}, store.feed.head(), [], [])
    for info in store.databases():
        try:
            kind = info.kind.name.lower()
            snapshots = {
                snapshot.name: read_state(store, info.name, kind, snapshot.name)
                for snapshot in store.manifest.snapshots.of(info.name)
                if snapshot.name and not snapshot.tags and kind != "stream"
            }
            if kind == "pages":
                state, epoch = _read_pages(store, info.name, sight)
                database = ModelDatabase(kind, state, snapshots, {epoch: state})
            else:
                database = ModelDatabase(kind, read_state(store, info.name, kind), snapshots)
        except Exception as error:
            if not is_refusal(error):
                raise
            sight.refused.append(f"{info.name} cannot be read: {type(error).__name__}: {error}")
        else:
            sight.model[info.name], sight.ids[info.name] = database, info.db_id
    return sight


def _read_pages(store: Store, name: str, sight: Sight) -> tuple[State, int]:
    with closing(store.sqlite(name)) as connection:
        connection.execute("begin")
        state, epoch = read_rows(connection), int(connection.pragma("quire_epoch"))
        time.sleep(PAUSE)
        if (again := read_rows(connection)) != state:
            sight.findings.append(f"an open transaction on {name} sees other data: {difference(again, state)}")
    return state, epoch


# ── what a standby may have ───────────────────────────────────────────────────────────────────────────────────────────
@dataclass
class Trail:
    """A standby, and what it may have. Passed from life to life."""

    directory: str
    models: list[Model]
    """The model of its last settled sight, and all later ones of the owner."""
    epochs: dict[int, int] = field(default_factory=dict)
    """Page database → the epoch that was read last."""
    head: int = 0
    sessions: int = 0
    deaths: list[str] = field(default_factory=list)

    def successor(self, directory: str, models: list[Model]) -> Trail:
        """Return the trail of a new standby in place of this one, which was promoted."""
        return Trail(directory, list(models), sessions=self.sessions, deaths=self.deaths)

    def compare(self, sight: Sight, *, is_settled: bool, least: int = 0, is_published: bool = False) -> list[str]:
        """Return how a sight differs from every model that the standby may have: from the one with the number `least` on, if
        it is settled. Then the models before the first that matches cannot occur any more."""
        findings = [*sight.findings, *self._falls(sight)]
        if not is_settled:
            return [*findings, *(text for name, seen in sight.model.items() for text in self._never_was(name, seen))]
        differences: list[list[str]] = []
        for number, model in enumerate(self.models[least:], least):
            differing = [] if sight.is_behind else list(sight.refused)
            if set(sight.model) != set(model) and not sight.refused:
                differing.append(f"databases are {sorted(sight.model)}, not {sorted(model)}")
            for name, seen in sight.model.items():
                differing += _differences(name, seen, model, is_published=is_published)
            if not differing:
                del self.models[:number]
                return findings
            differences.append(differing)
        best = min(differences, key=len)
        return [*findings, f"the standby matches none of {len(differences)} models; the nearest:", *best]

    def _never_was(self, name: str, seen: ModelDatabase) -> list[str]:
        """Return what no model has of a database, under this name or another one.

        Files are applied before rows: contents may be newer than the name and the list of snapshots.
        """
        identities = {model[name].created_as for model in self.models if name in model}
        known = [database for model in self.models for database in model.values() if database.created_as in identities]
        differences = [
            difference(seen.state, state) for one in known if (state := _expected_state(seen, one)) != seen.state
        ]
        findings = []
        if len(differences) == len(known):
            findings.append(f"{name} reads as it never was: {min(differences, key=len, default='it never existed')}")
        for snapshot, state in seen.snapshots.items():
            if not any(one.snapshots.get(snapshot) == state for one in known):
                findings.append(f"{name}@{snapshot} reads as it never was")
        return findings

    def _falls(self, sight: Sight) -> list[str]:
        """Return what was newer in an earlier sight."""
        findings = [f"the feed fell from {self.head} to {sight.head}"] if sight.head < self.head else []
        self.head = max(self.head, sight.head)
        for name, db_id in sight.ids.items():
            for epoch in sight.model[name].epochs:
                if epoch < self.epochs.get(db_id, 0):
                    findings.append(f"{name} fell from epoch {self.epochs[db_id]} to {epoch}")
                self.epochs[db_id] = max(epoch, self.epochs.get(db_id, 0))
        return findings


def _differences(name: str, seen: ModelDatabase, model: Model, *, is_published: bool = False) -> list[str]:
    """Return how a database that was read differs from a model."""
    if (expected := model.get(name)) is None:
        return [f"{name} does not exist"]
    findings = []
    state = expected.state if is_published else _expected_state(seen, expected)
    if seen.state != state:
        findings.append(f"{name} reads wrong: {difference(seen.state, state)}")
    if seen.snapshots != expected.snapshots:
        findings.append(f"{name} has other snapshots: {sorted(seen.snapshots)}, not {sorted(expected.snapshots)}")
    return findings


def _expected_state(seen: ModelDatabase, expected: ModelDatabase) -> State:
    """Return the state of a database in the version that was read. A version that the model does not know passes."""
    for epoch in seen.epochs:
        return expected.epochs.get(epoch, seen.state)
    return expected.state


class StandbyFollower:
    """Orders the sessions of a standby during a life of the owner, and compares what was read."""

    def __init__(self, trail: Trail, machine: Machine, bucket: str, points: Collection[str], seed: str) -> None:
        self.trail = trail
        self.draw = random.Random(f"standby {seed}")
        self._machine = machine
        self._bucket = bucket
        self._points = points
        self._seed = seed
        self._order: Order | None = None
        self._least = 0
        self._is_published = False

    def begin(self, now_ms: int, *, is_archived: bool, is_beside: bool) -> Order:
        """Begin a session. `is_archived`: page databases are published, and the bucket has everything by now. `is_beside`: the
        owner does something meanwhile."""
        draw, trail = self.draw, self.trail
        trail.sessions += 1
        self._least = len(trail.models) - 1 if is_archived else 0
        self._is_published = is_archived and not is_beside
        fate = draw_fate(draw, self._points, [FOLLOW_POINTS, REPLAY_POINTS])
        order = Order(
            seed=f"{self._seed}/{trail.sessions}",
            bucket=self._bucket,
            directory=trail.directory,
            now_ms=now_ms,
            polls=draw.choice((1, 1, 2, 5)),
            fate=fate if draw.random() < 0.6 else None,
            is_read=draw.random() < 0.4,
        )
        self._order = order
        self._machine.begin(order)
        return order

    def end(self) -> list[str]:
        """Wait for the end of the session, if one has begun. Return the findings."""
        if self._order is None:
            return []
        session, order, self._order = self._machine.end(), self._order, None
        findings = session.findings
        for sight in session.beside:
            findings += self.trail.compare(sight, is_settled=False)
        if session.is_killed and order.fate is not None:
            self.trail.deaths.append(order.fate.point)
        if session.after is not None and not findings:
            is_settled, is_published = session.is_settled, self._is_published
            findings += self.trail.compare(
                session.after, is_settled=is_settled, least=self._least, is_published=is_published
            )
        return findings


# ── promotion ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def is_promoted(directory: str) -> bool:
    """Return whether the promotion of a standby is complete."""
    return os.path.exists(os.path.join(directory, MANIFEST)) and not os.path.exists(os.path.join(directory, STANDBY))


@dataclass(frozen=True)
class Rival:
    """A second standby, which is promoted at the same time."""

    directory: str
    is_met: bool
    """Whether both have chosen their epoch before either claims it."""


def promote_one(
    bucket: str, directory: str, clock: ManualClock, disk: Disk | None, rival: Rival | None, steps: list[str]
) -> str:
    """Promote a standby, and its rival. Return the directory of the new owner."""
    if is_promoted(directory):  # by a life that died before it could report that
        return directory
    others = [rival.directory] if rival is not None else []
    refused: dict[str, QuireError] = {}
    failed: list[BaseException] = []
    barrier = threading.Barrier(2)

    def promote(directory: str, disk: Disk | None) -> None:
        try:
            with Standby(bucket, directory, disk=disk, clock=clock) as standby:
                standby.promote()
        except (StoreFenced, ArchiveAhead) as error:
            refused[directory] = error
        except BaseException as error:
            failed.append(error)

    def meet(_: str) -> None:
        if rival is not None and rival.is_met:
            with suppress(threading.BrokenBarrierError):
                barrier.wait(MEET_SECONDS)

    for other in others:
        with Standby(bucket, other, clock=clock) as standby:
            standby.poll()
    threads = [threading.Thread(target=promote, args=(other, None), name="quire-simulation-rival") for other in others]
    with armed("standby.promoting", meet) if rival is not None else nullcontext():
        for thread in threads:
            thread.start()
        promote(directory, disk)
        for thread in threads:
            thread.join()
    for failure in failed:
        raise failure
    steps += [f"promotion of {os.path.basename(path)} refused: {error}" for path, error in refused.items()]
    winners = {directory, *others} - refused.keys()
    if len(winners) > 1:
        raise SimulationFailed("two standbys were promoted at once")
    for winner in winners:
        return winner
    # Nobody was promoted: a takeover has died, or the log cannot be applied to its end.
    with Standby(bucket, directory, disk=disk, clock=clock) as standby:
        standby.promote(discard=True)
    return directory
