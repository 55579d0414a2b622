"""Owner epochs that are not part of the store's history are listed, and removed only by name (A3)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

from quire.archive.clones import CloneRegistration, register
from quire.archive.log_reader import owner_log
from quire.archive.window import AbandonedEpoch, abandoned_epochs, reach
from quire.core.errors import ForeignObject, NotFound, StillReferenced
from quire.durable.object_names import epoch_prefix
from quire.objects.api import ObjectStore, list_objects
from quire.objects.open import open_store
from quire.store.heavy import audit_bucket
from quire.testing.clock import ManualClock
from tests.archive.archived_store import WAIT, ArchivedStore, contents, fill


def branched(tmp_path: Path) -> tuple[ArchivedStore, Path]:
    """A store whose second owner was abandoned: (the store, the directory of the third owner)."""
    clock = ManualClock(4_000_000_000_000)
    archived = ArchivedStore(tmp_path, clock=clock)
    fill(archived.store, 0)
    archived.wait_archived()
    moment = clock.now_ms()
    clock.advance(10)
    archived.close()
    second = archived.restore("second", takeover=True)
    with archived.open(second) as store:
        fill(store, 100)
        store.checkpoint("shop")
        assert store.archive is not None
        store.archive.wait(WAIT)
    clock.advance(10)
    third = archived.restore("third", at_ms=moment)
    with archived.open(third, takeover=True, discard=True) as store:
        fill(store, 200)
        assert store.archive is not None
        store.archive.wait(WAIT)
    return archived, third


def whole_epochs(bucket: ObjectStore, store_id: str) -> list[AbandonedEpoch]:
    """The abandoned epochs of which the history contains nothing."""
    return [epoch for epoch in abandoned_epochs(bucket, store_id) if epoch.after is None]


def test_an_abandoned_epoch_is_listed_and_removed_by_its_name(tmp_path: Path) -> None:
    archived, third = branched(tmp_path)
    with closing(open_store(str(archived.bucket))) as bucket, archived.open(third) as store:
        (abandoned,) = whole_epochs(bucket, archived.store_id)
        assert abandoned.owner_epoch == 2
        data = epoch_prefix(archived.store_id, 2)
        assert list(list_objects(bucket, data))
        expected = contents(store)
        for epoch in (1, 3, 4):
            with pytest.raises(NotFound, match="no such abandoned"):
                store.heavy.remove_abandoned(epoch)
        assert store.heavy.remove_abandoned(2) == abandoned.objects
        assert whole_epochs(bucket, archived.store_id) == []
        assert not list(list_objects(bucket, data))
        assert not list(list_objects(bucket, f"{archived.store_id}/archive/00000002"))
        assert contents(store) == expected
    assert archived.restored_contents() == expected
    assert audit_bucket(str(archived.bucket), store_id=archived.store_id).is_sound


def test_an_epoch_of_the_history_is_never_treated_as_abandoned(tmp_path: Path) -> None:
    archived, third = branched(tmp_path)
    with archived.open(third) as store:
        collector, url = store.context.collector, store.objects_url
        for epoch in (1, 3):
            with pytest.raises(ForeignObject, match="part of this store's history"):
                collector.delete_abandoned(url, epoch_prefix(archived.store_id, epoch), [])
        with pytest.raises(ForeignObject, match="part of this store's history"):
            collector.delete_abandoned(url, archived.store_id, [])
        with pytest.raises(ForeignObject, match="another owner epoch"):
            collector.delete_abandoned(url, epoch_prefix(archived.store_id, 2), [f"{archived.store_id}/e/00000003/x"])


def test_a_clone_of_an_abandoned_moment_keeps_it(tmp_path: Path) -> None:
    archived, third = branched(tmp_path)
    assert archived.clock is not None
    point = archived.clock.now_ms()
    with closing(open_store(str(archived.bucket))) as bucket:
        (abandoned,) = whole_epochs(bucket, archived.store_id)
    assert abandoned.ended_at_ms < point
    with closing(open_store(str(archived.bucket))) as bucket:
        clone = CloneRegistration(
            clone_id=str(uuid4()), position="2.1", at_ms=abandoned.ended_at_ms, registered_at_ms=point
        )
        register(bucket, archived.store_id, clone)
    with archived.open(third) as store, pytest.raises(StillReferenced, match="a clone may read"):
        store.heavy.remove_abandoned(2)


def test_a_clone_of_the_history_does_not_protect_abandoned_epochs_when_its_log_is_trimmed(tmp_path: Path) -> None:
    """Hazard: the history was taken from the log in the bucket, from which trimmed epochs are missing."""
    archived, third = branched(tmp_path)
    assert archived.clock is not None
    with closing(open_store(str(archived.bucket))) as bucket, archived.open(third) as store:
        now = archived.clock.now_ms()
        clone = CloneRegistration(clone_id=str(uuid4()), position="1.1", at_ms=now, registered_at_ms=now)
        register(bucket, archived.store_id, clone)
        for key in [info.key for info in list_objects(bucket, f"{archived.store_id}/archive/00000001")]:
            (archived.bucket / key).unlink()
        (abandoned,) = whole_epochs(bucket, archived.store_id)
        assert store.heavy.remove_abandoned(2) == abandoned.objects


def test_an_edited_configuration_is_archived_when_the_store_is_opened(tmp_path: Path) -> None:
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.wait_archived()
    config = archived.root / "quire.toml"
    archived.reopen()
    archived.wait_archived()
    puts = archived.archiver.traffic.puts
    assert puts == 0, "an unchanged configuration is not archived again"
    archived.close()
    config.write_text(config.read_text() + "\n# by hand\n")
    archived.store = archived.open()
    archived.wait_archived()
    archived.restored_contents("edited")
    assert "# by hand" in (archived.home / "edited" / "quire.toml").read_text()
    archived.close()


def test_an_owner_that_was_sealed_before_it_archived_anything_is_not_listed(tmp_path: Path) -> None:
    """Its log is a single seal. The list suggested a restore of it, which has nothing to restore."""
    archived = ArchivedStore(tmp_path)
    fill(archived.store, 0)
    archived.close()
    archived.restore("claimed", takeover=True)
    successor = archived.restore("successor", takeover=True)
    with closing(open_store(str(archived.bucket))) as bucket:
        assert owner_log(bucket, archived.store_id, 2).seal is not None
        assert abandoned_epochs(bucket, archived.store_id) == []
        assert reach(bucket, archived.store_id).abandoned == ()
    with archived.open(successor) as store:
        assert store.heavy.audit_archive(runner="threads").is_sound
