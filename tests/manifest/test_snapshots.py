"""Snapshots: what they hold, how they are anchored, and what is refused."""

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
from tests.manifest.helpers import collect, counts, does

BASE, DELTA, LEAF, WAL = ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.LEAF, ArtifactKind.WAL

Write = dict[int, set[int] | None]
"""Slot → the pages that changed, `None` for all of them: a delta, or a new base."""


@contextmanager
def refused(manifest: ManifestStore, error: type[QuireError]) -> Iterator[None]:
    """The block raises exactly this error, and every table is byte for byte as it was."""
    before = dump(manifest)
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    assert not difference(before, dump(manifest))


@pytest.fixture
def db(manifest: ManifestStore) -> int:
    return manifest.register_db("shop", DbKind.PAGES, page_size=4096)


def write(manifest: ManifestStore, db_id: int, changes: Write) -> int:
    """A checkpoint; its generation."""
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
        chains = {slot: txn.chain(db_id, slot) for slot in changes}
    assert wal is not None
    lsn, generation = wal.last_applied_lsn + 1, manifest.reserve_generation(db_id)
    does(manifest, AdvanceWal(db_id, 0, lsn, lsn, lsn, size_pages=lsn))
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
    """A full WAL segment, as a pin of all of it."""
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
    """Names of a lineage."""
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
    held = {ArtifactKey(db, LEAF, 0, generation), ArtifactKey(db, LEAF, 1, generation), ArtifactKey(db, WAL, 1, 0)}
    assert counts(manifest) == {key: (n + (key in held), 0) for key, (n, _) in before.items()}
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


def test_what_is_open_or_absorbed_is_not_pinned(manifest: ManifestStore, db: int) -> None:
    seal(manifest, db)
    write(manifest, db, {0: None})
    sealed = seal(manifest, db)
    does(manifest, OpenSegment(db, 3, WalFormat.PAGER, 65536, b"salt", 50))
    info = manifest.snapshots.publish(db)
    with manifest.read() as txn:
        record = txn.snapshot(db, info.snapshot_id)
    assert record is not None
    assert (record.pins, record.anchor_lsn, record.kind) == ([sealed], sealed.upto_lsn, SnapshotKind.ANONYMOUS)


def test_a_snapshot_stays_what_it_was(manifest: ManifestStore, db: int) -> None:
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
    assert manifest.jobs.outstanding(db, JobKind.DELETE) == 0, "the snapshot holds it"
    dropped = manifest.snapshots.drop("shop", "s")
    assert last_change(manifest) == [DropSnapshot, EnsureJob]
    assert dropped.name == "s"
    assert manifest.jobs.outstanding(db, JobKind.DELETE)
    assert (0, 0) in counts(manifest, LEAF).values()
    with refused(manifest, UnknownSnapshot):
        manifest.snapshots.drop("shop", "s")


