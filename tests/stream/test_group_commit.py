"""Waiting for a leader's sync: one sync at a time, each for every waiter that arrived in time, and no waiter is
forgotten.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quire.core.errors import StoreUnusable
from quire.stream import group_commit
from quire.stream.group_commit import GroupCommit


class Log:
    """A log that is appended to and synced; a sync takes until `gate` is open."""

    def __init__(self) -> None:
        self.next = self.durable = 1
        self.syncs = self.under_way = 0
        self.failure: StoreUnusable | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.group = GroupCommit(self, self._sync)

    def append(self) -> int:
        """The id after a new record."""
        with self._lock:
            self.next += 1
            return self.next

    def _sync(self) -> None:
        assert not self.under_way, "two syncs at a time"
        self.under_way = 1
        try:
            upto, gate = self.next, self.gate
            self.syncs += 1
            self.began.release()
            assert gate.wait(30)
            if self.failure is not None:
                raise self.failure
            self.durable = upto
        finally:
            self.under_way = 0

    def is_sleeping(self, count: int) -> bool:
        return len(self.group._waiting) == count


def start(count: int, work: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a waiter was not woken"


def eventually(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_recheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the periodic recheck: these tests show that waiters do not depend on it."""
    monkeypatch.setattr(group_commit, "RECHECK_SECONDS", 60.0)


def test_without_other_waiters_a_sync_is_one_call() -> None:
    log = Log()
    log.group.wait_durable(log.append())
    assert (log.durable, log.syncs) == (2, 1)
    log.group.wait_durable(2)
    assert log.syncs == 1, "the record is durable already"


def test_waiters_that_arrive_during_a_sync_share_the_next_one() -> None:
    log = Log()
    log.gate.clear()
    durable_ids: list[int] = []

    def work() -> None:
        upto = log.append()
        log.group.wait_durable(upto)
        durable_ids.append(upto)

    first = start(1, work)
    assert log.began.acquire(timeout=30)
    others = start(5, work)
    eventually(lambda: log.next == 7 and log.is_sleeping(5))
    assert durable_ids == []
    log.gate.set()
    join(first + others)
    assert sorted(durable_ids) == [2, 3, 4, 5, 6, 7]
    assert log.syncs == 2


def test_a_waiter_whose_record_is_durable_does_not_wait_for_the_next_sync() -> None:
    log = Log()
    log.gate.clear()
    leader = start(1, lambda: log.group.wait_durable(log.append()))
    assert log.began.acquire(timeout=30)
    others = start(1, lambda: log.group.wait_durable(log.append()))
    eventually(lambda: log.is_sleeping(1))
    served = start(3, lambda: log.group.wait_durable(2))
    eventually(lambda: log.is_sleeping(4))
    first_gate, log.gate = log.gate, threading.Event()  # the next sync takes long
    first_gate.set()
    join(served)
    assert log.began.acquire(timeout=30)
    assert log.durable == 2
    log.gate.set()
    join(leader + others)


@pytest.mark.parametrize("more", [0, 2])
def test_a_leader_serves_a_bounded_number_of_groups(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "EXTRA_GROUPS", more)
    log = Log()
    log.gate.clear()
    leader = start(1, lambda: log.group.wait_durable(log.append()))
    others: list[threading.Thread] = []
    for number in range(more + 1):
        assert log.began.acquire(timeout=30)
        others += start(1, lambda: log.group.wait_durable(log.append()))
        eventually(partial(log.is_sleeping, min(number + 1, 2)))  # the waiter of this sync, and the new one
        first_gate, log.gate = log.gate, threading.Event()
        first_gate.set()
    assert log.began.acquire(timeout=30)  # by another leader: the first one has returned
    join(leader)
    log.gate.set()
    join(others)
    assert log.syncs == more + 2


@pytest.mark.parametrize("writers", [2, 3, 9, 16])
def test_every_waiter_is_woken(writers: int) -> None:
    log = Log()
    early: list[int] = []

    def work() -> None:
        rng = random.Random()
        for _ in range(150):
            upto = log.append()
            if rng.random() < 0.3:
                time.sleep(rng.random() / 2000)
            log.group.wait_durable(upto)
            if log.durable < upto:
                early.append(upto)

    join(start(writers, work))
    assert log.durable == log.next == writers * 150 + 1
    assert early == []


