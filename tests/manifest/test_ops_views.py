"""Chunks, slots, snapshots, forks, and the reference counts that they change."""

from __future__ import annotations

import itertools
import os
import threading
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from quire.core.errors import (
    AlreadyExists,
    ArtifactGone,
    InvalidInput,
    ManifestDamaged,
    NameTaken,
    OutOfRange,
    RefcountUnderflow,
    StalePlan,
    StillReferenced,
    UnknownArtifact,
    UnknownSnapshot,
    WrongKind,
)
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.env import ManifestEnv
from quire.manifest.ops.artifacts import PutDelta, UpdateArtifact
from quire.manifest.ops.base import Op
from quire.manifest.ops.databases import DropDb, RemoveDb, ReserveGeneration
from quire.manifest.ops.pageindex import ROW, VERSION_NAME, DropPageVersions, PublishPages
from quire.manifest.ops.refs import RemoveArtifact, artifact_key, end_upload, release
from quire.manifest.ops.slots import CollectLeaf, SetSlots
from quire.manifest.ops.snapshots import DropSnapshot, ForkDb, PublishSnapshot
from quire.manifest.ops.wal import AppendWalChunk, MoveWalState
from quire.manifest.overlay import Overlay
from quire.manifest.records import DbKind, DeltaRecord, Pin, Residency, SnapshotKind, VerifyState, WalState
from quire.manifest.slots import Link, pack_leaf
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean
from tests.manifest.helpers import anchor, assert_rejected, checkpoint, chunk, collect, commit, counts, register

BASE, DELTA, LEAF, WAL = ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.LEAF, ArtifactKind.WAL


def named(manifest: ManifestStore, db_id: int, snapshot_id: int, name: str, pins: list[Pin] | None = None) -> Op:
    return PublishSnapshot(db_id, snapshot_id, SnapshotKind.NAMED, name, anchor(manifest, db_id), pins=pins or [])


# ── chunks and deltas ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_chunk_is_written_once(manifest: ManifestStore) -> None:
    commit(manifest, register(1), chunk(1))
    commit(manifest, chunk(1))
    assert_rejected(manifest, AlreadyExists, chunk(1, size=11))


def test_a_delta_needs_its_base(manifest: ManifestStore) -> None:
    commit(manifest, register(1), chunk(1, generation=1))
    delta = DeltaRecord(1, Residency.LOCAL, 5, 0)
    assert_rejected(manifest, UnknownArtifact, PutDelta(1, 2, 2, 1, 1, delta))
    assert_rejected(manifest, UnknownArtifact, PutDelta(1, 1, 2, 1, 2, delta))
    assert_rejected(manifest, UnknownArtifact, PutDelta(1, 1, 2, 1, 1, DeltaRecord(9, Residency.LOCAL, 5, 0)))
    commit(manifest, PutDelta(1, 1, 2, 1, 1, delta))
    commit(manifest, PutDelta(1, 1, 2, 1, 1, delta))
    assert_rejected(manifest, AlreadyExists, PutDelta(1, 1, 2, 1, 1, DeltaRecord(1, Residency.LOCAL, 6, 0)))
    assert_rejected(manifest, OutOfRange, PutDelta(1, 1, 2, 0, 1, delta))


def test_an_update_of_an_artifact_changes_its_only_row(manifest: ManifestStore) -> None:
    commit(manifest, register(1), chunk(1))
    update = UpdateArtifact(1, BASE, 1, 1, residency=Residency.LOCAL_AND_REMOTE, verify_state=VerifyState.VERIFIED)
    commit(manifest, update)
    with manifest.read() as txn:
        row = txn.get(t.CHUNK_CATALOG, 1, 1, 1)
        assert row is not None
        assert (row.residency, row.verify_state, row.size_bytes) == (update.residency, update.verify_state, 10)
    assert_rejected(manifest, UnknownArtifact, UpdateArtifact(1, BASE, 9, 1))
    assert_rejected(manifest, InvalidInput, UpdateArtifact(1, LEAF, 1, 1))


def test_an_inherited_segment_is_updated_only_at_its_origin(manifest: ManifestStore) -> None:
    """Hazard: residency and namespace are stored once (M6); a copy in a fork would not be counted."""
    namespace_id = manifest.put_namespace("memory://")
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    commit(manifest, ForkDb(2, 1, "fork", 0, 5, 1, 1, [Pin(1, 1, 5)]))
    assert_rejected(manifest, UnknownArtifact, UpdateArtifact(2, WAL, 1, 0, namespace_id=namespace_id))
    commit(manifest, UpdateArtifact(1, WAL, 1, 0, namespace_id=namespace_id))


