"""A takeover ends the log before it, gives up nothing in silence, and a deposed owner acknowledges nothing (A2, A10)."""

from __future__ import annotations

import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest

import quire
from quire.archive.format import Kind, Position
from quire.archive.sealing import seal
from quire.core.errors import ArchiveAhead, QuireError, StoreFenced
from quire.durable.failpoints import armed
from quire.objects import open_store
from quire.store import archiving, restoring
from quire.testing.clock import ManualClock
from tests.archive.world import WAIT, Gate, World, contents, fill, kill, quiet, read, world


def write_too_late(w: World) -> None:
    """On this disk alone, or not at all: something of the background may have met the seal before."""
    w.store.kv("pairs").put(b"too", b"late")
    w.archiver.wait(WAIT)


def test_a_deposed_owner_is_fenced_before_it_acknowledges_anything(tmp_path: Path) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    expected = contents(w.store)
    taken = w.restore("taken", takeover=True)
    with pytest.raises(StoreFenced):
        write_too_late(w)
    with pytest.raises(QuireError):
        w.store.create("other", "lsm")
    with suppress(QuireError):
        w.store.close()
    with w.open(taken) as store:
        assert contents(store) == expected
    with pytest.raises(StoreFenced):
        w.open()


def test_a_seal_alone_is_remembered_by_the_directory(tmp_path: Path) -> None:
    """A successor seals before it creates its owner object: a look at the bucket would not find it yet."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    with closing(open_store(str(w.bucket))) as bucket:
        seal(bucket, w.store_id, 1, 2, 0)
    with pytest.raises(StoreFenced):
        write_too_late(w)
    with suppress(QuireError):
        w.store.close()
    with pytest.raises(StoreFenced):
        w.open()


def test_an_owner_that_slept_through_a_takeover_is_fenced_when_it_wakes(tmp_path: Path) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    gate = Gate(w.archiver)
    gate.held.clear()  # suspended in the middle of an upload
    gate.is_waiting.clear()
    w.store.kv("pairs").put(b"half", b"way")
    assert gate.is_waiting.wait(WAIT)
    taken = w.restore("taken", takeover=True)
    with w.open(taken) as store:
        fill(store, 100)
        expected = contents(store)
    gate.held.set()
    with pytest.raises(StoreFenced):
        w.archiver.wait(WAIT)
    with suppress(QuireError):
        w.store.close()
    assert b"half" not in expected["pairs"]
    assert w.look() == expected


def test_a_restored_directory_that_another_one_overtook_is_refused(tmp_path: Path) -> None:
    """Only the log that it was restored from was looked at: the changes of an owner after that were given up without a word."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.close()
    one, other = w.restore("one"), w.restore("other")
    with w.open(one, takeover=True) as store:
        fill(store, 100)
        expected = contents(store)
    with pytest.raises(ArchiveAhead):
        w.open(other, takeover=True)
    assert w.look() == expected
    with w.open(other, takeover=True, discard=True) as store:
        fill(store, 200)
        expected = contents(store)
    assert w.look("after") == expected
    assert 100 not in expected["shop"]


def test_an_old_copy_of_the_directory_is_refused(tmp_path: Path) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.close()
    shutil.copytree(w.root, tmp_path / "copy")
    w.store = w.open()
    fill(w.store, 100)
    w.close()
    with pytest.raises(ArchiveAhead):
        w.open(tmp_path / "copy", takeover=True)
    with w.open(tmp_path / "copy", takeover=True, discard=True) as store:
        fill(store, 200)
        assert store.archive is not None
        store.archive.wait(WAIT)
        expected = contents(store)
    assert w.look() == expected


def test_before_the_base_of_a_takeover_counts_the_former_owner_is_restorable(tmp_path: Path) -> None:
    """The first object of an epoch that was begun in the owner's own directory named no parent: nothing could be restored."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.close()
    expected = contents_of(w)
    with armed("archive.base.begun", "raise:EIO"):
        store = w.open(takeover=True)
        fill(store, 100)
        end = store.archive
        assert end is not None
        while not w.headers(2):
            pass
        kill(store)
    assert w.headers(2)[0].parent.epoch == 1
    assert w.look() == expected


def contents_of(w: World) -> dict[str, object]:
    with quire.open(w.root, settings=quiet()) as store:
        return contents(store)


def test_a_second_takeover_of_a_restored_directory_comes_after_the_first(tmp_path: Path) -> None:
    """restored.json was believed for ever: the second epoch named the log that the first one came from as its parent."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    earlier = w.restore("earlier")
    fill(w.store, 100)
    w.close()
    with w.open(earlier, takeover=True, discard=True) as store:
        fill(store, 200)
    with w.open(earlier, takeover=True) as store:
        fill(store, 300)
        expected = contents(store)
    assert [w.headers(epoch)[0].parent.epoch for epoch in w.epochs()] == [0, 1, 2]
    assert w.look() == expected


