"""A stream whose tier 2 is S3, over HTTP."""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.objects.open import open_store
from quire.stream.files import LogFiles
from quire.stream.mlog_follower import LogFollower
from tests.objects.conftest import fresh_url, s3_options, s3_server
from tests.stream.logs import same_state
from tests.stream.streams import SMALL, StreamWorld
from tests.stream.tiers import Flaky

__all__ = ["s3_server"]


def test_a_stream_lives_in_s3_and_a_follower_sees_it(tmp_path: Path, s3_server: tuple[str, int]) -> None:
    host, port = s3_server
    world = StreamWorld(tmp_path, settings=msgspec.structs.replace(SMALL, hot_bytes=0, warm_bytes=0))
    world.objects.close()
    world.objects = Flaky(open_store(fresh_url(), options=s3_options(f"http://{host}:{port}")))
    payloads = world.fill(3)
    assert world.stream.tick().uploaded == 3
    assert world.stream.info().hot_segments == world.stream.info().warm_segments == 0
    assert world.payloads() == payloads
    assert world.payloads(25, 27) == payloads[24:26]
    world.reopen()
    assert world.payloads() == payloads
    world.stream.tiers.retire(1)
    world.stream.upload()
    objects = world.stream.ledger.log.objects
    assert objects is not None
    follower = LogFollower(objects, LogFiles(world.disk, str(tmp_path / "mirror"), world.stream_id))
    assert [each.segment_id for each in follower.poll().hydrations] == [2, 3]
    assert same_state(follower.index, world.stream.ledger.log.index)
    world.check()
    world.close()