# ── slots ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def slots(db_id: int, generation: int, expected: tuple[int, int], chain: list[Link], leaf: int = 0) -> SetSlots:
    return SetSlots(db_id, leaf, generation, *expected, pack_leaf({1: tuple(chain)}))


def test_slots_are_set_only_on_the_planned_state(manifest: ManifestStore) -> None:
    commit(manifest, register(1), ReserveGeneration(1, 1), ReserveGeneration(1, 2), chunk(1, generation=1))
    base = Link(BASE, 1, 1, 5)
    assert_rejected(manifest, StalePlan, slots(1, 3, (0, 0), [base]))
    assert_rejected(manifest, StalePlan, slots(1, 0, (0, 0), [base]))
    assert_rejected(manifest, StalePlan, slots(1, 1, (1, 1), [base]))
    assert_rejected(manifest, UnknownArtifact, slots(1, 1, (0, 0), [Link(BASE, 1, 2, 5)]))
    assert_rejected(manifest, InvalidInput, slots(1, 1, (0, 0), [Link(DELTA, 1, 1, 5, 1)]))
    assert_rejected(manifest, OutOfRange, slots(1, 1, (0, 0), [base], leaf=2**24))
    commit(manifest, slots(1, 1, (0, 0), [base]))
    assert_rejected(manifest, StalePlan, slots(1, 2, (0, 0), [base]))
    assert_rejected(manifest, AlreadyExists, slots(1, 1, (1, 1), [base]))
    assert_rejected(manifest, ManifestDamaged, SetSlots(1, 0, 2, 1, 1, b"odd"))


