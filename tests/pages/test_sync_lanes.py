"""Waiting for syncs: two at a time, settled in order, each serving all waiters that it covers; a failure reaches all of
them."""

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
from tests.pages.engine_harness import eventually


class Sync:
    """One call of `sync`: it returns or raises when the test says so."""

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
    """A log that is written and synced. With `held`, each sync waits in `syncs` until the test ends it."""

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
        assert before is None or before.lane != flight.lane, "two flights share a lane"
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
    """A thread that writes and waits until its write is durable."""

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
            assert self._log.lanes.durable_lsn >= self.lsn, "it returned too early"
        except BaseException as error:
            self.error = error
        self.is_done = True

    def join(self) -> BaseException | None:
        self._thread.join(30)
        assert not self._thread.is_alive(), "it was never woken"
        return self.error


def start_leaders(log: Log, count: int) -> list[Waiter]:
    """Start this many waiters, each of which leads its own running sync."""
    waiters = []
    for number in range(count):
        waiters.append(Waiter(log))
        eventually(lambda number=number: len(log.syncs) == number + 1)  # type: ignore[misc]
    return waiters


def start_sleepers(log: Log, count: int) -> list[Waiter]:
    before = len(log.lanes._sleepers)
    waiters = [Waiter(log) for _ in range(count)]
    eventually(lambda: len(log.lanes._sleepers) == before + count)
    return waiters


def assert_idle(log: Log) -> None:
    assert log.lanes._flying == []
    assert log.lanes._sleepers == {}
    assert not log.lanes._lock.locked()


def test_without_contention_a_sync_is_a_plain_call() -> None:
    log = Log()
    log.lanes.wait_durable(log.write())
    assert (log.settled, log.lanes.durable_lsn) == ([1], 1)
    log.lanes.wait_durable(1)
    assert len(log.syncs) == 1, "it was already durable"
    assert_idle(log)


def test_a_second_writer_does_not_wait_for_the_running_sync() -> None:
    log = Log(held=True)
    first, second = start_leaders(log, 2)
    assert [sync.flight.lane for sync in log.syncs] == [0, 1]
    log.syncs[0].end()
    assert first.join() is None
    assert not second.is_done
    log.syncs[1].end()
    assert second.join() is None
    assert log.settled == [1, 2]
    assert_idle(log)


def test_with_every_lane_taken_the_next_sync_serves_all_new_waiters() -> None:
    """One sync serves a group (P7)."""
    log = Log(held=True)
    leaders, group = start_leaders(log, LANES), start_sleepers(log, 5)
    assert len(log.syncs) == LANES
    log.syncs[0].end()
    eventually(lambda: len(log.syncs) == LANES + 1)
    for sync in log.syncs:
        sync.end()
    assert [waiter.join() for waiter in leaders + group] == [None] * (LANES + 5)
    assert log.settled == [1, 2, 7], "one sync for five waiters"
    assert_idle(log)


def test_a_covered_waiter_sleeps_although_a_lane_is_free() -> None:
    log = Log(held=True)
    log.write()
    (leader,) = start_leaders(log, 1)
    late = threading.Thread(target=log.lanes.wait_durable, args=(1,), daemon=True)
    late.start()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    log.syncs[0].end()
    assert leader.join() is None
    late.join(30)
    assert not late.is_alive()
    assert len(log.syncs) == 1


def test_a_served_waiter_does_not_wait_for_the_next_sync() -> None:
    log = Log(held=True)
    leaders = start_leaders(log, LANES)
    served = threading.Thread(target=log.lanes.wait_durable, args=(1,), daemon=True)
    served.start()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    log.syncs[0].end()
    served.join(30)
    assert not served.is_alive()
    assert not leaders[1].is_done
    log.syncs[1].end()
    assert leaders[1].join() is None


