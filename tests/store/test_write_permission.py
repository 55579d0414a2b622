"""Two copies of a store on one bucket: one of them goes on, the other says why not (A2)."""

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
    """A place that is in no store's directory."""
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


def put_some(store: Store, number: int) -> None:
    """A row, and an object that holds it."""
    insert(store, number)
    assert store.checkpoint("shop", runner="threads").record.state is JobState.SUCCEEDED


def rows(store: Store) -> list[int]:
    with store.sqlite("shop") as db:
        found = db.execute("select n from item order by n").fetchall()
    return [n for (n,) in found]  # type: ignore[misc]  # they are integers


@pytest.fixture
def pair(tmp_path: Path, settings: StoreSettings) -> Iterator[tuple[Path, Path]]:
    """A store with an object in the bucket, and a copy of its directory."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    with quire.open(first, settings=settings) as store:
        assert store.info().owner_state == "unconfirmed"
        put_some(store, 1)
        info = store.info()
        assert (info.owner_state, info.owner_epoch, info.owner_session) == ("confirmed", 1, 1)
    shutil.copytree(first, copy)
    yield first, copy
    for path in (first, copy):
        with quire.open(path, "r") as reader:
            assert reader.manifest.check() == []


def test_a_copy_behind_its_original_writes_nothing_and_says_what_to_do(
    pair: tuple[Path, Path], settings: StoreSettings, bucket: str
) -> None:
    """On the old code both put under the same names, and the abandoned plan of one deleted the other's chunk."""
    first, copy = pair
    with quire.open(first, settings=settings) as store:
        put_some(store, 2)
    before = objects(bucket)
    with quire.open(copy, settings=settings) as store:
        insert(store, 3)  # opening asks no bucket, and the store works
        with pytest.raises(StoreFenced, match="another owner") as caught:
            put_some(store, 4)
        assert "quire takeover" in caught.value.hint
        assert store.info().owner_state == "fenced"
        with pytest.raises(StoreUnusable):
            store.create("more", "pages")
        with pytest.raises(Exception, match="I/O"):
            insert(store, 5)
    assert objects(bucket) == before, "nothing was put, replaced or removed"
    with pytest.raises(StoreFenced, match="another owner"):
        quire.open(copy, settings=settings)
    with quire.open(copy, "r", settings=settings) as reader:
        assert [each.name for each in reader.databases()] == ["shop"]
        assert reader.info().owner_state == "fenced"
    with quire.open(first, settings=settings) as store:
        assert rows(store) == [1, 2]


def test_a_copy_that_is_first_fences_the_running_original(
    pair: tuple[Path, Path], settings: StoreSettings, bucket: str
) -> None:
    first, copy = pair
    clock = ManualClock()
    with quire.open(first, settings=settings, clock=clock) as original:
        put_some(original, 2)
        os.system(f"rm -rf {copy} && cp -r {first} {copy}")
        with quire.open(copy, settings=settings) as store:
            put_some(store, 3)
            before = objects(bucket)
            clock.advance(61)
            insert(original, 4)
            with pytest.raises(StoreFenced, match=r"process \d+ on"):
                original.checkpoint("shop", runner="threads")
            assert objects(bucket) == before
            assert original.info().owner_state == "fenced"
            put_some(store, 5)
            assert rows(store) == [1, 2, 3, 5]


def test_a_fenced_owner_deletes_nothing(pair: tuple[Path, Path], settings: StoreSettings, bucket: str) -> None:
    """Within the minute in which a put asks nobody, a batch of deletions does."""
    first, copy = pair
    with quire.open(first, settings=settings) as original:
        put_some(original, 2)
        os.system(f"rm -rf {copy} && cp -r {first} {copy}")
        with quire.open(copy, settings=settings) as store:
            put_some(store, 3)
            before = objects(bucket)
            original.drop("shop")
            with pytest.raises(StoreFenced):
                original.maintain()
            assert objects(bucket) == before
            assert rows(store) == [1, 2, 3]


