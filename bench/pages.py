"""The page engine against what it is built on: raw pwrite and fdatasync, a dict, LMDB + pread + crc64, zstd, numpy.

How the opponents are made fair: the raw writer writes the same bytes into a zero-filled file, and syncs as often as the engine
did. The raw readers read the same WAL frames and chunk frames as the engine. Contenders alternate. The measured part of a write
recycles segments, as in the steady state after checkpoints; otherwise the zeros of new files would be half of all bytes.

The engine is measured without a store around it, except where a checkpoint is needed.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zstandard
from awscrt.checksums import crc64nvme

import quire
from bench.report import GIB, MIB, Report, alternate, seconds
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.files import OsDisk
from quire.manifest import tables as t
from quire.manifest.ops.wal import MoveWalState
from quire.manifest.records import WalState
from quire.manifest.store import ManifestStore
from quire.objects import open_store
from quire.pages.chunk_format import LEVEL, PAGES_PER_FRAME, ChunkIdentity
from quire.pages.chunk_writer import ChunkWriter
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.segment import FRAME_HEAD_BYTES
from quire.pages.segment_scan import parse_entries, valid_entries

PAGE = 4096
STRIDE = PAGE + FRAME_HEAD_BYTES
BLOCK = 25
"""Commits in one turn of a contender. Turns are short because the speed of the disk changes within seconds."""
TRANSACTION_PAGES = 16
LARGE = 8_000
"""Pages of a transaction large enough that the following segments have their full size."""
WRITERS = 4
SETTINGS = quire.PagesSettings(wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB, cold_bytes_per_second=0)


class World:
    """A manifest and a page engine, in a new directory."""

    def __init__(self, directory: Path, name: str, settings: quire.PagesSettings = SETTINGS) -> None:
        self.base = directory / name
        shutil.rmtree(self.base, ignore_errors=True)
        self.base.mkdir(parents=True)
        self.settings = settings
        self.start()

    def start(self) -> None:
        self.manifest = ManifestStore.open(str(self.base / "manifest.lmdb"))
        self.engine = PageEngine(
            manifest=self.manifest,
            root=str(self.base / "store"),
            disk=OsDisk(),
            clock=self.manifest.clock,
            open_store=open_store,
            objects_url=str(self.base / "objects"),
            settings=self.settings,
        )

    def database(self, name: str = "bench") -> PageStore:
        with self.manifest.read() as txn:
            known = txn.get(t.DB_NAMES, name) is not None
        if not known:
            self.manifest.register_db(name, quire.DbKind.PAGES)
        return self.engine.open(name)

    def recycle(self, store: PageStore) -> None:
        """Truncate every segment as after a checkpoint, so that its file is reused."""
        self.engine.flush(store.db_id)
        with self.manifest.read() as txn:
            indexed = [key[1] for key, row in txn.scan(t.WAL_CATALOG, store.db_id) if row.state is WalState.INDEXED]
        for state in (WalState.CHECKPOINT_READY, WalState.CHECKPOINTED, WalState.TRUNCATED):
            self.manifest.submit([MoveWalState(store.db_id, segment_id, state) for segment_id in indexed]).result()

    def close(self) -> None:
        self.engine.close()
        self.manifest.close()
        shutil.rmtree(self.base, ignore_errors=True)


@contextmanager
def opened(directory: Path, settings: quire.PagesSettings = SETTINGS) -> Iterator[World]:
    world = World(directory, "ours", settings)
    try:
        yield world
    finally:
        world.close()


def zero_filled(path: Path, size: int) -> int:
    """Create a file of zeros, sync it, and return its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    for offset in range(0, size, MIB):
        os.pwrite(fd, bytes(MIB), offset)
    os.fdatasync(fd)
    return fd


def commit(store: PageStore, pages: dict[int, bytes]) -> None:
    with store.begin() as txn:
        txn.write_pages(pages)


