"""A repair saves what can be read, says what cannot, removes nothing, and begins again wherever it was cut off."""

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
from tests.lsm.worlds import TINY, assert_same, assert_sound, forget_ends

SETTINGS = StoreSettings(lsm=TINY, maintenance=MaintenanceSettings(enabled=False))
LARGE = StoreSettings(
    lsm=LsmSettings(block_bytes=256, level0_tables=50, level0_stop=60), maintenance=MaintenanceSettings(enabled=False)
)

World = tuple[Path, LsmHome, dict[bytes, bytes]]


def opened(path: Path, settings: StoreSettings = SETTINGS) -> Store:
    return quire.open(path / "store", settings=settings)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Tables that hide each other, deletions among them, and a log; closed in order."""
    with opened(tmp_path, LARGE) as store:
        kv = store.kv("cart", create=True)
        for step in range(3):
            kv.write({b"%03d" % n: b"step%d" % step for n in range(step * 20, 100)})
            kv.write({b"%03d" % step: None})
            kv.flush()
        for n in range(5):
            kv.put(b"log%d" % n, b"synced")
        there = dict(kv.scan())
        return tmp_path, LsmHome(kv.home.path), there


def repaired(
    base: Path, *, with_backups: bool = False, refused: bool = True
) -> tuple[RepairReport, dict[bytes, bytes]]:
    """What a repair says and leaves; a dry run before it says the same, and changes nothing."""
    with opened(base, LARGE) as store:
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
        there = dict(kv.scan())
        kv.put(b"afterwards", b"it goes on")
    with opened(base, LARGE) as store:
        assert_same(store.kv("cart"), {**there, b"afterwards": b"it goes on"})
        assert not store.kvs.repair("cart").is_needed
    return report, there


def listing(base: Path) -> dict[str, bytes]:
    root = base / "store" / "lsm"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def flip(path: Path, at: int) -> None:
    whole = bytearray(path.read_bytes())
    whole[at] ^= 0x10
    path.write_bytes(whole)


def active(home: LsmHome) -> Path:
    return max(Path(home.path, "wal").iterdir())


@pytest.mark.parametrize("place", [3, 20, 40, 60, 80, 0.5, 0.9, -60, -20, -1])
def test_a_damaged_manifest_costs_nothing(world: World, place: float) -> None:
    base, home, there = world
    log = Path(home.manifest_log)
    flip(log, int(place * log.stat().st_size) if isinstance(place, float) else int(place))
    report, left = repaired(base)
    assert left == there
    assert report.lost == ()
    assert any(entry.path.endswith("000000.log") for entry in entries(OsDisk(), str(base / "store")))


@pytest.mark.parametrize("cut", [0, 30, 72, 200, -1])
def test_a_manifest_that_was_cut_costs_nothing(world: World, cut: int) -> None:
    base, home, there = world
    log = Path(home.manifest_log)
    log.write_bytes(log.read_bytes()[:cut])
    report, left = repaired(base)
    assert (left, report.lost) == (there, ())


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_manifest_that_is_gone_costs_nothing(world: World, snapshot: bool) -> None:
    base, home, there = world
    if snapshot:
        with opened(base, LARGE) as store:
            store.kv("cart").manifest.checkpoint()
    shutil.rmtree(Path(home.path, "manifest"))
    report, left = repaired(base)
    assert (left, report.lost) == (there, ())


def test_a_damaged_snapshot_of_the_manifest_costs_nothing(world: World) -> None:
    base, home, there = world
    with opened(base, LARGE) as store:
        store.kv("cart").manifest.checkpoint()
        store.kv("cart").put(b"later", b"1")
    flip(Path(home.manifest_snapshot), 60)
    report, left = repaired(base)
    assert (left, report.lost) == ({**there, b"later": b"1"}, ())


def test_what_is_behind_damage_in_a_log_is_saved_and_the_rest_told(world: World) -> None:
    base, home, there = world
    wal = active(home)
    flip(wal, 72 + 16 + 25)  # the first batch's key
    report, left = repaired(base)
    assert left == {key: value for key, value in there.items() if key != b"log0"}
    (lost,) = report.lost
    assert "log 4 at offset 72" in lost
    assert any(entry.path.endswith(wal.name) for entry in entries(OsDisk(), str(base / "store")))


def test_a_missing_log_is_told(world: World) -> None:
    base, home, there = world
    os.remove(active(home))
    report, left = repaired(base)
    assert left == {key: value for key, value in there.items() if not key.startswith(b"log")}
    assert "log 4" in report.lost[0]


def test_a_missing_table_is_told_with_its_keys(world: World) -> None:
    base, home, there = world
    os.remove(home.sst(3))
    report, left = repaired(base)
    assert left.keys() >= {key for key in there if key.startswith(b"log")}
    (lost,) = report.lost
    assert "all rows of table 3, which had 61 rows with keys from b'002' to b'099'" in lost
    assert "older values" in report.doubts[0]


def test_sound_blocks_of_a_damaged_table_are_saved(world: World) -> None:
    base, home, there = world
    path = Path(home.sst(3))
    flip(path, 700)
    report, left = repaired(base, refused=False)  # blocks are read when they are needed
    assert "some rows of table 3" in report.lost[0]
    assert len(report.rewritten) == 1
    same = sum(left.get(key) == value for key, value in there.items())
    assert len(there) - 40 < same < len(there)
    assert any(entry.path.endswith("000003.sst") for entry in entries(OsDisk(), str(base / "store")))


@pytest.mark.parametrize("source", ["snapshot", "fork", "backup"])
def test_a_lost_table_comes_back_from_a_copy(world: World, source: str) -> None:
    base, home, there = world
    with opened(base, LARGE) as store:
        if source == "snapshot":
            store.snapshot("cart", "monday")
        elif source == "fork":
            store.fork("cart", "trial")
        else:
            back_up(store.kv("cart"), store.objects, "cart")
    os.remove(home.sst(2))
    if source == "backup":  # its objects are other files; links are not
        flip(Path(home.sst(3)), 500)
    report, left = repaired(base, with_backups=source == "backup")
    assert (left, report.lost) == (there, ())
    assert source in report.brought_back[0] or source != "backup"


def test_a_table_whose_event_was_lost_after_a_crash_is_taken_up_again(world: World) -> None:
    """As an earlier version left it: the log went before LMDB had heard of the flush, then the manifest's end was damaged."""
    base, home, there = world
    with opened(base, LARGE) as store:
        kv = store.kv("cart")
        kv.upkeep.stop()  # this thread flushes
        with armed("lsm.flush.recorded", stop), pytest.raises(KeyboardInterrupt):
            kv.flush()
        kv.abandon()
        forget_ends(store)
    os.remove(sorted(Path(home.path, "wal").iterdir())[0])  # as the flush would have done
    log = Path(home.manifest_log)
    flip(log, len(log.read_bytes()) - 60)
    _, left = repaired(base)
    assert left == there


