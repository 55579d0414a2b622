"""Retention by age, by bytes and by consumers; positions of consumers; pins of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import Corruption, CursorLost, InvalidInput, InvalidName, OutOfRange, UnknownCursor
from quire.stream.mlog_states import Hot, Hydration, Life, Remote, State, Warm
from quire.stream.segments import StreamSegment
from quire.stream.state import Consumer, Retention, StreamState, due
from tests.stream.streams import StreamHarness, ids


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.check()
    harness.close()


def test_without_retention_nothing_is_retired(harness: StreamHarness) -> None:
    harness.fill(3)
    harness.clock.advance(10**9)
    assert harness.stream.retire() == 0


def test_segments_are_retired_by_age(harness: StreamHarness) -> None:
    for _ in range(3):
        harness.fill(1)
        harness.clock.advance(100)
    harness.stream.retain(Retention(seconds=250))
    assert harness.stream.retire() == 1
    assert harness.stream.first_record == 21
    harness.clock.advance(1000)
    harness.stream.append(b"a").result()
    assert harness.stream.tick().retired == 2
    assert ids(harness.stream.read()) == [61], "the open segment stays"


def test_segments_are_retired_by_bytes(harness: StreamHarness) -> None:
    harness.fill(5)
    size = harness.segments()[0].durable_bytes
    harness.stream.retain(Retention(bytes=size * 2))
    assert harness.stream.retire() == 3
    assert harness.stream.first_record == 61
    harness.reopen()
    assert harness.stream.retention == Retention(bytes=size * 2)
    assert ids(harness.stream.read()) == list(range(61, 101))


def test_consumers_hold_what_they_have_not_read(harness: StreamHarness) -> None:
    harness.fill(4)
    stream = harness.stream
    assert stream.register("ann") == 1
    stream.register("bob", 41)
    stream.retain(Retention(bytes=1))
    assert stream.retire() == 0
    stream.ack("ann", 35)
    assert stream.retire() == 1
    stream.ack("ann", 81)
    assert stream.retire() == 1, "bob is at 41"
    stream.drop_consumer("bob")
    assert stream.retire() == 2


def test_records_that_all_consumers_have_read_can_be_retired_at_once(harness: StreamHarness) -> None:
    harness.fill(3)
    harness.stream.retain(Retention(consumed=True))
    assert harness.stream.retire() == 0, "no consumer has read anything"
    harness.stream.register("ann")
    harness.stream.ack("ann", 41)
    assert harness.stream.retire() == 2


def test_a_consumer_that_is_silent_for_too_long_holds_nothing(harness: StreamHarness) -> None:
    harness.fill(2)
    harness.stream.register("dead")
    harness.stream.retain(Retention(bytes=1, hold_seconds=100))
    assert harness.stream.retire() == 0
    harness.clock.advance(101)
    assert harness.stream.retire() == 2
    with pytest.raises(CursorLost):
        list(harness.stream.read(harness.stream.position("dead")))


def test_positions_are_durable_and_never_decrease(harness: StreamHarness) -> None:
    harness.fill(1)
    stream = harness.stream
    stream.register("ann", 5)
    stream.ack("ann", 9)
    stream.ack("ann", 7)
    assert harness.crash().position("ann") == 9
    assert harness.stream.register("ann", 1) == 9
    with pytest.raises(OutOfRange, match="do not exist"):
        harness.stream.ack("ann", 22)
    with pytest.raises(UnknownCursor):
        harness.stream.ack("bob", 1)
    with pytest.raises(UnknownCursor):
        harness.stream.position("bob")
    with pytest.raises(InvalidName):
        harness.stream.register("a/b")


def test_segments_that_a_snapshot_holds_are_not_retired(harness: StreamHarness) -> None:
    harness.fill(2)
    harness.stream.ledger.project_now()
    harness.manifest.snapshots.publish(harness.stream_id, "kept")
    harness.fill(1)
    harness.stream.retain(Retention(bytes=1))
    assert harness.stream.retire() == 0
    harness.manifest.snapshots.drop(harness.stream_id, "kept")
    assert harness.stream.retire() == 3


def test_an_unreadable_state_file_is_not_replaced_by_a_new_one(harness: StreamHarness) -> None:
    harness.stream.register("ann")
    harness.stream.close()
    path = Path(harness.files.state)
    original = path.read_bytes()
    path.write_bytes(b"{")
    with pytest.raises(Corruption, match="stream's state file"):
        harness.open()
    path.write_bytes(original)
    harness.stream = harness.open()


def test_limits_are_not_negative() -> None:
    with pytest.raises(InvalidInput):
        Retention(seconds=-1)


def segment(number: int, sealed_ms: int, size: int) -> StreamSegment:
    return StreamSegment(
        segment_id=number,
        base_record=number * 10,
        end_record=number * 10 + 10,
        epoch=1,
        opened_ms=0,
        sealed_ms=sealed_ms,
        state=State(Life.SEALED, Warm.NONE, Remote.NONE, Hot.RESIDENT, Hydration.IDLE),
        durable_bytes=size,
        crc64=0,
        warm_bytes=0,
        dictionary_id=0,
        key="",
        etag="",
    )


@given(
    sizes=st.lists(st.integers(1, 50), max_size=8),
    limit=st.integers(0, 200),
    age=st.integers(0, 10),
    positions=st.lists(st.integers(0, 100), max_size=2),
    consumed=st.booleans(),
)
def test_only_the_oldest_segments_are_retired_and_only_those_that_are_due(
    sizes: list[int], limit: int, age: int, positions: list[int], consumed: bool
) -> None:
    segments = [segment(number, number * 1000, size) for number, size in enumerate(sizes)]
    retention = Retention(seconds=age, bytes=limit, consumed=consumed)
    consumers = [Consumer(position, 0) for position in positions]
    retired = due(segments, retention, consumers, now_ms=8000)
    assert retired == segments[: len(retired)]
    assert all(segment_.end_record <= position for segment_ in retired for position in positions)
    remaining = segments[len(retired) :]
    if remaining and not any(remaining[0].end_record > position for position in positions):
        assert not (limit and sum(segment_.durable_bytes for segment_ in remaining) > limit)
        assert not (age and remaining[0].sealed_ms <= 8000 - age * 1000)
        assert not (consumed and positions)


def test_no_flipped_bit_of_the_state_changes_what_is_retired(harness: StreamHarness) -> None:
    """A retention or position that was altered on disk retires nothing. State files without a checksum, of older
    versions, are read.
    """
    harness.stream.register("reader")
    harness.stream.retain(Retention(seconds=86_400.0, bytes=1 << 30, consumed=True))
    harness.stream.close()
    path = Path(harness.files.state)
    body, expected = path.read_bytes(), StreamState(harness.files, harness.clock).stored
    for offset in range(len(body)):
        for bit in range(8):
            damaged = bytearray(body)
            damaged[offset] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                state = StreamState(harness.files, harness.clock)
            except Corruption:
                continue
            assert (state.stored.retention, state.stored.consumers) == (expected.retention, expected.consumers), (
                offset,
                bit,
            )
    old = msgspec.json.decode(body)
    del old["crc64"]
    path.write_bytes(msgspec.json.encode(old))
    assert StreamState(harness.files, harness.clock).stored.retention == expected.retention
    path.write_bytes(body)
    harness.stream = harness.open()


def test_a_consumer_that_is_alive_keeps_its_hold(harness: StreamHarness) -> None:
    """An acknowledgement of an unchanged position was ignored, so a consumer that waited for records lost its hold."""
    harness.fill(2)
    stream = harness.stream
    stream.retain(Retention(bytes=1, hold_seconds=60))
    stream.register("slow", 21)
    for _ in range(3):
        harness.clock.advance(50)
        stream.ack("slow", 21)
        stream.ack("slow", 1)  # behind its position: counts as a heartbeat and moves nothing
        stream.retire()
        assert (stream.position("slow"), stream.first_record) == (21, 21)
    harness.reopen()
    harness.clock.advance(50)
    harness.stream.retire()
    assert harness.stream.first_record == 21, "a heartbeat is durable"
    harness.clock.advance(11)
    harness.stream.retire()
    assert harness.stream.first_record == 41
