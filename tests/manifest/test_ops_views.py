"""Chunks, slots, snapshots, forks and the counts they move."""

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
from tests.manifest.helpers import anchor, checkpoint, chunk, collect, counts, does, refuses, register

BASE, DELTA, LEAF, WAL = ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.LEAF, ArtifactKind.WAL


def named(manifest: ManifestStore, db_id: int, snapshot_id: int, name: str, pins: list[Pin] | None = None) -> Op:
    return PublishSnapshot(db_id, snapshot_id, SnapshotKind.NAMED, name, anchor(manifest, db_id), pins=pins or [])


# ── chunks and deltas ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_chunk_is_written_once(manifest: ManifestStore) -> None:
    does(manifest, register(1), chunk(1))
    does(manifest, chunk(1))
    refuses(manifest, AlreadyExists, chunk(1, size=11))


def test_a_delta_needs_its_base(manifest: ManifestStore) -> None:
    does(manifest, register(1), chunk(1, generation=1))
    delta = DeltaRecord(1, Residency.LOCAL, 5, 0)
    refuses(manifest, UnknownArtifact, PutDelta(1, 2, 2, 1, 1, delta))
    refuses(manifest, UnknownArtifact, PutDelta(1, 1, 2, 1, 2, delta))
    refuses(manifest, UnknownArtifact, PutDelta(1, 1, 2, 1, 1, DeltaRecord(9, Residency.LOCAL, 5, 0)))
    does(manifest, PutDelta(1, 1, 2, 1, 1, delta))
    does(manifest, PutDelta(1, 1, 2, 1, 1, delta))
    refuses(manifest, AlreadyExists, PutDelta(1, 1, 2, 1, 1, DeltaRecord(1, Residency.LOCAL, 6, 0)))
    refuses(manifest, OutOfRange, PutDelta(1, 1, 2, 0, 1, delta))


def test_what_is_learned_of_an_artifact_changes_its_one_row(manifest: ManifestStore) -> None:
    does(manifest, register(1), chunk(1))
    update = UpdateArtifact(1, BASE, 1, 1, residency=Residency.LOCAL_AND_REMOTE, verify_state=VerifyState.VERIFIED)
    does(manifest, update)
    with manifest.read() as txn:
        row = txn.get(t.CHUNK_CATALOG, 1, 1, 1)
        assert row is not None
        assert (row.residency, row.verify_state, row.size_bytes) == (update.residency, update.verify_state, 10)
    refuses(manifest, UnknownArtifact, UpdateArtifact(1, BASE, 9, 1))
    refuses(manifest, InvalidInput, UpdateArtifact(1, LEAF, 1, 1))


