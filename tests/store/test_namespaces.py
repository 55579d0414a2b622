"""All objects of a database are written to its namespace, whatever creates them (A1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.core.errors import InvalidConfig, InvalidInput, NameTaken, StillReferenced, UnknownNamespace
from quire.core.settings import MaintenanceSettings, StoreSettings, StreamSettings
from quire.durable.object_names import kv_backups_prefix
from quire.lsm.backup import back_up, read_backup
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.testing.clock import ManualClock
from tests.objects.conftest import fresh_url, s3_server

__all__ = ["s3_server"]  # a fixture

HOUR = 3_600_000
SETTINGS = StoreSettings(
    maintenance=MaintenanceSettings(enabled=False), stream=StreamSettings(hot_bytes=0, warm_bytes=0)
)


def files(directory: Path) -> set[str]:
    return (
        {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
        if directory.exists()
        else set()
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def store(tmp_path: Path, cold: Path, clock: ManualClock) -> Iterator[quire.Store]:
    with quire.open(tmp_path / "store", settings=SETTINGS, clock=clock) as opened:
        opened.namespaces.create("cold", str(cold))
        yield opened


def fill(store: quire.Store) -> None:
    """Everything that creates objects: checkpoints, WAL uploads, streams, their manifest logs, backups."""
    store.create("shop", "pages", namespace="cold")
    with store.sqlite("shop") as db:
        db.execute("create table t(x); insert into t values (1)")
    store.checkpoint("shop")
    with store.sqlite("shop") as db:
        db.execute("insert into t values (2)")
    store.snapshot("shop", "kept")
    store.view("shop", "kept", upload=True)  # segments that the snapshot needs are uploaded
    store.create("clicks", "stream", namespace="cold")
    clicks = store.stream("clicks")
    clicks.append([b"click %d" % number for number in range(100)]).result()
    clicks.seal()
    move(store)
    store.create("cart", "lsm", namespace="cold")
    cart = store.kv("cart")
    cart.put(b"k", b"v")
    back_up(cart, store.namespaces.objects_of("cart"), "cart", kv_backups_prefix(store.feed.store_id()))


def payloads(store: quire.Store) -> list[bytes]:
    return [record.payload for record in store.stream("clicks").read(1, 200)]


def move(store: quire.Store) -> None:
    clicks = store.stream("clicks")
    for _ in range(4):
        clicks.tick()
    clicks.ledger.log.rotate()
    clicks.tick()


def test_every_object_of_a_database_is_written_to_its_namespace(store: quire.Store, tmp_path: Path, cold: Path) -> None:
    """Hazard: checkpoints, streams, manifest logs and backups were written to the store's default namespace."""
    fill(store)
    kinds = {
        "base": "/base:",
        "segment": "/wal:",
        "log": "/manifest/",
        "backup": "/backups/kv/cart/",
    }
    names = files(cold)
    for kind, part in kinds.items():
        assert any(part in f"/{name}" for name in names), (kind, names)
    assert files(tmp_path / "store" / "objects") == set()
    assert all(name.startswith(store.feed.store_id()) for name in names), "the store's identity is in every name"
    assert [(info.name, info.databases) for info in store.namespaces.list()] == [("cold", ["cart", "clicks", "shop"])]
    assert store.database("shop").namespace == "cold"


def test_objects_in_a_namespace_are_read_from_there(
    store: quire.Store, tmp_path: Path, cold: Path, clock: ManualClock
) -> None:
    fill(store)
    clicks = store.stream("clicks")
    for segment in clicks.ledger.view.sealed:
        clicks.tiers.evict(segment.segment_id)
        clicks.tiers.evict(segment.segment_id, warm=True)
    store.close()
    with quire.open(tmp_path / "store", settings=SETTINGS, clock=clock) as reopened:
        assert payloads(reopened)[:2] == [b"click 0", b"click 1"]
        with reopened.sqlite("shop") as db:
            assert db.execute("select sum(x) from t").fetchone() == (3,)
        backup = read_backup(
            reopened.namespaces.objects_of("cart"), "cart", home=kv_backups_prefix(reopened.feed.store_id())
        )
        assert backup.tables
        reopened.heavy.verify()
        assert reopened.heavy.damaged() == []
        assert reopened.heavy.sweep(delete=True, grace_seconds=0).result["orphans"] == []
        assert reopened.manifest.check() == []


@pytest.mark.parametrize("part", ["/base:", "/wal:"])
def test_a_lost_object_of_a_namespace_is_detected(store: quire.Store, cold: Path, part: str) -> None:
    fill(store)
    lost = next(path for path in cold.rglob("*") if path.is_file() and part in str(path))
    lost.unlink()
    assert store.heavy.verify().result["problems"] or store.heavy.damaged()


def test_a_damaged_backup_in_a_namespace_is_reported_by_its_key(store: quire.Store, cold: Path) -> None:
    """Hazard: the key was treated as a path and shown relative to the store's directory."""
    fill(store)
    tables = [cold / name for name in files(cold) if "/backups/kv/cart/" in name and not name.endswith(".json")]
    damaged = tables[0]
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    (problem,) = store.heavy.verify(runner="threads").result["problems"]
    assert problem["path"] == str(damaged.relative_to(cold))


