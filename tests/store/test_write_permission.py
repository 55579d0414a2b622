"""Two copies of a store on one bucket: one of them continues, the other is refused with a reason (A2)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import Corruption, InvalidInput, ObjectStoreUnavailable, ReadOnly, StoreFenced, StoreUnusable
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.manifest.records import JobState
from quire.objects.guarded import GuardedStore
from quire.objects.open import open_store
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.objects.conftest import fresh_url, s3_server
from tests.store.conftest import assert_sound

__all__ = ["s3_server"]

QUIET = MaintenanceSettings(enabled=False, delete_grace_seconds=0)


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """A bucket outside every store's directory."""
    return str(tmp_path / "bucket")


@pytest.fixture
def settings(bucket: str) -> StoreSettings:
    return StoreSettings(object_store=bucket, maintenance=QUIET)


def objects(bucket: str) -> dict[str, bytes]:
    paths = [path for path in Path(bucket).rglob("*") if path.is_file() and ".tmp" not in path.parts]
    return {str(path.relative_to(bucket)): path.read_bytes() for path in paths}


def insert(store: Store, number: int) -> None:
    with store.sqlite("shop", create=True) as db:
        db.execute("create table if not exists item(n)")
        db.execute("insert into item values (?)", (number,))


def insert_and_checkpoint(store: Store, number: int) -> None:
    """Insert a row, and write an object that contains it."""
    insert(store, number)
    assert store.checkpoint("shop", runner="threads").record.state is JobState.SUCCEEDED


def rows(store: Store) -> list[int]:
    with store.sqlite("shop") as db:
        values = db.execute("select n from item order by n").fetchall()
    return [n for (n,) in values]  # type: ignore[misc]  # integers


@pytest.fixture
def pair(tmp_path: Path, settings: StoreSettings) -> Iterator[tuple[Path, Path]]:
    """A store with an object in the bucket, and a copy of its directory."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    with quire.open(first, settings=settings) as store:
        assert store.info().owner_state == "unconfirmed"
        insert_and_checkpoint(store, 1)
        info = store.info()
        assert (info.owner_state, info.owner_epoch, info.owner_session) == ("confirmed", 1, 1)
    shutil.copytree(first, copy)
    yield first, copy
    for path in (first, copy):
        with quire.open(path, "r") as reader:
            assert reader.manifest.check() == []


def test_a_stale_copy_writes_nothing_and_explains_what_to_do(
    pair: tuple[Path, Path], settings: StoreSettings, bucket: str
) -> None:
    """Both wrote objects with the same names, and an abandoned plan of one deleted the other's chunk."""
    first, copy = pair
    with quire.open(first, settings=settings) as store:
        insert_and_checkpoint(store, 2)
    before = objects(bucket)
    with quire.open(copy, settings=settings) as store:
        insert(store, 3)  # opening does not access the bucket, and the store works
        with pytest.raises(StoreFenced, match="another owner") as caught:
            insert_and_checkpoint(store, 4)
        assert "quire takeover" in caught.value.hint
        assert store.info().owner_state == "fenced"
        with pytest.raises(StoreUnusable):
            store.create("more", "pages")
        with pytest.raises(Exception, match="I/O"):
            insert(store, 5)
    assert objects(bucket) == before, "no object was written, replaced or removed"
    with pytest.raises(StoreFenced, match="another owner"):
        quire.open(copy, settings=settings)
    with quire.open(copy, "r", settings=settings) as reader:
        assert [database.name for database in reader.databases()] == ["shop"]
        assert reader.info().owner_state == "fenced"
    with quire.open(first, settings=settings) as store:
        assert rows(store) == [1, 2]


def test_a_copy_that_writes_first_fences_the_running_original(
    pair: tuple[Path, Path], settings: StoreSettings, bucket: str
) -> None:
    first, copy = pair
    clock = ManualClock()
    with quire.open(first, settings=settings, clock=clock) as original:
        insert_and_checkpoint(original, 2)
        os.system(f"rm -rf {copy} && cp -r {first} {copy}")
        with quire.open(copy, settings=settings) as store:
            insert_and_checkpoint(store, 3)
            before = objects(bucket)
            clock.advance(61)
            insert(original, 4)
            with pytest.raises(StoreFenced, match=r"process \d+ on"):
                original.checkpoint("shop", runner="threads")
            assert objects(bucket) == before
            assert original.info().owner_state == "fenced"
            insert_and_checkpoint(store, 5)
            assert rows(store) == [1, 2, 3, 5]


def test_a_fenced_owner_deletes_nothing(pair: tuple[Path, Path], settings: StoreSettings, bucket: str) -> None:
    """For a minute, writes do not check for another owner; a batch of deletions does."""
    first, copy = pair
    with quire.open(first, settings=settings) as original:
        insert_and_checkpoint(original, 2)
        os.system(f"rm -rf {copy} && cp -r {first} {copy}")
        with quire.open(copy, settings=settings) as store:
            insert_and_checkpoint(store, 3)
            before = objects(bucket)
            original.drop("shop")
            with pytest.raises(StoreFenced):
                original.maintain()
            assert objects(bucket) == before
            assert rows(store) == [1, 2, 3]


