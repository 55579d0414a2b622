"""Moves between tiers: what is logged, what a failing object store leads to, what is gone on with after a crash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.core.errors import Corruption, IllegalTransition, InvalidInput, ObjectNotFound, ObjectStoreUnavailable
from quire.durable.failpoints import armed
from quire.durable.names import Tier
from quire.manifest.records import Residency, WalFormat, WalState
from quire.stream import tiers
from quire.stream.mlog_reader import ManifestLogReader
from quire.stream.mlog_states import Hydration, Remote, Warm
from quire.stream.mlog_verify import inspect
from quire.stream.segment import sealed_blocks
from quire.stream.warm import FOOTER_BYTES, compress
from tests.stream.streams import SMALL, StreamWorld


class Died(BaseException):
    """Stands for SIGKILL in this process."""


def die(_point: str) -> None:
    raise Died


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.objects.down = False
    made.check()
    made.close()


def told(world: StreamWorld) -> list[str]:
    """The kinds of records in the log."""
    chunks = ManifestLogReader(world.stream.ledger.log.files).chunks()
    return [type(view.value()).__name__ for chunk in chunks for view in chunk.records()]


def test_every_move_is_a_record(world: StreamWorld) -> None:
    world.fill(1)
    stream = world.stream
    stream.upload()
    stream.evict(warm=True)
    stream.hydrate()
    stream.tiers.retire(1)
    stream.ledger.log.commit()
    assert told(world) == [
        "SegmentOpened",
        "SealSegment",
        "CompressionStarted",
        "CompressionDone",
        "UploadStarted",
        "UploadDone",
        "LocalEvicted",
        "CustomEvent",
        "HydrationStarted",
        "HydrationDone",
        "Tier2DeleteQueued",
        "Tier2Deleted",
        "CustomEvent",
    ]
    assert (world.on_disk(Tier.HOT), world.on_disk(Tier.WARM)) == ([], [])
    assert not list(world.objects.list_pages(named(world, "00000001")))


def test_lmdb_follows(world: StreamWorld) -> None:
    world.fill(1)
    stream = world.stream
    stream.ledger.project_now()
    row = stream.ledger.projection.rows()[1]
    assert (row.state, row.format, row.residency) == (WalState.SEALED, WalFormat.APPEND_ONLY, Residency.LOCAL)
    assert (row.first_lsn, row.last_lsn) == (1, 20)
    stream.upload()
    assert stream.ledger.projection.rows()[1].residency is Residency.LOCAL_AND_REMOTE
    stream.evict(warm=True)
    assert stream.ledger.projection.rows()[1].residency is Residency.EVICTED
    stream.tiers.retire(1)
    assert stream.ledger.projection.rows() == {}


def test_lmdb_that_missed_something_is_folded_again_at_opening(world: StreamWorld) -> None:
    world.fill(2)
    assert world.stream.ledger.projection.rows() == {}
    world.crash()
    assert sorted(world.stream.ledger.projection.rows()) == [1, 2]


def test_moves_are_idempotent(world: StreamWorld) -> None:
    world.fill(2)
    stream = world.stream
    assert (stream.compress(), stream.compress()) == (2, 0)
    assert (stream.upload(), stream.upload()) == (2, 0)
    assert (stream.evict(), stream.evict()) == (2, 0)
    assert (stream.hydrate(), stream.hydrate()) == (2, 0)


def test_the_last_copy_is_never_given_up(world: StreamWorld) -> None:
    world.fill(1)
    assert world.stream.evict() == 0
    with pytest.raises(IllegalTransition):
        world.stream.tiers.evict(1)
    world.stream.compress()
    world.stream.evict()
    with pytest.raises(IllegalTransition):
        world.stream.tiers.evict(1, warm=True)


def test_what_cannot_move(world: StreamWorld) -> None:
    world.stream.append(b"a").result()
    with pytest.raises(InvalidInput, match="sealed"):
        world.stream.tiers.compress(1)
    with pytest.raises(InvalidInput, match="no such segment"):
        world.stream.tiers.compress(7)


def test_budgets_evict_what_was_longest_unused(world: StreamWorld) -> None:
    world.fill(6, records=15, size=900)
    world.clock.advance(1)
    world.payloads(1, 2)
    with world.stream.pin(2):
        world.stream.tick()
        hot = [each.segment_id for each in world.segments() if each.is_hot]
        assert hot == [1, 2, 5, 6], "1 was used a moment ago, 2 is pinned; of the others the newest two fit"
        assert sum(each.durable_bytes for each in world.segments() if each.is_hot) <= SMALL.hot_bytes
    assert sum(each.warm_bytes for each in world.segments() if each.is_warm) <= SMALL.warm_bytes
    assert all(each.is_remote for each in world.segments())


def test_pinned_segments_stay(world: StreamWorld) -> None:
    world.fill(2)
    world.stream.upload()
    with world.stream.pin(1):
        assert world.stream.evict(warm=True) == 2
        assert not world.stream.tiers.retire(1)
        one, two = world.segments()
        assert (one.is_hot, one.is_warm, two.is_hot, two.is_warm) == (True, True, False, False)
    assert world.stream.evict(warm=True) == 2


def test_what_cannot_be_read_back_is_not_announced(world: StreamWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressor that loses something: sound in itself, and not the segment."""
    world.fill(2)
    first = Path(world.files.segment(Tier.HOT, 1)).read_bytes()
    whole = sealed_blocks(first, world.segments()[0].durable_bytes)

    def wrong(*_: Any, **__: Any) -> Iterator[bytes]:
        return compress(first[: whole.cut], whole)

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "compress", wrong)
        with pytest.raises(Corruption, match="does not decompress"):
            world.stream.tiers.compress(2)
    assert (world.on_disk(Tier.WARM), world.segments()[1].state.warm) == ([], Warm.FAILED)
    assert world.stream.compress() == 2


