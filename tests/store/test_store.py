"""The promises of `quire.open` and `Store`, within one process."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from pathlib import Path

import pytest

import quire
from quire.archive.recorder import REMOTE_FILES
from quire.archive.state_files import StandbyState, write_standby_state
from quire.core.clock import Clock
from quire.core.errors import Corruption, StoreFenced
from quire.core.settings import ManifestSettings, StoreSettings
from quire.durable import names
from quire.durable.files import OsDisk
from quire.durable.locks import FileLock, is_held
from quire.lsm.kv import Kv
from quire.manifest import tables as t
from quire.manifest.ops.snapshots import PublishSnapshot
from quire.manifest.records import DbKind, SnapshotKind
from quire.store.store import Mode, Store
from quire.testing.clock import ManualClock


def test_opening_creates_the_directory_and_a_commented_configuration(path: Path) -> None:
    with quire.open(path / "deep" / "er") as store:
        text = (path / "deep" / "er" / "quire.toml").read_text()
    assert "# Location of the objects" in text
    assert store.settings == StoreSettings()
    assert sorted(os.listdir(store.path)) == ["manifest.lmdb", "manifest.lmdb-lock", "quire.toml", "store.lock"]


def test_a_store_keeps_its_identity_and_databases(path: Path) -> None:
    with quire.open(path) as store:
        identity = store.info().store_id
        store.create("shop", "pages")
    with quire.open(path) as store:
        assert store.info().store_id == identity
        assert [database.name for database in store.databases()] == ["shop"]


def test_databases_are_created_listed_by_name_renamed_and_dropped(store: Store) -> None:
    created = store.create("shop", DbKind.PAGES, tags={"team": "a"})
    store.create("clicks", "stream")
    store.create("sessions", "lsm")
    assert created == store.database("shop")
    assert (created.kind, created.tags, created.snapshots, created.parent) == (DbKind.PAGES, {"team": "a"}, 0, "")
    assert [database.name for database in store.databases()] == ["clicks", "sessions", "shop"]
    assert store.rename("shop", "market").db_id == created.db_id
    assert store.drop("market").name == "market"
    assert [database.name for database in store.databases()] == ["clicks", "sessions"]
    assert store.create("shop", "pages").db_id > created.db_id
    assert store.info().dropped == 1


def test_infos_are_immutable(store: Store) -> None:
    created = store.create("shop", "pages")
    with pytest.raises(AttributeError):
        created.name = "other"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(store.info())) == store.info()


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (lambda store: store.create("shop", "pages"), quire.NameTaken),
        (lambda store: store.create("a/b", "pages"), quire.InvalidName),
        (lambda store: store.create("x", "table"), quire.InvalidInput),
        (lambda store: store.rename("shop", "clicks"), quire.NameTaken),
        (lambda store: store.rename("nothing", "x"), quire.UnknownDatabase),
        (lambda store: store.drop("nothing"), quire.UnknownDatabase),
        (lambda store: store.database("nothing"), quire.UnknownDatabase),
    ],
)
def test_invalid_calls_change_nothing(store: Store, action, error: type[quire.QuireError]) -> None:  # type: ignore[no-untyped-def]
    store.create("shop", "pages")
    store.create("clicks", "stream")
    before = store.databases()
    with pytest.raises(error):
        action(store)
    assert store.databases() == before


def test_a_database_with_snapshots_is_dropped_only_together_with_them(store: Store) -> None:
    db_id = store.create("shop", "pages").db_id
    store.manifest.submit([PublishSnapshot(db_id, 1, SnapshotKind.NAMED, "monday")]).result()
    assert store.database("shop").snapshots == 1
    with pytest.raises(quire.StillReferenced, match="database='shop'"):
        store.drop("shop")
    store.drop("shop", snapshots=True)
    with store.manifest.read() as txn:
        assert txn.count(t.SNAPSHOT_INDEX) == 0


def test_info_counts_databases(store: Store) -> None:
    store.create("shop", "pages")
    info = store.info()
    assert (info.path, info.mode, info.object_store) == (store.path, "rw", store.path + "/objects")
    assert info.databases == {"pages": 1, "stream": 0, "lsm": 0}
    assert (info.oldest_change, info.newest_change) == (1, 1)
    assert info.manifest_bytes > 0


def test_objects_are_inside_the_store_by_default(store: Store) -> None:
    store.objects.put("a/b", b"hello")
    assert (Path(store.path) / "objects" / "a" / "b").read_bytes() == b"hello"
    assert store.objects is store.objects


def test_a_relative_object_store_is_relative_to_the_store(path: Path) -> None:
    with quire.open(path, settings=StoreSettings(object_store="../else")) as store:
        store.objects.put("a", b"x")
    assert (path.parent / "else" / "a").exists()
    with quire.open(path) as store:
        assert store.objects.get("a") == b"x"


@pytest.mark.parametrize("url", ['quo"te', "back\\slash", "s3://bucket/prefix"])
def test_the_object_store_of_a_new_store_is_remembered(path: Path, url: str) -> None:
    quire.open(path, settings=StoreSettings(object_store=url)).close()
    with quire.open(path) as store:
        assert store.settings.object_store == url


def test_settings_passed_in_code_apply_but_do_not_move_the_objects(path: Path) -> None:
    quire.open(path, settings=StoreSettings(object_store="here")).close()
    tuned = StoreSettings(manifest=ManifestSettings(readers_max=7))
    with quire.open(path, settings=tuned) as store:
        assert store.settings.manifest.readers_max == 7
        assert store.settings.object_store == "here"
    with pytest.raises(quire.ConfigMismatch):
        quire.open(path, settings=StoreSettings(object_store="there"))


def test_a_given_clock_is_used(path: Path) -> None:
    clock = ManualClock(now_ms=1_700_000_000_000)
    with quire.open(path, clock=clock) as store:
        assert store.create("shop", "pages").created_at_ms == 1_700_000_000_000


# ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_opening_a_missing_store_for_reading_explains_how_to_create_one(path: Path) -> None:
    with pytest.raises(quire.StoreNotFound, match=f"quire init {path}"):
        quire.open(path, "r")
    with pytest.raises(quire.StoreNotFound):
        quire.open(path, create=False)
    assert not path.exists()


def test_a_reader_changes_no_file_except_lmdbs_lock(path: Path) -> None:
    with quire.open(path) as store:
        store.create("shop", "pages")
    (path / "scratch" / "7").mkdir(parents=True)
    (path / "store.lock").unlink()

    def state() -> dict[str, bytes]:
        files = (file for file in path.rglob("*") if file.is_file() and file.name != "manifest.lmdb-lock")
        return {str(file): file.read_bytes() for file in files}

    before = state()
    with quire.open(path, "r") as reader:
        assert [database.name for database in reader.databases()] == ["shop"]
        assert reader.mode == "r"
        with pytest.raises(quire.ReadOnly):
            reader.create("x", "pages")
        with pytest.raises(quire.ReadOnly):
            reader.drop("shop")
        with pytest.raises(quire.ReadOnly):
            reader.rename("shop", "x")
    assert state() == before
    assert (path / "scratch" / "7").exists()


def test_a_reader_cannot_repair(path: Path) -> None:
    quire.open(path).close()
    with pytest.raises(quire.ReadOnly):
        quire.open(path, "r", repair=True)


def test_a_second_handle_in_one_process_is_refused_with_an_explanation(store: Store) -> None:
    with pytest.raises(quire.StoreLocked, match="already open in this process"):
        quire.open(store.path)
    with pytest.raises(quire.StoreLocked, match="already has the manifest open"):
        quire.open(store.path, "r")


# ── closing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_closed_store_raises_and_can_be_closed_twice(path: Path) -> None:
    store = quire.open(path)
    store.close()
    store.close()
    for use in (store.databases, store.info, lambda: store.manifest, lambda: store.objects, store.__enter__):
        with pytest.raises(quire.StoreClosed):
            use()


@pytest.mark.parametrize("mode", ["r", "rw"])
def test_an_opening_that_fails_leaves_nothing_open(path: Path, mode: Mode) -> None:
    """Hazard: the reader's manifest stayed open, and this process could not open the store any more."""
    quire.open(path).close()
    (path / REMOTE_FILES).write_bytes(b"damaged")
    with pytest.raises(Corruption, match="is damaged"):
        quire.open(path, mode)
    (path / REMOTE_FILES).unlink()
    with quire.open(path, mode) as store:
        assert store.databases() == []


