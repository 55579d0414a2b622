"""LMDB's record of a key-value database is compared with its files: damage is reported, nothing acknowledged is
removed.

All of this happened silently: a flipped bit in the last record dropped a synced write, one in the last group of the
manifest led
to the removal of a log full of acknowledged writes, and a lost snapshot was read as an empty one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import quire
from quire.core.errors import Corruption
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.durable.log_writer import LogWriter
from quire.durable.names import LsmHome
from quire.durable.quarantine import entries
from quire.lsm.manifest_format import LOG_FIRST
from quire.lsm.verify import problems
from quire.lsm.wal import LOG_KIND, KvWal, encode_batch
from quire.lsm.witnesses import Owner
from quire.manifest import tables as t
from quire.store.store import Store
from tests.lsm.kv_helpers import TINY, assert_same, assert_sound, forget_ends

SETTINGS = StoreSettings(lsm=TINY, maintenance=MaintenanceSettings(enabled=False))


def open_store_in(path: Path) -> Store:
    return quire.open(path / "store", settings=SETTINGS)


@pytest.fixture
def closed(tmp_path: Path) -> tuple[Path, LsmHome, dict[bytes, bytes]]:
    """A database with a table and a log, closed cleanly."""
    with open_store_in(tmp_path) as store:
        kv = store.kv("cart", create=True)
        kv.write({b"%03d" % n: b"table" for n in range(20)})
        kv.flush()
        for n in range(5):
            kv.put(b"log%d" % n, b"synced")
        expected = dict(kv.scan())
    return tmp_path, LsmHome(kv.home.path), expected


def active_wal(home: LsmHome) -> Path:
    return max(Path(home.path, "wal").iterdir())


def files(home: LsmHome) -> list[Path]:
    return sorted(path for path in Path(home.path).rglob("*") if path.is_file())


def refused(base: Path) -> Corruption:
    with open_store_in(base) as store:
        store.kv("other", create=True).put(b"k", b"v")  # the store itself stays usable
        with pytest.raises(Corruption) as caught:
            store.kv("cart")
    return caught.value


def test_every_flipped_byte_of_the_logs_is_reported_after_a_clean_close(
    closed: tuple[Path, LsmHome, dict[bytes, bytes]],
) -> None:
    base, home, expected = closed
    for path in (active_wal(home), Path(home.manifest_log)):
        original = path.read_bytes()
        for at in {*range(0, len(original), 41), *range(len(original) - 60, len(original), 3), len(original) - 1}:
            path.write_bytes(original[:at] + bytes([original[at] ^ 4]) + original[at + 1 :])
            error = refused(base)
            assert "`quire kv repair cart`" in error.hint, (path, at)
        path.write_bytes(original)
    with open_store_in(base) as store:
        assert_same(store.kv("cart"), expected)


def test_a_log_cut_anywhere_is_reported_after_a_clean_close(closed: tuple[Path, LsmHome, dict[bytes, bytes]]) -> None:
    base, home, _ = closed
    for path in (active_wal(home), Path(home.manifest_log)):
        original = path.read_bytes()
        for size in {0, 20, 72, len(original) // 2, len(original) - 24, len(original) - 1}:
            path.write_bytes(original[:size])
            refused(base)
        path.write_bytes(original)


def test_every_missing_file_is_reported(closed: tuple[Path, LsmHome, dict[bytes, bytes]]) -> None:
    base, home, expected = closed
    for path in [*files(home), Path(home.path, "manifest"), Path(home.path, "wal"), Path(home.path, "sst")]:
        moved_to = base / "away"
        os.rename(path, moved_to)
        refused(base)
        if path.is_dir():
            shutil.rmtree(path)  # the attempt to open created an empty one
        os.rename(moved_to, path)
    with open_store_in(base) as store:
        assert_same(store.kv("cart"), expected)


def test_files_of_another_database_are_reported(closed: tuple[Path, LsmHome, dict[bytes, bytes]]) -> None:
    base, home, expected = closed
    with open_store_in(base) as store:
        other = store.kv("other", create=True)
        other.write({b"%03d" % n: b"theirs" for n in range(20)})
        other.flush()
        other.put(b"log", b"theirs")
    other_home = LsmHome(other.home.path)
    for own_file, other_file in zip(files(home), files(other_home), strict=True):
        original = own_file.read_bytes()
        own_file.write_bytes(other_file.read_bytes())
        refused(base)
        own_file.write_bytes(original)
    with open_store_in(base) as store:
        assert_same(store.kv("cart"), expected)


def test_an_older_copy_of_the_manifest_is_reported(closed: tuple[Path, LsmHome, dict[bytes, bytes]]) -> None:
    base, home, _ = closed
    shutil.copytree(Path(home.path, "manifest"), base / "older")
    for _ in range(2):
        with open_store_in(base) as store:
            kv = store.kv("cart")
            for n in range(30):
                kv.put(b"new%d" % n, b"v" * 50)
                kv.flush()
    assert Path(home.manifest_snapshot).exists(), "there were checkpoints since"
    shutil.copytree(Path(home.path, "manifest"), base / "newer")
    shutil.rmtree(Path(home.path, "manifest"))
    shutil.copytree(base / "older", Path(home.path, "manifest"))
    refused(base)
    shutil.copytree(base / "newer", Path(home.path, "manifest"), dirs_exist_ok=True)
    with open_store_in(base) as store:
        assert store.kv("cart").get(b"new29") is not None


def test_an_older_snapshot_of_the_manifest_is_reported(closed: tuple[Path, LsmHome, dict[bytes, bytes]]) -> None:
    base, home, _ = closed
    older: bytes = b""
    for _ in range(2):
        with open_store_in(base) as store:
            store.kv("cart").put(b"x", b"y")
            store.kv("cart").manifest.checkpoint()
            store.kv("cart").fold()
        older = older or Path(home.manifest_snapshot).read_bytes()
    Path(home.manifest_snapshot).write_bytes(older)
    assert "snapshot" in refused(base).what


def test_a_torn_tail_after_the_recorded_end_is_not_damage(closed: tuple[Path, LsmHome, dict[bytes, bytes]]) -> None:
    base, home, expected = closed
    for path in (active_wal(home), Path(home.manifest_log)):
        with path.open("ab") as file:
            file.write(b"half a record")
    with open_store_in(base) as store:
        assert_same(store.kv("cart"), expected)
        assert_sound(store.kv("cart"))


def crashed(base: Path, *, record: bool) -> tuple[LsmHome, dict[bytes, bytes]]:
    """A database whose owner died after its log was rotated; `record`: LMDB has recorded it."""
    with open_store_in(base) as store:
        kv = store.kv("cart", create=True)
        before = kv.manifest.log_bytes
        kv.upkeep.stop()  # frozen memtables are not flushed
        kv.put(b"first", b"1")
        with kv._writing:
            kv._freeze()
        assert kv.manifest.log_bytes > before
        kv.put(b"second", b"acknowledged")
        if record:
            store.kvs.record_ends()
        expected = dict(kv.scan())
        kv.abandon()
        return LsmHome(kv.home.path), expected


@pytest.mark.parametrize("record", [True, False])
def test_a_damaged_end_of_the_manifest_does_not_cause_a_log_to_be_swept(tmp_path: Path, record: bool) -> None:
    """The rotation is lost with the last group; the next log holds acknowledged writes."""
    home, expected = crashed(tmp_path, record=record)
    original = Path(home.manifest_log).read_bytes()
    for back in (40, 65, 80):
        Path(home.manifest_log).write_bytes(
            original[:-back] + bytes([original[-back] ^ 1]) + original[len(original) - back + 1 :]
        )
        error = refused(tmp_path)
        assert record or "outdated" in error.what
        assert len(os.listdir(f"{home.path}/wal")) == 2
        assert len(Path(home.manifest_log).read_bytes()) == len(original), (
            "the bytes after the damage are kept for a repair"
        )
    Path(home.manifest_log).write_bytes(original)
    with open_store_in(tmp_path) as store:
        assert_same(store.kv("cart"), expected)


def test_occasional_records_of_the_end_are_enough_to_detect_damage_after_a_crash(tmp_path: Path) -> None:
    home, expected = crashed(tmp_path, record=True)
    wal = active_wal(home)
    original = wal.read_bytes()
    for back in (1, 9, 30):
        wal.write_bytes(original[:-back] + bytes([original[-back] ^ 1]) + original[len(original) - back + 1 :])
        refused(tmp_path)
    wal.write_bytes(original)
    with open_store_in(tmp_path) as store:
        assert_same(store.kv("cart"), expected)


def test_the_next_log_without_a_record_is_garbage(tmp_path: Path) -> None:
    with open_store_in(tmp_path) as store:
        kv = store.kv("cart", create=True)
        kv.put(b"a", b"1")
        with armed("lsm.freeze.created", stop), pytest.raises(KeyboardInterrupt):
            kv.flush()
        kv.abandon()
    assert len(os.listdir(f"{kv.home.path}/wal")) == 2
    with open_store_in(tmp_path) as store:
        assert_same(store.kv("cart"), {b"a": b"1"})
    assert len(os.listdir(f"{kv.home.path}/wal")) == 1


def stop(_name: str) -> None:
    raise KeyboardInterrupt


def test_an_unreferenced_log_of_another_database_is_quarantined(
    closed: tuple[Path, LsmHome, dict[bytes, bytes]],
) -> None:
    base, home, expected = closed
    wal = KvWal.create(OsDisk(), home.wal(77), 77, Owner(b"x" * 16, 9))
    wal.append(encode_batch(1, {b"theirs": b""}))
    wal.close()
    with open_store_in(base) as store:
        assert_same(store.kv("cart"), expected)
    (entry,) = entries(OsDisk(), str(base / "store"))
    assert entry.path.endswith("wal/000077.log")
    assert "another database" in entry.why


def test_a_wal_is_removed_only_when_lmdb_has_the_flush(tmp_path: Path) -> None:
    with open_store_in(tmp_path) as store:
        kv = store.kv("cart", create=True)
        kv.put(b"a", b"1")
        kv.upkeep.stop()  # this thread flushes
        with armed("lsm.flush.folded", stop), pytest.raises(KeyboardInterrupt):
            kv.flush()
        assert len(os.listdir(f"{kv.home.path}/wal")) == 2
        with store.manifest.read() as txn:
            assert [key[1] for key, _ in txn.scan(t.LSM_CATALOG)] == [1]


@pytest.mark.parametrize("log_kind", ["wal", "manifest"])
def test_verify_reports_a_damaged_end_of_an_open_database(tmp_path: Path, log_kind: str) -> None:
    """`verify` took a damaged last record for a torn end, although the process knew that it had been synced."""
    with open_store_in(tmp_path) as store:
        kv = store.kv("cart", create=True)
        kv.put(b"a", b"1")
        assert_sound(kv)
        path = active_wal(LsmHome(kv.home.path)) if log_kind == "wal" else Path(kv.home.manifest_log)
        at = kv._wal.end - 1 if log_kind == "wal" else path.stat().st_size - 1
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        assert [problem.rule for problem in problems(kv)] == ["V6"]
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))


# ── stores that are older than the record ─────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def old(tmp_path: Path) -> tuple[Path, LsmHome]:
    with open_store_in(tmp_path) as store:
        kv = store.kv("cart", create=True)
        kv.put(b"table", b"1")
        kv.flush()
        kv.put(b"log", b"2")
        home = LsmHome(kv.home.path)
    wal, number = active_wal(home), kv.manifest.state().active_wal
    wal.unlink()
    with LogWriter.create(OsDisk(), str(wal), kind=LOG_KIND) as log:
        log.append(encode_batch(9, {b"log": b"2"}))
    events = [b"\x01" + (1).to_bytes(8, "little"), b"\x02" + number.to_bytes(8, "little")]
    events += [b"\x08" + (1).to_bytes(8, "little"), b"\x05" + (1).to_bytes(8, "little") + b"\x0e\x00sst/000001.sst"]
    with LogWriter.create(OsDisk(), home.manifest_log, kind=LOG_FIRST, replace=True) as log:
        log.append_many(events)
    return tmp_path, home


def test_logs_without_an_identity_are_still_read(old: tuple[Path, LsmHome]) -> None:
    base, home = old
    assert active_wal(home).read_bytes()[8] == 1
    with open_store_in(base) as store:
        with pytest.raises(Corruption, match="not the recorded one"):
            store.kv("cart")
        forget_ends(store)
        assert_same(store.kv("cart"), {b"table": b"1", b"log": b"2"})
        store.kv("cart").put(b"more", b"3")
    with open_store_in(base) as store:
        assert_same(store.kv("cart"), {b"table": b"1", b"log": b"2", b"more": b"3"})
        assert_sound(store.kv("cart"))
    wal = active_wal(home)  # from the first close on, its end is recorded as well
    wal.write_bytes(wal.read_bytes()[:-30])
    refused(base)


# ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_that_lost_its_files_is_an_error_and_never_empty(tmp_path: Path) -> None:
    with open_store_in(tmp_path) as store:
        for n in range(2):
            store.kv("cart", create=True).put(b"k%d" % n, b"v")
            store.snapshot("cart", f"s{n}")
        folder = Path(store.kv("cart").home.path, "snapshots")
        first, second = sorted(folder.iterdir())
        for path in (first / "manifest", first / "sst", first):
            moved_to = tmp_path / "away"
            os.rename(path, moved_to)
            with pytest.raises(Corruption):
                store.kvs.open_snapshot("cart", "s0")
            with pytest.raises(Corruption):
                store.fork("cart", "again", at="s0")
            if path.name != "sst":  # missing tables are noticed when they are read
                with pytest.raises(Corruption):
                    store.kvs.version("cart", "s0")
            shutil.rmtree(path, ignore_errors=True)
            os.rename(moved_to, path)
        with store.kvs.open_snapshot("cart", "s0") as snapshot:
            assert dict(snapshot.scan()) == {b"k0": b"v"}
        os.rename(first, tmp_path / "away")
        shutil.copytree(second, first)
        with pytest.raises(Corruption):
            store.kvs.open_snapshot("cart", "s0")
