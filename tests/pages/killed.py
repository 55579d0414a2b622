"""Runs in its own process, to be killed: writes to page databases and reports over its line what was acknowledged.

The first message is JSON: the directory (`base`), the failpoints (`failpoints`), the seed, and the number of databases.
The process sends `try DB SIZE CUT PAGE:FILL,…` before a commit, with everything that the commit contains, and `ack DB
LSN` when it is durable; `found DB LSN DIGEST` for what the last process left; `kept DB SNAPSHOT LSN`; `forking DB NEW`
before a fork and `forked DB NEW LSN` after it. In between it checkpoints, merges and truncates, and compares versions
that it wrote, also older ones, with a model.
"""

from __future__ import annotations

import hashlib
import json
import random
from contextlib import suppress
from pathlib import Path

from quire.core.clock import SystemClock
from quire.core.errors import JobAlreadyPending, OutOfRange, SnapshotGone
from quire.core.settings import MaintenanceSettings, PagesSettings
from quire.durable.failpoints import arm_from
from quire.durable.files import OsDisk
from quire.jobs.context import JobContext
from quire.jobs.locations import StorePool
from quire.jobs.registry import HANDLERS
from quire.jobs.worker import Worker
from quire.manifest.namespaces import collector_of
from quire.manifest.records import DbKind, JobKind
from quire.manifest.store import ManifestStore
from quire.objects.open import open_store
from quire.pages import wal_files
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.snapshot import Snapshot
from tests.fork_server import Channel
from tests.pages.engine_harness import PAGE, PAGES_PER_CHUNK, Model, Version, assert_reads, image, segment_bytes

SETTINGS = PagesSettings(page_size=PAGE, publish_seconds=0.01, publish_bytes=4096, seal_seconds=0.03)
FRAMES = 12
DATABASES_MAX = 5
READERS_MAX = 3


def warm_up() -> None:
    """Import everything, and make segments small."""
    size = segment_bytes(FRAMES)
    setattr(wal_files, "next_file_bytes", lambda *_: size)  # noqa: B010 - for mypy these are other modules' names
    setattr(wal_files, "FILE_BYTES_MAX", size)  # noqa: B010


def start(base: Path) -> tuple[ManifestStore, PageEngine]:
    """A manifest and an engine with a real clock and a ticker."""
    manifest = ManifestStore.open(str(base / "manifest.lmdb"))
    manifest.jobs.recover()
    engine = PageEngine(
        manifest=manifest,
        root=str(base / "store"),
        disk=OsDisk(),
        clock=SystemClock(),
        open_store=StorePool(open_store),
        objects_url=str(base / "objects"),
        settings=SETTINGS,
    )
    return manifest, engine


def worker(manifest: ManifestStore, engine: PageEngine, base: Path) -> Worker:
    """A worker that runs jobs of this store."""
    context = JobContext(
        manifest=manifest,
        root=str(base / "store"),
        disk=OsDisk(),
        objects_url=str(base / "objects"),
        open_store=StorePool(open_store),
        collector=collector_of(manifest, str(base / "objects"), open_store),
        settings=MaintenanceSettings(delete_grace_seconds=0.05),
        pages=engine,
    )
    return Worker(context, HANDLERS)


def digest(version: Version) -> str:
    """Identifies a version by its contents."""
    return hashlib.sha256(b"".join(version.page(page) for page in range(version.size))).hexdigest()


