"""Many writers and readers at once, with publication, sealing, snapshots, forks and checkpoints in between.

Every version of a database is known, so each read at any version is compared with its expected content.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.core.errors import SnapshotGone, TimedOut
from quire.core.settings import PagesSettings
from quire.durable.files import OsDisk, OsFile
from quire.manifest.records import JobKind
from quire.pages.pagestore import PageStore
from tests.pages.engine_harness import PAGE, Model, Pages, assert_reads, image, next_version, small_segments

SETTINGS = PagesSettings(
    page_size=PAGE, publish_seconds=0.02, publish_bytes=4096, seal_seconds=0.05, cache_bytes=64 * 1024
)


class Stress:
    """Threads that work on some databases until they are stopped, or one of them fails."""

    def __init__(self, pages: Pages, databases: int) -> None:
        self.pages = pages
        self.stores = [pages.database(f"db-{number}") for number in range(databases)]
        self.models = {store.db_id: Model() for store in self.stores}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.commits = self.reads = 0

    def run(self, seconds: float, *workers: Callable[[random.Random], None]) -> None:
        def loop(worker: Callable[[random.Random], None], seed: int) -> None:
            rng = random.Random(seed)
            try:
                while not self.stop.is_set():
                    worker(rng)
            except BaseException as error:
                self.errors.append(error)
                self.stop.set()

        threads = [
            threading.Thread(target=loop, args=(worker, seed), name=f"{worker.__name__}-{seed}")
            for seed, worker in enumerate(workers)
        ]
        for thread in threads:
            thread.start()
        self.stop.wait(seconds)
        self.stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} is stuck"
        if self.errors:
            raise self.errors[0]

    def write(self, rng: random.Random) -> None:
        store = rng.choice(self.stores)
        try:
            txn = store.begin(timeout=5)
        except TimedOut:
            return
        cut = rng.randint(1, 20) if rng.random() < 0.1 else None
        if cut is not None:
            txn.truncate(cut)
        writes = {rng.randint(0, 30): rng.randbytes(PAGE) for _ in range(rng.randint(1, 9))}
        for page, data in writes.items():
            txn.write_page(page, data)
        if rng.random() < 0.1:
            txn.rollback()
            return
        size = txn.size_pages
        # The model gets a version before it becomes visible: readers only open durable versions.
        with self.lock:
            expected_lsn = next_version(store, txn)
            self.models[store.db_id].commit(expected_lsn, size, writes, cut_to=cut)
        guard = txn.commit()
        assert guard.lsn == expected_lsn
        if rng.random() < 0.8:
            guard.result()
        self.commits += 1

    def read(self, rng: random.Random) -> None:
        store = rng.choice(self.stores)
        with store.open_snapshot(tags={"who": threading.current_thread().name}) as reader:
            with self.lock:
                version = self.models[store.db_id].at(reader.lsn)
            assert reader.size_pages == version.size
            for _ in range(rng.randint(1, 30)):
                if version.size:
                    page = rng.randrange(version.size)
                    assert reader.read_page(page) == version.page(page), (store.db_id, page, reader.lsn)
                    self.reads += 1
            if rng.random() < 0.2:
                assert_reads(reader, version)
            if rng.random() < 0.1:
                time.sleep(rng.random() / 20)
                assert_reads(reader, version)

    def disturb(self, rng: random.Random) -> None:
        store = rng.choice(self.stores)
        tick: Callable[[], object] = lambda: self.pages.engine.tick(store)  # noqa: E731
        rng.choice([store.wal.publish, store.wal.seal, store.wal.sync, tick])()
        time.sleep(rng.random() / 50)

    def look_back(self, rng: random.Random) -> None:
        store = rng.choice(self.stores)
        with self.lock:
            version = rng.choice(self.models[store.db_id].versions)
        durable = store.durable_version()[0]
        if version.lsn > durable or not version.lsn:
            return
        try:
            reader = store.open_snapshot(at=version.lsn)
        except SnapshotGone:
            return
        with reader:
            assert reader.lsn == version.lsn
            assert_reads(reader, version)

    def snapshot_and_fork(self, rng: random.Random) -> None:
        """Snapshots, views and forks of one version."""
        store = rng.choice(self.stores)
        engine, name = self.pages.engine, f"s{rng.getrandbits(48):x}"
        info = engine.snapshot(store.db_id, name)
        with self.lock:
            version = self.models[store.db_id].at(info.anchor_lsn)
        assert version.lsn == info.anchor_lsn
        assert_reads(engine.open_view(store.db_id, name), version)
        fork = engine.open(engine.fork(store.db_id, f"f-{name}", at=name))
        with fork.open_snapshot() as reader:
            assert_reads(reader, version)
        engine.close_database(fork.db_id)
        time.sleep(rng.random() / 10)

    def checkpoint(self, rng: random.Random) -> None:
        store = rng.choice(self.stores)
        self.pages.run(rng.choice([JobKind.CHECKPOINT, JobKind.CHECKPOINT, JobKind.MERGE]), store.db_id)
        time.sleep(rng.random() / 20)

    def assert_newest(self) -> None:
        for store in self.stores:
            store.wal.sync()
            with store.open_snapshot() as reader:
                assert_reads(reader, self.models[store.db_id].newest)


def _stress(tmp_path: Path, seconds: float, databases: int, *kinds: str) -> None:
    pages = Pages(tmp_path, settings=SETTINGS, ticking=True)
    stress = Stress(pages, databases)
    try:
        stress.run(seconds, *[getattr(stress, kind) for kind in kinds])
        stress.assert_newest()
        assert stress.commits > 10
        assert stress.reads > 50
    except BaseException:
        pages.die()
        raise
    names = [f"db-{number}" for number in range(databases)]
    pages.reopen()
    for name, model in zip(names, stress.models.values()):
        store: PageStore = pages.database(name)
        with store.open_snapshot() as reader:
            assert_reads(reader, model.newest)
    pages.stop()


def test_readers_see_exactly_their_version_during_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, frames=12)
    _stress(tmp_path, 3.0, 3, "write", "write", "write", "read", "read", "read", "disturb", "look_back")


def test_snapshots_forks_and_checkpoints_in_between_change_nothing_for_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_segments(monkeypatch, frames=12)
    _stress(
        tmp_path,
        4.0,
        2,
        "write",
        "write",
        "read",
        "read",
        "read",
        "disturb",
        "snapshot_and_fork",
        "checkpoint",
        "look_back",
    )


@pytest.mark.slow
def test_long_stress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_segments(monkeypatch, frames=40)
    kinds = (
        ["write"] * 6 + ["read"] * 8 + ["disturb"] * 2 + ["snapshot_and_fork", "checkpoint", "checkpoint", "look_back"]
    )
    _stress(tmp_path, 120.0, 8, *kinds)


class SlowFile(OsFile):
    """A file whose syncs take long enough for other writers to commit meanwhile."""

    def sync(self) -> None:
        time.sleep(0.004)
        super().sync()


class SlowDisk(OsDisk):
    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> SlowFile:
        return SlowFile(super().open(path, create=create, exclusive=exclusive, write=write).fileno(), path)


def test_one_sync_serves_all_commits_written_before_it(tmp_path: Path) -> None:
    """P7: with many waiting writers there are far fewer syncs than commits, and no writer waits forever."""
    pages = Pages(tmp_path, disk=SlowDisk())
    stores = [pages.database("one")]
    barrier = threading.Barrier(8)
    acknowledged: list[int] = []

    def write() -> None:
        barrier.wait()
        for _ in range(20):
            with stores[0].begin() as txn:
                txn.write_page(0, image())
                guard = txn.commit()
            guard.result()
            acknowledged.append(guard.lsn)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(acknowledged) == list(range(min(acknowledged), min(acknowledged) + 160))
    assert stores[0].wal.syncs < 120, "eight writers wait for each sync"
    assert stores[0].durable_version()[0] == max(acknowledged)
    pages.stop()
