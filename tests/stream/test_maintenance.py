"""Upkeep of a stream and what it tells: bases of uploads, segments that need repair, what reconciliation costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.core.errors import ObjectStoreUnavailable
from quire.stream.mlog_recovery import reconcile
from quire.stream.mlog_verify import inspect
from quire.stream.mlog_verify import verify as verify_log
from quire.stream.state import Retention
from tests.stream.streams import StreamWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[StreamWorld]:
    made = StreamWorld(tmp_path)
    yield made
    made.objects.down = False
    made.check()
    made.close()


def test_records_of_uploads_carry_the_base_of_their_segment(world: StreamWorld) -> None:
    """`logical_offset` of an upload is the base offset of the warm artifact; also of a log that catches up."""
    world.fill(2)
    world.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        world.stream.upload(2)
    world.objects.down = False
    world.stream.upload()
    world.stream.switch("off")
    world.fill(1)
    world.stream.upload()
    world.stream.evict(3)
    world.stream.switch("on")
    world.stream.ledger.log.commit()
    log = world.stream.ledger.log
    rows = [row for row in inspect(log.files, log.objects) if row.record.startswith("Upload")]
    base = {each.segment_id: each.base_record for each in world.segments()}
    assert len(rows) == 7
    assert [row.logical_offset for row in rows] == [base[row.segment_id] for row in rows]
    (evicted,) = [
        row for row in inspect(log.files, log.objects) if row.record == "LocalEvicted" and row.segment_id == 3
    ]
    assert evicted.logical_offset == world.segments()[2].durable_bytes


def test_what_needs_repair_is_in_the_log_and_retention_takes_it(world: StreamWorld) -> None:
    """It was known to one process, until that ended, and kept everything behind it from being retired, for ever."""
    world.fill(3)
    world.stream.upload()
    world.stream.evict(warm=True)
    kept = {each.key: world.objects.get(each.key) for each in world.segments()}
    for segment in world.segments()[:2]:
        world.objects.delete(segment.key)
    world.reopen()
    world.stream.tick()
    assert world.stream.info().needs_repair == [1, 2]
    assert world.stream.figures().manifest_segments_needing_repair == 2
    log = world.stream.ledger.log
    assert [each.where for each in verify_log(log.files) if each.rule == "L7"] == [{"segment": 1}, {"segment": 2}]
    log.snapshot()
    world.crash()
    assert world.stream.info().needs_repair == [1, 2], "it is in the snapshot"
    world.objects.put(world.segments()[1].key, kept[world.segments()[1].key])
    world.stream.tick()
    assert world.stream.info().needs_repair == [1], "what is there again is repaired"
    world.stream.switch("off")
    world.stream.switch("on")
    assert world.stream.ledger.log.index.needs_repair == {1}
    world.stream.retain(Retention(bytes=1))
    world.stream.tick()
    assert world.segments() == []
    assert (world.stream.info().needs_repair, world.stream.first_record) == ([], 61)


class Counting:
    """An object store whose calls are noted."""

    def __init__(self, inner: Any, asked: list[str]) -> None:
        self._inner = inner
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        return getattr(self._inner, name)


def test_what_reconciliation_costs_does_not_depend_on_the_history(world: StreamWorld) -> None:
    """It listed every object that the log ever had, and looked at every number up to the newest."""
    calls = []
    for _ in range(2):
        for _ in range(4):
            world.fill(2)
            world.stream.upload()
            world.stream.retain(Retention(bytes=1))
            for _ in range(4):
                world.clock.advance(1)
                world.stream.tick()
        objects = world.stream.ledger.log.objects
        assert objects is not None
        asked: list[str] = []
        store = Counting(world.objects, asked)
        reconcile(world.stream.ledger.log.files, msgspec.structs.replace(objects, store=store), 0)
        assert not {name for name in asked if "list" in name}
        calls.append(len(asked))
    assert calls[1] <= calls[0] + 4
