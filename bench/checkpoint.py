"""Checkpoint and merge on Spark against a hand-written loop in two processes: the same reads, zstd, checksums and writes.

The loop knows beforehand which frames belong to which slot; ours has to find out, to shuffle index rows, and to commit. Both
read a warm page cache, and the loop runs before and after ours. Starting the session and its workers is not counted, nor what
a JVM loads when it shuffles for the first time: a session has run an action of each kind before, without pages.

Each size is a part of its own: `--only checkpoint_1_gib` measures 1 GiB alone; what is said about growing needs two of them.
"""

from __future__ import annotations

import hashlib
import heapq
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import psutil
import zstandard
from pyroaring import BitMap

import quire
from bench.pages import PAGE, World
from bench.report import Report, seconds
from quire.core.limits import GIB, MIB
from quire.durable.checksums import crc64
from quire.durable.files import OsDisk
from quire.jobs.checkpoint.many import run_many
from quire.jobs.context import JobContext
from quire.jobs.locations import StorePool
from quire.jobs.registry import HANDLERS
from quire.jobs.runner import Runner, Runners
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.namespaces import collector_of
from quire.manifest.records import WalState
from quire.objects import open_store
from quire.pages.chunk_format import LEVEL, PAGES_PER_FRAME
from quire.pages.chunk_reader import ChunkReader
from quire.pages.pagestore import PageStore
from quire.pages.segment import FRAME_HEAD_BYTES
from quire.pages.segment_scan import as_rows, page_map, sealed_entries

