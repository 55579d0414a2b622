"""The gate: exclusive access to the map, and entries of visitors that were garbage-collected."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial

import pytest

from quire.core.errors import TimedOut
from quire.manifest.env_gate import MapGate
from tests.manifest.helpers import eventually


class Visitor:
    """A visitor that does nothing."""

    def abandon(self) -> None:
        """There is nothing to end."""


def do_nothing() -> None:
    """The call that is made exclusively."""


def test_an_exclusive_call_waits_for_visitors_and_blocks_new_ones() -> None:
    gate, order, guests = MapGate(), [], (Visitor(), Visitor())
    ticket = gate.enter(guests[0])
    exclusive = threading.Thread(target=gate.exclusive, args=(10, lambda: order.append("alone")))
    exclusive.start()
    assert eventually(lambda: gate._exclusive_wanted)

    def enter() -> None:
        gate.enter(guests[1])
        order.append("entered")

    visitor = threading.Thread(target=enter)
    visitor.start()
    time.sleep(0.02)
    assert order == []
    gate.leave(ticket)
    exclusive.join(60)
    visitor.join(60)
    assert order == ["alone", "entered"]


def test_a_visitor_that_stays_ends_the_wait_and_is_reported() -> None:
    gate, guest = MapGate(), Visitor()
    visitor = threading.Thread(target=gate.enter, args=(guest,), name="long visitor")
    visitor.start()
    visitor.join()
    with pytest.raises(TimedOut) as caught:
        gate.exclusive(0.01, do_nothing)
    assert caught.value.where["readers"] == ["long visitor"]
    assert gate.enter(guest), "visitors can enter again"


def test_a_thread_does_not_wait_for_itself() -> None:
    """Hazard: a thread that closes the manifest while it has a transaction open would wait for that transaction in
    vain."""
    gate, guest = MapGate(), Visitor()
    ticket = gate.enter(guest)
    with pytest.raises(TimedOut):
        gate.exclusive(3600, do_nothing)
    gate.leave(ticket)
    gate.exclusive(0, do_nothing)


def test_two_calls_are_never_exclusive_at_once() -> None:
    """Hazard: the first exclusive call to end opened the gate for everyone while the second still replaced the map."""
    gate, running, counts = MapGate(), [], []

    def call() -> None:
        running.append(1)
        counts.append(len(running))
        time.sleep(0.005)
        running.pop()

    threads = [threading.Thread(target=gate.exclusive, args=(10, call)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [1] * 4


def test_visitors_are_blocked_until_the_last_exclusive_call_has_ended() -> None:
    gate, guest, order = MapGate(), Visitor(), []
    begun, may_end = ({"first": threading.Event(), "second": threading.Event()} for _ in range(2))

    def exclusive_call(name: str) -> None:
        begun[name].set()
        assert may_end[name].wait(60)
        order.append(name)

    def visit() -> None:
        gate.enter(guest)
        order.append("visitor")

    first, second = (
        threading.Thread(target=gate.exclusive, args=(10, partial(exclusive_call, name))) for name in may_end
    )
    first.start()
    assert begun["first"].wait(10)
    second.start()
    assert not begun["second"].wait(0.02), "two calls are exclusive at once"
    may_end["first"].set()
    assert begun["second"].wait(10)
    visitor = threading.Thread(target=visit)
    visitor.start()
    visitor.join(0.02)
    may_end["second"].set()
    for thread in (first, second, visitor):
        thread.join(60)
    assert order == ["first", "second", "visitor"]


def test_a_visiting_thread_can_enter_again_while_an_exclusive_call_waits_for_it() -> None:
    """Hazard: each waited for the other until the wait for growth timed out, and the commit failed."""
    gate, guests, was_exclusive = MapGate(), (Visitor(), Visitor()), threading.Event()
    outer = gate.enter(guests[0])
    thread = threading.Thread(target=gate.exclusive, args=(30, was_exclusive.set))
    thread.start()
    assert eventually(lambda: gate._exclusive_wanted)
    inner = gate.enter(guests[1])
    gate.leave(inner)
    assert not was_exclusive.is_set()
    gate.leave(outer)
    thread.join(30)
    assert was_exclusive.is_set()


def test_a_visitor_that_is_garbage_collected_has_left() -> None:
    """Hazard: a transaction that was dropped instead of closed prevented the map from growing for ever."""
    gate, guest = MapGate(), Visitor()
    gate.enter(guest)
    del guest
    gc.collect()
    gate.exclusive(0, do_nothing)


def test_a_visitor_that_is_garbage_collected_ends_the_wait_of_an_exclusive_call() -> None:
    gate, guests, was_exclusive = MapGate(), [Visitor()], threading.Event()
    gate.enter(guests[0])
    thread = threading.Thread(target=gate.exclusive, args=(30, was_exclusive.set))
    thread.start()
    assert eventually(lambda: gate._exclusive_wanted)
    guests.clear()
    thread.join(30)
    assert was_exclusive.is_set()


def test_leaving_twice_is_harmless() -> None:
    gate, guest = MapGate(), Visitor()
    ticket = gate.enter(guest)
    gate.leave(ticket)
    gate.leave(ticket)
    gate.exclusive(0, do_nothing)


def test_visitors_can_enter_after_an_exclusive_call_failed() -> None:
    gate, guest = MapGate(), Visitor()

    def fail() -> None:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        gate.exclusive(0, fail)
    assert gate.enter(guest)