def test_a_takeover_that_died_before_its_seal_is_completed_by_the_next_opening(tmp_path: Path) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    gate = Gate(w.archiver)
    gate.held.clear()  # what the background still changes is not archived before the takeover
    taken = w.restore("taken")
    with armed("archive.seal.before", "raise:EIO"), pytest.raises(OSError, match="seal"):
        w.open(taken, takeover=True)
    with w.open(taken) as store:  # it is the owner: its claim was made
        fill(store, 100)
        assert store.archive is not None
        store.archive.wait(WAIT)
        expected = contents(store)
    assert w.headers(1)[-1].kind is Kind.SEAL
    gate.held.set()
    with pytest.raises(StoreFenced):
        write_too_late(w)
    with suppress(QuireError):
        w.store.close()
    assert w.look() == expected


def test_two_restores_into_the_past_are_branches(tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    w = World(tmp_path, clock=clock)
    moments, states = [], []
    for start in (0, 100, 200):
        fill(w.store, start)
        w.archived()
        moments.append(clock.now_ms())
        states.append(contents(w.store))
        clock.advance(10)
    w.close()
    first, second = w.restore("first", at_ms=moments[0]), w.restore("second", at_ms=moments[1])
    for path, start in ((first, 1_000), (second, 2_000)):
        clock.advance(10)
        with w.open(path, takeover=True, discard=True) as store:
            fill(store, start)
            assert store.archive is not None
            store.archive.wait(WAIT)
            moments.append(clock.now_ms())
            states.append(contents(store))
    assert w.look("newest") == states[-1]
    assert w.look("branch", at_ms=moments[4]) == states[4]
    # the second branch comes after the second state: neither the third nor the first branch is a past of it
    assert w.look("before", at_ms=moments[3]) == states[1]
    assert sorted(states[4]["shop"]) == [*range(20), *range(100, 120), *range(2_000, 2_020)]


def test_a_takeover_behind_a_broken_chain_gives_the_last_state_that_makes_sense(tmp_path: Path) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    expected = contents(w.store)
    kill(w.store)
    with armed("archive.base.begun", "raise:EIO"):
        w.store = w.open()
        fill(w.store, 100)
        number = w.headers()[-1].position.number
        while w.headers()[-1].position.number < number + 2:
            w.store.kv("pairs").put(b"more", b"of it")
        kill(w.store)
    taken = w.restore("taken", takeover=True)
    with w.open(taken) as store:
        assert contents(store) == expected
        fill(store, 500)
        expected = contents(store)
    assert w.look() == expected


def test_a_restore_beside_a_live_owner_disturbs_nothing(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0)
        w.archived()
        before = {path for path in w.bucket.rglob("*") if "/owner/" in str(path)}
        restored = w.restore()
        with quire.open(restored, "r") as store:
            assert len(store.databases()) == 3
        with pytest.raises(StoreFenced):
            w.open(restored)
        assert {path for path in w.bucket.rglob("*") if "/owner/" in str(path)} == before
        fill(w.store, 100)
        w.archived()
        expected = contents(w.store)
    assert read(w.restore("again")) == expected


def test_without_a_seal_a_deposed_owner_would_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would see if the seal were skipped: the owner has looked at its session less than a minute ago."""
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    gate = Gate(w.archiver)
    gate.held.clear()  # what the background still changes is not archived before the takeover
    last = w.headers()[-1]

    def skipped(*_: object, **__: object) -> tuple[Position, bytes]:
        return last.position, last.parent_digest

    for module in (archiving, restoring):
        monkeypatch.setattr(module, "seal", skipped)
    w.restore("taken", takeover=True)
    gate.held.set()
    w.store.kv("pairs").put(b"acknowledged", b"and lost")
    w.archived()
    w.close()
