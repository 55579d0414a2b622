"""Which open databases are closed first when there are too many."""

from __future__ import annotations

import pytest

from quire.core.open_databases import OpenSet
from quire.testing.clock import ManualClock


class _Core:
    pass


def _open_set(open_max: int, clock: ManualClock) -> OpenSet[_Core]:
    return OpenSet(open_max=open_max, idle_seconds=60.0, clock=clock)


def _use(opened: OpenSet[_Core], clock: ManualClock, number: int) -> None:
    clock.advance(1.0)
    if opened.get(number) is None:
        opened.add(number, _Core())


def test_the_least_recently_used_are_closed_first_even_if_some_were_used_since_the_last_scan() -> None:
    clock = ManualClock()
    opened = _open_set(4, clock)
    for number in range(5):
        _use(opened, clock, number)
    assert opened.surplus() == [0]
    opened.pop(0)
    _use(opened, clock, 1)
    in_use = opened.get(2)
    _use(opened, clock, 5)
    assert opened.surplus() == [3], "1 was used since, 2 is in use"
    opened.pop(3)
    opened.pop(4)
    for number in (6, 7):
        _use(opened, clock, number)
    assert opened.surplus() == [1]
    del in_use


def test_a_database_that_could_not_be_closed_is_returned_again_after_the_others() -> None:
    clock = ManualClock()
    opened = _open_set(1, clock)
    for number in range(3):
        _use(opened, clock, number)
    assert [opened.surplus() for _ in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_opening_one_database_does_not_scan_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: beyond `open_max`, sorting all of them under the engine's lock took longer than opening one."""
    clock, scans = ManualClock(), 0
    opened = _open_set(100, clock)
    unheld = opened._unheld

    def count_and_scan() -> list[tuple[float, int]]:
        nonlocal scans
        scans += 1
        return unheld()

    monkeypatch.setattr(opened, "_unheld", count_and_scan)
    for number in range(1_100):
        _use(opened, clock, number)
        for surplus in opened.surplus():
            opened.pop(surplus)
    assert len(opened) == 100
    assert scans <= 11
