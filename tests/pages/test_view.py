"""Named snapshots as values: picklable, openable with an object store alone, and kept by their rows."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from quire.core.clock import SystemClock
from quire.core.errors import Corruption, NameTaken, OutOfRange, ReadOnly, SnapshotGone, UnknownSnapshot
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.files import OsDisk
from quire.jobs.requests import request_evict, request_upload
from quire.objects.open import open_store
from quire.pages.cache import PageCache
from quire.pages.sources import Sources
from quire.pages.view import SnapshotView
from tests.house.test_executor_safe import refused_without_lmdb
from tests.pages.world import GRACE_SECONDS, Model, Pages, assert_reads, image, small_segments, write

EXECUTOR_SAFE = [
    f"quire.pages.{name}"
    for name in (
        "cache",
        "framemap",
        "handles",
        "segment",
        "segment_file",
        "segment_scan",
        "sources",
        "throttle",
        "view",
    )
]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pages:
    small_segments(monkeypatch, frames=6)
    return Pages(tmp_path)


def _sources(root: str, url: str) -> Sources:
    return Sources(root=root, disk=OsDisk(), open_store=lambda _: open_store(url), cache=PageCache(1 << 20))


def test_a_named_snapshot_stays_as_it_was_through_everything(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    kept = []
    for number in range(6):
        write(store, model, {page: image() for page in range(number, number + 8)})
        info = pages.engine.snapshot("shop", f"s{number}", tags={"number": str(number)})
        assert (info.anchor_lsn, info.size_pages) == (model.newest.lsn, model.newest.size)
        assert info.anchor_time_ms == pages.clock.now_ms()
        kept.append((f"s{number}", model.newest))
        if number % 2:
            pages.checkpoint(store)
    write(store, model, {0: image()}, truncate=2)
    pages.checkpoint(store)
    pages.clock.advance(GRACE_SECONDS + 1)
    pages.reopen()
    pages.checkpoint(pages.database())
    for name, version in kept:
        assert_reads(pages.engine.open_view("shop", name), version)
    pages.stop()


def test_a_view_travels_and_needs_only_an_object_store_and_the_shared_directory(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
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
    pages.stop()


def test_a_view_whose_pins_are_uploaded_needs_no_directory_at_all(small: Pages) -> None:
    """P16: for executors that share no disk. Evicted segments are read from their objects by the owner, too."""
    pages, model, store = small, Model(), small.database()
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


def test_an_executor_without_lmdb_reads_a_view(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    write(store, model, {3: image()})
    pages.engine.snapshot("shop", "kept")
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, pages.root, pages.objects_url],
        input=pickle.dumps(pages.engine.view("shop", "kept")),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert pickle.loads(ended.stdout) == {page: model.newest.page(page) for page in range(20)}
    assert not refused_without_lmdb(EXECUTOR_SAFE)
    pages.stop()


def test_a_snapshot_that_is_dropped_while_it_is_read_is_gone_not_damaged(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(12)})
    pages.engine.snapshot("shop", "kept")
    reader = pages.engine.open_view("shop", "kept")
    pages.manifest.drop_snapshot("shop", "kept")
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


def test_a_missing_or_altered_chunk_is_corruption_and_other_slots_are_still_read(small: Pages) -> None:
    pages, model, store = small, Model(), small.database()
    write(store, model, {page: image() for page in range(20)})
    pages.checkpoint(store)
    pages.engine.snapshot("shop", "kept")
    objects = sorted(path for path in Path(pages.objects_url).rglob("base:*"))
    assert len(objects) == 3
    lost = objects[1].read_bytes()
    objects[1].unlink()
    pages.engine.sources.close()
    pages.engine.cache._turn(10**9)
    pages.engine.cache._turn(10**9)
    reader = pages.engine.open_view("shop", "kept")
    for page in (0, 7, 16, 19):
        assert reader.read_page(page) == model.newest.page(page)
    with pytest.raises(Corruption, match="missing"):
        reader.read_page(8)
    with store.open_snapshot() as live:
        with pytest.raises(Corruption, match="missing"):
            live.read_page(8)
        with pytest.raises(Corruption, match="missing"):
            live.read_pages(range(20))
        assert live.read_pages([0, 19]) == {page: model.newest.page(page) for page in (0, 19)}
        altered = bytearray(lost)
        altered[200] ^= 1
        objects[1].write_bytes(bytes(altered))
        with pytest.raises(Corruption):
            live.read_page(8)
        objects[1].write_bytes(lost)
        assert live.read_page(8) == model.newest.page(8), "once it is restored, it is found"
    pages.stop()


def test_a_snapshot_includes_what_is_written_and_not_yet_durable_but_no_open_transaction(small: Pages) -> None:
    """P13: it never waits for an open write transaction."""
    pages, model, store = small, Model(), small.database()
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
    assert len(store.readers) == 0, "its hold is given back, also when it fails"
    pages.stop()


def test_an_empty_database_can_be_kept_and_forked(pages: Pages) -> None:
    pages.database()
    pages.engine.snapshot("shop", "nothing")
    assert pages.engine.open_view("shop", "nothing").size_pages == 0
    fork, model = pages.engine.open(pages.engine.fork("shop", "copy")), Model()
    write(fork, model, {0: image()})
    with fork.open_snapshot() as reader:
        assert_reads(reader, model.newest)


def test_clocks_are_not_asked_where_a_view_is_read(pages: Pages) -> None:
    """`SystemClock` stays with the owner: a view has its own time."""
    store, model = pages.database(), Model()
    write(store, model, {0: image()})
    pages.engine.snapshot("shop", "kept")
    reader = pages.engine.open_view("shop", "kept")
    assert reader.time_ms == pages.clock.now_ms() != SystemClock().now_ms()
