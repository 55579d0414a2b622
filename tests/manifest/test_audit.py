"""The audit: every change that was made is recorded once, with its sequence and generation; changes of failed batches
are not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import NameTaken, QuireError, UnknownDatabase, UnknownSnapshot
from quire.core.ids import ArtifactKind
from quire.manifest import tables as t
from quire.manifest.audit import AuditEntry
from quire.manifest.guard import Receipt
from quire.manifest.ops.artifacts import UpdateArtifact
from quire.manifest.ops.base import Component, Op
from quire.manifest.ops.databases import DropDb, PruneAudit, RenameDb
from quire.manifest.ops.local import RecordMetric
from quire.manifest.ops.snapshots import DropSnapshot, ForkDb, PublishSnapshot
from quire.manifest.records import AuditAction, DbKind, Residency, SnapshotKind, VerifyState
from quire.manifest.store import ManifestStore
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, assert_replays, dump, replay
from tests.manifest.batches import hold_feed, outcome
from tests.manifest.helpers import assert_rejected, checkpoint, collect, commit, register, submit_as_group

A = AuditAction
BASE = ArtifactKind.BASE
START = 1_750_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def manifest(path: str, clock: ManualClock) -> Iterator[ManifestStore]:
    """A manifest with a manual clock. At the end its rules hold, and its feed replays to the same audit."""
    with ManifestStore.open(path, clock=clock) as manifest:
        hold_feed(manifest)
        yield manifest
        assert_clean(manifest, leaks=True)
        assert_replays(manifest)


def facts(entries: list[AuditEntry]) -> list[tuple[int, AuditAction, str, int]]:
    return [(entry.db_id, entry.action, entry.subject, entry.number) for entry in entries]


def snap(db_id: int, number: int, name: str) -> PublishSnapshot:
    return PublishSnapshot(db_id, number, SnapshotKind.NAMED, name, 10**6)


# ── what is recorded ──────────────────────────────────────────────────────────────────────────────────────────────────
def test_snapshots_forks_and_drops_are_recorded(manifest: ManifestStore) -> None:
    db = manifest.register_db("shop", DbKind.PAGES)
    monday = manifest.snapshots.publish(db, "monday")
    manifest.snapshots.publish(db)
    fork = manifest.snapshots.fork(db, "branch", at="monday")
    manifest.snapshots.drop(db, "monday")
    manifest.drop_db(fork).result()
    assert facts(manifest.audit()) == [
        (db, A.SNAPSHOT_CREATED, "monday", monday.snapshot_id),
        (db, A.SNAPSHOT_CREATED, "", monday.snapshot_id + 1),
        (db, A.FORKED, "branch", fork),
        (fork, A.FORKED_FROM, "shop", db),
        (db, A.SNAPSHOT_DROPPED, "monday", monday.snapshot_id),
        (fork, A.DATABASE_DROPPED, "branch", fork),
    ]


def test_changes_of_residency_are_recorded(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    generation = checkpoint(manifest, 1, 7)

    def move(residency: Residency | None, verified: VerifyState | None = None) -> None:
        commit(manifest, UpdateArtifact(1, BASE, 7, generation, residency=residency, verify_state=verified))

    move(Residency.LOCAL_AND_REMOTE)
    move(Residency.LOCAL_AND_REMOTE)
    move(None, VerifyState.VERIFIED)
    move(Residency.EVICTED)
    move(Residency.LOCAL_AND_REMOTE)
    move(None, VerifyState.ALTERED)
    move(None, VerifyState.ALTERED)
    checkpoint(manifest, 1, 7)
    collect(manifest)
    name = f"00000001/00000007/base:{generation:08x}"
    actions = [A.UPLOADED, A.EVICTED, A.HYDRATED, A.FOUND_DAMAGED, A.DELETED]
    assert facts(manifest.audit(1)) == [(1, action, name, 7) for action in actions], "one entry for each change"
    assert {entry.size_bytes for entry in manifest.audit(1)} == {10}


def test_an_entry_has_the_sequence_the_time_and_the_generation_of_its_batch(
    manifest: ManifestStore, clock: ManualClock
) -> None:
    commit(manifest, register(1))
    for number in (1, 2, 3):
        clock.advance(60)
        receipt = manifest.submit([snap(1, number, f"s{number}"), RenameDb(1, f"n{number}")]).result()
        entry = manifest.audit(1)[-1]
        assert (entry.sequence, entry.at_ms) == (receipt.sequence, receipt.committed_at_ms)
        assert (entry.component, entry.generation) == (Component.SNAPSHOT, receipt.generations[Component.SNAPSHOT])
        with manifest.read() as txn:
            change = next(txn.changes(entry.sequence))
        assert (entry.component, entry.generation) in change.generation_updates


def test_the_changes_of_one_batch_are_recorded_in_order(manifest: ManifestStore) -> None:
    commit(manifest, register(1), snap(1, 1, "a"), snap(1, 2, "b"), DropSnapshot(1, 1), DropSnapshot(1, 2), DropDb(1))
    entries = manifest.audit(1)
    assert [entry.action for entry in entries] == [
        A.SNAPSHOT_CREATED,
        A.SNAPSHOT_CREATED,
        A.SNAPSHOT_DROPPED,
        A.SNAPSHOT_DROPPED,
        A.DATABASE_DROPPED,
    ]
    assert {entry.sequence for entry in entries} == {1}
    assert {(entry.component, entry.generation) for entry in entries} == {
        (Component.SNAPSHOT, 1),
        (Component.DATABASE, 1),
    }


# ── queries ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_the_audit_is_queried_by_database_and_by_time(manifest: ManifestStore, clock: ManualClock) -> None:
    for name in ("one", "two"):
        manifest.register_db(name, DbKind.PAGES)
    for hour in range(4):
        manifest.snapshots.publish(1 + hour % 2, f"s{hour}")
        clock.advance(3600)
    hours = [START + hour * 3_600_000 for hour in range(4)]
    assert [entry.subject for entry in manifest.audit()] == ["s0", "s1", "s2", "s3"], "all databases, in order of time"
    assert [entry.subject for entry in manifest.audit("two")] == ["s1", "s3"]
    assert [entry.subject for entry in manifest.audit(since_ms=hours[1], until_ms=hours[3])] == ["s1", "s2"]
    assert [entry.subject for entry in manifest.audit("one", since_ms=hours[0] + 1)] == ["s2"]
    assert manifest.audit("one", until_ms=hours[0]) == []
    assert manifest.audit(99) == []
    assert [entry.subject for entry in manifest.audit(newest=3)] == ["s1", "s2", "s3"]
    assert [entry.subject for entry in manifest.audit("one", newest=1)] == ["s2"]
    assert [entry.subject for entry in manifest.audit(until_ms=hours[3], newest=2)] == ["s1", "s2"]
    assert len(manifest.audit(newest=99)) == 4
    with pytest.raises(UnknownDatabase):
        manifest.audit("nope")


def test_the_audit_of_a_dropped_database_remains(manifest: ManifestStore) -> None:
    db = manifest.register_db("shop", DbKind.PAGES)
    manifest.drop_db(db).result()
    assert [entry.action for entry in manifest.audit(db)] == [A.DATABASE_DROPPED]
    manifest.register_db("shop", DbKind.PAGES)
    assert manifest.audit("shop") == [], "a new database with the same name has its own history"


# ── failed batches ────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_batch_that_fails_is_not_recorded(manifest: ManifestStore) -> None:
    commit(manifest, register(1), snap(1, 1, "s"))
    assert_rejected(manifest, NameTaken, snap(1, 2, "t"), snap(1, 3, "s"))
    assert_rejected(manifest, UnknownSnapshot, snap(1, 2, "t"), DropSnapshot(1, 9))
    commit(manifest, snap(1, 2, "u"))
    assert [entry.subject for entry in manifest.audit()] == ["s", "u"], "the next batch does not record them either"


def test_a_batch_that_fails_in_a_group_does_not_affect_the_entries_of_others(manifest: ManifestStore) -> None:
    """The batches before it are applied again, and those after it get the sequences that it would have had."""
    commit(manifest, register(1))
    batches: list[list[Op]] = [
        [snap(1, 1, "a")],
        [snap(1, 2, "b"), RenameDb(1, "first")],
        [snap(1, 3, "a")],
        [RecordMetric(1, 1, [1.0])],
        [snap(1, 3, "c"), DropSnapshot(1, 1)],
        [DropSnapshot(1, 77)],
        [ForkDb(2, 1, "fork", 2)],
    ]
    results = [outcome(guard) for guard in submit_as_group(manifest, batches)]
    assert [isinstance(result, QuireError) for result in results] == [False, False, True, False, False, True, False]
    expected = []
    for ops, result in zip(batches, results):
        if isinstance(result, Receipt) and result.sequence:
            count = sum(2 if isinstance(op, ForkDb) else isinstance(op, (PublishSnapshot, DropSnapshot)) for op in ops)
            expected += [(result.sequence, result.generations[Component.SNAPSHOT])] * count
    assert [(entry.sequence, entry.generation) for entry in manifest.audit()] == expected
    assert [entry.subject for entry in manifest.audit()] == ["a", "b", "c", "a", "fork", "first"]


def test_a_repeated_batch_is_recorded_once(manifest: ManifestStore) -> None:
    commit(manifest, register(1))
    key = b"k" * 16
    first = manifest.submit([snap(1, 1, "s")], key=key).result()
    duplicate, other = manifest.submit([snap(1, 1, "s")], key=key), manifest.submit([snap(1, 2, "t")])
    assert (duplicate.result().repeated, duplicate.result().sequence) == (True, first.sequence)
    other.result()
    assert [entry.subject for entry in manifest.audit()] == ["s", "t"]


@given(
    names=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3), min_size=1, max_size=8),
    drops=st.sets(st.integers(1, 12)),
)
def test_the_audit_is_that_of_the_batches_that_committed(
    tmp_path_factory: pytest.TempPathFactory, names: list[list[str]], drops: set[int]
) -> None:
    """Random groups in which names collide: entries match the receipts of their batches, and a replica has the same
    audit."""
    folder = tmp_path_factory.mktemp("audit")
    with ManifestStore.open(str(folder / "manifest.lmdb"), clock=ManualClock(START)) as manifest:
        commit(manifest, register(1))
        batches: list[list[Op]] = []
        number = 0
        for batch in names:
            ops: list[Op] = []
            for name in batch:
                number += 1
                ops.append(snap(1, number, name))
                if number in drops:
                    ops.append(DropSnapshot(1, number))
            batches.append(ops)
        expected = []
        for ops, guard in zip(batches, submit_as_group(manifest, batches)):
            result = outcome(guard)
            if isinstance(result, Receipt):
                for op in ops:
                    assert isinstance(op, (PublishSnapshot, DropSnapshot))
                    action = A.SNAPSHOT_CREATED if isinstance(op, PublishSnapshot) else A.SNAPSHOT_DROPPED
                    generation = result.generations[Component.SNAPSHOT]
                    expected.append((result.sequence, generation, action, op.snapshot_id))
        entries = [(entry.sequence, entry.generation, entry.action, entry.number) for entry in manifest.audit()]
        assert entries == expected
        env = replay(manifest, str(folder / "replica.lmdb"))
        env.close()
        audit = dump(manifest)["audit"]
    with ManifestStore.open(str(folder / "replica.lmdb"), clock=ManualClock(START)) as replica:
        assert dump(replica)["audit"] == audit


# ── pruning ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_pruning_removes_only_older_entries_of_one_database(manifest: ManifestStore, clock: ManualClock) -> None:
    commit(manifest, register(1), register(2))
    for number in range(1, 5):
        commit(manifest, snap(1, number, f"s{number}"), snap(2, number, f"s{number}"))
        clock.advance(60)
    commit(manifest, PruneAudit(1, START + 120_000))
    assert [entry.subject for entry in manifest.audit(1)] == ["s3", "s4"], "up to the given time, excluding it"
    assert len(manifest.audit(2)) == 4
    commit(manifest, PruneAudit(1, START + 120_000), PruneAudit(99, START))
    assert len(manifest.audit(1)) == 2


def test_pruning_is_done_in_bounded_steps(manifest: ManifestStore, clock: ManualClock) -> None:
    commit(manifest, register(1))
    for number in range(1, 9):
        commit(manifest, snap(1, number, f"s{number}"))
    clock.advance(1)
    horizon = clock.now_ms()
    remaining = []
    while manifest.audit():
        commit(manifest, PruneAudit(1, horizon, 3))
        remaining.append(len(manifest.audit()))
    assert remaining == [5, 2, 0]
    with manifest.read() as txn:
        assert txn.count(t.AUDIT) == 0
    assert_replays(manifest)
