"""Sessions in a bucket: two directories with one identity never both go on writing (A2)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import Corruption, ObjectStoreUnavailable, StorageFault, StoreFenced
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.durable.object_names import LEGACY_OWNER, OWNER_FILE, owner_key
from quire.objects.api import DeletableStore, list_objects
from quire.objects.guarded import GuardedStore
from quire.objects.ownership import (
    EPOCHS_PER_TAKEOVER,
    OwnerObject,
    Ownership,
    decode_object,
    encode_object,
    read_file,
    recorded_state,
    refuse_fenced,
)
from quire.testing.clock import ManualClock

STORE = "1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19"


class Stop(Exception):
    """The process ends here."""


class Life:
    """One opening of a directory."""

    def __init__(
        self,
        root: Path,
        store: DeletableStore,
        clock: ManualClock | None = None,
        *,
        epoch: int = 1,
        legacy: bool = False,
    ) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.epoch = root, epoch
        self.heard: list[StoreFenced] = []
        self.ownership = Ownership(
            store_id=STORE,
            epoch=epoch,
            root=str(root),
            disk=OsDisk(),
            clock=clock or ManualClock(),
            place=lambda: store,
            fence=self.heard.append,
            legacy=legacy,
        )
        self.check, self.confirm = self.ownership.check, self.ownership.confirm

    def begin_epoch(self, at_least: int) -> int:
        self.epoch = max(self.epoch + 1, at_least)
        return self.epoch

    @property
    def state(self) -> tuple[str, int, int]:
        now = self.ownership.state
        return now.state, now.epoch, now.session


def owners(store: DeletableStore) -> list[str]:
    return [info.key.rpartition("/")[2] for info in list_objects(store, f"{STORE}/owner")]


def test_lives_of_one_directory_follow_each_other(store: DeletableStore, tmp_path: Path) -> None:
    for session in (1, 2, 3):
        life = Life(tmp_path / "a", store)
        assert life.state == ("unconfirmed", 1, 0)
        life.check()
        life.confirm()
        assert life.state == ("confirmed", 1, session)
        assert owners(store) == [f"00000001.{session:08x}"], "an earlier session of ours is not kept"
    said = decode_object(store.get(owner_key(STORE, 1, 3)))
    assert said is not None
    assert said.nonce == read_file(OsDisk(), str(tmp_path / "a")).nonce  # type: ignore[union-attr]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_a_copy_that_comes_after_its_original_is_refused(store: DeletableStore, tmp_path: Path) -> None:
    Life(tmp_path / "a", store).check()
    copied(tmp_path / "a", tmp_path / "b")
    Life(tmp_path / "a", store).check()
    copy = Life(tmp_path / "b", store)
    with pytest.raises(StoreFenced, match="another owner") as caught:
        copy.check()
    assert caught.value.where["successor"] == "00000001.00000002"
    assert "quire takeover" in caught.value.hint
    assert copy.heard == [caught.value], "the whole store hears of it"
    for refused in (copy.check, copy.confirm):
        with pytest.raises(StoreFenced):
            refused()
    assert owners(store) == ["00000001.00000002"], "nothing was claimed"


def test_an_original_whose_copy_was_first_is_fenced(store: DeletableStore, tmp_path: Path) -> None:
    """Who claims last wins; nobody shares."""
    clock = ManualClock()
    original = Life(tmp_path / "a", store, clock)
    original.check()
    Life(copied(tmp_path / "a", tmp_path / "b"), store).check()
    original.check()  # within a minute of the last look: nobody is asked
    with pytest.raises(StoreFenced, match=r"process \d+ on") as caught:
        original.confirm()  # a batch of deletions always asks
    assert original.heard == [caught.value]
    assert original.state == ("fenced", 1, 1)
    with pytest.raises(StoreFenced):
        original.check()


def test_a_put_after_a_minute_asks_again(store: DeletableStore, tmp_path: Path) -> None:
    clock = ManualClock()
    original = Life(tmp_path / "a", store, clock)
    original.check()
    Life(copied(tmp_path / "a", tmp_path / "b"), store).check()
    clock.advance(59)
    original.check()
    clock.advance(1)
    with pytest.raises(StoreFenced):
        original.check()


@pytest.mark.parametrize("jump_ms", [61_000, 3_600_000, -61_000])
def test_a_wall_clock_that_jumped_makes_the_next_put_ask(store: DeletableStore, tmp_path: Path, jump_ms: int) -> None:
    """A machine that was suspended has a monotonic clock that stood still."""
    clock = ManualClock()
    original = Life(tmp_path / "a", store, clock)
    original.check()
    Life(copied(tmp_path / "a", tmp_path / "b"), store).check()
    clock.jump(jump_ms / 1000)
    with pytest.raises(StoreFenced):
        original.check()


def test_two_copies_that_never_claimed_cannot_both(store: DeletableStore, tmp_path: Path) -> None:
    first, second = Life(tmp_path / "a", store), Life(tmp_path / "b", store)
    first.check()
    with pytest.raises(StoreFenced):
        second.check()


def test_of_two_who_claim_at_once_one_goes_on(store: DeletableStore, tmp_path: Path) -> None:
    """Both have looked and recorded before either creates its object."""
    first, second = Life(tmp_path / "a", store), Life(tmp_path / "b", store)

    def claim_second(_: str) -> None:
        if not second.ownership.state.session:
            second.check()

    with armed("objects.ownership.recorded", claim_second), pytest.raises(StoreFenced):
        first.check()
    assert second.state == ("confirmed", 1, 1)
    second.confirm()
    with pytest.raises(StoreFenced):  # the next life of the loser has the same number recorded, under another nonce
        Life(tmp_path / "a", store).check()


@pytest.mark.parametrize("point", ["recorded", "created", "confirmed"])
def test_a_crash_while_claiming_locks_nobody_out(store: DeletableStore, tmp_path: Path, point: str) -> None:
    def stop(_: str) -> None:
        raise Stop

    Life(tmp_path / "a", store).check()
    for _ in range(3):
        with armed(f"objects.ownership.{point}", stop), pytest.raises(Stop):
            Life(tmp_path / "a", store).check()
    life = Life(tmp_path / "a", store)
    life.check()
    life.confirm()
    assert life.state == ("confirmed", 1, 5)
    assert owners(store)[-1] == "00000001.00000005"


def test_a_copy_that_claimed_between_two_crashes_is_noticed(store: DeletableStore, tmp_path: Path) -> None:
    """The directory has recorded numbers above the copy's: that it is behind shows in the names after its last own."""

    def stop(_: str) -> None:
        raise Stop

    Life(tmp_path / "a", store).check()
    copied(tmp_path / "a", tmp_path / "b")
    for _ in range(2):
        with armed("objects.ownership.recorded", stop), pytest.raises(Stop):
            Life(tmp_path / "a", store).check()
    Life(tmp_path / "b", store).check()
    with pytest.raises(StoreFenced):
        Life(tmp_path / "a", store).check()


