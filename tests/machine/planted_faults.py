"""Faults that the state machine must detect: each function changes the code for the duration of one test.

A crash test that never fails may be unable to fail (RocksDB 15168). There is a fault of every kind: a reference that is not
taken or not released; a deletion without a check for references or without the grace period; a deletion that is forgotten; a
version that changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.jobs.delete import job as delete_module
from quire.jobs.locations import ArtifactLocation
from quire.jobs.maintenance import Upkeep
from quire.manifest import check as checker
from quire.manifest.ops import databases, refs, slots, snapshots
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.overlay import Overlay
from quire.manifest.records import RefcountRecord, Residency
from quire.objects.api import list_objects
from quire.objects.local import LocalStore
from quire.objects.open import open_store
from quire.objects.remote import RemoteStore

Fault = Callable[[pytest.MonkeyPatch], None]


def do_nothing(*_: object) -> None:
    """Replaces a function: does nothing."""


# ── references ────────────────────────────────────────────────────────────────────────────────────────────────────────
def a_dropped_snapshot_keeps_its_references(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots, "release", do_nothing)


def a_fork_takes_no_reference_on_segments(patch: pytest.MonkeyPatch) -> None:
    hold: Callable[..., None] = snapshots.hold_view
    patch.setattr(snapshots, "hold_view", lambda *args: hold(*args[:2], []))


def a_dropped_database_keeps_its_segments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(databases.DropDb, "_release_wal", do_nothing)


def a_shared_leaf_is_taken_over(patch: pytest.MonkeyPatch) -> None:
    """As if nothing else referred to it."""
    original = slots.SetSlots._move_references

    def take_over(self: Any, tables: Overlay, live_leaf: Any, *rest: Any) -> None:
        key = refs.leaf_count_key(live_leaf.origin_db_id, self.leaf, live_leaf.generation)
        counts = tables.gc_refcounts.get(key)
        if counts is not None and counts.in_use > 1:
            tables.gc_refcounts.put(key, RefcountRecord(1))
        original(self, tables, live_leaf, *rest)

    patch.setattr(slots.SetSlots, "_move_references", take_over)


def a_shared_reference_is_released_twice(patch: pytest.MonkeyPatch) -> None:
    """When a database is dropped. The manifest check is disabled, so that only missing bytes reveal the fault."""

    def release_twice(tables: Overlay, key: bytes, at_ms: int) -> None:
        refs.release(tables, key, at_ms)
        row = tables.gc_refcounts.get(key)
        if row is not None and row.in_use:
            refs.release(tables, key, at_ms)

    patch.setattr(databases, "release", release_twice)
    patch.setattr(checker, "_check_holders", lambda _: iter(()))


def a_snapshot_loses_a_slot(patch: pytest.MonkeyPatch) -> None:
    """It holds one leaf less than its database, with correct counts: no rule of the manifest is broken."""
    original = snapshots.live_leaves
    patch.setattr(snapshots, "live_leaves", lambda tables, db_id: original(tables, db_id)[:1])


# ── deletions ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def bytes_are_deleted_while_needed(patch: pytest.MonkeyPatch) -> None:
    """Deletes objects that were not planned."""

    original = delete_module.delete

    def delete_everything(locations: Any, **seams: Any) -> Any:
        result = original(locations, **seams)
        for location in locations[:1]:
            store = open_store(location.url)
            store.delete_many([info.key for info in list_objects(store)])
        return result

    patch.setattr(delete_module, "delete", delete_everything)


def bytes_are_deleted_without_grace(patch: pytest.MonkeyPatch) -> None:
    """Every artifact is recorded as unreferenced since time 0, so that there is no grace period."""
    original: Callable[..., None] = refs._put_count
    patch.setattr(refs, "_put_count", lambda *args: original(*args[:4], 0))


def objects_are_not_deleted(patch: pytest.MonkeyPatch) -> None:
    """The rows are deleted, the objects remain."""
    patch.setattr(LocalStore, "delete_many", do_nothing)
    patch.setattr(RemoteStore, "delete_many", do_nothing)


def only_files_are_deleted(patch: pytest.MonkeyPatch) -> None:
    """Of artifacts that have a file and an object, only the file is deleted."""
    remote_only = (Residency.REMOTE_ARCHIVED, Residency.EVICTED)
    patch.setattr(ArtifactLocation, "may_have_remote", property(lambda self: self.residency in remote_only))


def abandoned_chunks_are_not_deleted(patch: pytest.MonkeyPatch) -> None:
    """Chunks of abandoned checkpoints of a dropped database are never deleted."""
    patch.setattr(delete_module, "_orphans", lambda *_: iter(()))


def origin_databases_get_no_job(patch: pytest.MonkeyPatch) -> None:
    """A released leaf leaves work for the delete job of the database that created it. That job is not enqueued, and
    maintenance does not look for such work."""
    patch.setattr(delete_module, "next_origins", lambda *args: {args[-1]})
    patch.setattr(Upkeep, "_deletions", do_nothing)


def nothing_is_enqueued(patch: pytest.MonkeyPatch) -> None:
    """No delete job is ever created."""
    patch.setattr(EnsureJob, "apply", do_nothing)


QUICK: tuple[Fault, ...] = (
    a_dropped_snapshot_keeps_its_references,
    a_fork_takes_no_reference_on_segments,
    a_dropped_database_keeps_its_segments,
    a_shared_leaf_is_taken_over,
    bytes_are_deleted_without_grace,
    objects_are_not_deleted,
    only_files_are_deleted,
    abandoned_chunks_are_not_deleted,
    nothing_is_enqueued,
)
"""Detected within a few examples."""

HIDDEN: tuple[Fault, ...] = (
    a_shared_reference_is_released_twice,
    a_snapshot_loses_a_slot,
    bytes_are_deleted_while_needed,
    origin_databases_get_no_job,
)
