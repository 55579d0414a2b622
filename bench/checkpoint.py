"""Checkpoint and merge on Spark against a hand-written loop in two processes: the same reads, zstd, checksums and writes.

The loop gets the frames of each slot; the job has to find them, to shuffle index rows, and to commit. Both read a warm page
cache, and the loop runs before and after the job. Starting the session and its workers is not measured, nor what a JVM loads
when it first shuffles: the session has run an action of each kind before, without pages.

Each size is a separate part: `--only checkpoint_1_gib` measures 1 GiB alone. The ratios about growth need 1 and 4 GiB.
"""

from __future__ import annotations

import hashlib
import heapq
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zstandard
from awscrt.checksums import crc64nvme
from pyroaring import BitMap

import quire
from bench.job_store import PAGE, PROCESSES, QUICK_DIVISOR, fill, new_store, remove, spark_runner, warm_up
from bench.report import GIB, MIB, Report, seconds
from quire.jobs.checkpoint.many import run_many
from quire.jobs.runner import Runner, Runners
from quire.manifest import tables as t
from quire.manifest.records import WalState
from quire.pages.catalog import chunk_place
from quire.pages.chunk_format import LEVEL, PAGES_PER_FRAME
from quire.pages.chunk_reader import ChunkReader
from quire.pages.segment import FRAME_HEAD_BYTES
from quire.pages.segment_scan import as_rows, page_map, sealed_entries

PAGES_PER_SLOT = 64 * MIB // PAGE
SMALL_DATABASES, QUICK_SMALL_DATABASES = 10_000, 200
DATABASE = "bench"


# ── the loop by hand ──────────────────────────────────────────────────────────────────────────────────────────────────
Frames = list[tuple[str, int, list[int]]]
"""(file of a segment, offset of its first frame, frame numbers)."""


def slot_by_hand(frames: Frames, target: str) -> int:
    """Read a slot's frames with their checksums; compress, checksum and write them. Return the bytes of pages."""
    compressor, parts, sha = zstandard.ZstdCompressor(level=LEVEL), list[bytes](), hashlib.sha256()
    stride, pages = PAGE + FRAME_HEAD_BYTES, list[bytes]()
    for path, start, numbers in frames:
        fd = os.open(path, os.O_RDONLY)
        for first, count in _runs(numbers):
            data = memoryview(os.pread(fd, count * stride, start + first * stride))
            for at in range(0, count * stride, stride):
                crc64nvme(data[at : at + stride])
                pages.append(bytes(data[at + FRAME_HEAD_BYTES : at + stride]))
        os.close(fd)
    for at in range(0, len(pages), PAGES_PER_FRAME):
        group = pages[at : at + PAGES_PER_FRAME]
        for page in group:
            crc64nvme(page)
        packed = compressor.compress(b"".join(group))
        crc64nvme(packed)
        sha.update(packed)
        parts.append(packed)
    _write(target, b"".join(parts))
    return len(pages) * PAGE


def _merged(chain: Sequence[ChunkReader]) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, image) of every page of a chain: the newest image of each, in ascending order."""
    taken, walks = BitMap(), []
    for chunk in reversed(chain):
        if owned := BitMap(chunk.pages) - taken:
            walks.append(chunk.iter_pages(owned))
            taken |= owned
    return heapq.merge(*walks, key=itemgetter(0))


def chain_by_hand(objects: Sequence[str], target: str) -> int:
    """Read a chain of chunks with their checksums; compress, checksum and write the newest pages. Return the bytes of pages."""
    compressor, parts, sha, size = zstandard.ZstdCompressor(level=LEVEL), list[bytes](), hashlib.sha256(), 0
    files = [os.open(path, os.O_RDONLY) for path in objects]
    readers = [ChunkReader(partial(_pread, fd), os.fstat(fd).st_size) for fd in files]
    group: list[bytes] = []

    def flush() -> None:
        packed = compressor.compress(b"".join(group))
        crc64nvme(packed)
        sha.update(packed)
        parts.append(packed)
        group.clear()

    for _, image in _merged(readers):
        crc64nvme(image)
        group.append(bytes(image))
        size += PAGE
        if len(group) == PAGES_PER_FRAME:
            flush()
    flush()
    _write(target, b"".join(parts))
    for fd in files:
        os.close(fd)
    return size


def _pread(fd: int, offset: int, length: int) -> bytes:
    return os.pread(fd, length, offset)


def _write(target: str, body: bytes) -> None:
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, body)
    os.fsync(fd)
    os.close(fd)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = count = 0
    for number in numbers:
        if count and number == start + count and count < 1_024:
            count += 1
            continue
        if count:
            yield start, count
        start, count = number, 1
    if count:
        yield start, count


def by_hand(work: Callable[..., int], tasks: Sequence[tuple[Any, str]]) -> float:
    """Return the seconds of the loop in two processes, without starting them."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(len, ["warm"] * 4)
        return seconds(lambda: pool.starmap(work, tasks, chunksize=1))