def test_an_inherited_segment_is_updated_only_at_its_origin(manifest: ManifestStore) -> None:
    """Hazard: residency and namespace live once (M6); a fork's copy of them would be counted by nobody."""
    namespace_id = manifest.put_namespace("memory://")
    does(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    does(manifest, ForkDb(2, 1, "fork", 0, 5, 1, 1, [Pin(1, 1, 5)]))
    refuses(manifest, UnknownArtifact, UpdateArtifact(2, WAL, 1, 0, namespace_id=namespace_id))
    does(manifest, UpdateArtifact(1, WAL, 1, 0, namespace_id=namespace_id))


# ── slots ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def slots(db_id: int, generation: int, expected: tuple[int, int], chain: list[Link], leaf: int = 0) -> SetSlots:
    return SetSlots(db_id, leaf, generation, *expected, pack_leaf({1: tuple(chain)}))


def test_slots_are_set_only_on_what_was_planned(manifest: ManifestStore) -> None:
    does(manifest, register(1), ReserveGeneration(1, 1), ReserveGeneration(1, 2), chunk(1, generation=1))
    base = Link(BASE, 1, 1, 5)
    refuses(manifest, StalePlan, slots(1, 3, (0, 0), [base]))
    refuses(manifest, StalePlan, slots(1, 0, (0, 0), [base]))
    refuses(manifest, StalePlan, slots(1, 1, (1, 1), [base]))
    refuses(manifest, UnknownArtifact, slots(1, 1, (0, 0), [Link(BASE, 1, 2, 5)]))
    refuses(manifest, InvalidInput, slots(1, 1, (0, 0), [Link(DELTA, 1, 1, 5, 1)]))
    refuses(manifest, OutOfRange, slots(1, 1, (0, 0), [base], leaf=2**24))
    does(manifest, slots(1, 1, (0, 0), [base]))
    refuses(manifest, StalePlan, slots(1, 2, (0, 0), [base]))
    refuses(manifest, AlreadyExists, slots(1, 1, (1, 1), [base]))
    refuses(manifest, ManifestDamaged, SetSlots(1, 0, 2, 1, 1, b"odd"))


def test_a_leaf_nobody_else_holds_hands_its_references_over(manifest: ManifestStore) -> None:
    does(manifest, register(1))
    checkpoint(manifest, 1, 0, 1)
    second = checkpoint(manifest, 1, 1)
    found = counts(manifest)
    assert {key: value for key, value in found.items() if key.kind is LEAF} == {ArtifactKey(1, LEAF, 0, second): (1, 0)}
    assert found[ArtifactKey(1, BASE, 0, 1)] == (1, 0)
    assert found[ArtifactKey(1, BASE, 1, 1)] == (0, 0), "replaced, nobody holds it"
    assert found[ArtifactKey(1, BASE, 1, second)] == (1, 0)


def test_a_shared_leaf_stays_and_the_new_one_takes_references_once(manifest: ManifestStore) -> None:
    does(manifest, register(1))
    first = checkpoint(manifest, 1, 0, 1)
    does(manifest, named(manifest, 1, 1, "s"))
    second = checkpoint(manifest, 1, 1)
    assert counts(manifest)[ArtifactKey(1, BASE, 0, first)] == (2, 0), "held by both leaves"
    third = checkpoint(manifest, 1, 1)
    found = counts(manifest)
    assert found[ArtifactKey(1, BASE, 0, first)] == (2, 0), "diverged once, counted once"
    assert found[ArtifactKey(1, LEAF, 0, first)] == (1, 0)
    assert ArtifactKey(1, LEAF, 0, second) not in found
    assert found[ArtifactKey(1, LEAF, 0, third)] == (1, 0)


def test_clearing_slots_releases_their_chains(manifest: ManifestStore) -> None:
    does(manifest, register(1))
    first = checkpoint(manifest, 1, 0, 1)
    generation = manifest.reserve_generation(1)
    does(manifest, SetSlots(1, 0, generation, 1, first, b"", bytes([0, 1])))
    assert set(counts(manifest, BASE).values()) == {(0, 0)}
    with manifest.read() as txn:
        assert txn.chain(1, 0) == ()
    collect(manifest)
    assert counts(manifest) == {ArtifactKey(1, LEAF, 0, generation): (1, 0)}


def test_deltas_lengthen_a_chain_and_hold_their_base(manifest: ManifestStore) -> None:
    does(manifest, register(1))
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


def test_what_reached_zero_never_rises_again(manifest: ManifestStore) -> None:
    does(manifest, register(1))
    first = checkpoint(manifest, 1, 1)
    live = checkpoint(manifest, 1, 1)
    generation = manifest.reserve_generation(1)
    refuses(manifest, ArtifactGone, slots(1, generation, (1, live), [Link(BASE, 1, first, 9)]))


def test_only_what_is_at_zero_is_removed(manifest: ManifestStore) -> None:
    does(manifest, register(1))
    live = checkpoint(manifest, 1, 1)
    refuses(manifest, StillReferenced, RemoveArtifact(1, BASE, 1, live))
    refuses(manifest, StillReferenced, CollectLeaf(1, 0, live))
    refuses(manifest, UnknownArtifact, RemoveArtifact(1, BASE, 2, live))
    refuses(manifest, UnknownArtifact, CollectLeaf(1, 5, live))
    does(manifest, named(manifest, 1, 1, "s"))
    checkpoint(manifest, 1, 1)
    does(manifest, DropSnapshot(1, 1))
    refuses(manifest, StillReferenced, RemoveArtifact(1, LEAF, 0, live))
    does(manifest, CollectLeaf(1, 0, live))
    does(manifest, RemoveArtifact(1, BASE, 1, live))
    refuses(manifest, UnknownArtifact, RemoveArtifact(1, BASE, 1, live))


@pytest.fixture
def overlay(manifest: ManifestStore) -> Overlay:
    """The tables as an op sees them, in a transaction that is never committed."""
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
def test_a_snapshot_has_an_id_and_a_name_of_its_own(manifest: ManifestStore) -> None:
    does(manifest, register(1), register(2))
    does(manifest, named(manifest, 1, 1, "s"))
    refuses(manifest, AlreadyExists, named(manifest, 1, 1, "other"))
    refuses(manifest, NameTaken, named(manifest, 1, 2, "s"))
    refuses(manifest, OutOfRange, named(manifest, 1, 0, "zero"))
    does(manifest, named(manifest, 2, 1, "s"))
    does(manifest, DropSnapshot(1, 1))
    refuses(manifest, UnknownSnapshot, DropSnapshot(1, 1))
    refuses(manifest, AlreadyExists, named(manifest, 1, 1, "s"))
    does(manifest, named(manifest, 1, 2, "s"))


def test_a_snapshot_below_a_checkpoint_is_refused(manifest: ManifestStore) -> None:
    does(manifest, register(1))
    checkpoint(manifest, 1, 1)
    refuses(manifest, StalePlan, PublishSnapshot(1, 1, SnapshotKind.NAMED, "s", 0))
    refuses(manifest, StalePlan, ForkDb(2, 1, "fork", 0, 0))


def test_a_pin_must_name_a_segment_at_its_origin(manifest: ManifestStore) -> None:
    does(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    does(manifest, ForkDb(2, 1, "fork", 0, 5, 1, 1, [Pin(1, 1, 5)]))
    refuses(manifest, UnknownArtifact, named(manifest, 1, 1, "s", [Pin(1, 9, 5)]))
    refuses(manifest, UnknownArtifact, named(manifest, 2, 1, "s", [Pin(2, 1, 5)]))


def test_a_segment_is_pinned_once_per_view(manifest: ManifestStore) -> None:
    """Hazard: a fork tracks a segment with one row; pinned twice it would be counted twice and released once."""
    does(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    refuses(manifest, InvalidInput, ForkDb(2, 1, "fork", 0, 5, 1, 1, [Pin(1, 1, 5), Pin(1, 1, 4)]))


def test_only_page_databases_fork(manifest: ManifestStore) -> None:
    does(manifest, register(1, kind=DbKind.STREAM))
    refuses(manifest, WrongKind, ForkDb(2, 1, "fork"))
    refuses(manifest, OutOfRange, register(3), ForkDb(0, 3, "fork"))
    refuses(manifest, UnknownSnapshot, register(3), ForkDb(4, 3, "fork", 5))


def test_a_fork_holds_what_it_began_with_and_goes_on_numbering(manifest: ManifestStore) -> None:
    does(manifest, register(1), AppendWalChunk(1, 0, 3, 1, 1, 5, 100))
    first = checkpoint(manifest, 1, 0)
    at = anchor(manifest, 1)
    does(manifest, named(manifest, 1, 1, "s", [Pin(1, 3, 5, 100)]))
    does(manifest, ForkDb(2, 1, "fork", snapshot_id=1))
    found = counts(manifest)
    assert found[ArtifactKey(1, LEAF, 0, first)] == (3, 0), "database, snapshot, fork"
    assert found[ArtifactKey(1, WAL, 3, 0)] == (3, 0)
    with manifest.read() as txn:
        child, wal = txn.database(2), txn.wal_state(2)
        assert child is not None
        assert wal is not None
        assert (child.parent_db_id, child.parent_snapshot_id, child.parent_lsn) == (1, 1, at)
        assert child.next_generation > first
        assert (wal.next_segment_id, wal.lsn_reserved) == (4, at)
        assert txn.chain(2, 0) == txn.chain(1, 0)
        inherited = txn.get(t.WAL_CATALOG, 2, 3)
        assert inherited is not None
        assert (inherited.origin_db_id, inherited.state) == (1, WalState.INDEXED)
    refuses(manifest, AlreadyExists, chunk(0, size=77, db_id=1, generation=first))


def test_truncating_takes_nothing_from_snapshots_and_forks(manifest: ManifestStore) -> None:
    does(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    does(manifest, named(manifest, 1, 1, "s", [Pin(1, 1, 5, 100)]))
    does(manifest, ForkDb(2, 1, "fork", snapshot_id=1))
    for state in (WalState.INDEXED, WalState.CHECKPOINT_READY, WalState.CHECKPOINTED, WalState.TRUNCATED):
        does(manifest, MoveWalState(1, 1, state))
    key = ArtifactKey(1, WAL, 1, 0)
    assert counts(manifest)[key] == (2, 0)
    refuses(manifest, StillReferenced, RemoveArtifact(1, WAL, 1, 0))
    does(manifest, DropSnapshot(1, 1), DropDb(2))
    assert counts(manifest)[key] == (0, 0)
    refuses(manifest, ArtifactGone, PublishSnapshot(1, 2, SnapshotKind.ANONYMOUS, "", 5, pins=[Pin(1, 1, 5)]))
    does(manifest, RemoveArtifact(1, WAL, 1, 0), RemoveDb(2))


def _family(manifest: ManifestStore) -> dict[str, list[Op]]:
    """A database, its snapshot, a fork of that and a snapshot of the fork; how to drop each."""
    does(manifest, register(1), AppendWalChunk(1, 0, 1, 1, 1, 5, 100))
    checkpoint(manifest, 1, 0, 300)
    does(manifest, named(manifest, 1, 1, "s", [Pin(1, 1, 5)]))
    does(manifest, ForkDb(2, 1, "fork", snapshot_id=1))
    checkpoint(manifest, 2, 0)
    does(manifest, named(manifest, 2, 1, "t"))
    checkpoint(manifest, 1, 300, delta=True)
    return {"snapshot": [DropSnapshot(1, 1)], "fork's": [DropSnapshot(2, 1)], "one": [DropDb(1)], "two": [DropDb(2)]}


ORDERS = [
    order
    for order in itertools.permutations(["snapshot", "fork's", "one", "two"])
    if order.index("snapshot") < order.index("one") and order.index("fork's") < order.index("two")
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("eager", [True, False], ids=["collecting", "at the end"])
def test_a_family_dropped_in_any_order_leaves_nothing(
    manifest: ManifestStore, order: tuple[str, ...], eager: bool
) -> None:
    drops = _family(manifest)
    for who in order:
        does(manifest, *drops[who])
        assert_clean(manifest)
        if eager:
            collect(manifest)
            assert_clean(manifest)
    collect(manifest)
    does(manifest, RemoveDb(1), RemoveDb(2))
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
    does(manifest, register(1), PublishPages(1, version(1, 5) + version(2, 9) + version(1, 3)))
    assert (head(manifest, 1), head(manifest, 2)) == (5, 9)
    does(manifest, PublishPages(1, version(1, 4)))
    assert head(manifest, 1) == 5
    does(manifest, DropPageVersions(1, VERSION_NAME.pack(1, 5)))
    assert head(manifest, 1) == 4
    does(manifest, DropPageVersions(1, VERSION_NAME.pack(1, 3)))
    assert head(manifest, 1) == 4
    does(manifest, DropPageVersions(1, VERSION_NAME.pack(1, 4)))
    assert head(manifest, 1) is None


@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3)), max_size=12), max_size=5
    ),
    spoiled=st.sets(st.integers(0, 4), max_size=2),
)
def test_publishing_many_rows_at_once_is_publishing_them_one_by_one(
    batches: list[list[tuple[int, int, int]]], spoiled: set[int]
) -> None:
    """Also of rows that come twice, of heads that were there before, and in a group with batches that fail."""
    index: dict[tuple[int, int], tuple[int, ...]] = {}
    heads: dict[int, tuple[int, int]] = {}
    with TemporaryDirectory() as folder, ManifestStore.open(os.path.join(folder, "m")) as manifest:
        does(manifest, register(1))
        all_there = threading.Event()

        def hold(_: str) -> None:
            assert all_there.wait(30)

        with armed("manifest.commit.durable", hold):
            guards = [manifest.submit([PublishPages(1, b"")])]  # while it waits, the others become one group
            for number, rows in enumerate(batches):
                packed = b"".join(
                    ROW.pack(page, lsn + 7, lsn, lsn - 1, place, segment, 1, lsn % 2, 0)
                    for place, (page, lsn, segment) in enumerate(rows)
                )
                ops: list[Op] = [PublishPages(1, packed)]
                guards.append(manifest.submit([*ops, PublishPages(1, b"?")] if number in spoiled else ops))
            all_there.set()
            guards.pop(0).result()
        for number, (guard, rows) in enumerate(zip(guards, batches, strict=True)):
            if number in spoiled:
                with pytest.raises(InvalidInput):
                    guard.result()
                continue
            guard.result()
            for place, (page, lsn, segment) in enumerate(rows):
                index[page, lsn] = (1, segment, lsn + 7, lsn % 2, lsn - 1, place)
            newest: dict[int, tuple[int, int]] = {}
            for page, lsn, segment in rows:
                if page not in newest or newest[page][0] < lsn:
                    newest[page] = (lsn, segment)
            for page, (lsn, segment) in newest.items():
                if page not in heads or heads[page][0] <= lsn:
                    heads[page] = (lsn, segment)
        with manifest.read() as txn:
            found = {key[1:]: astuple(row) for key, row in txn.scan(t.PAGE_VERSION_INDEX, 1)}
            found_heads = {key[1]: astuple(row) for key, row in txn.scan(t.PAGE_VERSION_HEAD, 1)}
        assert found == index
        assert found_heads == {page: (*each, 1) for page, each in heads.items()}


def test_one_batch_reads_the_page_rows_that_it_has_just_published(manifest: ManifestStore) -> None:
    """Rows that wait for the commit as bytes are found, scanned and removed like any others."""
    does(
        manifest,
        register(1),
        PublishPages(1, version(1, 5) + version(1, 7) + version(2, 6)),
        DropPageVersions(1, VERSION_NAME.pack(1, 7) + VERSION_NAME.pack(2, 6)),
    )
    assert (head(manifest, 1), head(manifest, 2)) == (5, None)


def test_page_rows_must_be_whole(manifest: ManifestStore) -> None:
    does(manifest, register(1))
    refuses(manifest, InvalidInput, PublishPages(1, version(1, 5)[:-1]))
    refuses(manifest, InvalidInput, DropPageVersions(1, b"123"))
