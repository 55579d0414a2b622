"""A chunk says of which store and stream it is, and nobody takes another's for its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from quire.core.errors import ManifestIntegrityError
from quire.durable import quarantine
from quire.stream import mlog_bundle
from quire.stream.files import LogFiles
from quire.stream.mlog_format import COPY_BYTES, NO_IDENTITY, decode_copy, identity_of
from quire.stream.mlog_reader import ManifestLogReader
from quire.stream.mlog_recovery import local_facts
from quire.stream.mlog_verify import verify
from tests.stream.streams import StreamWorld
from tests.stream.test_repair import repair
from tests.stream.tiers import World

OURS = "0f8fad5b-d9cb-469f-a165-70867728950e"
THEIRS = "7c9e6679-7425-40de-944b-e07fc1f90ae7"


class Named(World):
    """A log of a store that has a name."""

    def __init__(self, root: Path, store_id: str = OURS, stream_id: int = 7) -> None:
        super().__init__(root)
        self.log.close()
        self.files = replace(self.files, store_id=store_id, stream_id=stream_id)
        self.objects = replace(self.objects, store_id=store_id, stream_id=stream_id)
        self.log = self.open()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Named]:
    made = Named(tmp_path)
    yield made
    made.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.manifest.close()
    made.objects.close()


def as_of(path: Path, store_id: str, stream_id: int) -> None:
    """Change whose a chunk says it is."""
    data = path.read_bytes()
    copy = decode_copy(data)
    assert copy is not None
    path.write_bytes(data[:-COPY_BYTES] + copy._replace(identity=identity_of(store_id, stream_id)).encode())


def test_every_chunk_says_whose_it_is(log: Named) -> None:
    log.chunks(3)
    log.tell(4)
    log.log.upload()
    own = identity_of(OURS, 7)
    assert [chunk.identity for chunk in ManifestLogReader(log.files).chunks()] == [own] * 4
    assert [log.objects.facts(index).identity for index in range(3)] == [own] * 3
    log.reopen()
    log.tell(4)
    assert local_facts(log.files.disk, log.files, 3).identity == own


@pytest.mark.parametrize(("store_id", "stream_id", "whose"), [(THEIRS, 7, "store"), (OURS, 8, "stream")])
def test_a_chunk_of_somebody_else_is_refused_on_disk(log: Named, store_id: str, stream_id: int, whose: str) -> None:
    log.chunks(2)
    log.tell(3)
    log.log.close()
    for index in range(3):
        path = Path(log.files.chunk(index))
        before = path.read_bytes()
        as_of(path, store_id, stream_id)
        with pytest.raises(ManifestIntegrityError, match=f"to another {whose}"):
            log.open()
        with pytest.raises(ManifestIntegrityError, match=f"to another {whose}"):
            local_facts(log.files.disk, log.files, index)
        assert [each.what for each in verify(log.files) if each.rule == "L1"] == [
            f"the chunk belongs to another {whose}"
        ]
        path.write_bytes(before)
    log.log = log.open()


@pytest.mark.parametrize(("store_id", "stream_id"), [(THEIRS, 7), (OURS, 8)])
def test_a_chunk_or_bundle_of_somebody_else_is_refused_in_tier_2(log: Named, store_id: str, stream_id: int) -> None:
    log.chunks(3)
    log.log.upload()
    task = mlog_bundle.BundleTask(stream_id=7, first=0, last=1, prefix="")
    result = mlog_bundle.run(task, log.store)
    bundle = log.objects.get_bundle(0, 1)
    assert bundle is not None
    assert bundle.identity == identity_of(OURS, 7)
    other = replace(log.objects, store_id=THEIRS)
    for read in (
        lambda: other.get_chunk(0),
        lambda: other.facts(0),
        lambda: other.get_bundle(0, 1),
        lambda: other.check(0),
    ):
        with pytest.raises(ManifestIntegrityError, match="to another store"):
            read()
    as_of(log.root / "objects" / log.objects.chunk_key(1), store_id, stream_id)
    with pytest.raises(ManifestIntegrityError, match="to another"):
        log.objects.fetch(1)
    with pytest.raises(ManifestIntegrityError, match="to another"):
        mlog_bundle.run(task, log.store)
    assert any("to another" in each.what for each in verify(log.files, log.objects))
    as_of(log.root / "objects" / result.key, store_id, stream_id)
    with pytest.raises(ManifestIntegrityError, match="to another"):
        mlog_bundle.publish(log.log, result)


def test_a_log_of_before_is_gone_on_with_and_says_from_then_on_whose_it_is(log: Named) -> None:
    log.chunks(2)
    log.tell(3)
    log.log.upload()
    log.log.close()
    for index in range(3):
        as_of(Path(log.files.chunk(index)), "", 0)
    for index in range(2):
        as_of(log.root / "objects" / log.objects.chunk_key(index), "", 0)
    log.log = log.open()
    assert [each for each in verify(log.files, log.objects) if not each.leak] == []
    log.tell(3)
    log.log.rotate()
    log.log.upload()
    own = identity_of(OURS, 7)
    assert [chunk.identity for chunk in ManifestLogReader(log.files).chunks()] == [NO_IDENTITY, NO_IDENTITY, own]
    task = mlog_bundle.BundleTask(stream_id=7, first=0, last=2, prefix="")
    mlog_bundle.publish(log.log, mlog_bundle.run(task, log.store))
    bundle = log.objects.get_bundle(0, 2)
    assert bundle is not None
    assert bundle.identity == own


def test_repair_puts_a_foreign_chunk_aside_and_takes_its_own_from_tier_2(world: StreamWorld) -> None:
    payloads = world.fill(3)
    world.stream.upload()
    world.stream.close()
    files = LogFiles(world.disk, world.stream_root, world.stream_id)
    as_of(Path(files.chunk(0)), THEIRS, world.stream_id)
    with pytest.raises(ManifestIntegrityError, match="to another store"):
        world.open()
    survey = repair(world)
    assert survey.lost == []
    assert world.payloads() == payloads
    world.check()
    assert ["to another store" in each.why for each in quarantine.entries(world.disk, world.stream_root)] == [True]
    world.stream.close()