def test_a_directory_that_becomes_a_standby_before_it_is_locked_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard: it was checked only before; the owner's changes were then mixed with those of the archive that it follows."""
    quire.open(path).close()
    acquire = FileLock.acquire

    def late(name: str, clock: Clock | None = None) -> FileLock:
        write_standby_state(OsDisk(), str(path), StandbyState(store_id="5" * 36, url="s3://bucket"))
        return acquire(name, clock)

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(StoreFenced, match="is a standby of another owner"):
        quire.open(path)
    assert not is_held(str(path / names.LOCK))
    (path / names.STANDBY).unlink()


def test_a_part_that_cannot_be_closed_does_not_keep_the_others_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = quire.open(path)
    store.kv("prices", create=True).put(b"pen", b"3")
    failing, web = store.serve(), store.serve_http("127.0.0.1:0")

    def fail() -> None:
        raise OSError("the server cannot be closed")

    with monkeypatch.context() as patch:
        patch.setattr(failing, "close", fail)
        with pytest.raises(OSError, match="the server cannot be closed"):
            store.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(web.address.rpartition(":")[2].rstrip("/"))), timeout=5)
    failing.close()
    with quire.open(path) as again:  # manifest and lock were released
        assert again.kv("prices").get(b"pen") == b"3"


@pytest.mark.parametrize("part", ["manifest", "engine"])
def test_a_failing_close_of_a_part_ends_all_of_it(path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    store = quire.open(path)
    store.kv("prices", create=True).put(b"pen", b"3")
    store.stream("clicks", create=True).append([b"one"]).result()

    close = Kv.close

    def fail(kv: Kv | None = None) -> None:
        if kv is not None:
            close(kv)
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        if part == "manifest":
            patch.setattr(store.manifest, "remember_checked", fail)
        else:
            patch.setattr(Kv, "close", fail)
        with pytest.raises(OSError, match="no space left"):
            store.close()
    assert {thread.name for thread in threading.enumerate()} <= threads
    with quire.open(path) as again:
        assert [database.name for database in again.databases()] == ["clicks", "prices"]


def test_an_unknown_mode_is_refused(path: Path) -> None:
    with pytest.raises(quire.InvalidInput):
        quire.open(path, "w")  # type: ignore[arg-type]
    assert not path.exists()
