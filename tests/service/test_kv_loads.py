"""Loads into key-value sets through a client: ids, publishing once, dropping; and leased versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import quire
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.files import OsDisk
from quire.lsm.bulk import BulkWriter, LoadTarget
from quire.lsm.table_options import TableOptions
from quire.lsm.verify import problems
from quire.service import loads as kv_loads
from quire.service.client import Client
from quire.service.tickets import KV_IDS, TableDestination, TakeIds
from quire.store.store import Store

QUIET = StoreSettings(maintenance=MaintenanceSettings(enabled=False))
LOAD = 77


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with quire.open(tmp_path / "store", settings=QUIET) as owner:
        owner.kv("cart", create=True).put(b"a", b"before")
        yield owner
        for kv in owner.kvs.databases().values():
            assert list(problems(kv)) == []
        assert owner.manifest.check() == []


@pytest.fixture
def client(store: Store) -> Iterator[Client]:
    store.serve()
    with quire.connect(store.path) as connected:
        yield connected


def take(
    client: Client, count: int = 2, *, load: int = LOAD, database: str = "cart", create: bool = False
) -> TableDestination:
    destination: TableDestination = client._channel.ask(KV_IDS, TakeIds(load, database, count, create))
    return destination


def written(destination: TableDestination, rows: dict[bytes, bytes]) -> list[int]:
    ids = iter(destination.ids)
    target = LoadTarget(
        directory=destination.directory,
        lsn=destination.lsn,
        table_bytes=destination.table_bytes,
        options=TableOptions(compression="zstd"),
    )
    writer = BulkWriter(OsDisk(), target, lambda count: [next(ids) for _ in range(count)])
    writer.add(pa.array(list(rows), pa.binary()), pa.array(list(rows.values()), pa.binary()))
    return writer.finish()


def test_tasks_get_distinct_ids_and_one_lsn(store: Store, client: Client) -> None:
    shelves = [take(client, 3), take(client, 3), take(client, 1, load=LOAD + 1)]
    ids = [sst_id for destination in shelves for sst_id in destination.ids]
    assert len(set(ids)) == 7
    assert shelves[0].lsn == shelves[1].lsn < shelves[2].lsn
    assert store.kv("cart").loading == {shelves[0].lsn, shelves[2].lsn}
    for load in (LOAD, LOAD + 1):
        client.drop_tables(load)
    assert not store.kv("cart").loading


def test_a_load_is_published_once_however_often_it_is_requested(store: Store, client: Client) -> None:
    ids = written(take(client), {b"a": b"1", b"b": b"2"})
    assert [client.publish_tables(LOAD, "cart", ids) for _ in range(3)] == [2, 2, 2]
    assert dict(store.kv("cart").scan()) == {b"a": b"1", b"b": b"2"}
    with pytest.raises(quire.NotFound, match="has ended"):
        take(client)


def test_a_restarted_owner_answers_for_published_loads_and_refuses_lost_ones(tmp_path: Path) -> None:
    path = tmp_path / "other"
    with quire.open(path, settings=QUIET) as store:
        store.kv("cart", create=True)
        store.serve()
        with quire.connect(path) as client:
            done = written(take(client), {b"a": b"1"})
            client.publish_tables(LOAD, "cart", done)
            lost = written(take(client, load=LOAD + 1), {b"b": b"1"})
    with quire.open(path, settings=QUIET) as store:
        store.serve()
        with quire.connect(path) as client:
            assert client.publish_tables(LOAD, "cart", done) == 1
            with pytest.raises(quire.NotFound, match="not running"):
                client.publish_tables(LOAD + 1, "cart", lost)
            with pytest.raises(quire.NotFound, match="has ended"):
                take(client)
            fresh = take(client, load=LOAD + 1)
            with pytest.raises(quire.InvalidInput, match="do not belong to this load"):
                client.publish_tables(LOAD + 1, "cart", [*written(fresh, {b"c": b"1"}), *lost])
            client.drop_tables(LOAD + 1)
            assert dict(store.kv("cart").scan()) == {b"a": b"1"}


def test_dropping_a_load_removes_its_files_and_can_be_repeated(store: Store, client: Client) -> None:
    ids = written(take(client), {b"x": b"1"})
    for _ in range(2):
        client.drop_tables(LOAD)
    assert not any(Path(store.kv("cart").home.sst(sst_id)).exists() for sst_id in ids)
    with pytest.raises(quire.NotFound):
        client.publish_tables(LOAD, "cart", ids)


def test_an_abandoned_load_is_dropped(
    store: Store, client: Client, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    take(client)
    monkeypatch.setattr(kv_loads, "IDLE_SECONDS", 0.0)
    other = take(client, load=LOAD + 1)
    assert store.kv("cart").loading == {other.lsn}
    assert "kv.load_idle" in capfd.readouterr().err
    client.drop_tables(LOAD + 1)


def test_invalid_loads_are_refused(store: Store, client: Client) -> None:
    for count in (0, kv_loads.IDS_MAX + 1):
        with pytest.raises(quire.InvalidInput, match="can take 1"):
            take(client, count)
    with pytest.raises(quire.UnknownDatabase):
        take(client, database="absent")
    assert take(client, database="absent", create=True).lsn == 1
    with pytest.raises(quire.InvalidInput, match="to one database"):
        take(client, database="cart")
    client.drop_tables(LOAD)
    store.create("shop", "pages")
    with pytest.raises(quire.WrongKind):
        take(client, load=5, database="shop")
    assert client.publish_tables(6, "new", [], create=True) == 0, "a load without rows also creates the database"
    assert client.database("new").kind.name == "LSM"


def test_versions_are_leased_and_expire(store: Store, client: Client) -> None:
    view = client.lend_kv("cart", 60)
    version = view.version
    assert (version.lsn, len(version.sst_ids)) == (1, 1)
    assert client.snapshots("cart") == []
    assert Path(version.directory, "sst", f"{version.sst_ids[0]:06d}.sst").exists()
    store.snapshot("cart", "monday")
    assert client.kv_version("cart", "monday").sst_ids == version.sst_ids
    with pytest.raises(quire.UnknownSnapshot):
        client.kv_version("cart", "absent")
    store.kvs.sweep()
    assert Path(version.directory).exists(), "it is being read"
    client.renew_lease(view.lease_id)
    client.release_lease(view.lease_id)
    store.kvs.sweep()
    assert not Path(version.directory).exists()
    assert Path(client.kv_version("cart", "monday").directory).exists()
    assert store.kv("cart").get(b"a") == b"before"
