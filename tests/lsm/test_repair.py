"""A repair saves what can be read, reports what cannot, deletes nothing, and can be repeated wherever it was
interrupted.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import quire
from quire.core.errors import Corruption
from quire.core.settings import LsmSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.durable.names import LsmHome
from quire.durable.quarantine import entries
from quire.lsm.backup import back_up
from quire.lsm.repair import RepairReport
from quire.store.store import Store
from tests.lsm.kv_helpers import TINY, assert_same, assert_sound, forget_ends

SETTINGS = StoreSettings(lsm=TINY, maintenance=MaintenanceSettings(enabled=False))
LARGE = StoreSettings(
    lsm=LsmSettings(block_bytes=256, level0_tables=50, level0_stop=60), maintenance=MaintenanceSettings(enabled=False)
)

ClosedDatabase = tuple[Path, LsmHome, dict[bytes, bytes]]


def open_store_in(path: Path, settings: StoreSettings = SETTINGS) -> Store:
    return quire.open(path / "store", settings=settings)


@pytest.fixture
def database(tmp_path: Path) -> ClosedDatabase:
    """A database with tables that hide each other, deletions among them, and a log; closed cleanly."""
    with open_store_in(tmp_path, LARGE) as store:
        kv = store.kv("cart", create=True)
        for step in range(3):
            kv.write({b"%03d" % n: b"step%d" % step for n in range(step * 20, 100)})
            kv.write({b"%03d" % step: None})
            kv.flush()
        for n in range(5):
            kv.put(b"log%d" % n, b"synced")
        expected = dict(kv.scan())
        return tmp_path, LsmHome(kv.home.path), expected


def repaired(
    base: Path, *, with_backups: bool = False, refused: bool = True
) -> tuple[RepairReport, dict[bytes, bytes]]:
    """The report of a repair and the pairs after it. A dry run before it gives the same report and changes nothing."""
    with open_store_in(base, LARGE) as store:
        if refused:
            with pytest.raises(Corruption) as caught:
                store.kv("cart")
            assert "`quire kv repair cart`" in caught.value.hint
        objects = store.objects if with_backups else None
        before = listing(base)
        dry = store.kvs.repair("cart", objects=objects)
        assert listing(base) == before
        report = store.kvs.repair("cart", apply=True, objects=objects)
        assert (dry.applied, report.applied) == (False, True)
        assert (dry.lost, dry.reason, dry.batches) == (report.lost, report.reason, report.batches)
        assert dry.is_needed
        kv = store.kv("cart")
        assert_sound(kv)
        expected = dict(kv.scan())
        kv.put(b"afterwards", b"it goes on")
    with open_store_in(base, LARGE) as store:
        assert_same(store.kv("cart"), {**expected, b"afterwards": b"it goes on"})
        assert not store.kvs.repair("cart").is_needed
    return report, expected


def listing(base: Path) -> dict[str, bytes]:
    root = base / "store" / "lsm"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def active_wal(home: LsmHome) -> Path:
    return max(Path(home.path, "wal").iterdir())


@pytest.mark.parametrize("position", [3, 20, 40, 60, 80, 0.5, 0.9, -60, -20, -1])
def test_a_damaged_manifest_loses_nothing(database: ClosedDatabase, position: float) -> None:
    base, home, expected = database
    log = Path(home.manifest_log)
    flip(log, int(position * log.stat().st_size) if isinstance(position, float) else int(position))
    report, pairs = repaired(base)
    assert pairs == expected
    assert report.lost == ()
    assert any(entry.path.endswith("000000.log") for entry in entries(OsDisk(), str(base / "store")))


@pytest.mark.parametrize("cut", [0, 30, 72, 200, -1])
def test_a_truncated_manifest_loses_nothing(database: ClosedDatabase, cut: int) -> None:
    base, home, expected = database
    log = Path(home.manifest_log)
    log.write_bytes(log.read_bytes()[:cut])
    report, pairs = repaired(base)
    assert (pairs, report.lost) == (expected, ())


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_missing_manifest_loses_nothing(database: ClosedDatabase, snapshot: bool) -> None:
    base, home, expected = database
    if snapshot:
        with open_store_in(base, LARGE) as store:
            store.kv("cart").manifest.checkpoint()
    shutil.rmtree(Path(home.path, "manifest"))
    report, pairs = repaired(base)
    assert (pairs, report.lost) == (expected, ())


def test_a_damaged_snapshot_of_the_manifest_loses_nothing(database: ClosedDatabase) -> None:
    base, home, expected = database
    with open_store_in(base, LARGE) as store:
        store.kv("cart").manifest.checkpoint()
        store.kv("cart").put(b"later", b"1")
    flip(Path(home.manifest_snapshot), 60)
    report, pairs = repaired(base)
    assert (pairs, report.lost) == ({**expected, b"later": b"1"}, ())


def test_batches_after_damage_in_a_log_are_saved_and_losses_are_reported(database: ClosedDatabase) -> None:
    base, home, expected = database
    wal = active_wal(home)
    flip(wal, 72 + 16 + 25)  # the first batch's key
    report, pairs = repaired(base)
    assert pairs == {key: value for key, value in expected.items() if key != b"log0"}
    (lost,) = report.lost
    assert "log 4 at offset 72" in lost
    assert any(entry.path.endswith(wal.name) for entry in entries(OsDisk(), str(base / "store")))


def test_a_missing_log_is_reported(database: ClosedDatabase) -> None:
    base, home, expected = database
    os.remove(active_wal(home))
    report, pairs = repaired(base)
    assert pairs == {key: value for key, value in expected.items() if not key.startswith(b"log")}
    assert "log 4" in report.lost[0]


def test_a_missing_table_is_reported_with_its_keys(database: ClosedDatabase) -> None:
    base, home, expected = database
    os.remove(home.sst(3))
    report, pairs = repaired(base)
    assert pairs.keys() >= {key for key in expected if key.startswith(b"log")}
    (lost,) = report.lost
    assert "all rows of table 3, which had 61 rows with keys from b'002' to b'099'" in lost
    assert "older values" in report.doubts[0]


def test_intact_blocks_of_a_damaged_table_are_saved(database: ClosedDatabase) -> None:
    base, home, expected = database
    path = Path(home.sst(3))
    flip(path, 700)
    report, pairs = repaired(base, refused=False)  # damage in a block is not noticed at open
    assert "some rows of table 3" in report.lost[0]
    assert len(report.rewritten) == 1
    same = sum(pairs.get(key) == value for key, value in expected.items())
    assert len(expected) - 40 < same < len(expected)
    assert any(entry.path.endswith("000003.sst") for entry in entries(OsDisk(), str(base / "store")))


@pytest.mark.parametrize("source", ["snapshot", "fork", "backup"])
def test_a_lost_table_is_restored_from_a_copy(database: ClosedDatabase, source: str) -> None:
    base, home, expected = database
    with open_store_in(base, LARGE) as store:
        if source == "snapshot":
            store.snapshot("cart", "monday")
        elif source == "fork":
            store.fork("cart", "trial")
        else:
            back_up(store.kv("cart"), store.objects, "cart")
    os.remove(home.sst(2))
    if source == "backup":  # its objects are separate files, unlike links
        flip(Path(home.sst(3)), 500)
    report, pairs = repaired(base, with_backups=source == "backup")
    assert (pairs, report.lost) == (expected, ())
    assert source in report.brought_back[0] or source != "backup"


def test_a_table_whose_event_was_lost_after_a_crash_is_adopted(database: ClosedDatabase) -> None:
    """As left by an earlier version: the log was deleted before LMDB had the flush, then the end of the manifest was
    damaged.
    """
    base, home, expected = database
    with open_store_in(base, LARGE) as store:
        kv = store.kv("cart")
        kv.upkeep.stop()  # this thread flushes
        with armed("lsm.flush.recorded", stop), pytest.raises(KeyboardInterrupt):
            kv.flush()
        kv.abandon()
        forget_ends(store)
    os.remove(sorted(Path(home.path, "wal").iterdir())[0])  # as the flush did
    log = Path(home.manifest_log)
    flip(log, len(log.read_bytes()) - 60)
    _, pairs = repaired(base)
    assert pairs == expected


@pytest.mark.parametrize("point", ["lsm.repair.written", "quarantine.moved", "lsm.repair.named", "lsm.repair.moved"])
def test_an_interrupted_repair_can_be_repeated(database: ClosedDatabase, point: str) -> None:
    base, home, expected = database
    flip(Path(home.manifest_log), -20)
    wal = active_wal(home)
    wal.write_bytes(wal.read_bytes() + b"torn")
    with open_store_in(base, LARGE) as store, armed(point, stop), pytest.raises(KeyboardInterrupt):
        store.kvs.repair("cart", apply=True)
    with open_store_in(base, LARGE) as store:
        store.kvs.repair("cart", apply=True)
        assert_same(store.kv("cart"), expected)
        assert_sound(store.kv("cart"))


def stop(_name: str) -> None:
    raise KeyboardInterrupt


def test_files_that_are_newer_than_a_restored_manifest_are_kept(tmp_path: Path) -> None:
    """A copy of a store takes its manifest first and its files later, with two checkpoints of the database in between."""
    settings = StoreSettings(
        lsm=LsmSettings(manifest_log_bytes=200, level0_tables=3), maintenance=MaintenanceSettings(enabled=False)
    )
    with open_store_in(tmp_path, settings) as store:
        store.kv("cart", create=True).put(b"first", b"1")
        store.kv("cart").flush()
        store.manifest.env.copy(str(tmp_path / "older.lmdb"))
        for n in range(20):
            store.kv("cart").put(b"%d" % n, b"v")
            store.kv("cart").flush()
        store.kv("cart").compact()
        expected = dict(store.kv("cart").scan())
    shutil.copy(tmp_path / "older.lmdb", tmp_path / "store" / "manifest.lmdb")
    os.remove(tmp_path / "store" / "manifest.lmdb-lock")
    report, pairs = repaired(tmp_path)
    assert (pairs, report.lost) == (expected, ())


def test_an_intact_database_is_not_changed(database: ClosedDatabase) -> None:
    base, _, expected = database
    before = listing(base)
    with open_store_in(base, LARGE) as store:
        report = store.kvs.repair("cart", apply=True)
        assert not report.is_needed
        assert not report.applied
    assert listing(base) == before
    with open_store_in(base, LARGE) as store:
        assert_same(store.kv("cart"), expected)
