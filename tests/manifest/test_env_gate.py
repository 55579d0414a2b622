"""The gate: being alone with the map, and what a visitor that was lost leaves behind: nothing."""

from __future__ import annotations

import gc
import threading
import time
from functools import partial

import pytest

from quire.core.errors import TimedOut
from quire.manifest.env_gate import MapGate
from tests.manifest.helpers import eventually


class Guest:
    """A visitor that does nothing."""

    def abandon(self) -> None:
        """Nothing to be over."""


def nothing() -> None:
    """A call to be made alone."""


def test_being_alone_waits_for_visitors_and_keeps_new_ones_out() -> None:
    gate, order, guests = MapGate(), [], (Guest(), Guest())
    ticket = gate.enter(guests[0])
    alone = threading.Thread(target=gate.exclusive, args=(10, lambda: order.append("alone")))
    alone.start()
    assert eventually(lambda: gate._exclusive_wanted)

    def enter() -> None:
        gate.enter(guests[1])
        order.append("entered")

    entering = threading.Thread(target=enter)
    entering.start()
    time.sleep(0.02)
    assert order == []
    gate.leave(ticket)
    alone.join(60)
    entering.join(60)
    assert order == ["alone", "entered"]


def test_a_visitor_that_stays_ends_the_wait_and_is_named() -> None:
    gate, guest = MapGate(), Guest()
    visiting = threading.Thread(target=gate.enter, args=(guest,), name="the one who stays")
    visiting.start()
    visiting.join()
    with pytest.raises(TimedOut) as caught:
        gate.exclusive(0.01, nothing)
    assert caught.value.where["readers"] == ["the one who stays"]
    assert gate.enter(guest), "visitors get in again"


def test_nobody_waits_for_itself() -> None:
    """Hazard: a thread that closes the manifest with a transaction open would wait for that, for nothing."""
    gate, guest = MapGate(), Guest()
    ticket = gate.enter(guest)
    with pytest.raises(TimedOut):
        gate.exclusive(3600, nothing)
    gate.leave(ticket)
    gate.exclusive(0, nothing)


def test_two_are_never_alone_at_once() -> None:
    """Hazard: the first to be done opened the gate for everyone, while the second still replaced the map."""
    gate, inside, most = MapGate(), [], []

    def call() -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()

    threads = [threading.Thread(target=gate.exclusive, args=(10, call)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 4


def test_visitors_stay_out_until_the_last_of_several_that_want_to_be_alone_is_done() -> None:
    gate, guest, order = MapGate(), Guest(), []
    begun, go = ({"first": threading.Event(), "second": threading.Event()} for _ in range(2))

    def alone(name: str) -> None:
        begun[name].set()
        assert go[name].wait(60)
        order.append(name)

    def visit() -> None:
        gate.enter(guest)
        order.append("visitor")

    first, second = (threading.Thread(target=gate.exclusive, args=(10, partial(alone, name))) for name in go)
    first.start()
    assert begun["first"].wait(10)
    second.start()
    assert not begun["second"].wait(0.02), "two are alone"
    go["first"].set()
    assert begun["second"].wait(10)
    visitor = threading.Thread(target=visit)
    visitor.start()
    visitor.join(0.02)
    go["second"].set()
    for thread in (first, second, visitor):
        thread.join(60)
    assert order == ["first", "second", "visitor"]


def test_a_thread_that_is_inside_gets_in_again_while_somebody_waits_for_it() -> None:
    """Hazard: each waited for the other until the wait for growth ended, and the commit failed."""
    gate, guests, alone = MapGate(), (Guest(), Guest()), threading.Event()
    outer = gate.enter(guests[0])
    waiting = threading.Thread(target=gate.exclusive, args=(30, alone.set))
    waiting.start()
    assert eventually(lambda: gate._exclusive_wanted)
    inner = gate.enter(guests[1])
    gate.leave(inner)
    assert not alone.is_set()
    gate.leave(outer)
    waiting.join(30)
    assert alone.is_set()


def test_a_visitor_that_was_lost_has_left() -> None:
    """Hazard: a transaction that was dropped instead of closed kept the map from growing, for ever."""
    gate, guest = MapGate(), Guest()
    gate.enter(guest)
    del guest
    gc.collect()
    gate.exclusive(0, nothing)


def test_one_that_is_lost_while_somebody_waits_is_noticed() -> None:
    gate, guests, alone = MapGate(), [Guest()], threading.Event()
    gate.enter(guests[0])
    waiting = threading.Thread(target=gate.exclusive, args=(30, alone.set))
    waiting.start()
    assert eventually(lambda: gate._exclusive_wanted)
    guests.clear()
    waiting.join(30)
    assert alone.is_set()


def test_leaving_twice_does_no_harm() -> None:
    gate, guest = MapGate(), Guest()
    ticket = gate.enter(guest)
    gate.leave(ticket)
    gate.leave(ticket)
    gate.exclusive(0, nothing)


def test_a_call_that_fails_lets_visitors_in_again() -> None:
    gate, guest = MapGate(), Guest()

    def fail() -> None:
        raise OSError("no memory")

    with pytest.raises(OSError, match="no memory"):
        gate.exclusive(0, fail)
    assert gate.enter(guest)