def test_a_takeover_starts_an_epoch_in_every_namespace(
    store: quire.Store, tmp_path: Path, cold: Path, clock: ManualClock
) -> None:
    fill(store)
    store.manifest.begin_owner_epoch()
    store.close()
    with quire.open(tmp_path / "store", settings=SETTINGS, clock=clock) as reopened:
        clicks = reopened.stream("clicks")
        clicks.append(b"after").result()
        clicks.seal()
        move(reopened)
        with reopened.sqlite("shop") as db:
            db.execute("insert into t values (4)")
        reopened.checkpoint("shop")
        prefix = f"{reopened.feed.store_id()}/e/00000002/"
        assert any(name.startswith(prefix) and "/wal:" in name for name in files(cold))
        assert any((name.startswith(prefix) and "/base:" in name) or "/delta" in name for name in files(cold))
        assert payloads(reopened)[-1] == b"after"
        reopened.heavy.verify()
        assert reopened.heavy.damaged() == []
        assert reopened.manifest.check() == []


def test_dropped_databases_leave_nothing_in_their_namespace_and_release_it(
    store: quire.Store, cold: Path, clock: ManualClock
) -> None:
    fill(store)
    with pytest.raises(StillReferenced, match="the namespace is in use by databases"):
        store.namespaces.drop("cold")
    for name in ("shop", "clicks", "cart"):
        store.drop(name, snapshots=True)
    for _ in range(6):
        clock.advance(HOUR)
        store.worker.drain()
    backups = {name for name in files(cold) if "/backups/kv/" in name}
    assert files(cold) == backups, "backups outlive their database"
    store.namespaces.drop("cold")
    assert [info.dropped_at_ms > 0 for info in store.namespaces.list()] == [True]
    for _ in range(4):
        clock.advance(HOUR)
        store.worker.drain()
    assert store.namespaces.list() == []
    with store.manifest.read() as txn:
        assert [row.place_id for _, row in txn.scan(t.REMOTE_NAMESPACE)] == [0]


def test_an_unused_namespace_is_removed_completely(store: quire.Store, clock: ManualClock) -> None:
    """It was never removed."""
    store.manifest.ensure_owner_epoch()
    store.namespaces.drop("cold")
    with pytest.raises(UnknownNamespace):
        store.create("shop", "pages", namespace="cold")
    for _ in range(4):
        clock.advance(HOUR)
        store.worker.drain()
    with store.manifest.read() as txn:
        assert [row.place_id for _, row in txn.scan(t.REMOTE_NAMESPACE)] == [0]


def test_forks_have_the_namespace_of_their_source(store: quire.Store) -> None:
    fill(store)
    assert store.fork("shop", "copy").namespace == "cold"
    assert store.fork("cart", "basket").namespace == "cold"


def test_invalid_namespaces_are_refused(store: quire.Store, tmp_path: Path, cold: Path) -> None:
    for name, url, error in [
        ("cold", str(tmp_path / "other"), NameTaken),
        ("icy", str(cold), NameTaken),
        ("own", str(tmp_path / "store" / "objects"), InvalidInput),
        ("inside", str(tmp_path / "store" / "cold"), InvalidInput),
        ("relative", "cold", InvalidInput),
        ("ftp", "ftp://host/x", InvalidConfig),
    ]:
        with pytest.raises(error):
            store.namespaces.create(name, url)
    assert [info.name for info in store.namespaces.list()] == ["cold"]


def test_a_namespace_uses_the_options_of_its_section_in_quire_toml(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLD_SECRET", "testing")
    endpoint = "http://{}:{}".format(*request.getfixturevalue("s3_server"))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "quire.toml").write_text(
        "[maintenance]\nenabled = false\n[namespaces.cold]\n"
        f'endpoint = "{endpoint}"\nallow_http = true\nregion = "us-east-1"\n'
        'credentials = { access_key_id = "testing", secret_access_key = "env:COLD_SECRET" }\n'
    )
    with quire.open(tmp_path / "store") as store:
        store.namespaces.create("cold", fresh_url())
        store.create("shop", "pages", namespace="cold")
        with store.sqlite("shop") as db:
            db.execute("create table t(x)")
        store.checkpoint("shop")
        keys = [info.key for page in store.namespaces.objects("cold").list_pages() for info in page]
        assert any("/base:" in key for key in keys)
        assert files(tmp_path / "store" / "objects") == set()


def test_a_database_is_created_in_a_namespace_without_reading_the_others(
    store: quire.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `create(…, namespace=…)` read all databases and all artifacts of the store."""
    fill(store)
    scanned: set[str] = set()
    scan = ReadTxn.scan

    def noted(self: ReadTxn, table: t.Table[Any], *prefix: int, **options: Any) -> Any:
        scanned.add(table.name)
        return scan(self, table, *prefix, **options)

    monkeypatch.setattr(ReadTxn, "scan", noted)
    store.create("another", "pages", namespace="cold")
    assert t.REMOTE_NAMESPACE.name in scanned
    assert not scanned & {table.name for table in (t.DB, t.CHUNK_CATALOG, t.CHUNK_DELTA_INDEX, t.WAL_CATALOG)}
    assert "another" in store.namespaces.get("cold").databases
