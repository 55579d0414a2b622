"""`ThreadWakeup`: no wake-up is lost, and none ends the sleep of another process."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest

from quire.manifest.guard import ThreadWakeup, return_wakeup, take_wakeup


def test_a_wake_before_the_sleep_ends_it() -> None:
    wakeup = ThreadWakeup()
    wakeup.wake()
    wakeup.wake()
    assert wakeup.sleep(0)
    assert not wakeup.sleep(0), "wake-ups are merged, not queued"


def test_a_sleeper_wakes_when_a_thread_wakes_it() -> None:
    wakeup, woken = ThreadWakeup(), threading.Event()

    def sleep() -> None:
        wakeup.sleep()
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    assert not woken.wait(0.02)
    wakeup.wake()
    assert woken.wait(60)
    sleeper.join()


def test_a_timeout_ends_the_sleep() -> None:
    started = time.monotonic()
    assert not ThreadWakeup().sleep(0.02)
    assert time.monotonic() - started >= 0.02
    assert not ThreadWakeup().sleep(-1), "a deadline in the past does not sleep"


def test_a_handled_signal_does_not_end_the_sleep() -> None:
    """Timers and SIGCHLD are common in web workers: they must not make an awaited commit look like a failed one."""
    wakeup, alarm = ThreadWakeup(), threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: alarm.set())

    def wake() -> None:
        alarm.wait(60)
        wakeup.wake()

    waker = threading.Thread(target=wake)
    waker.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert wakeup.sleep()
        assert alarm.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        waker.join()


def test_every_thread_has_its_own_wakeup() -> None:
    wakeup = take_wakeup()
    return_wakeup(wakeup)
    others: list[ThreadWakeup | None] = []
    thread = threading.Thread(target=lambda: others.append(take_wakeup()))
    thread.start()
    thread.join()
    assert take_wakeup() is wakeup
    assert others[0] is not wakeup


def test_a_wakeup_in_use_is_not_used_by_a_second_wait() -> None:
    first = take_wakeup()
    assert take_wakeup() is not first


def test_a_forked_child_does_not_consume_the_wakeups_of_its_parent() -> None:
    """Hazard: after fork() both processes would read one counter."""
    wakeup = take_wakeup()
    assert wakeup is not None
    return_wakeup(wakeup)
    child = os.fork()
    if child == 0:
        own = take_wakeup()
        os._exit(0 if own is not None and own is not wakeup and not own.sleep(0) else 1)
    wakeup.wake()
    assert os.waitpid(child, 0)[1] == 0
    assert wakeup.sleep(0)


def test_a_wakeup_that_cannot_be_created_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: its finaliser closed a descriptor that it never had."""

    def fail(*_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", fail)
        with pytest.raises(OSError, match="open files"):
            ThreadWakeup()
    assert ThreadWakeup().sleep(0) is False
