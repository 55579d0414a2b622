"""The open end of a stream: ids, groups, blocks, rolling, and failures of the disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from quire.core.errors import (
    InvalidInput,
    OutOfRange,
    StorageFault,
    StoreClosed,
    StoreFenced,
    StoreLocked,
    StoreUnusable,
)
from quire.core.settings import StreamSettings
from quire.durable.files import OsDisk
from quire.durable.names import Tier
from quire.stream.segment import StreamSegmentHeader, scan
from quire.testing.faults import Fault, FaultyDisk
from tests.stream.streams import SMALL, StreamHarness, ids, record


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.check()
    harness.close()


# ── ids and groups ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ids_begin_at_one_and_rise_by_one(harness: StreamHarness) -> None:
    stream = harness.stream
    guards = [stream.append(b"a"), stream.append([b"b", b"c"]), stream.append(pa.array([b"d"])), stream.append(b"e")]
    assert [guard.record for guard in guards] == [1, 2, 4, 5]
    assert not guards[0].done
    assert guards[-1].result() == 5
    assert all(guard.done for guard in guards)
    assert harness.payloads() == [b"a", b"b", b"c", b"d", b"e"]


def test_a_group_is_one_block_and_one_sync(harness: StreamHarness) -> None:
    stream = harness.stream
    guards = [stream.append(record(number)) for number in range(1, 101)]
    guards[50].result()
    assert all(guard.done for guard in guards)
    assert stream.hot.syncs == 1
    open_segment = stream.hot.segment
    assert open_segment is not None
    assert len(open_segment.firsts) == 1


def test_threads_share_syncs_and_every_record_is_there_once(harness: StreamHarness) -> None:
    acknowledged: list[int] = []

    def work(name: int) -> None:
        for number in range(50):
            acknowledged.append(harness.stream.append(f"{name}-{number}".encode()).result())

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(acknowledged) == list(range(1, 201))
    assert len(set(harness.payloads())) == 200
    assert harness.stream.hot.syncs <= 200


def test_an_append_without_a_wait_is_synced_in_the_background(tmp_path: Path) -> None:
    harness = StreamHarness(tmp_path)
    harness.stream.close()
    harness.stream = harness.open(background=True)
    harness.stream.append(b"a")
    assert harness.stream._reader.wait(1, timeout=10)
    harness.close()


def test_a_guard_can_be_awaited(harness: StreamHarness) -> None:
    async def append() -> int:
        return await harness.stream.append(b"a")

    assert asyncio.run(append()) == 1
    assert harness.stream.end_record == 2


@pytest.mark.parametrize(
    "records",
    [
        [record(number, 50) for number in range(1, 2001)],
        pa.array([record(number, 50) for number in range(1, 2001)]),
        pa.array([record(number, 50) for number in range(2001)])[1:],
        pa.chunked_array([[record(number, 50) for number in range(a, a + 500)] for a in range(1, 2001, 500)]),
        pa.array([record(number, 50) for number in range(1, 2001)], pa.large_binary()),
    ],
    ids=["list", "column", "slice", "chunked", "large"],
)
def test_every_form_of_a_batch_gives_the_same_records(harness: StreamHarness, records: Any) -> None:
    assert harness.stream.append(records).result() == 1
    assert harness.payloads() == [record(number, 50) for number in range(1, 2001)]


def test_empty_batches_and_empty_records_are_accepted(harness: StreamHarness) -> None:
    assert harness.stream.append([]).result() == 1
    assert harness.stream.append(pa.array([], pa.binary())).result() == 1
    assert harness.stream.append(b"").result() == 1
    assert harness.stream.append([b"", b""]).result() == 2
    assert harness.payloads() == [b"", b"", b""]


@pytest.mark.parametrize("records", ["text", 7, [b"a", "b"], pa.array([b"a", None]), pa.array([1])])
def test_values_that_are_not_records_are_refused(harness: StreamHarness, records: Any) -> None:
    with pytest.raises(InvalidInput):
        harness.stream.append(records)
    assert harness.stream.hot.next_record == 1


@pytest.mark.parametrize(
    "form", [lambda payload: payload, lambda payload: [payload], lambda payload: pa.array([payload])]
)
def test_a_record_that_is_too_large_is_refused(harness: StreamHarness, form: Any) -> None:
    harness.stream.append(form(bytes(SMALL.record_bytes_max))).result()
    with pytest.raises(OutOfRange, match="exceeds the stream's size limit"):
        harness.stream.append(form(bytes(SMALL.record_bytes_max + 1)))


def test_a_batch_larger_than_a_segment_gets_one_of_its_own_and_is_whole_or_not_at_all(harness: StreamHarness) -> None:
    payloads = [record(number, 1000) for number in range(1, 601)]
    harness.stream.append(payloads).result()
    assert harness.payloads() == payloads
    assert len(harness.segments()) == 1
    open_segment = harness.stream.hot.segment
    assert open_segment is not None
    path = Path(harness.files.segment(Tier.HOT, open_segment.segment_id))
    raw = bytearray(path.read_bytes())
    assert len(open_segment.offsets) > 1
    raw[open_segment.offsets[-1]] ^= 1  # damage its last block
    assert scan(bytes(raw)).end_record == 1


# ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_segments_roll_by_size(harness: StreamHarness) -> None:
    for number in range(1, 101):
        harness.stream.append(record(number, 1000)).result()
    segments = harness.segments()
    assert len(segments) > 5
    assert [segment.is_sealed for segment in segments] == [True] * (len(segments) - 1) + [False]
    assert harness.payloads() == [record(number, 1000) for number in range(1, 101)]


def test_segments_are_sealed_by_time(harness: StreamHarness) -> None:
    harness.stream.append(b"a").result()
    harness.clock.advance(SMALL.seal_seconds - 1)
    harness.stream.keep()
    assert not harness.segments()[0].is_sealed
    harness.clock.advance(1)
    harness.stream.keep()
    assert harness.segments()[0].is_sealed


def test_a_small_segment_of_an_archived_store_is_sealed_hourly(harness: StreamHarness) -> None:
    """Hazard: every active stream cost several requests a minute, so the cost of an archive grew with their number (A6)."""
    harness.stream.hot.is_archived = True
    harness.stream.append(b"a").result()
    harness.clock.advance(SMALL.archived_seal_seconds - 1)
    harness.stream.keep()
    assert not harness.segments()[0].is_sealed
    harness.clock.advance(1)
    harness.stream.keep()
    assert harness.segments()[0].is_sealed


def test_a_large_segment_of_an_archived_store_is_sealed_as_soon_as_in_any_store(harness: StreamHarness) -> None:
    harness.stream.hot.is_archived = True
    harness.stream.hot._settings = msgspec.structs.replace(SMALL, archived_seal_bytes=2_000)
    harness.stream.append(record(1, 1_000)).result()
    harness.clock.advance(SMALL.seal_seconds)
    harness.stream.keep()
    assert not harness.segments()[0].is_sealed
    harness.stream.append(record(2, 1_000)).result()
    harness.stream.keep()
    assert harness.segments()[0].is_sealed


def test_the_next_segment_file_is_prepared_in_advance(harness: StreamHarness) -> None:
    harness.stream.append(record(1, 8000)).result()
    harness.stream.append(record(2, 1000)).result()
    harness.stream.keep()
    assert harness.stream.hot.spares.has_one
    harness.stream.append(record(3, 8000)).result()
    assert len(harness.segments()) == 2
    assert harness.stream.hot.spares.recycled == 0


def test_files_of_evicted_segments_are_reused_and_their_old_blocks_are_ignored(harness: StreamHarness) -> None:
    harness.fill(2, records=15, size=1000)
    harness.stream.compress()
    harness.stream.evict(harness.segments()[0].segment_id)
    assert harness.stream.hot.spares.recycled == 1
    harness.stream.append(b"new").result()
    salts = [
        StreamSegmentHeader.decode(Path(harness.files.segment(Tier.HOT, segment_id)).read_bytes()).salt
        for segment_id in harness.on_disk(Tier.HOT)
    ]
    assert len(set(salts)) == len(salts) == 2, "each use of the file has its own salt"
    harness.crash()
    assert harness.payloads()[-1] == b"new"
    assert harness.stream.end_record == 32


def test_timestamps_never_decrease(harness: StreamHarness) -> None:
    stamps = []
    for seconds in (0, -3600, 10, -86400, 0):
        harness.clock.jump(seconds)
        first = harness.stream.append(b"a").result()
        stamps.append(next(harness.stream.read(first)).timestamp_ms)
        harness.stream.seal()
    assert stamps == sorted(stamps)
    harness.reopen()
    harness.clock.jump(-86400)
    last = harness.stream.append(b"b").result()
    assert next(harness.stream.read(last)).timestamp_ms >= stamps[-1]


# ── recovery ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_timestamps_never_decrease_across_a_crash(harness: StreamHarness) -> None:
    """The log has the time at which the segment was opened; the newest timestamp is only in its blocks."""
    harness.stream.append(b"a").result()
    harness.clock.advance(3600)
    last = harness.stream.append(b"b").result()
    before = next(harness.stream.read(last)).timestamp_ms
    harness.clock.jump(-86400)
    harness.crash()
    last = harness.stream.append(b"c").result()
    assert next(harness.stream.read(last)).timestamp_ms >= before
    assert harness.stream.seek(before) == 2


def test_a_torn_tail_is_cut_and_never_appended_to(harness: StreamHarness) -> None:
    harness.stream.append([b"a", b"b"]).result()
    harness.stream.append(b"c").result()
    open_segment = harness.stream.hot.segment
    assert open_segment is not None
    path = Path(harness.files.segment(Tier.HOT, open_segment.segment_id))
    harness.stream.abandon()
    raw = bytearray(path.read_bytes())
    raw[open_segment.offsets[1] + 70] ^= 0xFF
    path.write_bytes(raw)
    harness.stream = harness.open()
    assert harness.payloads() == [b"a", b"b"]
    assert harness.stream.append(b"d").result() == 3
    assert [segment.segment_id for segment in harness.segments()] == [1, 2]
    harness.crash()
    assert harness.payloads() == [b"a", b"b", b"d"]


def test_an_open_segment_without_records_is_discarded(harness: StreamHarness) -> None:
    harness.stream.append(b"a").result()
    open_segment = harness.stream.hot.segment
    assert open_segment is not None
    path = Path(harness.files.segment(Tier.HOT, open_segment.segment_id))
    harness.stream.abandon()
    raw = bytearray(path.read_bytes())
    raw[64:] = bytes(len(raw) - 64)
    path.write_bytes(raw)
    harness.stream = harness.open()
    assert (harness.payloads(), harness.segments(), harness.on_disk(Tier.HOT)) == ([], [], [])
    assert harness.stream.append(b"b").result() == 1


def test_ids_are_not_reused_when_everything_was_retired(harness: StreamHarness) -> None:
    harness.fill(2)
    for segment in harness.segments():
        harness.stream.tiers.retire(segment.segment_id)
    harness.crash()
    assert harness.stream.append(b"a").result() == 41
    assert ids(harness.stream.read()) == [41]


def test_a_second_writer_is_refused(harness: StreamHarness) -> None:
    with pytest.raises(StoreLocked, match="another owner"):
        harness.open()


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_an_append_above_the_pending_limit_is_written_at_once(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, pending_bytes_max=100)
    harness = StreamHarness(tmp_path, settings=settings)
    harness.stream.append(bytes(200))
    assert harness.stream.hot.segment is not None, "more bytes than the limit were left pending"
    assert harness.stream.end_record == 1, "written, but not yet durable"
    harness.stream.sync()
    harness.close()


def test_a_fenced_owner_acknowledges_nothing_when_a_segment_ends(tmp_path: Path) -> None:
    """Hazard: only the sync of a group asked whether the store has another owner, not the sync that ends a segment."""
    harness = StreamHarness(tmp_path, settings=msgspec.structs.replace(SMALL, pending_bytes_max=100))
    hot = harness.stream.hot
    guard = harness.stream.append(record(1, 8_100))

    def check_owner() -> None:
        raise StoreFenced("the store has another owner")

    hot._check_owner = check_owner
    assert (hot.segment is not None and hot.segment.written, hot.durable) == (2, 1), "written, not yet durable"
    with pytest.raises(StoreFenced):
        harness.stream.append(record(2, 8_100))
    assert (hot.durable, guard.done) == (1, False)
    with pytest.raises(StoreFenced):
        guard.result()
    harness.stream.abandon()
    harness.manifest.close()
    harness.objects.close()


@pytest.mark.parametrize("operation", ["write_at", "sync"])
def test_after_a_failed_write_the_stream_refuses_appends_until_it_is_reopened(tmp_path: Path, operation: str) -> None:
    harness = StreamHarness(tmp_path)
    harness.stream.append(b"a").result()
    open_segment = harness.stream.hot.segment
    assert open_segment is not None
    original = open_segment.file

    class FailingFile:
        path = original.path

        def __getattr__(self, name: str) -> Any:
            if name in (operation, "write_synced_at"):
                raise StorageFault("the disk is broken", path=original.path)
            return getattr(original, name)

    open_segment.file = FailingFile()
    guard = harness.stream.append(b"b")
    with pytest.raises((StorageFault, StoreUnusable)):
        guard.result()
    with pytest.raises(StoreUnusable, match="reopen the stream"):
        harness.stream.append(b"c")
    assert harness.payloads() == [b"a"], "durable records can still be read"
    open_segment.file = original
    harness.crash()
    assert harness.payloads() in ([b"a"], [b"a", b"b"])
    harness.stream.append(b"d").result()
    harness.check()
    harness.close()


def _interrupt_after(work: Callable[..., Any]) -> Callable[..., Any]:
    """The function, interrupted when it has done its work: Python runs signal handlers after calls."""

    def interrupted(*args: Any, **named: Any) -> None:
        work(*args, **named)
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("step", ["_pending.take", "_write", "_synced", "_sync_written", "_buffer", "_next_open"])
def test_a_stream_that_is_interrupted_while_it_writes_accepts_nothing_until_it_is_reopened(
    tmp_path: Path, step: str
) -> None:
    """Hazard: records that had left the buffer were lost, and later ones were acknowledged and unreadable; or they were
    written, and every later append failed."""
    harness = StreamHarness(tmp_path)
    harness.stream.append(record(1, 8_100)).result()
    hot = harness.stream.hot
    guard = harness.stream.append(record(2, 8_100))
    owner, name = (hot._pending, "take") if step == "_pending.take" else (hot, step)
    setattr(owner, name, _interrupt_after(getattr(owner, name)))
    with pytest.raises(KeyboardInterrupt):
        guard.result()
    with pytest.raises(StoreUnusable, match="KeyboardInterrupt"):
        harness.stream.append(b"x")
    harness.crash()
    assert harness.payloads() in ([record(1, 8_100)], [record(1, 8_100), record(2, 8_100)])
    harness.stream.append(b"y").result()
    assert harness.payloads()[-1] == b"y"
    harness.check()
    harness.close()


def test_a_segment_whose_sealing_is_interrupted_gets_no_more_records(harness: StreamHarness) -> None:
    """Hazard: the log had the segment's end, and the writer went on in it."""
    harness.stream.append(b"a").result()
    harness.stream.hot._roll = _interrupt_after(harness.stream.hot._roll)
    with pytest.raises(KeyboardInterrupt):
        harness.stream.seal()
    with pytest.raises(StoreUnusable):
        harness.stream.append(b"b")
    harness.crash()
    harness.stream.append(b"c").result()
    assert harness.payloads() == [b"a", b"c"]