# ── the jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────────
class Counted:
    """A runner that counts its actions."""

    def __init__(self, runner: Any) -> None:
        self._runner, self.actions = runner, 0
        self.name, self.shares_disk, self.width = runner.name, runner.shares_disk, runner.width

    def map(self, *arguments: Any, **more: Any) -> Any:
        self.actions += 1
        return self._runner.map(*arguments, **more)

    def regroup(self, *arguments: Any, **more: Any) -> Any:
        self.actions += 1
        return self._runner.regroup(*arguments, **more)

    def unmatched(self, *arguments: Any, **more: Any) -> Any:
        self.actions += 1
        return self._runner.unmatched(*arguments, **more)


def run(store: quire.Store, kind: quire.JobKind, db_ids: Sequence[int], runner: Runner) -> None:
    """Run one job of a kind for each of these databases, in one run."""
    jobs = run_many(replace(store.context, runners=Runners(lambda: runner, "spark")), kind, db_ids)
    errors = [job.record.error for job in jobs if job.record.error]
    assert {job.state for job in jobs} == {quire.JobState.SUCCEEDED}, errors[:3]


@contextmanager
def peak_rss() -> Iterator[list[int]]:
    """Yield a list whose item is the growth of this process in bytes, sampled while the block runs."""
    process, over = psutil.Process(), threading.Event()
    before, growth = process.memory_info().rss, [0]

    def watch() -> None:
        while not over.wait(0.05):
            growth[0] = max(growth[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield growth
    over.set()
    thread.join()


def hand_tasks(store: quire.Store, db_id: int, target: Path) -> list[tuple[Frames, str]]:
    """Find the newest frames of each slot; return them with the file to write."""
    store.pages.flush(db_id)
    with store.manifest.read() as txn:
        rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, db_id) if row.state is WalState.INDEXED]
    arrays, files = [], {}
    for segment_id, row in rows:
        file = store.pages.sources.segment(db_id, segment_id)
        count = row.last_lsn - file.header.first_lsn + 1
        arrays.append(as_rows(file.header, sealed_entries(file.header, file.read_index(count), count, path=file.path)))
        files[segment_id] = (file.path, file.header.geometry.frame_offset(0))
    newest = page_map(np.concatenate(arrays), 1 << 62)
    tasks: list[tuple[Frames, str]] = []
    for slot in range(int(newest["page"].max()) // PAGES_PER_SLOT + 1):
        part = newest[newest["page"] // np.uint32(PAGES_PER_SLOT) == slot]
        frames = [
            (*files[segment], part["frame_no"][part["segment_id"] == segment].tolist())
            for segment in sorted(set(part["segment_id"].tolist()))
        ]
        tasks.append((frames, str(target / f"{slot}")))
    return tasks


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
Measured = dict[float, tuple[float, int]]
"""Size in GiB → (bytes per second, growth of the driver in bytes)."""

measured: Measured = {}


def one_size(gib: float, report: Report, directory: Path, quick: bool) -> None:
    """Checkpoint `gib` GiB of dirty pages, then merge the chunks."""
    size = int(gib * GIB) // (QUICK_DIVISOR if quick else 1)
    store, target = new_store(directory, "ours"), directory / "hand"
    target.mkdir(exist_ok=True)
    db_id = store.create(DATABASE, "pages").db_id
    fill(store, DATABASE, range(size // PAGE))
    runner = spark_runner(store)
    warm_up(runner)
    tasks = hand_tasks(store, db_id, target)
    before = by_hand(slot_by_hand, tasks)
    with peak_rss() as peak:
        ours = seconds(partial(run, store, quire.JobKind.CHECKPOINT, [db_id], runner))
    hand = (before + by_hand(slot_by_hand, tasks)) / 2
    measured[gib] = size / ours, peak[0]
    detail = (
        f"{size / ours / MIB:.0f} MiB/s, by hand {size / hand / MIB:.0f} MiB/s; driver grew {peak[0] / MIB:.0f} MiB"
    )
    report.ratio(f"checkpoint_{gib:g}_gib", hand / ours, None if gib < 1 else 0.7, "higher", detail)
    store.worker.drain()  # truncations and deletions are not part of a measured run
    merge_one(report, store, db_id, runner, target, gib, size)
    remove(store)


def checkpoint_quarter_gib(report: Report, directory: Path, quick: bool) -> None:
    """Checkpoint 0.25 GiB of dirty pages."""
    one_size(0.25, report, directory, quick)


def checkpoint_1_gib(report: Report, directory: Path, quick: bool) -> None:
    """Checkpoint 1 GiB of dirty pages."""
    one_size(1.0, report, directory, quick)


def checkpoint_4_gib(report: Report, directory: Path, quick: bool) -> None:
    """Checkpoint 4 GiB of dirty pages; compare the speed and the driver's memory with those of 1 GiB."""
    one_size(4.0, report, directory, quick)
    if 1.0 not in measured:
        return
    (slow, small), (fast, large) = measured[1.0], measured[4.0]
    sizes = "from 1 to 4 GiB"
    report.ratio("checkpoint_speed_keeps", fast / slow, 0.8, "higher", f"{sizes}: near-linear in size")
    growth = max(large, 16 * MIB) / max(small, 16 * MIB)
    report.ratio("driver_growth_keeps", growth, 1.5, "lower", f"{sizes}: flat")


def merge_one(
    report: Report, store: quire.Store, db_id: int, runner: Runner, target: Path, gib: float, size: int
) -> None:
    """Give each slot a chain of two chunks, and merge them."""
    pages = size // PAGE
    fill(store, DATABASE, range(0, pages, 16))
    run(store, quire.JobKind.CHECKPOINT, [db_id], runner)
    store.worker.drain()
    tasks = []
    with store.manifest.read() as txn:
        for slot in range((pages - 1) // PAGES_PER_SLOT + 1):
            chain = [chunk_place(txn, link.artifact(slot), store.objects_url) for link in txn.chain(db_id, slot)]
            assert len(chain) > 1
            tasks.append(([os.path.join(place.url, place.object_key) for place in chain], str(target / f"{slot}")))
    before = by_hand(chain_by_hand, tasks)
    ours = seconds(lambda: run(store, quire.JobKind.MERGE, [db_id], runner))
    hand = (before + by_hand(chain_by_hand, tasks)) / 2
    detail = f"{size / ours / MIB:.0f} MiB/s, by hand {size / hand / MIB:.0f} MiB/s"
    report.ratio(f"merge_{gib:g}_gib", hand / ours, None if gib < 1 else 0.7, "higher", detail)


def small_databases(report: Report, directory: Path, quick: bool) -> None:
    """Checkpoint many databases of a few pages, in one run."""
    count = QUICK_SMALL_DATABASES if quick else SMALL_DATABASES
    store = new_store(directory, "many")

    def create(number: int) -> int:
        db_id = store.create(f"db-{number}", "pages").db_id
        with store.pages.open(db_id).begin() as txn:
            for page in range(4):
                txn.write_page(page, number.to_bytes(8, "big") * (PAGE // 8))
        store.pages.flush(db_id)
        store.pages.close_database(db_id)
        return db_id

    with ThreadPoolExecutor(16) as pool:
        db_ids = list(pool.map(create, range(count)))
    runner = Counted(spark_runner(store))
    warm_up(runner)
    runner.actions = 0
    started = time.perf_counter()
    run(store, quire.JobKind.CHECKPOINT, db_ids, runner)
    took = time.perf_counter() - started
    detail = f"{count:,} databases in {took:.1f} s: {count / took:.0f}/s"
    report.ratio("spark_actions_for_many_databases", float(runner.actions), 1.0, "lower", detail)
    report.figure("small_databases_per_second", count / took)
    remove(store)


PARTS = [checkpoint_quarter_gib, checkpoint_1_gib, checkpoint_4_gib, small_databases]