PROCESSES = 2
TRANSACTION_PAGES = 4_096
PAGES_PER_SLOT = 64 * MIB // PAGE
QUICK_DIVISOR = 16
"""What `--quick` makes of a size; the loop by hand is as small then, and Spark's floor is not."""
SMALL_DATABASES, QUICK_SMALL_DATABASES = 10_000, 200
SETTINGS = quire.PagesSettings(
    wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB, cold_bytes_per_second=0, seal_seconds=3_600.0
)
TEXT = (b"quire keeps every version " * PAGE)[: PAGE // 2]
MAINTENANCE = quire.MaintenanceSettings(delete_grace_seconds=0, workers=PROCESSES)


# ── the loop by hand ──────────────────────────────────────────────────────────────────────────────────────────────────
Frames = list[tuple[str, int, list[int]]]
"""(file of a segment, where its first frame is, frame numbers)."""


def slot_by_hand(frames: Frames, target: str) -> int:
    """Read a slot's frames with their checksums, compress, checksum and write them; bytes of pages."""
    compressor, parts, sha = zstandard.ZstdCompressor(level=LEVEL), list[bytes](), hashlib.sha256()
    stride, pages = PAGE + FRAME_HEAD_BYTES, list[bytes]()
    for path, start, numbers in frames:
        fd = os.open(path, os.O_RDONLY)
        for first, count in _runs(numbers):
            data = memoryview(os.pread(fd, count * stride, start + first * stride))
            for at in range(0, count * stride, stride):
                crc64(data[at : at + stride])
                pages.append(bytes(data[at + FRAME_HEAD_BYTES : at + stride]))
        os.close(fd)
    for at in range(0, len(pages), PAGES_PER_FRAME):
        group = pages[at : at + PAGES_PER_FRAME]
        for page in group:
            crc64(page)
        packed = compressor.compress(b"".join(group))
        crc64(packed)
        sha.update(packed)
        parts.append(packed)
    _write(target, b"".join(parts))
    return len(pages) * PAGE


def _merged(chain: Sequence[ChunkReader]) -> Iterator[tuple[int, bytes]]:
    """(offset, image) of every page of a chain, the newest image of each, in rising order."""
    taken, walks = BitMap(), []
    for chunk in reversed(chain):
        if owned := BitMap(chunk.pages) - taken:
            walks.append(chunk.iter_pages(owned))
            taken |= owned
    return heapq.merge(*walks, key=itemgetter(0))


def chain_by_hand(objects: Sequence[str], target: str) -> int:
    """Read a chain of chunks with their checksums, compress, checksum and write the newest pages; bytes of pages."""
    compressor, parts, sha, size = zstandard.ZstdCompressor(level=LEVEL), list[bytes](), hashlib.sha256(), 0
    files = [os.open(path, os.O_RDONLY) for path in objects]
    readers = [ChunkReader(partial(_pread, fd), os.fstat(fd).st_size) for fd in files]
    group: list[bytes] = []

    def flush() -> None:
        packed = compressor.compress(b"".join(group))
        crc64(packed)
        sha.update(packed)
        parts.append(packed)
        group.clear()

    for _, image in _merged(readers):
        crc64(image)
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
    """Seconds of the loop in two processes; starting them is not counted."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.map(len, ["warm"] * 4)
        return seconds(lambda: pool.starmap(work, tasks, chunksize=1))


# ── ours ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
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


def context_of(world: World) -> JobContext:
    return JobContext(
        manifest=world.manifest,
        root=world.root,
        disk=OsDisk(),
        objects_url=world.objects,
        open_store=StorePool(open_store),
        collector=collector_of(world.manifest, world.objects, open_store),
        settings=MAINTENANCE,
        pages=world.engine,
    )


def spark_runner(world: World) -> Any:
    """A session that has run something."""
    from quire.spark import SparkRunner, session

    return SparkRunner(session(), root=world.root, objects_url=world.objects)


def run(world: World, kind: quire.JobKind, db_ids: Sequence[int], runner: Runner) -> list[Job]:
    jobs = run_many(replace(context_of(world), runners=Runners(lambda: runner, "spark")), kind, db_ids)
    assert {job.state for job in jobs} == {quire.JobState.SUCCEEDED}, [
        job.record.error for job in jobs if job.record.error
    ][:3]
    return jobs


def drain(world: World) -> None:
    """Truncations, deletions: none of it is part of a measured run."""
    Worker(context_of(world), HANDLERS).drain()


@contextmanager
def peak_rss() -> Iterator[list[int]]:
    """How far this process grows, in bytes, sampled while the block runs."""
    process, over = psutil.Process(), threading.Event()
    before, seen = process.memory_info().rss, [0]

    def watch() -> None:
        while not over.wait(0.05):
            seen[0] = max(seen[0], process.memory_info().rss - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield seen
    over.set()
    thread.join()


# ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def fill(store: PageStore, pages: Sequence[int]) -> None:
    """Pages of which zstd makes about a half."""
    randomness = random.Random(len(pages))
    for at in range(0, len(pages), TRANSACTION_PAGES):
        with store.begin() as txn:
            for page in pages[at : at + TRANSACTION_PAGES]:
                txn.write_page(page, randomness.randbytes(PAGE // 2) + TEXT)


def hand_tasks(world: World, store: PageStore, target: Path) -> list[tuple[Frames, str]]:
    """For each slot the frames that are newest, found beforehand."""
    import numpy as np

    world.engine.flush(store.db_id)
    with world.manifest.read() as txn:
        rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, store.db_id) if row.state is WalState.INDEXED]
    arrays, files = [], {}
    for segment_id, row in rows:
        file = world.engine.sources.segment(store.db_id, segment_id)
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
"""Size in GiB → (bytes a second, how far the driver grew)."""

measured: Measured = {}


def one_size(gib: float, report: Report, directory: Path, quick: bool) -> None:
    """So many GiB of dirty pages, then a merge of what came out."""
    size = int(gib * GIB) // (QUICK_DIVISOR if quick else 1)
    world = World(directory, "ours", SETTINGS)
    store, target = world.database(), directory / "hand"
    target.mkdir(exist_ok=True)
    fill(store, range(size // PAGE))
    runner = spark_runner(world)
    warm_up(runner)
    tasks = hand_tasks(world, store, target)
    before = by_hand(slot_by_hand, tasks)
    with peak_rss() as peak:
        ours = seconds(partial(run, world, quire.JobKind.CHECKPOINT, [store.db_id], runner))
    hand = (before + by_hand(slot_by_hand, tasks)) / 2
    measured[gib] = size / ours, peak[0]
    said = f"{size / ours / MIB:.0f} MiB/s, by hand {size / hand / MIB:.0f} MiB/s; driver grew {peak[0] / MIB:.0f} MiB"
    report.ratio(f"checkpoint_{gib:g}_gib", hand / ours, None if gib < 1 else 0.7, "higher", said)
    drain(world)
    merge_one(report, world, store, runner, target, gib, size)
    world.close()


def checkpoint_quarter_gib(report: Report, directory: Path, quick: bool) -> None:
    """0.25 GiB of dirty pages."""
    one_size(0.25, report, directory, quick)


def checkpoint_1_gib(report: Report, directory: Path, quick: bool) -> None:
    """1 GiB of dirty pages."""
    one_size(1.0, report, directory, quick)


def checkpoint_4_gib(report: Report, directory: Path, quick: bool) -> None:
    """4 GiB of dirty pages; then how speed and the driver's memory changed from 1 GiB."""
    one_size(4.0, report, directory, quick)
    if 1.0 not in measured:
        return
    (slow, small), (fast, large) = measured[1.0], measured[4.0]
    linear = "from 1 to 4 GiB"
    report.ratio("checkpoint_speed_keeps", fast / slow, 0.8, "higher", f"{linear}: near-linear in size")
    flat = max(large, 16 * MIB) / max(small, 16 * MIB)
    report.ratio("driver_growth_keeps", flat, 1.5, "lower", f"{linear}: flat")


def merge_one(
    report: Report, world: World, store: PageStore, runner: Runner, target: Path, gib: float, size: int
) -> None:
    pages = size // PAGE
    fill(store, range(0, pages, 16))
    run(world, quire.JobKind.CHECKPOINT, [store.db_id], runner)
    drain(world)
    with world.manifest.read() as txn:
        place = os.path.join(world.objects, txn.object_prefixes()[0])
        chains = [
            [os.path.join(place, _name(link.artifact(slot))) for link in reversed(txn.chain(store.db_id, slot))]
            for slot in range((pages - 1) // PAGES_PER_SLOT + 1)
        ]
    tasks = [(chain[::-1], str(target / f"{slot}")) for slot, chain in enumerate(chains)]
    before = by_hand(chain_by_hand, tasks)
    ours = seconds(lambda: run(world, quire.JobKind.MERGE, [store.db_id], runner))
    hand = (before + by_hand(chain_by_hand, tasks)) / 2
    said = f"{size / ours / MIB:.0f} MiB/s, by hand {size / hand / MIB:.0f} MiB/s"
    report.ratio(f"merge_{gib:g}_gib", hand / ours, None if gib < 1 else 0.7, "higher", said)


def _name(key: Any) -> str:
    from quire.durable.names import object_key

    return object_key(key)


@dataclass(frozen=True, slots=True)
class NoTask:
    """Work that is none."""

    weight_bytes: int = 0


def warm_up(runner: Any) -> None:
    """What only the first actions of a session take: its Python workers are started, the JVM loads what both kinds of action
    need (a second and a half for the one that shuffles)."""
    list(runner.map(nothing, list(range(8))))
    for _ in range(2):
        tasks = {(1, number): NoTask() for number in range(8)}
        list(runner.regroup(one_key, list(range(8)), how_many, tasks))


def nothing(number: int, _tools: Any) -> int:
    """A task that costs what a task costs."""
    return number


def one_key(number: int, _tools: Any) -> list[tuple[tuple[int, int], int]]:
    """An input that is split into one value."""
    return [((1, number), number)]


def how_many(_key: tuple[int, int], _task: NoTask | None, values: list[int], _tools: Any) -> int:
    """What a slot costs that has no pages."""
    return len(values)


def small_databases(report: Report, directory: Path, quick: bool) -> None:
    """Many databases of a few pages, in one run."""
    count = QUICK_SMALL_DATABASES if quick else SMALL_DATABASES
    world = World(directory, "many", SETTINGS)

    def make(number: int) -> None:
        db_id = world.manifest.register_db(f"db-{number}", quire.DbKind.PAGES)
        store = world.engine.open(db_id)
        with store.begin() as txn:
            for page in range(4):
                txn.write_page(page, number.to_bytes(8, "big") * (PAGE // 8))
        world.engine.flush(db_id)
        world.engine.close_database(db_id)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(make, range(count)))
    runner = Counted(spark_runner(world))
    warm_up(runner)
    runner.actions = 0
    started = time.perf_counter()
    run(world, quire.JobKind.CHECKPOINT, range(1, count + 1), runner)
    took = time.perf_counter() - started
    said = f"{count:,} databases in {took:.1f} s: {count / took:.0f}/s"
    report.ratio("spark_actions_for_many_databases", float(runner.actions), 1.0, "lower", said)
    report.figure("small_databases_per_second", count / took)
    world.close()


PARTS = [checkpoint_quarter_gib, checkpoint_1_gib, checkpoint_4_gib, small_databases]
