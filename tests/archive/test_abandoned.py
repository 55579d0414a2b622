"""Owner epochs that the store's history does not contain are listed, and removed only by name (A3)."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

from quire.archive.clones import CloneRegistration, register
from quire.archive.window import abandoned_epochs
from quire.core.errors import ForeignObject, NotFound, StillReferenced
from quire.durable.object_names import epoch_prefix
from quire.objects.api import list_objects
from quire.objects.open import open_store
from quire.store.heavy import audit_bucket
from quire.testing.clock import ManualClock
from tests.archive.world import WAIT, World, contents, fill


def branched(tmp_path: Path) -> tuple[World, Path]:
    """A store whose second owner was given up: (its world, the directory of the third owner)."""
    clock = ManualClock(4_000_000_000_000)
    w = World(tmp_path, clock=clock)
    fill(w.store, 0)
    w.archived()
    moment = clock.now_ms()
    clock.advance(10)
    w.close()
    second = w.restore("second", takeover=True)
    with w.open(second) as store:
        fill(store, 100)
        store.checkpoint("shop")
        assert store.archive is not None
        store.archive.wait(WAIT)
    clock.advance(10)
    third = w.restore("third", at_ms=moment)
    with w.open(third, takeover=True, discard=True) as store:
        fill(store, 200)
        assert store.archive is not None
        store.archive.wait(WAIT)
    return w, third


def test_an_abandoned_epoch_is_listed_and_goes_by_its_name(tmp_path: Path) -> None:
    w, third = branched(tmp_path)
    with closing(open_store(str(w.bucket))) as bucket, w.open(third) as store:
        (left,) = abandoned_epochs(bucket, w.store_id)
        assert left.owner_epoch == 2
        data = epoch_prefix(w.store_id, 2)
        assert list(list_objects(bucket, data))
        expected = contents(store)
        for epoch in (1, 3, 4):
            with pytest.raises(NotFound, match="no such abandoned"):
                store.heavy.remove_abandoned(epoch)
        assert store.heavy.remove_abandoned(2) == left.objects
        assert abandoned_epochs(bucket, w.store_id) == []
        assert not list(list_objects(bucket, data))
        assert not list(list_objects(bucket, f"{w.store_id}/archive/00000002"))
        assert contents(store) == expected
    assert w.look() == expected
    assert audit_bucket(str(w.bucket), store_id=w.store_id).is_sound


def test_an_epoch_of_the_line_is_never_taken_for_an_abandoned_one(tmp_path: Path) -> None:
    w, third = branched(tmp_path)
    with w.open(third) as store:
        collector, url = store.context.collector, store.objects_url
        for epoch in (1, 3):
            with pytest.raises(ForeignObject, match="part of this store's history"):
                collector.delete_abandoned(url, epoch_prefix(w.store_id, epoch), [])
        with pytest.raises(ForeignObject, match="part of this store's history"):
            collector.delete_abandoned(url, w.store_id, [])
        with pytest.raises(ForeignObject, match="another owner epoch"):
            collector.delete_abandoned(url, epoch_prefix(w.store_id, 2), [f"{w.store_id}/e/00000003/x"])


def test_a_clone_of_an_abandoned_moment_keeps_it(tmp_path: Path) -> None:
    w, third = branched(tmp_path)
    assert w.clock is not None
    point = w.clock.now_ms()
    with closing(open_store(str(w.bucket))) as bucket:
        (left,) = abandoned_epochs(bucket, w.store_id)
    assert left.ended_at_ms < point
    with closing(open_store(str(w.bucket))) as bucket:
        clone = CloneRegistration(clone_id=str(uuid4()), position="2.1", at_ms=left.ended_at_ms, registered_at_ms=point)
        register(bucket, w.store_id, clone)
    with w.open(third) as store, pytest.raises(StillReferenced, match="a clone may read"):
        store.heavy.remove_abandoned(2)


def test_an_edited_configuration_is_archived_when_the_store_is_opened(tmp_path: Path) -> None:
    w = World(tmp_path)
    fill(w.store, 0)
    w.archived()
    config = w.root / "quire.toml"
    w.reopen()
    w.archived()
    puts = w.archiver.traffic.puts
    assert puts == 0, "what was not edited is not shipped again"
    w.close()
    config.write_text(config.read_text() + "\n# by hand\n")
    w.store = w.open()
    w.archived()
    w.look("edited")
    assert "# by hand" in (w.home / "edited" / "quire.toml").read_text()
    w.close()
