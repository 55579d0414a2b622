"""`DiskFull` means "not done, and never will be": refused records are not written later, so repeating the append causes
no duplicates.
"""

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
from tests.stream.streams import LOG, SMALL, StreamHarness

PAGE = bytes(6 << 10)
"""Two of these fill a segment in these tests."""


class FullDisk(OsDisk):
    """A disk on which no new file can be created while it is `full`."""

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
def harness(tmp_path: Path, disk: FullDisk) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path, disk=disk)
    harness.stream.append(b"first").result()
    harness.stream.seal()
    yield harness
    disk.full = False
    harness.check()
    harness.close()


def test_refused_records_are_never_written(harness: StreamHarness, disk: FullDisk) -> None:
    disk.full = True
    refused = harness.stream.append(b"refused")
    with pytest.raises(DiskFull):
        refused.result()
    assert harness.stream.failure is None
    disk.full = False
    assert harness.stream.append(b"again").result() == 2
    assert harness.stream.append(b"more").result() == 3
    assert harness.payloads() == [b"first", b"again", b"more"]
    assert not refused.done, "its id belongs to another record now"
    with pytest.raises(DiskFull):
        refused.result()
    harness.crash()
    assert harness.payloads() == [b"first", b"again", b"more"]


def test_the_whole_group_is_refused_whichever_guard_is_awaited(harness: StreamHarness, disk: FullDisk) -> None:
    disk.full = True
    guards = [harness.stream.append(b"a"), harness.stream.append([b"b", b"c"]), harness.stream.append(b"d")]
    for guard in reversed(guards):
        with pytest.raises(DiskFull):
            guard.result()
    disk.full = False
    harness.stream.sync()
    assert harness.payloads() == [b"first"]
    assert harness.stream.append(b"e").result() == 2


def test_records_of_a_group_written_before_the_disk_was_full_are_durable(
    harness: StreamHarness, disk: FullDisk
) -> None:
    """One group, two runs: the first still fits into the open segment, so its append must not fail."""
    harness.stream.append(b"open").result()
    disk.full = True
    fits, too_much = harness.stream.append(pa.array([PAGE])), harness.stream.append(pa.array([PAGE, PAGE]))
    with pytest.raises(DiskFull):
        too_much.result()
    assert fits.done
    assert fits.result() == 3
    disk.full = False
    harness.crash()
    assert harness.payloads() == [b"first", b"open", PAGE]


def test_the_first_append_of_a_group_does_not_fail_with_the_others(harness: StreamHarness, disk: FullDisk) -> None:
    harness.stream.append(b"open").result()
    disk.full = True
    fits, too_much = harness.stream.append(pa.array([PAGE])), harness.stream.append(pa.array([PAGE, PAGE]))
    assert fits.result() == 3
    disk.full = False
    assert too_much.result() == 4, "no caller has seen a refusal, so it is retried"
    assert harness.payloads() == [b"first", b"open", PAGE, PAGE, PAGE]


def test_refusals_without_an_awaited_guard_are_reported_by_the_next_sync(
    harness: StreamHarness, disk: FullDisk
) -> None:
    disk.full = True
    harness.stream.append(b"unasked")
    awaited = harness.stream.append(b"asked")
    with pytest.raises(DiskFull):
        awaited.result()
    disk.full = False
    with pytest.raises(DiskFull, match="records were refused") as caught:
        harness.stream.sync()
    assert caught.value.where["records"] == 1, "the other refusal was reported by its guard"
    harness.stream.sync()
    assert harness.payloads() == [b"first"]


def test_a_refusal_is_reported_by_one_sync(harness: StreamHarness, disk: FullDisk) -> None:
    disk.full = True
    harness.stream.append(b"a")
    with pytest.raises(DiskFull):
        harness.stream.sync()
    disk.full = False
    harness.stream.sync()
    assert harness.stream.end_record == 2


def test_background_writes_refuse_nothing(harness: StreamHarness, disk: FullDisk) -> None:
    """No caller would see the refusal."""
    disk.full = True
    guard = harness.stream.append(b"patient")
    with pytest.raises(DiskFull):
        harness.stream.keep()
    disk.full = False
    harness.stream.keep()
    assert guard.done
    assert harness.payloads() == [b"first", b"patient"]