def test_a_takeover_begins_an_epoch_and_the_former_owner_ends(
    pair: tuple[Path, Path], settings: StoreSettings, bucket: str
) -> None:
    first, copy = pair
    clock = ManualClock()
    with quire.open(first, settings=settings, clock=clock) as former:
        put_some(former, 2)
        before = objects(bucket)
        with quire.open(copy, settings=settings, takeover=True) as store:
            info = store.info()
            assert (info.owner_state, info.owner_epoch, info.owner_session) == ("confirmed", 2, 1)
            put_some(store, 3)
            after = objects(bucket)
            assert {name: after.get(name) for name in before} == before, "nothing of the former owner was touched"
            insert(former, 4)
            clock.advance(61)
            with pytest.raises(StoreFenced) as caught:
                former.checkpoint("shop", runner="threads")
            assert caught.value.where["successor"] == "00000002.00000001"
            assert objects(bucket) == after
            assert rows(store) == [1, 3]
    with quire.open(copy, settings=settings) as store:
        put_some(store, 5)
        assert store.info().owner_session == 2
    with pytest.raises(StoreFenced):
        quire.open(first, settings=settings)
    with quire.open(first, settings=settings, takeover=True) as store:  # and back again
        put_some(store, 6)
        assert store.info().owner_epoch == 3


def test_a_store_with_its_objects_inside_needs_no_session(tmp_path: Path) -> None:
    for url in ("", "data/objects", str(tmp_path / "s" / "own"), f"memory://{tmp_path.name}"):
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        with quire.open(tmp_path / "s", settings=StoreSettings(object_store=url, maintenance=QUIET)) as store:
            put_some(store, 1)
            assert store.info().owner_state == "not needed"
        assert not (tmp_path / "s" / "owner.json").exists()
        with pytest.raises(InvalidInput, match="nothing to take over"):
            quire.open(tmp_path / "s", takeover=True)
        assert_sound(tmp_path / "s")
    with pytest.raises(ReadOnly):
        quire.open(tmp_path / "s", "r", takeover=True)


def test_a_link_that_leads_outside_is_outside(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    quire.open(tmp_path / "s", settings=StoreSettings(maintenance=QUIET)).close()
    (tmp_path / "s" / "objects").symlink_to(tmp_path / "elsewhere")
    with quire.open(tmp_path / "s", settings=StoreSettings(maintenance=QUIET)) as store:
        put_some(store, 1)
        assert store.info().owner_state == "confirmed"


def test_a_bucket_out_of_reach_lets_the_store_work_and_is_tried_again(
    tmp_path: Path, settings: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = [True]

    class Away(GuardedStore):
        def list_pages(self, *given: Any, **options: Any) -> Any:
            if away:
                raise ObjectStoreUnavailable("no answer")
            return self.inner.list_pages(*given, **options)

    def opened(url: str, **given: Any) -> Any:
        return Away(open_store(url, **given), lambda: None, lambda: None)

    monkeypatch.setattr("quire.store.write_permission.open_store", opened)
    clock = ManualClock()
    with quire.open(tmp_path / "s", settings=settings, clock=clock) as store:
        insert(store, 1)
        store.stream("log", create=True).append(b"one").result()
        store.kv("keys", create=True).put(b"a", b"1")
        job = store.checkpoint("shop", runner="threads")
        assert job.record.state is JobState.PENDING, "tried again, as whatever meets a bucket that is away"
        assert "no answer" in job.record.error
        assert store.info().owner_state == "unconfirmed"
        insert(store, 2)
        away.clear()
        clock.advance(3600)
        store.worker.drain()
        assert store.manifest.jobs.get(job.job_id).record.state is JobState.SUCCEEDED
        assert store.info().owner_state == "confirmed"
        assert rows(store) == [1, 2]


def test_a_damaged_owner_file_keeps_the_store_from_being_written_not_from_being_read(
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
        put_some(store, 2)
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
        put_some(store, 1)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    with quire.open(tmp_path / "first", settings=settings) as store:
        put_some(store, 2)
        assert store.info().owner_session == 2
    with quire.open(tmp_path / "copy", settings=settings) as store, pytest.raises(StoreFenced):
        put_some(store, 3)
    with quire.open(tmp_path / "copy", settings=settings, takeover=True) as store:
        put_some(store, 3)
        assert (store.info().owner_epoch, store.info().owner_state) == (2, "confirmed")
    with quire.open(tmp_path / "first", settings=settings) as store, pytest.raises(StoreFenced):
        put_some(store, 4)
