"""A restored store equals the live one at that moment, whatever its engines were doing (A10)."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path

import pytest

import quire
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.ops.local import RecordMetric
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.archived_store import ArchivedStore, Gate, archived_store, contents, fill, quiet, read


def test_a_restore_equals_the_live_store_with_its_snapshots_and_forks(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0, 60)
        for name in ("shop", "pairs"):
            archived.store.snapshot(name, "monday")
        fill(archived.store, 100, 60)
        for name in ("shop", "pairs"):
            archived.store.fork(name, f"{name}-fork", at="monday")
        archived.wait_archived()
        expected = contents(archived.store)
    assert {"shop@monday", "pairs@monday", "shop-fork", "pairs-fork"} <= expected.keys()
    assert read(archived.restore()) == expected


def test_a_first_query_needs_none_of_the_large_objects(tmp_path: Path) -> None:
    """Tables, compressed segments and chunks stay in the bucket, and are read from there on demand."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0, 60)
        archived.store.checkpoint("shop")
        kv, stream = archived.store.kv("pairs"), archived.store.stream("events")
        kv.flush()
        stream.seal()
        stream.compress()
        stream.upload()
        stream.evict(warm=True)
        archived.store.kv("small", create=True).put(b"first", b"query")
        archived.wait_archived()
        expected = contents(archived.store)
    large = [
        path for path in archived.bucket.rglob("*") if path.is_file() and ("/file/" in str(path) or "/e/" in str(path))
    ]
    assert any("/file/" in str(path) for path in large)
    assert any("/e/" in str(path) for path in large)
    for path in large:
        path.rename(path.with_name(f"{path.name}.away"))
    root = archived.restore()
    with quire.open(root, "r") as store:
        assert store.kv("small").get(b"first") == b"query"
    for path in large:
        path.with_name(f"{path.name}.away").rename(path)
    assert read(root) == expected


def test_rollbacks_and_undoable_drops_are_archived(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0, 60)
        archived.store.snapshot("shop", "monday")
        fill(archived.store, 100, 60)
        migrated = contents(archived.store)["shop"]
        archived.store.checkpoint("shop")
        rolled_back = archived.store.rollback("shop", to="monday")
        archived.store.drop("pairs", undoable=True)
        archived.wait_archived()
        expected = contents(archived.store)
    assert expected["shop"] == expected["shop@monday"] != migrated
    root = archived.restore()
    assert read(root) == expected
    with quire.open(root, takeover=True) as store:
        assert store.undrop("pairs").name == "pairs"
        store.rollback("shop", to=rolled_back.snapshot)
        restored = contents(store)
        assert restored["shop"] == migrated
        assert "pairs" in restored


