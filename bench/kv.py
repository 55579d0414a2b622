"""The key-value engine against RocksDB (through rocksdict), a dictionary as the limit, and what it is made of: pyarrow.

How the opponents are made fair: the same keys in the same random order, the same values (half of each compresses), one
process, taking turns; RocksDB with its defaults and raw bytes (no pickling), synced writes with its `sync` option, its data
flushed and compacted before tables are read. Reads are warm: each contender reads everything once before the clock starts.
The manifest's replay is against a bare loop: unpack, checksum, one step of a dictionary.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import quire
from bench.report import Report, alternate, rate, seconds
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.files import OsDisk, read_all
from quire.durable.log_format import HEAD, HEADER_BYTES, LINK
from quire.durable.log_writer import LogWriter
from quire.durable.names import LsmHome, sst_entry_path
from quire.lsm.compaction import VersionRetention, table_options
from quire.lsm.manifest import Manifest
from quire.lsm.manifest_data import AddSst, AllocateSstId, ManifestSstEntry, RemoveSst, UpdateLsn
from quire.lsm.manifest_format import LOG_FIRST, encode_event
from quire.lsm.merge import SORT_KEYS, merge_tables
from quire.lsm.sst_format import SCHEMA
from quire.lsm.sst_reader import SSTable
from quire.lsm.sst_writer import TableWriter

BATCH = 1_000
BLOCK = 25
"""Synced writes between two turns of the contenders: the disk's mood changes within seconds."""
NO_ROCKS = "rocksdict is not installed"
LARGE = quire.LsmSettings(memtable_bytes=512 * MIB, cache_bytes=512 * MIB)
"""Nothing is flushed while memtables are measured, and everything fits the cache while tables are."""


def pairs(count: int) -> tuple[list[bytes], bytes]:
    """Keys in random order, and the value they all get: half noise, half not."""
    keys = [b"%016d" % number for number in range(count)]
    random.Random(1).shuffle(keys)
    return keys, random.Random(2).randbytes(50) + b"x" * 50


class Rocks:
    """RocksDB with its defaults."""

    def __init__(self, path: Path) -> None:
        from rocksdict import Options, Rdict, WriteOptions

        self.db = Rdict(str(path), Options(raw_mode=True))
        self.synced = WriteOptions()
        self.synced.sync = True
        self.unsynced = WriteOptions()

    def put_batch(self, keys: Sequence[bytes], value: bytes) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key in keys:
            batch.put(key, value)
        self.db.write(batch, write_opt=self.synced)

    def close(self) -> None:
        self.db.close()


def rocks_in(directory: Path) -> Rocks | None:
    with suppress(ImportError):
        shutil.rmtree(directory / "rocks", ignore_errors=True)
        return Rocks(directory / "rocks")
    return None


def kv_in(directory: Path) -> quire.Kv:
    shutil.rmtree(directory / "kv", ignore_errors=True)
    return quire.Kv.open(OsDisk(), str(directory / "kv"), LARGE)


def per_second(count: int, work: Callable[[], Any]) -> float:
    return count / seconds(work)


def ratio(report: Report, name: str, ours: float, theirs: float | None, target: float | None, unit: str = "") -> None:
    detail = f"{rate(ours)}{unit}" + (f" against {rate(theirs)}" if theirs else "")
    report.figure(name, ours)
    report.ratio(
        f"{name}_vs_rocksdb", ours / theirs if theirs else None, target, "higher", detail if theirs else NO_ROCKS
    )


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def synced_puts(report: Report, directory: Path, quick: bool) -> None:
    """One put, one sync."""
    keys, value = pairs(1_000 if quick else 4_000)
    rocks, kv = rocks_in(directory), kv_in(directory)
    ours, theirs = list[float](), list[float]()
    for start in range(0, len(keys), BLOCK):
        block = keys[start : start + BLOCK]
        ours.append(timed(partial(put_all, kv.put, block, value)))
        if rocks is not None:
            theirs.append(timed(partial(put_all, partial(rocks.db.put, write_opt=rocks.synced), block, value)))
    kv.close()
    ratio(report, "synced_put", BLOCK / statistics.median(ours), _of(BLOCK, theirs), 0.8)
    if rocks is not None:
        rocks.close()


