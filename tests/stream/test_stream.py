"""Reading a stream: ranges, batches, time, tails; on all tiers, and while segments move."""

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
from tests.stream.streams import SMALL, StreamHarness, ids, record


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.check()
    harness.close()


def spread(harness: StreamHarness) -> list[bytes]:
    """Fill segments on every tier and one that is open, and return their payloads."""
    payloads = harness.fill(4)
    stream = harness.stream
    first, second, third, _ = (segment.segment_id for segment in harness.segments())
    stream.compress(second, third)
    stream.upload(first, third)
    stream.evict(first, second, third)
    stream.evict(first, third, warm=True)
    tail = [record(number) for number in range(81, 91)]
    stream.append(tail).result()
    tiers = [(segment.is_hot, segment.is_warm, segment.is_remote) for segment in harness.segments()]
    remote, warm, hot = (False, False, True), (False, True, False), (True, False, False)
    assert tiers == [remote, warm, remote, hot, hot]
    return [*payloads, *tail]


def test_a_read_is_the_same_on_every_tier(harness: StreamHarness) -> None:
    payloads = spread(harness)
    assert harness.payloads() == payloads
    for start, stop in [(1, 2), (20, 22), (35, 47), (61, 61), (79, 90), (90, 91)]:
        records = list(harness.stream.read(start, stop))
        assert ids(records) == list(range(start, stop))
        assert [record.payload for record in records] == payloads[start - 1 : stop - 1]


def test_appends_with_a_key_are_read_on_every_tier_once_arrow_is_loaded(harness: StreamHarness) -> None:
    """Hazard: many small blocks with an idempotency key were reported as damaged after the first read of batches."""
    payloads = [record(number) for number in range(1, 41)]
    stream = harness.stream
    for number, payload in enumerate(payloads, 1):
        stream.append(payload, key=number.to_bytes(8, "big") * 2).result()
    assert sum(batch.num_rows for batch in stream.read_batches()) == 40
    assert harness.payloads() == payloads
    stream.seal()
    stream.compress()
    stream.evict()
    assert harness.payloads() == payloads
    stream.upload()
    stream.evict(warm=True)
    assert harness.payloads() == payloads


def test_batches_have_ids_timestamps_and_payloads(harness: StreamHarness) -> None:
    payloads = spread(harness)
    table = pa.Table.from_batches(harness.stream.read_batches(5, 85), schema=SCHEMA)
    table.validate(full=True)
    assert table["id"].to_pylist() == list(range(5, 85))
    assert table["payload"].to_pylist() == payloads[4:84]
    stamps = [record.timestamp_ms for record in harness.stream.read(5, 85)]
    assert table["timestamp"].cast(pa.int64()).to_pylist() == stamps


def test_small_blocks_are_joined_into_large_batches(harness: StreamHarness) -> None:
    for number in range(1, 101):
        harness.stream.append(record(number, 20)).result()
    assert [batch.num_rows for batch in harness.stream.read_batches()] == [100]


def test_ranges_outside_of_the_stream_are_empty_or_refused(harness: StreamHarness) -> None:
    harness.fill(1)
    assert list(harness.stream.read(21)) == []
    assert ids(harness.stream.read(20, 999)) == [20]
    assert list(harness.stream.read(5, 3)) == []
    with pytest.raises(OutOfRange, match="does not exist yet"):
        list(harness.stream.read(22))
    with pytest.raises(CursorLost):
        list(harness.stream.read(0))


def test_a_slice_of_an_object_is_fetched_without_the_rest(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, segment_bytes=4 << 20, hot_bytes=0)
    harness = StreamHarness(tmp_path, settings=settings)
    rng = random.Random(1)
    payloads = [rng.randbytes(4000) for _ in range(600)]
    harness.stream.append(payloads).result()
    harness.stream.seal()
    harness.stream.upload()
    harness.stream.evict(warm=True)
    lengths: list[int] = []
    original = harness.objects.get_range

    def recording_get_range(key: str, offset: int, length: int) -> Any:
        lengths.append(length)
        return original(key, offset, length)

    vars(harness.objects)["get_range"] = recording_get_range
    assert harness.payloads(300, 302) == payloads[299:301]
    object_bytes = harness.segments()[0].warm_bytes
    assert sum(lengths) < object_bytes / 2
    assert len(lengths) <= 3, "footer and table, then one or two frames"
    before = len(lengths)
    assert harness.payloads(301, 303) == payloads[300:302]
    assert len(lengths) == before, "the frame is in the cache"
    assert not harness.segments()[0].is_hot
    harness.close()


