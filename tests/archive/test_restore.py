"""A restored store equals the live one at that moment, whatever its engines were doing (A10)."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

import quire
from quire.core.settings import ArchiveSettings, MaintenanceSettings, StoreSettings
from quire.manifest import tables as t
from quire.manifest.ops.local import RecordMetric
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.archive.world import Gate, World, contents, fill, quiet, read, world


def test_a_restore_equals_the_live_store_with_its_snapshots_and_forks(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0, 60)
        for name in ("shop", "pairs"):
            w.store.snapshot(name, "monday")
        fill(w.store, 100, 60)
        for name in ("shop", "pairs"):
            w.store.fork(name, f"{name}-fork", at="monday")
        w.archived()
        expected = contents(w.store)
    assert {"shop@monday", "pairs@monday", "shop-fork", "pairs-fork"} <= expected.keys()
    assert read(w.restore()) == expected


def test_a_first_query_needs_none_of_the_large_objects(tmp_path: Path) -> None:
    """Tables, compressed segments and chunks stay in the bucket, and are read from there when they are asked for."""
    with world(tmp_path) as w:
        fill(w.store, 0, 60)
        w.store.checkpoint("shop")
        kv, stream = w.store.kv("pairs"), w.store.stream("events")
        kv.flush()
        stream.seal()
        stream.compress()
        stream.upload()
        stream.evict(warm=True)
        w.store.kv("small", create=True).put(b"first", b"query")
        w.archived()
        expected = contents(w.store)
    large = [path for path in w.bucket.rglob("*") if path.is_file() and ("/file/" in str(path) or "/e/" in str(path))]
    assert any("/file/" in str(path) for path in large)
    assert any("/e/" in str(path) for path in large)
    for path in large:
        path.rename(path.with_name(f"{path.name}.away"))
    root = w.restore()
    with quire.open(root, "r") as store:
        assert store.kv("small").get(b"first") == b"query"
    for path in large:
        path.with_name(f"{path.name}.away").rename(path)
    assert read(root) == expected


def test_rollbacks_and_drops_that_can_be_undone_are_in_the_archive(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        fill(w.store, 0, 60)
        w.store.snapshot("shop", "monday")
        fill(w.store, 100, 60)
        migrated = contents(w.store)["shop"]
        w.store.checkpoint("shop")
        done = w.store.rollback("shop", to="monday")
        w.store.drop("pairs", undoable=True)
        w.archived()
        expected = contents(w.store)
    assert expected["shop"] == expected["shop@monday"] != migrated
    root = w.restore()
    assert read(root) == expected
    with quire.open(root, takeover=True) as store:
        assert store.undrop("pairs").name == "pairs"
        store.rollback("shop", to=done.snapshot)
        found = contents(store)
        assert found["shop"] == migrated
        assert "pairs" in found


def test_each_moment_is_restored_as_it_was(tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    w = World(tmp_path, clock=clock)
    states = []
    for start in range(0, 500, 100):
        fill(w.store, start)
        w.archived()
        states.append((clock.now_ms(), contents(w.store)))
        clock.advance(5)
    w.close()
    for number, (moment, expected) in enumerate(states):
        assert w.look(f"moment-{number}", at_ms=moment) == expected


def test_many_synced_writes_after_a_rotation(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        kv = w.store.kv("pairs", create=True)
        kv.put(b"first", b"x" * 10_000)
        kv.flush()
        for number in range(500):
            kv.put(b"%04d" % number, b"y")
        w.archived()
        expected = contents(w.store)
    assert len(expected["pairs"]) == 501
    assert read(w.restore()) == expected


def test_a_checkpoint_that_frees_segments_and_work_that_uses_them_again(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        for start in range(0, 300, 50):
            fill(w.store, start, 50)
            w.store.checkpoint("shop")
            w.store.maintain()
            if start == 150:
                w.archived()
                middle = contents(w.store)
                assert w.look("middle") == middle
        w.archived()
        expected = contents(w.store)
    assert read(w.restore()) == expected


def test_compactions_while_the_bucket_is_away(tmp_path: Path) -> None:
    """Tables that came and went before anything could be uploaded."""
    with world(tmp_path) as w:
        fill(w.store, 0)
        w.archived()
        gate = Gate(w.archiver)
        gate.is_away = True
        for start in range(100, 900, 100):
            fill(w.store, start, 40)
            w.store.kv("pairs").flush()
            w.store.kv("pairs").compact()
            w.store.stream("events").seal()
            w.store.stream("events").compress()
        gate.is_away = False
        w.archived()
        expected = contents(w.store)
    assert read(w.restore()) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_300_megabytes_are_compacted_while_the_bucket_is_away(tmp_path: Path) -> None:
    """Flushes and compactions go on, what waits is bounded, and everything is there when the bucket is."""
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
        gate.is_away = True
        expected = {b"before": hashlib.sha256(b"it went").digest()}
        for number in range(300 * 16):
            key, value = b"%04d" % (number * 7 % 3000), draw.randbytes(size)
            kv.put(key, value, sync=number % 100 == 0)
            expected[key] = hashlib.sha256(value).digest()
        kv.flush()
        kv.compact()
        assert store.archive.status().state != "archived"
        assert store.archive._outbox_bytes()[0] <= memory
        gate.is_away = False
        store.archive.wait(600)
    quire.restore(str(tmp_path / "bucket"), tmp_path / "restored", takeover=True)
    with quire.open(tmp_path / "restored", settings=quiet()) as store:
        assert {key: hashlib.sha256(value).digest() for key, value in store.kv("pairs").scan()} == expected


def test_cursors_and_answers_to_repeated_requests_come_back(tmp_path: Path) -> None:
    with world(tmp_path) as w:
        w.store.feed.register(name="reader")
        fill(w.store, 0)
        w.store.feed.acknowledge("reader", 2)
        w.store.manifest.writer.submit(
            [RecordMetric(7, 1, [1.0])], key=b"request" + bytes(9), result=b"answer"
        ).result()
        w.archived()
        expected = stored(w.store)
    with quire.open(w.restore(), "r") as store:
        assert stored(store) == expected
    assert all(expected)


def stored(store: Store) -> list[list[tuple[bytes, bytes]]]:
    with store.manifest.read() as txn:
        return [list(txn.raw_scan(table)) for table in (t.CHANGE_CURSORS, t.IDEMPOTENCY)]
