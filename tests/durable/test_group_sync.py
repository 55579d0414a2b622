"""Waiting for syncs: one at a time, each for everyone who came in time, and nobody is forgotten."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from quire.core.errors import StoreUnusable
from quire.durable import group_sync
from quire.durable.group_sync import GroupSync


class Log:
    """Something that is written and synced; a sync takes until `gate` is open."""

    def __init__(self) -> None:
        self.written = self.durable = self.syncs = self.under_way = 0
        self.failure: StoreUnusable | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.group = GroupSync(self._sync, written_lsn=lambda: self.written, durable_lsn=lambda: self.durable)

    def write(self) -> int:
        with self._lock:
            self.written += 1
            return self.written

    def _sync(self) -> None:
        assert not self.under_way, "one at a time"
        self.under_way = 1
        try:
            upto = self.written
            self.syncs += 1
            self.began.release()
            assert self.gate.wait(30)
            if self.failure is not None:
                raise self.failure
            self.durable = upto
        finally:
            self.under_way = 0


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


def test_with_nobody_else_about_a_sync_is_a_call() -> None:
    log = Log()
    log.group.until(log.write())
    assert (log.durable, log.syncs) == (1, 1)
    log.group.until(1)
    assert log.syncs == 1, "it is durable already"


def test_who_comes_while_a_sync_is_under_way_shares_the_next_one() -> None:
    log = Log()
    log.gate.clear()
    done: list[int] = []

    def work() -> None:
        lsn = log.write()
        log.group.until(lsn)
        done.append(lsn)

    first = start(1, work)
    assert log.began.acquire(timeout=30)
    others = start(5, work)
    eventually(lambda: log.written == 6 and len(log.group._sleepers) == 4)
    assert log.group._heir.locked(), "the fifth waits to lead"
    assert done == []
    log.gate.set()
    join(first + others)
    assert sorted(done) == [1, 2, 3, 4, 5, 6]
    assert log.syncs == 2


def test_who_is_served_does_not_wait_for_the_next_sync() -> None:
    log = Log()
    log.gate.clear()
    leader = start(1, lambda: log.group.until(log.write()))
    assert log.began.acquire(timeout=30)
    served = start(1, lambda: log.group.until(1))
    eventually(lambda: len(log.group._sleepers) == 1)
    heir = start(1, lambda: log.group.until(log.write()))
    eventually(log.group._heir.locked)
    closed = threading.Event()
    former, log.gate = log.gate, closed  # the next sync takes long
    former.set()
    join(leader + served)
    assert log.began.acquire(timeout=30)
    assert log.durable == 1
    closed.set()
    join(heir)


def test_who_has_led_goes_on_when_its_heir_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 4: otherwise the disk waits while the former leader makes its next transaction."""
    monkeypatch.setattr(group_sync, "PATIENCE_SECONDS", 30.0)
    log = Log()
    log.gate.clear()
    begun: list[int] = []

    def lead() -> None:
        log.group.until(log.write())
        begun.append(log.syncs)

    leader = start(1, lead)
    assert log.began.acquire(timeout=30)
    heir = start(1, lambda: log.group.until(log.write()))
    eventually(lambda: log.group._begun is not None)
    former, log.gate = log.gate, threading.Event()  # the heir's sync takes long
    former.set()
    join(leader)
    assert begun == [2], "it went on before"
    log.gate.set()
    join(heir)


def test_an_heir_that_does_not_get_to_it_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only speed depends on rule 4: with an heir that never begins the leader goes on all the same."""
    monkeypatch.setattr(group_sync, "PATIENCE_SECONDS", 0.01)
    log = Log()
    stuck = threading.Lock()
    stuck.acquire()
    assert log.group._leader.acquire(blocking=False)
    log.group._begun = stuck
    log.group._lead(log.write())
    assert log.durable == 1


def test_with_an_heir_about_nobody_else_takes_the_lead() -> None:
    log = Log()
    log.gate.clear()
    leader = start(1, lambda: log.group.until(log.write()))
    assert log.began.acquire(timeout=30)
    heir = start(1, lambda: log.group.until(log.write()))
    eventually(lambda: log.group._begun is not None)
    late = start(1, lambda: log.group.until(log.write()))
    eventually(lambda: len(log.group._sleepers) == 1)
    log.gate.set()
    join(leader + heir + late)
    assert (log.durable, log.syncs) == (3, 2)


@pytest.mark.parametrize("writers", [2, 3, 9])
def test_nobody_is_forgotten(writers: int) -> None:
    log = Log()
    early: list[int] = []

    def work() -> None:
        rng = random.Random()
        for _ in range(150):
            lsn = log.write()
            if rng.random() < 0.3:
                time.sleep(rng.random() / 2000)
            log.group.until(lsn)
            if log.durable < lsn:
                early.append(lsn)

    join(start(writers, work))
    assert log.durable == log.written == writers * 150
    assert early == []
    assert log.group._sleepers == {}
    assert not log.group._heir.locked()


def test_a_failed_sync_is_heard_by_all_who_wait() -> None:
    log = Log()
    log.gate.clear()
    heard: list[str] = []

    def work() -> None:
        try:
            log.group.until(log.write())
        except StoreUnusable as error:
            heard.append(error.what)

    threads = start(1, work)
    assert log.began.acquire(timeout=30)
    threads += start(5, work)
    eventually(lambda: log.written == 6 and len(log.group._sleepers) == 4)
    log.failure = StoreUnusable("the disk is gone")
    log.gate.set()
    join(threads)
    assert heard == ["the disk is gone"] * 6


def test_an_heir_that_is_interrupted_leaves_its_place_to_another() -> None:
    """A signal may end its waiting: those who sleep because there is an heir must look again."""
    log = Log()
    log.gate.clear()
    leader = start(1, lambda: log.group.until(log.write()))
    assert log.began.acquire(timeout=30)
    group = log.group
    true_lock, looked = group._leader, threading.Event()

    class Interrupted:
        """The leader's lock, for a thread whose waiting a signal ends."""

        def acquire(self, blocking: bool = True) -> bool:
            if blocking:
                assert looked.wait(30)
                raise KeyboardInterrupt
            return true_lock.acquire(blocking=False)

        locked = staticmethod(true_lock.locked)
        release = staticmethod(true_lock.release)

    interrupted: list[bool] = []

    def heir() -> None:
        try:
            group.until(log.write())
        except KeyboardInterrupt:
            interrupted.append(True)

    group._leader = Interrupted()  # type: ignore[assignment]
    threads = start(1, heir)
    eventually(group._heir.locked)
    threads += start(1, lambda: group.until(log.write()))
    eventually(lambda: len(group._sleepers) == 1)
    group._leader = true_lock
    looked.set()
    eventually(lambda: bool(interrupted) and group._heir.locked())
    log.gate.set()
    join(leader + threads)
    assert log.durable == log.written


def test_a_leader_that_ends_while_a_sleeper_looks_a_last_time_wakes_it() -> None:
    """Rule 3: it has entered its name by then."""
    log = Log()
    lsn, group = log.write(), log.group

    class Ending:
        """A leader's lock that is given back just after somebody saw it taken."""

        def locked(self) -> bool:
            log.durable = lsn
            group._look_after()
            return True

    group._leader = Ending()  # type: ignore[assignment]
    join(start(1, lambda: group._sleep(lsn)))
    assert group._sleepers == {}