def synced_batches(report: Report, directory: Path, quick: bool) -> None:
    """A thousand puts, one sync; making the batch is part of it."""
    keys, value = pairs(50_000 if quick else 200_000)
    rocks, kv = rocks_in(directory), kv_in(directory)
    ours, theirs = list[float](), list[float]()

    def write(block: list[bytes]) -> None:
        batch: dict[bytes, bytes | None] = {}
        for key in block:
            batch[key] = value
        kv.write(batch)

    for start in range(0, len(keys), BATCH):
        block = keys[start : start + BATCH]
        ours.append(timed(partial(write, block)))
        if rocks is not None:
            theirs.append(timed(partial(rocks.put_batch, block, value)))
    kv.close()
    ratio(report, "synced_batch", BATCH / statistics.median(ours), _of(BATCH, theirs), 0.5, " puts")
    if rocks is not None:
        rocks.close()


def put_all(put: Callable[[bytes, bytes], object], keys: list[bytes], value: bytes) -> None:
    for key in keys:
        put(key, value)


def timed(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _of(count: int, times: list[float]) -> float | None:
    return count / statistics.median(times) if times else None


def memtable(report: Report, directory: Path, quick: bool) -> None:
    """Puts that nobody waits for, and gets of what was just put."""
    keys, value = pairs(50_000 if quick else 200_000)
    probes = random.Random(3).sample(keys, len(keys) // 2)
    rocks, kv, limit = rocks_in(directory), kv_in(directory), dict[bytes, bytes]()
    step = len(keys) // 10
    puts: list[list[float]] = [[], [], []]
    for start in range(0, len(keys), step):
        block = keys[start : start + step]
        puts[0].append(per_second(step, partial(put_all, partial(kv.put, sync=False), block, value)))
        puts[2].append(per_second(step, partial(put_all, limit.__setitem__, block, value)))
        if rocks is not None:
            unsynced = partial(rocks.db.put, write_opt=rocks.unsynced)
            puts[1].append(per_second(step, partial(put_all, unsynced, block, value)))
    ratio(report, "unsynced_put", statistics.median(puts[0]), statistics.median(puts[1]) if rocks else None, 0.3)
    report.figure("dict_put", statistics.median(puts[2]))
    contenders = [getter(kv.get, probes), getter(limit.get, probes)]
    if rocks is not None:
        contenders.append(getter(rocks.db.get, probes))
    figures = alternate(3 if quick else 7, *contenders)
    ratio(report, "memtable_get", figures[0], figures[2] if rocks else None, 0.5)
    report.figure("dict_get", figures[1])
    kv.close()
    if rocks is not None:
        rocks.close()


def getter(get: Callable[[Any], Any], keys: Sequence[Any]) -> Callable[[], float]:
    def work() -> None:
        for key in keys:
            get(key)

    return lambda: per_second(len(keys), work)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def tables(report: Report, directory: Path, quick: bool) -> None:
    """Gets, negative lookups and scans of a compacted database."""
    keys, value = pairs(100_000 if quick else 400_000)
    rocks, kv = rocks_in(directory), kv_in(directory)
    for start in range(0, len(keys), BATCH):
        kv.write(dict.fromkeys(keys[start : start + BATCH], value), sync=False)
        if rocks is not None:
            rocks.put_batch(keys[start : start + BATCH], value)
    kv.compact()
    if rocks is not None:
        rocks.db.flush()
        rocks.db.compact_range(None, None)
    probes = random.Random(3).sample(keys, len(keys) // 5)
    absent = [key + b"!" for key in probes]
    rounds = 3 if quick else 7
    for name, asked, target in (("table_get", probes, 0.8), ("negative_get", absent, 1.0)):
        contenders = [getter(kv.get, asked)] + ([getter(rocks.db.get, asked)] if rocks else [])
        for contender in contenders:
            contender()  # warm
        figures = alternate(rounds, *contenders)
        ratio(report, name, figures[0], figures[1] if rocks else None, target)
    many_and_few(report, kv, rocks, keys, rounds)
    hashes = sum(table.bloom.may_contain(hash_of(key)) for table in kv.view.levels for key in absent[:10_000])
    report.figure("bloom_false_positives", hashes / min(10_000, len(absent)) / max(1, len(kv.view.levels)))

    def scan() -> None:
        assert sum(batch.num_rows for batch in kv.scan_batches()) == len(keys)

    def rocks_scan() -> None:
        assert rocks is not None
        assert sum(1 for _ in rocks.db.items()) == len(keys)

    contenders = [lambda: per_second(len(keys), scan)]
    contenders += [lambda: per_second(len(keys), rocks_scan)] if rocks else []
    figures = alternate(rounds, *contenders)
    ratio(report, "batch_scan", figures[0], figures[1] if rocks else None, 1.0, " rows")

    def row_scan() -> None:
        assert sum(1 for _ in kv.scan()) == len(keys)

    # RocksDB hands out Python pairs; so does this. The batches above make no object for each row.
    rows = alternate(rounds, lambda: per_second(len(keys), row_scan))
    ratio(report, "row_scan", rows[0], figures[1] if rocks else None, None, " rows")
    kv.close()
    if rocks is not None:
        rocks.close()


def many_and_few(report: Report, kv: quire.Kv, rocks: Rocks | None, keys: list[bytes], rounds: int) -> None:
    """A hundred keys in one call; and short scans: twenty keys by prefix, or by a range that is left after twenty."""
    probes = random.Random(4).sample(keys, 20_000)
    hundreds = [probes[start : start + 100] for start in range(0, len(probes), 100)]
    ours: list[Callable[[], float]] = [getter(kv.get_many, hundreds)]
    theirs = [getter(rocks.db.get, hundreds)] if rocks else []
    figures = alternate(rounds, *ours, *theirs)
    ratio(report, "get_many_100", 100 * figures[0], 100 * figures[1] if rocks else None, 1.0, " keys")
    # Keys are 16 digits, so those of a prefix of 15 are ten; a second one makes twenty.
    starts = [b"%015d" % (2 * number) for number in random.Random(5).sample(range(len(keys) // 20), 1_000)]

    def scan_ours(start: bytes) -> None:
        assert len(list(kv.scan(low=start, high=b"%015d" % (int(start) + 2)))) == 20

    def scan_theirs(start: bytes) -> None:
        from rocksdict import ReadOptions

        assert rocks is not None
        bound = ReadOptions()
        bound.set_iterate_upper_bound(b"%015d" % (int(start) + 2))
        assert len(list(rocks.db.items(from_key=start, read_opt=bound))) == 20

    def twenty(items: Callable[[bytes], Iterator[Any]]) -> Callable[[bytes], None]:
        def work(start: bytes) -> None:
            assert len(list(islice(items(start), 20))) == 20

        return work

    for name, mine, yours in (
        ("scan_20_of_a_range", scan_ours, scan_theirs),
        (
            "scan_20_then_stop",
            twenty(lambda start: kv.scan(low=start)),
            twenty(lambda start: rocks.db.items(from_key=start)) if rocks else scan_theirs,
        ),
    ):
        contenders = [getter(mine, starts)] + ([getter(yours, starts)] if rocks else [])
        for contender in contenders:
            contender()  # warm
        figures = alternate(rounds, *contenders)
        ratio(report, name, figures[0], figures[1] if rocks else None, 0.5, " scans")


def hash_of(key: bytes) -> int:
    from quire.lsm.bloom import hash_key

    return hash_key(key)


def compaction(report: Report, directory: Path, quick: bool) -> None:
    """Four overlapping tables into one level, against pyarrow: concatenate, sort by key and lsn, write the same batches."""
    count, runs = (50_000, 4) if quick else (250_000, 4)
    folder = directory / "compaction"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    disk, options, keep = OsDisk(), table_options(LARGE), VersionRetention()
    keys, value = pairs(count * runs)
    inputs, batches = [], []
    for number in range(runs):
        mine = sorted(keys[number * count : (number + 1) * count])
        lsns = pa.array(range(number * count, (number + 1) * count), pa.uint64())
        columns = [pa.array(mine, pa.binary()), pa.array([value] * count, pa.binary()), lsns, pa.array([False] * count)]
        batches.append(pa.record_batch(columns, schema=SCHEMA))
        writer = TableWriter(number + 1, 0, options)
        writer.add(batches[-1])
        writer.write(disk, str(folder / f"in{number}.sst"))
        inputs.append(SSTable.open(disk, str(folder / f"in{number}.sst")))
    numbers = iter(range(100, 1_000_000))

    def ours() -> None:
        def new_table() -> tuple[int, str]:
            number = next(numbers)
            return number, str(folder / f"{number}.sst")

        outputs = merge_tables(
            disk, inputs, keep, level=1, table_bytes=LARGE.table_bytes, options=options, new_table=new_table
        )
        assert sum(meta.rows for _, meta in outputs) == count * runs

    def arrow(threads: bool) -> None:
        read = [pa.ipc.open_file(str(folder / f"in{number}.sst")).read_all() for number in range(runs)]
        whole = pa.concat_tables(read).combine_chunks()
        whole = whole.take(pc.sort_indices(whole, sort_keys=SORT_KEYS))
        rows = len(whole) * LARGE.block_bytes // max(1, whole.nbytes)
        with pa.ipc.new_file(
            str(folder / "arrow.ipc"),
            SCHEMA,
            options=pa.ipc.IpcWriteOptions(compression="lz4", use_threads=threads),
        ) as writer:
            for batch in whole.to_batches(max_chunksize=rows):
                writer.write_batch(batch)
        fd = os.open(folder / "arrow.ipc", os.O_RDONLY)
        os.fdatasync(fd)
        os.close(fd)

    rows = count * runs
    ours_rate, threaded, single = alternate(
        3 if quick else 5,
        lambda: per_second(rows, ours),
        lambda: per_second(rows, lambda: arrow(True)),
        lambda: per_second(rows, lambda: arrow(False)),
    )
    figures = [ours_rate, max(threaded, single)]  # the opponent in its better form
    report.figure("compaction_rows", figures[0])
    report.figure("pyarrow_rows_threads", threaded)
    report.figure("pyarrow_rows_one_thread", single)
    report.ratio(
        "compaction_vs_pyarrow",
        figures[0] / figures[1],
        0.5,
        "higher",
        f"{rate(figures[0])} rows against {rate(figures[1])}",
    )
    for table in inputs:
        table.close()
    shutil.rmtree(folder)


# ── manifest ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def manifest(report: Report, directory: Path, quick: bool) -> None:
    """Opening a manifest with a long log against a bare loop over the same bytes; and after a checkpoint, against a new one."""
    count = 20_000 if quick else 100_000
    home = LsmHome(str(directory / "manifest"))
    shutil.rmtree(home.path, ignore_errors=True)
    Path(home.path, "manifest").mkdir(parents=True)
    with LogWriter.create(OsDisk(), home.manifest_log, kind=LOG_FIRST) as log:
        for start in range(1, count // 4 + 1, 250):
            log.append_many(record for number in range(start, start + 250) for record in events(number))

    def ours() -> None:
        opened = Manifest.open(OsDisk(), home)
        assert opened.state().next_sst_id == count // 4 + 1
        opened.abandon()

    def bare() -> None:
        bare_replay(read_all(OsDisk(), home.manifest_log))

    figures = alternate(3 if quick else 7, lambda: per_second(count, ours), lambda: per_second(count, bare))
    report.figure("manifest_replay", figures[0])
    report.ratio(
        "manifest_replay_vs_bare_loop",
        figures[0] / figures[1],
        0.6,
        "higher",
        f"{rate(figures[0])} events against {rate(figures[1])}",
    )
    with Manifest.open(OsDisk(), home) as opened:
        for number in list(opened.state().tables):
            opened.remove_sst(number)
        opened.checkpoint()
    new = LsmHome(str(directory / "manifest-new"))
    with Manifest.open(OsDisk(), new) as opened:
        opened.checkpoint()

    def opening(where: LsmHome) -> float:
        return seconds(lambda: Manifest.open(OsDisk(), where).abandon())

    openings = alternate(15, lambda: opening(home), lambda: opening(new))
    report.ratio(
        "start_after_checkpoint_vs_new",
        openings[0] / openings[1],
        1.5,
        "lower",
        f"{openings[0] * 1e3:.2f} ms with {count:,} events of history, {openings[1] * 1e3:.2f} ms without",
    )


def events(number: int) -> list[bytes]:
    """What a flush and a compaction log, roughly."""
    entry = ManifestSstEntry(number, sst_entry_path(number))
    made = (AllocateSstId(number), AddSst(entry), UpdateLsn(number * 100), RemoveSst(max(0, number - 40)))
    return [encode_event(each) for each in made]


def bare_replay(data: bytes) -> None:
    """Unpack, checksum, one dictionary step: what no replay can do without."""
    seen: dict[int, int] = {}
    crc, head, tail, one = crc64, HEAD.unpack_from, LINK.unpack_from, struct.Struct("<BQ").unpack_from
    view, at, last = memoryview(data), HEADER_BYTES, len(data) - 24
    (link,) = tail(data, HEADER_BYTES - 8)
    while at <= last:
        length, _, _ = head(data, at)
        end = at + 16 + length
        (found,) = tail(data, end)
        if crc(view[at:end], link) != found:
            raise AssertionError("the log is damaged")
        link = found
        if length:
            tag, number = one(data, at + 16)
            seen[tag] = number
        at = end + 8


def spark_load(report: Report, directory: Path, quick: bool) -> None:
    """See kv_spark.py; loaded only here, because it starts a JVM."""
    try:
        from bench.kv_spark import bulk_load_vs_pyarrow
    except ImportError as error:
        report.ratio("spark_bulk_load_vs_pyarrow", None, 0.9, "higher", f"pyspark is not installed: {error}")
        return
    bulk_load_vs_pyarrow(report, directory, quick)


PARTS = (synced_puts, synced_batches, memtable, tables, compaction, manifest, spark_load)
