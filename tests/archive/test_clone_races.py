"""A clone is created while its parent's collector runs: it is refused, or it keeps every object that it reads (A12)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import pytest

import quire
from quire.archive.clones import clone_keys
from quire.cli.main import run
from quire.core.errors import QuireError
from quire.durable.failpoints import armed
from quire.objects.collector import Collector
from quire.objects.open import open_store
from quire.store.cloning import clone
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.test_window import HOUR, WindowedStore, new_base, retired_names, value_of, write


@pytest.fixture
def windowed(tmp_path: Path) -> WindowedStore:
    """A store whose clock starts now: objects in its bucket have the machine's time."""
    windowed = WindowedStore(tmp_path)
    windowed.clock = ManualClock(time.time_ns() // 1_000_000)
    return windowed


def run_minutes(windowed: WindowedStore, store: Store, minutes: int) -> None:
    for _ in range(minutes):
        windowed.clock.advance(60)
        store.maintain()
        store.worker.drain()


def write_and_replace(windowed: WindowedStore, store: Store) -> int:
    """Write a first value, then replace it. Return a moment of the first value, whose chunks are retired and still needed."""
    write(store, 1)
    run_minutes(windowed, store, 10)
    new_base(store)
    moment = windowed.clock.now_ms()
    windowed.clock.advance(HOUR / 2)
    write(store, 2)
    run_minutes(windowed, store, 30)
    assert retired_names(store)
    return moment


def leave_window(windowed: WindowedStore, store: Store) -> None:
    """Let the first value leave the window: the next round deletes what only its moments need."""
    new_base(store)
    windowed.clock.advance(2.5 * HOUR)


def create_clone(windowed: WindowedStore, at_ms: int) -> Path:
    clone(windowed.bucket, windowed.path / "clone", at_ms=at_ms, clock=windowed.clock)
    return windowed.path / "clone"


def value_of_clone(windowed: WindowedStore) -> int:
    return value_of(quire.open(windowed.path / "clone", "r", clock=windowed.clock))


def test_a_clone_that_was_created_after_the_last_round_keeps_its_objects(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        store._parts.window.look(now=True)
        create_clone(windowed, moment)
        leave_window(windowed, store)
        names = retired_names(store)
        assert store._parts.window.look(now=True).trimmed
        assert retired_names(store) == names
    assert value_of_clone(windowed) == 1


@pytest.mark.parametrize("step", ["archive.trim.parts", "archive.trim.logs", "archive.trim.files"])
def test_a_clone_created_during_a_round_is_refused_or_complete(windowed: WindowedStore, step: str) -> None:
    refusals: list[QuireError] = []
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        leave_window(windowed, store)

        def try_to_clone(_name: str) -> None:
            try:
                create_clone(windowed, moment)
            except QuireError as error:
                refusals.append(error)

        with armed(step, try_to_clone):
            assert store._parts.window.look(now=True).deleted
    assert refusals
    with closing(open_store(windowed.bucket)) as bucket, windowed.open() as store:
        assert clone_keys(bucket, store.feed.store_id()) == []


def test_a_clone_that_registers_before_the_log_is_trimmed_is_seen(windowed: WindowedStore) -> None:
    """The collector trims while the clone restores: between its check and the end of its restore."""
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        leave_window(windowed, store)

        def run_round(_name: str) -> None:
            store._parts.window.look(now=True)

        with armed("clone.made", run_round):
            create_clone(windowed, moment)
        store._parts.window.look(now=True)
    assert value_of_clone(windowed) == 1


def test_a_clone_that_is_created_right_before_the_log_is_trimmed_is_seen(
    windowed: WindowedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round has planned what to delete, and has deleted nothing yet."""
    delete_now = Collector.delete_now
    cloned: list[Path] = []

    def clone_first(self: Collector, url: str, keys: Iterable[str]) -> None:
        if not cloned:
            cloned.append(create_clone(windowed, moment))
        delete_now(self, url, keys)

    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        leave_window(windowed, store)
        monkeypatch.setattr(Collector, "delete_now", clone_first)
        assert store._parts.window.look(now=True).trimmed
    assert cloned
    assert value_of_clone(windowed) == 1


def test_a_parent_without_archiving_keeps_what_its_clone_reads(windowed: WindowedStore) -> None:
    with windowed.open() as store:
        write(store, 1)
        new_base(store)
        create_clone(windowed, windowed.clock.now_ms())
    with windowed.open(mode="off") as store:
        write(store, 2)
        run_minutes(windowed, store, 90)
        assert retired_names(store)
    assert value_of_clone(windowed) == 1


def test_a_damaged_registration_keeps_everything_and_is_forgotten_by_name(
    windowed: WindowedStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        create_clone(windowed, moment)
        with closing(open_store(windowed.bucket)) as bucket:
            (key,) = clone_keys(bucket, store.feed.store_id())
            bucket.put(key, b"{")
        leave_window(windowed, store)
        names = retired_names(store)
        store._parts.window.look(now=True)
        assert "archive.clone_damaged" in capsys.readouterr().err
        assert retired_names(store) == names
    command = ["clones", "forget", key.rpartition("/")[2], "--yes", "--store", str(windowed.path / "store")]
    assert run(command) == 0
    assert run(command) != 0
    assert "no such clone" in capsys.readouterr().err
    with windowed.open() as store:
        assert store._parts.window.look(now=True).deleted == len(names)
