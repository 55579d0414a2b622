"""An interrupted promotion, whose store another directory has taken over since, does not report success."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import apsw
import pytest

import quire
from quire.core.errors import StoreFenced
from quire.durable.failpoints import armed
from quire.store.standby import promote
from tests.archive.archived_store import WAIT, ArchivedStore, archived_store, contents, fill, kill
from tests.store.test_standby import follow, polled

BEGUN = ["objects.ownership.epoch_begun", "objects.ownership.confirmed", "standby.taken_over"]


def interrupted(archived: ArchivedStore, step: str) -> Path:
    """Return the directory of a standby whose promotion has died."""
    fill(archived.store, 0)
    polled(archived)
    kill(archived.store)
    with armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
        promote(archived.home / "standby")
    return archived.home / "standby"


def fill_and_wait(store: quire.Store, start: int) -> None:
    fill(store, start)
    assert store.archive is not None
    store.archive.wait(WAIT)


def taken_over(archived: ArchivedStore) -> quire.Store:
    archived.restore("restored", takeover=True)
    return archived.open(archived.home / "restored")


@pytest.mark.parametrize("step", BEGUN)
@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_a_promotion_that_has_begun_its_epoch_is_refused_if_another_owner_came_after_it(
    tmp_path: Path, step: str, moment: str
) -> None:
    """Hazard: it looked at the bucket first only. A directory that took over after that look was the owner, and `promote`
    reported success."""
    with archived_store(tmp_path) as archived:
        standby = interrupted(archived, step)
        owners: list[quire.Store] = []

        def take_over(_: str) -> None:
            if not owners:
                owners.append(taken_over(archived))

        if moment == "before":
            take_over("")
        with armed("standby.named", take_over), pytest.raises(StoreFenced):
            promote(standby)
        (owner,) = owners
        fill_and_wait(owner, 20)
        expected = contents(owner)
        owner.close()
        if moment == "meanwhile":  # the second promotion gives the first one up
            with pytest.raises(StoreFenced, match="epoch 3"):
                promote(standby)
        with follow(archived) as follower:
            follower.poll()
            assert follower.status.position.epoch == 3
        promote(standby)
        with archived.open(standby) as store:
            assert contents(store) == expected


@pytest.mark.parametrize("step", ["standby.claimed", *BEGUN])
def test_with_discard_an_interrupted_promotion_deposes_an_owner_that_came_after_it(tmp_path: Path, step: str) -> None:
    """Hazard: it continued in its own epoch, reported success, and was fenced at its first upload."""
    with archived_store(tmp_path) as archived:
        standby = interrupted(archived, step)
        owner = taken_over(archived)
        fill_and_wait(owner, 20)
        expected = contents(owner)
        assert promote(standby, discard=True).owner_epoch == 4
        with suppress(StoreFenced, apsw.IOError):  # a statement that is fenced between its commit and its sync
            fill(owner, 40)
        assert owner.archive is not None
        with pytest.raises(StoreFenced):
            owner.archive.wait(WAIT)
        with suppress(StoreFenced):
            owner.close()
        with archived.open(standby) as store:
            assert contents(store) == expected, "the base of the deposed owner was complete"
            fill_and_wait(store, 60)


@pytest.mark.parametrize("step", ["standby.claimed", "standby.named", *BEGUN])
@pytest.mark.parametrize("died_at", ["objects.ownership.created", "archive.seal.before", "archive.seal.put"])
def test_a_promotion_is_refused_if_a_takeover_came_after_it_and_died(tmp_path: Path, step: str, died_at: str) -> None:
    """Hazard: a restore sealed the log before it claimed its epoch. The interrupted promotion found no newer claim, reported
    success, and was fenced at its first upload."""
    with archived_store(tmp_path) as archived:
        standby = interrupted(archived, step)
        with armed(died_at, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
            archived.restore("died", takeover=True)
        with pytest.raises(StoreFenced, match="epoch 3"):
            promote(standby)
        assert promote(standby, discard=True).owner_epoch == 4
        with archived.open(standby) as store:
            fill_and_wait(store, 20)
            expected = contents(store)
        assert archived.restored_contents() == expected