def test_a_sync_that_completes_first_waits_for_the_one_before_it() -> None:
    """Flights are settled in the order in which they began (rule 4)."""
    log = Log(held=True)
    first, second = start_leaders(log, 2)
    log.syncs[1].end()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    assert (log.settled, log.lanes.durable_lsn, second.is_done) == ([], 0, False)
    log.syncs[0].end()
    assert (first.join(), second.join()) == (None, None)
    assert log.settled == [1, 2]


@pytest.mark.parametrize("second_is_done", [False, True])
def test_a_failed_sync_is_reported_to_all_waiters_and_nothing_is_settled_after_it(second_is_done: bool) -> None:
    log = Log(held=True)
    leaders, group = start_leaders(log, LANES), start_sleepers(log, 4)
    if second_is_done:
        log.syncs[1].end()
        eventually(lambda: len(log.lanes._sleepers) == 5)
    log.syncs[0].end(OSError("the disk is gone"))
    assert isinstance(leaders[0].join(), OSError)
    log.syncs[1].end()
    for waiter in [leaders[1], *group]:
        assert isinstance(waiter.join(), StoreUnusable)
    assert (log.settled, log.lanes.durable_lsn) == ([], 0)
    assert_idle(log)
    with pytest.raises(StoreUnusable):
        log.lanes.wait_durable(log.write())


def test_a_failed_second_sync_does_not_affect_the_first() -> None:
    log = Log(held=True)
    first, second = start_leaders(log, 2)
    log.syncs[1].end(OSError("the disk is gone"))
    assert isinstance(second.join(), OSError)
    log.syncs[0].end()
    assert first.join() is None
    assert log.settled == [1]
    assert_idle(log)


