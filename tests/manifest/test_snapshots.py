"""Snapshots: what they hold, how they are anchored, and which requests are rejected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pyroaring import BitMap

from quire.core.errors import (
    ArtifactGone,
    DatabaseTombstoned,
    InvalidInput,
    InvalidName,
    NameTaken,
    QuireError,
    ReadOnly,
    StalePlan,
    UnknownArtifact,
    UnknownDatabase,
    UnknownSnapshot,
)
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest.ops.jobs import EnsureJob
from quire.manifest.ops.snapshots import DropSnapshot, PublishSnapshot
from quire.manifest.ops.wal import AdvanceWal, MoveWalState, OpenSegment
from quire.manifest.records import (
    ChunkRecord,
    DbKind,
    DeltaRecord,
    JobKind,
    Pin,
    Residency,
    SnapshotKind,
    WalFormat,
    WalState,
)
from quire.manifest.snapshots import ANCHOR_TRIES, Anchor, LineageNode
from quire.manifest.store import ManifestStore
from quire.testing.manifest import difference, dump
from tests.manifest.checkpoints import (
    ChunkMutation,
    DeltaChunk,
    FullChunk,
    WalChunkUpdate,
    append_wal_chunk,
    checkpoint_apply,
)
from tests.manifest.helpers import collect, commit, counts

BASE, DELTA, LEAF, WAL = ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.LEAF, ArtifactKind.WAL

Write = dict[int, set[int] | None]
"""Slot → the changed pages (a delta), or `None` for all pages (a new base)."""


@contextmanager
def assert_rejected(manifest: ManifestStore, error: type[QuireError]) -> Iterator[None]:
    """Assert that the block raises exactly this error and that no table has changed by a byte."""
    before = dump(manifest)
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert not difference(before, dump(manifest))


@pytest.fixture
def db(manifest: ManifestStore) -> int:
    return manifest.register_db("shop", DbKind.PAGES, page_size=4096)


def write(manifest: ManifestStore, db_id: int, changes: Write) -> int:
    """Apply a checkpoint; returns its generation."""
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
        chains = {slot: txn.chain(db_id, slot) for slot in changes}
    assert wal is not None
    lsn, generation = wal.last_applied_lsn + 1, manifest.reserve_generation(db_id)
    commit(manifest, AdvanceWal(db_id, 0, lsn, lsn, lsn, size_pages=lsn))
    mutations: list[ChunkMutation] = []
    for slot, pages in changes.items():
        chain = chains[slot]
        if pages is None or not chain:
            mutations.append(FullChunk(slot=slot, record=ChunkRecord(Residency.REMOTE_ARCHIVED, 1000, 0)))
        else:
            dirty = BitMap(pages).serialize()
            delta = DeltaRecord(chain[0].generation, Residency.REMOTE_ARCHIVED, 10, 0, dirty_pages=dirty)
            mutations.append(DeltaChunk(slot=slot, delta_id=len(chain), record=delta))
    checkpoint_apply(manifest, db_id, generation, mutations, covered_lsn=lsn).result()
    return generation


def seal(manifest: ManifestStore, db_id: int, lsns: int = 3) -> Pin:
    """Add a full WAL segment; returns a pin of all of it."""
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
    assert wal is not None
    first, number = wal.lsn_reserved + 1, wal.next_segment_id
    update = WalChunkUpdate(segment_id=number, first_lsn=first, last_lsn=first + lsns - 1, used_bytes=700)
    append_wal_chunk(manifest, db_id, update).result()
    return Pin(db_id, number, first + lsns - 1, 700)


def truncate(manifest: ManifestStore, db_id: int, segment_id: int) -> None:
    for state in (WalState.INDEXED, WalState.CHECKPOINT_READY, WalState.CHECKPOINTED, WalState.TRUNCATED):
        manifest.submit([MoveWalState(db_id, segment_id, state)]).result()


def last_change(manifest: ManifestStore) -> list[type]:
    with manifest.read() as txn:
        return [type(op) for op in list(txn.changes())[-1].operations]


def shape(nodes: list[LineageNode] | tuple[LineageNode, ...]) -> list[tuple[str, object]]:
    """The names of a lineage as nested lists."""
    return [(node.name or f"gone {node.db_id}", shape(node.forks)) for node in nodes]


# ── publishing and dropping ───────────────────────────────────────────────────────────────────────────────────────────
def test_publishing_is_one_transaction_that_keeps_the_active_set_and_raises_its_counts(
    manifest: ManifestStore, db: int
) -> None:
    generation = write(manifest, db, {0: None, 300: None})
    pin = seal(manifest, db)
    before, head = counts(manifest), manifest.writer.head
    info = manifest.snapshots.publish("shop", "monday", tags={"who": "me"})
    assert manifest.writer.head == head + 1
    assert last_change(manifest) == [PublishSnapshot]
    shared = {ArtifactKey(db, LEAF, 0, generation), ArtifactKey(db, LEAF, 1, generation), ArtifactKey(db, WAL, 1, 0)}
    assert counts(manifest) == {key: (n + (key in shared), 0) for key, (n, _) in before.items()}
    with manifest.read() as txn:
        record = txn.snapshot(db, info.snapshot_id)
    assert record is not None
    assert sorted(record.leaves) == [(0, db, generation), (1, db, generation)]
    assert (record.pins, record.anchor_lsn, record.anchor_segment_id) == ([pin], pin.upto_lsn, pin.segment_id)
    assert (info.name, info.kind, info.generation, info.tags) == (
        "monday",
        SnapshotKind.NAMED,
        generation,
        {"who": "me"},
    )
    assert (info.leaves, info.pins, info.size_pages, info.page_size) == (2, 1, 1, 4096)


def test_open_and_absorbed_segments_are_not_pinned(manifest: ManifestStore, db: int) -> None:
    seal(manifest, db)
    write(manifest, db, {0: None})
    sealed = seal(manifest, db)
    commit(manifest, OpenSegment(db, 3, WalFormat.PAGER, 65536, b"salt", 50))
    info = manifest.snapshots.publish(db)
    with manifest.read() as txn:
        record = txn.snapshot(db, info.snapshot_id)
    assert record is not None
    assert (record.pins, record.anchor_lsn, record.kind) == ([sealed], sealed.upto_lsn, SnapshotKind.ANONYMOUS)


def test_a_snapshot_does_not_change(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None, 1: None})
    manifest.snapshots.publish(db, "s")
    before = manifest.snapshots.describe(db, "s")
    write(manifest, db, {0: None, 1: {5}, 700: None})
    collect(manifest)
    assert manifest.snapshots.describe(db, "s") == before
    assert manifest.snapshots.diff(db, "s", "s").same


def test_snapshots_are_found_by_id_and_by_name_and_described(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None, 1: None, 256: None})
    write(manifest, db, {1: {1, 2, 3}})
    seal(manifest, db)
    first, second = manifest.snapshots.publish(db, "first"), manifest.snapshots.publish("shop")
    assert manifest.snapshots.of("shop") == manifest.snapshots.of(db) == [first, second]
    assert manifest.snapshots.get(db, "first") == manifest.snapshots.get("shop", first.snapshot_id) == first
    detail = manifest.snapshots.describe("shop", "first")
    assert (detail.info, detail.slots, detail.artifacts) == (first, 3, 4)
    assert (detail.chunk_bytes, detail.wal_bytes) == (3010, 700)


def test_dropping_lowers_the_counts_and_enqueues_the_deletion_in_one_transaction(
    manifest: ManifestStore, db: int
) -> None:
    write(manifest, db, {0: None})
    manifest.snapshots.publish(db, "s")
    write(manifest, db, {0: None})
    assert manifest.jobs.outstanding(db, JobKind.DELETE) == 0, "the snapshot refers to the artifacts"
    dropped = manifest.snapshots.drop("shop", "s")
    assert last_change(manifest) == [DropSnapshot, EnsureJob]
    assert dropped.name == "s"
    assert manifest.jobs.outstanding(db, JobKind.DELETE)
    assert (0, 0) in counts(manifest, LEAF).values()
    with assert_rejected(manifest, UnknownSnapshot):
        manifest.snapshots.drop("shop", "s")


def test_artifacts_of_a_forks_snapshot_are_deleted_by_the_job_of_the_origin_database(
    manifest: ManifestStore, db: int
) -> None:
    write(manifest, db, {0: None})
    fork = manifest.snapshots.fork(db, "fork")
    snapshot = manifest.snapshots.publish(fork)
    for db_id in (db, fork):
        write(manifest, db_id, {0: None})
    manifest.snapshots.drop(fork, snapshot.snapshot_id)
    assert manifest.jobs.outstanding(db, JobKind.DELETE)


def test_ids_rise_and_are_never_reused(manifest: ManifestStore, db: int) -> None:
    first = manifest.snapshots.publish(db).snapshot_id
    manifest.snapshots.drop(db, first)
    with pytest.raises(InvalidName):
        manifest.snapshots.publish(db, "a/b")
    assert manifest.snapshots.publish(db).snapshot_id > first


def test_many_threads_publish_at_once(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    snapshot_ids: list[int] = []

    def publish() -> None:
        snapshot_ids.extend(manifest.snapshots.publish(db).snapshot_id for _ in range(10))

    threads = [threading.Thread(target=publish) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(snapshot_ids) == [info.snapshot_id for info in manifest.snapshots.of(db)]
    assert len(set(snapshot_ids)) == 60


# ── anchors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def checkpoints_after_anchor(
    manifest: ManifestStore, times: int, *, monkeypatch: pytest.MonkeyPatch, to_anchor: bool
) -> Iterator[list[int]]:
    """The given number of times, a checkpoint and a truncation happen between taking an anchor and using it."""
    original, lsns = manifest.snapshots._anchor, list[int]()

    def take_and_checkpoint(db_id: int) -> Anchor:
        anchor = original(db_id)
        lsns.append(anchor.lsn)
        if len(lsns) <= times:
            if to_anchor:  # it covers exactly the anchor, so that only the pinned segments are stale, not the anchor
                generation = manifest.reserve_generation(db_id)
                record = ChunkRecord(Residency.LOCAL, 1, 0)
                checkpoint_apply(
                    manifest, db_id, generation, [FullChunk(slot=0, record=record)], covered_lsn=anchor.lsn
                ).result()
            else:
                write(manifest, db_id, {0: None})
            for pin in anchor.pins:
                truncate(manifest, db_id, pin.segment_id)
            if len(lsns) % 2:
                collect(manifest)
            seal(manifest, db_id)
        return anchor

    with monkeypatch.context() as patch:
        patch.setattr(manifest.snapshots, "_anchor", take_and_checkpoint)
        yield lsns


@pytest.mark.parametrize("to_anchor", [False, True], ids=["passed the anchor", "to the anchor"])
def test_an_anchor_that_a_checkpoint_has_passed_is_taken_again(
    manifest: ManifestStore, db: int, monkeypatch: pytest.MonkeyPatch, to_anchor: bool
) -> None:
    """Hazard: after a checkpoint to exactly the anchor and a truncation, it failed with `ArtifactGone` or
    `UnknownArtifact`."""
    seal(manifest, db)
    with checkpoints_after_anchor(manifest, 2, monkeypatch=monkeypatch, to_anchor=to_anchor) as lsns:
        info = manifest.snapshots.publish(db, "s")
    assert (len(lsns), info.anchor_lsn) == (3, lsns[-1])
    manifest.snapshots.drop(db, "s")
    with checkpoints_after_anchor(manifest, 2, monkeypatch=monkeypatch, to_anchor=to_anchor) as lsns:
        fork = manifest.snapshots.fork(db, "fork")
    assert len(lsns) == 3
    with manifest.read() as txn:
        record = txn.database(fork)
    assert record is not None
    assert record.parent_lsn == lsns[-1]


def test_endless_checkpoints_are_an_error(manifest: ManifestStore, db: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with checkpoints_after_anchor(manifest, 10**6, monkeypatch=monkeypatch, to_anchor=False) as lsns:
        with pytest.raises(StalePlan, match="too often"):
            manifest.snapshots.publish(db)
        with pytest.raises(StalePlan, match="too often"):
            manifest.snapshots.fork(db, "fork")
    assert len(lsns) == 2 * ANCHOR_TRIES


def test_an_anchor_of_the_engine_is_used_or_rejected(manifest: ManifestStore, db: int) -> None:
    pin = seal(manifest, db, lsns=10)
    middle = Anchor(pin.upto_lsn - 4, pin.segment_id, 7, (Pin(db, pin.segment_id, pin.upto_lsn - 4, 300),), 99)
    info = manifest.snapshots.publish(db, "s", anchor=middle)
    assert (info.anchor_lsn, info.size_pages, info.anchor_time_ms) == (middle.lsn, 7, 99)
    write(manifest, db, {0: None})
    with assert_rejected(manifest, StalePlan):
        manifest.snapshots.publish(db, "t", anchor=middle)
    with assert_rejected(manifest, StalePlan):
        manifest.snapshots.fork(db, "fork", anchor=middle)
    manifest.snapshots.drop(db, "s")
    truncate(manifest, db, pin.segment_id)
    stale = Anchor(10**6, pin.segment_id, 7, (pin,))
    with assert_rejected(manifest, ArtifactGone):
        manifest.snapshots.publish(db, "t", anchor=stale)
    collect(manifest)
    with assert_rejected(manifest, UnknownArtifact):
        manifest.snapshots.fork(db, "fork", anchor=stale)


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_bad_requests_get_specific_errors_and_change_nothing(manifest: ManifestStore, db: int) -> None:
    manifest.snapshots.publish(db, "s")
    manifest.register_db("gone", DbKind.PAGES)
    manifest.drop_db(2).result()
    snapshots = manifest.snapshots
    for error, call in (
        (DatabaseTombstoned, lambda: snapshots.publish(2, "late")),
        (UnknownDatabase, lambda: snapshots.publish("gone", "late")),
        (UnknownDatabase, lambda: snapshots.publish(99)),
        (NameTaken, lambda: snapshots.publish(db, "s")),
        (InvalidName, lambda: snapshots.publish(db, "a/b")),
        (NameTaken, lambda: snapshots.fork(db, "shop")),
        (InvalidName, lambda: snapshots.fork(db, "")),
        (DatabaseTombstoned, lambda: snapshots.fork(2, "fork")),
        (UnknownDatabase, lambda: snapshots.fork(99, "fork")),
        (UnknownSnapshot, lambda: snapshots.fork(db, "fork", at="nope")),
        (UnknownSnapshot, lambda: snapshots.fork(db, "fork", at=99)),
        (InvalidInput, lambda: snapshots.fork(db, "fork", at="s", anchor=Anchor(1))),
        (UnknownSnapshot, lambda: snapshots.drop(db, "nope")),
        (UnknownSnapshot, lambda: snapshots.drop(db, "")),
        (UnknownSnapshot, lambda: snapshots.get(db, 0)),
        (UnknownDatabase, lambda: snapshots.drop("nope", "s")),
        (UnknownDatabase, lambda: snapshots.of(99)),
        (UnknownDatabase, lambda: snapshots.diff(99, None)),
        (UnknownSnapshot, lambda: snapshots.diff(db, "nope")),
        (UnknownSnapshot, lambda: snapshots.describe(db, "nope")),
    ):
        with assert_rejected(manifest, error):
            call()


def test_a_read_only_process_can_read_snapshots_and_not_change_them(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        db = manifest.register_db("shop", DbKind.PAGES)
        snapshot = manifest.snapshots.publish(db, "s")
    with ManifestStore.open(path, mode="r") as reader:
        assert reader.snapshots.of("shop") == [snapshot]
        assert shape(reader.snapshots.lineage()) == [("shop", [])]
        for call in (
            lambda: reader.snapshots.publish(db, "t"),
            lambda: reader.snapshots.fork(db, "fork"),
            lambda: reader.snapshots.drop(db, "s"),
        ):
            with pytest.raises(ReadOnly):
                call()
