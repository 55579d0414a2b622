"""Opening removes nothing that it cannot prove to be garbage: the log is held against its witnesses first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from quire.core.errors import Corruption, ManifestIntegrityError
from quire.durable import quarantine
from quire.durable.names import Tier
from quire.stream.files import LogFiles
from quire.stream.mlog_verify import verify
from quire.stream.segment import StreamSegmentHeader
from quire.stream.segments import SegmentList
from quire.stream.state import Retention
from tests.stream.streams import StreamWorld, record


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.manifest.close()
    made.objects.close()


def log_of(world: StreamWorld) -> LogFiles:
    return LogFiles(world.disk, world.stream_root, world.stream_id)


def lose_first(world: StreamWorld) -> None:
    log = log_of(world)
    os.remove(log.chunk(log.chunks()[0]))


def lose_newest(world: StreamWorld) -> None:
    log = log_of(world)
    os.remove(log.chunk(log.chunks()[-1]))


def lose_all(world: StreamWorld) -> None:
    shutil.rmtree(log_of(world).directory)


LOSSES = [lose_first, lose_newest, lose_all]


def on_disk(world: StreamWorld) -> dict[str, bytes]:
    return {
        world.files.segment(tier, each): Path(world.files.segment(tier, each)).read_bytes()
        for tier in Tier
        for each in world.files.segments(tier)
    }


@pytest.mark.parametrize("lose", LOSSES)
def test_a_log_that_lost_chunks_keeps_its_stream_closed_and_every_file(
    world: StreamWorld, lose: Callable[[StreamWorld], None]
) -> None:
    world.fill(3)
    world.stream.compress()
    world.stream.close()
    before = on_disk(world)
    lose(world)
    for _ in range(2):
        with pytest.raises(Corruption, match="manifest log of a stream is behind") as told:
            world.open()
        assert "quire stream repair clicks" in (told.value.hint or "")
        assert on_disk(world) == before
        assert len(world.stream.ledger.projection.rows()) == 3, "the witness is kept too"


@pytest.mark.parametrize("lose", LOSSES)
def test_verifying_the_log_says_so_too(world: StreamWorld, lose: Callable[[StreamWorld], None]) -> None:
    """Every verifier called such a stream sound."""
    world.fill(3)
    world.stream.close()
    witness = world.stream.ledger.projection.witness()
    assert list(verify(log_of(world), settings=world.log_settings, witness=witness)) == []
    lose(world)
    assert {each.rule for each in verify(log_of(world), settings=world.log_settings, witness=witness)} == {"L8"}


def test_records_that_were_synced_and_never_sealed_are_a_witness(world: StreamWorld) -> None:
    """A crash: LMDB has no row of the open segment, only its file knows."""
    world.stream.append([record(number) for number in range(5)]).result()
    world.stream.abandon()
    before = on_disk(world)
    lose_all(world)
    with pytest.raises(Corruption, match="has records 1 to 5, the log does not know it"):
        world.open()
    assert on_disk(world) == before


def test_an_older_copy_of_the_newest_chunk_is_noticed(world: StreamWorld) -> None:
    world.fill(1)
    world.stream.sync()
    path = Path(log_of(world).chunk(log_of(world).chunks()[-1]))
    older = path.read_bytes()
    world.fill(1)
    world.stream.compress()
    world.stream.evict()
    world.stream.close()
    path.write_bytes(older)
    with pytest.raises(Corruption, match="behind"):
        world.open()


def test_the_end_at_a_clean_close_is_remembered_outside_the_log(world: StreamWorld) -> None:
    """Nothing about segments was lost: only the number of records at the last close tells."""
    world.fill(1)
    world.stream.close()
    path = Path(log_of(world).chunk(log_of(world).chunks()[-1]))
    older = path.read_bytes()
    world.stream = world.open()
    world.stream.compress()
    world.stream.close()
    path.write_bytes(older)
    with pytest.raises(Corruption, match="records, and had"):
        world.open()


def test_the_log_of_another_stream_is_noticed(world: StreamWorld, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = StreamWorld(tmp_path / "other")
    other.fill(2, records=7)
    other.stream.close()
    world.fill(2)
    world.stream.close()
    path = Path(log_of(world).chunk(0))
    theirs = Path(log_of(other).chunk(0)).read_bytes()
    path.write_bytes(theirs)
    with pytest.raises(ManifestIntegrityError, match="to another store"):
        world.open()
    # Of a chunk that says nothing of itself the witnesses know.
    path.write_bytes(theirs[:-128] + bytes(128))
    with pytest.raises(Corruption, match="manifest log of a stream is behind"):
        world.open()
    other.close()


@pytest.mark.parametrize("lose", LOSSES)
def test_a_log_whose_chunks_are_in_tier_2_is_rebuilt_from_there(
    world: StreamWorld, lose: Callable[[StreamWorld], None]
) -> None:
    payloads = world.fill(3)
    world.stream.upload()
    world.stream.close()
    records = world.stream.ledger.log.index.records
    lose(world)
    world.stream = world.open()
    assert world.stream.ledger.log.index.records >= records
    assert world.payloads() == payloads
    world.check()
    world.stream.close()


def test_what_cannot_be_proven_to_be_garbage_goes_to_quarantine(world: StreamWorld) -> None:
    world.fill(2)
    world.stream.close()
    stray = Path(world.files.segment(Tier.HOT, 77))
    stray.write_bytes(b"nobody knows what this is")
    world.stream = world.open()
    assert not stray.exists()
    (entry,) = quarantine.entries(world.disk, world.stream_root)
    assert entry.path.endswith("hot/000000000000004d.seg")
    assert entry.database == world.stream_id
    assert Path(world.stream_root, entry.place).read_bytes() == b"nobody knows what this is"
    world.check()
    world.stream.close()


def test_what_is_proven_to_be_garbage_is_removed(world: StreamWorld) -> None:
    """A hot copy that the log gave up, segments that it has retired, a file that never had a record."""
    world.fill(4)
    copies = on_disk(world)
    world.stream.compress()
    world.stream.evict(3)
    world.stream.retain(Retention(bytes=world.segments()[0].durable_bytes * 2))
    assert world.stream.retire() == 2
    world.stream.ledger.project_now()
    world.stream.close()
    for path, data in copies.items():
        Path(path).write_bytes(data)
    empty = StreamSegmentHeader(world.stream_id, 9, 1000, 5, 77).encode()
    Path(world.files.segment(Tier.HOT, 9)).write_bytes(empty.ljust(4096, b"\0"))
    world.stream = world.open()
    assert world.on_disk(Tier.HOT) == [4]
    assert quarantine.entries(world.disk, world.stream_root) == []
    world.check()
    world.stream.close()


def test_a_copy_that_lacks_records_does_not_make_a_read_spin(world: StreamWorld) -> None:
    """The state says that a segment goes on, its copy does not: `read` looked for the rest for ever."""
    payloads = world.fill(2)
    first, second = world.segments()
    later = replace(second, base_record=second.base_record + 5)
    world.stream.ledger.view = SegmentList(
        (replace(first, end_record=later.base_record), later), (1, later.base_record)
    )
    assert world.payloads(stop=first.end_record) == payloads[: first.records]
    with pytest.raises(Corruption, match="lacks some of its records"):
        world.payloads()
    world.stream.abandon()