def test_a_failed_sync_raises_for_all_its_waiters_and_for_no_others() -> None:
    """The leader's own record is durable even if the next sync, which it performs for others, fails."""
    log = Log()
    log.gate.clear()
    errors: list[str] = []

    def work() -> None:
        try:
            log.group.wait_durable(log.append())
        except StoreUnusable as error:
            errors.append(error.what)

    leader = start(1, work)
    assert log.began.acquire(timeout=30)
    others = start(5, work)
    eventually(lambda: log.is_sleeping(5))
    first_gate, log.gate = log.gate, threading.Event()
    first_gate.set()
    assert log.began.acquire(timeout=30)
    log.failure = StoreUnusable("the disk is gone")
    log.gate.set()
    join(leader + others)
    assert errors == ["the disk is gone"] * 5


def test_an_interrupted_waiter_hands_over_its_leadership(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4: a waiter that leaves without having been woken may still be chosen as leader; the next waiter must not
    wait for it.
    """
    log = Log()
    group = log.group
    group._leader = object()
    interrupted, last = group_commit._Sleeper(2), group_commit._Sleeper(2)
    group._waiting.extend([interrupted, last])
    interrupted.is_gone = True
    log.durable = 2
    group._wake_served()
    assert last.ring.sleep(30)
    assert not group._served

    class Interrupted:
        """The wake-up event of a waiter that a signal interrupts at the moment it becomes leader."""

        def sleep(self, timeout: float) -> bool:
            if timeout:
                raise KeyboardInterrupt
            return True

    original = group_commit._Sleeper

    def new_sleeper(upto: int) -> group_commit._Sleeper:
        sleeper = original.__new__(original)
        sleeper.upto, sleeper.ring, sleeper.is_gone = upto, Interrupted(), False  # type: ignore[assignment]
        return sleeper

    behind = group_commit._Sleeper(2)
    group._served.append(behind)
    monkeypatch.setattr(group_commit, "_Sleeper", new_sleeper)
    with pytest.raises(KeyboardInterrupt):
        group._sleep(3)
    assert behind.ring.sleep(30)


def test_an_interrupt_at_any_line_of_the_leader_leaves_no_waiter_asleep() -> None:
    """Hazard: an interrupt right after a thread had become the leader left all other threads waiting for it."""
    line_count, was_interrupted = 0, True
    while was_interrupted:
        line_count += 1
        log = Log()
        upto = log.append()
        sys.settrace(_interrupting(line_count))
        try:
            log.group.wait_durable(upto)
            was_interrupted = False
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        join(start(2, partial(log.group.wait_durable, log.append())))
        assert log.group._leader is None
    assert line_count > 8, "the thread was never interrupted"


def _interrupting(line_count: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that interrupts the module under test at the n-th line it reaches."""
    lines = 0
    source = Path(group_commit.__file__).read_text().splitlines()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != group_commit.__file__:
            return None
        text = source[frame.f_lineno - 1].strip()
        # Signal handlers run after calls: not between a block and the release of its lock, nor before the last line.
        if event == "line" and not text.startswith(("with ", "if self._leader is me", "self._leader = None")):
            lines += 1
            if lines == line_count:
                raise KeyboardInterrupt
        return trace

    return trace


def test_a_leader_that_ends_during_the_last_check_of_a_waiter_wakes_it() -> None:
    """Rule 4: the waiter has registered itself by then."""
    log = Log()
    upto, group = log.append(), log.group

    class Ending:
        """A log that is synced just after its end was looked at."""

        reads = 0

        @property
        def durable(self) -> int:
            self.reads += 1
            if self.reads == 1:
                group._wake_served()
                return upto - 1
            return upto

    group._log = Ending()  # type: ignore[assignment]
    group._leader = object()
    join(start(1, lambda: group._sleep(upto)))
    assert not group._waiting
    assert not group._served


def test_all_waiters_check_again_when_notified() -> None:
    log = Log()
    log.group._leader = object()
    threads = start(4, lambda: log.group.wait_durable(log.append()))
    eventually(lambda: log.is_sleeping(4))
    log.durable = 5
    log.group.wake()
    join(threads)
