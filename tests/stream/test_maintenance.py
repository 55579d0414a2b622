"""Maintenance of a stream and its records: base offsets of uploads, segments that need repair, the cost of
reconciliation.
"""

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
from tests.stream.streams import StreamHarness


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[StreamHarness]:
    harness = StreamHarness(tmp_path)
    yield harness
    harness.objects.down = False
    harness.check()
    harness.close()


def test_records_of_uploads_carry_the_base_of_their_segment(harness: StreamHarness) -> None:
    """`logical_offset` of an upload is the base offset of the warm artifact, also in a log that catches up."""
    harness.fill(2)
    harness.objects.down = True
    with pytest.raises(ObjectStoreUnavailable):
        harness.stream.upload(2)
    harness.objects.down = False
    harness.stream.upload()
    harness.stream.switch("off")
    harness.fill(1)
    harness.stream.upload()
    harness.stream.evict(3)
    harness.stream.switch("on")
    harness.stream.ledger.log.commit()
    log = harness.stream.ledger.log
    rows = [row for row in inspect(log.files, log.objects) if row.record.startswith("Upload")]
    base = {segment.segment_id: segment.base_record for segment in harness.segments()}
    assert len(rows) == 7
    assert [row.logical_offset for row in rows] == [base[row.segment_id] for row in rows]
    (evicted,) = [
        row for row in inspect(log.files, log.objects) if row.record == "LocalEvicted" and row.segment_id == 3
    ]
    assert evicted.logical_offset == harness.segments()[2].durable_bytes


def test_segments_that_need_repair_are_logged_and_can_be_retired(harness: StreamHarness) -> None:
    """Only one process knew of it, until it ended; and it prevented all later segments from being retired, forever."""
    harness.fill(3)
    harness.stream.upload()
    harness.stream.evict(warm=True)
    bodies = {segment.key: harness.objects.get(segment.key) for segment in harness.segments()}
    for segment in harness.segments()[:2]:
        harness.objects.delete(segment.key)
    harness.reopen()
    harness.stream.tick()
    assert harness.stream.info().needs_repair == [1, 2]
    assert harness.stream.figures().manifest_segments_needing_repair == 2
    log = harness.stream.ledger.log
    assert [problem.where for problem in verify_log(log.files) if problem.rule == "L7"] == [
        {"segment": 1},
        {"segment": 2},
    ]
    log.snapshot()
    harness.crash()
    assert harness.stream.info().needs_repair == [1, 2], "it is in the snapshot"
    harness.objects.put(harness.segments()[1].key, bodies[harness.segments()[1].key])
    harness.stream.tick()
    assert harness.stream.info().needs_repair == [1], "a restored object is no longer reported"
    harness.stream.switch("off")
    harness.stream.switch("on")
    assert harness.stream.ledger.log.index.needs_repair == {1}
    harness.stream.retain(Retention(bytes=1))
    harness.stream.tick()
    assert harness.segments() == []
    assert (harness.stream.info().needs_repair, harness.stream.first_record) == ([], 61)


class Counting:
    """An object store that records its calls."""

    def __init__(self, inner: Any, calls: list[str]) -> None:
        self._inner = inner
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._inner, name)


def test_the_cost_of_reconciliation_does_not_depend_on_the_history(harness: StreamHarness) -> None:
    """It listed every object that the log ever had, and checked every number up to the newest."""
    call_counts = []
    for _ in range(2):
        for _ in range(4):
            harness.fill(2)
            harness.stream.upload()
            harness.stream.retain(Retention(bytes=1))
            for _ in range(4):
                harness.clock.advance(1)
                harness.stream.tick()
        objects = harness.stream.ledger.log.objects
        assert objects is not None
        calls: list[str] = []
        store = Counting(harness.objects, calls)
        reconcile(harness.stream.ledger.log.files, msgspec.structs.replace(objects, store=store), 0)
        assert not {name for name in calls if "list" in name}
        call_counts.append(len(calls))
    assert call_counts[1] <= call_counts[0] + 4
