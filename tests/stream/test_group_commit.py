"""Waiting for a leader's sync: one at a time, each for everyone who came in time, and nobody is forgotten."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from quire.core.errors import StoreUnusable
from quire.stream import group_commit
from quire.stream.group_commit import GroupCommit


class Log:
    """Something that is appended to and synced; a sync takes until `gate` is open."""

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
        """The id behind a new record."""
        with self._lock:
            self.next += 1
            return self.next

    def _sync(self) -> None:
        assert not self.under_way, "one at a time"
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
        assert not thread.is_alive(), "somebody was forgotten"


def eventually(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks by itself: what these tests show is that it need not."""
    monkeypatch.setattr(group_commit, "RECHECK_SECONDS", 60.0)


def test_with_nobody_else_about_a_sync_is_a_call() -> None:
    log = Log()
    log.group.wait_durable(log.append())
    assert (log.durable, log.syncs) == (2, 1)
    log.group.wait_durable(2)
    assert log.syncs == 1, "it is durable already"


def test_who_comes_while_a_sync_is_under_way_shares_the_next_one() -> None:
    log = Log()
    log.gate.clear()
    done: list[int] = []

    def work() -> None:
        upto = log.append()
        log.group.wait_durable(upto)
        done.append(upto)

    first = start(1, work)
    assert log.began.acquire(timeout=30)
    others = start(5, work)
    eventually(lambda: log.next == 7 and log.is_sleeping(5))
    assert done == []
    log.gate.set()
    join(first + others)
    assert sorted(done) == [2, 3, 4, 5, 6, 7]
    assert log.syncs == 2


def test_who_is_served_does_not_wait_for_the_next_sync() -> None:
    log = Log()
    log.gate.clear()
    leader = start(1, lambda: log.group.wait_durable(log.append()))
    assert log.began.acquire(timeout=30)
    others = start(1, lambda: log.group.wait_durable(log.append()))
    eventually(lambda: log.is_sleeping(1))
    served = start(3, lambda: log.group.wait_durable(2))
    eventually(lambda: log.is_sleeping(4))
    former, log.gate = log.gate, threading.Event()  # the next sync takes long
    former.set()
    join(served)
    assert log.began.acquire(timeout=30)
    assert log.durable == 2
    log.gate.set()
    join(leader + others)


@pytest.mark.parametrize("more", [0, 2])
def test_a_leader_stays_for_so_many_groups_and_not_for_more(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "EXTRA_GROUPS", more)
    log = Log()
    log.gate.clear()
    leader = start(1, lambda: log.group.wait_durable(log.append()))
    others: list[threading.Thread] = []
    for number in range(more + 1):
        assert log.began.acquire(timeout=30)
        others += start(1, lambda: log.group.wait_durable(log.append()))
        eventually(partial(log.is_sleeping, min(number + 1, 2)))  # the one that this sync is for, and the new one
        former, log.gate = log.gate, threading.Event()
        former.set()
    assert log.began.acquire(timeout=30)  # by another: the leader has gone on
    join(leader)
    log.gate.set()
    join(others)
    assert log.syncs == more + 2


@pytest.mark.parametrize("writers", [2, 3, 9, 16])
def test_nobody_is_forgotten(writers: int) -> None:
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


def test_a_failed_sync_is_heard_by_all_who_wait_and_by_nobody_else() -> None:
    """The leader's own record is durable when the sync that it makes for others fails."""
    log = Log()
    log.gate.clear()
    heard: list[str] = []

    def work() -> None:
        try:
            log.group.wait_durable(log.append())
        except StoreUnusable as error:
            heard.append(error.what)

    leader = start(1, work)
    assert log.began.acquire(timeout=30)
    others = start(5, work)
    eventually(lambda: log.is_sleeping(5))
    former, log.gate = log.gate, threading.Event()
    former.set()
    assert log.began.acquire(timeout=30)
    log.failure = StoreUnusable("the disk is gone")
    log.gate.set()
    join(leader + others)
    assert heard == ["the disk is gone"] * 5


def test_a_sleeper_that_is_interrupted_passes_the_baton_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4: one that goes without having been woken is rung all the same, and the one behind it must not wait for it."""
    log = Log()
    group = log.group
    group._leader.acquire()
    gone, last = group_commit._Sleeper(2), group_commit._Sleeper(2)
    group._waiting.extend([gone, last])
    gone.is_gone = True
    log.durable = 2
    group._wake_served()
    assert last.ring.sleep(30)
    assert not group._served

    class Interrupted:
        """The ring of a sleeper that a signal strikes in the moment in which it gets the baton."""

        def sleep(self, timeout: float) -> bool:
            if timeout:
                raise KeyboardInterrupt
            return True

    original = group_commit._Sleeper

    def struck(upto: int) -> group_commit._Sleeper:
        made = original.__new__(original)
        made.upto, made.ring, made.is_gone = upto, Interrupted(), False  # type: ignore[assignment]
        return made

    behind = group_commit._Sleeper(2)
    group._served.append(behind)
    monkeypatch.setattr(group_commit, "_Sleeper", struck)
    with pytest.raises(KeyboardInterrupt):
        group._sleep(3)
    assert behind.ring.sleep(30)


def test_a_leader_that_ends_while_a_sleeper_looks_a_last_time_wakes_it() -> None:
    """Rule 4: it has entered itself by then."""
    log = Log()
    upto, group = log.append(), log.group

    class Ending:
        """A leader's lock that is given back just after somebody saw it taken."""

        def locked(self) -> bool:
            log.durable = upto
            group._wake_served()
            return True

    group._leader = Ending()  # type: ignore[assignment]
    join(start(1, lambda: group._sleep(upto)))
    assert not group._waiting
    assert not group._served


def test_everybody_looks_again_when_told_to() -> None:
    log = Log()
    log.group._leader.acquire()
    threads = start(4, lambda: log.group.wait_durable(log.append()))
    eventually(lambda: log.is_sleeping(4))
    log.durable = 5
    log.group.wake()
    join(threads)
