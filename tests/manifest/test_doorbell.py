"""Doorbells: no ring is lost, none is heard by the wrong process."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest

from quire.manifest.guard import Doorbell, thread_doorbell


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


def test_a_signal_that_somebody_handles_does_not_end_the_sleep() -> None:
    """Timers and SIGCHLD are ordinary in web workers: a commit that is awaited meanwhile must not look like one that failed."""
    bell, alarm = Doorbell(), threading.Event()
    before = signal.signal(signal.SIGALRM, lambda *_: alarm.set())

    def ring() -> None:
        alarm.wait(60)
        bell.ring()

    ringer = threading.Thread(target=ring)
    ringer.start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        assert bell.sleep()
        assert alarm.is_set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        ringer.join()


def test_every_thread_has_its_own() -> None:
    others: list[Doorbell | None] = []
    thread = threading.Thread(target=lambda: others.append(thread_doorbell()))
    thread.start()
    thread.join()
    assert thread_doorbell() is thread_doorbell()
    assert others[0] is not thread_doorbell()


def test_a_child_does_not_swallow_the_rings_of_its_parent() -> None:
    """Hazard: after fork() both processes would read one counter."""
    bell = thread_doorbell()
    assert bell is not None
    child = os.fork()
    if child == 0:
        own = thread_doorbell()
        os._exit(0 if own is not None and own is not bell and not own.sleep(0) else 1)
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
