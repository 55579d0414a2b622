"""A manifest and a page engine in one directory for tests, and a model of what a database should contain.

Time only advances, and background work only runs, when a test requests it: `clock.advance`, `tick`. The manifest is
beside the engine's directory, not in it: LMDB writes its own file, so a crash of the engine's disk loses nothing that
was committed there.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from quire.core.errors import JobAlreadyPending, StoreClosed
from quire.core.settings import MaintenanceSettings, PagesSettings
from quire.durable.files import Disk, OsDisk
from quire.jobs.context import JobContext
from quire.jobs.locations import StorePool
from quire.jobs.registry import HANDLERS
from quire.jobs.worker import Worker
from quire.manifest.namespaces import collector_of
from quire.manifest.records import DbKind, JobKind
from quire.manifest.store import ManifestStore
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.pages import wal_files
from quire.pages.engine import PageEngine
from quire.pages.pagestore import PageStore
from quire.pages.segment import ENTRY_BYTES, FRAME_HEAD_BYTES, HEADER_BYTES
from quire.pages.snapshot import Snapshot
from quire.pages.transaction import WriteTxn
from quire.pages.view import ViewReader
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean

PAGE = 512
PAGES_PER_CHUNK = 8
GRACE_SECONDS = 60.0
SETTINGS = PagesSettings(page_size=PAGE)

_fills = itertools.count(1)


def image(fill: object = None, page_size: int = PAGE) -> bytes:
    """A page that differs from every other, or the one of this fill."""
    return random.Random(f"{next(_fills) if fill is None else fill}").randbytes(page_size)


def small_segments(monkeypatch: pytest.MonkeyPatch, frames: int = 6, page_size: int = PAGE) -> None:
    """Make segments so small that transactions span several."""
    size = segment_bytes(frames, page_size)
    monkeypatch.setattr(wal_files, "next_file_bytes", lambda *_: size)
    monkeypatch.setattr(wal_files, "FILE_BYTES_MAX", size)


def segment_bytes(frames: int, page_size: int = PAGE) -> int:
    """The size of a segment of this many frames."""
    return HEADER_BYTES + frames * (ENTRY_BYTES + FRAME_HEAD_BYTES + page_size)


@dataclass(frozen=True)
class Version:
    """The expected content of one version of a database."""

    lsn: int
    size: int
    pages: Mapping[int, bytes]

    def page(self, number: int, page_size: int = PAGE) -> bytes:
        return self.pages.get(number, bytes(page_size))


@dataclass
class Model:
    """The expected versions of one database."""

    page_size: int = PAGE
    versions: list[Version] = field(default_factory=lambda: [Version(0, 0, {})])

    @property
    def newest(self) -> Version:
        return self.versions[-1]

    def commit(self, lsn: int, size: int, writes: Mapping[int, bytes], cut_to: int | None = None) -> Version:
        """Add a version: a transaction that may first truncate the database to `cut_to` pages."""
        kept_pages = min(self.newest.size, size) if cut_to is None else min(cut_to, size)
        pages = {page: data for page, data in self.newest.pages.items() if page < kept_pages}
        pages.update({page: data for page, data in writes.items() if page < size})
        version = Version(lsn, size, pages)
        self.versions.append(version)
        return version

    def at(self, lsn: int) -> Version:
        """The version that a reader at `lsn` sees."""
        return next(version for version in reversed(self.versions) if version.lsn <= lsn)

    def forget_after(self, lsn: int) -> None:
        """Remove the versions that a crash has lost."""
        self.versions = [version for version in self.versions if version.lsn <= lsn]

    def copy(self, upto: int) -> Model:
        """The model of a fork at this version."""
        return Model(self.page_size, [version for version in self.versions if version.lsn <= upto])


def assert_reads(reader: Snapshot, version: Version) -> None:
    """The reader returns exactly this version, page by page and in bulk."""
    assert reader.size_pages == version.size, f"size {reader.size_pages}, not {version.size}, at lsn {reader.lsn}"
    expected = {page: version.page(page, reader.page_size) for page in range(version.size)}
    for page, data in expected.items():
        assert reader.read_page(page) == data, f"page {page} at lsn {reader.lsn} is not what was written"
    assert reader.read_pages(range(version.size)) == expected
    assert dict(reader.scan(cold=True)) == expected
    if isinstance(reader, ViewReader):
        any_order = [*reversed(range(version.size)), *range(0, version.size, 3)]  # some of them twice
        rows = reader.read_rows(np.array(any_order, np.int64))
        assert [row.tobytes() for row in rows] == [expected[page] for page in any_order]


@dataclass
class Pages:
    """One store's page engine. `disk` can be one that fails or crashes; `root` must then be below it."""

    base: Path
    disk: Disk = field(default_factory=OsDisk)
    clock: ManualClock = field(default_factory=ManualClock)
    settings: PagesSettings = SETTINGS
    root: str = ""
    objects_url: str = ""
    ticking: bool = False

    def __post_init__(self) -> None:
        self.root = self.root or str(self.base / "store")
        self.objects_url = self.objects_url or str(self.base / "objects")
        self.start()

    def start(self) -> None:
        """Open the manifest and create an engine."""
        disk = self.disk
        self.stores: Callable[[str], ObjectStore] = StorePool(lambda url: open_store(url, disk=disk))
        self.manifest = ManifestStore.open(str(self.base / "manifest.lmdb"), clock=self.clock)
        self.engine = PageEngine(
            manifest=self.manifest,
            root=self.root,
            disk=self.disk,
            clock=self.clock,
            open_store=self.stores,
            objects_url=self.objects_url,
            settings=self.settings,
            ticking=self.ticking,
        )

    def database(self, name: str = "shop", *, page_size: int = PAGE) -> PageStore:
        """Open a database, creating it if necessary; its slots are small, so that a few pages span several."""
        with self.manifest.read() as txn:
            names = {record.name for _, record in txn.databases()}
        if name not in names:
            self.manifest.register_db(name, DbKind.PAGES, page_size=page_size, pages_per_chunk=PAGES_PER_CHUNK)
        return self.engine.open(name)

    def stop(self, *, check: bool = True) -> None:
        """Close everything as an owner does."""
        self.engine.close()
        if check:
            assert_clean(self.manifest)
        self.manifest.close()

    def die(self) -> None:
        """Simulate the end of the process: nothing is flushed. Open files are closed, or tests would run out of
        descriptors."""
        for store in self.engine.stores():
            store.wal.abandon(StoreClosed("the process has ended"))
        self.engine.sources.close()
        self.manifest.close()

    def reopen(self) -> None:
        """Close, check, and open again."""
        self.stop()
        self.start()

    def crash(self, disk: Disk | None = None, root: str = "") -> None:
        """Simulate the end of the process, and start again on what remains."""
        self.die()
        if disk is not None:
            self.disk, self.root = disk, root
        self.start()

    # ── jobs ──────────────────────────────────────────────────────────────────────────────────────────────────────────
    def worker(self, *kinds: JobKind) -> Worker:
        """A worker that runs jobs of this store, of these kinds if any are given, in the calling thread."""
        context = JobContext(
            manifest=self.manifest,
            root=self.root,
            disk=self.disk,
            objects_url=self.objects_url,
            open_store=self.stores,
            collector=collector_of(self.manifest, self.objects_url, self.stores),
            settings=MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS),
            pages=self.engine,
        )
        return Worker(context, {kind: HANDLERS[kind] for kind in kinds or HANDLERS})

    def run(self, kind: JobKind, db_id: int) -> None:
        """Run a job and all jobs that follow from it."""
        with suppress(JobAlreadyPending):  # another thread enqueued it; either one runs it
            self.manifest.jobs.enqueue(kind, db_id)
        self.worker().drain()

    def checkpoint(self, store: PageStore) -> None:
        """Absorb what is sealed and below the floor; then truncate and delete."""
        self.run(JobKind.CHECKPOINT, store.db_id)


def next_version(store: PageStore, txn: WriteTxn) -> int:
    """The lsn that the transaction gets if it commits now: a model needs it before the version becomes visible."""
    pages = {*txn._images, *(txn._spill or ()), *range(txn._base_pages_end, txn.size_pages)}
    return store.wal._next_lsn + len(pages) - 1


def write(store: PageStore, model: Model, pages: Mapping[int, bytes], *, truncate: int | None = None) -> Version:
    """Commit a transaction, wait for it, and add it to the model."""
    with store.begin() as txn:
        if truncate is not None:
            txn.truncate(truncate)
        for page, data in pages.items():
            txn.write_page(page, data)
        size = txn.size_pages
        guard = txn.commit()
    guard.result()
    return model.commit(guard.lsn, size, pages, cut_to=truncate)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until another thread has made the condition true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def opened(base: Path, **options: object) -> Iterator[Pages]:
    """An engine for the duration of a block; afterwards its manifest must be clean."""
    pages = Pages(base, **options)  # type: ignore[arg-type]  # passed through
    try:
        yield pages
    except BaseException:
        pages.die()
        raise
    pages.stop()
