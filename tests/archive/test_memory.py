"""What waits for the bucket is bounded: in memory by `archive.memory_bytes`, whatever a writer does (A5)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import quire
from quire.archive.format import CommitEvent, WriteEvent
from quire.archive.queue import EventQueue
from quire.core.errors import ObjectStoreUnavailable
from quire.core.limits import MIB
from quire.durable.failpoints import armed

MEMORY = 16 * MIB


def write(size: int) -> WriteEvent:
    return WriteEvent(1, 0, bytes(size))


def test_a_full_queue_requests_a_cut_and_blocks_writers() -> None:
    crowded_sizes: list[int] = []
    queue = EventQueue(crowded_bytes=1_000, full_bytes=2_000, crowded=lambda: crowded_sizes.append(queue.size_bytes))
    queue.append(write(500))
    assert not crowded_sizes
    queue.append(write(600))
    queue.append(write(100))
    assert len(crowded_sizes) == 1  # once, when it becomes crowded
    continued = threading.Event()

    def append_more() -> None:
        queue.append(write(1_500))
        continued.set()

    writer = threading.Thread(target=append_more)
    writer.start()
    assert not continued.wait(0.2)
    events, end = queue.take(1_000)
    assert (len(events), end) == (2, 2)
    assert continued.wait(5)
    writer.join()
    assert len(crowded_sizes) == 2


def test_events_stay_in_order_around_an_unsettled_commit() -> None:
    queue = EventQueue()
    queue.append(write(1))
    slot = queue.reserve()
    queue.append(write(2))
    assert [len(event.data) for event in queue.take(1 << 30)[0]] == [1]  # type: ignore[union-attr]
    assert queue.take(1 << 30) == ([], 1)
    queue.append(write(3))
    commit = CommitEvent((("db", [(b"k", b"v")], []),))
    slot.fill(commit)
    events, end = queue.take(1 << 30)
    assert (events[0], [len(event.data) for event in events[1:]], end) == (commit, [2, 3], 4)  # type: ignore[union-attr]
    assert queue.size_bytes == 0
    assert queue.since is None


def test_dropped_events_count_as_taken() -> None:
    queue = EventQueue()
    for size in (1, 2, 3):
        queue.append(write(size))
    assert len(queue.take(60)[0]) == 1
    slot = queue.reserve()
    assert len(queue.drop()) == 2
    assert queue.take(1 << 30) == ([], 3)
    slot.cancel()
    assert queue.take(1 << 30) == ([], 4)


def _write_much(folder: Path, total: int, point: str) -> tuple[int, int]:
    """Write this many bytes while the bucket is unavailable; returns the largest queue and the most that waited in
    memory."""
    bucket = folder / "bucket"
    bucket.mkdir()
    is_down = threading.Event()

    def refuse(_: str) -> None:
        if is_down.is_set():
            raise ObjectStoreUnavailable("the bucket is unavailable")

    archive = quire.ArchiveSettings(mode="async", memory_bytes=MEMORY, interval_seconds=60.0)
    settings = quire.StoreSettings(object_store=str(bucket), archive=archive)
    queue_bytes = outbox_bytes = 0
    value = os.urandom(MIB)
    with armed(point, refuse), quire.open(folder / "store", settings=settings) as store:
        kv = store.kv("kv", create=True)
        archiver = store.archive
        assert archiver is not None
        archiver.wait()
        is_down.set()
        for number in range(total // MIB):
            kv.put(b"%d" % number, value, sync=False)
            queue_bytes = max(queue_bytes, archiver.queue.size_bytes)
            outbox_bytes = max(outbox_bytes, archiver._outbox.sizes()[0])
        is_down.clear()
        archiver.wait(120)
        copies = total // MIB
    quire.restore(str(bucket), folder / "restored", takeover=True)
    with quire.open(folder / "restored") as store:
        assert all(store.kv("kv").get(b"%d" % number) == value for number in range(copies))
    return queue_bytes, outbox_bytes


def test_a_writer_does_not_fill_memory_while_the_bucket_is_unavailable(tmp_path: Path) -> None:
    """The interval is a minute: only its size limit makes the queue shrink."""
    queue_bytes, outbox_bytes = _write_much(tmp_path, 64 * MIB, "archive.log.before")
    assert queue_bytes <= MEMORY + 2 * MIB
    assert outbox_bytes <= MEMORY


@pytest.mark.slow
def test_half_a_gigabyte_does_not_fill_memory(tmp_path: Path) -> None:
    queue_bytes, outbox_bytes = _write_much(tmp_path, 500 * MIB, "archive.log.before")
    assert queue_bytes <= MEMORY + 2 * MIB
    assert outbox_bytes <= MEMORY
