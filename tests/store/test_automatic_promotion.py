"""A standby that promotes itself completes what it has begun, and deposes nobody who took over meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import InvalidInput, ObjectStoreUnavailable, StoreFenced
from quire.durable.failpoints import armed
from quire.objects.open import open_store
from quire.objects.ownership import newest_owner
from quire.store import standby as module
from quire.store.standby import Standby, promote
from tests.archive.archived_store import WAIT, ArchivedStore, archived_store, contents, fill, kill, quiet, until

PROMOTE_AFTER = 15.0


class DeadOwner:
    """An owner that was killed, and two standbys that have everything it archived."""

    def __init__(self, archived: ArchivedStore) -> None:
        self.archived = archived
        fill(archived.store, 0)
        archived.wait_archived()
        for name in ("standby", "other"):
            with self.standby(name) as standby:
                standby.poll()
        self.expected = contents(archived.store)
        kill(archived.store)

    def path(self, name: str = "standby") -> Path:
        return self.archived.home / name

    def standby(self, name: str = "standby") -> Standby:
        return Standby(str(self.archived.bucket), self.path(name))

    def owner_epoch(self) -> int:
        with closing(open_store(str(self.archived.bucket))) as bucket:
            newest = newest_owner(bucket, self.archived.store_id)
            assert newest is not None
            return newest[0]

    def contents(self, name: str = "standby") -> dict[str, Any]:
        with quire.open(self.path(name), settings=quiet()) as store:
            return contents(store)


@pytest.fixture
def dead_owner(tmp_path: Path) -> Iterator[DeadOwner]:
    with archived_store(tmp_path) as archived:
        yield DeadOwner(archived)


def silent(standby: Standby) -> Standby:
    standby._owner.silent_seconds = PROMOTE_AFTER
    return standby


@pytest.mark.parametrize("request_of", ["claim_epoch", "seal", "positions_after", "open_owner"])
def test_a_promotion_during_which_the_bucket_does_not_answer_is_completed(
    dead_owner: DeadOwner, monkeypatch: pytest.MonkeyPatch, request_of: str
) -> None:
    """Hazard: the standby stopped half-way. Its claim had fenced the former owner, so nobody served."""
    answer, failures = getattr(module, request_of), iter([True])

    def fail_once(*arguments: Any, **options: Any) -> Any:
        if next(failures, False):
            raise ObjectStoreUnavailable("away")
        return answer(*arguments, **options)

    monkeypatch.setattr(module, request_of, fail_once)
    with dead_owner.standby() as standby:
        promoted = silent(standby).run(promote_after=PROMOTE_AFTER)
    assert promoted is not None
    assert (promoted.owner_epoch, next(failures, None)) == (2, None)
    assert dead_owner.contents() == dead_owner.expected


@pytest.mark.parametrize("step", ["standby.promoting", "standby.claimed", "standby.sealed", "standby.taken_over"])
def test_a_promotion_that_was_killed_is_completed_by_the_next_process(dead_owner: DeadOwner, step: str) -> None:
    """Hazard: `quire standby --promote-after`, restarted, asked for `quire promote`, which nobody was there to run."""
    with dead_owner.standby() as standby, armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
        standby.promote()
    with dead_owner.standby() as standby:
        assert standby.is_promoting
        with pytest.raises(InvalidInput, match="incomplete"):
            standby.run()  # following would undo what was begun
        promoted = standby.run(promote_after=PROMOTE_AFTER)
    assert promoted is not None
    assert promoted.owner_epoch == 2
    assert dead_owner.contents() == dead_owner.expected


@pytest.mark.parametrize("step", ["standby.claimed", "standby.sealed", "standby.taken_over"])
def test_a_promotion_that_is_continued_deposes_nobody_who_took_over_meanwhile(dead_owner: DeadOwner, step: str) -> None:
    """Hazard: its claim was lower than the new owner's, and it went on with a higher one."""
    with dead_owner.standby() as standby, armed(step, "1*raise:EIO"), pytest.raises(OSError, match="failpoint"):
        standby.promote()
    promote(dead_owner.path("other"), discard=True)
    assert dead_owner.owner_epoch() == 3
    stop = threading.Event()
    with dead_owner.standby() as standby:
        thread = threading.Thread(target=lambda: standby.run(promote_after=PROMOTE_AFTER, stop=stop))
        thread.start()
        with dead_owner.archived.open(dead_owner.path("other")) as owner:
            fill(owner, 100)
            assert owner.archive is not None
            owner.archive.wait(WAIT)
            expected = contents(owner)
            until(lambda: standby.status.position.epoch == 3 or not thread.is_alive())
        stop.set()
        thread.join(WAIT)
        assert not standby.is_promoting
    assert dead_owner.owner_epoch() == 3
    promote(dead_owner.path())
    assert dead_owner.contents() == expected


def test_a_continued_promotion_that_was_overtaken_says_so(dead_owner: DeadOwner) -> None:
    with dead_owner.standby() as standby, armed("standby.sealed", "1*raise:EIO"), suppress(OSError):
        standby.promote()
    promote(dead_owner.path("other"), discard=True)
    with pytest.raises(StoreFenced, match="epoch 3"):
        promote(dead_owner.path())
    promote(dead_owner.path(), discard=True)
    assert dead_owner.owner_epoch() == 4


def test_silence_before_an_outage_of_the_bucket_does_not_count(
    dead_owner: DeadOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: the owner may have lost the bucket some seconds before the standby did. When the bucket was back, the standby
    took over before the owner had put its next heartbeat."""
    stop = threading.Event()
    polls = 0

    def poll() -> int:
        nonlocal polls
        polls += 1
        if polls == 1:
            raise ObjectStoreUnavailable("away")
        stop.set()
        return 0

    with dead_owner.standby() as standby:
        monkeypatch.setattr(standby, "poll", poll)
        standby._owner.silent_seconds = PROMOTE_AFTER - 0.1
        assert standby.run(promote_after=PROMOTE_AFTER, stop=stop) is None
        assert standby.status.silent_seconds == 0