# ── an object store that fails ────────────────────────────────────────────────────────────────────────────────────────
def test_an_upload_that_fails_is_noted_and_tried_again_later(world: StreamWorld) -> None:
    world.fill(1)
    world.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        world.stream.upload()
    assert world.segments()[0].state.remote is Remote.FAILED
    moved = world.stream.tick()
    assert moved.failed
    world.objects.down = False
    assert world.stream.tick().uploaded == 0, "too early"
    world.clock.advance(60)
    assert world.stream.tick().uploaded == 1
    world.stream.ledger.log.commit()
    names = told(world)
    assert names.count("UploadStarted") == 1
    assert names.count("UploadFailed") == 2
    assert names.count("UploadDone") == 1


def test_appending_goes_on_while_the_object_store_is_down(world: StreamWorld) -> None:
    world.objects.down = True
    for _ in range(5):
        world.fill(1)
        world.clock.advance(100)
        world.stream.tick()
    world.reopen()
    assert len(world.payloads()) == 100


def named(world: StreamWorld, suffix: str) -> str:
    """A name in the current owner epoch."""
    with world.manifest.read() as txn:
        return f"{txn.object_prefixes()[0]}/{suffix}"


def test_another_object_of_the_same_name_is_not_overwritten(world: StreamWorld) -> None:
    world.fill(1)
    key = named(world, "00000001/00000001/wal:00000000")
    world.objects.put(key, b"something else")
    with pytest.raises(Corruption, match="different object"):
        world.stream.upload()
    assert world.objects.get(key) == b"something else"
    assert world.stream.tick().uploaded == 0
    world.objects.delete(key)


