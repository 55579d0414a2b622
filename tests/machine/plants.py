"""Faults for the machine to find: each changes the code for the length of one test.

A crash test that never fails may be one that cannot (RocksDB 15168). They are of every sort: a reference that is not taken, or
not given back; a deletion that does not ask, or asks no clock; one that is forgotten; a version that is not kept.
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

Plant = Callable[[pytest.MonkeyPatch], None]


def nothing(*_: object) -> None:
    """Is what is done instead."""


# ── references ────────────────────────────────────────────────────────────────────────────────────────────────────────
def a_dropped_snapshot_keeps_its_references(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots, "release", nothing)


def a_fork_takes_no_reference_on_segments(patch: pytest.MonkeyPatch) -> None:
    hold: Callable[..., None] = snapshots.hold_view
    patch.setattr(snapshots, "hold_view", lambda *given: hold(*given[:2], []))


def a_dropped_database_keeps_its_segments(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(databases.DropDb, "_release_wal", nothing)


def a_shared_leaf_is_taken_over(patch: pytest.MonkeyPatch) -> None:
    """As if nobody else held it."""
    move = slots.SetSlots._move_references

    def moving(self: Any, tables: Overlay, held: Any, *rest: Any) -> None:
        key = refs.leaf_count_key(held.origin_db_id, self.leaf, held.generation)
        counts = tables.gc_refcounts.get(key)
        if counts is not None and counts.in_use > 1:
            tables.gc_refcounts.put(key, RefcountRecord(1))
        move(self, tables, held, *rest)

    patch.setattr(slots.SetSlots, "_move_references", moving)


def what_is_shared_is_let_go_twice(patch: pytest.MonkeyPatch) -> None:
    """By a database that is dropped; and the checker looks away, so that only the bytes tell."""

    def releasing(tables: Overlay, key: bytes, at_ms: int) -> None:
        refs.release(tables, key, at_ms)
        row = tables.gc_refcounts.get(key)
        if row is not None and row.in_use:
            refs.release(tables, key, at_ms)

    patch.setattr(databases, "release", releasing)
    patch.setattr(checker, "_check_holders", lambda _: iter(()))


def a_snapshot_loses_a_slot(patch: pytest.MonkeyPatch) -> None:
    """It holds one leaf less than its database, and counts what it holds: no rule of the manifest is broken."""
    read = snapshots.live_leaves
    patch.setattr(snapshots, "live_leaves", lambda tables, db_id: read(tables, db_id)[:1])


# ── deletions ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def bytes_go_whoever_needs_them(patch: pytest.MonkeyPatch) -> None:
    """Objects that were not planned."""

    delete = delete_module.delete

    def deleting(places: Any, **seams: Any) -> Any:
        done = delete(places, **seams)
        for place in places[:1]:
            store = open_store(place.url)
            store.delete_many([info.key for info in list_objects(store)])
        return done

    patch.setattr(delete_module, "delete", deleting)


def bytes_go_at_once(patch: pytest.MonkeyPatch) -> None:
    """Everything is at zero since the beginning of time: no grace."""
    put: Callable[..., None] = refs._put_count
    patch.setattr(refs, "_put_count", lambda *given: put(*given[:4], 0))


def objects_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The rows go, the objects stay."""
    patch.setattr(LocalStore, "delete_many", nothing)
    patch.setattr(RemoteStore, "delete_many", nothing)


def only_files_go(patch: pytest.MonkeyPatch) -> None:
    """Of what has a file and an object."""
    alone = (Residency.REMOTE_ARCHIVED, Residency.EVICTED)
    patch.setattr(ArtifactLocation, "may_have_remote", property(lambda self: self.residency in alone))


def abandoned_chunks_stay(patch: pytest.MonkeyPatch) -> None:
    """Of a dropped database."""
    patch.setattr(delete_module, "_orphans", lambda *_: iter(()))


def other_databases_are_not_told(patch: pytest.MonkeyPatch) -> None:
    """What a leaf let go is work for the job of whoever made it; and nobody looks for work without a job."""
    patch.setattr(delete_module, "next_origins", lambda *given: {given[-1]})
    patch.setattr(Upkeep, "_deletions", nothing)


def nothing_is_enqueued(patch: pytest.MonkeyPatch) -> None:
    """No delete job is ever made."""
    patch.setattr(EnsureJob, "apply", nothing)


QUICK: tuple[Plant, ...] = (
    a_dropped_snapshot_keeps_its_references,
    a_fork_takes_no_reference_on_segments,
    a_dropped_database_keeps_its_segments,
    a_shared_leaf_is_taken_over,
    bytes_go_at_once,
    objects_are_forgotten,
    only_files_go,
    abandoned_chunks_stay,
    nothing_is_enqueued,
)
"""Found within a few examples."""

HIDDEN: tuple[Plant, ...] = (
    what_is_shared_is_let_go_twice,
    a_snapshot_loses_a_slot,
    bytes_go_whoever_needs_them,
    other_databases_are_not_told,
)
