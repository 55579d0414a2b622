"""How much the manifest log is believed, switched while the stream is open and between two openings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.objects.api import list_objects
from quire.stream.ledger import facts_of_index
from quire.stream.mlog_modes import compare
from quire.stream.mlog_records import CompressionDone, CompressionStarted
from quire.stream.mlog_recovery import recover
from quire.stream.mlog_snapshot import same_state
from quire.stream.state import Retention
from tests.stream.streams import StreamWorld

MODES = ["off", "shadow", "on"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.check()
    made.close()


def work(world: StreamWorld) -> None:
    """A bit of everything."""
    world.fill(3)
    last = world.segments()[-1].segment_id
    world.stream.upload(last - 1, last)
    world.stream.evict(last)
    world.stream.evict(last, warm=True)
    world.stream.append(b"open").result()


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_stream_is_the_same_whatever_mode_it_is_opened_in(
    world: StreamWorld, first: str, second: str, crash: bool
) -> None:
    world.reopen(first)
    work(world)
    expected = world.payloads()
    (world.crash if crash else world.reopen)(second)
    assert world.payloads() == expected
    work(world)
    expected = world.payloads()
    (world.crash if crash else world.reopen)("on")
    assert world.payloads() == expected
    assert world.stream.append(b"more").record == len(expected) + 1


@pytest.mark.parametrize("path", [["off", "on"], ["shadow", "on"], ["off", "shadow", "on"], ["shadow", "off", "on"]])
def test_switching_while_the_stream_is_open(world: StreamWorld, path: list[str]) -> None:
    heard: list[str] = []
    world.stream.ledger.gated.listen(lambda mode: heard.append(mode.value))
    work(world)
    for mode in path:
        world.stream.switch(mode)
        work(world)
        world.stream.retain(Retention(bytes=2_000))
        world.stream.retire()
        expected = world.payloads()
    assert heard == path
    log = world.stream.ledger.log
    assert same_state(recover(log.files, world.clock, None).index, log.index)
    world.crash()
    assert world.payloads() == expected


def test_shadow_writes_the_log_and_compares(world: StreamWorld) -> None:
    world.reopen("shadow")
    work(world)
    assert world.stream.compare() == []
    assert world.stream.figures().manifest_shadow_divergence == 0
    assert world.stream.ledger.log.index.records > 10
    # Somebody else writes into the log: the two differ now, and nothing stops.
    world.stream.ledger.log.append_all([(CompressionStarted(1), 1), (CompressionDone(1, 0), 1)])
    assert [each.segment_id for each in world.stream.compare()] == [1]
    assert world.stream.figures().manifest_shadow_divergence == 1
    world.stream.compress(1)
    assert world.stream.ledger.shadow_refused == 2


def test_off_writes_no_log(world: StreamWorld) -> None:
    world.reopen("off")
    before = world.stream.ledger.log.index.records
    work(world)
    world.stream.tick()
    assert world.stream.ledger.log.index.records == before


def test_a_slice_of_an_object_that_was_made_while_the_log_was_off(world: StreamWorld) -> None:
    """The log was told that there is an object, not how long it is: nothing is brought back to read two records of it."""
    world.reopen("off")
    payloads = world.fill(1)
    world.stream.upload()
    world.stream.evict(warm=True)
    world.stream.switch("on")
    for again in (False, True):
        if again:
            world.reopen("on")
        assert world.payloads(3, 5) == payloads[2:4]
        assert not world.segments()[0].is_hot
    assert world.payloads() == payloads


def test_the_size_of_objects_that_were_made_while_the_log_was_off(world: StreamWorld) -> None:
    """The log is told of a compression whose file is gone, because nothing else in it says how long an object is."""
    world.reopen("off")
    world.fill(3)
    world.stream.upload(1, 2)
    world.stream.evict(1, warm=True)
    world.stream.evict(2)
    there = {each.key: each.size_bytes for each in list_objects(world.objects, f"{world.stream_id:08x}/")}
    sizes = [there[each.key] for each in world.segments()[:2]]
    assert world.stream.info().remote_bytes == sum(sizes) > 0
    before = world.segments()
    world.stream.switch("on")
    assert world.stream.info().remote_bytes == sum(sizes)
    assert [each.state for each in world.segments()] == [each.state for each in before]
    assert [each.dictionary_id for each in world.segments()] == [each.dictionary_id for each in before]
    world.crash()
    assert [each.warm_bytes for each in world.segments()[:2]] == sizes
    assert world.stream.info().remote_bytes == sum(sizes)


@pytest.mark.parametrize("crash", [False, True])
def test_the_size_of_objects_after_an_opening_that_had_no_log(world: StreamWorld, crash: bool) -> None:
    """LMDB does not know it: what the listing of the first round says counts."""
    world.reopen("off")
    world.fill(2)
    world.stream.upload()
    expected = world.stream.info().remote_bytes
    world.stream.evict(1, warm=True)
    (world.crash if crash else world.reopen)("on")
    world.stream.tick()
    assert world.stream.info().remote_bytes == expected > 0


def test_a_comparison_sees_what_either_side_alone_knows(world: StreamWorld) -> None:
    world.fill(2)
    index, known = world.stream.ledger.index, facts_of_index(world.stream.ledger.index)
    assert compare(index, known) == []
    only_log = compare(index, {1: known[1]})
    assert [(each.segment_id, each.log, each.projection) for each in only_log] == [(2, known[2], None)]
    only_projection = compare(index, {**known, 9: known[2]})
    assert [(each.segment_id, each.log, each.projection) for each in only_projection] == [(9, None, known[2])]
    others: list[tuple[str, Any]] = [
        ("etag", "other"),
        ("key", "k"),
        ("hot", False),
        ("warm_bytes", 5),
        ("durable_bytes", 1),
    ]
    for field, value in others:
        changed = compare(index, {**known, 1: dataclasses.replace(known[1], **{field: value})})
        assert [each.segment_id for each in changed] == [1], field
