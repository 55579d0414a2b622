"""The engine: every way of reading returns what was written, at every stage from memtable to deepest level."""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path

import msgspec
import pytest

from quire.core.errors import Corruption, InvalidInput, OutOfRange, Overloaded, StoreClosed
from quire.core.settings import LsmSettings
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.durable.log_format import NAMED_HEADER_BYTES
from quire.durable.open_files import OpenFiles
from quire.durable.quarantine import entries
from quire.lsm.kv import Kv
from quire.lsm.wal import KEY_BYTES_MAX, VALUE_BYTES_MAX
from tests.lsm.kv_helpers import TINY, Model, assert_range, assert_same, assert_sound, open_kv


def test_a_new_database_is_empty(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        assert_same(kv, {}, (b"", b"x"))
        assert kv.last_lsn == 0
        assert_sound(kv)


def test_writes_can_be_read_at_every_stage(tmp_path: Path) -> None:
    """In the memtable, frozen, flushed and compacted, and each of these after reopening."""
    model = Model()
    kv = open_kv(tmp_path)
    rng = random.Random(3)
    for stage in range(12):
        for _ in range(12):
            batch = {b"k%03d" % rng.randrange(90): rng.choice([None, rng.randbytes(20)]) for _ in range(3)}
            model.write(kv.write(batch, sync=False), batch)
        if stage % 4 == 1:
            kv.flush()
        if stage % 4 == 2:
            kv.compact()
        if stage % 4 == 3:
            kv.close()
            kv = open_kv(tmp_path)
        assert_same(kv, model.now, (b"k000", b"nothing", b""))
        assert_range(kv, model.now, b"k01", b"k05")
        assert_sound(kv)
    kv.close()


def test_an_empty_key_and_an_empty_value_are_allowed(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.write({b"": b"", b"\0": b"\0", b"\xff": b"x"})
        for step in (kv.sync, kv.flush, kv.compact):
            step()
            assert_same(kv, {b"": b"", b"\0": b"\0", b"\xff": b"x"}, (b"\0\0",))
        kv.delete(b"")
        assert kv.get(b"") is None


def test_a_batch_is_atomic(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        assert kv.write({}) == 0
        first = kv.write({b"a": b"1", b"b": b"2"})
        second = kv.write({b"a": None, b"c": b"3"})
        assert second == first + 1 == kv.last_lsn
        assert dict(kv.scan()) == {b"b": b"2", b"c": b"3"}


def test_prefixes_and_ranges(tmp_path: Path) -> None:
    keys = [b"a", b"ab", b"abc", b"b", b"b\xff", b"b\xff\xff", b"c"]
    with open_kv(tmp_path) as kv:
        kv.write(dict.fromkeys(keys, b"x"))
        assert [key for key, _ in kv.scan(prefix=b"ab")] == [b"ab", b"abc"]
        assert [key for key, _ in kv.scan(prefix=b"b\xff")] == [b"b\xff", b"b\xff\xff"]
        assert [key for key, _ in kv.scan(prefix=b"b\xff", reverse=True)] == [b"b\xff\xff", b"b\xff"]
        assert [key for key, _ in kv.scan(low=b"ab", high=b"b")] == [b"ab", b"abc"]
        assert list(kv.scan(low=b"z")) == list(kv.scan(low=b"b", high=b"a")) == []
        assert [batch.num_rows for batch in kv.scan_batches()] == [7]
        assert next(iter(kv.scan_batches())).schema.names == ["key", "value"]


def test_invalid_keys_are_refused_and_change_nothing(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        for batch in (
            {"text": b""},
            {b"k": "text"},
            {b"k": 7},
            {b"k": [1]},
        ):
            with pytest.raises(InvalidInput):
                kv.write(batch)  # type: ignore[arg-type]
        with pytest.raises(OutOfRange):
            kv.put(b"k" * (KEY_BYTES_MAX + 1), b"")
        with pytest.raises(OutOfRange):
            kv.put(b"k", bytes(VALUE_BYTES_MAX + 1))
        with pytest.raises(OutOfRange):
            kv.write({b"%d" % n: bytes(VALUE_BYTES_MAX) for n in range(3)})
        with pytest.raises(InvalidInput):
            kv.scan(prefix=b"a", low=b"b")
        assert kv.last_lsn == 0
        kv.put(b"k" * KEY_BYTES_MAX, b"fits")
        kv.flush()
        assert kv.get(b"k" * KEY_BYTES_MAX) == b"fits"


def test_a_closed_database_raises(tmp_path: Path) -> None:
    kv = open_kv(tmp_path)
    kv.put(b"a", b"1")
    snapshot, scan = kv.snapshot(), kv.scan()
    kv.close()
    kv.close()
    for use in (
        lambda: kv.put(b"a", b"2"),
        lambda: kv.get(b"b"),
        kv.snapshot,
        lambda: snapshot.get(b"a"),
        lambda: next(scan),
    ):
        with pytest.raises(StoreClosed):
            use()


# ── snapshots ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_is_unchanged_by_flushes_and_compactions(tmp_path: Path) -> None:
    model, rng = Model(), random.Random(7)
    with open_kv(tmp_path) as kv:
        snapshots = []
        for step in range(60):
            batch = {b"k%02d" % rng.randrange(30): rng.choice([None, b"v%d" % step]) for _ in range(4)}
            model.write(kv.write(batch, sync=False), batch)
            if step % 10 == 4:
                snapshots.append(kv.snapshot())
            if step % 7 == 0:
                kv.flush()
            if step % 13 == 0:
                kv.compact()
            if step == 40:
                snapshots.pop(1).close()
        for snapshot in snapshots:
            assert_same(snapshot, model.at[snapshot.lsn], (b"k00", b"k29"))
            assert_range(snapshot, model.at[snapshot.lsn], b"k05", b"k20")
            snapshot.close()
            with pytest.raises(StoreClosed):
                snapshot.get(b"k00")
        assert_same(kv, model.now)


def test_versions_that_no_snapshot_needs_are_removed_by_the_next_compaction(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        for value in range(50):
            kv.put(b"k", b"%d" % value, sync=False)
            if value == 20:
                snapshot = kv.snapshot()
            kv.flush()
        kv.compact()
        assert sum(table.meta.rows for table in kv.view.levels) == 2
        assert snapshot.get(b"k") == b"20"
        snapshot.close()
        kv.put(b"k", b"last")
        kv.compact()
        assert sum(table.meta.rows for table in kv.view.levels) == 1


def test_a_garbage_collected_snapshot_or_scan_holds_nothing(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.put(b"k", b"1")
        snapshot, scan = kv.snapshot(), kv.scan()
        next(scan)
        assert kv.snapshots.lsns() == (1,)
        del snapshot, scan
        gc.collect()
        assert kv.snapshots.lsns() == ()
        assert kv.snapshots.newest == 0


def test_deleting_everything_leaves_no_table(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.write({b"%d" % n: b"x" for n in range(100)})
        kv.flush()
        kv.write({b"%d" % n: None for n in range(100)})
        kv.compact()
        assert len(kv.view.levels) == 0
        assert os.listdir(f"{kv.home.path}/sst") == []
        assert_sound(kv)
    with open_kv(tmp_path) as kv:
        assert list(kv.scan()) == []
        assert kv.last_lsn == 2


def test_a_scan_does_not_see_later_writes(tmp_path: Path) -> None:
    with open_kv(tmp_path, settings=LsmSettings(block_bytes=4096)) as kv:
        before = {b"%05d" % n: b"v" * 50 for n in range(4_000)}
        kv.write(before)
        scan = kv.scan()
        pairs = [next(scan) for _ in range(10)]
        kv.write({b"%05d" % n: b"new" for n in range(0, 5_000, 2)})
        kv.flush()
        kv.compact()
        assert dict([*pairs, *scan]) == before


def test_a_file_that_a_scan_reads_is_kept_until_the_scan_ends(tmp_path: Path) -> None:
    with open_kv(tmp_path, settings=LsmSettings(block_bytes=4096)) as kv:
        before = {b"%05d" % n: b"v" * 50 for n in range(4_000)}
        kv.write(before)
        kv.flush()
        (old,) = os.listdir(f"{kv.home.path}/sst")
        scan = kv.scan()
        first = next(scan)
        kv.write({b"%05d" % n: b"new" for n in range(4_000)})
        kv.compact()
        assert old in os.listdir(f"{kv.home.path}/sst")
        assert_sound(kv)
        assert dict([first, *scan]) == before
        del scan
        kv.upkeep.collect()
        assert old not in os.listdir(f"{kv.home.path}/sst")


def test_an_iterator_moves_both_ways(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.write({b"%d" % n: b"" for n in range(0, 10, 2)})
        with kv.iterator() as cursor:
            kv.put(b"5", b"later")
            assert next(cursor)[0] == b"0"
            assert [key for key, _ in cursor.seek(b"3")] == [b"4", b"6", b"8"]
            assert [key for key, _ in cursor.seek_for_prev(b"5")] == [b"4", b"2", b"0"]
            assert next(cursor.seek_to_last())[0] == b"8"
            assert next(cursor.seek_to_first())[0] == b"0"


# ── recovery ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_orphans_are_swept_and_live_files_are_kept(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.put(b"a", b"1")
        kv.flush()
        home = kv.home
        orphan_id = kv.manifest.allocate_sst_id()
    named = os.listdir(f"{home.path}/sst")
    flushed = kv.manifest.state().active_wal - 1
    for orphan in (home.sst(orphan_id), home.wal(flushed), home.sst(5) + ".tmp"):
        Path(orphan).write_bytes(b"left over")
    Path(f"{home.path}/sst/notes.txt").write_text("somebody's")
    with open_kv(tmp_path) as kv:
        assert kv.get(b"a") == b"1"
    assert sorted(os.listdir(f"{home.path}/sst")) == sorted([*named, "notes.txt"])
    assert len(os.listdir(f"{home.path}/wal")) == 1
    (entry,) = entries(OsDisk(), home.path)  # no witness has the end of the manifest
    assert (entry.path, Path(home.path, entry.place).read_bytes()) == (f"sst/{orphan_id:06d}.sst", b"left over")


def test_a_missing_table_and_a_missing_wal_are_reported(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.put(b"a", b"1")
        kv.flush()
        home, wal = kv.home, kv.manifest.state().active_wal
    os.rename(home.wal(wal), home.wal(wal) + ".away")
    with pytest.raises(Corruption, match="write-ahead log is missing"):
        open_kv(tmp_path)
    os.rename(home.wal(wal) + ".away", home.wal(wal))
    os.remove(home.sst(1))
    with pytest.raises(Corruption, match="table is missing"):
        open_kv(tmp_path)


def test_a_lost_manifest_beside_tables_is_detected(tmp_path: Path) -> None:
    with open_kv(tmp_path) as kv:
        kv.put(b"a", b"1")
        kv.flush()
    os.remove(kv.home.manifest_log)
    with pytest.raises(Corruption, match="manifest is outdated"):
        open_kv(tmp_path)
    assert os.path.exists(kv.home.sst(1))


def test_a_wal_cut_at_every_byte_gives_a_prefix_of_history(tmp_path: Path) -> None:
    model = Model()
    with open_kv(tmp_path) as kv:
        for n in range(6):
            batch = {b"k%d" % (n % 3): b"v%d" % n, b"other": None if n % 2 else b"x"}
            model.write(kv.write(batch), batch)
        path = kv.home.wal(1)
        kv.abandon()
    original = Path(path).read_bytes()
    states = []
    for size in range(NAMED_HEADER_BYTES, len(original), 3):
        Path(path).write_bytes(original[:size])
        with open_kv(tmp_path) as kv:
            assert dict(kv.scan()) == model.at[kv.last_lsn]
            states.append(kv.last_lsn)
            kv.abandon()
    assert states == sorted(states)
    assert {0, 5} <= set(states)


def test_a_flush_interrupted_before_its_wal_is_released_resurrects_nothing(tmp_path: Path) -> None:
    """Rule 1 of recovery: a value that is replayed although a table has it would outlive the tombstone that is newer."""
    kv = open_kv(tmp_path)
    kv.put(b"k", b"old")
    kv.put(b"other", b"x")
    with armed("lsm.flush.recorded", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        kv.flush()
    wal = Path(kv.home.wal(1)).read_bytes()
    kv.abandon()
    manifest_with_wal = Kv.open(OsDisk(), kv.home.path, TINY, background=False)
    manifest_with_wal.manifest.add_frozen_wal(1)  # as if only the first of the two events were on disk
    manifest_with_wal.abandon()
    Path(kv.home.wal(1)).write_bytes(wal)
    with open_kv(tmp_path) as kv:
        assert not any(memtable.memtable.entries for memtable in kv.view.frozen)
        kv.delete(b"k")
        kv.compact()
        assert dict(kv.scan()) == {b"other": b"x"}
        kv.flush()
    with open_kv(tmp_path) as kv:
        assert dict(kv.scan()) == {b"other": b"x"}


@pytest.mark.parametrize("step", ["manifest", "tables", "settled"])
def test_an_open_that_fails_leaves_no_file_open(tmp_path: Path, step: str) -> None:
    """Hazard: each failed open kept the newest log open, so repeated attempts used up descriptors."""
    disk, path = OpenFiles(OsDisk(), 64, ticking=False), str(tmp_path)
    with Kv.open(disk, path, TINY, background=False) as kv:
        kv.put(b"a", b"1")
        kv.flush()
        kv.put(b"b", b"2")
    with armed(f"lsm.recovery.{step}", "raise:EIO"), pytest.raises(OSError, match="failpoint"):
        Kv.open(disk, path, TINY, background=False)
    assert not disk._entries
    with Kv.open(disk, path, TINY, background=False) as kv:
        assert dict(kv.scan()) == {b"a": b"1", b"b": b"2"}


# ── background ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_flushes_and_compactions_run_in_the_background(tmp_path: Path) -> None:
    model, rng = Model(), random.Random(11)
    with open_kv(tmp_path, background=True) as kv:
        for _ in range(300):
            batch = {b"k%03d" % rng.randrange(400): rng.choice([None, rng.randbytes(30)]) for _ in range(4)}
            model.write(kv.write(batch, sync=False), batch)
        assert kv.upkeep.flushes > 3
        kv.flush()
        assert_same(kv, model.now)
        assert kv.manifest.state().last_lsn > 0
    with open_kv(tmp_path) as kv:
        assert_same(kv, model.now)
        assert kv.upkeep.compactions or len(kv.view.levels.deeper) > 0
        assert_sound(kv)


def test_a_stalled_writer_waits_and_then_fails(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(TINY, stall_seconds=0.2, frozen_max=1)
    with armed("lsm.flush.begun", "sleep:600"), open_kv(tmp_path, settings=settings, background=True) as kv:
        with pytest.raises(Overloaded):  # noqa: PT012 - whichever of them meets it
            for n in range(100):
                kv.put(b"%d" % n, bytes(300), sync=False)
        count = kv.last_lsn
    with open_kv(tmp_path) as kv:
        assert len(list(kv.scan())) == count


def test_many_threads_write_and_read_at_once(tmp_path: Path) -> None:
    failures = list[BaseException]()
    with open_kv(tmp_path, background=True) as kv:

        def work(writer: int) -> None:
            try:
                for n in range(60):
                    kv.write({b"%d-%d" % (writer, n): b"v" * 20, b"shared": b"%d" % writer}, sync=n % 10 == 0)
                    assert kv.get(b"%d-%d" % (writer, n)) == b"v" * 20
                    if n % 15 == 0:
                        with kv.snapshot() as snapshot:
                            assert len(list(snapshot.scan(prefix=b"%d-" % writer))) == n + 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(writer,)) for writer in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(list(kv.scan())) == 301
        assert_sound(kv)
    with open_kv(tmp_path) as kv:
        assert len(list(kv.scan())) == 301
