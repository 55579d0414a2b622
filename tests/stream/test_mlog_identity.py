"""A chunk records its store and stream, and chunks of others are refused."""

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
from tests.stream.streams import StreamHarness
from tests.stream.test_repair import repair
from tests.stream.tiers import LogHarness

OWN_STORE = "0f8fad5b-d9cb-469f-a165-70867728950e"
OTHER_STORE = "7c9e6679-7425-40de-944b-e07fc1f90ae7"


class IdentifiedLog(LogHarness):
    """A manifest log whose store has an id."""

    def __init__(self, root: Path, store_id: str = OWN_STORE, stream_id: int = 7) -> None:
        super().__init__(root)
        self.log.close()
        self.files = replace(self.files, store_id=store_id, stream_id=stream_id)
        self.objects = replace(self.objects, store_id=store_id, stream_id=stream_id)
        self.log = self.open()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IdentifiedLog]:
    log = IdentifiedLog(tmp_path)
    yield log
    log.close()


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.manifest.close()
    harness.objects.close()


def set_identity(path: Path, store_id: str, stream_id: int) -> None:
    """Change the identity in a chunk."""
    data = path.read_bytes()
    copy = decode_copy(data)
    assert copy is not None
    path.write_bytes(data[:-COPY_BYTES] + copy._replace(identity=identity_of(store_id, stream_id)).encode())


def test_every_chunk_has_an_identity(log: IdentifiedLog) -> None:
    log.chunks(3)
    log.append_records(4)
    log.log.upload()
    own = identity_of(OWN_STORE, 7)
    assert [chunk.identity for chunk in ManifestLogReader(log.files).chunks()] == [own] * 4
    assert [log.objects.facts(index).identity for index in range(3)] == [own] * 3
    log.reopen()
    log.append_records(4)
    assert local_facts(log.files.disk, log.files, 3).identity == own


@pytest.mark.parametrize(("store_id", "stream_id", "mismatch"), [(OTHER_STORE, 7, "store"), (OWN_STORE, 8, "stream")])
def test_a_foreign_chunk_is_refused_on_disk(log: IdentifiedLog, store_id: str, stream_id: int, mismatch: str) -> None:
    log.chunks(2)
    log.append_records(3)
    log.log.close()
    for index in range(3):
        path = Path(log.files.chunk(index))
        before = path.read_bytes()
        set_identity(path, store_id, stream_id)
        with pytest.raises(ManifestIntegrityError, match=f"to another {mismatch}"):
            log.open()
        with pytest.raises(ManifestIntegrityError, match=f"to another {mismatch}"):
            local_facts(log.files.disk, log.files, index)
        assert [problem.what for problem in verify(log.files) if problem.rule == "L1"] == [
            f"the chunk belongs to another {mismatch}"
        ]
        path.write_bytes(before)
    log.log = log.open()


@pytest.mark.parametrize(("store_id", "stream_id"), [(OTHER_STORE, 7), (OWN_STORE, 8)])
def test_a_foreign_chunk_or_bundle_is_refused_in_tier_2(log: IdentifiedLog, store_id: str, stream_id: int) -> None:
    log.chunks(3)
    log.log.upload()
    task = mlog_bundle.BundleTask(stream_id=7, first=0, last=1, prefix="")
    result = mlog_bundle.run(task, log.store)
    bundle = log.objects.get_bundle(0, 1)
    assert bundle is not None
    assert bundle.identity == identity_of(OWN_STORE, 7)
    other = replace(log.objects, store_id=OTHER_STORE)
    for read in (
        lambda: other.get_chunk(0),
        lambda: other.facts(0),
        lambda: other.get_bundle(0, 1),
        lambda: other.check(0),
    ):
        with pytest.raises(ManifestIntegrityError, match="to another store"):
            read()
    set_identity(log.root / "objects" / log.objects.chunk_key(1), store_id, stream_id)
    with pytest.raises(ManifestIntegrityError, match="to another"):
        log.objects.fetch(1)
    with pytest.raises(ManifestIntegrityError, match="to another"):
        mlog_bundle.run(task, log.store)
    assert any("to another" in problem.what for problem in verify(log.files, log.objects))
    set_identity(log.root / "objects" / result.key, store_id, stream_id)
    with pytest.raises(ManifestIntegrityError, match="to another"):
        mlog_bundle.publish(log.log, result)


def test_a_log_without_identities_is_continued_and_new_chunks_have_one(log: IdentifiedLog) -> None:
    log.chunks(2)
    log.append_records(3)
    log.log.upload()
    log.log.close()
    for index in range(3):
        set_identity(Path(log.files.chunk(index)), "", 0)
    for index in range(2):
        set_identity(log.root / "objects" / log.objects.chunk_key(index), "", 0)
    log.log = log.open()
    assert [problem for problem in verify(log.files, log.objects) if not problem.leak] == []
    log.append_records(3)
    log.log.rotate()
    log.log.upload()
    own = identity_of(OWN_STORE, 7)
    assert [chunk.identity for chunk in ManifestLogReader(log.files).chunks()] == [NO_IDENTITY, NO_IDENTITY, own]
    task = mlog_bundle.BundleTask(stream_id=7, first=0, last=2, prefix="")
    mlog_bundle.publish(log.log, mlog_bundle.run(task, log.store))
    bundle = log.objects.get_bundle(0, 2)
    assert bundle is not None
    assert bundle.identity == own


def test_repair_quarantines_a_foreign_chunk_and_restores_its_own_from_tier_2(harness: StreamHarness) -> None:
    payloads = harness.fill(3)
    harness.stream.upload()
    harness.stream.close()
    files = LogFiles(harness.disk, harness.stream_root, harness.stream_id)
    set_identity(Path(files.chunk(0)), OTHER_STORE, harness.stream_id)
    with pytest.raises(ManifestIntegrityError, match="to another store"):
        harness.open()
    survey = repair(harness)
    assert survey.lost == []
    assert harness.payloads() == payloads
    harness.check()
    assert ["to another store" in entry.why for entry in quarantine.entries(harness.disk, harness.stream_root)] == [
        True
    ]
    harness.stream.close()
