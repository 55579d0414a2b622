"""A stream whose tier 2 is S3, over HTTP."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.objects.open import open_store
from quire.stream.files import LogFiles
from quire.stream.mlog_follower import LogFollower
from tests.objects.conftest import fresh_url, s3_options, s3_server
from tests.stream.logs import same_state
from tests.stream.streams import SMALL, StreamHarness
from tests.stream.tiers import FlakyStore

__all__ = ["s3_server"]


def test_a_stream_works_in_s3_and_a_follower_reads_it(tmp_path: Path, s3_server: tuple[str, int]) -> None:
    host, port = s3_server
    harness = StreamHarness(tmp_path, settings=msgspec.structs.replace(SMALL, hot_bytes=0, warm_bytes=0))
    harness.objects.close()
    harness.objects = FlakyStore(open_store(fresh_url(), options=s3_options(f"http://{host}:{port}")))
    payloads = harness.fill(3)
    assert harness.stream.tick().uploaded == 3
    assert harness.stream.info().hot_segments == harness.stream.info().warm_segments == 0
    assert harness.payloads() == payloads
    assert harness.payloads(25, 27) == payloads[24:26]
    harness.reopen()
    assert harness.payloads() == payloads
    harness.stream.tiers.retire(1)
    harness.stream.upload()
    objects = harness.stream.ledger.log.objects
    assert objects is not None
    follower = LogFollower(objects, LogFiles(harness.disk, str(tmp_path / "mirror"), harness.stream_id))
    assert [hydration.segment_id for hydration in follower.poll().hydrations] == [2, 3]
    assert same_state(follower.index, harness.stream.ledger.log.index)
    harness.check()
    harness.close()
