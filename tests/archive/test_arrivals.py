"""Calls that wait for the bucket: each returns when its own changes have arrived and can be restored, not before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.archive.arrivals import Arrivals
from quire.core.errors import NotArchived

WAIT = 30.0


class Call:
    """A thread that waits for an ordinal."""

    def __init__(self, arrivals: Arrivals, end: int) -> None:
        self.registered = threading.Event()
        self.outcome: list[bool | BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(arrivals, end))
        self._thread.start()
        assert self.registered.wait(WAIT)

    def _run(self, arrivals: Arrivals, end: int) -> None:
        try:
            self.outcome.append(arrivals.wait(end, WAIT, self.registered.set))
        except NotArchived as error:
            self.outcome.append(error)

    def ended(self) -> bool | BaseException:
        self._thread.join(WAIT)
        return self.outcome[0]


@contextmanager
def ending(arrivals: Arrivals) -> Iterator[None]:
    """Let every call return at the end, so that a failed assertion leaves no thread behind."""
    try:
        yield
    finally:
        arrivals.failure = NotArchived("the test is over")
        arrivals.wake()


def test_a_call_returns_when_its_own_ordinal_has_arrived() -> None:
    arrivals = Arrivals()
    with ending(arrivals):
        first, second = Call(arrivals, 5), Call(arrivals, 6)
        arrivals.advance(5, is_restorable=True)
        arrivals.wake()
        assert first.ended() is True
        assert not second.outcome
        assert arrivals.has_waiters(), "the second call still waits"
        arrivals.advance(6, is_restorable=True)
        arrivals.wake()
        assert second.ended() is True
    assert not arrivals.has_waiters()


def test_changes_that_cannot_be_restored_yet_have_not_arrived() -> None:
    arrivals = Arrivals()
    with ending(arrivals):
        call = Call(arrivals, 5)
        arrivals.advance(7, is_restorable=False)
        arrivals.wake()
        assert arrivals.has_waiters(), "an object without a base completes no call"
        assert not call.outcome
        arrivals.advance(8, is_restorable=True)
        arrivals.wake()
        assert call.ended() is True


def test_an_ordinal_that_arrives_before_the_first_check_is_not_waited_for() -> None:
    arrivals = Arrivals()
    assert arrivals.wait(3, WAIT, lambda: arrivals.advance(3, is_restorable=True))


def test_a_failure_ends_every_call_even_if_its_ordinal_arrived() -> None:
    arrivals = Arrivals()
    with ending(arrivals):
        calls = [Call(arrivals, end) for end in (1, 9)]
    assert [type(call.ended()) for call in calls] == [NotArchived, NotArchived]
    arrivals.advance(9, is_restorable=True)
    with pytest.raises(NotArchived, match="over"):
        arrivals.wait(1, WAIT, lambda: None)


def test_a_timeout_of_the_bucket_is_reported() -> None:
    arrivals = Arrivals()
    assert arrivals.wait(1, 0.01, lambda: None) is False
    assert not arrivals.has_waiters()
