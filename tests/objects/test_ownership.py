"""Sessions in a bucket: of two directories with one identity, at most one continues to write (A2)."""

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
    OwnerState,
    _owner_text,
    claim_epoch,
    decode_object,
    encode_object,
    newer_owner,
    newest_owner,
    read_file,
    recorded_state,
    refuse_fenced,
)
from quire.testing.clock import ManualClock

STORE = "1f0c0c1e-7d4e-4c5e-9f50-0d6d1c3b2a19"


class Stop(Exception):
    """The process ends here."""


class OwnerSession:
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
        self.fenced_errors: list[StoreFenced] = []
        self.ownership = Ownership(
            store_id=STORE,
            epoch=epoch,
            root=str(root),
            disk=OsDisk(),
            clock=clock or ManualClock(),
            place=lambda: store,
            fence=self.fenced_errors.append,
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


def test_sessions_of_one_directory_are_numbered_in_order(store: DeletableStore, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        session = OwnerSession(tmp_path / "a", store)
        assert session.state == ("unconfirmed", 1, 0)
        session.check()
        session.confirm()
        assert session.state == ("confirmed", 1, number)
        assert owners(store) == [f"00000001.{number:08x}"], "an earlier session of this directory is removed"
    owner_object = decode_object(store.get(owner_key(STORE, 1, 3)))
    assert owner_object is not None
    assert owner_object.nonce == read_file(OsDisk(), str(tmp_path / "a")).nonce  # type: ignore[union-attr]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def test_a_copy_that_claims_after_its_original_is_refused(store: DeletableStore, tmp_path: Path) -> None:
    OwnerSession(tmp_path / "a", store).check()
    copied(tmp_path / "a", tmp_path / "b")
    OwnerSession(tmp_path / "a", store).check()
    copy = OwnerSession(tmp_path / "b", store)
    with pytest.raises(StoreFenced, match="another owner") as caught:
        copy.check()
    assert caught.value.where["successor"] == "00000001.00000002"
    assert "quire takeover" in caught.value.hint
    assert copy.fenced_errors == [caught.value], "the whole store is notified"
    for call in (copy.check, copy.confirm):
        with pytest.raises(StoreFenced):
            call()
    assert owners(store) == ["00000001.00000002"], "the copy has claimed nothing"


def test_an_original_whose_copy_claimed_later_is_fenced(store: DeletableStore, tmp_path: Path) -> None:
    """The last to claim wins; there is never more than one owner."""
    clock = ManualClock()
    original = OwnerSession(tmp_path / "a", store, clock)
    original.check()
    OwnerSession(copied(tmp_path / "a", tmp_path / "b"), store).check()
    original.check()  # within a minute of the last check: the bucket is not read
    with pytest.raises(StoreFenced, match=r"process \d+ on") as caught:
        original.confirm()  # a batch of deletions always checks
    assert original.fenced_errors == [caught.value]
    assert original.state == ("fenced", 1, 1)
    with pytest.raises(StoreFenced):
        original.check()


def test_a_put_after_a_minute_checks_again(store: DeletableStore, tmp_path: Path) -> None:
    clock = ManualClock()
    original = OwnerSession(tmp_path / "a", store, clock)
    original.check()
    OwnerSession(copied(tmp_path / "a", tmp_path / "b"), store).check()
    clock.advance(59)
    original.check()
    clock.advance(1)
    with pytest.raises(StoreFenced):
        original.check()


@pytest.mark.parametrize("jump_ms", [61_000, 3_600_000, -61_000])
def test_after_a_jump_of_the_wall_clock_the_next_put_checks(
    store: DeletableStore, tmp_path: Path, jump_ms: int
) -> None:
    """The monotonic clock of a suspended machine stands still."""
    clock = ManualClock()
    original = OwnerSession(tmp_path / "a", store, clock)
    original.check()
    OwnerSession(copied(tmp_path / "a", tmp_path / "b"), store).check()
    clock.jump(jump_ms / 1000)
    with pytest.raises(StoreFenced):
        original.check()


def test_of_two_copies_without_a_claim_only_one_can_claim(store: DeletableStore, tmp_path: Path) -> None:
    first, second = OwnerSession(tmp_path / "a", store), OwnerSession(tmp_path / "b", store)
    first.check()
    with pytest.raises(StoreFenced):
        second.check()


def test_of_two_concurrent_claims_one_succeeds(store: DeletableStore, tmp_path: Path) -> None:
    """Both have checked and recorded before either creates its object."""
    first, second = OwnerSession(tmp_path / "a", store), OwnerSession(tmp_path / "b", store)

    def claim_second(_: str) -> None:
        if not second.ownership.state.session:
            second.check()

    with armed("objects.ownership.recorded", claim_second), pytest.raises(StoreFenced):
        first.check()
    assert second.state == ("confirmed", 1, 1)
    second.confirm()
    with pytest.raises(StoreFenced):  # the loser's next session has the same number recorded, with another nonce
        OwnerSession(tmp_path / "a", store).check()


@pytest.mark.parametrize("point", ["recorded", "created", "confirmed"])
def test_a_crash_during_a_claim_does_not_lock_the_owner_out(store: DeletableStore, tmp_path: Path, point: str) -> None:
    def stop(_: str) -> None:
        raise Stop

    OwnerSession(tmp_path / "a", store).check()
    for _ in range(3):
        with armed(f"objects.ownership.{point}", stop), pytest.raises(Stop):
            OwnerSession(tmp_path / "a", store).check()
    session = OwnerSession(tmp_path / "a", store)
    session.check()
    session.confirm()
    assert session.state == ("confirmed", 1, 5)
    assert owners(store)[-1] == "00000001.00000005"


def test_a_copy_that_claimed_between_two_crashes_is_detected(store: DeletableStore, tmp_path: Path) -> None:
    """The directory has recorded numbers above the copy's; the names after its own last object show that it is behind."""

    def stop(_: str) -> None:
        raise Stop

    OwnerSession(tmp_path / "a", store).check()
    copied(tmp_path / "a", tmp_path / "b")
    for _ in range(2):
        with armed("objects.ownership.recorded", stop), pytest.raises(Stop):
            OwnerSession(tmp_path / "a", store).check()
    OwnerSession(tmp_path / "b", store).check()
    with pytest.raises(StoreFenced):
        OwnerSession(tmp_path / "a", store).check()


class HookedStore(GuardedStore):
    """A store that calls a hook after each put of an owner object."""

    def __init__(self, inner: DeletableStore, after: Callable[[], None]) -> None:
        object.__setattr__(self, "after", after)
        super().__init__(inner, lambda: None, lambda: None)

    __slots__ = ("after",)
    after: Callable[[], None]

    def put(self, key: str, *args: Any, **options: Any) -> Any:
        result = self.inner.put(key, *args, **options)
        self.after()
        return result


def test_a_lost_response_is_not_taken_for_a_competitor(store: DeletableStore, tmp_path: Path) -> None:
    lost_responses: list[str] = []

    def lose_response() -> None:
        if not lost_responses:
            lost_responses.append("response")
            raise ObjectStoreUnavailable("the response was lost")

    session = OwnerSession(tmp_path / "a", HookedStore(store, lose_response))
    with pytest.raises(ObjectStoreUnavailable):
        session.check()
    assert session.state == ("unconfirmed", 1, 1)
    assert owners(store) == ["00000001.00000001"]
    session.check()
    assert session.state == ("confirmed", 1, 1)
    assert session.fenced_errors == []


def test_a_lost_response_followed_by_a_crash_does_not_lock_the_owner_out(store: DeletableStore, tmp_path: Path) -> None:
    def lose_response() -> None:
        raise ObjectStoreUnavailable("the response was lost")

    with pytest.raises(ObjectStoreUnavailable):
        OwnerSession(tmp_path / "a", HookedStore(store, lose_response)).check()
    OwnerSession(tmp_path / "a", store).check()


class OverwritingStore(GuardedStore):
    """A bucket that ignores "only if the name is free"."""

    def put(self, key: str, data: Any, **_: Any) -> Any:
        return self.inner.put(key, data)


def test_a_bucket_that_creates_twice_is_refused(store: DeletableStore, tmp_path: Path) -> None:
    session = OwnerSession(tmp_path / "a", OverwritingStore(store, lambda: None, lambda: None))
    for _ in range(2):
        with pytest.raises(StorageFault, match="created once"):
            session.check()
    assert session.state == ("unconfirmed", 1, 1)


@pytest.mark.parametrize("created_at_ms", [-(2**62), -1, 0, 2**62])
def test_any_time_in_the_object_of_another_owner_can_be_shown(created_at_ms: int) -> None:
    """Hazard: a negative time raised `ValueError`, and the owner that found the object did not fence itself."""
    owner = OwnerObject(store_id="s", nonce="n", host="elsewhere", pid=7, created_at_ms=created_at_ms)
    assert _owner_text(owner).startswith("process 7 on elsewhere, ")


def test_an_unreachable_bucket_fences_no_owner(store: DeletableStore, tmp_path: Path) -> None:
    clock = ManualClock()
    reachable: list[bool] = []

    class UnreachableStore(GuardedStore):
        def list_pages(self, *args: Any, **options: Any) -> Any:
            if not reachable:
                raise ObjectStoreUnavailable("no response")
            return self.inner.list_pages(*args, **options)

    session = OwnerSession(tmp_path / "a", UnreachableStore(store, lambda: None, lambda: None), clock)
    with pytest.raises(ObjectStoreUnavailable):
        session.check()
    assert session.state == ("unconfirmed", 1, 0)
    reachable.append(True)
    session.check()
    assert session.state == ("confirmed", 1, 1)
    reachable.clear()
    clock.advance(61)
    with pytest.raises(ObjectStoreUnavailable):
        session.check()
    assert session.fenced_errors == []


# ── takeover ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_takeover_fences_the_previous_owner_and_removes_nothing(store: DeletableStore, tmp_path: Path) -> None:
    previous = OwnerSession(tmp_path / "a", store)
    previous.check()
    copy = OwnerSession(copied(tmp_path / "a", tmp_path / "b"), store)
    assert copy.ownership.take_over(copy.begin_epoch).epoch == 2
    assert copy.state == ("confirmed", 2, 1)
    copy.check()
    with pytest.raises(StoreFenced) as caught:
        previous.confirm()
    assert caught.value.where["successor"] == "00000002.00000001"
    assert owners(store) == ["00000001.00000001", "00000002.00000001"]
    again = OwnerSession(tmp_path / "b", store, epoch=2)
    again.check()
    assert again.state == ("confirmed", 2, 2)


def test_a_takeover_uses_an_epoch_above_all_in_the_bucket(store: DeletableStore, tmp_path: Path) -> None:
    old = OwnerSession(tmp_path / "backup", store)
    for number in range(3):
        newer = OwnerSession(tmp_path / f"n{number}", store, epoch=number + 1)
        newer.ownership.take_over(newer.begin_epoch)
    assert old.ownership.take_over(old.begin_epoch).epoch == 5
    with pytest.raises(StoreFenced):
        newer.confirm()


def test_an_implausibly_high_epoch_is_corruption(store: DeletableStore, tmp_path: Path) -> None:
    forged = owner_key(STORE, EPOCHS_PER_TAKEOVER + 2, 1)
    store.put(forged, encode_object(OwnerObject(store_id=STORE, nonce="x")))
    session = OwnerSession(tmp_path / "a", store)
    with pytest.raises(Corruption):
        session.ownership.take_over(session.begin_epoch)
    assert session.epoch == 1


def test_a_store_before_its_first_put_has_no_newer_owner_unless_one_claimed(
    store: DeletableStore, tmp_path: Path
) -> None:
    """Such a store has no owner epoch, and a copy of it stays without one when the other directory claims the first."""
    disk, copy = OsDisk(), str(tmp_path / "copy")
    assert newer_owner(store, STORE, 0, disk, copy) == ""
    OwnerSession(tmp_path / "a", store).check()
    assert newer_owner(store, STORE, 0, disk, copy).startswith("00000001.00000001")


@pytest.mark.parametrize("point", ["recorded", "created", "epoch_begun", "confirmed"])
def test_an_interrupted_takeover_is_completed_by_another_one(store: DeletableStore, tmp_path: Path, point: str) -> None:
    previous = OwnerSession(tmp_path / "a", store)
    previous.check()
    copy = OwnerSession(copied(tmp_path / "a", tmp_path / "b"), store)
    interrupt_takeover(copy, point)
    disk, root = OsDisk(), str(tmp_path / "b")
    if copy.epoch == 1:
        with pytest.raises(StoreFenced, match="interrupted"):
            refuse_fenced(disk, root, 1)
        assert recorded_state(disk, root, 1) == OwnerState("fenced", 1, 0, "00000002.00000001")
        assert newer_owner(store, STORE, 1, disk, root) == "", "its own claim is not another owner"
        again = OwnerSession(tmp_path / "b", store)
        assert again.ownership.take_over(again.begin_epoch).epoch == 2
    else:
        refuse_fenced(disk, root, 2)
        again = OwnerSession(tmp_path / "b", store, epoch=2)
        again.check()
    assert again.state[:2] == ("confirmed", 2)
    with pytest.raises(StoreFenced):
        previous.confirm()


@pytest.mark.parametrize("point", ["recorded", "created", "epoch_begun"])
def test_an_interrupted_takeover_does_not_depose_an_owner_that_it_did_not_see(
    store: DeletableStore, tmp_path: Path, point: str
) -> None:
    OwnerSession(tmp_path / "a", store).check()
    standby = OwnerSession(tmp_path / "standby", store)
    assert claim_epoch(store, OsDisk(), str(tmp_path / "standby"), STORE, 2, 0)
    copy = OwnerSession(copied(tmp_path / "a", tmp_path / "b"), store)
    interrupt_takeover(copy, point)
    is_seen = (newest := newest_owner(store, STORE)) is not None and newest[0] == 3
    if not is_seen:  # nobody can know of the takeover, so it must not have an effect later
        standby.ownership.take_over(standby.begin_epoch)
        with pytest.raises(StoreFenced, match="interrupted"):
            refuse_fenced(OsDisk(), str(tmp_path / "b"), copy.epoch)
        standby.confirm()
    assert is_seen == (point != "recorded")


def interrupt_takeover(session: OwnerSession, point: str) -> None:
    def stop(_: str) -> None:
        raise Stop

    with armed(f"objects.ownership.{point}", stop), pytest.raises(Stop):
        session.ownership.take_over(session.begin_epoch)


def test_of_two_takeovers_at_once_one_has_no_effect(store: DeletableStore, tmp_path: Path) -> None:
    OwnerSession(tmp_path / "a", store).check()
    first, second = (OwnerSession(copied(tmp_path / "a", tmp_path / name), store) for name in "bc")
    calls: list[str] = []

    def overtake(_: str) -> None:
        calls.append("")
        if len(calls) == 1:
            second.ownership.take_over(second.begin_epoch)

    with armed("objects.ownership.recorded", overtake), pytest.raises(StoreFenced, match="same moment"):
        first.ownership.take_over(first.begin_epoch)
    assert first.epoch == 1
    second.confirm()
    assert first.ownership.take_over(first.begin_epoch).epoch == 3, "a decision, not an accident"


def test_a_fenced_directory_stays_fenced_until_a_takeover(store: DeletableStore, tmp_path: Path) -> None:
    disk, root = OsDisk(), str(tmp_path / "b")
    OwnerSession(tmp_path / "a", store).check()
    copied(tmp_path / "a", tmp_path / "b")
    OwnerSession(tmp_path / "a", store).check()
    refuse_fenced(disk, root, 1)
    assert recorded_state(disk, root, 1).state == "confirmed"
    with pytest.raises(StoreFenced):
        OwnerSession(tmp_path / "b", store).check()
    with pytest.raises(StoreFenced, match=r"process \d+ on") as caught:
        refuse_fenced(disk, root, 1)  # without reading the bucket
    assert caught.value.where["successor"] == "00000001.00000002"
    assert recorded_state(disk, root, 1).state == "fenced"
    session = OwnerSession(tmp_path / "b", store)
    session.ownership.take_over(session.begin_epoch)
    refuse_fenced(disk, root, 2)
    assert recorded_state(disk, root, 2).state == "confirmed"


def test_a_damaged_file_is_reported_and_rewritten_by_a_takeover(store: DeletableStore, tmp_path: Path) -> None:
    OwnerSession(tmp_path / "a", store).check()
    (tmp_path / "a" / OWNER_FILE).write_bytes(b"{}\n")
    with pytest.raises(Corruption, match=r"owner\.json is damaged"):
        OwnerSession(tmp_path / "a", store).check()
    session = OwnerSession(tmp_path / "a", store)
    session.ownership.take_over(session.begin_epoch)
    OwnerSession(tmp_path / "a", store, epoch=2).check()


# ── objects from before owner epochs ──────────────────────────────────────────────────────────────────────────────────
def test_legacy_objects_belong_to_the_first_store_that_claims_them(store: DeletableStore, tmp_path: Path) -> None:
    assert OwnerSession(tmp_path / "new", store).ownership.owns_legacy(), "a new store has no old objects"
    first = OwnerSession(tmp_path / "a", store, legacy=True, epoch=2)
    assert first.ownership.owns_legacy()
    assert OwnerSession(tmp_path / "a", store, legacy=True, epoch=2).ownership.owns_legacy(), (
        "the first claimant keeps them"
    )
    store.delete(LEGACY_OWNER)
    store.put(LEGACY_OWNER, encode_object(OwnerObject(store_id="another", nonce="")))
    assert not OwnerSession(tmp_path / "a", store, legacy=True, epoch=2).ownership.owns_legacy()
