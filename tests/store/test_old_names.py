"""Stores from before object names began with the store's identity: only the store with the claim sweeps them (A1)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli import main
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.durable.object_names import LEGACY_OWNER
from quire.lsm.backup import FORMER_HOME
from quire.manifest import tables as t
from quire.manifest.reads import BORN_WITH_EPOCHS
from quire.manifest.records import JobKind
from quire.objects.local import LocalStore
from quire.objects.open import open_store
from quire.objects.remote import RemoteStore
from quire.stream.tiers import Tiers
from quire.testing.clock import ManualClock
from tests.objects.conftest import s3_server
from tests.store.test_shared_bucket import (
    EVERY_OBJECT_IS_OLDER,
    HOUR,
    assert_complete,
    clean_up,
    clock,
    fill,
    objects,
    settings,
    url,
)

__all__ = ["clock", "s3_server", "url"]


def old_key(stream_id: int, segment_id: int) -> str:
    return object_key(ArtifactKey(stream_id, ArtifactKind.WAL, segment_id, 0))


def make_old(path: Path, url: str, clock: ManualClock, word: str = "") -> None:
    """A store as older code left it: no owner epoch, no session, objects without a prefix. With `word`, it has
    objects that contain it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.manifest.store.ManifestStore.ensure_owner_epoch", lambda _: None)
        patch.setattr("quire.store.write_permission.ObjectRights.before_put", lambda _: None)
        patch.setattr(Tiers, "_upload_key", lambda tiers, segment: old_key(tiers._files.stream_id, segment.segment_id))
        with quire.open(path, settings=settings(url), clock=clock) as store:
            txn = store.manifest.env._env.begin(write=True)
            txn.delete(t.META.key.pack(BORN_WITH_EPOCHS), db=store.manifest.env.handles[t.META.name])
            txn.commit()
            if word:
                fill(store, word, FORMER_HOME)
                store.manifest.reserve_generation(store.database("shop").db_id)


ORPHAN = object_key(ArtifactKey(1, ArtifactKind.BASE, 900, 2))
"""Without a prefix, and of a generation under which nothing was published."""


def without_prefix(url: str) -> set[str]:
    return {key for key in objects(url) if re.match("([0-9a-f]{8}|manifest)/", key)}


@pytest.fixture
def old(tmp_path: Path, url: str, clock: ManualClock) -> Path:
    """An old store with objects of every kind, and an orphan."""
    make_old(tmp_path / "a", url, clock, "ash")
    open_store(url).put(ORPHAN, b"orphan")
    assert len(without_prefix(url)) > 3
    assert not [key for key in objects(url) if "/e/" in key]
    return tmp_path / "a"


def test_an_old_store_without_the_claim_reports_and_deletes_nothing(
    tmp_path: Path, url: str, clock: ManualClock, old: Path
) -> None:
    """Hazard: of two old stores in one bucket, either would sweep the other's objects."""
    make_old(tmp_path / "b", url, clock)
    with quire.open(tmp_path / "b", settings=settings(url), clock=clock) as other:
        fill(other, "birch")
        assert other.feed.store_id().encode() in objects(url)[LEGACY_OWNER]
    before = {key: body for key, body in objects(url).items() if key in without_prefix(url)}
    with quire.open(old, settings=settings(url), clock=clock) as store:
        with store.sqlite("shop") as db:
            assert db.execute("select count(*) from t").fetchone() == (200,)
        result = store.heavy.sweep(delete=True, grace_seconds=EVERY_OBJECT_IS_OLDER).result
        assert [orphan["object"] for orphan in result["orphans"]] == [ORPHAN], "reported"
        assert (result["orphaned"], result["deleted"]) == (1, 0), "and not deleted"
        for name in ("shop", "clicks"):
            store.drop(name)
        for _ in range(4):
            clock.advance(HOUR)
            store.worker.drain()
        store.streams.sweep()
        errors = [job.record.error for job in store.manifest.jobs.jobs() if job.record.kind is JobKind.DELETE]
        assert any("another store has claimed" in error for error in errors)
    remaining = objects(url)
    assert {key: remaining.get(key) for key in before} == before


def test_an_old_store_with_the_claim_reads_and_deletes_what_it_wrote(url: str, clock: ManualClock, old: Path) -> None:
    with quire.open(old, settings=settings(url), clock=clock) as store:
        assert store.heavy.sweep(grace_seconds=EVERY_OBJECT_IS_OLDER).result["orphaned"] == 1
        assert ORPHAN in objects(url), "deletion was not requested"
        assert store.heavy.sweep(delete=True, grace_seconds=EVERY_OBJECT_IS_OLDER).result["deleted"] == 1
        assert ORPHAN not in objects(url)
        fill(store, "ash")
        assert [key for key in objects(url) if "/e/00000001/" in key], "new objects are below the store's own prefix"
        assert_complete(store, "ash")
        for name in ("shop", "clicks"):
            store.drop(name)
        clean_up(store, clock)
        store.streams.sweep()
    assert not without_prefix(url)


def test_the_location_of_an_old_store_is_listed_by_database_and_never_as_a_whole(
    url: str, clock: ManualClock, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other stores may have millions of objects there."""
    prefixes: list[str] = []
    for kind in (LocalStore, RemoteStore):

        def recorded(self: Any, prefix: str = "", *, inner: Any = kind.list_pages, **options: Any) -> Any:
            prefixes.append(prefix)
            return inner(self, prefix, **options)

        monkeypatch.setattr(kind, "list_pages", recorded)
    with quire.open(old, settings=settings(url), clock=clock) as store:
        store_id, last = store.feed.store_id(), max(database.db_id for database in store.databases())
        store.heavy.sweep(delete=True, grace_seconds=EVERY_OBJECT_IS_OLDER)
        store.drop("clicks")
        store.streams.sweep()
        fill(store, "ash")
        store.heavy.verify()
    databases = {f"{number:08x}" for number in range(1, last + 2)}
    assert databases & set(prefixes)
    rest = {prefix for prefix in prefixes if prefix.split("/")[0] not in {store_id, *databases}}
    assert {prefix.split("/")[0] for prefix in rest} <= {"manifest", FORMER_HOME}
    assert "manifest" not in rest


def test_an_old_backup_of_a_key_value_database_is_restored_by_command(
    url: str, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [key for key in objects(url) if key.startswith("kv/cart/backups/")]
    (old / "quire.toml").write_text(f'object_store = "{url}"\n')
    before = objects(url)
    store_option = ["--store", str(old)]
    assert main.run(["kv", "backups", "cart", *store_option, "--json"]) == 0
    assert '"label": "cart"' in capsys.readouterr().out
    assert main.run(["kv", "restore", "again", "--label", "cart", *store_option]) == 0
    assert main.run(["kv", "get", "again", "word", *store_option]) == 0
    assert "ash" in capsys.readouterr().out
    assert objects(url).items() >= before.items()
