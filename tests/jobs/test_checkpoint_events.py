"""What a checkpoint reports: events after their commit, its uploads in the audit log, the page index and segments in
rows and feed."""

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
from tests.pages.engine_harness import Model, image, write
from tests.pages.test_wal import index


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path)
    yield owner
    owner.stop()


def segments(owner: Owner) -> dict[int, Any]:
    with owner.manifest.read() as txn:
        return {key[1]: row for key, row in txn.scan(t.WAL_CATALOG, 1)}


def test_absorption_and_truncation_of_a_segment_are_logged_after_their_commit(owner: Owner) -> None:
    write(owner.database(), Model(), {page: image() for page in range(5)})
    owner.enqueue()
    with capture_logs() as logs:

        def segment_events(_: str = "") -> list[str]:
            events = [entry["event"] for entry in logs]
            return [event for event in events if event in ("wal.checkpointed", "wal.truncated")]

        events_before: list[list[str]] = []
        with armed("jobs.worker.worked", lambda _: events_before.append(segment_events())):
            owner.worker().drain()
    structlog.reset_defaults()
    assert events_before[:2] == [[], ["wal.checkpointed"]], "an event was logged before its job's commit"
    assert segment_events() == ["wal.checkpointed", "wal.truncated"]


def test_uploads_of_a_checkpoint_are_in_the_audit_with_their_generation(owner: Owner) -> None:
    store, model = owner.database(), Model()
    write(store, model, {page: image() for page in range(20)})
    owner.checkpoint(store)
    write(store, model, {0: image()})
    owner.checkpoint(store)
    with owner.manifest.read() as txn:
        objects = txn.count(t.CHUNK_CATALOG) + txn.count(t.CHUNK_DELTA_INDEX)
    uploads = [entry for entry in owner.manifest.audit(1) if entry.action is AuditAction.UPLOADED]
    assert len(uploads) == objects > 2
    assert all(entry.subject and entry.size_bytes and entry.generation for entry in uploads)
    assert {entry.component for entry in uploads} == {Component.CHUNK}


def test_page_index_rows_are_counted_between_checkpoint_and_truncation(owner: Owner) -> None:
    write(owner.database(), Model(), {page: image() for page in range(5)})
    owner.enqueue()
    owner.worker(JobKind.CHECKPOINT).drain()
    assert [row.state for row in segments(owner).values()] == [WalState.CHECKPOINTED]
    assert owner.engine.figures().databases[0].page_index_rows == len(index(owner)) == 5
    owner.worker().drain()
    assert owner.engine.figures().databases[0].page_index_rows == len(index(owner)) == 0


def test_removed_page_index_rows_are_changes_of_the_page_index_component(owner: Owner) -> None:
    write(owner.database(), Model(), {page: image() for page in range(5)})
    owner.checkpoint(owner.database())
    with owner.manifest.read() as txn:
        changes = [record for _, record in txn.scan(CHANGE_LOG)]
    dropped = [record for record in changes if any(isinstance(op, DropPageVersions) for op in record.operations)]
    assert dropped
    assert all(Component.PAGE_INDEX in dict(record.generation_updates) for record in dropped)


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
    assert order == [(wal.last_checkpoint_generation, segment_id)], "it follows that checkpoint"
