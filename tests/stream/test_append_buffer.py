"""`DiskFull` means "not done, and never will be": what was refused is not written later, and whoever repeats it gets no
duplicates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from quire.core.errors import DiskFull, StorageFault, StoreClosed, StoreUnusable
from quire.durable.files import OsDisk
from quire.testing.faults import Fault, FaultyDisk
from tests.stream.streams import LOG, SMALL, StreamWorld

PAGE = bytes(6 << 10)
"""Two of these fill a segment of the test's size."""


class FullDisk(OsDisk):
    """A disk on which no new file can be made while it is full."""

    def __init__(self, *parts: str) -> None:
        self.full = False
        self.parts = parts or ("spare", ".mlog")

    def open(self, path: str, **how: Any) -> Any:
        if self.full and how.get("exclusive") and any(part in path for part in self.parts):
            raise DiskFull("the disk is full", path=path)
        return super().open(path, **how)


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


@pytest.fixture
def world(tmp_path: Path, disk: FullDisk) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path, disk=disk)
    made.stream.append(b"first").result()
    made.stream.seal()
    yield made
    disk.full = False
    made.check()
    made.close()


def test_what_was_refused_is_never_written(world: StreamWorld, disk: FullDisk) -> None:
    disk.full = True
    refused = world.stream.append(b"refused")
    with pytest.raises(DiskFull):
        refused.result()
    assert world.stream.failure is None
    disk.full = False
    assert world.stream.append(b"again").result() == 2
    assert world.stream.append(b"more").result() == 3
    assert world.payloads() == [b"first", b"again", b"more"]
    assert not refused.done, "its id is somebody else's by now"
    with pytest.raises(DiskFull):
        refused.result()
    world.crash()
    assert world.payloads() == [b"first", b"again", b"more"]


def test_the_whole_group_is_refused_whoever_asks(world: StreamWorld, disk: FullDisk) -> None:
    disk.full = True
    guards = [world.stream.append(b"a"), world.stream.append([b"b", b"c"]), world.stream.append(b"d")]
    for guard in reversed(guards):
        with pytest.raises(DiskFull):
            guard.result()
    disk.full = False
    world.stream.sync()
    assert world.payloads() == [b"first"]
    assert world.stream.append(b"e").result() == 2


def test_what_of_a_group_was_written_before_the_disk_was_full_is_durable(world: StreamWorld, disk: FullDisk) -> None:
    """One group, two runs: the first still fits into the open segment. Its appender must not be told that it failed."""
    world.stream.append(b"open").result()
    disk.full = True
    fits, too_much = world.stream.append(pa.array([PAGE])), world.stream.append(pa.array([PAGE, PAGE]))
    with pytest.raises(DiskFull):
        too_much.result()
    assert fits.done
    assert fits.result() == 3
    disk.full = False
    world.crash()
    assert world.payloads() == [b"first", b"open", PAGE]


def test_the_first_of_a_group_is_not_told_of_the_others_trouble(world: StreamWorld, disk: FullDisk) -> None:
    world.stream.append(b"open").result()
    disk.full = True
    fits, too_much = world.stream.append(pa.array([PAGE])), world.stream.append(pa.array([PAGE, PAGE]))
    assert fits.result() == 3
    disk.full = False
    assert too_much.result() == 4, "nobody was told that it was refused, so it is not"
    assert world.payloads() == [b"first", b"open", PAGE, PAGE, PAGE]


def test_who_does_not_ask_for_results_is_told_by_the_next_sync(world: StreamWorld, disk: FullDisk) -> None:
    disk.full = True
    world.stream.append(b"unasked")
    asked = world.stream.append(b"asked")
    with pytest.raises(DiskFull):
        asked.result()
    disk.full = False
    with pytest.raises(DiskFull, match="records were refused") as told:
        world.stream.sync()
    assert told.value.where["records"] == 1, "the other one knows"
    world.stream.sync()
    assert world.payloads() == [b"first"]


def test_a_sync_that_refuses_says_so_once(world: StreamWorld, disk: FullDisk) -> None:
    disk.full = True
    world.stream.append(b"a")
    with pytest.raises(DiskFull):
        world.stream.sync()
    disk.full = False
    world.stream.sync()
    assert world.stream.end_record == 2


def test_the_background_refuses_nothing(world: StreamWorld, disk: FullDisk) -> None:
    """It has nobody to tell."""
    disk.full = True
    guard = world.stream.append(b"patient")
    with pytest.raises(DiskFull):
        world.stream.keep()
    disk.full = False
    world.stream.keep()
    assert guard.done
    assert world.payloads() == [b"first", b"patient"]