class Faulty(GuardedStore):
    """A store that does what it is told after each put of an owner object."""

    def __init__(self, inner: DeletableStore, after: Callable[[], None]) -> None:
        object.__setattr__(self, "after", after)
        super().__init__(inner, lambda: None, lambda: None)

    __slots__ = ("after",)
    after: Callable[[], None]

    def put(self, key: str, *given: Any, **options: Any) -> Any:
        done = self.inner.put(key, *given, **options)
        self.after()
        return done


def test_a_lost_answer_is_no_competitor(store: DeletableStore, tmp_path: Path) -> None:
    lost: list[str] = []

    def lose() -> None:
        if not lost:
            lost.append("answer")
            raise ObjectStoreUnavailable("the answer was lost")

    life = Life(tmp_path / "a", Faulty(store, lose))
    with pytest.raises(ObjectStoreUnavailable):
        life.check()
    assert life.state == ("unconfirmed", 1, 1)
    assert owners(store) == ["00000001.00000001"]
    life.check()
    assert life.state == ("confirmed", 1, 1)
    assert life.heard == []


def test_a_lost_answer_and_a_crash_after_it_lock_nobody_out(store: DeletableStore, tmp_path: Path) -> None:
    def lose() -> None:
        raise ObjectStoreUnavailable("the answer was lost")

    with pytest.raises(ObjectStoreUnavailable):
        Life(tmp_path / "a", Faulty(store, lose)).check()
    Life(tmp_path / "a", store).check()


class Overwriting(GuardedStore):
    """A bucket that takes no notice of "only if the name is free"."""

    def put(self, key: str, data: Any, **_: Any) -> Any:
        return self.inner.put(key, data)


def test_a_bucket_that_creates_twice_is_refused(store: DeletableStore, tmp_path: Path) -> None:
    life = Life(tmp_path / "a", Overwriting(store, lambda: None, lambda: None))
    for _ in range(2):
        with pytest.raises(StorageFault, match="created once"):
            life.check()
    assert life.state == ("unconfirmed", 1, 1)


def test_a_bucket_out_of_reach_fences_nobody(store: DeletableStore, tmp_path: Path) -> None:
    clock = ManualClock()
    reachable: list[bool] = []

    class Away(GuardedStore):
        def list_pages(self, *given: Any, **options: Any) -> Any:
            if not reachable:
                raise ObjectStoreUnavailable("no answer")
            return self.inner.list_pages(*given, **options)

    life = Life(tmp_path / "a", Away(store, lambda: None, lambda: None), clock)
    with pytest.raises(ObjectStoreUnavailable):
        life.check()
    assert life.state == ("unconfirmed", 1, 0)
    reachable.append(True)
    life.check()
    assert life.state == ("confirmed", 1, 1)
    reachable.clear()
    clock.advance(61)
    with pytest.raises(ObjectStoreUnavailable):
        life.check()
    assert life.heard == []


