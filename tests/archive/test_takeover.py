"""A takeover ends the previous log, discards nothing silently, and a deposed owner acknowledges nothing (A2, A10)."""

from __future__ import annotations

import shutil
import threading
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
from tests.archive.archived_store import (
    WAIT,
    ArchivedStore,
    Gate,
    archived_store,
    contents,
    fill,
    kill,
    quiet,
    read,
    until,
)


def write_too_late(archived: ArchivedStore) -> None:
    """The write stays on this disk or fails: background work may have met the seal before."""
    archived.store.kv("pairs").put(b"too", b"late")
    archived.archiver.wait(WAIT)


def test_a_deposed_owner_is_fenced_before_it_acknowledges_anything(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    expected = contents(archived.store)
    successor = archived.restore("taken", takeover=True)
    with pytest.raises(StoreFenced):
        write_too_late(archived)
    with pytest.raises(QuireError):
        archived.store.create("other", "lsm")
    with suppress(QuireError):
        archived.store.close()
    with archived.open(successor) as store:
        assert contents(store) == expected
    with pytest.raises(StoreFenced):
        archived.open()


def test_a_seal_alone_is_remembered_by_the_directory(tmp_path: Path) -> None:
    """A successor seals before it creates its owner object: the bucket has no owner object to find yet."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    with closing(open_store(str(archived.bucket))) as bucket:
        seal(bucket, archived.store_id, 1, 2, 0)
    with pytest.raises(StoreFenced):
        write_too_late(archived)
    with suppress(QuireError):
        archived.store.close()
    with pytest.raises(StoreFenced):
        archived.open()


def test_an_owner_suspended_during_a_takeover_is_fenced_when_it_resumes(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    gate = Gate(archived.archiver)
    gate.may_put.clear()  # suspended in the middle of an upload
    gate.is_waiting.clear()
    archived.store.kv("pairs").put(b"half", b"way")
    assert gate.is_waiting.wait(WAIT)
    successor = archived.restore("taken", takeover=True)
    with archived.open(successor) as store:
        fill(store, 100)
        expected = contents(store)
    gate.may_put.set()
    with pytest.raises(StoreFenced):
        archived.archiver.wait(WAIT)
    with suppress(QuireError):
        archived.store.close()
    assert b"half" not in expected["pairs"]
    assert archived.restored_contents() == expected


def test_a_restored_directory_overtaken_by_another_is_refused(tmp_path: Path) -> None:
    """Only the log it was restored from was checked: changes of a later owner were discarded silently."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    first, second = archived.restore("one"), archived.restore("other")
    with archived.open(first, takeover=True) as store:
        fill(store, 100)
        expected = contents(store)
    with pytest.raises(ArchiveAhead):
        archived.open(second, takeover=True)
    assert archived.restored_contents() == expected
    with archived.open(second, takeover=True, discard=True) as store:
        fill(store, 200)
        expected = contents(store)
    assert archived.restored_contents("after") == expected
    assert 100 not in expected["shop"]


def test_an_old_copy_of_the_directory_is_refused(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    shutil.copytree(archived.root, tmp_path / "copy")
    archived.store = archived.open()
    fill(archived.store, 100)
    archived.close()
    with pytest.raises(ArchiveAhead):
        archived.open(tmp_path / "copy", takeover=True)
    with archived.open(tmp_path / "copy", takeover=True, discard=True) as store:
        fill(store, 200)
        assert store.archive is not None
        store.archive.wait(WAIT)
        expected = contents(store)
    assert archived.restored_contents() == expected


@pytest.mark.parametrize("then", ["the owner continues", "the owner takes over", "nothing"])
def test_a_takeover_that_nobody_could_know_of_decides_about_nothing_later(tmp_path: Path, then: str) -> None:
    """Hazard: the takeover of a copy had recorded its claim, and could not put it. The owner went on, and the next attempt gave
    up what it had written, without being told to."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    copy = tmp_path / "copy"
    shutil.copytree(archived.root, copy)
    with armed("objects.ownership.recorded", "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
        archived.open(copy, takeover=True)
    if then == "nothing":
        archived.open(copy, takeover=True).close()
        return
    with archived.open(takeover=then == "the owner takes over") as owner:
        fill(owner, 20)
        assert owner.archive is not None
        owner.archive.wait(WAIT)
        expected = contents(owner)
        with pytest.raises(ArchiveAhead):
            archived.open(copy, takeover=True)
    assert archived.restored_contents() == expected
    archived.open(copy, takeover=True, discard=True).close()


def test_before_the_base_of_a_takeover_counts_the_previous_owner_is_restorable(tmp_path: Path) -> None:
    """The first object of an epoch that began in the owner's own directory had no parent: nothing could be restored."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    expected = contents_of(archived)
    with armed("archive.base.begun", "raise:EIO"):
        store = archived.open(takeover=True)
        fill(store, 100)
        archive = store.archive
        assert archive is not None
        until(lambda: archived.headers(2))
        kill(store)
    assert archived.headers(2)[0].parent.epoch == 1
    assert archived.restored_contents() == expected


def contents_of(archived: ArchivedStore) -> dict[str, object]:
    with quire.open(archived.root, settings=quiet()) as store:
        return contents(store)


def test_a_second_takeover_of_a_restored_directory_comes_after_the_first(tmp_path: Path) -> None:
    """restored.json was trusted forever: the second epoch had the log that the first one came from as its parent."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    earlier = archived.restore("earlier")
    fill(archived.store, 100)
    archived.close()
    with archived.open(earlier, takeover=True, discard=True) as store:
        fill(store, 200)
    with archived.open(earlier, takeover=True) as store:
        fill(store, 300)
        expected = contents(store)
    assert [archived.headers(epoch)[0].parent.epoch for epoch in archived.epochs()] == [0, 1, 2]
    assert archived.restored_contents() == expected


def test_a_takeover_interrupted_before_its_seal_is_completed_by_the_next_opening(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    gate = Gate(archived.archiver)
    gate.may_put.clear()  # later background changes are not archived before the takeover
    successor = archived.restore("taken")
    with armed("archive.seal.before", "raise:EIO"), pytest.raises(OSError, match="seal"):
        archived.open(successor, takeover=True)
    with archived.open(successor) as store:  # it is the owner: its claim was recorded
        fill(store, 100)
        assert store.archive is not None
        store.archive.wait(WAIT)
        expected = contents(store)
    assert archived.headers(1)[-1].kind is Kind.SEAL
    gate.may_put.set()
    with pytest.raises(StoreFenced):
        write_too_late(archived)
    with suppress(QuireError):
        archived.store.close()
    assert archived.restored_contents() == expected


def test_two_restores_into_the_past_are_branches(tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    archived = ArchivedStore(tmp_path, clock=clock)
    moments, states = [], []
    for start in (0, 100, 200):
        fill(archived.store, start)
        archived.wait_archived()
        moments.append(clock.now_ms())
        states.append(contents(archived.store))
        clock.advance(10)
    archived.close()
    first, second = archived.restore("first", at_ms=moments[0]), archived.restore("second", at_ms=moments[1])
    for path, start in ((first, 1_000), (second, 2_000)):
        clock.advance(10)
        with archived.open(path, takeover=True, discard=True) as store:
            fill(store, start)
            assert store.archive is not None
            store.archive.wait(WAIT)
            moments.append(clock.now_ms())
            states.append(contents(store))
    assert archived.restored_contents("newest") == states[-1]
    assert archived.restored_contents("branch", at_ms=moments[4]) == states[4]
    # the second branch follows the second state: neither the third state nor the first branch is in its past
    assert archived.restored_contents("before", at_ms=moments[3]) == states[1]
    assert sorted(states[4]["shop"]) == [*range(20), *range(100, 120), *range(2_000, 2_020)]


def test_a_takeover_after_a_broken_chain_has_the_last_consistent_state(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    expected = contents(archived.store)
    kill(archived.store)
    with armed("archive.base.begun", "raise:EIO"):
        archived.store = archived.open()
        fill(archived.store, 100)
        number = archived.headers()[-1].position.number
        while archived.headers()[-1].position.number < number + 2:
            archived.store.kv("pairs").put(b"more", b"of it")
        kill(archived.store)
    successor = archived.restore("taken", takeover=True)
    with archived.open(successor) as store:
        assert contents(store) == expected
        fill(store, 500)
        expected = contents(store)
    assert archived.restored_contents() == expected


def test_a_restore_beside_a_live_owner_changes_nothing(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        before = {path for path in archived.bucket.rglob("*") if "/owner/" in str(path)}
        restored = archived.restore()
        with quire.open(restored, "r") as store:
            assert len(store.databases()) == 3
        with pytest.raises(StoreFenced):
            archived.open(restored)
        assert {path for path in archived.bucket.rglob("*") if "/owner/" in str(path)} == before
        fill(archived.store, 100)
        archived.wait_archived()
        expected = contents(archived.store)
    assert read(archived.restore("again")) == expected


def test_without_a_seal_a_deposed_owner_would_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would show without the seal: the owner checked its session less than a minute ago."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    gate = Gate(archived.archiver)
    gate.may_put.clear()  # later background changes are not archived before the takeover
    last = archived.headers()[-1]

    def skip_seal(*_: object, **__: object) -> tuple[Position, bytes]:
        return last.position, last.parent_digest

    for module, name in ((archiving, "seal_former"), (restoring, "seal"), (restoring, "seal_later")):
        monkeypatch.setattr(module, name, skip_seal)
    archived.restore("taken", takeover=True)
    gate.may_put.set()
    archived.store.kv("pairs").put(b"acknowledged", b"and lost")
    archived.wait_archived()
    archived.close()


@pytest.mark.parametrize("released_at", ["", "archive.replay.files", "archive.seal.before"])
def test_an_owner_that_has_claimed_the_store_and_written_nothing_is_sealed(tmp_path: Path, released_at: str) -> None:
    """It had no log to seal. It could write one after the takeover and acknowledge changes in it, because it looks who owns the
    store only once a minute; if it wrote its first object during the restore, the takeover was refused."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    expected = archived.restored_contents()
    claimed = archived.restore("claimed", takeover=True)
    is_held, may_put, may_complete_base = threading.Event(), threading.Event(), threading.Event()
    restoring_thread = threading.current_thread()

    def hold(_: str) -> None:
        is_held.set()
        assert may_put.wait(WAIT)

    def hold_base(_: str) -> None:
        assert may_complete_base.wait(WAIT)

    def release(_: str) -> None:
        if threading.current_thread() is restoring_thread and not may_put.is_set():
            may_put.set()
            until(lambda: archived.headers(2))

    with armed("archive.log.before", hold), armed("archive.part.before", hold_base):
        owner = archived.open(claimed)
        assert owner.archive is not None
        owner.kv("pairs").put(b"too", b"late")
        assert is_held.wait(WAIT)
        with armed(released_at or "no.point", release):
            successor = archived.restore("successor", takeover=True)
        may_put.set()
        may_complete_base.set()
        with pytest.raises(StoreFenced):
            owner.archive.wait(WAIT)
    with suppress(QuireError):
        owner.close()
    assert read(successor) == expected
    with archived.open(successor) as store:
        fill(store, 100)
        expected = contents(store)
    assert archived.restored_contents("later") == expected
