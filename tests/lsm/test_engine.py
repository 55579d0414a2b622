"""Key-value databases of a store: registration, snapshots and forks by hard links, backups, bulk loads."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quire
from quire.core.errors import (
    ChecksumMismatch,
    Corruption,
    DatabaseTombstoned,
    NameTaken,
    NotFound,
    ReadOnly,
    StoreUnusable,
    UnknownDatabase,
    UnknownSnapshot,
    WrongKind,
)
from quire.core.settings import LsmSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.lsm.backup import back_up, backups, read_backup, restore
from quire.lsm.bulk import begin_load
from quire.lsm.maintenance import KvMaintenance
from quire.lsm.remote_compaction import plan_major, run_task
from quire.lsm.sst_writer import TableWriter
from quire.manifest.records import DbKind
from quire.store.store import Store
from quire.testing.manifest import assert_clean
from tests.lsm.kv_helpers import TINY, assert_same, assert_sound, open_kv
from tests.lsm.tables import batch_of

SETTINGS = StoreSettings(lsm=TINY, maintenance=MaintenanceSettings(enabled=False))


def open_store_in(path: Path) -> Store:
    return quire.open(path / "store", settings=SETTINGS)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store_in(tmp_path) as store:
        yield store
        assert_clean(store.manifest)
        for kv in store.kvs.databases().values():
            if kv.failure is None:
                assert_sound(kv)


def fill(store: Store, name: str, low: int, high: int, text: bytes = b"v") -> dict[bytes, bytes]:
    batch: dict[bytes, bytes | None] = {b"%04d" % n: text for n in range(low, high)}
    store.kv(name, create=True).write(batch)
    return {b"%04d" % n: text for n in range(low, high)}


def test_a_database_is_registered_listed_and_dropped(store: Store) -> None:
    fill(store, "cart", 0, 10)
    assert [(database.name, database.kind.name) for database in store.databases()] == [("cart", "LSM")]
    kv = store.kv("cart")
    assert kv is store.kv("cart")
    home = kv.home.path
    store.drop("cart")
    assert not os.path.exists(home)
    with pytest.raises(DatabaseTombstoned):
        kv.put(b"a", b"")
    with pytest.raises(UnknownDatabase):
        store.kv("cart")
    assert fill(store, "cart", 5, 6) == dict(store.kv("cart").scan())


def test_pairs_survive_reopening_the_store(tmp_path: Path) -> None:
    with open_store_in(tmp_path) as store:
        pairs = fill(store, "cart", 0, 50)
    with open_store_in(tmp_path) as store:
        assert_same(store.kv("cart"), pairs)
    with quire.open(tmp_path / "store", mode="r") as reader:
        assert_same(reader.kv("cart"), pairs)
        with pytest.raises(ReadOnly, match="opened for reading"):
            reader.kv("cart").put(b"a", b"1")


def test_a_reader_reports_the_owners_figures(tmp_path: Path) -> None:
    with open_store_in(tmp_path) as store:
        fill(store, "cart", 0, 50)
        store.kv("cart").flush()
    with quire.open(tmp_path / "store", mode="r") as reader:
        read = reader.kv("cart").stats()
    with open_store_in(tmp_path) as store:
        owners = store.kv("cart").stats()
    assert owners.manifest_log_bytes > 0
    assert (read.manifest_log_bytes, read.manifest_version) == (owners.manifest_log_bytes, owners.manifest_version)
    assert (read.tables, read.table_bytes, read.rows) == (owners.tables, owners.table_bytes, owners.rows)


def test_another_kind_is_refused(store: Store) -> None:
    store.create("shop", "pages")
    with pytest.raises(WrongKind):
        store.kv("shop")


def test_a_database_that_failed_is_reopened(store: Store) -> None:
    pairs = fill(store, "cart", 0, 5)
    kv = store.kv("cart")
    with armed("lsm.wal.appended", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        kv.put(b"x", b"")
    with pytest.raises(StoreUnusable):
        kv.put(b"x", b"")
    again = store.kv("cart")
    assert again is not kv
    assert dict(again.scan()).items() >= pairs.items()
    again.put(b"y", b"")


def test_a_database_that_cannot_be_marked_as_created_is_not_left_open(tmp_path: Path) -> None:
    """Hazard: its files stayed open outside the engine, and the next open of the database wrote to them as well."""
    with open_store_in(tmp_path) as store:
        store.kvs._manifest.register_db("cart", DbKind.LSM)
        with armed("manifest.commit.durable", "raise:EIO"), pytest.raises(StoreUnusable):
            store.kv("cart")
        links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        targets = [os.readlink(link) for link in links if link.is_symlink()]
        assert not [target for target in targets if target.startswith(f"{store.path}/lsm/")]


def test_lost_files_are_an_error_and_not_a_new_database(tmp_path: Path) -> None:
    with open_store_in(tmp_path) as store:
        fill(store, "cart", 0, 5)
        home = store.kv("cart").home.path
    shutil.rmtree(home)
    with open_store_in(tmp_path) as store, pytest.raises(Corruption, match="files are missing"):
        store.kv("cart")


# ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_is_unchanged_while_the_database_is_written(store: Store) -> None:
    before = fill(store, "cart", 0, 60)
    info = store.snapshot("cart", "monday", tags={"by": "ann"})
    assert (info.name, info.tags, info.anchor_lsn) == ("monday", {"by": "ann"}, 1)
    fill(store, "cart", 30, 90, b"new")
    store.kv("cart").compact()
    with store.kvs.open_snapshot("cart", "monday") as snapshot:
        assert dict(snapshot.scan()) == before
        assert snapshot.get(b"0030") == b"v"
        assert snapshot.get(b"0080") is None
    with pytest.raises(NameTaken):
        store.snapshot("cart", "monday")
    with pytest.raises(UnknownSnapshot):
        store.kvs.open_snapshot("cart", "tuesday")


def test_a_snapshot_has_the_lsn_of_its_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a flush just after the copy raised the lsn in the snapshot's row, and the snapshot could never be opened."""
    before = fill(store, "cart", 0, 60)
    paused = KvMaintenance.paused

    @contextmanager
    def paused_then_flushed(upkeep: KvMaintenance) -> Iterator[None]:
        with paused(upkeep):
            yield
        fill(store, "cart", 30, 90, b"new")
        store.kv("cart").flush()

    with monkeypatch.context() as patched:
        patched.setattr(KvMaintenance, "paused", paused_then_flushed)
        info = store.snapshot("cart", "monday")
    assert info.anchor_lsn == 1
    with store.kvs.open_snapshot("cart", "monday") as snapshot:
        assert dict(snapshot.scan()) == before


