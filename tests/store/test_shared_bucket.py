"""Several stores in one bucket: none writes, lists or deletes an object of another (A1, A3)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import Corruption, ForeignObject, ObjectStoreUnavailable, StoreFenced
from quire.core.settings import MaintenanceSettings, StoreSettings, StreamSettings
from quire.durable.failpoints import armed
from quire.durable.object_names import kv_backups_prefix
from quire.lsm.backup import back_up, read_backup
from quire.manifest.namespaces import collector_of
from quire.manifest.records import JobKind
from quire.objects.api import list_objects
from quire.objects.guarded import GuardedStore
from quire.objects.open import open_store
from quire.testing.clock import ManualClock
from tests.objects.conftest import fresh_url, s3_server

__all__ = ["s3_server"]

HOUR = 3_600.0
EVERY_OBJECT_IS_OLDER = -10 * 365 * 86_400.0
"""A grace period that every object has exceeded."""


def settings(url: str) -> StoreSettings:
    return StoreSettings(
        object_store=url,
        maintenance=MaintenanceSettings(enabled=False, delete_grace_seconds=60.0),
        stream=StreamSettings(segment_bytes=4096),
    )


def objects(url: str) -> dict[str, bytes]:
    """All objects except the sessions of owners."""
    store = open_store(url)
    return {info.key: store.get(info.key) for info in list_objects(store) if "/owner/" not in info.key}


def fill(store: quire.Store, word: str, home: str = "") -> None:
    """A checkpointed page database, a stream with uploaded segments, a backup of a key-value set."""
    with store.sqlite("shop", create=True) as db:
        db.execute("create table if not exists t (word)")
        db.executemany("insert into t values (?)", [(f"{word} {number}",) for number in range(200)])
    store.checkpoint("shop")
    clicks = store.stream("clicks", create=True)
    clicks.append([f"{word} {number}".encode() * 20 for number in range(60)]).result()
    clicks.seal()
    clicks.upload()
    clicks.ledger.log.rotate()
    clicks.ledger.log.upload()
    cart = store.kv("cart", create=True)
    cart.put(b"word", word.encode())
    back_up(cart, store.objects, "cart", home or kv_backups_prefix(store.feed.store_id()))


def assert_complete(store: quire.Store, word: str) -> None:
    """Everything in a store is present, read without a cache."""
    with store.sqlite("shop") as db:
        words = [row[0] for row in db.execute("select word from t")]
    assert words
    assert {text.split()[0] for text in words} == {word}
    clicks = store.stream("clicks")
    for segment in clicks.ledger.view.sealed:
        assert store.objects.head(segment.key).size_bytes > 0
    home = kv_backups_prefix(store.feed.store_id())
    backup = read_backup(store.objects, "cart", home=home)
    assert all(store.objects.head(table.key).size_bytes for table in backup.tables)
    store.heavy.verify()
    assert store.heavy.damaged() == []


def clean_up(store: quire.Store, clock: ManualClock) -> None:
    """Run everything that deletes: garbage of checkpoints, an abandoned plan, retention, sweeps with the widest
    permission."""
    for _ in range(4):
        clock.advance(HOUR)
        store.worker.drain()
    store.heavy.sweep(delete=True, grace_seconds=EVERY_OBJECT_IS_OLDER)
    clock.advance(HOUR)
    store.worker.drain()


@pytest.fixture(params=["path", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket outside every store's directory."""
    if request.param == "path":
        return str(tmp_path / "bucket")
    host, port = request.getfixturevalue("s3_server")
    for name, value in {
        "AWS_ENDPOINT": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    return fresh_url()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pair(tmp_path: Path, url: str, clock: ManualClock) -> Iterator[tuple[quire.Store, quire.Store]]:
    with (
        quire.open(tmp_path / "a", settings=settings(url), clock=clock) as one,
        quire.open(tmp_path / "b", settings=settings(url), clock=clock) as other,
    ):
        yield one, other


def test_two_stores_in_one_bucket_do_not_affect_each_other(
    pair: tuple[quire.Store, quire.Store], url: str, clock: ManualClock
) -> None:
    """Hazard: object names did not contain the store, so two stores wrote, adopted and deleted each other's objects."""
    one, other = pair
    fill(one, "ash")
    fill(other, "birch")
    own_keys = {key for key in objects(url) if key.startswith(one.feed.store_id())}
    other_keys = objects(url).keys() - own_keys
    assert own_keys
    assert {key.split("/")[0] for key in other_keys} == {other.feed.store_id()}
    own_objects = {key: body for key, body in objects(url).items() if key in own_keys}
    fill(other, "birch")  # a second checkpoint turns the first one's chunks into garbage
    for name in ("shop", "clicks"):
        other.drop(name)
    clean_up(other, clock)
    other.streams.sweep()
    remaining = objects(url)
    assert {key: body for key, body in remaining.items() if key in own_keys} == own_objects
    assert not [key for key in remaining if key.startswith(f"{other.feed.store_id()}/e/")], (
        "its own garbage was deleted"
    )
    assert_complete(one, "ash")


def test_an_abandoned_plan_deletes_what_it_wrote_and_nothing_of_another_store(
    pair: tuple[quire.Store, quire.Store], url: str, clock: ManualClock
) -> None:
    """Hazard: an abandoned plan of B deleted A's only copy, which had the same name."""
    one, other = pair
    fill(one, "ash")
    before = objects(url)
    with other.sqlite("shop", create=True) as db:
        db.execute("create table t (word)")
    job_id = other.manifest.jobs.enqueue(JobKind.CHECKPOINT, other.database("shop").db_id)
    with armed("jobs.checkpoint.written", "1*raise:EIO"):
        other.worker.drain()
    assert objects(url).keys() > before.keys(), "it has written objects without publishing them"
    other.manifest.jobs.cancel(job_id)
    other.drop("shop")
    clean_up(other, clock)
    assert objects(url) == before
    assert_complete(one, "ash")


def test_a_copied_directory_that_takes_over_writes_no_object_of_its_original(
    tmp_path: Path, url: str, clock: ManualClock
) -> None:
    """Hazard: a copy of a store on its old bucket wrote and collected the original's objects."""
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as one:
        fill(one, "ash")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with quire.open(tmp_path / "copy", settings=settings(url), clock=clock) as copy:
        assert copy.manifest.begin_owner_epoch() == 2
        before = {key: body for key, body in objects(url).items() if "/e/00000001/" in key}
        fill(copy, "ash")
        assert objects(url).items() >= before.items(), "the original's objects are unchanged"
        assert [key for key in objects(url) if "/e/00000002/" in key], "it writes below its own epoch"
        assert_complete(copy, "ash")


def test_a_successor_reads_objects_of_earlier_epochs_and_deletes_them_once_confirmed(
    tmp_path: Path, url: str, clock: ManualClock
) -> None:
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as store:
        fill(store, "ash")
        former = {key for key in objects(url) if "/e/00000001/" in key}
        store.manifest.begin_owner_epoch()
        assert_complete(store, "ash")
        refusing = collector_of(store.manifest, store.objects_url, open_store)
        with pytest.raises(ForeignObject, match="earlier owner"):
            refusing.delete(store.objects_url, former)
        assert objects(url).keys() >= former
        queried: list[int] = []
        collector_of(store.manifest, store.objects_url, open_store, confirm=lambda: queried.append(1)).delete(
            store.objects_url, former
        )
        assert queried
        assert not objects(url).keys() & former


def test_a_foreign_name_is_refused_and_nothing_of_the_call_is_deleted(
    pair: tuple[quire.Store, quire.Store], url: str
) -> None:
    one, other = pair
    fill(one, "ash")
    fill(other, "birch")
    before = objects(url)
    collector = collector_of(one.manifest, one.objects_url, open_store, confirm=lambda: None)
    own_key = next(key for key in before if key.startswith(f"{one.feed.store_id()}/e/"))
    for foreign in (next(key for key in before if key.startswith(other.feed.store_id())), "README", "00000001/x"):
        with pytest.raises(ForeignObject):
            collector.delete(one.objects_url, [own_key, foreign])
    assert objects(url) == before


def drop_all(store: quire.Store, clock: ManualClock) -> None:
    """Turn everything into garbage that is old enough to delete."""
    for name in ("shop", "clicks", "cart"):
        store.drop(name)
    clean_up(store, clock)
    store.streams.sweep()


def test_a_stale_copy_deletes_nothing_of_its_original(tmp_path: Path, url: str, clock: ManualClock) -> None:
    """Hazard: a copy that dropped a database and ran maintenance deleted the original's only chunk."""
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as one:
        fill(one, "ash")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as one:
        fill(one, "ash")
        before = objects(url)
        with quire.open(tmp_path / "copy", settings=settings(url), clock=clock) as copy, pytest.raises(StoreFenced):
            drop_all(copy, clock)
        assert objects(url) == before
        assert_complete(one, "ash")


def test_an_unconfirmed_copy_deletes_nothing_of_its_original(
    tmp_path: Path, url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot find out whether it is stale: listing the owners fails, although deletes would work."""
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as one:
        fill(one, "ash")
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    before = objects(url)

    class NoOwners(GuardedStore):
        def list_pages(self, *arguments: Any, **options: Any) -> Any:
            raise ObjectStoreUnavailable("no answer")

    def opened(url: str, **options: Any) -> Any:
        return NoOwners(open_store(url, **options), lambda: None, lambda: None)

    with monkeypatch.context() as patch:
        patch.setattr("quire.store.write_permission.open_store", opened)
        with quire.open(tmp_path / "copy", settings=settings(url), clock=clock) as copy:
            for name in ("shop", "clicks"):
                copy.drop(name)
            for _ in range(4):
                clock.advance(HOUR)
                copy.worker.drain()
            jobs = [job.record for job in copy.manifest.jobs.jobs() if job.record.kind is JobKind.DELETE]
            assert any("no answer" in record.error for record in jobs), "it has tried to list the owners"
            assert copy.info().owner_state == "unconfirmed"
    assert objects(url) == before
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as one:
        assert_complete(one, "ash")


def payloads(store: quire.Store) -> list[bytes]:
    return [record.payload for record in store.stream("clicks").read()]


def append(store: quire.Store, word: str, *, upload: bool = False, snapshot: bool = False) -> None:
    """Append records in separate segments. With `upload`, the chunk of the manifest log that records them is in tier
    2."""
    clicks = store.stream("clicks", create=True)
    clicks.append(word.encode()).result()
    clicks.seal()
    if snapshot:
        clicks.ledger.log.snapshot()
    if upload:
        clicks.ledger.log.rotate()
        clicks.ledger.log.upload()


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_log_repaired_after_two_takeovers_has_nothing_of_the_deposed_owners(
    tmp_path: Path, url: str, clock: ManualClock, snapshot: bool
) -> None:
    """Hazard: while an owner epoch had no chunk in tier 2, later writes of the former owner were accepted as its
    own."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    with quire.open(first, settings=settings(url), clock=clock) as store:
        append(store, "all", upload=True)
        append(store, "one")
    shutil.copytree(first, second)
    with quire.open(first, settings=settings(url), clock=clock) as store:
        append(store, "not two", upload=True, snapshot=snapshot)
        append(store, "nor three", upload=True)
    with quire.open(second, settings=settings(url), clock=clock, takeover=True) as store:
        append(store, "two")
    shutil.copytree(second, third)
    with quire.open(second, settings=settings(url), clock=clock) as store:
        append(store, "not three", upload=True, snapshot=snapshot)
        append(store, "nor four", upload=True)
    with quire.open(third, settings=settings(url), clock=clock, takeover=True) as store:
        append(store, "three")
        log = store.stream("clicks").ledger.log.files.directory
        assert not [key for key in objects(url) if "/e/00000003/" in key], "this epoch has no object"
    shutil.rmtree(log)
    with quire.open(third, settings=settings(url), clock=clock) as store:
        with pytest.raises(Corruption):
            store.stream("clicks")
        survey = store.streams.repair("clicks", apply=True)
        assert (survey.to_fetch, survey.lost) == ([], []), "opening has fetched the only chunk of this timeline"
        assert payloads(store) == [b"all", b"one", b"two", b"three"]
        append(store, "four", upload=True)
    with quire.open(third, settings=settings(url), clock=clock) as store:
        assert payloads(store) == [b"all", b"one", b"two", b"three", b"four"]
        store.heavy.verify()
        assert store.heavy.damaged() == []


def test_a_log_is_restored_from_a_snapshot_of_an_earlier_epoch(tmp_path: Path, url: str, clock: ManualClock) -> None:
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as store:
        append(store, "one", upload=True, snapshot=True)
        append(store, "two", upload=True)
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock, takeover=True) as store:
        assert payloads(store) == [b"one", b"two"]
        log = store.stream("clicks").ledger.log.files.directory
    shutil.rmtree(log)
    with quire.open(tmp_path / "a", settings=settings(url), clock=clock) as store:
        assert payloads(store) == [b"one", b"two"]
