"""Which calls wait for a barrier, and when."""

from __future__ import annotations

import threading

import pytest

from quire.core.barrier import Barrier, changes, marked, may_change


class Part:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    @changes
    def put(self, *, sync: bool = True) -> int:
        with self.lock:
            return 1

    @changes
    def put_twice(self) -> int:
        with self.lock:
            pass
        return self.put() + self.put()

    @may_change
    def open(self, create: bool = False) -> int:
        with self.lock:
            pass
        return self.put() if create else 0

    @changes
    def fail(self) -> None:
        self.put()
        raise KeyError

    def read(self) -> int:
        return 0


@pytest.fixture
def waits() -> list[bool]:
    return []


@pytest.fixture
def part(waits: list[bool]) -> Part:
    part = Part()
    Barrier(lambda: waits.append(part.lock.locked())).cover(part)
    return part


def test_methods_that_are_not_covered_are_not_wrapped() -> None:
    """There is no overhead if no call waits."""
    assert not vars(Part()).keys() & {"put", "open"}
    assert Part.put.__name__ == "put"
    assert dict(marked(Part)) == {"put": True, "put_twice": True, "open": False, "fail": True}


def test_the_outermost_call_waits_once_without_holding_a_lock(part: Part, waits: list[bool]) -> None:
    assert part.put_twice() == 2
    assert waits == [False]


def test_reads_and_calls_without_sync_do_not_wait(part: Part, waits: list[bool]) -> None:
    part.read()
    part.put(sync=False)
    part.open()
    assert not waits
    part.open(create=True)
    assert len(waits) == 1


def test_a_call_that_raises_does_not_wait(part: Part, waits: list[bool]) -> None:
    with pytest.raises(KeyError):
        part.fail()
    part.open()
    assert not waits


def test_threads_of_quire_do_not_wait(part: Part, waits: list[bool]) -> None:
    for name, expected in (("quire-upkeep", 0), ("caller", 1)):
        thread = threading.Thread(target=part.put, name=name)
        thread.start()
        thread.join()
        assert len(waits) == expected


def test_a_note_is_settled_only_outside_of_calls(waits: list[bool]) -> None:
    barrier = Barrier(lambda: waits.append(True))
    with barrier.call():
        barrier.note()
        barrier.settle()
        assert not waits
    assert len(waits) == 1
    barrier.settle()
    assert len(waits) == 1
