"""A restored directory or a standby whose moment has left the window cannot become the owner, and deposes nobody (A8, A10)."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.archive.archiver import Archiver
from quire.archive.clones import TAKEOVER_SECONDS, clone_keys
from quire.archive.window import require_in_window
from quire.core.errors import ArchiveAhead, InvalidInput, StoreFenced, Unavailable
from quire.objects.open import open_store
from quire.store import archiving
from quire.store.restoring import restore
from quire.store.standby import Standby
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.archived_store import ArchivedStore, archived_store, contents, fill
from tests.archive.test_clone_races import leave_window, write_and_replace
from tests.archive.test_window import WindowedStore, retired_names, value_of


@pytest.fixture
def windowed(tmp_path: Path) -> WindowedStore:
    """A store whose clock starts now: objects in its bucket have the machine's time."""
    windowed = WindowedStore(tmp_path)
    windowed.clock = ManualClock(time.time_ns() // 1_000_000)
    return windowed


def take_over(windowed: WindowedStore, path: Path) -> Store:
    return quire.open(path, takeover=True, discard=True, clock=windowed.clock)


def test_a_takeover_is_refused_and_the_owner_continues(windowed: WindowedStore) -> None:
    then = windowed.path / "then"
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        restore(windowed.bucket, then, at_ms=moment, clock=windowed.clock)
        leave_window(windowed, store)
        assert store._parts.window.look(now=True).deleted
        with pytest.raises(InvalidInput, match="no longer in the archive's window"):
            take_over(windowed, then)
        assert clone_keys(store.objects, store.feed.store_id()) == []
        store.kv("ticks").put(b"key", b"value")
        assert store.archive is not None
        store.archive.wait(10)
        assert not store.archive.status().fenced


def test_a_takeover_inside_the_window_continues_there(windowed: WindowedStore) -> None:
    then = windowed.path / "then"
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        restore(windowed.bucket, then, at_ms=moment, clock=windowed.clock)
    with take_over(windowed, then) as store:
        assert clone_keys(store.objects, store.feed.store_id()) == []
    assert value_of(quire.open(then, "r", clock=windowed.clock)) == 1


def test_the_owner_keeps_the_moment_while_it_is_taken_over(
    windowed: WindowedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's round runs between the check and the claim."""
    then = windowed.path / "then"
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        restore(windowed.bucket, then, at_ms=moment, clock=windowed.clock)
        leave_window(windowed, store)
        names = retired_names(store)

        def run_round(_: Store) -> None:
            assert store._parts.window.look(now=True).trimmed
            assert retired_names(store) == names
            raise InterruptedError

        monkeypatch.setattr("quire.store.archiving._claim", run_round)
        with pytest.raises(InterruptedError):
            take_over(windowed, then)
    with closing(open_store(windowed.bucket)) as bucket:
        assert set(names) <= {info.key for page in bucket.list_pages("") for info in page}
    assert value_of(quire.open(then, "r", clock=windowed.clock)) == 1


def test_what_is_kept_for_a_takeover_that_died_is_deleted_when_it_is_given_up(
    windowed: WindowedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the registration of a killed takeover kept objects forever, as that of a clone does."""
    then = windowed.path / "then"
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        restore(windowed.bucket, then, at_ms=moment, clock=windowed.clock)
        leave_window(windowed, store)
        names = retired_names(store)
        with monkeypatch.context() as killed:
            killed.setattr("quire.archive.clones.release", lambda *_: None)
            killed.setattr("quire.store.archiving._claim", fail)
            with pytest.raises(InterruptedError):
                take_over(windowed, then)
        registered = clone_keys(store.objects, store.feed.store_id())
        assert len(registered) == 1
        window = store._parts.window
        assert not window.look(now=True).deleted
        windowed.clock.advance(TAKEOVER_SECONDS - 1)
        assert not window.look(now=True).deleted
        assert clone_keys(store.objects, store.feed.store_id()) == registered
        windowed.clock.advance(1)
        assert window.look(now=True).deleted == len(names)
        assert clone_keys(store.objects, store.feed.store_id()) == []


def test_a_takeover_that_was_given_up_meanwhile_claims_nothing(
    windowed: WindowedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = windowed.path / "then"
    with windowed.open() as store:
        moment = write_and_replace(windowed, store)
        restore(windowed.bucket, then, at_ms=moment, clock=windowed.clock)

        def check_slowly(*args: Any) -> None:
            require_in_window(*args)
            windowed.clock.advance(TAKEOVER_SECONDS / 2)

        monkeypatch.setattr(archiving, "require_in_window", check_slowly)
        with pytest.raises(Unavailable, match="took too long"):
            take_over(windowed, then)
        assert clone_keys(store.objects, store.feed.store_id()) == []
        store.kv("ticks", create=True).put(b"key", b"value")
        assert store.archive is not None
        store.archive.wait(10)


def fail(_: Store) -> None:
    raise InterruptedError


def standby_behind_a_break(archived: ArchivedStore, monkeypatch: pytest.MonkeyPatch) -> Standby:
    """A standby that waits for a base which never comes, while the owner puts log objects."""
    fill(archived.store, 0)
    archived.wait_archived()
    standby = Standby(str(archived.bucket), archived.home / "standby")
    standby.poll()
    monkeypatch.setattr(Archiver, "_begin_base_if_due", lambda _: None)
    monkeypatch.setattr(Archiver, "_end_with_a_base", lambda _: None)
    with archived.archiver._cutting:
        archived.archiver._break_chain("backlog")
    before = len(archived.headers())
    for number in range(1, 4):
        fill(archived.store, 1_000 * number, 3)
        while len(archived.headers()) < before + number:
            time.sleep(0.01)
    standby.poll()
    assert standby.status.phase == "waiting for a base"
    return standby


def test_a_standby_gives_up_what_it_cannot_apply_only_if_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived = ArchivedStore(tmp_path)
    with standby_behind_a_break(archived, monkeypatch) as standby:
        reached = standby.status.position
        with pytest.raises(ArchiveAhead, match="log objects that this standby cannot apply"):
            standby.promote()
        assert archived.epochs() == [1]
        promoted = standby.promote(discard=True)
    with suppress(StoreFenced):
        archived.close()
    assert promoted.position == reached
    assert promoted.newest == archived.headers()[-2].position  # the last object is the seal
    assert promoted.dropped == promoted.newest.number - reached.number > 0
    with archived.open(tmp_path / "standby") as store:
        assert contents(store)


def test_a_standby_whose_moment_has_left_the_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with archived_store(tmp_path) as archived, standby_behind_a_break(archived, monkeypatch) as standby:
        for position in [header.position for header in archived.headers()]:
            if position <= standby.status.position:
                archived.log_path(position).unlink()
        with pytest.raises(InvalidInput, match="no longer in the archive's window"):
            standby.promote(discard=True)
        assert archived.epochs() == [1]
