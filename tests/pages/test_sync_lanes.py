"""Waiting for syncs: two at a time, settled in order, each for everyone who came in time; a failure is heard by all."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from quire.core.errors import QuireError, StoreUnusable
from quire.pages import sync_lanes
from quire.pages.page_source import Mark
from quire.pages.sync_lanes import LANES, Flight, SyncLanes
from tests.pages.world import eventually


class Sync:
    """One call of `sync`: it returns, or raises, when the test says so."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.error: BaseException | None = None
        self._may_end = threading.Event()

    def end(self, error: BaseException | None = None) -> None:
        self.error = error
        self._may_end.set()

    def wait(self) -> None:
        assert self._may_end.wait(30)
        if self.error is not None:
            raise self.error


class Log:
    """Something that is written and synced. With `held`, each sync waits in `syncs` for its end."""

    def __init__(self, *, held: bool = False) -> None:
        self.held = held
        self.written = 0
        self.syncs: list[Sync] = []
        self.settled: list[int] = []
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self.lanes = SyncLanes(0, begin=self._begin, sync=self._sync, settle=self._settle, on_failure=self._fail)

    def write(self) -> int:
        with self._lock:
            self.written += 1
            return self.written

    def _begin(self, flight: Flight, before: Flight | None) -> None:
        assert before is None or before.lane != flight.lane, "each has a lane of its own"
        flight.mark, flight.segments = Mark(self.written, 1), []

    def _sync(self, flight: Flight) -> None:
        self._require()
        sync = Sync(flight)
        self.syncs.append(sync)
        if self.held:
            sync.wait()

    def _settle(self, flight: Flight) -> None:
        self.settled.append(flight.mark.lsn)

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def _require(self) -> None:
        if self.failure is not None:
            raise StoreUnusable(f"the log failed: {self.failure}")


class Waiter:
    """A thread that writes and waits for what it has written."""

    def __init__(self, log: Log) -> None:
        self.error: BaseException | None = None
        self.is_done = False
        self.lsn = log.write()
        self._log = log
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._log.lanes.wait_durable(self.lsn)
            assert self._log.lanes.durable_lsn >= self.lsn, "it went on too early"
        except BaseException as error:
            self.error = error
        self.is_done = True

    def join(self) -> BaseException | None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "it was forgotten"
        return self.error


def flying(log: Log, count: int) -> list[Waiter]:
    """So many waiters, each of which leads a sync of its own that is under way."""
    waiters = []
    for number in range(count):
        waiters.append(Waiter(log))
        eventually(lambda number=number: len(log.syncs) == number + 1)  # type: ignore[misc]
    return waiters


def sleeping(log: Log, count: int) -> list[Waiter]:
    before = len(log.lanes._sleepers)
    waiters = [Waiter(log) for _ in range(count)]
    eventually(lambda: len(log.lanes._sleepers) == before + count)
    return waiters


def assert_idle(log: Log) -> None:
    assert log.lanes._flying == []
    assert log.lanes._sleepers == {}
    assert not log.lanes._lock.locked()


def test_with_nobody_else_about_a_sync_is_a_call() -> None:
    log = Log()
    log.lanes.wait_durable(log.write())
    assert (log.settled, log.lanes.durable_lsn) == ([1], 1)
    log.lanes.wait_durable(1)
    assert len(log.syncs) == 1, "it is durable already"
    assert_idle(log)


def test_a_second_writer_does_not_wait_for_the_sync_under_way() -> None:
    log = Log(held=True)
    first, second = flying(log, 2)
    assert [sync.flight.lane for sync in log.syncs] == [0, 1]
    log.syncs[0].end()
    assert first.join() is None
    assert not second.is_done
    log.syncs[1].end()
    assert second.join() is None
    assert log.settled == [1, 2]
    assert_idle(log)


def test_with_every_lane_taken_the_next_sync_serves_all_who_came_meanwhile() -> None:
    """One sync serves a group (P7)."""
    log = Log(held=True)
    leaders, group = flying(log, LANES), sleeping(log, 5)
    assert len(log.syncs) == LANES
    log.syncs[0].end()
    eventually(lambda: len(log.syncs) == LANES + 1)
    for sync in log.syncs:
        sync.end()
    assert [each.join() for each in leaders + group] == [None] * (LANES + 5)
    assert log.settled == [1, 2, 7], "one sync for five"
    assert_idle(log)


def test_who_is_covered_sleeps_though_a_lane_is_free() -> None:
    log = Log(held=True)
    log.write()
    (leader,) = flying(log, 1)
    late = threading.Thread(target=log.lanes.wait_durable, args=(1,), daemon=True)
    late.start()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    log.syncs[0].end()
    assert leader.join() is None
    late.join(30)
    assert not late.is_alive()
    assert len(log.syncs) == 1