def test_a_fork_shares_files_and_then_diverges(store: Store) -> None:
    before = fill(store, "cart", 0, 200)
    fork = store.fork("cart", "trial")
    assert (fork.kind.name, store.manifest.snapshots.lineage()[0].forks[0].name) == ("LSM", "trial")
    origin, child = store.kv("cart"), store.kv("trial")
    table = f"sst/{os.listdir(child.home.path + '/sst')[0]}"
    assert os.stat(f"{child.home.path}/{table}").st_nlink == 2
    child.put(b"0001", b"changed")
    origin.delete(b"0002")
    assert_same(child, {**before, b"0001": b"changed"})
    assert_same(origin, {key: value for key, value in before.items() if key != b"0002"})
    store.drop("cart")
    child.compact()
    assert_same(child, {**before, b"0001": b"changed"})


def test_a_fork_of_a_snapshot_has_its_content(store: Store) -> None:
    before = fill(store, "cart", 0, 20)
    store.snapshot("cart", "monday")
    fill(store, "cart", 0, 20, b"new")
    store.fork("cart", "old", at="monday")
    store.manifest.snapshots.drop("cart", "monday")
    store.kvs.sweep()
    assert_same(store.kv("old"), before)
    old, origin = store.database("old").db_id, store.database("cart").db_id
    with store.manifest.read() as txn:
        assert txn.database(old).parent_db_id == origin  # type: ignore[union-attr]


def test_a_scheduled_snapshot_has_its_links_too(store: Store) -> None:
    pairs = fill(store, "cart", 0, 20)
    store._parts.snapshot(store.database("cart").db_id, "hourly", {})
    with store.kvs.open_snapshot("cart", "hourly") as snapshot:
        assert dict(snapshot.scan()) == pairs


def test_the_links_of_a_dropped_snapshot_are_removed_by_the_next_sweep(store: Store) -> None:
    fill(store, "cart", 0, 20)
    store.snapshot("cart", "monday")
    folder = f"{store.kv('cart').home.path}/snapshots"
    assert len(os.listdir(folder)) == 1
    store.manifest.snapshots.drop("cart", "monday")
    assert store.kvs.sweep() == 1
    assert os.listdir(folder) == []