def test_reading_most_of_a_remote_segment_hydrates_it_if_there_is_space(harness: StreamHarness) -> None:
    harness.fill(1)
    harness.stream.upload()
    harness.stream.evict(warm=True)
    assert len(harness.payloads()) == 20
    assert harness.segments()[0].is_hot


def test_seek_returns_the_first_record_at_or_after_a_time(harness: StreamHarness) -> None:
    moments = []
    for number in range(6):
        moments.append(harness.clock.now_ms())
        harness.stream.append([record(number * 2 + 1), record(number * 2 + 2)]).result()
        if number % 2:
            harness.stream.seal()
        harness.clock.advance(10)
    harness.stream.upload(1)
    harness.stream.evict(1, warm=True)
    for number, moment in enumerate(moments):
        assert harness.stream.seek(moment) == number * 2 + 1
        assert harness.stream.seek(moment + 1) == number * 2 + 3
    assert harness.stream.seek(0) == 1
    assert harness.stream.seek(2**62) == 13


# ── tails ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_tail_returns_records_as_they_become_durable(harness: StreamHarness) -> None:
    harness.fill(1, records=3)
    ids_seen: list[int] = []

    def follow() -> None:
        for entry in harness.stream.tail(2, timeout=20):
            ids_seen.append(entry.id)
            if entry.id == 8:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(4, 9):
        harness.stream.append(record(number)).result()
        if number == 6:
            harness.stream.seal()
    thread.join(60)
    assert ids_seen == [2, 3, 4, 5, 6, 7, 8]


def test_a_tail_starts_at_the_end_and_stops_after_its_timeout(harness: StreamHarness) -> None:
    harness.fill(1)
    assert list(harness.stream.tail(timeout=0.01)) == []
    harness.stream.append(b"not durable")
    assert list(harness.stream.tail(timeout=0.01)) == []
    harness.stream.sync()
    assert ids(harness.stream.tail(21, timeout=0.01)) == [21]