def test_an_append_that_must_write_what_is_pending_is_refused_with_it(tmp_path: Path, disk: FullDisk) -> None:
    harness = StreamHarness(tmp_path, settings=msgspec.structs.replace(SMALL, pending_bytes_max=100), disk=disk)
    disk.full = True
    with pytest.raises(DiskFull):
        harness.stream.append(b"a")
    disk.full = False
    harness.stream.sync()
    assert harness.stream.append(b"a").record == 1
    harness.stream.sync()
    assert harness.payloads() == [b"a"]
    harness.close()


def test_close_reports_refused_records_and_keeps_the_rest(tmp_path: Path, disk: FullDisk) -> None:
    harness = StreamHarness(tmp_path, disk=disk)
    harness.stream.append(b"kept").result()
    disk.full = True
    harness.stream.append([PAGE, PAGE, PAGE])
    with pytest.raises(DiskFull):
        harness.stream.close()
    disk.full = False
    harness.stream = harness.open()
    assert harness.payloads() == [b"kept"]
    assert all(segment.is_sealed for segment in harness.segments())
    harness.close()


def test_a_full_disk_for_the_log_refuses_appends_and_breaks_nothing(tmp_path: Path) -> None:
    """Sealing and opening a segment write to the manifest log: space for these records is reserved before anything
    changes.
    """
    disk = FullDisk(".mlog")
    harness = StreamHarness(tmp_path, disk=disk, log_settings=msgspec.structs.replace(LOG, record_bytes_max=8 << 10))
    while not harness.stream.ledger.log._writer.is_full:
        harness.fill(1, records=1)
    disk.full = True
    refused = harness.stream.append(b"refused")
    with pytest.raises(DiskFull):
        refused.result()
    assert harness.stream.failure is None
    disk.full = False
    end = harness.stream.end_record
    assert harness.stream.append(b"again").result() == end
    assert harness.payloads(end) == [b"again"]
    harness.check()
    harness.close()


def test_threads_that_repeat_refused_appends_write_each_record_once(tmp_path: Path, disk: FullDisk) -> None:
    """The disk is full at intervals, for all threads; each thread repeats exactly those appends that were refused."""
    harness = StreamHarness(tmp_path, disk=disk)
    per_thread, threads, refusals = 60, 6, []

    def work(number: int) -> None:
        for count in range(per_thread):
            payload = b"%d:%d:" % (number, count) + bytes(700)
            while True:
                try:
                    harness.stream.append(payload).result()
                    break
                except DiskFull:
                    refusals.append(payload)
                    disk.full = False

    def keep_filling() -> None:
        while any(thread.is_alive() for thread in workers):
            disk.full = True

    disk.full = True  # for the first segment: on a busy machine the workers may be done before the filler runs
    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    filler = threading.Thread(target=keep_filling, daemon=True)
    for thread in (*workers, filler):
        thread.start()
    for thread in (*workers, filler):
        thread.join(120)
        assert not thread.is_alive(), "a thread was not woken"
    disk.full = False
    assert refusals, "the disk was never full: the test proves nothing"
    harness.stream.hot._pending.take_unreported()
    expected = {b"%d:%d:" % (number, count) + bytes(700) for number in range(threads) for count in range(per_thread)}
    for _ in range(2):
        payloads = harness.payloads()
        assert len(payloads) == len(expected)
        assert set(payloads) == expected
        harness.crash()
    harness.check()
    harness.close()


@pytest.mark.parametrize("fault", [Fault.ENOSPC, Fault.SHORT_WRITE])
def test_a_full_disk_at_any_call_duplicates_and_loses_nothing(tmp_path: Path, fault: Fault) -> None:
    """After `DiskFull` the record is not there: repeat it. After `StoreUnusable`: reopen the stream and check. Nothing
    else is needed.
    """
    number = 0
    while True:
        number += 1
        root = tmp_path / str(number)
        root.mkdir()
        harness = StreamHarness(root)
        harness.fill(2, records=3)
        harness.stream.close()
        disk = FaultyDisk(OsDisk(), fault, fail_at=number)
        harness.disk = disk
        outcome = _append_once(harness)
        harness.disk = OsDisk()
        harness.stream = harness.open()
        payloads = harness.payloads()
        if outcome is DiskFull:
            assert payloads.count(b"x") == 0, "it was refused"
        elif outcome is None:
            assert payloads.count(b"x") == 1, "it was acknowledged as durable"
        assert payloads.count(b"x") <= 1
        harness.check()
        harness.close()
        if not disk.fired:
            return


def _append_once(harness: StreamHarness) -> type[Exception] | None:
    """Open the stream, append once, and return the outcome. The stream is left as after a crash."""
    try:
        stream = harness.open()
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