@pytest.mark.parametrize("what", ["another footer", "another size"])
def test_an_upload_is_announced_only_when_the_object_is_what_was_sent(
    world: StreamWorld, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An object store that says yes and keeps something else."""
    world.fill(1)
    key = named(world, "00000001/00000001/wal:00000000")
    with monkeypatch.context() as patch:
        if what == "another footer":
            patch.setattr(world.objects, "get_range", lambda *_: bytes(FOOTER_BYTES), raising=False)
        else:
            put_file = world.objects.put_file

            def half(*args: Any, **kwargs: Any) -> Any:
                done = put_file(*args, **kwargs)
                return msgspec.structs.replace(done, size_bytes=done.size_bytes - 1)

            patch.setattr(world.objects, "put_file", half, raising=False)
        with pytest.raises(Corruption, match="differs from what was uploaded"):
            world.stream.upload()
    (segment,) = world.segments()
    assert (segment.is_remote, segment.state.remote) == (False, Remote.FAILED)
    assert "UploadDone" not in told(world)
    world.stream.tiers.evict(1)
    with pytest.raises(IllegalTransition):
        world.stream.tiers.evict(1, warm=True)  # nobody vouches for the object: this is the last copy
    assert world.stream.upload() == 1
    assert world.objects.head(key).size_bytes == world.segments()[0].warm_bytes


def test_a_hydration_that_fails_is_noted_and_tried_again(world: StreamWorld) -> None:
    world.fill(1)
    world.stream.upload()
    world.stream.evict(warm=True)
    world.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        world.stream.hydrate()
    assert world.segments()[0].state.hydration is Hydration.FAILED
    world.objects.down = False
    assert world.stream.tick().hydrated == 1
    assert world.segments()[0].is_hot


def test_a_sound_copy_of_another_segment_is_not_brought_back(world: StreamWorld) -> None:
    """Somebody has mixed up two objects: both decompress, and neither is where it belongs."""
    payloads = world.fill(2)
    world.stream.upload()
    world.stream.evict(warm=True)
    one, two = (each.key for each in world.segments())
    former = world.objects.get(one)
    world.objects.delete(one)
    world.objects.put(one, world.objects.get(two))
    with pytest.raises(Corruption, match="not the one that was sealed"):
        world.stream.tiers.hydrate(1)
    assert world.on_disk(Tier.HOT) == []
    assert world.segments()[0].state.hydration is Hydration.FAILED
    world.objects.delete(one)
    world.objects.put(one, former)
    assert world.stream.hydrate() == 2
    assert world.payloads() == payloads


# ── after a crash ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "point", ["stream.compress.started", "stream.compress.written", "stream.upload.started", "stream.upload.sent"]
)
def test_what_was_begun_is_gone_on_with_and_not_begun_again(world: StreamWorld, point: str) -> None:
    world.fill(1)
    with armed(point, die), pytest.raises(Died):
        world.stream.upload()
    world.crash()
    world.stream.tick()
    segment = world.segments()[0]
    assert (segment.is_warm, segment.is_remote) == (True, True)
    world.stream.ledger.log.commit()
    names = told(world)
    for kind in ("CompressionStarted", "CompressionDone", "UploadStarted", "UploadDone"):
        assert names.count(kind) == 1
    assert world.objects.puts == []  # put_file is what uploads: one object, under one name
    assert len([each for page in world.objects.list_pages(named(world, "00000001")) for each in page]) == 1


@pytest.mark.parametrize("state", [Remote.UPLOADING, Remote.FAILED])
def test_an_upload_that_was_begun_in_a_former_owner_epoch_gets_a_new_key(world: StreamWorld, state: Remote) -> None:
    """Below the former epoch's prefix somebody else may be writing: a copy of the store, say."""
    world.fill(1)
    if state is Remote.UPLOADING:
        with armed("stream.upload.started", die), pytest.raises(Died):
            world.stream.upload()
    else:
        world.objects.down = True
        with pytest.raises(ObjectStoreUnavailable):
            world.stream.upload()
        world.objects.down = False
    former = named(world, "")
    world.manifest.begin_owner_epoch()
    world.crash()
    assert world.segments()[0].state.remote is state
    payloads = world.payloads()
    world.stream.tick()
    segment = world.segments()[0]
    assert segment.is_remote
    assert segment.key.startswith(named(world, ""))
    assert not [info for page in world.objects.list_pages(former) for info in page if "wal:" in info.key]
    world.stream.evict()
    assert world.payloads() == payloads
    world.reopen()
    assert world.segments()[0].key == segment.key


@pytest.mark.parametrize("point", ["stream.retire.queued", "stream.retire.deleted", "stream.retire.told"])
def test_a_segment_that_was_going_is_gone_after_the_next_round(world: StreamWorld, point: str) -> None:
    world.fill(2)
    world.stream.upload()
    with armed(point, die), pytest.raises(Died):
        world.stream.tiers.retire(1)
    assert world.stream.first_record == 21
    world.crash()
    assert world.stream.first_record == 21
    world.stream.tick()
    assert [each.segment_id for each in world.segments()] == [2]
    assert 1 not in (*world.on_disk(Tier.HOT), *world.on_disk(Tier.WARM))


def test_files_that_nobody_announced_are_swept(world: StreamWorld) -> None:
    world.fill(2)
    world.stream.compress()
    with armed("stream.evict.told", die), pytest.raises(Died):
        world.stream.evict(1)
    assert 1 in world.on_disk(Tier.HOT)
    Path(world.files.segment(Tier.WARM, 77)).write_bytes(b"?")
    world.crash()
    assert (world.on_disk(Tier.HOT), world.on_disk(Tier.WARM)) == ([2], [1, 2])


def test_a_copy_that_somebody_removed_is_told_as_evicted(
    world: StreamWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    payloads = world.fill(2)
    world.stream.upload()
    world.stream.close()
    Path(world.files.segment(Tier.HOT, 1)).unlink()
    Path(world.files.segment(Tier.WARM, 2)).unlink()
    world.stream = world.open()
    assert "stream.copy_missing" in capsys.readouterr().err
    one, two = world.segments()
    assert (one.is_hot, one.state.warm, two.is_hot, two.state.warm) == (False, Warm.DONE, True, Warm.NONE)
    assert world.payloads() == payloads


# ── dictionaries ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_dictionary_is_used_where_it_pays_and_found_again(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, segment_bytes=8 << 20, hot_bytes=1 << 30, warm_bytes=1 << 30)
    world = StreamWorld(tmp_path, settings=settings)
    draw = random.Random(3)
    words = [draw.randbytes(120) for _ in range(200)]

    def fill() -> None:
        payloads = [b"".join(draw.choices(words, k=2)) + draw.randbytes(4) for _ in range(12_000)]
        for start in range(0, len(payloads), 400):
            world.stream.append(payloads[start : start + 400]).result()
        world.stream.seal()

    fill()
    world.stream.compress()
    first = world.segments()[-1]
    world.reopen()
    fill()
    world.stream.compress()
    second = world.segments()[-1]
    assert first.dictionary_id == second.dictionary_id == 1, "learned once, used twice"
    world.stream.evict()
    assert len(world.payloads()) == 24_000
    world.stream.append([draw.randbytes(250) for _ in range(8_000)]).result()
    world.stream.seal()
    world.stream.compress()
    assert world.segments()[-1].dictionary_id == 0, "noise has nothing in common"
    world.check()
    world.close()


# ── tier 2 after an opening ───────────────────────────────────────────────────────────────────────────────────────────
def test_what_tier_2_has_lost_is_sent_again_after_an_opening(world: StreamWorld) -> None:
    """The manifest-log document, start-up: list, compare, rebuild from what is here; else it needs repair, and that is told."""
    payloads = world.fill(4)
    stream = world.stream
    stream.upload()
    stream.evict(2, 3)
    stream.evict(1, warm=True)
    stream.tiers.evict(4, warm=True)
    one, two, _, four = (each.key for each in world.segments())
    log = stream.ledger.log
    assert log.objects is not None
    chunk = log.objects.chunk_key(0)
    before = world.objects.get(two)
    for key in (one, two, four, chunk):
        world.objects.delete(key)
    world.reopen()
    world.objects.down = True
    assert world.stream.tick().failed
    world.objects.down = False
    assert world.stream.info().needs_repair == [], "nothing is concluded from a store that does not answer"
    world.clock.advance(60)
    assert world.stream.tick().uploaded == 2, "from the compressed copy, and from the hot one"
    assert world.stream.info().needs_repair == [1]
    assert world.objects.get(two) == before
    assert world.objects.head(chunk).size_bytes > 0
    assert world.stream.tick().uploaded == 0
    world.stream.evict(warm=True)
    assert world.payloads(21) == payloads[20:]
    with pytest.raises(ObjectNotFound, match="missing"):
        world.payloads(1, 3)
    world.stream.tiers.retire(1)


def test_what_a_former_owner_epoch_uploaded_and_tier_2_lost_is_sent_again_and_overwrites_nothing(
    world: StreamWorld,
) -> None:
    """The log names the object below the former epoch's prefix: the same bytes go there, or nothing."""
    payloads = world.fill(1)
    world.stream.upload()
    (segment,) = [segment for segment in world.segments() if segment.is_remote]
    body = world.objects.get(segment.key)
    world.manifest.begin_owner_epoch()
    world.objects.delete(segment.key)
    world.reopen()
    assert not segment.key.startswith(named(world, ""))
    assert world.stream.tick().uploaded == 1
    assert world.objects.get(segment.key) == body
    assert world.segments()[0].key == segment.key
    world.objects.delete(segment.key)
    world.objects.put(segment.key, b"somebody else's")  # after the listing that misses it
    with pytest.raises(Corruption, match="different object"):
        world.stream.tiers.send_again(segment.segment_id)
    assert world.objects.get(segment.key) == b"somebody else's"
    assert world.payloads() == payloads
    world.objects.delete(segment.key)
    assert world.stream.tiers.send_again(segment.segment_id)


def test_a_compression_is_no_job_of_the_queue(world: StreamWorld) -> None:
    """docs/decisions/032: the record's `job_id` is 0, and the queue has no row."""
    world.fill(1)
    world.stream.compress()
    log = world.stream.ledger.log
    log.commit()
    (begun,) = [row for row in inspect(log.files, log.objects) if row.record == "CompressionStarted"]
    assert begun.fields["job_id"] == 0
    assert world.manifest.jobs.jobs() == []
