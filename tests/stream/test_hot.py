"""The open end of a stream: ids, groups, blocks, rolling, and what happens when the disk does not do what it should."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from quire.core.errors import InvalidInput, OutOfRange, StorageFault, StoreClosed, StoreLocked, StoreUnusable
from quire.core.settings import StreamSettings
from quire.durable.files import OsDisk
from quire.durable.names import Tier
from quire.stream.segment import StreamSegmentHeader, scan
from quire.testing.faults import Fault, FaultyDisk
from tests.stream.streams import SMALL, StreamWorld, ids, record


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.check()
    made.close()


# ── ids and groups ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_ids_begin_at_one_and_rise_by_one(world: StreamWorld) -> None:
    stream = world.stream
    guards = [stream.append(b"a"), stream.append([b"b", b"c"]), stream.append(pa.array([b"d"])), stream.append(b"e")]
    assert [guard.record for guard in guards] == [1, 2, 4, 5]
    assert not guards[0].done
    assert guards[-1].result() == 5
    assert all(guard.done for guard in guards)
    assert world.payloads() == [b"a", b"b", b"c", b"d", b"e"]


def test_a_group_is_one_block_and_one_sync(world: StreamWorld) -> None:
    stream = world.stream
    guards = [stream.append(record(number)) for number in range(1, 101)]
    guards[50].result()
    assert all(guard.done for guard in guards)
    assert stream.hot.syncs == 1
    live = stream.hot.segment
    assert live is not None
    assert len(live.firsts) == 1


def test_threads_share_syncs_and_every_record_is_there_once(world: StreamWorld) -> None:
    got: list[int] = []

    def work(name: int) -> None:
        for number in range(50):
            got.append(world.stream.append(f"{name}-{number}".encode()).result())

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 201))
    assert len(set(world.payloads())) == 200
    assert world.stream.hot.syncs <= 200


def test_what_nobody_waits_for_is_durable_soon(tmp_path: Path) -> None:
    world = StreamWorld(tmp_path)
    world.stream.close()
    world.stream = world.open(background=True)
    world.stream.append(b"a")
    assert world.stream._reader.wait(1, timeout=10)
    world.close()


def test_a_guard_can_be_awaited(world: StreamWorld) -> None:
    async def append() -> int:
        return await world.stream.append(b"a")

    assert asyncio.run(append()) == 1
    assert world.stream.end_record == 2


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
def test_every_form_of_a_batch_is_the_same_records(world: StreamWorld, records: Any) -> None:
    assert world.stream.append(records).result() == 1
    assert world.payloads() == [record(number, 50) for number in range(1, 2001)]


def test_empty_things_are_fine(world: StreamWorld) -> None:
    assert world.stream.append([]).result() == 1
    assert world.stream.append(pa.array([], pa.binary())).result() == 1
    assert world.stream.append(b"").result() == 1
    assert world.stream.append([b"", b""]).result() == 2
    assert world.payloads() == [b"", b"", b""]


@pytest.mark.parametrize("records", ["text", 7, [b"a", "b"], pa.array([b"a", None]), pa.array([1])])
def test_what_is_not_records_is_refused(world: StreamWorld, records: Any) -> None:
    with pytest.raises(InvalidInput):
        world.stream.append(records)
    assert world.stream.hot.next_record == 1


@pytest.mark.parametrize("form", [lambda one: one, lambda one: [one], lambda one: pa.array([one])])
def test_a_record_that_is_too_large_is_refused(world: StreamWorld, form: Any) -> None:
    world.stream.append(form(bytes(SMALL.record_bytes_max))).result()
    with pytest.raises(OutOfRange, match="exceeds the stream's size limit"):
        world.stream.append(form(bytes(SMALL.record_bytes_max + 1)))


def test_a_batch_larger_than_a_segment_gets_one_of_its_own_and_is_whole_or_not_at_all(world: StreamWorld) -> None:
    payloads = [record(number, 1000) for number in range(1, 601)]
    world.stream.append(payloads).result()
    assert world.payloads() == payloads
    assert len(world.segments()) == 1
    live = world.stream.hot.segment
    assert live is not None
    path = Path(world.files.segment(Tier.HOT, live.segment_id))
    raw = bytearray(path.read_bytes())
    assert len(live.offsets) > 1
    raw[live.offsets[-1]] ^= 1  # its last block does not survive
    assert scan(bytes(raw)).end_record == 1


# ── segments ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_segments_roll_by_size(world: StreamWorld) -> None:
    for number in range(1, 101):
        world.stream.append(record(number, 1000)).result()
    segments = world.segments()
    assert len(segments) > 5
    assert [each.is_sealed for each in segments] == [True] * (len(segments) - 1) + [False]
    assert world.payloads() == [record(number, 1000) for number in range(1, 101)]


def test_segments_are_sealed_by_time(world: StreamWorld) -> None:
    world.stream.append(b"a").result()
    world.clock.advance(SMALL.seal_seconds - 1)
    world.stream.keep()
    assert not world.segments()[0].is_sealed
    world.clock.advance(1)
    world.stream.keep()
    assert world.segments()[0].is_sealed


def test_the_next_file_is_made_ahead(world: StreamWorld) -> None:
    world.stream.append(record(1, 8000)).result()
    world.stream.append(record(2, 1000)).result()
    world.stream.keep()
    assert world.stream.hot.spares.has_one
    world.stream.append(record(3, 8000)).result()
    assert len(world.segments()) == 2
    assert world.stream.hot.spares.recycled == 0


def test_files_of_evicted_segments_are_used_again_and_their_past_stays_dead(world: StreamWorld) -> None:
    world.fill(2, records=15, size=1000)
    world.stream.compress()
    world.stream.evict(world.segments()[0].segment_id)
    assert world.stream.hot.spares.recycled == 1
    world.stream.append(b"new").result()
    salts = [
        StreamSegmentHeader.decode(Path(world.files.segment(Tier.HOT, each)).read_bytes()).salt
        for each in world.on_disk(Tier.HOT)
    ]
    assert len(set(salts)) == len(salts) == 2, "each life has a salt of its own"
    world.crash()
    assert world.payloads()[-1] == b"new"
    assert world.stream.end_record == 32


def test_timestamps_never_fall(world: StreamWorld) -> None:
    stamps = []
    for seconds in (0, -3600, 10, -86400, 0):
        world.clock.jump(seconds)
        first = world.stream.append(b"a").result()
        stamps.append(next(world.stream.read(first)).timestamp_ms)
        world.stream.seal()
    assert stamps == sorted(stamps)
    world.reopen()
    world.clock.jump(-86400)
    last = world.stream.append(b"b").result()
    assert next(world.stream.read(last)).timestamp_ms >= stamps[-1]


# ── recovery ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_timestamps_never_fall_over_a_crash(world: StreamWorld) -> None:
    """The log knows when the segment was opened; the newest moment is in its blocks only."""
    world.stream.append(b"a").result()
    world.clock.advance(3600)
    last = world.stream.append(b"b").result()
    before = next(world.stream.read(last)).timestamp_ms
    world.clock.jump(-86400)
    world.crash()
    last = world.stream.append(b"c").result()
    assert next(world.stream.read(last)).timestamp_ms >= before
    assert world.stream.seek(before) == 2


def test_a_torn_tail_is_cut_and_never_appended_to(world: StreamWorld) -> None:
    world.stream.append([b"a", b"b"]).result()
    world.stream.append(b"c").result()
    live = world.stream.hot.segment
    assert live is not None
    path = Path(world.files.segment(Tier.HOT, live.segment_id))
    world.stream.abandon()
    raw = bytearray(path.read_bytes())
    raw[live.offsets[1] + 70] ^= 0xFF
    path.write_bytes(raw)
    world.stream = world.open()
    assert world.payloads() == [b"a", b"b"]
    assert world.stream.append(b"d").result() == 3
    assert [each.segment_id for each in world.segments()] == [1, 2]
    world.crash()
    assert world.payloads() == [b"a", b"b", b"d"]


def test_a_segment_that_nothing_was_written_to_is_given_up(world: StreamWorld) -> None:
    world.stream.append(b"a").result()
    live = world.stream.hot.segment
    assert live is not None
    path = Path(world.files.segment(Tier.HOT, live.segment_id))
    world.stream.abandon()
    raw = bytearray(path.read_bytes())
    raw[64:] = bytes(len(raw) - 64)
    path.write_bytes(raw)
    world.stream = world.open()
    assert (world.payloads(), world.segments(), world.on_disk(Tier.HOT)) == ([], [], [])
    assert world.stream.append(b"b").result() == 1


def test_ids_are_not_used_again_when_everything_was_retired(world: StreamWorld) -> None:
    world.fill(2)
    for segment in world.segments():
        world.stream.tiers.retire(segment.segment_id)
    world.crash()
    assert world.stream.append(b"a").result() == 41
    assert ids(world.stream.read()) == [41]


def test_a_second_writer_is_told_who_has_the_stream(world: StreamWorld) -> None:
    with pytest.raises(StoreLocked, match="another owner"):
        world.open()


# ── faults ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_writer_that_cannot_be_rid_of_its_records_is_told(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, pending_bytes_max=100)
    world = StreamWorld(tmp_path, settings=settings)
    world.stream.append(bytes(200))
    assert world.stream.hot.segment is not None, "more than may be pending was left pending"
    assert world.stream.end_record == 1, "and it is not durable by that"
    world.stream.sync()
    world.close()


@pytest.mark.parametrize("operation", ["write_at", "sync"])
def test_after_a_doubtful_write_the_stream_takes_nothing_more_until_it_is_opened_again(
    tmp_path: Path, operation: str
) -> None:
    world = StreamWorld(tmp_path)
    world.stream.append(b"a").result()
    live = world.stream.hot.segment
    assert live is not None
    inner = live.file

    class Bad:
        path = inner.path

        def __getattr__(self, name: str) -> Any:
            if name in (operation, "write_synced_at"):
                raise StorageFault("the disk is broken", path=inner.path)
            return getattr(inner, name)

    live.file = Bad()
    guard = world.stream.append(b"b")
    with pytest.raises((StorageFault, StoreUnusable)):
        guard.result()
    with pytest.raises(StoreUnusable, match="reopen the stream"):
        world.stream.append(b"c")
    assert world.payloads() == [b"a"], "what is durable can still be read"
    live.file = inner
    world.crash()
    assert world.payloads() in ([b"a"], [b"a", b"b"])
    world.stream.append(b"d").result()
    world.check()
    world.close()


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_disk_that_fails_at_any_step_loses_nothing_that_was_acknowledged(tmp_path: Path, stride: int) -> None:
    """The 1st, 2nd, … step of a short life fails, until a clean pass."""
    for step in range(1, 400, stride):
        base = tmp_path / str(step)
        base.mkdir()
        world = StreamWorld(base)
        world.stream.close()
        disk = FaultyDisk(OsDisk(), Fault.EIO, fail_at=step)
        world.disk = disk
        acknowledged = 1
        try:
            world.stream = world.open()
            for _ in range(2):
                world.fill(1, records=3)
                acknowledged = world.stream.end_record
                world.stream.compress()
                world.stream.evict()
        except (StorageFault, StoreUnusable):
            pass
        fired = disk.fired
        if world.stream.failure is None or not isinstance(world.stream.failure, StoreClosed):
            world.stream.abandon()
        world.disk = OsDisk()
        world.stream = world.open()
        assert world.stream.end_record >= acknowledged
        found = world.payloads()
        assert found == [record(number + 1) for number in range(len(found))]
        world.check()
        world.close()
        if not fired:
            return
    raise AssertionError("there was no clean pass")


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidInput, match="segment_bytes"):
        StreamSettings(segment_bytes=100)
