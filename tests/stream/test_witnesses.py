"""Recovery removes nothing that it cannot prove to be garbage: it compares the log with its witnesses first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from quire.core.errors import Corruption, ManifestIntegrityError, StoreUnusable
from quire.durable import quarantine
from quire.durable.failpoints import armed
from quire.durable.names import Tier
from quire.stream.files import LogFiles
from quire.stream.mlog_verify import verify
from quire.stream.segment import StreamSegmentHeader
from quire.stream.segments import SegmentList
from quire.stream.state import Retention
from tests.stream.streams import StreamHarness, record


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.manifest.close()
    harness.objects.close()


def log_of(harness: StreamHarness) -> LogFiles:
    return LogFiles(harness.disk, harness.stream_root, harness.stream_id)


def lose_first(harness: StreamHarness) -> None:
    log = log_of(harness)
    os.remove(log.chunk(log.chunks()[0]))


def lose_newest(harness: StreamHarness) -> None:
    log = log_of(harness)
    os.remove(log.chunk(log.chunks()[-1]))


def lose_all(harness: StreamHarness) -> None:
    shutil.rmtree(log_of(harness).directory)


LOSSES = [lose_first, lose_newest, lose_all]


def on_disk(harness: StreamHarness) -> dict[str, bytes]:
    return {
        harness.files.segment(tier, segment_id): Path(harness.files.segment(tier, segment_id)).read_bytes()
        for tier in Tier
        for segment_id in harness.files.segments(tier)
    }


@pytest.mark.parametrize("lose", LOSSES)
def test_a_stream_whose_log_lost_chunks_does_not_open_and_keeps_every_file(
    harness: StreamHarness, lose: Callable[[StreamHarness], None]
) -> None:
    harness.fill(3)
    harness.stream.compress()
    harness.stream.close()
    before = on_disk(harness)
    lose(harness)
    for _ in range(2):
        with pytest.raises(Corruption, match="manifest log of a stream is behind") as caught:
            harness.open()
        assert "quire stream repair clicks" in (caught.value.hint or "")
        assert on_disk(harness) == before
        assert len(harness.stream.ledger.projection.rows()) == 3, "the witness is kept as well"


@pytest.mark.parametrize("lose", LOSSES)
def test_verification_detects_lost_chunks(harness: StreamHarness, lose: Callable[[StreamHarness], None]) -> None:
    """The verifiers reported such a stream as valid."""
    harness.fill(3)
    harness.stream.close()
    witness = harness.stream.ledger.projection.witness()
    assert list(verify(log_of(harness), settings=harness.log_settings, witness=witness)) == []
    lose(harness)
    assert {problem.rule for problem in verify(log_of(harness), settings=harness.log_settings, witness=witness)} == {
        "L8"
    }


def test_records_that_were_synced_and_never_sealed_are_a_witness(harness: StreamHarness) -> None:
    """After a crash LMDB has no row for the open segment; only its file shows that it exists."""
    harness.stream.append([record(number) for number in range(5)]).result()
    harness.stream.abandon()
    before = on_disk(harness)
    lose_all(harness)
    with pytest.raises(Corruption, match="has records 1 to 5, the log has no record of it"):
        harness.open()
    assert on_disk(harness) == before


def test_an_older_copy_of_the_newest_chunk_is_detected(harness: StreamHarness) -> None:
    harness.fill(1)
    harness.stream.sync()
    path = Path(log_of(harness).chunk(log_of(harness).chunks()[-1]))
    older = path.read_bytes()
    harness.fill(1)
    harness.stream.compress()
    harness.stream.evict()
    harness.stream.close()
    path.write_bytes(older)
    with pytest.raises(Corruption, match="behind"):
        harness.open()


def test_the_end_at_a_clean_close_is_remembered_outside_the_log(harness: StreamHarness) -> None:
    """No segment was lost: only the number of records at the last close reveals the older copy."""
    harness.fill(1)
    harness.stream.close()
    path = Path(log_of(harness).chunk(log_of(harness).chunks()[-1]))
    older = path.read_bytes()
    harness.stream = harness.open()
    harness.stream.compress()
    harness.stream.close()
    path.write_bytes(older)
    with pytest.raises(Corruption, match="records, and had"):
        harness.open()


def test_the_log_of_another_stream_is_detected(harness: StreamHarness, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = StreamHarness(tmp_path / "other")
    other.fill(2, records=7)
    other.stream.close()
    harness.fill(2)
    harness.stream.close()
    path = Path(log_of(harness).chunk(0))
    foreign_chunk = Path(log_of(other).chunk(0)).read_bytes()
    path.write_bytes(foreign_chunk)
    with pytest.raises(ManifestIntegrityError, match="to another store"):
        harness.open()
    # A chunk without an identity is detected by the witnesses.
    path.write_bytes(foreign_chunk[:-128] + bytes(128))
    with pytest.raises(Corruption, match="manifest log of a stream is behind"):
        harness.open()
    other.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_a_log_whose_chunks_are_in_tier_2_is_rebuilt_from_there(
    harness: StreamHarness, lose: Callable[[StreamHarness], None]
) -> None:
    payloads = harness.fill(3)
    harness.stream.upload()
    harness.stream.close()
    records = harness.stream.ledger.log.index.records
    lose(harness)
    harness.stream = harness.open()
    assert harness.stream.ledger.log.index.records >= records
    assert harness.payloads() == payloads
    harness.check()
    harness.stream.close()


def test_files_that_cannot_be_proven_to_be_garbage_are_quarantined(harness: StreamHarness) -> None:
    harness.fill(2)
    harness.stream.close()
    stray = Path(harness.files.segment(Tier.HOT, 77))
    stray.write_bytes(b"nobody knows what this is")
    harness.stream = harness.open()
    assert not stray.exists()
    (entry,) = quarantine.entries(harness.disk, harness.stream_root)
    assert entry.path.endswith("hot/000000000000004d.seg")
    assert entry.database == harness.stream_id
    assert Path(harness.stream_root, entry.place).read_bytes() == b"nobody knows what this is"
    harness.check()
    harness.stream.close()


def test_files_that_are_proven_to_be_garbage_are_removed(harness: StreamHarness) -> None:
    """A hot copy that the log has evicted, segments that it has retired, and a file that never had a record."""
    harness.fill(4)
    copies = on_disk(harness)
    harness.stream.compress()
    harness.stream.evict(3)
    harness.stream.retain(Retention(bytes=harness.segments()[0].durable_bytes * 2))
    assert harness.stream.retire() == 2
    harness.stream.ledger.project_now()
    harness.stream.close()
    for path, data in copies.items():
        Path(path).write_bytes(data)
    empty = StreamSegmentHeader(harness.stream_id, 9, 1000, 5, 77).encode()
    Path(harness.files.segment(Tier.HOT, 9)).write_bytes(empty.ljust(4096, b"\0"))
    harness.stream = harness.open()
    assert harness.on_disk(Tier.HOT) == [4]
    assert quarantine.entries(harness.disk, harness.stream_root) == []
    harness.check()
    harness.stream.close()


def test_a_copy_that_lacks_records_does_not_make_a_read_spin(harness: StreamHarness) -> None:
    """The state has more records than the segment's copy: `read` looked for the rest forever."""
    payloads = harness.fill(2)
    first, second = harness.segments()
    later = replace(second, base_record=second.base_record + 5)
    harness.stream.ledger.view = SegmentList(
        (replace(first, end_record=later.base_record), later), (1, later.base_record)
    )
    assert harness.payloads(stop=first.end_record) == payloads[: first.records]
    with pytest.raises(Corruption, match="lacks some of its records"):
        harness.payloads()
    harness.stream.abandon()


def test_a_stream_whose_log_failed_can_be_opened_after_it_was_closed(tmp_path: Path) -> None:
    """Hazard: closing recorded a count that included the record whose commit had failed, and the next opening refused the
    log as incomplete."""
    harness = StreamHarness(tmp_path)
    payloads = harness.fill(1)
    with armed("stream.mlog.copied", "raise:EIO"), pytest.raises(StoreUnusable):
        harness.stream.compress()
    with pytest.raises(StoreUnusable, match="manifest log failed"):
        harness.stream.close()
    harness.stream = harness.open()
    assert harness.payloads() == payloads
    harness.stream.compress()
    harness.check()
    harness.close()