def test_an_append_that_must_write_what_is_pending_is_refused_with_it(tmp_path: Path, disk: FullDisk) -> None:
    world = StreamWorld(tmp_path, settings=msgspec.structs.replace(SMALL, pending_bytes_max=100), disk=disk)
    disk.full = True
    with pytest.raises(DiskFull):
        world.stream.append(b"a")
    disk.full = False
    world.stream.sync()
    assert world.stream.append(b"a").record == 1
    world.stream.sync()
    assert world.payloads() == [b"a"]
    world.close()


def test_closing_tells_what_was_refused_and_keeps_the_rest(tmp_path: Path, disk: FullDisk) -> None:
    world = StreamWorld(tmp_path, disk=disk)
    world.stream.append(b"kept").result()
    disk.full = True
    world.stream.append([PAGE, PAGE, PAGE])
    with pytest.raises(DiskFull):
        world.stream.close()
    disk.full = False
    world.stream = world.open()
    assert world.payloads() == [b"kept"]
    assert all(segment.is_sealed for segment in world.segments())
    world.close()


def test_no_room_for_the_log_refuses_and_breaks_nothing(tmp_path: Path) -> None:
    """A segment ends and begins in the manifest log: room for that is made before anything has happened."""
    disk = FullDisk(".mlog")
    world = StreamWorld(tmp_path, disk=disk, log_settings=msgspec.structs.replace(LOG, record_bytes_max=8 << 10))
    while not world.stream.ledger.log._writer.is_full:
        world.fill(1, records=1)
    disk.full = True
    refused = world.stream.append(b"refused")
    with pytest.raises(DiskFull):
        refused.result()
    assert world.stream.failure is None
    disk.full = False
    end = world.stream.end_record
    assert world.stream.append(b"again").result() == end
    assert world.payloads(end) == [b"again"]
    world.check()
    world.close()


def test_threads_that_repeat_what_was_refused_write_each_record_once(tmp_path: Path, disk: FullDisk) -> None:
    """The disk is full now and then, for everybody; each thread repeats exactly what it was told is not done."""
    world = StreamWorld(tmp_path, disk=disk)
    each, threads, refusals = 60, 6, []

    def work(number: int) -> None:
        for count in range(each):
            payload = b"%d:%d:" % (number, count) + bytes(700)
            while True:
                try:
                    world.stream.append(payload).result()
                    break
                except DiskFull:
                    refusals.append(payload)
                    disk.full = False

    def spoil() -> None:
        while any(thread.is_alive() for thread in workers):
            disk.full = True

    disk.full = True  # for the first segment: on a busy machine the workers may be done before the spoiler runs
    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    spoiler = threading.Thread(target=spoil, daemon=True)
    for thread in (*workers, spoiler):
        thread.start()
    for thread in (*workers, spoiler):
        thread.join(120)
        assert not thread.is_alive(), "somebody was forgotten"
    disk.full = False
    assert refusals, "the disk was never full, and this shows nothing"
    world.stream.hot._pending.take_unreported()
    expected = {b"%d:%d:" % (number, count) + bytes(700) for number in range(threads) for count in range(each)}
    for _ in range(2):
        payloads = world.payloads()
        assert len(payloads) == len(expected)
        assert set(payloads) == expected
        world.crash()
    world.check()
    world.close()


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_full_disk_at_any_call_doubles_and_loses_nothing(tmp_path: Path, fault: Fault) -> None:
    """`DiskFull`: not there, repeat it. `StoreUnusable`: open the stream again and look. Nothing else is needed."""
    number = 0
    while True:
        number += 1
        root = tmp_path / str(number)
        root.mkdir()
        world = StreamWorld(root)
        world.fill(2, records=3)
        world.stream.close()
        disk = FaultyDisk(OsDisk(), fault, fail_at=number)
        world.disk = disk
        outcome = _append_once(world)
        world.disk = OsDisk()
        world.stream = world.open()
        payloads = world.payloads()
        if outcome is DiskFull:
            assert payloads.count(b"x") == 0, "it was said to be refused"
        elif outcome is None:
            assert payloads.count(b"x") == 1, "it was said to be durable"
        assert payloads.count(b"x") <= 1
        world.check()
        world.close()
        if not disk.fired:
            return


def _append_once(world: StreamWorld) -> type[Exception] | None:
    """Open, append, ask once; what was said. The stream is left as a crash would."""
    try:
        stream = world.open()
    except (StorageFault, StoreUnusable):
        return StoreUnusable
    try:
        stream.append(b"x").result()
        return None
    except DiskFull:
        return DiskFull
    except (StoreUnusable, StoreClosed):
        return StoreUnusable
    finally:
        stream.abandon()
