"""The crash machine: random batches against an owner in a separate process that is killed again and again by SIGKILL.

`crash_owner.py` is the owner, `crash_model.py` states what must hold after each of its lives, `crash_faults.py` has faults that
the machine must detect. Owners die between commits, at every step of a commit, while LMDB writes, at any time, and while the
manifest is opened, closed or copied.

What is drawn never depends on what the owner did: the grouping of batches depends on timing, and a run must be repeatable apart
from that. Batches are therefore made from seeds, and every rule is applicable whether or not the owner has died.
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
from tests.fork_server import Channel, ForkServer
from tests.manifest import crash_model
from tests.manifest.batches import BatchMaker
from tests.manifest.crash_faults import FAULTS
from tests.manifest.crash_model import OUTCOMES, CrashModel
from tests.manifest.crash_owner import POINTS, WITHIN
from tests.manifest.helpers import commit, register

SEEDS = st.integers(0, 2**20)
SEVERAL = st.lists(SEEDS, min_size=1, max_size=8)
KEYS = st.sampled_from([bytes([n]) * 16 for n in range(3)])
KILL_POINTS = st.sampled_from((*POINTS, WITHIN))
MOMENTS = st.integers(0, 8_000)
OPENINGS = st.integers(0, 20_000)
"""Microseconds: a commit takes about a thousand, the first opening of a manifest ten."""

NURSERIES: list[ForkServer] = []


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[ForkServer]:
    """The process that forks all owners."""
    with ForkServer("tests.manifest.crash_owner:main", warm_up="tests.manifest.crash_owner:warm_up") as fork_server:
        NURSERIES.append(fork_server)
        yield fork_server
        NURSERIES.clear()


class CrashMachine(RuleBasedStateMachine):
    """Drives one manifest through many owners."""

    fault = ""
    kills_owners = True
    _model: CrashModel | None = None

    @initialize(
        group=st.sampled_from((1, 3, 1024)),
        queue=st.sampled_from((4, 2048)),
        stop_opening_us=st.none() | OPENINGS,
        stays=st.booleans(),
    )
    def first_life(self, group: int, queue: int, stop_opening_us: int | None, stays: bool) -> None:
        manifest_settings = ManifestSettings(map_bytes=1 << 20, group_ops_max=group, queue_ops_max=queue)
        self._model = CrashModel(NURSERIES[0], manifest_settings, fault=self.fault, kills_owners=self.kills_owners)
        self._model.reader.stays_open = stays
        if stop_opening_us is not None:
            self._model.kill_while_opening(stop_opening_us)
        self._model.begin()

    @property
    def model(self) -> CrashModel:
        assert self._model is not None
        return self._model

    # ── work ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(seed=SEEDS, stories=st.integers(1, 3))
    def one_batch(self, seed: int, stories: int) -> None:
        self.model.submit(self.model.plan(seed, stories))
        self.model.settle()

    @rule(seeds=SEVERAL, wait=st.booleans())
    def a_pipeline(self, seeds: list[int], wait: bool) -> None:
        """Batches planned on the same state, of which some invalidate others; answers may arrive much later, or never."""
        for batch in self.planned(seeds):
            self.model.submit(batch)
        if wait:
            self.model.settle()

    def planned(self, seeds: list[int]) -> list[tuple[Op, ...]]:
        return [self.model.plan(seed, 1 + seed % 2) for seed in seeds]

    @rule(seed=SEEDS, key=KEYS)
    def with_a_key(self, seed: int, key: bytes) -> None:
        self.model.submit(self.model.plan(seed, 1), key)

    @rule(key=KEYS)
    def once_more(self, key: bytes) -> None:
        self.model.submit_again(key)

    @rule(
        threads=st.integers(2, 4),
        batches=st.integers(1, 6),
        point=st.none() | KILL_POINTS,
        passes=st.integers(0, 3),
        moment=st.none() | MOMENTS,
    )
    def a_run_of_several_producers(
        self, threads: int, batches: int, point: str | None, passes: int, moment: int | None
    ) -> None:
        """Several threads at once; the owner survives, or dies at a failpoint or after a delay."""
        if point is not None and self.model.settle():
            self.model.arm(point, passes, moment or 0)
        self.model.burst(threads, batches, moment if point is None else None)

    @rule(name=st.sampled_from(BatchMaker.NAMES))
    def register_a_database(self, name: str) -> None:
        self.model.call("register_db", name)

    @rule(db_id=st.integers(1, 4))
    def reserve_ids(self, db_id: int) -> None:
        self.model.call("reserve_generation", db_id)
        self.model.call("reserve_job_id")
        self.model.call("reserve_db_id")

    @rule(name=st.sampled_from(("", "tail", "sink")), drop=st.booleans())
    def a_subscriber_registers_or_leaves(self, name: str, drop: bool) -> None:
        self.model.call("drop_cursor" if drop and name else "register_cursor", name)

    @rule(acknowledge=st.booleans())
    def follow_the_feed(self, acknowledge: bool) -> None:
        self.model.follow(acknowledge=acknowledge)

    @rule(settled=st.booleans(), kill=st.none() | MOMENTS)
    def copy_while_hot(self, settled: bool, kill: int | None) -> None:
        self.model.copy(settled=settled, kill_after_us=kill)

    @rule(stays=st.booleans())
    def a_reader(self, stays: bool) -> None:
        """A reader that stays open with a snapshot, or that is closed before kills."""
        self.model.reader.stays_open = stays
        if stays:
            self.model.reader.hold_snapshot()

    # ── kills ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @rule(point=KILL_POINTS, passes=st.integers(0, 3), moment=MOMENTS, seeds=SEVERAL)
    def die_in_a_commit(self, point: str, passes: int, moment: int, seeds: list[int]) -> None:
        """Each batch has its own commit; if there are too few, the owner dies in a later rule."""
        batches = self.planned(seeds)
        self.model.arm(point, passes, moment)
        for batch in batches:
            self.model.submit(batch)
            self.model.settle()

    @rule(point=KILL_POINTS, passes=st.integers(0, 2), moment=MOMENTS, seeds=SEVERAL)
    def die_in_a_group(self, point: str, passes: int, moment: int, seeds: list[int]) -> None:
        batches = self.planned(seeds)
        self.model.arm(point, passes, moment)
        for batch in batches:
            self.model.submit(batch)
        self.model.settle()

    @rule(seeds=SEVERAL)
    def die_between_commits(self, seeds: list[int]) -> None:
        self.a_pipeline(seeds, wait=True)
        if self.model.settle():
            self.model.kill(crash_model.IDLE)

    @rule(moment=MOMENTS, seeds=SEVERAL)
    def die_at_any_moment(self, moment: int, seeds: list[int]) -> None:
        self.a_pipeline(seeds, wait=False)
        self.model.kill(crash_model.BUSY, moment)

    @rule(moment=OPENINGS)
    def die_while_opening(self, moment: int) -> None:
        self.model.kill_while_opening(moment)

    @rule(seeds=SEVERAL, moment=st.none() | MOMENTS)
    def close_and_open(self, seeds: list[int], moment: int | None) -> None:
        """Closing commits the queued batches, unless the owner is killed first."""
        self.a_pipeline(seeds, wait=False)
        self.model.close(moment)

    def teardown(self) -> None:
        if self._model is not None:
            self._model.end()


def some(examples: int, **changes: Any) -> settings:
    """Settings without shrinking: the grouping of batches depends on timing, so a shrunk example seldom fails again.
    The history in the message is more useful."""
    return settings(max_examples=examples, phases=(Phase.explicit, Phase.reuse, Phase.generate), **changes)


TestCrashMachine = CrashMachine.TestCase
TestCrashMachine.settings = some(max(15, settings().max_examples // 16))


# ── the machine itself ────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def model(fork_server: ForkServer) -> Iterator[CrashModel]:
    model = CrashModel(fork_server, ManifestSettings(map_bytes=1 << 20))
    model.begin()
    yield model
    model.end()


def test_the_machine_kills_owners_at_every_failpoint_of_a_commit(manifest: ManifestStore) -> None:
    """The machine must kill owners at every failpoint of a commit, including new ones."""
    with recording():
        commit(manifest, register(1))
        assert tuple(hits()) == POINTS


@pytest.mark.parametrize("stays", [True, False], ids=["with a reader", "without a reader"])
@pytest.mark.parametrize("point", [*POINTS, WITHIN])
def test_owners_die_at_the_requested_failpoint(model: CrashModel, point: str, stays: bool) -> None:
    """At a first commit and at a later one, in a group and with several producers."""
    model.reader.stays_open = stays
    kills_before = kills(point, stays)
    for passes in (0, 1):
        batches = [model.plan(seed, 2) for seed in range(8)]
        model.arm(point, passes, 300)
        for batch in batches:
            model.submit(batch)
            if passes:
                model.settle()
        model.settle()
        model.plan(0, 1)
        model.arm(point, passes, 300)
        model.burst(3, 6, None)
    # Within a commit it is a race. An owner that survives is armed again, and then dies once for both.
    assert kills(point, stays) - kills_before in ((4,) if point != WITHIN else (1, 2, 3, 4))


def kills(cause: str, stays: bool) -> int:
    return OUTCOMES[f"killed {cause}, {'with' if stays else 'without'} a reader"]


@pytest.mark.parametrize("point", POINTS)
def test_only_the_last_failpoint_of_a_commit_follows_the_commit(model: CrashModel, point: str) -> None:
    expected = f"{'all' if point == POINTS[-1] else 'none'} of what was lost {point} had been committed"
    before = OUTCOMES[expected]
    model.arm(point, 0, 0)
    model.burst(1, 1, None)
    assert OUTCOMES[expected] == before + 1


def test_owners_die_outside_of_commits(model: CrashModel) -> None:
    causes = crash_model.IDLE, crash_model.BUSY, crash_model.OPENING, crash_model.COPYING
    before = [kills(cause, False) for cause in causes]
    model.submit(model.plan(1, 1))
    model.settle()
    model.kill(crash_model.IDLE)
    model.submit(model.plan(2, 1))
    model.kill_while_opening(3000)
    model.copy(settled=False, kill_after_us=100)
    model.close(kill_after_us=0)
    model.copy(settled=True, kill_after_us=None)
    assert [kills(cause, False) for cause in causes] == [n + 1 for n in before]


# ── the fork server ───────────────────────────────────────────────────────────────────────────────────────────────────────
def end_as_requested(channel: Channel) -> None:
    """A target that ends in the requested way."""
    match channel.receive():
        case b"die":
            channel.send(b"one")
            channel.send(b"two")
            channel._end.sendall(b"\x10\x00\x00\x00half a message")
            os.kill(os.getpid(), signal.SIGKILL)
        case b"raise":
            raise ValueError("a reason")
        case b"sleep":
            channel.receive()


@pytest.fixture(scope="module")
def endings() -> Iterator[ForkServer]:
    with ForkServer(f"{__name__}:end_as_requested") as fork_server:
        yield fork_server


def test_messages_sent_before_a_child_died_are_received(endings: ForkServer) -> None:
    with endings.spawn() as child:
        child.channel.send(b"die")
        assert [child.channel.receive() for _ in range(3)] == [b"one", b"two", None]
        assert (child.wait(), child.kill()) == (-9, -9)
        assert not child.channel.send(b"too late")


def test_the_traceback_of_a_child_is_kept(endings: ForkServer) -> None:
    with endings.spawn() as child:
        child.channel.send(b"raise")
        assert (child.channel.receive(), child.wait()) == (None, 1)
        assert "ValueError: a reason" in endings.errors()


def test_a_silent_child_is_distinguished_from_a_dead_one(endings: ForkServer) -> None:
    with endings.spawn() as child:
        child.channel.send(b"sleep")
        child.channel._end.settimeout(0.05)
        with pytest.raises(TimedOut):
            child.channel.receive()
        child.channel.close()
        assert child.wait() == 0, "a child ends when its line is closed"


def test_a_fork_server_with_threads_does_not_fork() -> None:
    fork_server = ForkServer("tests.fork_server:echo", warm_up=f"{__name__}:start_a_thread")
    with fork_server, pytest.raises(AssertionError, match="there are threads already"):
        fork_server.spawn()


def start_a_thread() -> None:
    """A warm-up that violates the rule."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────
def run_with(fault: str, *, examples: int, kills_owners: bool = True) -> None:
    machine = type("Planted", (CrashMachine,), {"fault": fault, "kills_owners": kills_owners})
    run_state_machine_as_test(machine, settings=some(examples, database=None, derandomize=True, stateful_step_count=30))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_detects_the_planted_fault(fault: str) -> None:
    before = OUTCOMES["broken promises"]
    with pytest.raises((AssertionError, Flaky)):  # Flaky if the failure does not recur when the example is replayed
        run_with(fault, examples=100)
    assert OUTCOMES["broken promises"] > before, "the machine failed, but not because of a requirement of the model"


def test_a_torn_commit_is_detected_only_by_a_crash() -> None:
    """Shows that the kills are what detects this fault."""
    run_with("tears_commits", examples=5, kills_owners=False)
