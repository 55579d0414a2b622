"""A stream read from its files, by another process than the one that writes it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import Corruption, CursorLost, DatabaseTombstoned, WrongKind
from quire.durable.failpoints import armed
from quire.durable.files import OsDisk, OsFile
from quire.durable.names import Tier
from quire.manifest.records import DbKind
from quire.stream.file_reader import GAP_SECONDS, StreamFileReader, _parsed, _Place
from quire.stream.files import StreamFiles
from quire.stream.segment import HEADER_BYTES
from quire.stream.spans import StreamRecord
from quire.stream.state import Retention
from tests.stream.blocks import new_header, segment_of
from tests.stream.streams import StreamHarness

MODES = ["off", "shadow", "on"]


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.close()


class Follower:
    """Continues reading from its last position."""

    def __init__(self, harness: StreamHarness) -> None:
        self.reader = StreamFileReader(harness.manifest, "clicks", lambda _: harness.files, lambda: harness.objects)
        self.position = self.reader.first_record

    def bounds(self) -> tuple[int, int]:
        return self.reader.bounds()

    def new(self) -> Iterator[StreamRecord]:
        for record in self.reader.tail(self.position, timeout=0):
            self.position = record.id + 1
            yield record


def new_follower(harness: StreamHarness) -> Follower:
    """A follower that starts at the first record."""
    return Follower(harness)


def new_records(follower: Follower) -> list[tuple[int, bytes]]:
    return [(record.id, record.payload) for record in follower.new()]


def all_records(harness: StreamHarness, start: int | None = None) -> list[tuple[int, bytes]]:
    return [(record.id, record.payload) for record in harness.stream.read(start)]


@pytest.mark.parametrize("mode", MODES)
def test_every_record_is_returned_once_while_its_segment_moves(harness: StreamHarness, mode: str) -> None:
    harness.reopen(mode)
    follower = new_follower(harness)
    assert (follower.bounds(), new_records(follower)) == ((1, 1), [])
    received: list[tuple[int, bytes]] = []
    for number in range(4):
        harness.stream.append([b"a", b"b" * number * 1000]).result()
        received += new_records(follower)
        assert (received, new_records(follower)) == (all_records(harness), [])
        harness.fill(2)
        harness.stream.upload()
        harness.stream.evict()
        harness.stream.evict(warm=True)
        received += new_records(follower)
        assert received == all_records(harness)
    late = new_follower(harness)
    assert late.bounds() == (harness.stream.first_record, harness.stream.end_record)
    assert new_records(late) == received
    late = new_follower(harness)
    late.position = 7
    assert new_records(late) == received[6:]


def test_a_follower_continues_after_a_crash_of_the_writer(harness: StreamHarness) -> None:
    follower = new_follower(harness)
    harness.stream.append(b"before").result()
    assert new_records(follower) == [(1, b"before")]
    harness.crash()
    assert new_records(follower) == []
    harness.stream.append(b"after").result()
    assert new_records(follower) == [(2, b"after")]


def test_a_record_is_synced_before_it_is_returned(harness: StreamHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: the writer has written the record, but may not have synced it."""
    follower = new_follower(harness)
    harness.stream.append(b"one").result()
    synced: list[str] = []
    original_open = harness.disk.open

    def recording_open(path: str, **how: bool) -> object:
        file = original_open(path, **how)
        sync = file.sync

        def recording_sync(_: object) -> None:
            synced.append(path)
            sync()

        monkeypatch.setattr(type(file), "sync", recording_sync)
        return file

    monkeypatch.setattr(type(harness.disk), "open", lambda _, path, **how: recording_open(path, **how))
    synced_before = [(list(synced), record.payload) for record in follower.new()]
    assert synced_before == [([harness.files.segment(Tier.HOT, 1)], b"one")]


def test_records_that_retention_removed_are_reported(harness: StreamHarness) -> None:
    follower = new_follower(harness)
    harness.fill(3)
    harness.stream.retain(Retention(bytes=1))
    assert harness.stream.retire() == 3
    harness.stream.append(b"new").result()
    assert new_records(follower) == [], "the segment may be moving between tiers"
    harness.clock.advance(GAP_SECONDS + 1)
    with pytest.raises(CursorLost, match="no longer retained"):
        new_records(follower)


def test_the_end_stays_when_segments_are_listed_and_removed_during_a_read(harness: StreamHarness) -> None:
    """Rows were read before an upload had listed the segments, their files after it had removed them: the stream seemed to end
    before them (issue 21)."""
    follower = new_follower(harness)
    harness.fill(3)
    before = follower.bounds()
    moves: list[object] = []

    def upload_and_evict(_: str) -> None:
        if not moves:
            moves.append(harness.stream.upload())
            harness.stream.evict()
            harness.stream.evict(warm=True)

    with armed("stream.reader.rows_read", upload_and_evict):
        assert follower.bounds() == before
    assert moves
    assert harness.files.segments(Tier.HOT) == []
    assert new_records(follower) == all_records(harness)


