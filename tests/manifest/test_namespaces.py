"""Owner epochs: each gives the store names that no earlier owner wrote, and releases the namespaces of earlier epochs
(A1)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.core.errors import ArtifactGone, NameTaken, StalePlan, StillReferenced, UnknownNamespace
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.failpoints import armed
from quire.manifest import tables as t
from quire.manifest.namespaces import drop_namespace
from quire.manifest.ops.artifacts import BeginOwnerEpoch, DropNamespace, PutChunk, PutNamespace
from quire.manifest.ops.base import Counter
from quire.manifest.ops.databases import DropDb, RegisterDb, RemoveDb
from quire.manifest.ops.jobs import StartJob
from quire.manifest.ops.plans import BeginPlan
from quire.manifest.ops.refs import RemoveArtifact
from quire.manifest.reads import BORN_WITH_EPOCHS
from quire.manifest.records import ChunkRecord, DbKind, DbRecord, JobKind, NamespaceRecord, PlanRecord, Residency
from quire.manifest.store import ManifestStore
from quire.testing.manifest import assert_clean


def reference_count(manifest: ManifestStore, namespace_id: int) -> int:
    with manifest.read() as txn:
        row = txn.refcount(ArtifactKey(0, ArtifactKind.NAMESPACE, namespace_id, 0))
    return 0 if row is None else row.in_use


def test_a_manifest_without_an_epoch_has_names_without_a_prefix(manifest: ManifestStore) -> None:
    with manifest.read() as txn:
        assert txn.owner_epoch() == 0
        namespace_id, record = txn.current_namespace()
    assert (namespace_id, record.url, record.prefix, record.legacy) == (0, "", "", False)


def test_each_epoch_has_its_own_prefix_below_the_stores_identity(manifest: ManifestStore) -> None:
    assert manifest.begin_owner_epoch() == 1
    assert manifest.begin_owner_epoch(at_least=9) == 9
    with manifest.read() as txn:
        record = txn.current_namespace()[1]
        assert record.prefix == f"{txn.store_id()}/e/00000009"
    assert (record.url, record.ancestors, record.legacy) == ("", (1,), False)


def test_a_store_that_is_older_than_epochs_remembers_that_it_may_have_unprefixed_objects(path: str) -> None:
    with ManifestStore.open(path) as manifest:
        txn = manifest.env._env.begin(write=True)
        txn.delete(t.META.key.pack(BORN_WITH_EPOCHS), db=manifest.env.handles[t.META.name])
        txn.commit()
        for _ in range(2):
            manifest.begin_owner_epoch()
            with manifest.read() as reader:
                assert reader.current_namespace()[1].legacy


def test_the_first_object_begins_the_first_epoch_and_later_ones_none(manifest: ManifestStore) -> None:
    for _ in range(3):
        manifest.ensure_owner_epoch()
    with manifest.read() as txn:
        assert txn.owner_epoch() == 1


def test_a_namespace_of_the_user_has_the_same_epochs_below_it(manifest: ManifestStore) -> None:
    before_epoch = manifest.put_namespace("memory://mine", "tenant")
    manifest.begin_owner_epoch()
    after_epoch = manifest.put_namespace("memory://other")
    with manifest.read() as txn:
        suffix = f"{txn.store_id()}/e/00000001"
        assert txn.current_namespace(before_epoch)[1].prefix == f"tenant/{suffix}"
        assert txn.current_namespace(after_epoch)[1].prefix == suffix
        assert txn.current_namespace(after_epoch)[1].url == "memory://other"


def test_the_current_epochs_namespace_stays_while_it_is_empty(manifest: ManifestStore) -> None:
    """Hazard: an emptied namespace was collected, and the next chunk of it raised `ArtifactGone`."""
    manifest.begin_owner_epoch()
    with manifest.read() as txn:
        namespace_id, _ = txn.current_namespace()
    record = ChunkRecord(Residency.REMOTE_ARCHIVED, 1, 0, namespace_id=namespace_id)
    manifest.submit([RegisterDb(1, DbRecord("a", DbKind.PAGES, 0)), PutChunk(1, 0, 1, record)]).result()
    assert reference_count(manifest, namespace_id) == 2
    from quire.manifest.ops.corrections import CorrectRefcount
    from quire.manifest.ops.refs import artifact_key

    chunk = ArtifactKey(1, ArtifactKind.BASE, 0, 1)
    manifest.submit([CorrectRefcount(artifact_key(chunk), 0, 0)]).result()
    manifest.submit([RemoveArtifact(1, ArtifactKind.BASE, 0, 1)]).result()
    assert reference_count(manifest, namespace_id) == 1
    manifest.submit([PutChunk(1, 0, 2, record)]).result()
    assert not [problem for problem in manifest.check() if not problem.leak]


def test_a_former_epoch_releases_its_namespace(manifest: ManifestStore) -> None:
    manifest.begin_owner_epoch()
    with manifest.read() as txn:
        former, _ = txn.current_namespace()
    manifest.begin_owner_epoch()
    assert reference_count(manifest, former) == 0
    assert not manifest.check()
    record = ChunkRecord(Residency.REMOTE_ARCHIVED, 1, 0, namespace_id=former)
    with pytest.raises(ArtifactGone):
        manifest.submit([RegisterDb(1, DbRecord("a", DbKind.PAGES, 0)), PutChunk(1, 0, 1, record)]).result()


def test_an_epoch_is_begun_once(manifest: ManifestStore) -> None:
    manifest.begin_owner_epoch()
    with pytest.raises(StalePlan):
        manifest.submit([BeginOwnerEpoch(1, [])]).result()


def test_stored_plans_are_abandoned_when_the_epoch_changes(manifest: ManifestStore) -> None:
    """Hazard: a plan of the former owner, run by its successor, would write names of the former epoch (P10)."""
    manifest.begin_owner_epoch()
    db_id = manifest.register_db("a", DbKind.PAGES)
    job_id = manifest.jobs.enqueue(JobKind.CHECKPOINT, db_id)
    generation = manifest.reserve_generation(db_id) + 1
    with manifest.read() as txn:
        namespace_id, _ = txn.current_namespace()
    plan = PlanRecord(job_id, 1, 0, 0, b"d", artifacts=[(0, 0, False)], namespace_id=namespace_id)
    manifest.submit([StartJob(job_id, "w", 10**15)]).result()
    manifest.submit([BeginPlan(db_id, generation, plan)]).result()
    manifest.begin_owner_epoch()
    with manifest.read() as txn:
        assert not list(txn.scan(t.CHECKPOINT_PLAN))
        row = txn.get(t.CHUNK_CATALOG, db_id, 0, generation)
        assert row is not None
        assert row.namespace_id == namespace_id, (
            "the output of the plan is looked up in the namespace in which it was written"
        )
        assert not [item for item in txn.scan(t.GC_REFCOUNTS, db_id) if item[1].in_use]
    assert not manifest.check()


# ── named namespaces ──────────────────────────────────────────────────────────────────────────────────────────────────
def rows_of(manifest: ManifestStore, parent_id: int) -> set[int]:
    with manifest.read() as txn:
        rows = {key[0]: row for key, row in txn.scan(t.REMOTE_NAMESPACE)}
    return {number for number, row in rows.items() if number == parent_id or row.place_id == parent_id}


def at_zero(manifest: ManifestStore) -> set[int]:
    with manifest.read() as txn:
        return {key[2] for key, _ in txn.scan(t.GC_ZERO, 0)}


def remove_at_zero(manifest: ManifestStore) -> None:
    for number in at_zero(manifest):
        manifest.submit([RemoveArtifact(0, ArtifactKind.NAMESPACE, number, 0)]).result()


@pytest.mark.parametrize("name", ["cold", ""])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_a_namespace_that_was_never_used_is_dropped_with_its_epochs(
    manifest: ManifestStore, name: str, epochs: int
) -> None:
    """Hazard: it was kept for ever."""
    namespace_id = manifest.put_namespace("memory://cold", name=name)
    for _ in range(epochs):
        manifest.begin_owner_epoch()
    drop_namespace(manifest, namespace_id)
    assert at_zero(manifest) >= rows_of(manifest, namespace_id)
    drop_namespace(manifest, namespace_id)  # a second time: no effect
    manifest.begin_owner_epoch()  # creates no namespace for the dropped one
    assert at_zero(manifest) >= rows_of(manifest, namespace_id)
    remove_at_zero(manifest)
    assert rows_of(manifest, namespace_id) == set()
    with pytest.raises(UnknownNamespace):
        drop_namespace(manifest, namespace_id)


def test_an_unnamed_namespace_is_removed_with_its_last_database_and_its_epoch(manifest: ManifestStore) -> None:
    namespace_id = manifest.put_namespace("memory://old")
    manifest.begin_owner_epoch()
    db_id = manifest.register_db("shop", DbKind.PAGES, namespace_id=namespace_id)
    manifest.submit([DropDb(db_id)]).result()
    manifest.submit([RemoveDb(db_id)]).result()
    remove_at_zero(manifest)
    remove_at_zero(manifest)
    assert rows_of(manifest, namespace_id) == set()


def test_a_named_namespace_stays_without_databases_and_cannot_be_dropped_while_one_uses_it(
    manifest: ManifestStore,
) -> None:
    namespace_id = manifest.put_namespace("memory://cold", name="cold")
    manifest.begin_owner_epoch()
    db_id = manifest.register_db("shop", DbKind.PAGES, namespace_id=namespace_id)
    with pytest.raises(StillReferenced, match="the namespace is in use by databases"):
        drop_namespace(manifest, namespace_id)
    manifest.submit([DropDb(db_id)]).result()
    with pytest.raises(StillReferenced):
        drop_namespace(manifest, namespace_id)
    manifest.submit([RemoveDb(db_id)]).result()
    assert at_zero(manifest) == set()
    drop_namespace(manifest, namespace_id)
    with pytest.raises(ArtifactGone):
        manifest.register_db("late", DbKind.PAGES, namespace_id=namespace_id)


def test_a_name_and_a_url_belong_to_one_namespace_until_it_is_dropped(manifest: ManifestStore) -> None:
    namespace_id = manifest.put_namespace("memory://cold", name="cold")
    with pytest.raises(NameTaken, match="with this name already exists"):
        manifest.put_namespace("memory://other", name="cold")
    with pytest.raises(NameTaken, match="already uses this location"):
        manifest.put_namespace("memory://cold", name="icy")
    drop_namespace(manifest, namespace_id)
    assert manifest.put_namespace("memory://cold", name="cold") > namespace_id


@pytest.mark.parametrize("point", ["manifest.commit.applied", "manifest.commit.flushed", "manifest.commit.durable"])
def test_a_kill_while_a_namespace_is_dropped_leaves_it_whole_or_dropped(tmp_path: Path, point: str) -> None:
    path = str(tmp_path / "manifest.lmdb")
    with ManifestStore.open(path) as manifest:
        number = manifest.allocate(Counter.NAMESPACE)
        manifest.submit([PutNamespace(number, NamespaceRecord("memory://cold", name="cold"))]).result()
        manifest.begin_owner_epoch()
    child_pid = os.fork()
    if not child_pid:  # LMDB is not open in this process
        with ManifestStore.open(path) as manifest, armed(point, lambda _: os._exit(9)):
            manifest.submit([DropNamespace(number)]).result()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]) == 9
    with ManifestStore.open(path) as manifest:
        assert_clean(manifest)
        manifest.submit([DropNamespace(number)]).result()  # repeated, or for the first time
        with manifest.read() as txn:
            row = txn.get(t.REMOTE_NAMESPACE, number)
        assert row is not None
        assert row.dropped_at_ms
        assert reference_count(manifest, number) == 0
        assert_clean(manifest)