class _InterruptedList(list[Any]):
    """A list whose changes are interrupted when they are made."""

    append = _interrupt_after(list.append)
    extend = _interrupt_after(list.extend)


@pytest.mark.parametrize("records", [b"b", [b"b", b"c"]])
@pytest.mark.parametrize("joins", [True, False], ids=["joins a run", "begins a run"])
@pytest.mark.parametrize("key", [b"", bytes(range(16))], ids=["no key", "key"])
def test_an_interrupted_append_has_its_records_and_their_ids_or_neither(
    harness: StreamHarness, records: bytes | list[bytes], joins: bool, key: bytes
) -> None:
    """Hazard: a record without an id of its own gave the next append the same id, and broke the stream at its next block."""
    pending = harness.stream.hot._pending
    if joins:
        harness.stream.append(b"a")
    run = pending._run
    run.payloads = _InterruptedList(run.payloads)
    pending._runs = _InterruptedList(pending._runs)
    with pytest.raises(KeyboardInterrupt):
        harness.stream.append(records, key=key)
    run.payloads, pending._runs = list(run.payloads), list(pending._runs)
    expected = [b"a"] * joins + ([records] if isinstance(records, bytes) else records)
    assert harness.stream.append(b"z").result() == len(expected) + 1
    assert harness.payloads() == [*expected, b"z"]
    if key:
        assert harness.stream.append(records, key=key).result() == 1 + joins, "the repeated call appends nothing"


