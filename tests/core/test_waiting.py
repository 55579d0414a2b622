"""Rings and waiters: no wake-up is lost, and a waiter that leaves is removed."""

from __future__ import annotations

import threading
import time

import pytest

from quire.core.waiting import Ring, Waiters
from tests.manifest.helpers import eventually


def test_a_wakeup_before_the_sleep_ends_it() -> None:
    ring = Ring()
    assert not ring.sleep(0)
    ring.wake()
    assert ring.sleep(30)
    assert not ring.sleep(0.01)


def test_the_longest_waiter_is_woken_first_and_alone() -> None:
    waiters, woken = Waiters(), list[int]()

    def wait(number: int) -> None:
        if waiters.sleep_unless(lambda: False, 30):
            woken.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for count, thread in enumerate(threads, 1):
        thread.start()
        assert eventually(lambda: len(waiters) == count)  # noqa: B023 - evaluated before the next iteration
    for number, thread in enumerate(threads):
        waiters.wake_first()
        thread.join(30)
        assert woken == list(range(number + 1))
    waiters.wake_first()
    assert not waiters.sleep_unless(lambda: False, 0.01), "a wake-up without a waiter has no effect"
    assert waiters.sleep_unless(lambda: True, 0)
    assert not waiters


def test_all_waiters_check_their_condition_when_they_are_woken() -> None:
    waiters, happened, results = Waiters(), threading.Event(), []
    threads = [
        threading.Thread(target=lambda: results.append(waiters.sleep_until(happened.is_set, 30))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(waiters) == 4)
    waiters.wake()
    time.sleep(0.02)
    assert not results, "their condition is false, so they continue to sleep"
    happened.set()
    waiters.wake()
    for thread in threads:
        thread.join(30)
    assert results == [True] * 4
    assert not waiters


def test_a_condition_that_is_already_true_is_not_waited_for() -> None:
    assert Waiters().sleep_until(lambda: True, None)
    assert Waiters().sleep_until(lambda: True, 0)
    assert Waiters().sleep_until(lambda: True, -1)


def test_a_wait_times_out() -> None:
    waiters, started = Waiters(), time.monotonic()
    assert not waiters.sleep_until(lambda: False, 0.02)
    assert time.monotonic() - started >= 0.02
    assert not waiters.sleep_until(lambda: False, -1)
    assert not waiters


def test_an_infinite_timeout_is_accepted() -> None:
    waiters, happened, results = Waiters(), threading.Event(), []
    thread = threading.Thread(target=lambda: results.append(waiters.sleep_until(happened.is_set, float("inf"))))
    thread.start()
    assert eventually(lambda: len(waiters) == 1)
    happened.set()
    waiters.wake()
    thread.join(30)
    assert results == [True]


def test_a_waiter_whose_condition_raises_is_removed() -> None:
    waiters = Waiters()
    with pytest.raises(ZeroDivisionError):
        waiters.sleep_until(lambda: 1 // 0 == 0, 1)
    assert not waiters