def test_each_moment_is_restored_as_it_was(tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    archived = ArchivedStore(tmp_path, clock=clock)
    states = []
    for start in range(0, 500, 100):
        fill(archived.store, start)
        archived.wait_archived()
        states.append((clock.now_ms(), contents(archived.store)))
        clock.advance(5)
    archived.close()
    for number, (moment, expected) in enumerate(states):
        assert archived.restored_contents(f"moment-{number}", at_ms=moment) == expected


def test_many_synced_writes_after_a_rotation(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        kv = archived.store.kv("pairs", create=True)
        kv.put(b"first", b"x" * 10_000)
        kv.flush()
        for number in range(500):
            kv.put(b"%04d" % number, b"y")
        archived.wait_archived()
        expected = contents(archived.store)
    assert len(expected["pairs"]) == 501
    assert read(archived.restore()) == expected


STEPS = [
    *(f"lsm.freeze.{step}" for step in ("created", "synced", "rotated")),
    *(f"lsm.flush.{step}" for step in ("written", "recorded", "folded", "done")),
    *(f"lsm.compaction.{step}" for step in ("written", "recorded", "removed")),
    *(f"lsm.checkpoint.{step}" for step in ("begun", "written", "synced", "renamed", "named", "truncated")),
]
"""Of a rotation and a flush of a key-value set, of a compaction, and of a checkpoint of its manifest."""


def test_a_cut_at_each_step_of_a_flush_and_of_a_checkpoint_of_the_manifest(tmp_path: Path) -> None:
    """Hazard: files that were read at a cut gave a manifest, a log and tables of different moments."""
    with archived_store(tmp_path, lsm={"manifest_log_bytes": 600}) as archived:
        kv = archived.store.kv("pairs", create=True)
        expected: dict[bytes, bytes] = {}

        def write(round_number: int) -> None:
            for number in range(20):
                expected[b"%02d" % number] = b"%d" % round_number * 100
                kv.put(b"%02d" % number, expected[b"%02d" % number])

        for round_number, step in enumerate(STEPS):
            write(round_number)
            cut = threading.Event()

            def restore(_: str, step: str = step, cut: threading.Event = cut) -> None:
                if not cut.is_set():
                    cut.set()
                    archived.wait_archived()
                    assert archived.restored_contents(step)["pairs"] == expected, step

            with armed(step, restore):
                while not cut.is_set():
                    write(round_number)
                    kv.flush()
                    kv.compact()
        archived.wait_archived()
    assert read(archived.restore())["pairs"] == expected


def test_a_checkpoint_that_frees_segments_and_writes_that_recycle_them(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        for start in range(0, 300, 50):
            fill(archived.store, start, 50)
            archived.store.checkpoint("shop")
            archived.store.maintain()
            if start == 150:
                archived.wait_archived()
                middle = contents(archived.store)
                assert archived.restored_contents("middle") == middle
        archived.wait_archived()
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


def test_compactions_while_the_bucket_is_unavailable(tmp_path: Path) -> None:
    """Tables were created and removed before anything could be uploaded."""
    with archived_store(tmp_path) as archived:
        fill(archived.store, 0)
        archived.wait_archived()
        gate = Gate(archived.archiver)
        gate.is_down = True
        for start in range(100, 900, 100):
            fill(archived.store, start, 40)
            archived.store.kv("pairs").flush()
            archived.store.kv("pairs").compact()
            archived.store.stream("events").seal()
            archived.store.stream("events").compress()
        gate.is_down = False
        archived.wait_archived()
        expected = contents(archived.store)
    assert read(archived.restore()) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_300_megabytes_are_compacted_while_the_bucket_is_unavailable(tmp_path: Path) -> None:
    """Flushes and compactions continue, the backlog is bounded, and everything is archived when the bucket is available
    again."""
    draw, size, memory = random.Random(300), 64 << 10, 16 << 20
    options = StoreSettings(
        object_store=str(tmp_path / "bucket"),
        archive=ArchiveSettings(mode="async", interval_seconds=0.1, memory_bytes=memory),
        maintenance=MaintenanceSettings(enabled=False),
    )
    with quire.open(tmp_path / "store", settings=options) as store:
        kv = store.kv("pairs", create=True)
        kv.put(b"before", b"it went")
        assert store.archive is not None
        store.archive.wait(60)
        gate = Gate(store.archive)
        gate.is_down = True
        expected = {b"before": hashlib.sha256(b"it went").digest()}
        for number in range(300 * 16):
            key, value = b"%04d" % (number * 7 % 3000), draw.randbytes(size)
            kv.put(key, value, sync=number % 100 == 0)
            expected[key] = hashlib.sha256(value).digest()
        kv.flush()
        kv.compact()
        assert store.archive.status().state != "archived"
        assert store.archive._outbox.sizes()[0] <= memory
        gate.is_down = False
        store.archive.wait(600)
    quire.restore(str(tmp_path / "bucket"), tmp_path / "restored", takeover=True)
    with quire.open(tmp_path / "restored", settings=quiet()) as store:
        assert {key: hashlib.sha256(value).digest() for key, value in store.kv("pairs").scan()} == expected


def test_cursors_and_answers_to_repeated_requests_are_restored(tmp_path: Path) -> None:
    with archived_store(tmp_path) as archived:
        archived.store.feed.register(name="reader")
        fill(archived.store, 0)
        archived.store.feed.acknowledge("reader", 2)
        archived.store.manifest.writer.submit(
            [RecordMetric(7, 1, [1.0])], key=b"request" + bytes(9), result=b"answer"
        ).result()
        archived.wait_archived()
        expected = stored(archived.store)
    with quire.open(archived.restore(), "r") as store:
        assert stored(store) == expected
    assert all(expected)


def stored(store: Store) -> list[list[tuple[bytes, bytes]]]:
    with store.manifest.read() as txn:
        return [list(txn.raw_scan(table)) for table in (t.CHANGE_CURSORS, t.IDEMPOTENCY)]
