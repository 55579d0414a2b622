"""The key-value engine against RocksDB (through rocksdict), and a dictionary as the limit.

How the opponents are made fair: the same keys in the same random order, the same values (half of each compresses), one process,
alternating. RocksDB has its defaults and raw bytes (no pickling); its synced writes have its option `sync`, and its data is
flushed and compacted before tables are read. Reads are warm: each contender reads everything once before it is measured.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import quire
from bench.report import MIB, Report, alternate, rate, seconds

BATCH = 1_000
BLOCK = 25
"""Synced writes in one turn of a contender. Turns are short because the speed of the disk changes within seconds."""
NO_ROCKS = "rocksdict is not installed"
LARGE = quire.LsmSettings(memtable_bytes=512 * MIB, cache_bytes=512 * MIB)
"""Nothing is flushed while memtables are measured, and everything fits into the cache while tables are measured."""
QUIET = quire.StoreSettings(maintenance=quire.MaintenanceSettings(enabled=False))


def pairs(count: int) -> tuple[list[bytes], bytes]:
    """Return keys in random order, and the value of all of them, half of which is noise."""
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
    """Open a new database outside of a store, as RocksDB has none. The store that is opened here only supplies the disk."""
    shutil.rmtree(directory / "kv", ignore_errors=True)
    with quire.open(directory / "store", settings=QUIET) as store:
        return quire.Kv.open(store.disk, str(directory / "kv"), LARGE)


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
    """Put one key per sync."""
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
    """Put a thousand keys per sync. Building the batch is measured, too."""
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
    """Put without waiting for the disk, and get keys that are in the memtable."""
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
    """Get keys that exist and keys that do not, and scan, in a compacted database."""
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
    for name, keys_to_get, target in (("table_get", probes, 0.8), ("negative_get", absent, 1.0)):
        contenders = [getter(kv.get, keys_to_get)] + ([getter(rocks.db.get, keys_to_get)] if rocks else [])
        for contender in contenders:
            contender()  # warm
        figures = alternate(rounds, *contenders)
        ratio(report, name, figures[0], figures[1] if rocks else None, target)
    many_and_few(report, kv, rocks, keys, rounds)

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

    # This returns Python pairs, as RocksDB does. The batches above create no object per row.
    rows = alternate(rounds, lambda: per_second(len(keys), row_scan))
    ratio(report, "row_scan", rows[0], figures[1] if rocks else None, None, " rows")
    kv.close()
    if rocks is not None:
        rocks.close()


def many_and_few(report: Report, kv: quire.Kv, rocks: Rocks | None, keys: list[bytes], rounds: int) -> None:
    """Get a hundred keys in one call, and scan twenty keys: of a range with an end, or of one abandoned after twenty."""
    probes = random.Random(4).sample(keys, 20_000)
    hundreds = [probes[start : start + 100] for start in range(0, len(probes), 100)]
    ours: list[Callable[[], float]] = [getter(kv.get_many, hundreds)]
    theirs = [getter(rocks.db.get, hundreds)] if rocks else []
    figures = alternate(rounds, *ours, *theirs)
    ratio(report, "get_many_100", 100 * figures[0], 100 * figures[1] if rocks else None, 1.0, " keys")
    # Keys have 16 digits, so a prefix of 15 digits has ten keys, and two of them have twenty.
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


PARTS = (synced_puts, synced_batches, memtable, tables)
