"""Which open databases are closed first when there are too many."""

from __future__ import annotations

import pytest

from quire.core.open_databases import OpenSet
from quire.testing.clock import ManualClock


class _Core:
    pass


def _opened(open_max: int, clock: ManualClock) -> OpenSet[_Core]:
    return OpenSet(open_max=open_max, idle_seconds=60.0, clock=clock)


def _use(opened: OpenSet[_Core], clock: ManualClock, number: int) -> None:
    clock.advance(1.0)
    if opened.get(number) is None:
        opened.add(number, _Core())


def test_the_longest_unused_go_first_whatever_was_used_since_they_were_looked_at() -> None:
    clock = ManualClock()
    opened = _opened(4, clock)
    for number in range(5):
        _use(opened, clock, number)
    assert opened.surplus() == [0]
    opened.pop(0)
    _use(opened, clock, 1)
    held = opened.get(2)
    _use(opened, clock, 5)
    assert opened.surplus() == [3], "1 was used since, 2 is held"
    opened.pop(3)
    opened.pop(4)
    for number in (6, 7):
        _use(opened, clock, number)
    assert opened.surplus() == [1]
    del held


def test_one_that_could_not_be_closed_is_named_again_after_the_others() -> None:
    clock = ManualClock()
    opened = _opened(1, clock)
    for number in range(3):
        _use(opened, clock, number)
    assert [opened.surplus() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_all_are_not_looked_at_for_each_one_that_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond `open_max` a sort of all of them, under the engine's lock, took longer than opening one."""
    clock, looks = ManualClock(), 0
    opened = _opened(100, clock)
    unheld = opened._unheld

    def counted() -> list[tuple[float, int]]:
        nonlocal looks
        looks += 1
        return unheld()

    monkeypatch.setattr(opened, "_unheld", counted)
    for number in range(1_100):
        _use(opened, clock, number)
        for surplus in opened.surplus():
            opened.pop(surplus)
    assert len(opened) == 100
    assert looks <= 11
