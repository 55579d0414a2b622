"""Moves between tiers: what is logged, how failures of the object store are handled, what is resumed after a crash."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.core.errors import (
    Corruption,
    IllegalTransition,
    InvalidInput,
    ObjectNotFound,
    ObjectStoreUnavailable,
    StorageFault,
)
from quire.durable.failpoints import armed
from quire.durable.names import Tier
from quire.manifest.records import Residency, WalFormat, WalState
from quire.stream import tiers
from quire.stream.mlog_reader import ManifestLogReader
from quire.stream.mlog_states import Hydration, Remote, Warm
from quire.stream.mlog_verify import inspect
from quire.stream.segment import sealed_blocks
from quire.stream.warm import FOOTER_BYTES, compress
from tests.stream.streams import SMALL, StreamHarness


class Died(BaseException):
    """Stands for SIGKILL in this process."""


def die(_point: str) -> None:
    raise Died


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.objects.down = False
    harness.check()
    harness.close()


def logged_kinds(harness: StreamHarness) -> list[str]:
    """The kinds of records in the log."""
    chunks = ManifestLogReader(harness.stream.ledger.log.files).chunks()
    return [type(view.value()).__name__ for chunk in chunks for view in chunk.records()]


def test_every_move_is_a_record(harness: StreamHarness) -> None:
    harness.fill(1)
    stream = harness.stream
    stream.upload()
    stream.evict(warm=True)
    stream.hydrate()
    stream.tiers.retire(1)
    stream.ledger.log.commit()
    assert logged_kinds(harness) == [
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
    assert (harness.on_disk(Tier.HOT), harness.on_disk(Tier.WARM)) == ([], [])
    assert not list(harness.objects.list_pages(named(harness, "00000001")))


def test_lmdb_follows_the_log(harness: StreamHarness) -> None:
    harness.fill(1)
    stream = harness.stream
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


def test_rows_missing_in_lmdb_are_folded_again_at_open(harness: StreamHarness) -> None:
    harness.fill(2)
    assert harness.stream.ledger.projection.rows() == {}
    harness.crash()
    assert sorted(harness.stream.ledger.projection.rows()) == [1, 2]


def test_moves_are_idempotent(harness: StreamHarness) -> None:
    harness.fill(2)
    stream = harness.stream
    assert (stream.compress(), stream.compress()) == (2, 0)
    assert (stream.upload(), stream.upload()) == (2, 0)
    assert (stream.evict(), stream.evict()) == (2, 0)
    assert (stream.hydrate(), stream.hydrate()) == (2, 0)


def test_the_last_copy_is_never_evicted(harness: StreamHarness) -> None:
    harness.fill(1)
    assert harness.stream.evict() == 0
    with pytest.raises(IllegalTransition):
        harness.stream.tiers.evict(1)
    harness.stream.compress()
    harness.stream.evict()
    with pytest.raises(IllegalTransition):
        harness.stream.tiers.evict(1, warm=True)


def test_open_and_unknown_segments_cannot_be_moved(harness: StreamHarness) -> None:
    harness.stream.append(b"a").result()
    with pytest.raises(InvalidInput, match="sealed"):
        harness.stream.tiers.compress(1)
    with pytest.raises(InvalidInput, match="no such segment"):
        harness.stream.tiers.compress(7)


def test_budgets_evict_the_least_recently_used(harness: StreamHarness) -> None:
    harness.fill(6, records=15, size=900)
    harness.clock.advance(1)
    harness.payloads(1, 2)
    with harness.stream.pin(2):
        harness.stream.tick()
        hot = [segment.segment_id for segment in harness.segments() if segment.is_hot]
        assert hot == [1, 2, 5, 6], "1 was used just now, 2 is pinned; of the others the newest two fit"
        assert sum(segment.durable_bytes for segment in harness.segments() if segment.is_hot) <= SMALL.hot_bytes
    assert sum(segment.warm_bytes for segment in harness.segments() if segment.is_warm) <= SMALL.warm_bytes
    assert all(segment.is_remote for segment in harness.segments())


def test_pinned_segments_stay(harness: StreamHarness) -> None:
    harness.fill(2)
    harness.stream.upload()
    with harness.stream.pin(1):
        assert harness.stream.evict(warm=True) == 2
        assert not harness.stream.tiers.retire(1)
        first, second = harness.segments()
        assert (first.is_hot, first.is_warm, second.is_hot, second.is_warm) == (True, True, False, False)
    assert harness.stream.evict(warm=True) == 2


def test_a_compressed_file_that_does_not_match_its_segment_is_not_logged(
    harness: StreamHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compressor that returns another segment: a valid file with the wrong content."""
    harness.fill(2)
    first = Path(harness.files.segment(Tier.HOT, 1)).read_bytes()
    blocks = sealed_blocks(first, harness.segments()[0].durable_bytes)

    def compress_wrong_segment(*_: Any, **__: Any) -> Iterator[bytes]:
        return compress(first[: blocks.cut], blocks)

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "compress", compress_wrong_segment)
        with pytest.raises(Corruption, match="does not decompress"):
            harness.stream.tiers.compress(2)
    assert (harness.on_disk(Tier.WARM), harness.segments()[1].state.warm) == ([], Warm.FAILED)
    assert harness.stream.compress() == 2