@pytest.mark.parametrize("point", ["lsm.copy.linked", "lsm.copy.logged"])
def test_an_interrupted_fork_is_cleaned_up(tmp_path: Path, point: str) -> None:
    with open_store_in(tmp_path) as store:
        pairs = fill(store, "cart", 0, 20)
        with armed(point, cut), pytest.raises(KeyboardInterrupt):
            store.fork("cart", "half")
        with armed(point, cut), pytest.raises(KeyboardInterrupt):
            store.snapshot("cart", "half")
    with open_store_in(tmp_path) as store:
        assert_same(store.kv("cart"), pairs)
        assert [database.name for database in store.databases()] == ["cart"]
        assert os.listdir(tmp_path / "store" / "lsm") == [f"{store.database('cart').db_id:08x}"]
        assert os.listdir(f"{store.kv('cart').home.path}/snapshots") == []


@pytest.mark.parametrize("make", ["fork", "snapshot", "lend", "adopt"])
def test_files_whose_row_may_exist_are_kept(tmp_path: Path, make: str) -> None:
    """Hazard: after a commit with an unknown outcome the files were removed, and the row was there after reopening."""
    with open_store_in(tmp_path) as store:
        pairs = fill(store, "cart", 0, 20)
        calls: dict[str, Callable[[], object]] = {
            "fork": lambda: store.fork("cart", "copy"),
            "snapshot": lambda: store.snapshot("cart", "copy"),
            "lend": lambda: store.kvs.lend("cart", 60),
            "adopt": lambda: store.kvs.adopt("copy", lambda target: shutil.copytree(forked, target)),
        }
        forked = store.kv(store.fork("cart", "source").name).home.path
        store.kvs.close_database("source")
        before = copies(store)
        store.kv("cart").flush()  # so that nothing else is committed
        # The id of a new database is reserved by a commit of its own.
        script = "1*off->raise:EIO" if make in ("fork", "adopt") else "raise:EIO"
        with armed("manifest.commit.durable", script), pytest.raises(StoreUnusable):
            calls[make]()
        assert store.kvs.sweep() == 0
        assert len(copies(store) - before) == 1
    with open_store_in(tmp_path) as store:
        if make == "snapshot":
            with store.kvs.open_snapshot("cart", "copy") as copy:
                assert dict(copy.scan()) == pairs
        elif make == "fork":
            assert_same(store.kv("copy"), pairs)


def copies(store: Store) -> set[Path]:
    """The directories of databases and of copies."""
    lsm = Path(store.path, "lsm")
    return {*lsm.iterdir(), *lsm.glob("*/snapshots/*")}


def cut(_name: str) -> None:
    raise KeyboardInterrupt


def test_a_directory_whose_id_was_never_allocated_is_kept(tmp_path: Path) -> None:
    with open_store_in(tmp_path) as store:
        fill(store, "cart", 0, 5)
    stranger = tmp_path / "store" / "lsm" / "0000ffff" / "sst"
    stranger.mkdir(parents=True)
    with open_store_in(tmp_path) as store:
        store.kvs.sweep()
    assert stranger.exists()


# ── backup ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def restore_backup(store: Store, name: str, label: str, lsn: int | None = None) -> None:
    backup = read_backup(store.objects, label, lsn)
    store.kvs.adopt(name, lambda target: restore(store.objects, backup, store._disk, target))


def test_a_backup_is_restored_as_it_was(store: Store) -> None:
    first = fill(store, "cart", 0, 100)
    older = back_up(store.kv("cart"), store.objects, "cart")
    fill(store, "cart", 100, 110)
    newer = back_up(store.kv("cart"), store.objects, "cart")
    assert backups(store.objects, "cart") == [older.lsn, newer.lsn]
    assert {table.key for table in older.tables} < {table.key for table in newer.tables}
    store.drop("cart")
    restore_backup(store, "again", "cart", older.lsn)
    restore_backup(store, "newest", "cart")
    assert_same(store.kv("again"), first)
    assert len(list(store.kv("newest").scan())) == 110
    store.kv("again").put(b"more", b"")
    with pytest.raises(NotFound):
        read_backup(store.objects, "cart", 77)
    with pytest.raises(NotFound):
        read_backup(store.objects, "other")


