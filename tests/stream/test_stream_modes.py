"""The modes of the manifest log (off, shadow, on), switched while the stream is open and between two opens."""

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
from quire.manifest import tables as t
from quire.objects.api import list_objects
from quire.stream.mlog_modes import Divergence, Mode, compare
from quire.stream.mlog_records import CompressionDone, CompressionStarted, UploadDone, UploadStarted
from quire.stream.mlog_recovery import recover
from quire.stream.segment_events import facts_of_index
from quire.stream.state import Retention
from quire.testing.faults import PowerCut
from tests.stream.logs import append_all, same_state
from tests.stream.streams import StreamHarness

MODES = ["off", "shadow", "on"]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.check()
    harness.close()


def work(harness: StreamHarness) -> None:
    """Append, upload, evict, and leave a segment open."""
    harness.fill(3)
    last = harness.segments()[-1].segment_id
    harness.stream.upload(last - 1, last)
    harness.stream.evict(last)
    harness.stream.evict(last, warm=True)
    harness.stream.append(b"open").result()


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_stream_is_the_same_whatever_mode_it_is_opened_in(
    harness: StreamHarness, first: str, second: str, crash: bool
) -> None:
    harness.reopen(first)
    work(harness)
    expected = harness.payloads()
    (harness.crash if crash else harness.reopen)(second)
    assert harness.payloads() == expected
    work(harness)
    expected = harness.payloads()
    (harness.crash if crash else harness.reopen)("on")
    assert harness.payloads() == expected
    assert harness.stream.append(b"more").record == len(expected) + 1


@pytest.mark.parametrize("path", [["off", "on"], ["shadow", "on"], ["off", "shadow", "on"], ["shadow", "off", "on"]])
def test_the_mode_can_be_switched_while_the_stream_is_open(harness: StreamHarness, path: list[str]) -> None:
    work(harness)
    for mode in path:
        with capture_logs() as events:
            harness.stream.switch(mode)
        assert [event["mode"] for event in events if event["event"] == "stream.mlog.mode"] == [mode]
        structlog.reset_defaults()
        work(harness)
        harness.stream.retain(Retention(bytes=2_000))
        harness.stream.retire()
        expected = harness.payloads()
    log = harness.stream.ledger.log
    assert same_state(recover(log.files, harness.clock, None).index, log.index)
    harness.crash()
    assert harness.payloads() == expected


@pytest.mark.parametrize("first", ["shadow", "on"])
def test_a_segment_that_was_open_when_the_log_was_switched_off_is_the_same_afterwards(
    harness: StreamHarness, first: str
) -> None:
    """After a crash only the log knows the epoch of the open segment, and the log is not read while it is off."""
    harness.reopen(first)
    harness.stream.append(b"open").result()
    harness.stream.switch("off")
    harness.crash("off")
    harness.stream.switch("on")
    assert harness.stream.compare() == []