def test_a_leaf_with_one_holder_passes_its_references_to_its_successor(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    checkpoint(manifest, 1, 0, 1)
    second = checkpoint(manifest, 1, 1)
    rows = counts(manifest)
    assert {key: value for key, value in rows.items() if key.kind is LEAF} == {ArtifactKey(1, LEAF, 0, second): (1, 0)}
    assert rows[ArtifactKey(1, BASE, 0, 1)] == (1, 0)
    assert rows[ArtifactKey(1, BASE, 1, 1)] == (0, 0), "replaced and not referenced"
    assert rows[ArtifactKey(1, BASE, 1, second)] == (1, 0)


def test_a_shared_leaf_stays_and_the_new_one_takes_references_once(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    first = checkpoint(manifest, 1, 0, 1)
    commit(manifest, named(manifest, 1, 1, "s"))
    second = checkpoint(manifest, 1, 1)
    assert counts(manifest)[ArtifactKey(1, BASE, 0, first)] == (2, 0), "referenced by both leaves"
    third = checkpoint(manifest, 1, 1)
    rows = counts(manifest)
    assert rows[ArtifactKey(1, BASE, 0, first)] == (2, 0), "the leaf diverged once and is counted once"
    assert rows[ArtifactKey(1, LEAF, 0, first)] == (1, 0)
    assert ArtifactKey(1, LEAF, 0, second) not in rows
    assert rows[ArtifactKey(1, LEAF, 0, third)] == (1, 0)


def test_clearing_slots_releases_their_chains(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    first = checkpoint(manifest, 1, 0, 1)
    generation = manifest.reserve_generation(1)
    commit(manifest, SetSlots(1, 0, generation, 1, first, b"", bytes([0, 1])))
    assert set(counts(manifest, BASE).values()) == {(0, 0)}
    with manifest.read() as txn:
        assert txn.chain(1, 0) == ()
    collect(manifest)
    assert counts(manifest) == {ArtifactKey(1, LEAF, 0, generation): (1, 0)}


def test_deltas_lengthen_a_chain_and_hold_their_base(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    first = checkpoint(manifest, 1, 7)
    second = checkpoint(manifest, 1, 7, delta=True)
    with manifest.read() as txn:
        assert [link.kind for link in txn.chain(1, 7)] == [BASE, DELTA]
    assert counts(manifest)[ArtifactKey(1, BASE, 7, first)] == (1, 0)
    assert counts(manifest)[ArtifactKey(1, DELTA, 7, second, 1)] == (1, 0)
    checkpoint(manifest, 1, 7)
    collect(manifest)
    assert len(counts(manifest, BASE)) == 1
    assert counts(manifest, DELTA) == {}


def test_a_count_that_reached_zero_never_rises_again(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    first = checkpoint(manifest, 1, 1)
    live = checkpoint(manifest, 1, 1)
    generation = manifest.reserve_generation(1)
    assert_rejected(manifest, ArtifactGone, slots(1, generation, (1, live), [Link(BASE, 1, first, 9)]))


def test_only_artifacts_at_zero_are_removed(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    live = checkpoint(manifest, 1, 1)
    assert_rejected(manifest, StillReferenced, RemoveArtifact(1, BASE, 1, live))
    assert_rejected(manifest, StillReferenced, CollectLeaf(1, 0, live))
    assert_rejected(manifest, UnknownArtifact, RemoveArtifact(1, BASE, 2, live))
    assert_rejected(manifest, UnknownArtifact, CollectLeaf(1, 5, live))
    commit(manifest, named(manifest, 1, 1, "s"))
    checkpoint(manifest, 1, 1)
    commit(manifest, DropSnapshot(1, 1))
    assert_rejected(manifest, StillReferenced, RemoveArtifact(1, LEAF, 0, live))
    commit(manifest, CollectLeaf(1, 0, live))
    commit(manifest, RemoveArtifact(1, BASE, 1, live))
    assert_rejected(manifest, UnknownArtifact, RemoveArtifact(1, BASE, 1, live))


@pytest.fixture
def overlay(manifest: ManifestStore) -> Overlay:
    """The tables as an operation sees them, in a transaction that is never committed."""
    overlay = Overlay(manifest.env.handles)
    env: ManifestEnv = manifest.env
    overlay.begin(env._env.begin(write=True))
    return overlay


def test_a_count_never_falls_below_zero(manifest: ManifestStore, overlay: Overlay) -> None:
    try:
        key = artifact_key(ArtifactKey(1, BASE, 1, 1))
        with pytest.raises(RefcountUnderflow):
            release(overlay, key, 1)
        with pytest.raises(RefcountUnderflow):
            end_upload(overlay, key, 1)
        overlay.gc_refcounts.put(key, t.GC_REFCOUNTS.codec.record_type(1, 0))
        with pytest.raises(RefcountUnderflow):
            release(overlay, key, 1, count=2)
        release(overlay, key, 1)
        with pytest.raises(RefcountUnderflow):
            release(overlay, key, 1)
    finally:
        overlay.txn.abort()


# ── snapshots and forks ───────────────────────────────────────────────────────────────────────────────────────────────
def test_a_snapshot_has_its_own_id_and_name(manifest: ManifestStore) -> None:
    commit(manifest, register(1), register(2))
    commit(manifest, named(manifest, 1, 1, "s"))
    assert_rejected(manifest, AlreadyExists, named(manifest, 1, 1, "other"))
    assert_rejected(manifest, NameTaken, named(manifest, 1, 2, "s"))
    assert_rejected(manifest, OutOfRange, named(manifest, 1, 0, "zero"))
    commit(manifest, named(manifest, 2, 1, "s"))
    commit(manifest, DropSnapshot(1, 1))
    assert_rejected(manifest, UnknownSnapshot, DropSnapshot(1, 1))
    assert_rejected(manifest, AlreadyExists, named(manifest, 1, 1, "s"))
    commit(manifest, named(manifest, 1, 2, "s"))


def test_a_snapshot_below_a_checkpoint_is_rejected(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    checkpoint(manifest, 1, 1)
    assert_rejected(manifest, StalePlan, PublishSnapshot(1, 1, SnapshotKind.NAMED, "s", 0))
    assert_rejected(manifest, StalePlan, ForkDb(2, 1, "fork", 0, 0))


def test_a_pin_must_name_a_segment_at_its_origin(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    commit(manifest, ForkDb(2, 1, "fork", 0, 5, 1, 1, [Pin(1, 1, 5)]))
    assert_rejected(manifest, UnknownArtifact, named(manifest, 1, 1, "s", [Pin(1, 9, 5)]))
    assert_rejected(manifest, UnknownArtifact, named(manifest, 2, 1, "s", [Pin(2, 1, 5)]))


def test_a_segment_is_pinned_once_per_view(manifest: ManifestStore) -> None:
    """Hazard: a fork has one row per segment; a segment pinned twice would be counted twice and released once."""
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    assert_rejected(manifest, InvalidInput, ForkDb(2, 1, "fork", 0, 5, 1, 1, [Pin(1, 1, 5), Pin(1, 1, 4)]))


def test_only_page_databases_fork(manifest: ManifestStore) -> None:
    commit(manifest, register(1, kind=DbKind.STREAM))
    assert_rejected(manifest, WrongKind, ForkDb(2, 1, "fork"))
    assert_rejected(manifest, OutOfRange, register(3), ForkDb(0, 3, "fork"))
    assert_rejected(manifest, UnknownSnapshot, register(3), ForkDb(4, 3, "fork", 5))


def test_a_fork_refers_to_its_initial_version_and_continues_the_numbering(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AppendWalChunk(1, 0, 3, 1, 1, 5, 100))
    first = checkpoint(manifest, 1, 0)
    lsn = anchor(manifest, 1)
    commit(manifest, named(manifest, 1, 1, "s", [Pin(1, 3, 5, 100)]))
    commit(manifest, ForkDb(2, 1, "fork", snapshot_id=1))
    rows = counts(manifest)
    assert rows[ArtifactKey(1, LEAF, 0, first)] == (3, 0), "database, snapshot, fork"
    assert rows[ArtifactKey(1, WAL, 3, 0)] == (3, 0)
    with manifest.read() as txn:
        child, wal = txn.database(2), txn.wal_state(2)
        assert child is not None
        assert wal is not None
        assert (child.parent_db_id, child.parent_snapshot_id, child.parent_lsn) == (1, 1, lsn)
        assert child.next_generation > first
        assert (wal.next_segment_id, wal.lsn_reserved) == (4, lsn)
        assert txn.chain(2, 0) == txn.chain(1, 0)
        inherited = txn.get(t.WAL_CATALOG, 2, 3)
        assert inherited is not None
        assert (inherited.origin_db_id, inherited.state) == (1, WalState.INDEXED)
    assert_rejected(manifest, AlreadyExists, chunk(0, size=77, db_id=1, generation=first))


def test_truncation_does_not_affect_snapshots_and_forks(manifest: ManifestStore) -> None:
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    commit(manifest, named(manifest, 1, 1, "s", [Pin(1, 1, 5, 100)]))
    commit(manifest, ForkDb(2, 1, "fork", snapshot_id=1))
    for state in (WalState.INDEXED, WalState.CHECKPOINT_READY, WalState.CHECKPOINTED, WalState.TRUNCATED):
        commit(manifest, MoveWalState(1, 1, state))
    key = ArtifactKey(1, WAL, 1, 0)
    assert counts(manifest)[key] == (2, 0)
    assert_rejected(manifest, StillReferenced, RemoveArtifact(1, WAL, 1, 0))
    commit(manifest, DropSnapshot(1, 1), DropDb(2))
    assert counts(manifest)[key] == (0, 0)
    assert_rejected(manifest, ArtifactGone, PublishSnapshot(1, 2, SnapshotKind.ANONYMOUS, "", 5, pins=[Pin(1, 1, 5)]))
    commit(manifest, RemoveArtifact(1, WAL, 1, 0), RemoveDb(2))


def _database_fork_and_snapshots(manifest: ManifestStore) -> dict[str, list[Op]]:
    """Create a database, its snapshot, a fork of that and a snapshot of the fork; returns the operations that drop
    each."""
    commit(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    checkpoint(manifest, 1, 0, 300)
    commit(manifest, named(manifest, 1, 1, "s", [Pin(1, 1, 5)]))
    commit(manifest, ForkDb(2, 1, "fork", snapshot_id=1))
    checkpoint(manifest, 2, 0)
    commit(manifest, named(manifest, 2, 1, "t"))
    checkpoint(manifest, 1, 300, delta=True)
    return {"snapshot": [DropSnapshot(1, 1)], "fork's": [DropSnapshot(2, 1)], "one": [DropDb(1)], "two": [DropDb(2)]}


ORDERS = [
    order
    for order in itertools.permutations(["snapshot", "fork's", "one", "two"])
    if order.index("snapshot") < order.index("one") and order.index("fork's") < order.index("two")
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("collect_each_time", [True, False], ids=["collecting", "at the end"])
def test_a_database_its_fork_and_their_snapshots_can_be_dropped_in_any_order(
    manifest: ManifestStore, order: tuple[str, ...], collect_each_time: bool
) -> None:
    drops = _database_fork_and_snapshots(manifest)
    for name in order:
        commit(manifest, *drops[name])
        assert_clean(manifest)
        if collect_each_time:
            collect(manifest)
            assert_clean(manifest)
    collect(manifest)
    commit(manifest, RemoveDb(1), RemoveDb(2))
    with manifest.read() as txn:
        for table in (
            t.DB,
            t.GC_REFCOUNTS,
            t.GC_ZERO,
            t.SLOT_LEAF,
            t.CHUNK_CATALOG,
            t.CHUNK_DELTA_INDEX,
            t.WAL_CATALOG,
        ):
            assert txn.count(table) == 0, table


# ── page versions ─────────────────────────────────────────────────────────────────────────────────────────────────────
def version(page: int, lsn: int) -> bytes:
    return ROW.pack(page, 0, lsn, 0, 7, 3, 1, 0, 0)


def head(manifest: ManifestStore, page: int) -> int | None:
    with manifest.read() as txn:
        row = txn.get(t.PAGE_VERSION_HEAD, 1, page)
    return row.lsn if row else None


def test_a_pages_head_is_its_newest_version(manifest: ManifestStore) -> None:
    commit(manifest, register(1), PublishPages(1, version(1, 5) + version(2, 9) + version(1, 3)))
    assert (head(manifest, 1), head(manifest, 2)) == (5, 9)
    commit(manifest, PublishPages(1, version(1, 4)))
    assert head(manifest, 1) == 5
    commit(manifest, DropPageVersions(1, VERSION_NAME.pack(1, 5)))
    assert head(manifest, 1) == 4
    commit(manifest, DropPageVersions(1, VERSION_NAME.pack(1, 3)))
    assert head(manifest, 1) == 4
    commit(manifest, DropPageVersions(1, VERSION_NAME.pack(1, 4)))
    assert head(manifest, 1) is None


@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3)), max_size=12), max_size=5
    ),
    invalid=st.sets(st.integers(0, 4), max_size=2),
)
def test_publishing_many_rows_at_once_equals_publishing_them_one_by_one(
    batches: list[list[tuple[int, int, int]]], invalid: set[int]
) -> None:
    """Also with duplicate rows, with heads that exist already, and in a group with batches that fail."""
    index: dict[tuple[int, int], tuple[int, ...]] = {}
    heads: dict[int, tuple[int, int]] = {}
    with TemporaryDirectory() as folder, ManifestStore.open(os.path.join(folder, "m")) as manifest:
        commit(manifest, register(1))
        all_submitted = threading.Event()

        def hold(_: str) -> None:
            assert all_submitted.wait(30)

        with armed("manifest.commit.durable", hold):
            guards = [manifest.submit([PublishPages(1, b"")])]  # while it waits, the others form one group
            for number, rows in enumerate(batches):
                packed = b"".join(
                    ROW.pack(page, lsn + 7, lsn, lsn - 1, frame, segment, 1, lsn % 2, 0)
                    for frame, (page, lsn, segment) in enumerate(rows)
                )
                ops: list[Op] = [PublishPages(1, packed)]
                guards.append(manifest.submit([*ops, PublishPages(1, b"?")] if number in invalid else ops))
            all_submitted.set()
            guards.pop(0).result()
        for number, (guard, rows) in enumerate(zip(guards, batches, strict=True)):
            if number in invalid:
                with pytest.raises(InvalidInput):
                    guard.result()
                continue
            guard.result()
            for frame, (page, lsn, segment) in enumerate(rows):
                index[page, lsn] = (1, segment, lsn + 7, lsn % 2, lsn - 1, frame)
            newest: dict[int, tuple[int, int]] = {}
            for page, lsn, segment in rows:
                if page not in newest or newest[page][0] < lsn:
                    newest[page] = (lsn, segment)
            for page, (lsn, segment) in newest.items():
                if page not in heads or heads[page][0] <= lsn:
                    heads[page] = (lsn, segment)
        with manifest.read() as txn:
            actual = {key[1:]: astuple(row) for key, row in txn.scan(t.PAGE_VERSION_INDEX, 1)}
            actual_heads = {key[1]: astuple(row) for key, row in txn.scan(t.PAGE_VERSION_HEAD, 1)}
        assert actual == index
        assert actual_heads == {page: (*newest_version, 1) for page, newest_version in heads.items()}


def test_a_batch_reads_the_page_rows_that_it_has_just_published(manifest: ManifestStore) -> None:
    """Rows that wait for the commit as bytes are found, scanned and removed like any others."""
    commit(
        manifest,
        register(1),
        PublishPages(1, version(1, 5) + version(1, 7) + version(2, 6)),
        DropPageVersions(1, VERSION_NAME.pack(1, 7) + VERSION_NAME.pack(2, 6)),
    )
    assert (head(manifest, 1), head(manifest, 2)) == (5, None)


def test_page_rows_must_be_complete(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    assert_rejected(manifest, InvalidInput, PublishPages(1, version(1, 5)[:-1]))
    assert_rejected(manifest, InvalidInput, DropPageVersions(1, b"123"))
