"""Streams on the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import quire
from quire.durable.names import StreamSegmentFile, Tier
from tests.cli.conftest import Run


def test_append_and_read(run: Run) -> None:
    assert (
        run("stream", "append", "clicks", "ann bought", "bob left").out == "appended 2 records to clicks, from id 1\n"
    )
    assert run("stream", "append", "fresh", "x", "--create", "--json").data == {"first": 1, "count": 1}
    rows = run("stream", "read", "clicks", "--json").data
    assert [(row["id"], bytes.fromhex(row["payload"])) for row in rows] == [(1, b"ann bought"), (2, b"bob left")]
    assert [row["id"] for row in run("stream", "read", "clicks", "--from", "2", "--to", "3", "--json").data] == [2]
    assert [row["id"] for row in run("stream", "tail", "clicks", "-n", "1", "--json").data] == [2]
    assert "bob left" in run("stream", "tail", "clicks").out
    assert run("stream", "append", "shop", "x").code != 0, "shop is not a stream"


def test_binary_records_are_shown_in_hexadecimal(run: Run, path: Path) -> None:
    with quire.open(path) as store:
        store.stream("clicks").append(b"\xff\x00").result()
    assert "0xff00" in run("stream", "read", "clicks").out


def test_segments_move_between_tiers(run: Run) -> None:
    run("stream", "append", "clicks", "a", "b")
    assert run("stream", "seal", "clicks", "--json").data["sealed"] == 1
    assert run("stream", "tier", "clicks", "upload").out == "upload: 1 segment of clicks\n"
    assert run("stream", "tier", "clicks", "evict", "--warm", "--segment", "1", "--json").data["count"] == 2
    assert [row["tiers"] for row in run("stream", "ls", "clicks", "--json").data] == [["remote"]]
    assert run("stream", "tier", "clicks", "hydrate", "--json").data["count"] == 1
    assert "hot remote" in run("stream", "ls", "clicks").out
    assert run("stream", "tier", "clicks", "fly").code == 2
    info = run("stream", "info", "clicks", "--json").data
    assert (info["first_record"], info["end_record"], info["remote_segments"]) == (1, 3, 1)
    assert "2, ids 1 to 2" in run("stream", "info", "clicks").out


def test_verify_reports_damage(run: Run, path: Path) -> None:
    run("stream", "append", "clicks", "a", "b")
    assert run("stream", "verify", "clicks").out == "clicks has no damage: 1 segment read\n"
    with quire.open(path) as store:
        stream_id = store.database("clicks").db_id
    file = path / StreamSegmentFile(stream_id=stream_id, tier=Tier.HOT, segment_id=1).path
    raw = bytearray(file.read_bytes())
    raw[140] ^= 1
    file.write_bytes(raw)
    result = run("stream", "verify", "clicks", "--json")
    assert (result.code, [row["rule"] for row in result.data]) == (1, ["T1"])
    assert "damage" in run("stream", "verify", "clicks", "--shallow").out


def test_retention(run: Run) -> None:
    for _ in range(3):
        run("stream", "append", "clicks", "a")
    assert run("stream", "retention", "clicks").out == "clicks: keeps all records\n"
    assert run("stream", "retention", "clicks", "--days", "3").out == "clicks: keeps 3 days\n"
    assert run("stream", "retention", "clicks", "--bytes", "200", "--apply", "--json").data["retired"] == 2
    assert [row["id"] for row in run("stream", "read", "clicks", "--json").data] == [3]
    assert run("stream", "read", "clicks", "--from", "1").code == 4
    assert run("stream", "retention", "clicks", "--consumed").out.endswith("until every consumer has read it\n")
    assert run("stream", "retention", "clicks", "--reset").out == "clicks: keeps all records\n"


def test_a_stream_without_its_log_is_refused_and_repaired(run: Run, path: Path) -> None:
    """Opening it removed every segment, and every check reported it as valid."""
    assert run("stream", "append", "clicks", "a", "b", "c").code == 0
    shutil.rmtree(path / "streams/2/manifest")
    refused = run("stream", "read", "clicks")
    assert refused.code == 7
    assert "quire stream repair clicks" in refused.err
    assert run("ls").code == 0, "the store can be opened"
    assert run("manifest", "verify").code == 1
    whole = run("verify")
    assert whole.code == 1
    assert "the log is behind" in whole.out
    dry = run("stream", "repair", "clicks", "--json")
    assert dry.code == 0
    assert {row["kind"] for row in dry.data} == {"to do"}
    assert run("stream", "read", "clicks").code == 7, "nothing was changed"
    assert run("stream", "repair", "clicks", "--apply").code == 0
    assert [row["payload"] for row in run("stream", "read", "clicks", "--json").data] == ["61", "62", "63"]
    assert run("manifest", "verify").code == 0
    assert run("stream", "repair", "clicks").out.startswith("clicks needs no repair: 1 segment")


def test_the_exit_code_reports_what_a_repair_cannot_save(run: Run, path: Path) -> None:
    assert run("stream", "append", "clicks", "a", "b", "c").code == 0
    shutil.rmtree(path / "streams/2/manifest")
    (path / "streams/2/hot/0000000000000001.seg").unlink()
    for more in ((), ("--apply",)):
        result = run("stream", "repair", "clicks", *more)
        assert result.code == 1
        assert "records 1 to 3: segment 1 has no sound copy" in result.out
    assert run("drop", "clicks", "--yes").code == 0


def test_info_ends_with_the_last_record_after_a_takeover(run: Run, tmp_path: Path) -> None:
    """It counted the ids that the takeover has skipped: "ids 1 to 630,931,306,233" of two records."""
    first, bucket, second = tmp_path / "first", tmp_path / "bucket", tmp_path / "second"
    run("init", str(first), "--object-store", str(bucket), at=None)
    run("stream", "append", "clicks", "a", "b", "--create", at=first)
    assert run("archive", "on", at=first).code == 0
    assert run("restore-store", str(bucket), str(second), "--takeover", at=None).code == 0
    assert run("stream", "info", "clicks", at=second).out.startswith("records       2, ids 1 to 2\n")
    last = run("stream", "append", "clicks", "c", "--json", at=second).data["first"]
    assert run("stream", "info", "clicks", at=second).out.startswith(f"records       3, ids 1 to {last:,}\n")