class SwappedDirectories(OsDisk):
    """The disk of a standby's reader: at the first opening of a segment after `begin`, the files are being replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.swaps = 0
        self.is_begun = False

    def begin(self) -> None:
        self.is_begun = True

    def directories_id(self) -> int:
        return self.swaps

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> OsFile:
        if self.is_begun and path.endswith(".seg"):
            self.is_begun = False
            self.swaps += 1
            raise FileNotFoundError(path)
        return super().open(path, create=create, exclusive=exclusive, write=write)


@pytest.mark.parametrize("moved", ["hot", "warm"])
def test_files_that_are_replaced_during_a_read_are_no_damage(harness: StreamHarness, moved: str) -> None:
    """A file that was missing while a standby swapped its directories was reported as damage, because the segment itself was
    where it had been (issue 21)."""
    harness.fill(1)
    if moved == "warm":
        harness.stream.upload()
        harness.stream.evict()
    disk = SwappedDirectories()
    files = StreamFiles(disk, harness.stream_root, harness.stream_id)
    reader = StreamFileReader(harness.manifest, "clicks", lambda _: files, lambda: harness.objects)
    contents = reader.contents()
    disk.begin()
    spans = reader._spans(contents, contents.first_record, contents.end_record)
    assert [(record.id, record.payload) for span in spans for record in span.records()] == all_records(harness)
    assert disk.swaps == 1


def test_a_missing_file_is_reported_if_nothing_was_replaced(harness: StreamHarness) -> None:
    harness.fill(1)
    reader = StreamFileReader(harness.manifest, "clicks", lambda _: harness.files, lambda: harness.objects)
    contents = reader.contents()
    os.rename(harness.files.segment(Tier.HOT, 1), harness.root / "elsewhere")
    with pytest.raises(Corruption, match="a segment's file is missing"):
        list(reader._spans(contents, 1, contents.end_record))
    os.rename(harness.root / "elsewhere", harness.files.segment(Tier.HOT, 1))


def test_a_dropped_stream_or_another_kind_of_database_is_an_error(harness: StreamHarness) -> None:
    harness.manifest.register_db("shop", DbKind.PAGES)
    with pytest.raises(WrongKind):
        StreamFileReader(harness.manifest, "shop", lambda _: harness.files, lambda: harness.objects)
    follower = new_follower(harness)
    harness.manifest.drop_db(harness.stream_id).result()
    with pytest.raises(DatabaseTombstoned):
        new_records(follower)


def test_uncommitted_and_torn_records_are_not_returned() -> None:
    """For every prefix of a file, exactly the complete commits in it are returned."""
    header = new_header()
    raw = segment_of([[[b"a"]], [[b"b"], [b"c"], [b"d" * 100]], [[b"e"]]], header=header)
    ends = {
        len(segment_of(appends, header=header)): count
        for appends, count in (([], 0), ([[[b"a"]]], 1), ([[[b"a"]], [[b"b"], [b"c"], [b"d" * 100]]], 4))
    }
    ends[len(raw)] = 5
    for length in range(HEADER_BYTES, len(raw) + 1):
        torn = raw[:length] + bytes(4096)
        pieces, position, _ = _parsed(memoryview(torn)[HEADER_BYTES:], _Place(header, HEADER_BYTES, header.base_record))
        count = sum(block.records for block, _ in pieces)
        padded = max(count for end, count in ends.items() if end - 63 <= length)  # a block is padded with zeros
        committed = max(count for end, count in ends.items() if end <= length)
        assert committed <= count <= padded
        assert position.record == header.base_record + count


@settings(max_examples=15)
@given(
    st.lists(
        st.sampled_from(
            ["append", "many", "large", "seal", "compress", "upload", "evict", "evict warm", "tick", "look", "reopen"]
        ),
        max_size=30,
    )
)
def test_a_follower_sees_what_its_owner_sees(steps: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        harness = StreamHarness(Path(root))
        try:
            follower = new_follower(harness)
            received: list[tuple[int, bytes]] = []
            for step in steps:
                _do(harness, step)
                if step == "look":
                    received += new_records(follower)
            assert received + new_records(follower) == all_records(harness)
            assert new_follower(harness).bounds() == (harness.stream.first_record, harness.stream.end_record)
        finally:
            harness.close()


def _do(harness: StreamHarness, step: str) -> None:
    stream = harness.stream
    if step == "append":
        stream.append(b"x").result()
    elif step == "many":
        stream.append([b"m%d" % number for number in range(50)]).result()
    elif step == "large":
        stream.append([bytes(7000), bytes(7000)]).result()
    elif step == "evict warm":
        stream.evict(warm=True)
    elif step == "reopen":
        harness.reopen()
    elif step != "look":
        getattr(stream, step)()
