"""What a checkpoint says: events after their commit, its uploads in the audit, the index and the segments in rows and feed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from quire.core.errors import StoreClosed
from quire.durable.failpoints import armed
from quire.durable.names import WalSegmentFile
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.ops.base import Component
from quire.manifest.ops.pageindex import DropPageVersions
from quire.manifest.records import AuditAction, JobKind, WalState
from quire.pages.wal_files import segment_crc
from tests.jobs.checkpoint_child import Owner
from tests.pages.test_wal import index
from tests.pages.world import Model, image, write


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    yield made
    made.stop()


def segments(owner: Owner) -> dict[int, Any]:
    with owner.manifest.read() as txn:
        return {key[1]: row for key, row in txn.scan(t.WAL_CATALOG, 1)}


def test_a_segment_is_said_to_be_absorbed_or_truncated_once_that_is_committed(owner: Owner) -> None:
    write(owner.database(), Model(), {page: image() for page in range(5)})
    owner.ask()
    with capture_logs() as logs:

        def told(_: str = "") -> list[str]:
            events = [each["event"] for each in logs]
            return [each for each in events if each in ("wal.checkpointed", "wal.truncated")]

        before: list[list[str]] = []
        with armed("jobs.worker.worked", lambda _: before.append(told())):
            owner.worker().drain()
    structlog.reset_defaults()
    assert before[:2] == [[], ["wal.checkpointed"]], "the end of each job was not committed yet"
    assert told() == ["wal.checkpointed", "wal.truncated"]


def test_what_a_checkpoint_uploads_is_in_the_audit_with_its_generation(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, {page: image() for page in range(20)})
    owner.checkpoint(store)
    write(store, model, {0: image()})
    owner.checkpoint(store)
    with owner.manifest.read() as txn:
        objects = txn.count(t.CHUNK_CATALOG) + txn.count(t.CHUNK_DELTA_INDEX)
    uploads = [each for each in owner.manifest.audit(1) if each.action is AuditAction.UPLOADED]
    assert len(uploads) == objects > 2
    assert all(each.subject and each.size_bytes and each.generation for each in uploads)
    assert {each.component for each in uploads} == {Component.CHUNK}


def test_page_index_rows_are_counted_between_checkpoint_and_truncation(owner: Owner) -> None:
    write(owner.database(), Model(), {page: image() for page in range(5)})
    owner.ask()
    owner.worker(JobKind.CHECKPOINT).drain()
    assert [row.state for row in segments(owner).values()] == [WalState.CHECKPOINTED]
    assert owner.engine.figures().databases[0].page_index_rows == len(index(owner)) == 5
    owner.worker().drain()
    assert owner.engine.figures().databases[0].page_index_rows == len(index(owner)) == 0


def test_rows_that_leave_the_page_index_are_changes_of_its_own_component(owner: Owner) -> None:
    write(owner.database(), Model(), {page: image() for page in range(5)})
    owner.checkpoint(owner.database())
    with owner.manifest.read() as txn:
        changes = [record for _, record in txn.scan(CHANGE_LOG)]
    dropped = [each for each in changes if any(isinstance(op, DropPageVersions) for op in each.operations)]
    assert dropped
    assert all(Component.PAGE_INDEX in dict(each.generation_updates) for each in dropped)


@pytest.mark.parametrize("recovered", [False, True])
def test_a_sealed_segment_has_its_checksum_its_pages_and_its_generation(owner: Owner, recovered: bool) -> None:
    store, model = owner.database(), Model()
    write(store, model, {page: image() for page in range(9)})
    owner.checkpoint(store)
    write(store, model, {3: image(), 7: image()})
    if recovered:
        store.wal.abandon(StoreClosed("as if the process had ended"))
        owner.database()
    else:
        owner.engine.flush(1)
    with owner.manifest.read() as txn:
        wal = txn.wal_state(1)
        order = [key[1:] for key, _ in txn.scan(t.WAL_MANIFEST, 1)]
    (segment_id, row) = max(segments(owner).items())
    assert (row.first_page, row.last_page) == (3, 7)
    path = os.path.join(owner.root, WalSegmentFile(db_id=1, segment_id=segment_id).path)
    assert row.crc64 == segment_crc(owner.disk, path, row.used_bytes) != 0
    assert wal is not None
    assert wal.last_checkpoint_generation > 0
    assert order == [(wal.last_checkpoint_generation, segment_id)], "it lies over that checkpoint"