def test_an_altered_backup_is_refused_and_leaves_nothing(store: Store) -> None:
    fill(store, "cart", 0, 100)
    backup = back_up(store.kv("cart"), store.objects, "cart")
    key = backup.tables[0].key
    data = bytearray(store.objects.get(key))
    data[len(data) // 2] ^= 1
    store.objects.put(key, data)
    with pytest.raises(ChecksumMismatch):
        restore_backup(store, "again", "cart")
    assert [database.name for database in store.databases()] == ["cart"]
    assert len(os.listdir(f"{store.path}/lsm")) == 1


# ── bulk loads ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_load_is_atomic_and_ordered_between_earlier_and_later_writes(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.write({b"before": b"old", b"both": b"old"})
        with begin_load(kv) as load:
            kv.write({b"after": b"new", b"gone": None})
            seen_before = kv.snapshot()
            ids = load.allocate(2)
            for sst_id, rows in zip(ids, ([b"after", b"before"], [b"both", b"gone"])):
                writer = TableWriter(sst_id)
                writer.add(batch_of([(key, load.lsn, b"loaded") for key in rows]))
                writer.write(kv.disk, load.path(sst_id))
            kv.compact()
            during = {b"before": b"old", b"both": b"old", b"after": b"new"}
            assert_same(kv, during, (b"gone",))
            assert load.publish(ids) == 4
        expected = {b"before": b"loaded", b"both": b"loaded", b"after": b"new"}
        for step in (kv.sync, kv.flush, kv.compact):
            step()
            assert_same(kv, expected, (b"gone",))
            assert_same(seen_before, during, (b"gone",))
            assert_sound(kv)
        seen_before.close()
    with open_kv(tmp_path) as kv:
        assert_same(kv, expected, (b"gone",))


def test_a_major_compaction_can_run_in_other_processes(tmp_path: Path) -> None:
    """Tasks are pickled and run in any order, one of them twice; a snapshot keeps what it needs, and writes continue."""
    with open_kv(tmp_path) as kv:
        for step in range(6):
            kv.write({b"%04d" % n: b"%d" % step * 30 for n in range(step * 20, 200)})
            kv.flush()
            if step == 3:
                snapshot = kv.snapshot()
        before, was = dict(kv.scan()), dict(snapshot.scan())
        with plan_major(kv, tasks=4) as plan:
            assert len(plan.tasks) >= 3
            kv.put(b"meanwhile", b"")
            tasks = [pickle.loads(pickle.dumps(task)) for task in reversed(plan.tasks)]
            run_task(tasks[0])
            plan.publish([sst_id for task in tasks for sst_id in run_task(task)])
        assert_same(kv, {**before, b"meanwhile": b""})
        assert_same(snapshot, was)
        assert not kv.view.levels.level0
        assert len(os.listdir(f"{kv.home.path}/sst")) == len(kv.view.levels)
        assert_sound(kv)
        snapshot.close()
        with plan_major(kv, tasks=2) as plan:
            run_task(plan.tasks[0])  # its result is never published
        assert_sound(kv)
    with open_kv(tmp_path) as kv:
        assert_same(kv, {**before, b"meanwhile": b""})
        kv.compact()
        with plan_major(kv, tasks=2) as plan:
            assert plan.tasks == ()
            plan.publish([])


def test_an_abandoned_load_leaves_nothing(tmp_path: Path) -> None:
    with open_kv(tmp_path, settings=LsmSettings()) as kv:
        with begin_load(kv) as load:
            (sst_id,) = load.allocate(1)
            writer = TableWriter(sst_id)
            writer.add(batch_of([(b"k", load.lsn, b"")]))
            writer.write(kv.disk, load.path(sst_id))
            with pytest.raises(quire.InvalidInput):
                load.publish([sst_id + 1])
        assert os.listdir(f"{kv.home.path}/sst") == []
        assert not kv.loading
        with begin_load(kv) as load:
            (sst_id,) = load.allocate(1)
            writer = TableWriter(sst_id)
            writer.add(batch_of([(b"k", load.lsn + 5, b"")]))
            writer.write(kv.disk, load.path(sst_id))
            with pytest.raises(quire.InvalidInput, match="load's lsn"):
                load.publish([sst_id])
        assert list(kv.scan()) == []