def test_a_tail_that_waited_reads_no_file(harness: StreamHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that have just become durable are still in memory; older ones, and those appended as a column, are read."""
    stream = harness.stream
    stream.append([b"one", b"two"]).result()
    stream.append([b"three", b"", b"five"]).result()
    expected = [(record.id, record.timestamp_ms, record.payload) for record in stream.read()]
    reads: list[tuple[int, int]] = []
    read = stream._reader.read

    def recording_read(start: int, stop: int) -> Iterator[Any]:
        reads.append((start, stop))
        return read(start, stop)

    monkeypatch.setattr(stream._reader, "read", recording_read)
    assert list(stream.tail(3, timeout=0.01)) == expected[2:]
    assert list(stream.tail(5, timeout=0.01)) == expected[4:]
    assert reads == []
    assert list(stream.tail(1, timeout=0.01)) == expected
    assert reads == [(1, 6)]
    stream.append(pa.array([b"six"])).result()
    assert ids(stream.tail(6, timeout=0.01)) == [6]
    stream.append([bytes(8_000)] * 40).result()
    assert ids(stream.tail(7, timeout=0.01)) == list(range(7, 47))
    assert reads == [(1, 6), (6, 7), (7, 47)], "large groups are not kept in memory"
    assert stream.hot.last_synced.first == 3


def test_a_tail_in_an_event_loop(harness: StreamHarness) -> None:
    async def follow() -> list[int]:
        ids_seen: list[int] = []
        async with aclosing(iterate(harness.stream.tail(1))) as records:
            await harness.stream.append([b"a", b"b"])
            async for record in records:
                ids_seen.append(record.id)
                if record.id == 2:
                    return ids_seen
        return ids_seen

    assert asyncio.run(follow()) == [1, 2]


def test_a_tail_of_a_stream_that_is_closed_raises(harness: StreamHarness) -> None:
    caught: list[type[BaseException]] = []

    def follow() -> None:
        try:
            list(harness.stream.tail())
        except StoreClosed as error:
            caught.append(type(error))

    thread = threading.Thread(target=follow)
    thread.start()
    while not harness.stream.hot.waiters:
        time.sleep(0.001)
    harness.stream.close()
    thread.join(60)
    assert caught == [StoreClosed]
    harness.stream = harness.open()


# ── readers and movers ────────────────────────────────────────────────────────────────────────────────────────────────
def test_readers_see_the_same_records_while_segments_move(tmp_path: Path) -> None:
    harness = StreamHarness(tmp_path, settings=msgspec.structs.replace(SMALL, cache_bytes=0))
    payloads = harness.fill(4, records=15, size=900)
    stop = threading.Event()
    failures: list[object] = []

    def read() -> None:
        while not stop.is_set():
            try:
                payloads_read = harness.payloads(1, 61)
            except Exception as error:
                failures.append(error)
                return
            if payloads_read != payloads:
                failures.append(payloads_read)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        harness.stream.upload()
        for round_ in range(5):
            harness.stream.evict(warm=round_ % 3 == 0)
            harness.stream.append([record(number, 900) for number in range(12)]).result()  # reuses evicted files
            harness.stream.seal()
            harness.stream.hydrate(*range(1, 5))
            harness.stream.compress()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert harness.stream.hot.spares.recycled
    harness.check()
    harness.close()


def damage(path: str | Path) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[200] ^= 0xFF
    Path(path).write_bytes(raw)


def test_a_damaged_copy_is_skipped_if_there_is_another(
    harness: StreamHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    payloads = harness.fill(1)
    harness.stream.compress()
    path = Path(harness.files.segment(Tier.HOT, 1))
    original = path.read_bytes()
    damage(path)
    assert harness.payloads() == payloads
    assert "stream.copy_damaged" in capsys.readouterr().err
    assert [problem.rule for problem in problems(harness.stream)] == ["T1"]
    path.write_bytes(original)


@pytest.mark.parametrize("tier", [Tier.HOT, Tier.WARM])
def test_a_damaged_or_missing_last_copy_is_an_error_that_names_it(harness: StreamHarness, tier: Tier) -> None:
    harness.fill(1)
    if tier is Tier.WARM:
        harness.stream.compress()
        harness.stream.evict()
    path = Path(harness.files.segment(tier, 1))
    original = path.read_bytes()
    for missing in (False, True):
        path.unlink() if missing else damage(path)
        with pytest.raises(Corruption) as caught:
            harness.payloads()
        assert str(path) in str(caught.value)
        assert [problem.rule for problem in problems(harness.stream)] == ["T1" if tier is Tier.HOT else "T2"]
        path.write_bytes(original)


def test_an_altered_a_short_and_a_missing_object_are_errors(tmp_path: Path) -> None:
    harness = StreamHarness(tmp_path, settings=msgspec.structs.replace(SMALL, cache_bytes=0, hot_bytes=0))
    harness.fill(1)
    harness.stream.upload()
    harness.stream.evict(warm=True)
    path = tmp_path / "objects" / harness.segments()[0].key
    original = path.read_bytes()
    for damage_object, error in [
        (lambda: damage(path), Corruption),
        (lambda: path.write_bytes(original[:-10]), Corruption),
        (path.unlink, ObjectNotFound),
    ]:
        damage_object()
        with pytest.raises(error):
            harness.payloads()
        assert [problem.rule for problem in problems(harness.stream)] == ["T3"]
        path.write_bytes(original)
    assert len(harness.payloads()) == 20
    harness.close()


def test_a_read_from_an_unavailable_object_store_is_retried(harness: StreamHarness) -> None:
    payloads = harness.fill(1)
    harness.stream.upload()
    harness.stream.evict(warm=True)
    original = harness.objects.get_range
    failures = [1]

    def fail_once(key: str, offset: int, length: int) -> Any:
        if failures:
            failures.pop()
            raise ObjectStoreUnavailable("busy")
        return original(key, offset, length)

    vars(harness.objects)["get_range"] = fail_once
    assert harness.payloads(1, 5) == payloads[:4]
    assert not failures