def test_what_a_fork_s_snapshot_held_is_deleted_by_the_job_of_whoever_made_it(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    fork = manifest.snapshots.fork(db, "fork")
    kept = manifest.snapshots.publish(fork)
    for each in (db, fork):
        write(manifest, each, {0: None})
    manifest.snapshots.drop(fork, kept.snapshot_id)
    assert manifest.jobs.outstanding(db, JobKind.DELETE)


def test_ids_rise_and_are_never_given_again(manifest: ManifestStore, db: int) -> None:
    first = manifest.snapshots.publish(db).snapshot_id
    manifest.snapshots.drop(db, first)
    with pytest.raises(InvalidName):
        manifest.snapshots.publish(db, "a/b")
    assert manifest.snapshots.publish(db).snapshot_id > first


def test_many_threads_publish_at_once(manifest: ManifestStore, db: int) -> None:
    write(manifest, db, {0: None})
    found: list[int] = []

    def publish() -> None:
        found.extend(manifest.snapshots.publish(db).snapshot_id for _ in range(10))

    threads = [threading.Thread(target=publish) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [info.snapshot_id for info in manifest.snapshots.of(db)]
    assert len(set(found)) == 60


# ── anchors ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@contextmanager
def overtaking(
    manifest: ManifestStore, times: int, *, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> Iterator[list[int]]:
    """So many times a checkpoint, and the truncation after it, come between taking an anchor and using it."""
    take, taken = manifest.snapshots._anchor, list[int]()

    def taking(db_id: int) -> Anchor:
        found = take(db_id)
        taken.append(found.lsn)
        if len(taken) <= times:
            if gone:  # it covers exactly the anchor, so the anchor itself is not stale: the segments it pins are
                generation = manifest.reserve_generation(db_id)
                record = ChunkRecord(Residency.LOCAL, 1, 0)
                checkpoint_apply(
                    manifest, db_id, generation, [FullChunk(slot=0, record=record)], covered_lsn=found.lsn
                ).result()
            else:
                write(manifest, db_id, {0: None})
            for pin in found.pins:
                truncate(manifest, db_id, pin.segment_id)
            if len(taken) % 2:
                collect(manifest)
            seal(manifest, db_id)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(manifest.snapshots, "_anchor", taking)
        yield taken


@pytest.mark.parametrize("gone", [False, True], ids=["passed the anchor", "to the anchor"])
def test_an_anchor_that_a_checkpoint_overtook_is_taken_again(
    manifest: ManifestStore, db: int, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Hazard: a checkpoint to exactly the anchor, and truncation, made it fail with `ArtifactGone` or `UnknownArtifact`."""
    seal(manifest, db)
    with overtaking(manifest, 2, monkeypatch=monkeypatch, gone=gone) as taken:
        info = manifest.snapshots.publish(db, "s")
    assert (len(taken), info.anchor_lsn) == (3, taken[-1])
    manifest.snapshots.drop(db, "s")
    with overtaking(manifest, 2, monkeypatch=monkeypatch, gone=gone) as taken:
        fork = manifest.snapshots.fork(db, "fork")
    assert len(taken) == 3
    with manifest.read() as txn:
        record = txn.database(fork)
    assert record is not None
    assert record.parent_lsn == taken[-1]


def test_checkpoints_without_end_are_an_error(
    manifest: ManifestStore, db: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with overtaking(manifest, 10**6, monkeypatch=monkeypatch, gone=False) as taken:
        with pytest.raises(StalePlan, match="too often"):
            manifest.snapshots.publish(db)
        with pytest.raises(StalePlan, match="too often"):
            manifest.snapshots.fork(db, "fork")
    assert len(taken) == 2 * ANCHOR_TRIES


def test_an_engine_s_own_anchor_is_used_or_refused(manifest: ManifestStore, db: int) -> None:
    pin = seal(manifest, db, lsns=10)
    middle = Anchor(pin.upto_lsn - 4, pin.segment_id, 7, (Pin(db, pin.segment_id, pin.upto_lsn - 4, 300),), 99)
    info = manifest.snapshots.publish(db, "s", anchor=middle)
    assert (info.anchor_lsn, info.size_pages, info.anchor_time_ms) == (middle.lsn, 7, 99)
    write(manifest, db, {0: None})
    with refused(manifest, StalePlan):
        manifest.snapshots.publish(db, "t", anchor=middle)
    with refused(manifest, StalePlan):
        manifest.snapshots.fork(db, "fork", anchor=middle)
    manifest.snapshots.drop(db, "s")
    truncate(manifest, db, pin.segment_id)
    late = Anchor(10**6, pin.segment_id, 7, (pin,))
    with refused(manifest, ArtifactGone):
        manifest.snapshots.publish(db, "t", anchor=late)
    collect(manifest)
    with refused(manifest, UnknownArtifact):
        manifest.snapshots.fork(db, "fork", anchor=late)


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
        with refused(manifest, error):
            call()


def test_a_reader_looks_and_changes_nothing(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        db = manifest.register_db("shop", DbKind.PAGES)
        kept = manifest.snapshots.publish(db, "s")
    with ManifestStore.open(path, mode="r") as reader:
        assert reader.snapshots.of("shop") == [kept]
        assert shape(reader.snapshots.lineage()) == [("shop", [])]
        for call in (
            lambda: reader.snapshots.publish(db, "t"),
            lambda: reader.snapshots.fork(db, "fork"),
            lambda: reader.snapshots.drop(db, "s"),
        ):
            with pytest.raises(ReadOnly):
                call()