def test_who_is_served_does_not_wait_for_the_next_sync() -> None:
    log = Log(held=True)
    leaders = flying(log, LANES)
    served = threading.Thread(target=log.lanes.wait_durable, args=(1,), daemon=True)
    served.start()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    log.syncs[0].end()
    served.join(30)
    assert not served.is_alive()
    assert not leaders[1].is_done
    log.syncs[1].end()
    assert leaders[1].join() is None


def test_a_sync_that_is_through_first_waits_for_the_one_before_it() -> None:
    """Flights are settled in the order in which they began (rule 4)."""
    log = Log(held=True)
    first, second = flying(log, 2)
    log.syncs[1].end()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    assert (log.settled, log.lanes.durable_lsn, second.is_done) == ([], 0, False)
    log.syncs[0].end()
    assert (first.join(), second.join()) == (None, None)
    assert log.settled == [1, 2]


@pytest.mark.parametrize("second_is_through", [False, True])
def test_a_failed_sync_is_heard_by_all_who_wait_and_nothing_is_settled_behind_it(second_is_through: bool) -> None:
    log = Log(held=True)
    leaders, group = flying(log, LANES), sleeping(log, 4)
    if second_is_through:
        log.syncs[1].end()
        eventually(lambda: len(log.lanes._sleepers) == 5)
    log.syncs[0].end(OSError("the disk is gone"))
    assert isinstance(leaders[0].join(), OSError)
    log.syncs[1].end()
    for each in [leaders[1], *group]:
        assert isinstance(each.join(), StoreUnusable)
    assert (log.settled, log.lanes.durable_lsn) == ([], 0)
    assert_idle(log)
    with pytest.raises(StoreUnusable):
        log.lanes.wait_durable(log.write())


def test_a_failed_second_sync_leaves_the_first_alone() -> None:
    log = Log(held=True)
    first, second = flying(log, 2)
    log.syncs[1].end(OSError("the disk is gone"))
    assert isinstance(second.join(), OSError)
    log.syncs[0].end()
    assert first.join() is None
    assert log.settled == [1]
    assert_idle(log)