@pytest.mark.parametrize("key", [b"", bytes(range(16))], ids=["no key", "key"])
def test_an_append_that_is_interrupted_before_it_is_added_leaves_nothing(harness: StreamHarness, key: bytes) -> None:
    pending = harness.stream.hot._pending
    request_sync, pending._request_sync = pending._request_sync, _interrupt_after(pending._request_sync)
    with pytest.raises(KeyboardInterrupt):
        harness.stream.append(b"a", key=key)
    pending._request_sync = request_sync
    assert harness.stream.append(b"a", key=key).result() == 1
    assert harness.payloads() == [b"a"]


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fails_at_any_step_loses_nothing_that_was_acknowledged(tmp_path: Path, stride: int) -> None:
    """The 1st, 2nd, … step of a short run fails, until a run has no failure."""
    for step in range(1, 400, stride):
        base = tmp_path / str(step)
        base.mkdir()
        harness = StreamHarness(base)
        harness.stream.close()
        disk = FaultyDisk(OsDisk(), Fault.EIO, fail_at=step)
        harness.disk = disk
        acknowledged = 1
        try:
            harness.stream = harness.open()
            for _ in range(2):
                harness.fill(1, records=3)
                acknowledged = harness.stream.end_record
                harness.stream.compress()
                harness.stream.evict()
        except (StorageFault, StoreUnusable):
            pass
        fired = disk.fired
        if harness.stream.failure is None or not isinstance(harness.stream.failure, StoreClosed):
            harness.stream.abandon()
        harness.disk = OsDisk()
        harness.stream = harness.open()
        assert harness.stream.end_record >= acknowledged
        payloads = harness.payloads()
        assert payloads == [record(number + 1) for number in range(len(payloads))]
        harness.check()
        harness.close()
        if not fired:
            return
    raise AssertionError("no run was without a failure")


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InvalidInput, match="segment_bytes"):
        StreamSettings(segment_bytes=100)
