"""Reading a stream: ranges, batches, time, tails; over all tiers, and while they change under the reader."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from quire.core.async_bridge import iterate
from quire.core.errors import Corruption, CursorLost, ObjectNotFound, ObjectStoreUnavailable, OutOfRange, StoreClosed
from quire.durable.names import Tier
from quire.stream.arrow_batches import SCHEMA
from quire.stream.verify import problems
from tests.stream.streams import SMALL, StreamWorld, ids, record


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.check()
    made.close()


def spread(world: StreamWorld) -> list[bytes]:
    """Segments on every tier, and one that is open; their records."""
    made = world.fill(4)
    stream = world.stream
    one, two, three, _ = (each.segment_id for each in world.segments())
    stream.compress(two, three)
    stream.upload(one, three)
    stream.evict(one, two, three)
    stream.evict(one, three, warm=True)
    tail = [record(number) for number in range(81, 91)]
    stream.append(tail).result()
    tiers = [(each.is_hot, each.is_warm, each.is_remote) for each in world.segments()]
    remote, warm, hot = (False, False, True), (False, True, False), (True, False, False)
    assert tiers == [remote, warm, remote, hot, hot]
    return [*made, *tail]


def test_a_read_does_not_show_where_records_are(world: StreamWorld) -> None:
    payloads = spread(world)
    assert world.payloads() == payloads
    for start, stop in [(1, 2), (20, 22), (35, 47), (61, 61), (79, 90), (90, 91)]:
        found = list(world.stream.read(start, stop))
        assert ids(found) == list(range(start, stop))
        assert [each.payload for each in found] == payloads[start - 1 : stop - 1]


def test_batches_have_ids_timestamps_and_payloads(world: StreamWorld) -> None:
    payloads = spread(world)
    table = pa.Table.from_batches(world.stream.read_batches(5, 85), schema=SCHEMA)
    table.validate(full=True)
    assert table["id"].to_pylist() == list(range(5, 85))
    assert table["payload"].to_pylist() == payloads[4:84]
    stamps = [each.timestamp_ms for each in world.stream.read(5, 85)]
    assert table["timestamp"].cast(pa.int64()).to_pylist() == stamps


def test_small_blocks_become_large_batches(world: StreamWorld) -> None:
    for number in range(1, 101):
        world.stream.append(record(number, 20)).result()
    assert [batch.num_rows for batch in world.stream.read_batches()] == [100]


def test_ranges_that_are_not_there(world: StreamWorld) -> None:
    world.fill(1)
    assert list(world.stream.read(21)) == []
    assert ids(world.stream.read(20, 999)) == [20]
    assert list(world.stream.read(5, 3)) == []
    with pytest.raises(OutOfRange, match="does not exist yet"):
        list(world.stream.read(22))
    with pytest.raises(CursorLost):
        list(world.stream.read(0))


def test_a_slice_of_an_object_is_fetched_without_the_rest(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, segment_bytes=4 << 20, hot_bytes=0)
    world = StreamWorld(tmp_path, settings=settings)
    draw = random.Random(1)
    payloads = [draw.randbytes(4000) for _ in range(600)]
    world.stream.append(payloads).result()
    world.stream.seal()
    world.stream.upload()
    world.stream.evict(warm=True)
    fetched: list[int] = []
    inner = world.objects.get_range

    def counting(key: str, offset: int, length: int) -> Any:
        fetched.append(length)
        return inner(key, offset, length)

    vars(world.objects)["get_range"] = counting
    assert world.payloads(300, 302) == payloads[299:301]
    whole = world.segments()[0].warm_bytes
    assert sum(fetched) < whole / 2
    assert len(fetched) <= 3, "footer and table, then one or two frames"
    before = len(fetched)
    assert world.payloads(301, 303) == payloads[300:302]
    assert len(fetched) == before, "the frame is in the cache"
    assert not world.segments()[0].is_hot
    world.close()


def test_reading_most_of_a_remote_segment_brings_it_back_if_there_is_room(world: StreamWorld) -> None:
    world.fill(1)
    world.stream.upload()
    world.stream.evict(warm=True)
    assert len(world.payloads()) == 20
    assert world.segments()[0].is_hot


def test_time(world: StreamWorld) -> None:
    moments = []
    for number in range(6):
        moments.append(world.clock.now_ms())
        world.stream.append([record(number * 2 + 1), record(number * 2 + 2)]).result()
        if number % 2:
            world.stream.seal()
        world.clock.advance(10)
    world.stream.upload(1)
    world.stream.evict(1, warm=True)
    for number, moment in enumerate(moments):
        assert world.stream.seek(moment) == number * 2 + 1
        assert world.stream.seek(moment + 1) == number * 2 + 3
    assert world.stream.seek(0) == 1
    assert world.stream.seek(2**62) == 13


# ── tails ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_tail_sees_durable_records_as_they_come(world: StreamWorld) -> None:
    world.fill(1, records=3)
    seen: list[int] = []

    def follow() -> None:
        for each in world.stream.tail(2, timeout=20):
            seen.append(each.id)
            if each.id == 8:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(4, 9):
        world.stream.append(record(number)).result()
        if number == 6:
            world.stream.seal()
    thread.join(60)
    assert seen == [2, 3, 4, 5, 6, 7, 8]


def test_a_tail_begins_with_what_comes_and_ends_when_nothing_does(world: StreamWorld) -> None:
    world.fill(1)
    assert list(world.stream.tail(timeout=0.01)) == []
    world.stream.append(b"not durable")
    assert list(world.stream.tail(timeout=0.01)) == []
    world.stream.sync()
    assert ids(world.stream.tail(21, timeout=0.01)) == [21]


def test_a_tail_that_waited_reads_no_file(world: StreamWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has become durable just now is still in memory; what came before it, or as a column, is read."""
    stream = world.stream
    stream.append([b"one", b"two"]).result()
    stream.append([b"three", b"", b"five"]).result()
    expected = [(each.id, each.timestamp_ms, each.payload) for each in stream.read()]
    reads: list[tuple[int, int]] = []
    read = stream._reader.read

    def noted(start: int, stop: int) -> Iterator[Any]:
        reads.append((start, stop))
        return read(start, stop)

    monkeypatch.setattr(stream._reader, "read", noted)
    assert list(stream.tail(3, timeout=0.01)) == expected[2:]
    assert list(stream.tail(5, timeout=0.01)) == expected[4:]
    assert reads == []
    assert list(stream.tail(1, timeout=0.01)) == expected
    assert reads == [(1, 6)]
    stream.append(pa.array([b"six"])).result()
    assert ids(stream.tail(6, timeout=0.01)) == [6]
    stream.append([bytes(8_000)] * 40).result()
    assert ids(stream.tail(7, timeout=0.01)) == list(range(7, 47))
    assert reads == [(1, 6), (6, 7), (7, 47)], "what is large is not kept"
    assert stream.hot.last_synced.first == 3