# ── takeover ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_takeover_fences_the_former_owner_and_removes_nothing(store: DeletableStore, tmp_path: Path) -> None:
    former = Life(tmp_path / "a", store)
    former.check()
    copy = Life(copied(tmp_path / "a", tmp_path / "b"), store)
    assert copy.ownership.take_over(copy.begin_epoch).epoch == 2
    assert copy.state == ("confirmed", 2, 1)
    copy.check()
    with pytest.raises(StoreFenced) as caught:
        former.confirm()
    assert caught.value.where["successor"] == "00000002.00000001"
    assert owners(store) == ["00000001.00000001", "00000002.00000001"]
    again = Life(tmp_path / "b", store, epoch=2)
    again.check()
    assert again.state == ("confirmed", 2, 2)


def test_a_takeover_goes_above_epochs_that_it_did_not_know(store: DeletableStore, tmp_path: Path) -> None:
    old = Life(tmp_path / "backup", store)
    for number in range(3):
        newer = Life(tmp_path / f"n{number}", store, epoch=number + 1)
        newer.ownership.take_over(newer.begin_epoch)
    assert old.ownership.take_over(old.begin_epoch).epoch == 5
    with pytest.raises(StoreFenced):
        newer.confirm()


def test_an_epoch_out_of_this_world_is_not_counted_up_to(store: DeletableStore, tmp_path: Path) -> None:
    forged = owner_key(STORE, EPOCHS_PER_TAKEOVER + 2, 1)
    store.put(forged, encode_object(OwnerObject(store_id=STORE, nonce="x")))
    life = Life(tmp_path / "a", store)
    with pytest.raises(Corruption):
        life.ownership.take_over(life.begin_epoch)
    assert life.epoch == 1


@pytest.mark.parametrize("point", ["epoch_begun", "recorded", "created", "confirmed"])
def test_a_takeover_that_was_cut_off_is_finished_by_the_next_put(
    store: DeletableStore, tmp_path: Path, point: str
) -> None:
    def stop(_: str) -> None:
        raise Stop

    former = Life(tmp_path / "a", store)
    former.check()
    copy = Life(copied(tmp_path / "a", tmp_path / "b"), store)
    with armed(f"objects.ownership.{point}", stop), pytest.raises(Stop):
        copy.ownership.take_over(copy.begin_epoch)
    again = Life(tmp_path / "b", store, epoch=2)
    again.check()
    assert again.state[:2] == ("confirmed", 2)
    with pytest.raises(StoreFenced):
        former.confirm()


def test_a_directory_remembers_that_it_is_behind_until_a_takeover(store: DeletableStore, tmp_path: Path) -> None:
    disk, root = OsDisk(), str(tmp_path / "b")
    Life(tmp_path / "a", store).check()
    copied(tmp_path / "a", tmp_path / "b")
    Life(tmp_path / "a", store).check()
    refuse_fenced(disk, root, 1)
    assert recorded_state(disk, root, 1).state == "confirmed"
    with pytest.raises(StoreFenced):
        Life(tmp_path / "b", store).check()
    with pytest.raises(StoreFenced, match=r"process \d+ on") as caught:
        refuse_fenced(disk, root, 1)  # without asking the bucket
    assert caught.value.where["successor"] == "00000001.00000002"
    assert recorded_state(disk, root, 1).state == "fenced"
    life = Life(tmp_path / "b", store)
    life.ownership.take_over(life.begin_epoch)
    refuse_fenced(disk, root, 2)
    assert recorded_state(disk, root, 2).state == "confirmed"


def test_a_damaged_file_is_told_and_a_takeover_writes_it_anew(store: DeletableStore, tmp_path: Path) -> None:
    Life(tmp_path / "a", store).check()
    (tmp_path / "a" / OWNER_FILE).write_bytes(b"{}\n")
    with pytest.raises(Corruption, match=r"owner\.json is damaged"):
        Life(tmp_path / "a", store).check()
    life = Life(tmp_path / "a", store)
    life.ownership.take_over(life.begin_epoch)
    Life(tmp_path / "a", store, epoch=2).check()


# ── objects from before there were epochs ─────────────────────────────────────────────────────────────────────────────
def test_old_objects_belong_to_the_store_that_says_so_first(store: DeletableStore, tmp_path: Path) -> None:
    assert Life(tmp_path / "new", store).ownership.owns_legacy(), "it has none"
    first = Life(tmp_path / "a", store, legacy=True, epoch=2)
    assert first.ownership.owns_legacy()
    assert Life(tmp_path / "a", store, legacy=True, epoch=2).ownership.owns_legacy(), "and keeps them"
    store.delete(LEGACY_OWNER)
    store.put(LEGACY_OWNER, encode_object(OwnerObject(store_id="another", nonce="")))
    assert not Life(tmp_path / "a", store, legacy=True, epoch=2).ownership.owns_legacy()
