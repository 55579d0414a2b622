"""Named snapshots as values: picklable, openable with only an object store, and kept by their rows."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import quire
from quire.core.clock import SystemClock
from quire.core.errors import (
    Corruption,
    NameTaken,
    OutOfRange,
    ReadOnly,
    SnapshotGone,
    TimedOut,
    Unavailable,
    UnknownSnapshot,
)
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings, PagesSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk
from quire.jobs.residency import request_evict, request_upload, upload_now
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.pages.view import SnapshotView, without_object
from tests.objects.conftest import fresh_url, s3_options, s3_server
from tests.pages import engine_harness
from tests.pages.engine_harness import GRACE_SECONDS, PAGE, Model, Pages, assert_reads, image, small_segments, write
from tests.rules.test_executor_safe import failing_without_lmdb

__all__ = ["s3_server"]  # a fixture

EXECUTOR_SAFE = [
    f"quire.pages.{name}"
    for name in (
        "cache",
        "framemap",
        "segment",
        "segment_file",
        "segment_scan",
        "sources",
        "view",
    )
]


@pytest.fixture
def small_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def _sources(root: str, url: str) -> Sources:
    return Sources(root=root, disk=OsDisk(), open_store=lambda _: open_store(url), cache=PageCache(1 << 20))


def test_a_named_snapshot_does_not_change(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    versions = []
    for number in range(6):
        write(store, model, {page: image() for page in range(number, number + 8)})
        info = pages.engine.snapshot("shop", f"s{number}", tags={"number": str(number)})
        assert (info.anchor_lsn, info.size_pages) == (model.newest.lsn, model.newest.size)
        assert info.anchor_time_ms == pages.clock.now_ms()
        versions.append((f"s{number}", model.newest))
        if number % 2:
            pages.checkpoint(store)
    write(store, model, {0: image()}, truncate=2)
    pages.checkpoint(store)
    pages.clock.advance(GRACE_SECONDS + 1)
    pages.reopen()
    pages.checkpoint(pages.database())
    for name, version in versions:
        assert_reads(pages.engine.open_view("shop", name), version)
    pages.stop()


def test_a_pickled_view_needs_only_an_object_store_and_the_shared_directory(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    write(store, model, {page: image() for page in range(5, 9)})
    pages.engine.snapshot("shop", "kept")
    view: SnapshotView = pickle.loads(pickle.dumps(pages.engine.view("shop", "kept")))
    assert len(pickle.dumps(view)) < 2_000
    with view.open(_sources(pages.root, pages.objects_url)) as reader:
        assert_reads(reader, model.newest)
        assert reader.epoch.lsn == model.newest.lsn
        with pytest.raises(ReadOnly):
            reader.write_page(0, image())
        with pytest.raises(OutOfRange):
            reader.read_page(20)
        with pytest.raises(OutOfRange):
            reader.read_pages([0, -1])
        with pytest.raises(OutOfRange):
            reader.read_rows(np.array([0, 20]))
    pages.stop()


def test_a_view_whose_pins_are_uploaded_needs_no_directory_at_all(small_pages: Pages) -> None:
    """P16: for executors without a shared disk. The owner also reads evicted segments from their objects."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    write(store, model, {page: image() for page in range(5, 15)})
    info = pages.engine.snapshot("shop", "kept")
    before = pages.engine.view("shop", "kept")
    for pin in before.pins:
        key = ArtifactKey(pin.origin_db_id, ArtifactKind.WAL, pin.segment_id, 0)
        request_upload(pages.manifest, key)
        pages.worker().drain()
        request_evict(pages.manifest, key)
        pages.worker().drain()
        assert not os.path.exists(os.path.join(pages.root, f"pages/00000001/wal/{pin.segment_id:08x}.seg"))
    with pytest.raises(Corruption):
        before.open(_sources("/nowhere", pages.objects_url))
    view: SnapshotView = pickle.loads(pickle.dumps(pages.engine.view("shop", info.snapshot_id)))
    assert_reads(view.open(_sources("/nowhere", pages.objects_url)), model.newest)
    pages.engine.sources.close()
    pages.engine.cache._turn(10**9)
    with store.open_snapshot() as reader:
        assert_reads(reader, model.newest)
    pages.stop()


