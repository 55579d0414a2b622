"""A stream followed from its files, beside the process that writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import CursorLost, DatabaseTombstoned, WrongKind
from quire.durable.names import Tier
from quire.manifest.records import DbKind
from quire.stream.file_reader import GAP_SECONDS, StreamFileReader, _parsed, _Place
from quire.stream.segment import HEADER_BYTES
from quire.stream.spans import StreamRecord
from quire.stream.state import Retention
from tests.stream.blocks import new_header, segment_of
from tests.stream.streams import StreamWorld

MODES = ["off", "shadow", "on"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.close()


class Follower:
    """Reads on from where it was."""

    def __init__(self, world: StreamWorld) -> None:
        self.reader = StreamFileReader(world.manifest, "clicks", lambda _: world.files, lambda: world.objects)
        self.position = self.reader.first_record

    def bounds(self) -> tuple[int, int]:
        return self.reader.bounds()

    def new(self) -> Iterator[StreamRecord]:
        for record in self.reader.tail(self.position, timeout=0):
            self.position = record.id + 1
            yield record


def beside(world: StreamWorld) -> Follower:
    """A follower that begins with the first record."""
    return Follower(world)


def given_by(follower: Follower) -> list[tuple[int, bytes]]:
    return [(record.id, record.payload) for record in follower.new()]


def all_of(world: StreamWorld, start: int | None = None) -> list[tuple[int, bytes]]:
    return [(record.id, record.payload) for record in world.stream.read(start)]


@pytest.mark.parametrize("mode", MODES)
def test_every_record_comes_once_whatever_happens_to_its_segment(world: StreamWorld, mode: str) -> None:
    world.reopen(mode)
    follower = beside(world)
    assert (follower.bounds(), given_by(follower)) == ((1, 1), [])
    seen: list[tuple[int, bytes]] = []
    for number in range(4):
        world.stream.append([b"a", b"b" * number * 1000]).result()
        seen += given_by(follower)
        assert (seen, given_by(follower)) == (all_of(world), [])
        world.fill(2)
        world.stream.upload()
        world.stream.evict()
        world.stream.evict(warm=True)
        seen += given_by(follower)
        assert seen == all_of(world)
    late = beside(world)
    assert late.bounds() == (world.stream.first_record, world.stream.end_record)
    assert given_by(late) == seen
    late = beside(world)
    late.position = 7
    assert given_by(late) == seen[6:]


def test_it_goes_on_after_a_crash_of_the_writer(world: StreamWorld) -> None:
    follower = beside(world)
    world.stream.append(b"before").result()
    assert given_by(follower) == [(1, b"before")]
    world.crash()
    assert given_by(follower) == []
    world.stream.append(b"after").result()
    assert given_by(follower) == [(2, b"after")]


def test_what_was_given_was_synced_first(world: StreamWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 1: the writer has written, and may not have synced."""
    follower = beside(world)
    world.stream.append(b"one").result()
    synced: list[str] = []
    opened = world.disk.open

    def spied(path: str, **how: bool) -> object:
        file = opened(path, **how)
        sync = file.sync

        def noted(_: object) -> None:
            synced.append(path)
            sync()

        monkeypatch.setattr(type(file), "sync", noted)
        return file

    monkeypatch.setattr(type(world.disk), "open", lambda _, path, **how: spied(path, **how))
    before = [(list(synced), record.payload) for record in follower.new()]
    assert before == [([world.files.segment(Tier.HOT, 1)], b"one")]


def test_what_retention_took_is_told(world: StreamWorld) -> None:
    follower = beside(world)
    world.fill(3)
    world.stream.retain(Retention(bytes=1))
    assert world.stream.retire() == 3
    world.stream.append(b"new").result()
    assert given_by(follower) == [], "a segment may be between two places"
    world.clock.advance(GAP_SECONDS + 1)
    with pytest.raises(CursorLost, match="no longer retained"):
        given_by(follower)


def test_a_stream_that_is_dropped_or_none_is_told(world: StreamWorld) -> None:
    world.manifest.register_db("shop", DbKind.PAGES)
    with pytest.raises(WrongKind):
        StreamFileReader(world.manifest, "shop", lambda _: world.files, lambda: world.objects)
    follower = beside(world)
    world.manifest.drop_db(world.stream_id).result()
    with pytest.raises(DatabaseTombstoned):
        given_by(follower)


def test_what_is_not_committed_or_not_whole_is_not_there() -> None:
    """Of every beginning of a file, what is given is the commits that are whole in it."""
    header = new_header()
    raw = segment_of([[[b"a"]], [[b"b"], [b"c"], [b"d" * 100]], [[b"e"]]], header=header)
    ends = {
        len(segment_of(appends, header=header)): count
        for appends, count in (([], 0), ([[[b"a"]]], 1), ([[[b"a"]], [[b"b"], [b"c"], [b"d" * 100]]], 4))
    }
    ends[len(raw)] = 5
    for length in range(HEADER_BYTES, len(raw) + 1):
        torn = raw[:length] + bytes(4096)
        pieces, place, _ = _parsed(memoryview(torn)[HEADER_BYTES:], _Place(header, HEADER_BYTES, header.base_record))
        count = sum(block.records for block, _ in pieces)
        padded = max(count for end, count in ends.items() if end - 63 <= length)  # zeros are what a block ends with
        whole = max(count for end, count in ends.items() if end <= length)
        assert whole <= count <= padded
        assert place.record == header.base_record + count


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
        world = StreamWorld(Path(root))
        try:
            follower = beside(world)
            seen: list[tuple[int, bytes]] = []
            for step in steps:
                _do(world, step)
                if step == "look":
                    seen += given_by(follower)
            assert seen + given_by(follower) == all_of(world)
            assert beside(world).bounds() == (world.stream.first_record, world.stream.end_record)
        finally:
            world.close()


def _do(world: StreamWorld, step: str) -> None:
    stream = world.stream
    if step == "append":
        stream.append(b"x").result()
    elif step == "many":
        stream.append([b"m%d" % number for number in range(50)]).result()
    elif step == "large":
        stream.append([bytes(7000), bytes(7000)]).result()
    elif step == "evict warm":
        stream.evict(warm=True)
    elif step == "reopen":
        world.reopen()
    elif step != "look":
        getattr(stream, step)()