class WriterProcess:
    """What one process does until it dies."""

    def __init__(self, channel: Channel, base: Path, seed: int, names: list[str]) -> None:
        self.channel, self.base, self.seed = channel, base, seed
        self.rng = random.Random(seed)
        self.manifest, self.engine = start(base)
        with self.manifest.read() as txn:
            existing = [record.name for _, record in txn.databases()]
        for name in names:
            if name not in existing:
                self.manifest.register_db(name, DbKind.PAGES, page_size=PAGE, pages_per_chunk=PAGES_PER_CHUNK)
        self.names = list(dict.fromkeys(names + existing))
        self.models: dict[str, Model] = {}
        self.readers: list[tuple[Snapshot, Version]] = []

    def step(self, number: int) -> None:
        """A commit, and sometimes another action."""
        name = self.rng.choice(self.names)
        store = self.engine.open(name)
        self.commit(store, name)
        for probability, action in (
            (0.05, self.work),
            (0.05, self.snapshot),
            (0.02, self.fork),
            (0.15, self.open_reader),
            (0.15, self.read),
        ):
            if self.rng.random() < probability:
                action(store, name, number)

    def commit(self, store: PageStore, name: str) -> None:
        model = self.model(store, name)
        txn = store.begin()
        cut = self.rng.randint(1, 12) if self.rng.random() < 0.1 else 0
        if cut:
            txn.truncate(cut)
        fills = {self.rng.randint(0, 25): self.rng.getrandbits(60) for _ in range(self.rng.randint(1, 16))}
        for page, fill in fills.items():
            txn.write_page(page, image(fill))
        size = txn.size_pages
        writes = ",".join(f"{page}:{fill}" for page, fill in fills.items())
        self.channel.send(f"try {name} {size} {cut} {writes}".encode())
        guard = txn.commit()
        model.commit(guard.lsn, size, {page: image(fill) for page, fill in fills.items()}, cut_to=cut or None)
        if self.rng.random() < 0.7:
            self.channel.send(f"ack {name} {guard.result()}".encode())

    def model(self, store: PageStore, name: str) -> Model:
        """The versions that this process wrote; the first is what the last process left."""
        if name not in self.models:
            with store.open_snapshot() as reader:
                version = Version(reader.lsn, reader.size_pages, dict(reader.scan()))
            self.channel.send(f"found {name} {version.lsn} {digest(version)}".encode())
            self.models[name] = Model(versions=[version])
        return self.models[name]

    def work(self, store: PageStore, name: str, number: int) -> None:
        with suppress(JobAlreadyPending):  # a job of an earlier process waits for its next attempt
            kinds = [JobKind.CHECKPOINT, JobKind.CHECKPOINT, JobKind.MERGE]
            self.manifest.jobs.enqueue(self.rng.choice(kinds), store.db_id)
        worker(self.manifest, self.engine, self.base).drain()

    def snapshot(self, store: PageStore, name: str, number: int) -> None:
        info = self.engine.snapshot(name, f"kept-{self.seed}-{number}")
        self.channel.send(f"kept {name} {info.name} {info.anchor_lsn}".encode())

    def fork(self, store: PageStore, name: str, number: int) -> None:
        if len(self.names) >= DATABASES_MAX:
            return
        new = f"fork-{self.seed}-{number}"
        self.channel.send(f"forking {name} {new}".encode())
        self.engine.fork(name, new)
        lsn, _ = self.engine.open(new).durable_version()
        self.channel.send(f"forked {name} {new} {lsn}".encode())
        self.names.append(new)

    def open_reader(self, store: PageStore, name: str, number: int) -> None:
        model = self.models[name]
        at = self.rng.choice([None, *(version.lsn for version in model.versions[-8:])])
        with suppress(SnapshotGone, OutOfRange):  # a checkpoint has passed it, or it is not durable yet
            reader = store.open_snapshot(at=at)
            self.readers.append((reader, model.at(reader.lsn)))
        if len(self.readers) > READERS_MAX:
            self.readers.pop(0)[0].close()

    def read(self, store: PageStore, name: str, number: int) -> None:
        for reader, version in self.readers:
            assert_reads(reader, version)

    def end(self) -> None:
        for reader, _ in self.readers:
            reader.close()
        self.engine.close()
        self.manifest.close()


def run(channel: Channel) -> None:
    """Write until the process dies, or until all commits are done."""
    task = json.loads(channel.receive() or b"{}")
    arm_from(task["failpoints"])
    writer = WriterProcess(
        channel, Path(task["base"]), task["seed"], [f"db-{number}" for number in range(task["databases"])]
    )
    channel.send(b"open")
    for number in range(task["commits"]):
        writer.step(number)
    writer.end()
    channel.send(b"done")