def p50(step: Callable[[int], object], numbers: Sequence[int]) -> float:
    """Return the median duration of a step."""
    times = list[float]()
    for number in numbers:
        started = time.perf_counter()
        step(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def single_commits(report: Report, directory: Path, quick: bool) -> None:
    """Commit one page, and wait for it."""
    count, image, frame = 500 if quick else 5_000, os.urandom(PAGE), os.urandom(STRIDE)
    fd, offset = zero_filled(directory / "raw", 16 * MIB), 0
    raw_times, our_times = list[float](), list[float]()
    with opened(directory) as world:
        store = world.database()
        commit(store, dict.fromkeys(range(LARGE), image))  # from here on the open segment is large
        for _ in range(0, count, BLOCK):
            for _ in range(BLOCK):
                started = time.perf_counter()
                os.pwrite(fd, frame, offset)
                os.fdatasync(fd)
                raw_times.append(time.perf_counter() - started)
                offset = (offset + STRIDE) % (15 * MIB)
            for _ in range(BLOCK):
                started = time.perf_counter()
                txn = store.begin()
                txn.write_page(7, image)
                txn.commit().result()
                our_times.append(time.perf_counter() - started)
    os.close(fd)
    ours, raw = statistics.median(our_times), statistics.median(raw_times)
    detail = f"p50 {ours * 1e6:.0f} µs against {raw * 1e6:.0f} µs"
    report.ratio("single_commit_vs_raw", ours / raw, 1.3, "lower", detail)
    report.figure("single_commit_p50_us", ours * 1e6)


class Sustained:
    """A load of several writers, each of which waits for its commits; measures bytes per second, and bytes per sync."""

    def __init__(self, directory: Path, total: int) -> None:
        self.directory = directory
        self.transactions = total // (TRANSACTION_PAGES * STRIDE)
        self.total = self.transactions * TRANSACTION_PAGES * STRIDE
        self.per_sync = STRIDE
        self.image = os.urandom(PAGE)

    def ours(self, snapshots: int = 0) -> float:
        with opened(self.directory) as world:
            store = world.database()
            held = [store.open_snapshot(ttl_seconds=None) for _ in range(snapshots)]
            commit(store, dict.fromkeys(range(LARGE), self.image))
            self._write(store)
            world.recycle(store)
            before = store.wal.syncs
            taken = seconds(lambda: self._write(store))
            self.per_sync = self.total // max(store.wal.syncs - before, 1)
            for snapshot in held:
                snapshot.close()
        return self.total / taken

    def _write(self, store: PageStore) -> None:
        left = iter(range(self.transactions))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    number = next(left, None)
                if number is None:
                    return
                first = number * TRANSACTION_PAGES % 50_000
                with store.begin(timeout=600) as txn:
                    txn.write_pages(dict.fromkeys(range(first, first + TRANSACTION_PAGES), self.image))
                    guard = txn.commit()
                guard.result()

        threads = [threading.Thread(target=work) for _ in range(WRITERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def raw(self) -> float:
        size = 16 * MIB
        fd, data = zero_filled(self.directory / "raw", size), os.urandom(min(self.per_sync, size))

        def work() -> None:
            offset = 0
            for _ in range(0, self.total, len(data)):
                os.pwrite(fd, data, offset)
                os.fdatasync(fd)
                offset = offset + len(data) if offset + 2 * len(data) <= size else 0

        taken = seconds(work)
        os.close(fd)
        return self.total / taken


def sustained_writes(report: Report, directory: Path, quick: bool) -> None:
    load = Sustained(directory, (32 if quick else 256) * MIB)
    ours, raw = alternate(1 if quick else 3, load.ours, load.raw)
    detail = f"{ours / 1e6:.0f} MB/s against {raw / 1e6:.0f} MB/s, {load.per_sync // 1024} KiB a sync"
    report.ratio("sustained_vs_raw", ours / raw, 0.8, "higher", detail)
    report.figure("sustained_mb_per_second", ours / 1e6)


def snapshots_and_the_writer(report: Report, directory: Path, quick: bool) -> None:
    load = Sustained(directory, (32 if quick else 256) * MIB)
    many, none = alternate(2 if quick else 3, lambda: load.ours(50), load.ours)
    detail = f"{many / 1e6:.0f} MB/s with 50 snapshots, {none / 1e6:.0f} MB/s without"
    report.ratio("writes_with_50_snapshots", many / none, 0.9, "higher", detail)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def cached_reads(report: Report, directory: Path, quick: bool) -> None:
    count, rounds = 2_000, 20 if quick else 200
    with opened(directory) as world:
        store = world.database()
        commit(store, {page: os.urandom(PAGE) for page in range(count)})
        order = random.Random(1).sample(range(count), count)
        plain = {page: bytes(PAGE) for page in range(count)}
        with store.open_snapshot() as reader:
            for page in order:
                reader.read_page(page)

            def ours() -> float:
                read = reader.read_page
                started = time.perf_counter()
                for page in order:
                    read(page)
                return (time.perf_counter() - started) / count

            def bare() -> float:
                get = plain.get
                started = time.perf_counter()
                for page in order:
                    get(page)
                return (time.perf_counter() - started) / count

            one, raw = alternate(rounds, ours, bare)
    detail = f"{one * 1e9:.0f} ns against {raw * 1e9:.0f} ns"
    report.ratio("cached_read_vs_dict", one / raw, 15, "lower", detail)


def wal_reads(report: Report, directory: Path, quick: bool) -> None:
    """Read published pages that are in no cache. The raw reader does one LMDB transaction, one get, one pread and one crc64."""
    count, rounds = 2_000, 3 if quick else 20
    with opened(directory, quire.PagesSettings(cache_bytes=MIB)) as world:
        store = world.database()
        for start in range(0, count, 100):
            commit(store, {page: os.urandom(PAGE) for page in range(start, start + 100)})
        world.engine.flush(store.db_id)
        order = random.Random(1).sample(range(count), count)
        env, handle = world.manifest.env._env, world.manifest.env.handles[t.PAGE_VERSION_HEAD.name]
        with world.manifest.read() as txn:
            heads = {page: txn.get(t.PAGE_VERSION_HEAD, store.db_id, page) for page in order}
        segment_ids = {head.segment_id for head in heads.values() if head}
        files = {segment_id: world.engine.sources.segment(store.db_id, segment_id) for segment_id in segment_ids}
        pack, decode = t.PAGE_VERSION_HEAD.key.fast, t.PAGE_VERSION_HEAD.rows.decode
        with store.open_snapshot() as reader:

            def raw(page: int) -> None:
                with env.begin() as txn:
                    key = pack(store.db_id, page)
                    head = decode(key, txn.get(key, db=handle) or b"")
                file = files[head.segment_id]
                offset = file.header.geometry.frame_offset(head.lsn - file.header.first_lsn)
                crc64nvme(os.pread(file._file.fileno(), STRIDE, offset))

            one, limit = alternate(rounds, lambda: p50(reader.read_page, order), lambda: p50(raw, order))
    detail = f"p50 {one * 1e6:.1f} µs against {limit * 1e6:.1f} µs"
    report.ratio("wal_read_vs_lmdb_pread_crc", one / limit, 3, "lower", detail)


WORDS = [f"{word}{number}" for word in ("order", "customer", "invoice", "street", "city") for number in range(40)]


def _database_page(rng: random.Random) -> bytes:
    """Return a page with rows of words and numbers and free space at its end, like a database's. zstd shrinks it to a third."""
    rows: list[bytes] = []
    size = 0
    while size < PAGE * 3 // 4:
        row = f"{rng.getrandbits(32)}|{rng.choice(WORDS)}|{rng.choice(WORDS)}|{rng.random():.6f}\n".encode()
        rows.append(row)
        size += len(row)
    return b"".join(rows).ljust(PAGE, b"\0")[:PAGE]


def chunk_reads(report: Report, directory: Path, quick: bool) -> None:
    """Read one page of a local chunk whose frame is not in a cache."""
    count, rng = 4_000, random.Random(1)
    settings = quire.StoreSettings(
        pages=quire.PagesSettings(cache_bytes=MIB // 2),
        maintenance=quire.MaintenanceSettings(enabled=False, delete_grace_seconds=0),
    )
    with quire.open(directory / "chunks", settings=settings) as owner:
        owner.create("bench", "pages")
        store = owner.pages.open("bench")
        commit(store, {page: _database_page(rng) for page in range(count)})
        owner.checkpoint("bench")
        owner.worker.drain()  # truncates the WAL, so that pages are read from the chunk
        (path,) = Path(owner.objects_url).rglob("base:*")
        with store.open_snapshot() as reader:
            reader.read_page(0)
            place = next(iter(store.versions._places.values()))
            footer = owner.pages.sources.chunk(place).footer
            frames = [footer.frame(number) for number in range(count // PAGES_PER_FRAME)]
            order = random.Random(2).sample(range(len(frames)), len(frames))
            pages = [number * PAGES_PER_FRAME + 3 for number in order]
            fd, unpack = os.open(path, os.O_RDONLY), zstandard.ZstdDecompressor().decompress

            def raw(number: int) -> None:
                frame = frames[number]
                unpack(os.pread(fd, frame.length, frame.offset), max_output_size=PAGES_PER_FRAME * PAGE)

            one, limit = alternate(5 if quick else 20, lambda: p50(reader.read_page, pages), lambda: p50(raw, order))
            os.close(fd)
    detail = f"p50 {one * 1e6:.0f} µs against {limit * 1e6:.0f} µs"
    report.ratio("chunk_read_vs_pread_zstd", one / limit, 2, "lower", detail)


# ── recovery and chunks ───────────────────────────────────────────────────────────────────────────────────────────────
def recovery(report: Report, directory: Path, quick: bool) -> None:
    """Recover the WAL of a killed owner. The raw reader parses and checks the index regions, and the bodies of the unpublished
    tail."""
    total = 64 * MIB if quick else GIB
    settings = quire.PagesSettings(
        wal_bytes_max=64 * GIB, store_wal_bytes_max=64 * GIB, publish_seconds=1e9, seal_seconds=1e9
    )
    world = World(directory, "ours", settings)
    store = world.database()
    image = os.urandom(PAGE)
    for start in range(0, total // STRIDE, 1_000):
        commit(store, {page % 60_000: image for page in range(start, start + 1_000)})
    store.wal.sync()
    with world.manifest.read() as txn:
        wal = txn.wal_state(store.db_id)
        rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, store.db_id)]
    indexed = wal.indexed_upto_lsn if wal is not None else 0
    durable = store.durable_version()[0]
    store.wal.forked()  # as after a kill: nothing more is sealed or published
    world.manifest.close()

    def raw() -> None:
        for segment_id, _ in rows:
            segment = world.engine.sources.segment(store.db_id, segment_id)
            header, entries = segment.header, parse_entries(segment.read_index())
            valid_entries(header, entries)
            first = max(indexed - header.first_lsn + 1, 0)
            count = min(durable - header.first_lsn + 1, header.geometry.capacity) - first
            if count > 0:
                data = memoryview(segment.read_raw(first, count))
                for number in range(count):
                    crc64nvme(data[number * STRIDE : (number + 1) * STRIDE])

    limit = seconds(raw)
    world.engine.sources.close()
    world.start()
    started = time.perf_counter()
    store = world.database()
    ours = time.perf_counter() - started
    assert store.durable_version()[0] == durable
    tail = (durable - indexed) * STRIDE
    detail = f"{ours:.2f} s against {limit:.2f} s; {total // MIB} MiB of WAL, {tail // MIB} MiB of it unpublished"
    report.ratio("recovery_vs_raw_scan", ours / limit, 3, "lower", detail)
    world.close()


def chunk_writing(report: Report, directory: Path, quick: bool) -> None:
    """Write a chunk, against compressing and checksumming the same frames."""
    pages, rng = 4_096 if quick else 16_384, random.Random(3)
    images = [_database_page(rng) for _ in range(pages)]
    key = ArtifactKey(1, ArtifactKind.BASE, 0, 1)
    identity = ChunkIdentity(key=key, plan_digest=bytes(32), covered_lsn=1, page_size=PAGE, pages_per_chunk=16_384)
    (directory / "written").mkdir(exist_ok=True)

    def ours() -> float:
        def work() -> None:
            with open(directory / "written" / "ours", "wb") as file:
                writer = ChunkWriter(file.write, identity)
                for offset, image in enumerate(images):
                    writer.add(offset, image)
                writer.finish()

        return pages * PAGE / seconds(work)

    def raw() -> float:
        def work() -> None:
            pack = zstandard.ZstdCompressor(level=LEVEL).compress
            with open(directory / "written" / "raw", "wb") as file:
                for start in range(0, pages, PAGES_PER_FRAME):
                    frame = b"".join(images[start : start + PAGES_PER_FRAME])
                    crc64nvme(frame)
                    file.write(pack(frame))

        return pages * PAGE / seconds(work)

    one, limit = alternate(3 if quick else 7, ours, raw)
    detail = f"{one / 1e6:.0f} MB/s against {limit / 1e6:.0f} MB/s"
    report.ratio("chunk_write_vs_zstd", one / limit, 0.8, "higher", detail)


PARTS = (
    single_commits,
    sustained_writes,
    snapshots_and_the_writer,
    cached_reads,
    wal_reads,
    chunk_reads,
    recovery,
    chunk_writing,
)