@pytest.mark.parametrize("step", ["_begin", "_sync"])
def test_an_interrupt_before_the_sync_makes_the_log_unusable(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Rule 5: the flight has taken the dirty segments, and no other flight would sync them."""
    log = Log(held=True)
    (first,) = start_leaders(log, 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(log.lanes, step, interrupt)
        assert isinstance(Waiter(log).join(), KeyboardInterrupt)
    assert isinstance(log.failure, KeyboardInterrupt)
    log.syncs[0].end()
    assert first.join() is None
    assert log.settled == [1]
    with pytest.raises(StoreUnusable):
        log.lanes.wait_durable(2)


def test_an_interrupt_after_the_sync_loses_nothing() -> None:
    """The sync has completed: what it covers is durable, and the waiters it serves are woken."""
    log = Log(held=True)
    settle, calls = log._settle, list[int]()

    def interrupted_once(flight: Flight) -> None:
        calls.append(flight.mark.lsn)
        if len(calls) == 1:
            raise KeyboardInterrupt
        settle(flight)

    log.lanes._settle = interrupted_once
    leader = start_leaders(log, 1)[0]
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


def test_an_interrupted_sleeper_passes_its_wake_up_to_another() -> None:
    """It may be the one that was woken to lead; those behind it must not depend on it."""
    log = Log(held=True)
    leaders = start_leaders(log, LANES)

    class Interrupted:
        """A ring whose wait is interrupted by a signal just when the lane becomes free."""

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
    interrupted, other = start_sleepers(log, 1)[0], start_sleepers(log, 1)[0]
    log.lanes.__class__ = SyncLanes
    log.syncs[0].end()
    assert isinstance(interrupted.join(), KeyboardInterrupt)
    eventually(lambda: len(log.syncs) == LANES + 1)
    for sync in log.syncs:
        sync.end()
    assert [waiter.join() for waiter in [*leaders, other]] == [None, None, None]
    assert log.failure is None


def _interrupting(line_count: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace function that interrupts the module under test at the n-th line it reaches."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != sync_lanes.__file__ or frame.f_code.co_name == "_abort_flight":
            return None
        # A signal cannot come between a block and the release of its lock either.
        if event == "line" and not _is_with(frame.f_lineno):
            lines += 1
            if lines == line_count:
                raise KeyboardInterrupt
        return trace

    return trace


def _is_with(line: int) -> bool:
    with open(sync_lanes.__file__, encoding="utf-8") as source:
        return source.read().splitlines()[line - 1].lstrip().startswith("with ")


@pytest.mark.parametrize("role", ["first", "second", "sleeper"])
def test_an_interrupt_at_any_line_leaves_no_waiter_asleep(role: str) -> None:
    """The thread is interrupted at its first line, its second, … until a clean pass. All other waiters are served or
    get an error."""
    line_count, was_interrupted = 0, True
    while was_interrupted:
        line_count += 1
        log = Log(held=True)
        others = start_leaders(log, {"first": 0, "second": 1, "sleeper": LANES}[role])
        interrupts = list[BaseException]()

        def work(log: Log = log, line_count: int = line_count, interrupts: list[BaseException] = interrupts) -> None:
            lsn = log.write()
            sys.settrace(_interrupting(line_count))
            try:
                log.lanes.wait_durable(lsn)
            except KeyboardInterrupt as interrupt:
                interrupts.append(interrupt)
            except StoreUnusable:
                pass
            finally:
                sys.settrace(None)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        eventually(
            lambda log=log, others=others, interrupts=interrupts: bool(  # type: ignore[misc]
                interrupts or log.lanes._sleepers or len(log.syncs) > len(others)
            )
        )
        others += [Waiter(log)]
        log.held = False
        deadline = time.monotonic() + 30
        while not all(waiter.is_done for waiter in others) or thread.is_alive():
            for sync in [*log.syncs]:
                sync.end()
            assert time.monotonic() < deadline, f"interrupted at line {line_count}, a waiter was never woken"
            time.sleep(0.0005)
        was_interrupted = bool(interrupts)
        for error in [waiter.join() for waiter in others]:
            assert error is None if log.failure is None else isinstance(error, StoreUnusable | None)
        if log.failure is None:
            log.lanes.wait_durable(log.write())
            assert log.lanes.durable_lsn == log.written
        assert_idle(log)
    assert line_count > 8, "the thread was never interrupted"


@pytest.mark.parametrize("writers", [2, 3, 9])
def test_no_waiter_is_left_asleep(writers: int) -> None:
    log = Log()
    returned_early: list[int] = []
    running: list[int] = []

    def sync(flight: Flight) -> None:
        running.append(flight.lane)
        assert len(running) <= LANES
        time.sleep(random.random() / 2000)
        running.remove(flight.lane)

    log.lanes._sync = sync

    def work() -> None:
        for _ in range(150):
            lsn = log.write()
            log.lanes.wait_durable(lsn)
            if log.lanes.durable_lsn < lsn:
                returned_early.append(lsn)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a waiter was never woken"
    assert log.lanes.durable_lsn == log.written == writers * 150
    assert returned_early == []
    assert log.settled == sorted(log.settled)
    assert_idle(log)


def test_draining_waits_for_every_running_sync() -> None:
    log = Log(held=True)
    leaders = start_leaders(log, LANES)
    draining = threading.Thread(target=log.lanes.drain, daemon=True)
    draining.start()
    eventually(lambda: len(log.lanes._sleepers) == 1)
    log.syncs[0].end()
    assert leaders[0].join() is None
    assert draining.is_alive()
    log.syncs[1].end()
    draining.join(30)
    assert not draining.is_alive()
    assert leaders[1].join() is None
    log.lanes.drain()
    assert_idle(log)


def test_after_a_fork_the_lanes_are_free() -> None:
    log = Log(held=True)
    leaders = start_leaders(log, LANES)
    log.lanes._lock.acquire()
    log.lanes.forked()
    assert_idle(log)
    previous_syncs, log.syncs, log.held = log.syncs, [], False
    log.lanes.wait_durable(log.write())
    assert log.lanes.durable_lsn == 3
    for sync in previous_syncs:
        sync.end()
    for waiter in leaders:
        assert not isinstance(waiter.join(), QuireError)