@pytest.mark.parametrize("step", ["_begin", "_sync"])
def test_an_interrupt_between_boarding_and_the_sync_is_a_doubt(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Rule 5: the flight has taken the dirty segments, and nobody else would sync them."""
    log = Log(held=True)
    (first,) = flying(log, 1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log.lanes, step, interrupted)
        assert isinstance(Waiter(log).join(), KeyboardInterrupt)
    assert isinstance(log.failure, KeyboardInterrupt)
    log.syncs[0].end()
    assert first.join() is None
    assert log.settled == [1]
    with pytest.raises(StoreUnusable):
        log.lanes.wait_durable(2)


def test_an_interrupt_behind_the_sync_loses_nothing() -> None:
    """The sync is through: what it made durable is durable, and those it serves hear of it."""
    log = Log(held=True)
    settle, calls = log._settle, list[int]()

    def interrupted_once(flight: Flight) -> None:
        calls.append(flight.mark.lsn)
        if len(calls) == 1:
            raise KeyboardInterrupt
        settle(flight)

    log.lanes._settle = interrupted_once
    leader = flying(log, 1)[0]
    log.write()
    served = threading.Thread(target=log.lanes.wait_durable, args=(1,), daemon=True)
    served.start()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    log.syncs[0].end()
    assert isinstance(leader.join(), KeyboardInterrupt)
    served.join(30)
    assert not served.is_alive()
    assert (calls, log.settled, log.failure) == ([1, 1], [1], None)
    assert_idle(log)


def test_a_sleeper_that_is_interrupted_leaves_its_turn_to_another() -> None:
    """It may be the one that was woken to lead; those behind it must not rely on it."""
    log = Log(held=True)
    leaders = flying(log, LANES)

    class Interrupted:
        """A ring whose waiting a signal ends, just when the lane is free."""

        def sleep(self) -> None:
            assert woken.wait(30)
            raise KeyboardInterrupt

        def wake(self) -> None:
            woken.set()

    woken, asleep = threading.Event(), log.lanes._go_to_sleep

    def first_is_interrupted(sleeper: Flight, lsn: int) -> None:
        asleep(sleeper, lsn)
        if len(log.lanes._sleepers) == 1:
            sleeper.ring = Interrupted()  # type: ignore[assignment]

    class Lanes(SyncLanes):
        __slots__ = ()
        _go_to_sleep = staticmethod(first_is_interrupted)

    log.lanes.__class__ = Lanes
    interrupted, other = sleeping(log, 1)[0], sleeping(log, 1)[0]
    log.lanes.__class__ = SyncLanes
    log.syncs[0].end()
    assert isinstance(interrupted.join(), KeyboardInterrupt)
    eventually(lambda: len(log.syncs) == LANES + 1)
    for sync in log.syncs:
        sync.end()
    assert [each.join() for each in [*leaders, other]] == [None, None, None]
    assert log.failure is None


def _interrupting(at: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that interrupts the module under test at the n-th line it comes to."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename != sync_lanes.__file__ or frame.f_code.co_name == "_abort_flight":
            return None
        # What a signal cannot do either: come between a block and the release of its lock.
        if event == "line" and not _is_with(frame.f_lineno):
            seen += 1
            if seen == at:
                raise KeyboardInterrupt
        return trace

    return trace


def _is_with(line: int) -> bool:
    with open(sync_lanes.__file__, encoding="utf-8") as source:
        return source.read().splitlines()[line - 1].lstrip().startswith("with ")


@pytest.mark.parametrize("role", ["first", "second", "sleeper"])
def test_an_interrupt_at_any_line_forgets_nobody(role: str) -> None:
    """The thread is hit at its first line, its second, … until a clean pass. Whoever else waits hears: served, or a failure."""
    at, was_hit = 0, True
    while was_hit:
        at += 1
        log = Log(held=True)
        others = flying(log, {"first": 0, "second": 1, "sleeper": LANES}[role])
        hit = list[BaseException]()

        def work(log: Log = log, at: int = at, hit: list[BaseException] = hit) -> None:
            lsn = log.write()
            sys.settrace(_interrupting(at))
            try:
                log.lanes.wait_durable(lsn)
            except KeyboardInterrupt as interrupt:
                hit.append(interrupt)
            except StoreUnusable:
                pass
            finally:
                sys.settrace(None)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        eventually(
            lambda log=log, others=others, hit=hit: bool(  # type: ignore[misc]
                hit or log.lanes._sleepers or len(log.syncs) > len(others)
            )
        )
        others += [Waiter(log)]
        log.held = False
        deadline = time.monotonic() + 30
        while not all(each.is_done for each in others) or thread.is_alive():
            for sync in [*log.syncs]:
                sync.end()
            assert time.monotonic() < deadline, f"interrupted at line {at}, somebody was forgotten"
            time.sleep(0.0005)
        was_hit = bool(hit)
        for error in [each.join() for each in others]:
            assert error is None if log.failure is None else isinstance(error, StoreUnusable | None)
        if log.failure is None:
            log.lanes.wait_durable(log.write())
            assert log.lanes.durable_lsn == log.written
        assert_idle(log)
    assert at > 8, "the thread was hit at no line of the way"


@pytest.mark.parametrize("writers", [2, 3, 9])
def test_nobody_is_forgotten(writers: int) -> None:
    log = Log()
    early: list[int] = []
    under_way: list[int] = []

    def sync(flight: Flight) -> None:
        under_way.append(flight.lane)
        assert len(under_way) <= LANES
        time.sleep(random.random() / 2000)
        under_way.remove(flight.lane)

    log.lanes._sync = sync

    def work() -> None:
        for _ in range(150):
            lsn = log.write()
            log.lanes.wait_durable(lsn)
            if log.lanes.durable_lsn < lsn:
                early.append(lsn)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody was forgotten"
    assert log.lanes.durable_lsn == log.written == writers * 150
    assert early == []
    assert log.settled == sorted(log.settled)
    assert_idle(log)


def test_draining_waits_for_every_sync_under_way() -> None:
    log = Log(held=True)
    leaders = flying(log, LANES)
    drained = threading.Thread(target=log.lanes.drain, daemon=True)
    drained.start()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    log.syncs[0].end()
    assert leaders[0].join() is None
    assert drained.is_alive()
    log.syncs[1].end()
    drained.join(30)
    assert not drained.is_alive()
    assert leaders[1].join() is None
    log.lanes.drain()
    assert_idle(log)


def test_after_a_fork_the_lanes_are_free() -> None:
    log = Log(held=True)
    leaders = flying(log, LANES)
    log.lanes._lock.acquire()
    log.lanes.forked()
    assert_idle(log)
    former, log.syncs, log.held = log.syncs, [], False
    log.lanes.wait_durable(log.write())
    assert log.lanes.durable_lsn == 3
    for sync in former:
        sync.end()
    for each in leaders:
        assert not isinstance(each.join(), QuireError)