def test_a_takeover_starts_an_epoch_and_the_former_owner_is_fenced(
    pair: tuple[Path, Path], settings: StoreSettings, bucket: str
) -> None:
    first, copy = pair
    clock = ManualClock()
    with quire.open(first, settings=settings, clock=clock) as former:
        insert_and_checkpoint(former, 2)
        before = objects(bucket)
        with quire.open(copy, settings=settings, takeover=True) as store:
            info = store.info()
            assert (info.owner_state, info.owner_epoch, info.owner_session) == ("confirmed", 2, 1)
            insert_and_checkpoint(store, 3)
            after = objects(bucket)
            assert {name: after.get(name) for name in before} == before, "the former owner's objects are unchanged"
            insert(former, 4)
            clock.advance(61)
            with pytest.raises(StoreFenced) as caught:
                former.checkpoint("shop", runner="threads")
            assert caught.value.where["successor"] == "00000002.00000001"
            assert objects(bucket) == after
            assert rows(store) == [1, 3]
    with quire.open(copy, settings=settings) as store:
        insert_and_checkpoint(store, 5)
        assert store.info().owner_session == 2
    with pytest.raises(StoreFenced):
        quire.open(first, settings=settings)
    with quire.open(first, settings=settings, takeover=True) as store:  # and back
        insert_and_checkpoint(store, 6)
        assert store.info().owner_epoch == 3


def test_a_store_with_its_objects_inside_needs_no_session(tmp_path: Path) -> None:
    for url in ("", "data/objects", str(tmp_path / "s" / "own"), f"memory://{tmp_path.name}"):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        with quire.open(tmp_path / "s", settings=StoreSettings(object_store=url, maintenance=QUIET)) as store:
            insert_and_checkpoint(store, 1)
            assert store.info().owner_state == "not needed"
        assert not (tmp_path / "s" / "owner.json").exists()
        with pytest.raises(InvalidInput, match="nothing to take over"):
            quire.open(tmp_path / "s", takeover=True)
        assert_sound(tmp_path / "s")
    with pytest.raises(ReadOnly):
        quire.open(tmp_path / "s", "r", takeover=True)


def test_a_link_that_leads_outside_counts_as_outside(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    quire.open(tmp_path / "s", settings=StoreSettings(maintenance=QUIET)).close()
    (tmp_path / "s" / "objects").symlink_to(tmp_path / "elsewhere")
    with quire.open(tmp_path / "s", settings=StoreSettings(maintenance=QUIET)) as store:
        insert_and_checkpoint(store, 1)
        assert store.info().owner_state == "confirmed"


def test_a_store_works_while_its_bucket_is_unreachable_and_retries(
    tmp_path: Path, settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_unreachable = [True]

    class UnreachableStore(GuardedStore):
        def list_pages(self, *arguments: Any, **options: Any) -> Any:
            if is_unreachable:
                raise ObjectStoreUnavailable("no answer")
            return self.inner.list_pages(*arguments, **options)

    def opened(url: str, **options: Any) -> Any:
        return UnreachableStore(open_store(url, **options), lambda: None, lambda: None)

    monkeypatch.setattr("quire.store.write_permission.open_store", opened)
    clock = ManualClock()
    with quire.open(tmp_path / "s", settings=settings, clock=clock) as store:
        insert(store, 1)
        store.stream("log", create=True).append(b"one").result()
        store.kv("keys", create=True).put(b"a", b"1")
        job = store.checkpoint("shop", runner="threads")
        assert job.record.state is JobState.PENDING, "retried, like every access to an unreachable bucket"
        assert "no answer" in job.record.error
        assert store.info().owner_state == "unconfirmed"
        insert(store, 2)
        is_unreachable.clear()
        clock.advance(3600)
        store.worker.drain()
        assert store.manifest.jobs.get(job.job_id).record.state is JobState.SUCCEEDED
        assert store.info().owner_state == "confirmed"
        assert rows(store) == [1, 2]


def test_a_damaged_owner_file_prevents_writing_but_not_reading(
    pair: tuple[Path, Path], settings: StoreSettings
) -> None:
    first, _ = pair
    data = bytearray((first / "owner.json").read_bytes())
    data[20] ^= 1
    (first / "owner.json").write_bytes(data)
    with pytest.raises(Corruption, match=r"owner\.json"):
        quire.open(first, settings=settings)
    with quire.open(first, "r", settings=settings) as reader:
        assert len(reader.databases()) == 1
    with quire.open(first, settings=settings, takeover=True) as store:
        insert_and_checkpoint(store, 2)
        assert rows(store) == [1, 2]


def test_a_copy_on_s3_is_fenced_and_takes_over(
    tmp_path: Path, s3_server: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = "http://{}:{}".format(*s3_server)
    for name, value in {
        "AWS_ENDPOINT": endpoint,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    settings = StoreSettings(object_store=fresh_url(), maintenance=QUIET)
    with quire.open(tmp_path / "first", settings=settings) as store:
        insert_and_checkpoint(store, 1)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    with quire.open(tmp_path / "first", settings=settings) as store:
        insert_and_checkpoint(store, 2)
        assert store.info().owner_session == 2
    with quire.open(tmp_path / "copy", settings=settings) as store, pytest.raises(StoreFenced):
        insert_and_checkpoint(store, 3)
    with quire.open(tmp_path / "copy", settings=settings, takeover=True) as store:
        insert_and_checkpoint(store, 3)
        assert (store.info().owner_epoch, store.info().owner_state) == (2, "confirmed")
    with quire.open(tmp_path / "first", settings=settings) as store, pytest.raises(StoreFenced):
        insert_and_checkpoint(store, 4)
