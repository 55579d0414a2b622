"""manifest inspect and verify, for the manifest logs of streams."""

from __future__ import annotations

from pathlib import Path

import pytest

import quire
from quire.core.settings import ManifestLogSettings
from quire.durable.files import OsDisk
from quire.objects.open import open_store
from quire.stream import mlog_records as r
from quire.stream.files import LogFiles
from quire.stream.mlog_log import ManifestLog
from quire.stream.mlog_tier2 import LogObjects
from quire.stream.state import Retention
from quire.testing.clock import ManualClock
from tests.cli.conftest import Run
from tests.stream.logs import append_all


@pytest.fixture
def log(path: Path) -> LogFiles:
    """The log of `clicks`: a sealed and uploaded chunk, and one that records the upload of a segment."""
    with quire.open(path) as store:
        stream_id = store.database("clicks").db_id
    files = LogFiles(OsDisk(), str(path), stream_id)
    objects = open_store(str(path / "objects"))
    objects.put("segments/1", b"data")
    settings = ManifestLogSettings(chunk_bytes=16 << 10)
    with ManifestLog.open(
        files, clock=ManualClock(), settings=settings, objects=LogObjects(objects, stream_id)
    ) as opened:
        append_all(opened, [(r.SegmentOpened(0, 1), 1), (r.SealSegment(4, 9), 1)])
        opened.rotate()
        opened.upload()
        append_all(opened, [(r.UploadStarted("segments/1"), 1), (r.UploadDone("segments/1", "e"), 1)])
    objects.close()
    return files


def test_inspect_shows_every_record(run: Run, log: LogFiles) -> None:
    rows = run("manifest", "inspect", "clicks", "--json").data
    assert [row["record"] for row in rows] == ["SegmentOpened", "SealSegment", "UploadStarted", "UploadDone"]
    assert [row["tier2"] for row in rows] == ["same", "same", "here", "here"]
    assert rows[0]["fields"] == {"base_offset": 0, "epoch": 1}
    assert [(row["chunk_index"], row["ordinal"]) for row in rows] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    text = run("manifest", "inspect", "clicks").out
    assert "key=segments/1 etag=e" in text
    assert len(run("manifest", "inspect", "clicks", "--from", "1", "--limit", "1", "--json").data) == 1
    assert run("manifest", "inspect", str(log.stream_id), "--json").data == rows, "also by its id"
    assert run("manifest", "inspect", "4000000000").code == 3
    state = run("manifest", "inspect", "clicks", "--minimal", "--json").data
    assert [row["record"] for row in state] == ["SegmentOpened", "SealSegment", "UploadStarted", "UploadDone"]
    assert state[3]["fields"] == {"key": "segments/1", "etag": "e"}
    assert run("manifest", "inspect", "clicks", "--minimal", "--from", "1").code == 2


def test_inspect_highlights_objects_that_differ(run: Run, log: LogFiles, path: Path) -> None:
    (path / "objects" / "manifest" / str(log.stream_id) / "0.mlog").unlink()
    rows = run("manifest", "inspect", "clicks", "--json").data
    assert "missing" in rows[0]["tier2"]
    assert rows[2]["tier2"] == "here"


def test_an_intact_log_is_verified(run: Run, log: LogFiles) -> None:
    for arguments in (["clicks"], [], ["--shallow"]):
        result = run("manifest", "verify", *arguments)
        assert (result.code, result.out) == (0, "1 manifest log checked: all rules hold\n")
    assert run("manifest", "verify", "--json").data == []


def test_damage_is_reported_with_its_rule_and_position(run: Run, log: LogFiles, path: Path) -> None:
    (path / "objects" / "segments" / "1").unlink()
    result = run("manifest", "verify", "clicks", "--json")
    assert result.code == 1
    assert [(row["rule"], row["where"]["segment"]) for row in result.data] == [("L7", 1)]
    chunk = Path(log.chunk(1))
    data = bytearray(chunk.read_bytes())
    data[70] ^= 1
    chunk.write_bytes(data)
    result = run("manifest", "verify")
    assert result.code == 1
    assert "L1" in result.out
    assert run("manifest", "inspect", "clicks").code == 7


def test_only_streams_have_a_manifest_log(run: Run) -> None:
    assert run("manifest", "inspect", "shop").code == 2
    assert run("manifest", "verify", "nobody").code == 3
    result = run("manifest", "inspect", "clicks")
    assert (result.code, result.out) == (0, "clicks has no manifest log on this disk\n")


def test_the_mode_of_manifest_logs_applies_to_the_whole_store_and_is_persistent(run: Run, path: Path) -> None:
    assert run("manifest", "mode", "--json").data["mode"] == "on"
    assert run("manifest", "mode", "shadow").out == "manifest logs are shadow\n"
    with quire.open(path) as store:
        assert store.stream("clicks").mode.value == "shadow"
        store.streams.switch("off")
        assert store.stream("clicks").mode.value == "off"
        assert store.stream("others", create=True).mode.value == "off"
    assert run("manifest", "mode", "--json").data == {"mode": "off", "streams": {}}
    assert run("manifest", "mode", "half").code == 2
    assert run("manifest", "mode", "on").code == 0
    with quire.open(path) as store:
        assert store.stream("clicks").mode.value == "on"


def test_a_mirror_names_the_chunk_of_the_log_that_the_bucket_lacks(run: Run, path: Path, tmp_path: Path) -> None:
    """Hazard: the command reported success, and never copied anything again."""
    copy = tmp_path / "copy"

    def upload() -> None:
        with quire.open(path) as store:
            clicks = store.stream("clicks")
            clicks.append([b"one"]).result()
            clicks.seal()
            clicks.upload()
            clicks.ledger.log.rotate()
            clicks.ledger.log.upload()

    upload()
    assert run("stream", "mirror", "clicks", str(copy), "--json").data["waiting_for"] is None
    missing = int(run("stream", "mirror", "clicks", str(copy), "--json").data["next_chunk"])
    upload()
    upload()
    (removed,) = [name for name in (path / "objects").rglob("*.mlog") if int(name.stem, 16) == missing]
    removed.unlink()
    for snapshot in (path / "objects").rglob("snapshot_*.bin"):
        snapshot.unlink()
    result = run("stream", "mirror", "clicks", str(copy))
    assert f"; waiting for chunk {missing} of the log, which the bucket lacks" in result.out
    assert run("stream", "mirror", "clicks", str(copy), "--json").data["waiting_for"] == missing


def test_a_stream_is_mirrored_from_its_object_store(run: Run, path: Path, tmp_path: Path) -> None:
    """Only a test could create a follower, and nothing fetched what it scheduled."""
    copy = tmp_path / "copy"

    def upload(*records: bytes, retention: Retention | None = None) -> None:
        with quire.open(path) as store:
            clicks = store.stream("clicks")
            if records:
                clicks.append(list(records)).result()
            clicks.seal()
            clicks.retain(retention)
            clicks.retire()
            clicks.upload()

    upload(b"one", b"two")
    assert run("stream", "mirror", "clicks", str(copy), "--json").data["fetched"] == 1
    upload(b"three")
    assert run("stream", "mirror", "clicks", str(copy)).out == "clicks: 1 segment fetched, 0 removed, 2 in the log\n"
    assert run("stream", "mirror", "clicks", str(copy), "--json").data["fetched"] == 0
    assert len(list(copy.glob("streams/*/warm/*.seg"))) == 2
    upload(retention=Retention(bytes=1))
    assert run("stream", "mirror", "clicks", str(copy), "--json").data["removed"] == 2
    assert run("stream", "mirror", "clicks", str(path)).code == 2