@pytest.mark.parametrize("point", ["lsm.repair.written", "quarantine.moved", "lsm.repair.named", "lsm.repair.moved"])
def test_a_repair_that_was_cut_off_begins_again(world: World, point: str) -> None:
    base, home, there = world
    flip(Path(home.manifest_log), -20)
    wal = active(home)
    wal.write_bytes(wal.read_bytes() + b"torn")
    with opened(base, LARGE) as store, armed(point, stop), pytest.raises(KeyboardInterrupt):
        store.kvs.repair("cart", apply=True)
    with opened(base, LARGE) as store:
        store.kvs.repair("cart", apply=True)
        assert_same(store.kv("cart"), there)
        assert_sound(store.kv("cart"))


def stop(_name: str) -> None:
    raise KeyboardInterrupt


def test_files_that_are_newer_than_a_manifest_that_was_put_back_are_believed(tmp_path: Path) -> None:
    """The copy of a store takes its manifest first and its files later; two checkpoints of the database lie between."""
    settings = StoreSettings(
        lsm=LsmSettings(manifest_log_bytes=200, level0_tables=3), maintenance=MaintenanceSettings(enabled=False)
    )
    with opened(tmp_path, settings) as store:
        store.kv("cart", create=True).put(b"first", b"1")
        store.kv("cart").flush()
        store.manifest.env.copy(str(tmp_path / "older.lmdb"))
        for n in range(20):
            store.kv("cart").put(b"%d" % n, b"v")
            store.kv("cart").flush()
        store.kv("cart").compact()
        there = dict(store.kv("cart").scan())
    shutil.copy(tmp_path / "older.lmdb", tmp_path / "store" / "manifest.lmdb")
    os.remove(tmp_path / "store" / "manifest.lmdb-lock")
    report, left = repaired(tmp_path)
    assert (left, report.lost) == (there, ())


def test_a_sound_database_is_left_as_it_is(world: World) -> None:
    base, _, there = world
    before = listing(base)
    with opened(base, LARGE) as store:
        report = store.kvs.repair("cart", apply=True)
        assert not report.is_needed
        assert not report.applied
    assert listing(base) == before
    with opened(base, LARGE) as store:
        assert_same(store.kv("cart"), there)
