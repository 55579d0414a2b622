"""Doorbells and waiters: no ring is lost, none is heard by the wrong process."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from quire.manifest.wakeups import Doorbell, Waiters, mine
from tests.manifest.helpers import eventually


def test_a_ring_before_the_sleep_is_heard() -> None:
    bell = Doorbell()
    bell.ring()
    bell.ring()
    assert bell.sleep(0)
    assert not bell.sleep(0), "rings are counted together, not queued"


def test_a_sleeper_wakes_when_somebody_rings() -> None:
    bell, woken = Doorbell(), threading.Event()

    def sleep() -> None:
        bell.sleep()
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    assert not woken.wait(0.02)
    bell.ring()
    assert woken.wait(60)
    sleeper.join()


def test_a_timeout_ends_the_sleep() -> None:
    started = time.monotonic()
    assert not Doorbell().sleep(0.02)
    assert time.monotonic() - started >= 0.02
    assert not Doorbell().sleep(-1), "a deadline in the past is no sleep at all"


def test_every_thread_has_its_own() -> None:
    others: list[Doorbell] = []
    thread = threading.Thread(target=lambda: others.append(mine()))
    thread.start()
    thread.join()
    assert mine() is mine()
    assert others[0] is not mine()


def test_a_child_does_not_swallow_the_rings_of_its_parent() -> None:
    """Hazard: after fork() both processes would read one counter."""
    bell = mine()
    child = os.fork()
    if child == 0:
        os._exit(0 if mine() is not bell and not mine().sleep(0) else 1)
    bell.ring()
    assert os.waitpid(child, 0)[1] == 0
    assert bell.sleep(0)


def test_a_doorbell_that_cannot_be_made_leaves_nothing_to_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: its finaliser closed a descriptor that it never had."""

    def full(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", full)
        with pytest.raises(OSError, match="open files"):
            Doorbell()
    assert Doorbell().sleep(0) is False


# ── waiters ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_all_waiters_look_again_when_they_are_woken() -> None:
    waiters, happened, results = Waiters(), threading.Event(), []
    threads = [
        threading.Thread(target=lambda: results.append(waiters.sleep_until(happened.is_set, 30))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(waiters) == 4)
    waiters.wake()
    time.sleep(0.02)
    assert not results, "woken for nothing, they sleep on"
    happened.set()
    waiters.wake()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 4
    assert not waiters


def test_what_happened_before_is_not_waited_for() -> None:
    assert Waiters().sleep_until(lambda: True, None)
    assert Waiters().sleep_until(lambda: True, 0)
    assert Waiters().sleep_until(lambda: True, -1)


def test_a_waiters_patience_ends() -> None:
    waiters, started = Waiters(), time.monotonic()
    assert not waiters.sleep_until(lambda: False, 0.02)
    assert time.monotonic() - started >= 0.02
    assert not waiters.sleep_until(lambda: False, -1)
    assert not waiters


def test_a_patience_beyond_all_clocks_is_no_error() -> None:
    waiters, happened, results = Waiters(), threading.Event(), []
    thread = threading.Thread(target=lambda: results.append(waiters.sleep_until(happened.is_set, float("inf"))))
    thread.start()
    assert eventually(lambda: len(waiters) == 1)
    happened.set()
    waiters.wake()
    thread.join(30)
    assert results == [True]


def test_a_waiter_whose_question_fails_leaves_no_trace() -> None:
    waiters = Waiters()
    with pytest.raises(ZeroDivisionError):
        waiters.sleep_until(lambda: 1 // 0 == 0, 1)
    assert not waiters