# ── an object store that fails ────────────────────────────────────────────────────────────────────────────────────────
def test_a_failed_upload_is_logged_and_retried_later(harness: StreamHarness) -> None:
    harness.fill(1)
    harness.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        harness.stream.upload()
    assert harness.segments()[0].state.remote is Remote.FAILED
    result = harness.stream.tick()
    assert result.failed
    harness.objects.down = False
    assert harness.stream.tick().uploaded == 0, "too early"
    harness.clock.advance(60)
    assert harness.stream.tick().uploaded == 1
    harness.stream.ledger.log.commit()
    names = logged_kinds(harness)
    assert names.count("UploadStarted") == 1
    assert names.count("UploadFailed") == 2
    assert names.count("UploadDone") == 1


def test_appends_continue_while_the_object_store_is_down(harness: StreamHarness) -> None:
    harness.objects.down = True
    for _ in range(5):
        harness.fill(1)
        harness.clock.advance(100)
        harness.stream.tick()
    harness.reopen()
    assert len(harness.payloads()) == 100


def named(harness: StreamHarness, suffix: str) -> str:
    """A name in the current owner epoch."""
    with harness.manifest.read() as txn:
        return f"{txn.object_prefixes()[0]}/{suffix}"


def test_another_object_of_the_same_name_is_not_overwritten(harness: StreamHarness) -> None:
    harness.fill(1)
    key = named(harness, "00000001/00000001/wal:00000000")
    harness.objects.put(key, b"something else")
    with pytest.raises(Corruption, match="different object"):
        harness.stream.upload()
    assert harness.objects.get(key) == b"something else"
    assert harness.stream.tick().uploaded == 0
    harness.objects.delete(key)