CHILD = """
import pickle, sys
class NoLmdb:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lmdb":
            raise ModuleNotFoundError("lmdb is not on this machine", name=name)
sys.meta_path.insert(0, NoLmdb())
from quire.durable.files import OsDisk
from quire.objects.open import open_store
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
view = pickle.load(sys.stdin.buffer)
root, url = sys.argv[1:]
sources = Sources(root=root, disk=OsDisk(), open_store=lambda _: open_store(url), cache=PageCache(1 << 20))
with view.open(sources) as reader:
    pages = dict(reader.scan())
pickle.dump(pages, sys.stdout.buffer)
"""


def test_an_executor_without_lmdb_reads_a_view(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    write(store, model, {3: image()})
    pages.engine.snapshot("shop", "kept")
    process = subprocess.run(
        [sys.executable, "-c", CHILD, pages.root, pages.objects_url],
        input=pickle.dumps(pages.engine.view("shop", "kept")),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    assert pickle.loads(process.stdout) == {page: model.newest.page(page) for page in range(20)}
    assert not failing_without_lmdb(EXECUTOR_SAFE)
    pages.stop()


# ── readers without a shared disk ─────────────────────────────────────────────────────────────────────────────────────
READ_ALONE = """
import pickle, sys
from quire.objects.open import open_store
from quire.objects.options import StoreOptions
view, options = pickle.load(sys.stdin.buffer)
with view.open_alone(lambda url: open_store(url, options=options)) as reader:
    pages = {page: reader.read_page(page) for page in range(reader.size_pages)}
    assert dict(reader.scan()) == reader.read_pages(range(reader.size_pages)) == pages
pickle.dump(pages, sys.stdout.buffer)
"""


def _read_alone(view: SnapshotView, cwd: Path, options: StoreOptions | None = None) -> dict[int, bytes]:
    """What a process in an empty directory reads with the view and the object store."""
    process = subprocess.run(
        [sys.executable, "-c", READ_ALONE],
        input=pickle.dumps((view, options)),
        capture_output=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    contents: dict[int, bytes] = pickle.loads(process.stdout)
    return contents


def test_an_uploaded_view_is_read_after_the_owners_directory_is_gone(tmp_path: Path) -> None:
    """A view is opened with nothing but the object store (P16)."""
    settings = StoreSettings(
        object_store=str(tmp_path / "objects"),
        pages=PagesSettings(page_size=PAGE),
        maintenance=MaintenanceSettings(enabled=False),
    )
    model, empty = Model(), tmp_path / "empty"
    empty.mkdir()
    with quire.open(tmp_path / "store", settings=settings) as store:
        store.create("shop", "pages")
        shop = store.pages.open("shop")
        write(shop, model, {page: image() for page in range(20)})
        assert store.checkpoint("shop").state.name == "SUCCEEDED"
        write(shop, model, {page: image() for page in range(5, 25)})
        store.snapshot("shop", "monday")
        assert without_object(store.view("shop", "monday"))
        view = store.view("shop", "monday", upload=True)
        assert not without_object(view)
        assert store.view("shop", "monday", upload=True) == view, "a second call uploads nothing"
        fork = store.pages.open(store.fork("shop", "copy", at="monday").db_id)
        fork_model = model.copy(model.newest.lsn)
        write(fork, fork_model, {0: image()})
        store.snapshot("copy", "tuesday")
        branch = store.view("copy", "tuesday", upload=True)
    with quire.open(tmp_path / "store", mode="r") as reading_store:
        assert reading_store.view("shop", "monday", upload=True) == view
    shutil.move(tmp_path / "store", tmp_path / "gone")
    os.rename(tmp_path / "gone" / "pages", tmp_path / "gone" / "nothing")
    for opened_view, version in ((view, model.newest), (branch, fork_model.newest)):
        assert _read_alone(opened_view, empty) == {page: version.page(page) for page in range(version.size)}


def test_a_process_that_only_reads_uploads_nothing(tmp_path: Path) -> None:
    with quire.open(
        tmp_path / "store", settings=StoreSettings(maintenance=MaintenanceSettings(enabled=False))
    ) as store:
        store.create("shop", "pages")
        with store.pages.open("shop").begin() as txn:
            txn.write_page(0, bytes(4096))
        store.snapshot("shop", "monday")
    with quire.open(tmp_path / "store", mode="r") as reading_store, pytest.raises(ReadOnly, match="owner"):
        reading_store.view("shop", "monday", upload=True)


def test_a_view_is_read_from_a_bucket_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: tuple[str, int]
) -> None:
    options = s3_options(f"http://{s3_server[0]}:{s3_server[1]}")
    small_segments(monkeypatch, frames=6)
    monkeypatch.setattr(engine_harness, "open_store", lambda url, **_: open_store(url, options=options))
    (tmp_path / "owner").mkdir()
    pages = Pages(tmp_path / "owner", objects_url=fresh_url())
    pages.engine._upload = lambda keys: upload_now(pages.manifest, pages.worker(), keys)
    store, model = pages.database(), Model()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    write(store, model, {page: image() for page in range(5, 22)})
    pages.engine.snapshot("shop", "kept")
    view = pages.engine.view("shop", "kept", upload=True)
    assert len(view.pins) > 1
    pages.stop()
    shutil.rmtree(tmp_path / "owner")
    (tmp_path / "empty").mkdir()
    contents = _read_alone(view, tmp_path / "empty", options)
    assert contents == {page: model.newest.page(page) for page in range(model.newest.size)}


def test_an_upload_that_fails_permanently_is_reported_with_its_reason(
    small_pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    worker = pages.worker()
    pages.engine._upload = lambda keys: upload_now(pages.manifest, worker, keys, timeout=0.0)
    write(store, model, {page: image() for page in range(5)})
    pages.engine.snapshot("shop", "kept")
    with armed("jobs.upload.announced", "raise:EIO"), pytest.raises(TimedOut, match="upload"):
        pages.engine.view("shop", "kept", upload=True)  # it is retried later, after this timeout
    pages.clock.advance(3_600)
    worker.drain()
    assert not without_object(pages.engine.view("shop", "kept", upload=True))
    write(store, model, {page: image() for page in range(5)})
    pages.engine.snapshot("shop", "later")
    for pin in pages.engine.view("shop", "later").pins:
        os.truncate(os.path.join(pages.root, f"pages/00000001/wal/{pin.segment_id:08x}.seg"), 10)
    with pytest.raises(Unavailable, match="could not be uploaded"):
        pages.engine.view("shop", "later", upload=True)
    pages.die()


def test_a_snapshot_that_is_dropped_while_it_is_opened_is_gone_not_damaged(
    small_pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(12)})
    pages.engine.snapshot("shop", "kept")
    view = pages.engine.view("shop", "kept")
    pages.manifest.snapshots.drop("shop", "kept")
    write(store, model, {page: image() for page in range(12)})
    pages.checkpoint(store)
    pages.clock.advance(GRACE_SECONDS + 1)
    pages.worker().drain()
    pages.engine.sources.close()
    monkeypatch.setattr(pages.engine, "view", lambda *_: view)
    pages.engine._regions._kept.clear()
    with pytest.raises(SnapshotGone, match="while it was opened"):
        pages.engine.open_view("shop", "kept")
    pages.stop()


def test_a_snapshot_that_is_dropped_while_it_is_read_is_gone_not_damaged(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(12)})
    pages.engine.snapshot("shop", "kept")
    reader = pages.engine.open_view("shop", "kept")
    pages.manifest.snapshots.drop("shop", "kept")
    write(store, model, {page: image() for page in range(12)})
    pages.checkpoint(store)
    pages.clock.advance(GRACE_SECONDS + 1)
    pages.worker().drain()
    pages.engine.sources.close()
    pages.engine.cache._turn(10**9)
    pages.engine.cache._turn(10**9)
    with pytest.raises(SnapshotGone, match="dropped"):
        reader.read_page(0)
    with pytest.raises(UnknownSnapshot):
        pages.engine.open_view("shop", "kept")
    pages.stop()


def test_a_missing_or_altered_chunk_is_corruption_and_other_slots_are_still_read(small_pages: Pages) -> None:
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    pages.engine.snapshot("shop", "kept")
    objects = sorted(path for path in Path(pages.objects_url).rglob("base:*"))
    assert len(objects) == 3
    original_bytes = objects[1].read_bytes()
    objects[1].unlink()
    pages.engine.sources.close()
    pages.engine.cache._turn(10**9)
    pages.engine.cache._turn(10**9)
    reader = pages.engine.open_view("shop", "kept")
    for page in (0, 7, 16, 19):
        assert reader.read_page(page) == model.newest.page(page)
    with pytest.raises(Corruption, match="missing"):
        reader.read_page(8)
    with pytest.raises(Corruption, match="missing"):
        reader.read_rows(np.array([19, 8, 0]))
    assert [row.tobytes() for row in reader.read_rows(np.array([19, 0]))] == [
        model.newest.page(19),
        model.newest.page(0),
    ]
    with store.open_snapshot() as live:
        with pytest.raises(Corruption, match="missing"):
            live.read_page(8)
        with pytest.raises(Corruption, match="missing"):
            live.read_pages(range(20))
        assert live.read_pages([0, 19]) == {page: model.newest.page(page) for page in (0, 19)}
        altered = bytearray(original_bytes)
        altered[200] ^= 1
        objects[1].write_bytes(bytes(altered))
        with pytest.raises(Corruption):
            live.read_page(8)
        with pytest.raises(Corruption):
            reader.read_rows(np.array([9, 8]))
        objects[1].write_bytes(original_bytes)
        assert live.read_page(8) == model.newest.page(8), "once it is restored, it is read"
    pages.stop()


def test_a_snapshot_includes_written_commits_that_are_not_durable_but_no_open_transaction(small_pages: Pages) -> None:
    """P13: it never waits for an open write transaction."""
    pages, model, store = small_pages, Model(), small_pages.database()
    write(store, model, {0: image()})
    with store.begin() as txn:
        txn.write_page(0, image("written"))
        guard = txn.commit()
    model.commit(guard.lsn, 1, {0: image("written")})
    with store.begin() as txn:
        txn.write_page(0, image("open"))
        pages.engine.snapshot("shop", "kept")
        txn.rollback()
    assert guard.done()
    assert_reads(pages.engine.open_view("shop", "kept"), model.newest)
    with pytest.raises(NameTaken):
        pages.engine.snapshot("shop", "kept")
    assert len(store.readers) == 0, "its hold is released, also on failure"
    pages.stop()


def test_an_empty_database_can_be_snapshotted_and_forked(pages: Pages) -> None:
    pages.database()
    pages.engine.snapshot("shop", "nothing")
    assert pages.engine.open_view("shop", "nothing").size_pages == 0
    fork, model = pages.engine.open(pages.engine.fork("shop", "copy")), Model()
    write(fork, model, {0: image()})
    with fork.open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_reading_a_view_uses_no_clock(pages: Pages) -> None:
    """`SystemClock` stays with the owner: a view has its own time."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    pages.engine.snapshot("shop", "kept")
    reader = pages.engine.open_view("shop", "kept")
    assert reader.time_ms == pages.clock.now_ms() != SystemClock().now_ms()