@pytest.mark.parametrize("second", MODES)
def test_a_crash_between_the_seal_in_the_shadow_log_and_the_one_in_lmdb_is_recovered(
    harness: StreamHarness, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """A crash between the two writes: the log has sealed a segment that is open according to LMDB and its file."""
    harness.reopen("shadow")
    work(harness)
    expected = harness.payloads()

    def dies(*_: object) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(harness.stream.ledger.projection, "fold", dies)
        with pytest.raises(PowerCut):
            harness.stream.seal()
    harness.crash(second)
    assert harness.payloads() == expected
    harness.crash("on")
    assert harness.payloads() == expected
    assert harness.stream.compare() == []


def test_shadow_writes_the_log_and_compares(harness: StreamHarness) -> None:
    harness.reopen("shadow")
    work(harness)
    assert harness.stream.compare() == []
    assert harness.stream.figures().manifest_shadow_divergence == 0
    assert harness.stream.ledger.log.index.records > 10
    # Records that bypass the stream make the log and LMDB diverge. Nothing stops.
    append_all(harness.stream.ledger.log, [(CompressionStarted(1), 1), (CompressionDone(1, 0), 1)])
    assert [divergence.segment_id for divergence in harness.stream.compare()] == [1]
    assert harness.stream.figures().manifest_shadow_divergence == 1
    harness.stream.compress(1)
    assert harness.stream.ledger.shadow_refused == 2


def test_maintenance_compares_a_shadow_and_reports_each_divergence_once(
    harness: StreamHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    """No caller requests a comparison here: alerts depend on the gauge."""
    harness.reopen("shadow")
    work(harness)
    stream = harness.stream
    assert stream.compare() == []
    append_all(stream.ledger.log, [(UploadStarted("elsewhere"), 1), (UploadDone("elsewhere", "e"), 1)])
    for _ in range(3):
        stream.tick()
        assert stream.figures().manifest_shadow_divergence == 1
    divergences = [line for line in capsys.readouterr().err.splitlines() if "stream.mlog.divergence" in line]
    assert len(divergences) == 1
    assert "segment_id=1" in divergences[0]
    stream.switch("off")
    assert stream.figures().manifest_shadow_divergence == 0, "nothing is compared while the log is off"


def test_an_idle_shadow_is_compared_once_per_minute(harness: StreamHarness) -> None:
    harness.reopen("shadow")
    work(harness)
    for _ in range(3):  # until maintenance, including that of the log, has nothing left to do
        harness.clock.advance(10)
        harness.stream.tick()
    compared_at: list[float] = []
    ledger = harness.stream.ledger
    original = ledger.compare

    def recording_compare() -> list[Divergence]:
        compared_at.append(harness.clock.monotonic())
        return original()

    vars(ledger)["compare"] = recording_compare
    for _ in range(6):
        harness.clock.advance(10)
        harness.stream.tick()
    assert len(compared_at) == 1, "once per minute"
    harness.fill(1)
    harness.stream.tick()
    assert len(compared_at) == 2


def test_off_writes_no_log(harness: StreamHarness) -> None:
    harness.reopen("off")
    before = harness.stream.ledger.log.index.records
    work(harness)
    harness.stream.tick()
    assert harness.stream.ledger.log.index.records == before


@pytest.mark.parametrize("again", MODES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("crash", [False, True])
def test_timestamps_never_decrease_in_any_mode(harness: StreamHarness, mode: str, again: str, crash: bool) -> None:
    """The clock moves back while the stream is closed. Without a log, only LMDB has the newest timestamp."""
    harness.reopen(mode)
    for _ in range(3):
        harness.fill(1)
        harness.stream.append(b"open").result()
        (harness.crash if crash else harness.reopen)(again)
        harness.clock.jump(-3_600)
        (harness.crash if crash else harness.reopen)(mode)
    harness.stream.append(b"last").result()
    records = list(harness.stream.read())
    stamps = [record.timestamp_ms for record in records]
    assert stamps == sorted(stamps)
    assert harness.stream.seek(stamps[-1]) == next(record.id for record in records if record.timestamp_ms == stamps[-1])


def test_timestamps_never_decrease_if_the_clock_moves_back_before_a_segment_is_sealed(harness: StreamHarness) -> None:
    """Hazard: LMDB had the manifest's time of the seal, before that of the segment's records."""
    harness.clock.jump(3_600)
    harness.stream.append(b"one").result()
    harness.clock.jump(-3_600)
    harness.crash("on")  # seals the segment
    switched(harness, "off")
    harness.stream.append(b"two").result()
    harness.crash("off")
    harness.stream.append(b"three").result()
    stamps = [record.timestamp_ms for record in harness.stream.read()]
    assert stamps == sorted(stamps)
    assert harness.stream.seek(stamps[0]) == 1
    with harness.manifest.read() as txn:
        rows = [row.sealed_at_ms for _, row in txn.scan(t.WAL_CATALOG)]
    assert min(rows) >= stamps[0], "readers in other processes search by these"


def switched(harness: StreamHarness, mode: str) -> None:
    harness.stream.switch(mode)


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("change", [switched, StreamHarness.reopen, StreamHarness.crash])
@pytest.mark.parametrize("second", MODES)
@pytest.mark.parametrize("first", MODES)
def test_a_segment_that_retention_began_to_delete_does_not_reappear(
    harness: StreamHarness, first: str, second: str, change: Callable[[StreamHarness, str], object], evicted: bool
) -> None:
    """The object cannot be deleted for now. The log, which may be off, records that the segment is being retired; LMDB
    does not.
    """
    harness.reopen(first)
    payloads = harness.fill(2)
    harness.stream.upload(1)
    if evicted:
        harness.stream.evict(1, warm=True)
    key = harness.segments()[0].key
    harness.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        harness.stream.tiers.retire(1)
    for mode in (second, first, second, "on"):
        change(harness, mode)
        assert harness.stream.first_record == 21
        assert harness.payloads() == payloads[20:]
        assert harness.stream.ledger.log.index.rejected == 0
    assert harness.segments()[0].key == key
    harness.objects.down = False
    harness.clock.advance(600)
    harness.stream.tick()
    assert [segment.segment_id for segment in harness.segments()] == [2]
    with pytest.raises(ObjectNotFound):
        harness.objects.head(key)


@pytest.mark.parametrize("point", ["stream.retire.queued", "stream.retire.deleted", "stream.retire.told"])
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_retirement_is_resumed(harness: StreamHarness, mode: str, point: str) -> None:
    harness.reopen(mode)
    payloads = harness.fill(2)
    harness.stream.upload(1)
    key = harness.segments()[0].key

    def die(_point: str) -> None:
        raise PowerCut

    with armed(point, die), pytest.raises(PowerCut):
        harness.stream.tiers.retire(1)
    for _ in range(2):
        harness.crash(mode)
        assert harness.payloads() == payloads[20:], "the segment does not reappear"
    harness.clock.advance(600)
    harness.stream.tick()
    assert [segment.segment_id for segment in harness.segments()] == [2]
    with pytest.raises(ObjectNotFound):
        harness.objects.head(key)
    harness.crash("on")
    assert harness.payloads() == payloads[20:]


def test_a_slice_of_an_object_uploaded_while_the_log_was_off_is_read_without_hydration(harness: StreamHarness) -> None:
    """The log knows the object but not its size: reading two records must not hydrate the whole segment."""
    harness.reopen("off")
    payloads = harness.fill(1)
    harness.stream.upload()
    harness.stream.evict(warm=True)
    harness.stream.switch("on")
    for again in (False, True):
        if again:
            harness.reopen("on")
        assert harness.payloads(3, 5) == payloads[2:4]
        assert not harness.segments()[0].is_hot
    assert harness.payloads() == payloads


def test_the_size_of_objects_uploaded_while_the_log_was_off_is_known(harness: StreamHarness) -> None:
    """When the log catches up, it gets a CompressionDone even if the file is evicted: no other record contains the
    object's size.
    """
    harness.reopen("off")
    harness.fill(3)
    harness.stream.upload(1, 2)
    harness.stream.evict(1, warm=True)
    harness.stream.evict(2)
    sizes_by_key = {info.key: info.size_bytes for info in list_objects(harness.objects)}
    sizes = [sizes_by_key[segment.key] for segment in harness.segments()[:2]]
    assert harness.stream.info().remote_bytes == sum(sizes) > 0
    before = harness.segments()
    harness.stream.switch("on")
    assert harness.stream.info().remote_bytes == sum(sizes)
    assert [segment.state for segment in harness.segments()] == [segment.state for segment in before]
    assert [segment.dictionary_id for segment in harness.segments()] == [segment.dictionary_id for segment in before]
    harness.crash()
    assert [segment.warm_bytes for segment in harness.segments()[:2]] == sizes
    assert harness.stream.info().remote_bytes == sum(sizes)


@pytest.mark.parametrize("crash", [False, True])
def test_the_size_of_objects_is_listed_after_an_open_without_the_log(harness: StreamHarness, crash: bool) -> None:
    """LMDB does not store it: the size comes from the first listing of the object store."""
    harness.reopen("off")
    harness.fill(2)
    harness.stream.upload()
    expected = harness.stream.info().remote_bytes
    harness.stream.evict(1, warm=True)
    (harness.crash if crash else harness.reopen)("on")
    harness.stream.tick()
    assert harness.stream.info().remote_bytes == expected > 0


def test_a_comparison_reports_what_only_one_side_has(harness: StreamHarness) -> None:
    harness.fill(2)
    index, facts = harness.stream.ledger.index, facts_of_index(harness.stream.ledger.index)
    assert compare(index, facts) == []
    only_log = compare(index, {1: facts[1]})
    assert [(divergence.segment_id, divergence.log, divergence.projection) for divergence in only_log] == [
        (2, facts[2], None)
    ]
    only_projection = compare(index, {**facts, 9: facts[2]})
    assert [(divergence.segment_id, divergence.log, divergence.projection) for divergence in only_projection] == [
        (9, None, facts[2])
    ]
    others: list[tuple[str, Any]] = [
        ("etag", "other"),
        ("key", "k"),
        ("hot", False),
        ("warm_bytes", 5),
        ("durable_bytes", 1),
    ]
    for field, value in others:
        divergences = compare(index, {**facts, 1: dataclasses.replace(facts[1], **{field: value})})
        assert [divergence.segment_id for divergence in divergences] == [1], field


def damage_the_log(harness: StreamHarness) -> None:
    for path in Path(harness.stream_root).glob("streams/*/manifest/*.mlog"):
        path.write_bytes(b"?" * path.stat().st_size)
    for path in Path(harness.stream_root).glob("streams/*/manifest/*.bin"):
        path.write_bytes(b"?")


def log_bytes(harness: StreamHarness) -> dict[Path, bytes]:
    files = Path(harness.stream_root).glob("streams/*/manifest/*")
    return {path: path.read_bytes() for path in files if path.suffix != ".lock"}


@pytest.mark.parametrize("crash", [False, True])
def test_a_log_that_is_off_is_not_read(harness: StreamHarness, crash: bool) -> None:
    """A log that was off was opened, replayed and swept anyway, and damage in it prevented the stream from opening."""
    work(harness)
    harness.reopen("off")
    work(harness)
    expected = harness.payloads()
    again = harness.crash if crash else harness.reopen
    harness.stream.close()
    damage_the_log(harness)
    before = log_bytes(harness)
    harness.stream = harness.open("off")
    again("off")
    assert harness.payloads() == expected
    work(harness)
    harness.stream.tick()
    assert log_bytes(harness) == before
    with pytest.raises(ManifestIntegrityError):
        harness.stream.switch("on")
    assert harness.stream.mode is Mode.OFF
    harness.stream.append(b"and it goes on").result()


def test_segment_ids_are_not_reused_while_the_log_is_off(harness: StreamHarness) -> None:
    harness.fill(1)
    harness.stream.append(b"x").result()
    opened_max = harness.stream.ledger.log.index.opened_max
    harness.crash("off")
    harness.crash("off")
    harness.fill(1)
    assert harness.segments()[-1].segment_id > opened_max
    harness.stream.switch("on")
    assert harness.stream.compare() == []


def fails_at_opening(harness: StreamHarness) -> None:
    harness.stream.close()
    damage_the_log(harness)
    harness.stream = harness.open("shadow")


def fails_at_commit(harness: StreamHarness) -> None:
    def broken() -> None:
        raise DiskFull("no room", hint="free some", path="x")

    vars(harness.stream.ledger.log)["commit"] = broken


def fails_at_append(harness: StreamHarness) -> None:
    def broken(*_: object, **__: object) -> None:
        raise StoreUnusable("the log is broken", hint="open it again")

    vars(harness.stream.ledger.log)["append"] = broken
    vars(harness.stream.ledger.log)["reserve"] = broken
    vars(harness.stream.ledger.log)["tick"] = broken


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("fail", [fails_at_opening, fails_at_commit, fails_at_append])
def test_a_failing_shadow_never_stops_the_stream(
    harness: StreamHarness, fail: Callable[[StreamHarness], None], crash: bool
) -> None:
    """Only an illegal transition was ignored: a full disk, a failed sync or damage in a shadow log stopped the stream."""
    harness.reopen("shadow")
    work(harness)
    fail(harness)
    work(harness)
    harness.stream.tick()
    assert harness.stream.figures().manifest_shadow_divergence > 0, "the gauge shows it"
    expected = harness.payloads()
    if fail is fails_at_opening:
        objects = (path for kind in ("*.mlog", "snapshot_*") for path in (harness.root / "objects").rglob(kind))
        for path in (*Path(harness.stream_root).glob("streams/*/manifest/*"), *objects):
            path.unlink()  # the operator deletes the log
    (harness.crash if crash else harness.reopen)("shadow")
    assert harness.payloads() == expected
    assert harness.stream.compare() == [], "the log caught up at the next open"
    harness.reopen("on")
    assert harness.payloads() == expected


def test_a_failed_shadow_is_retried(harness: StreamHarness) -> None:
    harness.reopen("shadow")
    work(harness)
    fails_at_commit(harness)
    work(harness)
    harness.stream.tick()
    harness.clock.advance(61)
    harness.stream.tick()
    assert harness.stream.figures().manifest_shadow_divergence == 0
    work(harness)
    assert harness.stream.compare() == []


@pytest.mark.parametrize("is_down", [True, False])
@pytest.mark.parametrize("is_killed_before", [True, False], ids=["killed, switched on", "switched on"])
def test_an_upload_that_failed_while_the_log_was_off_is_in_the_log_afterwards(
    tmp_path: Path, is_killed_before: bool, is_down: bool
) -> None:
    """Hazard: LMDB had the key of the upload, the log had no record of it. The next opening after a kill was refused: the log
    was said to be behind, or the object store had to be available."""
    harness = StreamHarness(tmp_path)
    payloads = harness.fill(2)
    harness.reopen("off")
    harness.objects.down = True
    harness.stream.tick()
    if is_killed_before:
        harness.crash("on")
    else:
        harness.stream.switch("on")
    harness.objects.down = is_down
    for _ in range(2):
        harness.crash("on")
        assert harness.stream.compare() == []
    harness.objects.down = False
    assert [record.payload for record in harness.stream.read()] == payloads
    harness.clock.advance(100.0)
    harness.stream.tick()
    assert all(segment.is_remote for segment in harness.stream.ledger.view.sealed)
    harness.check()
    harness.close()