@pytest.mark.parametrize("difference", ["another footer", "another size"])
def test_an_upload_is_logged_as_done_only_if_the_object_matches(
    harness: StreamHarness, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    """An object store that acknowledges the upload but stores something else."""
    harness.fill(1)
    key = named(harness, "00000001/00000001/wal:00000000")
    with monkeypatch.context() as patch:
        if difference == "another footer":
            patch.setattr(harness.objects, "get_range", lambda *_: bytes(FOOTER_BYTES), raising=False)
        else:
            put_file = harness.objects.put_file

            def report_wrong_size(*args: Any, **kwargs: Any) -> Any:
                info = put_file(*args, **kwargs)
                return msgspec.structs.replace(info, size_bytes=info.size_bytes - 1)

            patch.setattr(harness.objects, "put_file", report_wrong_size, raising=False)
        with pytest.raises(Corruption, match="differs from what was uploaded"):
            harness.stream.upload()
    (segment,) = harness.segments()
    assert (segment.is_remote, segment.state.remote) == (False, Remote.FAILED)
    assert "UploadDone" not in logged_kinds(harness)
    harness.stream.tiers.evict(1)
    with pytest.raises(IllegalTransition):
        harness.stream.tiers.evict(1, warm=True)  # the object is not confirmed: this is the last copy
    assert harness.stream.upload() == 1
    assert harness.objects.head(key).size_bytes == harness.segments()[0].warm_bytes


def test_a_failed_hydration_is_logged_and_retried(harness: StreamHarness) -> None:
    harness.fill(1)
    harness.stream.upload()
    harness.stream.evict(warm=True)
    harness.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        harness.stream.hydrate()
    assert harness.segments()[0].state.hydration is Hydration.FAILED
    harness.objects.down = False
    assert harness.stream.tick().hydrated == 1
    assert harness.segments()[0].is_hot


def test_the_object_of_another_segment_is_not_hydrated(harness: StreamHarness) -> None:
    """Two objects were swapped: both decompress, but neither has the content of its segment."""
    payloads = harness.fill(2)
    harness.stream.upload()
    harness.stream.evict(warm=True)
    first, second = (segment.key for segment in harness.segments())
    first_body = harness.objects.get(first)
    harness.objects.delete(first)
    harness.objects.put(first, harness.objects.get(second))
    with pytest.raises(Corruption, match="not the one that was sealed"):
        harness.stream.tiers.hydrate(1)
    assert harness.on_disk(Tier.HOT) == []
    assert harness.segments()[0].state.hydration is Hydration.FAILED
    harness.objects.delete(first)
    harness.objects.put(first, first_body)
    assert harness.stream.hydrate() == 2
    assert harness.payloads() == payloads


# ── after a crash ─────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "point", ["stream.compress.started", "stream.compress.written", "stream.upload.started", "stream.upload.sent"]
)
def test_interrupted_moves_are_resumed_and_not_started_again(harness: StreamHarness, point: str) -> None:
    harness.fill(1)
    with armed(point, die), pytest.raises(Died):
        harness.stream.upload()
    harness.crash()
    harness.stream.tick()
    segment = harness.segments()[0]
    assert (segment.is_warm, segment.is_remote) == (True, True)
    harness.stream.ledger.log.commit()
    names = logged_kinds(harness)
    for kind in ("CompressionStarted", "CompressionDone", "UploadStarted", "UploadDone"):
        assert names.count(kind) == 1
    assert harness.objects.puts == []  # uploads use put_file: one object, under one name
    assert len([info for page in harness.objects.list_pages(named(harness, "00000001")) for info in page]) == 1


@pytest.mark.parametrize("state", [Remote.UPLOADING, Remote.FAILED])
def test_an_upload_started_in_a_former_owner_epoch_gets_a_new_key(harness: StreamHarness, state: Remote) -> None:
    """Another process may be writing below the former epoch's prefix, for example a copy of the store."""
    harness.fill(1)
    if state is Remote.UPLOADING:
        with armed("stream.upload.started", die), pytest.raises(Died):
            harness.stream.upload()
    else:
        harness.objects.down = True
        with pytest.raises(ObjectStoreUnavailable):
            harness.stream.upload()
        harness.objects.down = False
    former_prefix = named(harness, "")
    harness.manifest.begin_owner_epoch()
    harness.crash()
    assert harness.segments()[0].state.remote is state
    payloads = harness.payloads()
    harness.stream.tick()
    segment = harness.segments()[0]
    assert segment.is_remote
    assert segment.key.startswith(named(harness, ""))
    assert not [info for page in harness.objects.list_pages(former_prefix) for info in page if "wal:" in info.key]
    harness.stream.evict()
    assert harness.payloads() == payloads
    harness.reopen()
    assert harness.segments()[0].key == segment.key


