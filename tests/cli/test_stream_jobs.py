"""stream checkpoint, checkpoint of a stream, manifest bundle, and verify of streams."""

from __future__ import annotations

from pathlib import Path

import quire
from quire.durable.names import Tier
from tests.cli.conftest import Run


def test_a_checkpoint_of_a_stream_publishes_its_segments(run: Run) -> None:
    run("stream", "append", "clicks", "a", "b")
    run("stream", "seal", "clicks")
    result = run("stream", "checkpoint", "clicks")
    assert (result.code, result.out.startswith("clicks: 1 segment published as chunks")) == (0, True)
    run("stream", "append", "clicks", "c")
    run("stream", "seal", "clicks")
    assert run("checkpoint", "clicks", "--json").data["chunks"] == 1
    assert run("stream", "checkpoint", "clicks", "--json").data == {"bytes": 0, "chunks": 0, "missing": 0}
    assert run("stream", "checkpoint", "shop").code == 2


def test_only_old_chunks_are_bundled(run: Run) -> None:
    run("stream", "append", "clicks", "a")
    result = run("manifest", "bundle")
    assert (result.code, result.out) == (0, "0 bundles of 1 manifest log, 0 chunks retired\n")
    assert run("manifest", "bundle", "clicks", "--json").data["failed"] == []
    assert run("manifest", "bundle", "shop").code == 2
    assert run("manifest", "bundle", "--runner", "steam").code == 2


def test_verify_reads_segments_and_logs_of_streams(run: Run, path: Path) -> None:
    run("stream", "append", "clicks", "a" * 500)
    run("stream", "seal", "clicks")
    assert run("verify", "--json").data["verified"] >= 1
    with quire.open(path) as store:
        stream = store.stream("clicks")
        stream.ledger.project_now()
        hot = Path(stream.files.segment(Tier.HOT, 1))
        chunk = Path(stream.ledger.log.files.chunk(0))
    for file, field in ((hot, "damaged"), (chunk, "logs")):
        intact = file.read_bytes()
        file.write_bytes(intact[:150] + bytes([intact[150] ^ 1]) + intact[151:])
        result = run("verify", "--json")
        assert result.code == 1
        assert len(result.data[field]) >= 1
        file.write_bytes(intact)
        assert run("verify").code == 0
