"""How much the manifest log is believed, switched while the stream is open and between two openings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from quire.core.errors import DiskFull, ManifestIntegrityError, ObjectNotFound, ObjectStoreUnavailable, StoreUnusable
from quire.durable.failpoints import armed
from quire.objects.api import list_objects
from quire.stream.mlog_modes import Divergence, Mode, compare
from quire.stream.mlog_records import CompressionDone, CompressionStarted, UploadDone, UploadStarted
from quire.stream.mlog_recovery import recover
from quire.stream.segment_events import facts_of_index
from quire.stream.state import Retention
from quire.testing.faults import PowerCut
from tests.stream.logs import same_state
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
    work(world)
    for mode in path:
        with capture_logs() as events:
            world.stream.switch(mode)
        assert [event["mode"] for event in events if event["event"] == "stream.mlog.mode"] == [mode]
        structlog.reset_defaults()
        work(world)
        world.stream.retain(Retention(bytes=2_000))
        world.stream.retire()
        expected = world.payloads()
    log = world.stream.ledger.log
    assert same_state(recover(log.files, world.clock, None).index, log.index)
    world.crash()
    assert world.payloads() == expected


@pytest.mark.parametrize("first", ["shadow", "on"])
def test_a_segment_that_was_open_when_the_log_was_switched_off_is_the_same_afterwards(
    world: StreamWorld, first: str
) -> None:
    """After a death only the log knows who had opened it, and that is not looked at while it is off."""
    world.reopen(first)
    world.stream.append(b"open").result()
    world.stream.switch("off")
    world.crash("off")
    world.stream.switch("on")
    assert world.stream.compare() == []


@pytest.mark.parametrize("second", MODES)
def test_a_shadow_that_knows_of_a_seal_before_lmdb_does(
    world: StreamWorld, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """Death between the two: the log has sealed a segment that LMDB and its file show as open."""
    world.reopen("shadow")
    work(world)
    expected = world.payloads()

    def dies(*_: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(world.stream.ledger.projection, "fold", dies)
        with pytest.raises(PowerCut):
            world.stream.seal()
    world.crash(second)
    assert world.payloads() == expected
    world.crash("on")
    assert world.payloads() == expected
    assert world.stream.compare() == []


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


def test_a_shadow_is_watched_by_upkeep_and_each_divergence_is_told_once(
    world: StreamWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody asks for a comparison here: the figure is what alerts look at."""
    world.reopen("shadow")
    work(world)
    stream = world.stream
    assert stream.compare() == []
    stream.ledger.log.append_all([(UploadStarted("elsewhere"), 1), (UploadDone("elsewhere", "e"), 1)])
    for _ in range(3):
        stream.tick()
        assert stream.figures().manifest_shadow_divergence == 1
    told = [line for line in capsys.readouterr().err.splitlines() if "stream.mlog.divergence" in line]
    assert len(told) == 1
    assert "segment_id=1" in told[0]
    stream.switch("off")
    assert stream.figures().manifest_shadow_divergence == 0, "nothing is compared any more"


def test_a_shadow_that_says_nothing_is_compared_now_and_then(world: StreamWorld) -> None:
    world.reopen("shadow")
    work(world)
    for _ in range(3):  # until nothing is left to do, for the log's own upkeep too
        world.clock.advance(10)
        world.stream.tick()
    asked: list[float] = []
    ledger = world.stream.ledger
    inner = ledger.compare

    def compare_and_note() -> list[Divergence]:
        asked.append(world.clock.monotonic())
        return inner()

    vars(ledger)["compare"] = compare_and_note
    for _ in range(6):
        world.clock.advance(10)
        world.stream.tick()
    assert len(asked) == 1, "in a minute"
    world.fill(1)
    world.stream.tick()
    assert len(asked) == 2


def test_off_writes_no_log(world: StreamWorld) -> None:
    world.reopen("off")
    before = world.stream.ledger.log.index.records
    work(world)
    world.stream.tick()
    assert world.stream.ledger.log.index.records == before