@pytest.mark.parametrize("point", ["stream.retire.queued", "stream.retire.deleted", "stream.retire.told"])
def test_an_interrupted_retirement_is_finished_by_the_next_tick(harness: StreamHarness, point: str) -> None:
    harness.fill(2)
    harness.stream.upload()
    with armed(point, die), pytest.raises(Died):
        harness.stream.tiers.retire(1)
    assert harness.stream.first_record == 21
    harness.crash()
    assert harness.stream.first_record == 21
    harness.stream.tick()
    assert [segment.segment_id for segment in harness.segments()] == [2]
    assert 1 not in (*harness.on_disk(Tier.HOT), *harness.on_disk(Tier.WARM))


def test_files_that_the_log_does_not_mention_are_swept(harness: StreamHarness) -> None:
    harness.fill(2)
    harness.stream.compress()
    with armed("stream.evict.told", die), pytest.raises(Died):
        harness.stream.evict(1)
    assert 1 in harness.on_disk(Tier.HOT)
    Path(harness.files.segment(Tier.WARM, 77)).write_bytes(b"?")
    harness.crash()
    assert (harness.on_disk(Tier.HOT), harness.on_disk(Tier.WARM)) == ([2], [1, 2])


def test_nothing_is_uploaded_before_lmdb_has_its_key(harness: StreamHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard: a failed update of LMDB was only reported, and a sweep could remove the object that LMDB did not know."""
    harness.fill(1)

    def fail(*_: object) -> int:
        raise StorageFault("the manifest's disk is full")

    for _ in range(2):  # also when the upload is continued
        with monkeypatch.context() as patch:
            patch.setattr(harness.stream.ledger.projection, "fold", fail)
            with pytest.raises(StorageFault):
                harness.stream.upload()
        assert [info for page in harness.objects.list_pages("") for info in page] == []
    assert harness.stream.upload() == 1
    assert harness.segments()[0].is_remote


@pytest.mark.parametrize("move", ["hydrate", "upload"])
def test_a_move_whose_file_is_missing_fails_as_damaged(tmp_path: Path, move: str) -> None:
    """Hazard: `FileNotFoundError` left the move unfinished for ever, and ended the thread that maintains all streams."""
    harness = StreamHarness(tmp_path)
    harness.fill(1)
    stream = harness.stream
    stream.compress()
    stream.evict()
    Path(harness.files.segment(Tier.WARM, 1)).unlink()
    with pytest.raises(Corruption, match="file is missing"):
        getattr(stream, move)()
    state = harness.segments()[0].state
    expected = (Hydration.IDLE, Remote.FAILED) if move == "upload" else (Hydration.FAILED, Remote.NONE)
    assert (state.hydration, state.remote) == expected
    stream.tick()
    stream.abandon()
    harness.manifest.close()
    harness.objects.close()


def test_a_missing_local_copy_is_logged_as_evicted(harness: StreamHarness, capsys: pytest.CaptureFixture[str]) -> None:
    payloads = harness.fill(2)
    harness.stream.upload()
    harness.stream.close()
    Path(harness.files.segment(Tier.HOT, 1)).unlink()
    Path(harness.files.segment(Tier.WARM, 2)).unlink()
    harness.stream = harness.open()
    assert "stream.copy_missing" in capsys.readouterr().err
    first, second = harness.segments()
    assert (first.is_hot, first.state.warm, second.is_hot, second.state.warm) == (False, Warm.DONE, True, Warm.NONE)
    assert harness.payloads() == payloads


# ── dictionaries ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_dictionary_is_used_where_it_pays_and_reused_after_reopening(tmp_path: Path) -> None:
    settings = msgspec.structs.replace(SMALL, segment_bytes=8 << 20, hot_bytes=1 << 30, warm_bytes=1 << 30)
    harness = StreamHarness(tmp_path, settings=settings)
    rng = random.Random(3)
    words = [rng.randbytes(120) for _ in range(200)]

    def fill() -> None:
        payloads = [b"".join(rng.choices(words, k=2)) + rng.randbytes(4) for _ in range(12_000)]
        for start in range(0, len(payloads), 400):
            harness.stream.append(payloads[start : start + 400]).result()
        harness.stream.seal()

    fill()
    harness.stream.compress()
    first = harness.segments()[-1]
    harness.reopen()
    fill()
    harness.stream.compress()
    second = harness.segments()[-1]
    assert first.dictionary_id == second.dictionary_id == 1, "trained once, used twice"
    harness.stream.evict()
    assert len(harness.payloads()) == 24_000
    harness.stream.append([rng.randbytes(250) for _ in range(8_000)]).result()
    harness.stream.seal()
    harness.stream.compress()
    assert harness.segments()[-1].dictionary_id == 0, "random bytes do not profit from a dictionary"
    harness.check()
    harness.close()


# ── tier 2 after an opening ───────────────────────────────────────────────────────────────────────────────────────────
def test_objects_that_tier_2_lost_are_uploaded_again_after_an_open(harness: StreamHarness) -> None:
    """Manifest-log document, start-up: list and compare; upload again what is on disk, report the rest as needing
    repair.
    """
    payloads = harness.fill(4)
    stream = harness.stream
    stream.upload()
    stream.evict(2, 3)
    stream.evict(1, warm=True)
    stream.tiers.evict(4, warm=True)
    first, second, _, fourth = (segment.key for segment in harness.segments())
    log = stream.ledger.log
    assert log.objects is not None
    chunk_key = log.objects.chunk_key(0)
    before = harness.objects.get(second)
    for key in (first, second, fourth, chunk_key):
        harness.objects.delete(key)
    harness.reopen()
    harness.objects.down = True
    assert harness.stream.tick().failed
    harness.objects.down = False
    assert harness.stream.info().needs_repair == [], "an unavailable store proves nothing"
    harness.clock.advance(60)
    assert harness.stream.tick().uploaded == 2, "from the compressed copy, and from the hot one"
    assert harness.stream.info().needs_repair == [1]
    assert harness.objects.get(second) == before
    assert harness.objects.head(chunk_key).size_bytes > 0
    assert harness.stream.tick().uploaded == 0
    harness.stream.evict(warm=True)
    assert harness.payloads(21) == payloads[20:]
    with pytest.raises(ObjectNotFound, match="missing"):
        harness.payloads(1, 3)
    harness.stream.tiers.retire(1)


def test_a_lost_object_of_a_former_owner_epoch_is_uploaded_again_and_overwrites_nothing(
    harness: StreamHarness,
) -> None:
    """The log names the object below the former epoch's prefix: exactly those bytes are uploaded there, or nothing."""
    payloads = harness.fill(1)
    harness.stream.upload()
    (segment,) = [segment for segment in harness.segments() if segment.is_remote]
    body = harness.objects.get(segment.key)
    harness.manifest.begin_owner_epoch()
    harness.objects.delete(segment.key)
    harness.reopen()
    assert not segment.key.startswith(named(harness, ""))
    assert harness.stream.tick().uploaded == 1
    assert harness.objects.get(segment.key) == body
    assert harness.segments()[0].key == segment.key
    harness.objects.delete(segment.key)
    harness.objects.put(segment.key, b"somebody else's")  # after the listing in which it was missing
    with pytest.raises(Corruption, match="different object"):
        harness.stream.tiers.send_again(segment.segment_id)
    assert harness.objects.get(segment.key) == b"somebody else's"
    assert harness.payloads() == payloads
    harness.objects.delete(segment.key)
    assert harness.stream.tiers.send_again(segment.segment_id)


def test_a_compression_is_not_a_job_of_the_queue(harness: StreamHarness) -> None:
    """docs/decisions/032: the record's `job_id` is 0, and the job queue has no row."""
    harness.fill(1)
    harness.stream.compress()
    log = harness.stream.ledger.log
    log.commit()
    (started,) = [row for row in inspect(log.files, log.objects) if row.record == "CompressionStarted"]
    assert started.fields["job_id"] == 0
    assert harness.manifest.jobs.jobs() == []
