"""The crash machine: random batches against an owner in a process of its own that is killed, again and again, by SIGKILL.

`crash_owner.py` is the owner, `crash_model.py` says what must hold after each of its lives, `crash_plants.py` has faults
that the machine must find. Deaths come between commits, at every step of one, while LMDB writes, at any moment, and
while the manifest is opened, closed or copied.

What is drawn never depends on what the owner did: how batches group is a matter of time, and a run must be repeatable
up to that. So batches come from seeds, and every rule can be applied whether the owner has died meanwhile or not.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from quire.core.errors import TimedOut
from quire.core.settings import ManifestSettings
from quire.durable.failpoints import hits, recording
from quire.manifest.ops.base import Op
from quire.manifest.store import ManifestStore
from tests.manifest import crash_model
from tests.manifest.batches import BatchMaker
from tests.manifest.crash_model import SEEN, CrashModel
from tests.manifest.crash_owner import POINTS, WITHIN
from tests.manifest.crash_plants import PLANTS
from tests.manifest.helpers import does, register
from tests.nursery import Line, Nursery

SEEDS = st.integers(0, 2**20)
SEVERAL = st.lists(SEEDS, min_size=1, max_size=8)
KEYS = st.sampled_from([bytes([n]) * 16 for n in range(3)])
PLACES = st.sampled_from((*POINTS, WITHIN))
MOMENTS = st.integers(0, 8_000)
OPENINGS = st.integers(0, 20_000)
"""Microseconds: a commit takes about a thousand, the first opening of a manifest ten."""

NURSERIES: list[Nursery] = []


@pytest.fixture(scope="module", autouse=True)
def nursery() -> Iterator[Nursery]:
    """One process that forks all owners."""
    with Nursery("tests.manifest.crash_owner:main", warm_up="tests.manifest.crash_owner:warm_up") as made:
        NURSERIES.append(made)
        yield made
        NURSERIES.clear()


class CrashMachine(RuleBasedStateMachine):
    """Drives one manifest through many owners."""

    plant = ""
    deadly = True
    model: CrashModel | None = None

    @initialize(
        group=st.sampled_from((1, 3, 1024)),
        queue=st.sampled_from((4, 2048)),
        stillborn=st.none() | OPENINGS,
        stays=st.booleans(),
    )
    def first_life(self, group: int, queue: int, stillborn: int | None, stays: bool) -> None:
        manifest_settings = ManifestSettings(map_bytes=1 << 20, group_ops_max=group, queue_ops_max=queue)
        self.model = CrashModel(NURSERIES[0], manifest_settings, plant=self.plant, deadly=self.deadly)
        self.model.outlook.stays = stays
        if stillborn is not None:
            self.model.kill_while_opening(stillborn)
        self.model.begin()

    @property
    def it(self) -> CrashModel:
        assert self.model is not None
        return self.model

    # ── work ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(seed=SEEDS, stories=st.integers(1, 3))
    def one_batch(self, seed: int, stories: int) -> None:
        self.it.submit(self.it.plan(seed, stories))
        self.it.settle()

    @rule(seeds=SEVERAL, wait=st.booleans())
    def a_pipeline(self, seeds: list[int], wait: bool) -> None:
        """Planned on the same state, some overtake others; answers may come much later, or never."""
        for batch in self.planned(seeds):
            self.it.submit(batch)
        if wait:
            self.it.settle()

    def planned(self, seeds: list[int]) -> list[tuple[Op, ...]]:
        return [self.it.plan(seed, 1 + seed % 2) for seed in seeds]

    @rule(seed=SEEDS, key=KEYS)
    def with_a_key(self, seed: int, key: bytes) -> None:
        self.it.submit(self.it.plan(seed, 1), key)

    @rule(key=KEYS)
    def once_more(self, key: bytes) -> None:
        self.it.submit_again(key)

    @rule(
        threads=st.integers(2, 4),
        batches=st.integers(1, 6),
        point=st.none() | PLACES,
        passes=st.integers(0, 3),
        moment=st.none() | MOMENTS,
    )
    def a_rush(self, threads: int, batches: int, point: str | None, passes: int, moment: int | None) -> None:
        """Several threads at once; they live, or die at a point or a moment."""
        if point is not None and self.it.settle():
            self.it.arm(point, passes, moment or 0)
        self.it.rush(threads, batches, moment if point is None else None)

    @rule(name=st.sampled_from(BatchMaker.NAMES))
    def register_a_database(self, name: str) -> None:
        self.it.call("register_db", name)

    @rule(db_id=st.integers(1, 4))
    def reserve_ids(self, db_id: int) -> None:
        self.it.call("reserve_generation", db_id)
        self.it.call("reserve_job_id")
        self.it.call("reserve_db_id")

    @rule(name=st.sampled_from(("", "tail", "sink")), drop=st.booleans())
    def a_subscriber_comes_or_goes(self, name: str, drop: bool) -> None:
        self.it.call("drop_cursor" if drop and name else "register_cursor", name)

    @rule(acknowledge=st.booleans())
    def follow_the_feed(self, acknowledge: bool) -> None:
        self.it.follow(acknowledge=acknowledge)

    @rule(settled=st.booleans(), kill=st.none() | MOMENTS)
    def copy_while_hot(self, settled: bool, kill: int | None) -> None:
        self.it.copy(settled=settled, kill_after_us=kill)

    @rule(stays=st.booleans())
    def a_reader(self, stays: bool) -> None:
        """It stays, with a snapshot in its hands, or it goes."""
        self.it.outlook.stays = stays
        if stays:
            self.it.outlook.hold()

    # ── death ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(point=PLACES, passes=st.integers(0, 3), moment=MOMENTS, seeds=SEVERAL)
    def die_in_a_commit(self, point: str, passes: int, moment: int, seeds: list[int]) -> None:
        """Each batch has a commit of its own; if there are too few, a later one is the last."""
        batches = self.planned(seeds)
        self.it.arm(point, passes, moment)
        for batch in batches:
            self.it.submit(batch)
            self.it.settle()

    @rule(point=PLACES, passes=st.integers(0, 2), moment=MOMENTS, seeds=SEVERAL)
    def die_in_a_group(self, point: str, passes: int, moment: int, seeds: list[int]) -> None:
        batches = self.planned(seeds)
        self.it.arm(point, passes, moment)
        for batch in batches:
            self.it.submit(batch)
        self.it.settle()

    @rule(seeds=SEVERAL)
    def die_between_commits(self, seeds: list[int]) -> None:
        self.a_pipeline(seeds, wait=True)
        if self.it.settle():
            self.it.kill(crash_model.IDLE)

    @rule(moment=MOMENTS, seeds=SEVERAL)
    def die_at_any_moment(self, moment: int, seeds: list[int]) -> None:
        self.a_pipeline(seeds, wait=False)
        self.it.kill(crash_model.BUSY, moment)

    @rule(moment=OPENINGS)
    def die_while_opening(self, moment: int) -> None:
        self.it.kill_while_opening(moment)

    @rule(seeds=SEVERAL, moment=st.none() | MOMENTS)
    def close_and_open(self, seeds: list[int], moment: int | None) -> None:
        """Closing commits what is queued, if it gets to."""
        self.a_pipeline(seeds, wait=False)
        self.it.close(moment)

    def teardown(self) -> None:
        if self.model is not None:
            self.model.end()


def some(examples: int, **changes: Any) -> settings:
    """How batches group is a matter of time, so what is shrunk seldom fails again: the story in the message says more."""
    return settings(max_examples=examples, phases=(Phase.explicit, Phase.reuse, Phase.generate), **changes)


TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.settings = some(max(15, settings().max_examples // 16))


# ── the machine itself ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def model(nursery: Nursery) -> Iterator[CrashModel]:
    made = CrashModel(nursery, ManifestSettings(map_bytes=1 << 20))
    made.begin()
    yield made
    made.end()


def test_its_points_are_those_of_a_commit(manifest: ManifestStore) -> None:
    """A new point must be died at, too."""
    with recording():
        does(manifest, register(1))
        assert tuple(hits()) == POINTS


@pytest.mark.parametrize("stays", [True, False], ids=["with a reader", "without a reader"])
@pytest.mark.parametrize("place", [*POINTS, WITHIN])
def test_owners_die_where_they_are_told_to(model: CrashModel, place: str, stays: bool) -> None:
    """At a first commit and at a later one, in a group and in a rush."""
    model.outlook.stays = stays
    before = deaths(place, stays)
    for passes in (0, 1):
        batches = [model.plan(seed, 2) for seed in range(8)]
        model.arm(place, passes, 300)
        for batch in batches:
            model.submit(batch)
            if passes:
                model.settle()
        model.settle()
        model.plan(0, 1)
        model.arm(place, passes, 300)
        model.rush(3, 6, None)
    # Within a commit it is a race, and an owner that wins it is armed again: it dies once for both.
    assert deaths(place, stays) - before in ((4,) if place != WITHIN else (1, 2, 3, 4))


def deaths(cause: str, stays: bool) -> int:
    return SEEN[f"killed {cause}, {'with' if stays else 'without'} a reader"]


@pytest.mark.parametrize("point", POINTS)
def test_only_the_last_point_of_a_commit_is_behind_it(model: CrashModel, point: str) -> None:
    expected = f"{'all' if point == POINTS[-1] else 'none'} of what was lost {point} had been committed"
    before = SEEN[expected]
    model.arm(point, 0, 0)
    model.rush(1, 1, None)
    assert SEEN[expected] == before + 1


def test_owners_die_outside_of_commits(model: CrashModel) -> None:
    causes = crash_model.IDLE, crash_model.BUSY, crash_model.OPENING, crash_model.COPYING
    before = [deaths(cause, False) for cause in causes]
    model.submit(model.plan(1, 1))
    model.settle()
    model.kill(crash_model.IDLE)
    model.submit(model.plan(2, 1))
    model.kill_while_opening(3000)
    model.copy(settled=False, kill_after_us=100)
    model.close(kill_after_us=0)
    model.copy(settled=True, kill_after_us=None)
    assert [deaths(cause, False) for cause in causes] == [n + 1 for n in before]


# ── the nursery ───────────────────────────────────────────────────────────────────────────────────────────────────────
def ends(line: Line) -> None:
    """A target that ends in the way it is told."""
    match line.receive():
        case b"die":
            line.send(b"one")
            line.send(b"two")
            line._end.sendall(b"\x10\x00\x00\x00half a message")
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raise":
            raise ValueError("a reason")
        case b"sleep":
            line.receive()


@pytest.fixture(scope="module")
def endings() -> Iterator[Nursery]:
    with Nursery(f"{__name__}:ends") as made:
        yield made


def test_the_last_words_of_a_child_are_heard(endings: Nursery) -> None:
    with endings.spawn() as child:
        child.line.send(b"die")
        assert [child.line.receive() for _ in range(3)] == [b"one", b"two", None]
        assert (child.wait(), child.kill()) == (-9, -9)
        assert not child.line.send(b"too late")


def test_what_a_child_raised_is_kept(endings: Nursery) -> None:
    with endings.spawn() as child:
        child.line.send(b"raise")
        assert (child.line.receive(), child.wait()) == (None, 1)
        assert "ValueError: a reason" in endings.errors()


def test_a_silent_child_is_told_from_a_dead_one(endings: Nursery) -> None:
    with endings.spawn() as child:
        child.line.send(b"sleep")
        child.line._end.settimeout(0.05)
        with pytest.raises(TimedOut):
            child.line.receive()
        child.line.close()
        assert child.wait() == 0, "a child ends with its line"


def test_a_nursery_with_threads_does_not_fork() -> None:
    made = Nursery("tests.nursery:echo", warm_up=f"{__name__}:starts_a_thread")
    with made, pytest.raises(AssertionError, match="there are threads already"):
        made.spawn()


def starts_a_thread() -> None:
    """A warm-up that does what it must not."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────
def run_with(plant: str, *, examples: int, deadly: bool = True) -> None:
    machine = type("Planted", (CrashMachine,), {"plant": plant, "deadly": deadly})
    run_state_machine_as_test(machine, settings=some(examples, database=None, derandomize=True, stateful_step_count=30))


@pytest.mark.parametrize("plant", PLANTS)
def test_the_machine_finds_what_was_planted(plant: str) -> None:
    before = SEEN["broken promises"]
    with pytest.raises((AssertionError, Flaky)):  # which of them depends on whether it happens again when it is shown
        run_with(plant, examples=100)
    assert SEEN["broken promises"] > before, "the machine failed, but not because of what the model requires"


def test_a_torn_commit_takes_a_crash_to_be_found() -> None:
    """So it is the kills that find it."""
    run_with("tears_commits", examples=5, deadly=False)