def test_a_tail_in_an_event_loop(world: StreamWorld) -> None:
    async def follow() -> list[int]:
        seen: list[int] = []
        async with aclosing(iterate(world.stream.tail(1))) as records:
            await world.stream.append([b"a", b"b"])
            async for each in records:
                seen.append(each.id)
                if each.id == 2:
                    return seen
        return seen

    assert asyncio.run(follow()) == [1, 2]


def test_a_tail_of_a_stream_that_is_closed_says_so(world: StreamWorld) -> None:
    caught: list[type[BaseException]] = []

    def follow() -> None:
        try:
            list(world.stream.tail())
        except StoreClosed as error:
            caught.append(type(error))

    thread = threading.Thread(target=follow)
    thread.start()
    while not world.stream.hot.waiters:
        time.sleep(0.001)
    world.stream.close()
    thread.join(60)
    assert caught == [StoreClosed]
    world.stream = world.open()


# ── readers and movers ────────────────────────────────────────────────────────────────────────────────────────────────
def test_readers_race_moves_and_never_see_anything_else(tmp_path: Path) -> None:
    world = StreamWorld(tmp_path, settings=msgspec.structs.replace(SMALL, cache_bytes=0))
    payloads = world.fill(4, records=15, size=900)
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                found = world.payloads(1, 61)
            except Exception as error:
                wrong.append(error)
                return
            if found != payloads:
                wrong.append(found)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        world.stream.upload()
        for turn in range(5):
            world.stream.evict(warm=turn % 3 == 0)
            world.stream.append([record(number, 900) for number in range(12)]).result()  # uses evicted files again
            world.stream.seal()
            world.stream.hydrate(*range(1, 5))
            world.stream.compress()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert world.stream.hot.spares.recycled
    world.check()
    world.close()


def damage(path: str | Path) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[200] ^= 0xFF
    Path(path).write_bytes(raw)


def test_a_damaged_copy_is_passed_over_if_there_is_another(
    world: StreamWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    payloads = world.fill(1)
    world.stream.compress()
    path = Path(world.files.segment(Tier.HOT, 1))
    whole = path.read_bytes()
    damage(path)
    assert world.payloads() == payloads
    assert "stream.copy_damaged" in capsys.readouterr().err
    assert [each.rule for each in problems(world.stream)] == ["T1"]
    path.write_bytes(whole)


@pytest.mark.parametrize("tier", [Tier.HOT, Tier.WARM])
def test_a_damaged_or_missing_last_copy_is_an_error_that_names_it(world: StreamWorld, tier: Tier) -> None:
    world.fill(1)
    if tier is Tier.WARM:
        world.stream.compress()
        world.stream.evict()
    path = Path(world.files.segment(tier, 1))
    whole = path.read_bytes()
    for gone in (False, True):
        path.unlink() if gone else damage(path)
        with pytest.raises(Corruption) as caught:
            world.payloads()
        assert str(path) in str(caught.value)
        assert [each.rule for each in problems(world.stream)] == ["T1" if tier is Tier.HOT else "T2"]
        path.write_bytes(whole)


def test_an_altered_a_short_and_a_missing_object(tmp_path: Path) -> None:
    world = StreamWorld(tmp_path, settings=msgspec.structs.replace(SMALL, cache_bytes=0, hot_bytes=0))
    world.fill(1)
    world.stream.upload()
    world.stream.evict(warm=True)
    path = tmp_path / "objects" / world.segments()[0].key
    whole = path.read_bytes()
    for spoil, error in [
        (lambda: damage(path), Corruption),
        (lambda: path.write_bytes(whole[:-10]), Corruption),
        (path.unlink, ObjectNotFound),
    ]:
        spoil()
        with pytest.raises(error):
            world.payloads()
        assert [each.rule for each in problems(world.stream)] == ["T3"]
        path.write_bytes(whole)
    assert len(world.payloads()) == 20
    world.close()


def test_an_object_store_that_does_not_answer_is_asked_again(world: StreamWorld) -> None:
    payloads = world.fill(1)
    world.stream.upload()
    world.stream.evict(warm=True)
    inner = world.objects.get_range
    fails = [1]

    def moody(key: str, offset: int, length: int) -> Any:
        if fails:
            fails.pop()
            raise ObjectStoreUnavailable("busy")
        return inner(key, offset, length)

    vars(world.objects)["get_range"] = moody
    assert world.payloads(1, 5) == payloads[:4]
    assert not fails
