"""Retention by age, bytes and consumers; consumers' positions; what a snapshot pins."""

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
from tests.stream.streams import StreamWorld, ids


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.check()
    made.close()


def test_nothing_goes_by_itself(world: StreamWorld) -> None:
    world.fill(3)
    world.clock.advance(10**9)
    assert world.stream.retire() == 0


def test_by_age(world: StreamWorld) -> None:
    for _ in range(3):
        world.fill(1)
        world.clock.advance(100)
    world.stream.retain(Retention(seconds=250))
    assert world.stream.retire() == 1
    assert world.stream.first_record == 21
    world.clock.advance(1000)
    world.stream.append(b"a").result()
    assert world.stream.tick().retired == 2
    assert ids(world.stream.read()) == [61], "the open segment stays"


def test_by_bytes(world: StreamWorld) -> None:
    world.fill(5)
    size = world.segments()[0].durable_bytes
    world.stream.retain(Retention(bytes=size * 2))
    assert world.stream.retire() == 3
    assert world.stream.first_record == 61
    world.reopen()
    assert world.stream.retention == Retention(bytes=size * 2)
    assert ids(world.stream.read()) == list(range(61, 101))


def test_consumers_hold_what_they_have_not_read(world: StreamWorld) -> None:
    world.fill(4)
    stream = world.stream
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


def test_records_that_everybody_has_read_can_go_at_once(world: StreamWorld) -> None:
    world.fill(3)
    world.stream.retain(Retention(consumed=True))
    assert world.stream.retire() == 0, "nobody has read anything"
    world.stream.register("ann")
    world.stream.ack("ann", 41)
    assert world.stream.retire() == 2


def test_a_consumer_that_is_silent_for_too_long_holds_nothing(world: StreamWorld) -> None:
    world.fill(2)
    world.stream.register("dead")
    world.stream.retain(Retention(bytes=1, hold_seconds=100))
    assert world.stream.retire() == 0
    world.clock.advance(101)
    assert world.stream.retire() == 2
    with pytest.raises(CursorLost):
        list(world.stream.read(world.stream.position("dead")))


def test_positions_are_durable_and_only_rise(world: StreamWorld) -> None:
    world.fill(1)
    stream = world.stream
    stream.register("ann", 5)
    stream.ack("ann", 9)
    stream.ack("ann", 7)
    assert world.crash().position("ann") == 9
    assert world.stream.register("ann", 1) == 9
    with pytest.raises(OutOfRange, match="do not exist"):
        world.stream.ack("ann", 22)
    with pytest.raises(UnknownCursor):
        world.stream.ack("bob", 1)
    with pytest.raises(UnknownCursor):
        world.stream.position("bob")
    with pytest.raises(InvalidName):
        world.stream.register("a/b")


def test_what_a_snapshot_holds_is_passed_by(world: StreamWorld) -> None:
    world.fill(2)
    world.stream.ledger.project_now()
    world.manifest.snapshots.publish(world.stream_id, "kept")
    world.fill(1)
    world.stream.retain(Retention(bytes=1))
    assert world.stream.retire() == 0
    world.manifest.snapshots.drop(world.stream_id, "kept")
    assert world.stream.retire() == 3


def test_a_state_file_that_cannot_be_read_is_not_taken_for_a_new_one(world: StreamWorld) -> None:
    world.stream.register("ann")
    world.stream.close()
    path = Path(world.files.state)
    whole = path.read_bytes()
    path.write_bytes(b"{")
    with pytest.raises(Corruption, match="stream's state file"):
        world.open()
    path.write_bytes(whole)
    world.stream = world.open()


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
def test_what_goes_is_the_oldest_and_no_more_than_is_due(
    sizes: list[int], limit: int, age: int, positions: list[int], consumed: bool
) -> None:
    segments = [segment(number, number * 1000, size) for number, size in enumerate(sizes)]
    retention = Retention(seconds=age, bytes=limit, consumed=consumed)
    consumers = [Consumer(position, 0) for position in positions]
    gone = due(segments, retention, consumers, now_ms=8000)
    assert gone == segments[: len(gone)]
    assert all(each.end_record <= position for each in gone for position in positions)
    left = segments[len(gone) :]
    if left and not any(left[0].end_record > position for position in positions):
        assert not (limit and sum(each.durable_bytes for each in left) > limit)
        assert not (age and left[0].sealed_ms <= 8000 - age * 1000)
        assert not (consumed and positions)


def test_no_flipped_bit_of_the_state_changes_what_may_go(world: StreamWorld) -> None:
    """A retention or a position that is not the one that was written retires nothing; files from before are read."""
    world.stream.register("reader")
    world.stream.retain(Retention(seconds=86_400.0, bytes=1 << 30, consumed=True))
    world.stream.close()
    path = Path(world.files.state)
    body, meant = path.read_bytes(), StreamState(world.files, world.clock).stored
    for offset in range(len(body)):
        for bit in range(8):
            wrong = bytearray(body)
            wrong[offset] ^= 1 << bit
            path.write_bytes(wrong)
            try:
                found = StreamState(world.files, world.clock)
            except Corruption:
                continue
            assert (found.stored.retention, found.stored.consumers) == (meant.retention, meant.consumers), (offset, bit)
    old = msgspec.json.decode(body)
    del old["crc64"]
    path.write_bytes(msgspec.json.encode(old))
    assert StreamState(world.files, world.clock).stored.retention == meant.retention
    path.write_bytes(body)
    world.stream = world.open()


def test_a_consumer_that_is_alive_keeps_its_hold(world: StreamWorld) -> None:
    """An acknowledgement of the same position was no news, so a consumer that waited for records lost what it held."""
    world.fill(2)
    stream = world.stream
    stream.retain(Retention(bytes=1, hold_seconds=60))
    stream.register("slow", 21)
    for _ in range(3):
        world.clock.advance(50)
        stream.ack("slow", 21)
        stream.ack("slow", 1)  # behind: alive all the same, and it moves nothing
        stream.retire()
        assert (stream.position("slow"), stream.first_record) == (21, 21)
    world.reopen()
    world.clock.advance(50)
    world.stream.retire()
    assert world.stream.first_record == 21, "a heartbeat is durable"
    world.clock.advance(11)
    world.stream.retire()
    assert world.stream.first_record == 41