@pytest.mark.parametrize("again", MODES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("crash", [False, True])
def test_timestamps_never_fall_in_any_mode(world: StreamWorld, mode: str, again: str, crash: bool) -> None:
    """The clock goes back while the stream is closed: without a log LMDB alone remembers how late it was."""
    world.reopen(mode)
    for _ in range(3):
        world.fill(1)
        world.stream.append(b"open").result()
        (world.crash if crash else world.reopen)(again)
        world.clock.jump(-3_600)
        (world.crash if crash else world.reopen)(mode)
    world.stream.append(b"last").result()
    found = list(world.stream.read())
    stamps = [each.timestamp_ms for each in found]
    assert stamps == sorted(stamps)
    assert world.stream.seek(stamps[-1]) == next(each.id for each in found if each.timestamp_ms == stamps[-1])


def switched(world: StreamWorld, mode: str) -> None:
    world.stream.switch(mode)


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("change", [switched, StreamWorld.reopen, StreamWorld.crash])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_what_retention_has_begun_to_take_does_not_come_back(
    world: StreamWorld, first: str, second: str, change: Callable[[StreamWorld, str], object], evicted: bool
) -> None:
    """Its object cannot be deleted for now. That it is going is in the log, which is not believed, and not in LMDB."""
    world.reopen(first)
    payloads = world.fill(2)
    world.stream.upload(1)
    if evicted:
        world.stream.evict(1, warm=True)
    key = world.segments()[0].key
    world.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        world.stream.tiers.retire(1)
    for mode in (second, first, second, "on"):
        change(world, mode)
        assert world.stream.first_record == 21
        assert world.payloads() == payloads[20:]
        assert world.stream.ledger.log.index.rejected == 0
    assert world.segments()[0].key == key
    world.objects.down = False
    world.clock.advance(600)
    world.stream.tick()
    assert [each.segment_id for each in world.segments()] == [2]
    with pytest.raises(ObjectNotFound):
        world.objects.head(key)


@pytest.mark.parametrize("point", ["stream.retire.queued", "stream.retire.deleted", "stream.retire.told"])
@pytest.mark.parametrize("mode", MODES)
def test_a_retirement_that_death_interrupted_goes_on(world: StreamWorld, mode: str, point: str) -> None:
    world.reopen(mode)
    payloads = world.fill(2)
    world.stream.upload(1)
    key = world.segments()[0].key

    def die(_point: str) -> None:
        raise PowerCut

    with armed(point, die), pytest.raises(PowerCut):
        world.stream.tiers.retire(1)
    for _ in range(2):
        world.crash(mode)
        assert world.payloads() == payloads[20:], "it is not seen again"
    world.clock.advance(600)
    world.stream.tick()
    assert [each.segment_id for each in world.segments()] == [2]
    with pytest.raises(ObjectNotFound):
        world.objects.head(key)
    world.crash("on")
    assert world.payloads() == payloads[20:]


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
    there = {each.key: each.size_bytes for each in list_objects(world.objects)}
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


def damage_the_log(world: StreamWorld) -> None:
    for path in Path(world.stream_root).glob("streams/*/manifest/*.mlog"):
        path.write_bytes(b"?" * path.stat().st_size)
    for path in Path(world.stream_root).glob("streams/*/manifest/*.bin"):
        path.write_bytes(b"?")


def log_bytes(world: StreamWorld) -> dict[Path, bytes]:
    files = Path(world.stream_root).glob("streams/*/manifest/*")
    return {path: path.read_bytes() for path in files if path.suffix != ".lock"}


@pytest.mark.parametrize("crash", [False, True])
def test_a_log_that_is_off_is_not_even_looked_at(world: StreamWorld, crash: bool) -> None:
    """It was opened, replayed and swept all the same, and damage in it kept the stream closed."""
    work(world)
    world.reopen("off")
    work(world)
    expected = world.payloads()
    again = world.crash if crash else world.reopen
    world.stream.close()
    damage_the_log(world)
    before = log_bytes(world)
    world.stream = world.open("off")
    again("off")
    assert world.payloads() == expected
    work(world)
    world.stream.tick()
    assert log_bytes(world) == before
    with pytest.raises(ManifestIntegrityError):
        world.stream.switch("on")
    assert world.stream.mode is Mode.OFF
    world.stream.append(b"and it goes on").result()


def test_ids_of_segments_are_not_given_out_again_while_the_log_is_off(world: StreamWorld) -> None:
    world.fill(1)
    world.stream.append(b"x").result()
    opened = world.stream.ledger.log.index.opened_max
    world.crash("off")
    world.crash("off")
    world.fill(1)
    assert world.segments()[-1].segment_id > opened
    world.stream.switch("on")
    assert world.stream.compare() == []


def fails_at_opening(world: StreamWorld) -> None:
    world.stream.close()
    damage_the_log(world)
    world.stream = world.open("shadow")


def fails_at_commit(world: StreamWorld) -> None:
    def broken() -> None:
        raise DiskFull("no room", hint="free some", path="x")

    vars(world.stream.ledger.log)["commit"] = broken


def fails_at_append(world: StreamWorld) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StoreUnusable("the log is broken", hint="open it again")

    vars(world.stream.ledger.log)["append"] = broken
    vars(world.stream.ledger.log)["reserve"] = broken
    vars(world.stream.ledger.log)["tick"] = broken


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("fail", [fails_at_opening, fails_at_commit, fails_at_append])
def test_a_shadow_never_harms_the_stream(world: StreamWorld, fail: Callable[[StreamWorld], None], crash: bool) -> None:
    """Only a step that the log did not allow was passed over: a full disk, a failed sync or damage stopped the stream."""
    world.reopen("shadow")
    work(world)
    fail(world)
    work(world)
    world.stream.tick()
    assert world.stream.figures().manifest_shadow_divergence > 0, "the alert sees it"
    expected = world.payloads()
    if fail is fails_at_opening:
        objects = (path for kind in ("*.mlog", "snapshot_*") for path in (world.root / "objects").rglob(kind))
        for path in (*Path(world.stream_root).glob("streams/*/manifest/*"), *objects):
            path.unlink()  # somebody begins anew
    (world.crash if crash else world.reopen)("shadow")
    assert world.payloads() == expected
    assert world.stream.compare() == [], "what it has missed was told at the next opening"
    world.reopen("on")
    assert world.payloads() == expected


def test_a_shadow_that_failed_is_tried_again_after_a_while(world: StreamWorld) -> None:
    world.reopen("shadow")
    work(world)
    fails_at_commit(world)
    work(world)
    world.stream.tick()
    world.clock.advance(61)
    world.stream.tick()
    assert world.stream.figures().manifest_shadow_divergence == 0
    work(world)
    assert world.stream.compare() == []
