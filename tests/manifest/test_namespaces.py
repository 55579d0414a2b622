"""Owner epochs: each gives the store names that no owner before it wrote, and lets go of the ones before (A1, issue 18)."""

from __future__ import annotations

import pytest

from quire.core.errors import ArtifactGone, StalePlan
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import PutChunk
from quire.manifest.ops.databases import RegisterDb
from quire.manifest.ops.epochs import BeginOwnerEpoch
from quire.manifest.ops.jobs import StartJob
from quire.manifest.ops.plans import BeginPlan
from quire.manifest.ops.refs import RemoveArtifact
from quire.manifest.reads import BORN_WITH_EPOCHS
from quire.manifest.records import ChunkRecord, DbKind, DbRecord, JobKind, PlanRecord, Residency
from quire.manifest.store import ManifestStore


def held(manifest: ManifestStore, namespace_id: int) -> int:
    with manifest.read() as txn:
        row = txn.refcount(ArtifactKey(0, ArtifactKind.NAMESPACE, namespace_id, 0))
    return 0 if row is None else row.in_use


def test_a_manifest_without_an_epoch_has_names_without_a_prefix(manifest: ManifestStore) -> None:
    with manifest.read() as txn:
        assert txn.owner_epoch() == 0
        namespace_id, record = txn.current_namespace()
    assert (namespace_id, record.url, record.prefix, record.legacy) == (0, "", "", False)


def test_epochs_have_names_of_their_own_below_the_stores_identity(manifest: ManifestStore) -> None:
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
            with manifest.read() as reading:
                assert reading.current_namespace()[1].legacy


def test_the_first_object_begins_the_first_epoch_and_later_ones_none(manifest: ManifestStore) -> None:
    for _ in range(3):
        manifest.ensure_owner_epoch()
    with manifest.read() as txn:
        assert txn.owner_epoch() == 1


def test_a_persons_own_place_has_the_same_epochs_below_it(manifest: ManifestStore) -> None:
    early = manifest.put_namespace("memory://mine", "tenant")
    manifest.begin_owner_epoch()
    late = manifest.put_namespace("memory://other")
    with manifest.read() as txn:
        below = f"{txn.store_id()}/e/00000001"
        assert txn.current_namespace(early)[1].prefix == f"tenant/{below}"
        assert txn.current_namespace(late)[1].prefix == below
        assert txn.current_namespace(late)[1].url == "memory://other"


def test_the_current_epochs_namespace_stays_while_it_is_empty(manifest: ManifestStore) -> None:
    """Hazard (issue 18): an emptied namespace was collected, and the next chunk of it raised `ArtifactGone`."""
    manifest.begin_owner_epoch()
    with manifest.read() as txn:
        namespace_id, _ = txn.current_namespace()
    record = ChunkRecord(Residency.REMOTE_ARCHIVED, 1, 0, namespace_id=namespace_id)
    manifest.submit([RegisterDb(1, DbRecord("a", DbKind.PAGES, 0)), PutChunk(1, 0, 1, record)]).result()
    assert held(manifest, namespace_id) == 2
    from quire.manifest.ops.corrections import CorrectRefcount
    from quire.manifest.ops.refs import artifact_key

    chunk = ArtifactKey(1, ArtifactKind.BASE, 0, 1)
    manifest.submit([CorrectRefcount(artifact_key(chunk), 0, 0)]).result()
    manifest.submit([RemoveArtifact(1, ArtifactKind.BASE, 0, 1)]).result()
    assert held(manifest, namespace_id) == 1
    manifest.submit([PutChunk(1, 0, 2, record)]).result()
    assert not [problem for problem in manifest.check() if not problem.leak]


def test_a_former_epoch_lets_go_of_its_namespace(manifest: ManifestStore) -> None:
    manifest.begin_owner_epoch()
    with manifest.read() as txn:
        former, _ = txn.current_namespace()
    manifest.begin_owner_epoch()
    assert held(manifest, former) == 0
    assert not manifest.check()
    record = ChunkRecord(Residency.REMOTE_ARCHIVED, 1, 0, namespace_id=former)
    with pytest.raises(ArtifactGone):
        manifest.submit([RegisterDb(1, DbRecord("a", DbKind.PAGES, 0)), PutChunk(1, 0, 1, record)]).result()


def test_an_epoch_is_begun_once(manifest: ManifestStore) -> None:
    manifest.begin_owner_epoch()
    with pytest.raises(StalePlan):
        manifest.submit([BeginOwnerEpoch(1, [])]).result()


def test_stored_plans_are_abandoned_when_the_epoch_changes(manifest: ManifestStore) -> None:
    """Hazard (issue 18): a plan of the former owner, run by its successor, would write names of the former epoch (P10)."""
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
        assert row.namespace_id == namespace_id, "what the plan wrote is looked for where it was written"
        assert not [each for each in txn.scan(t.GC_REFCOUNTS, db_id) if each[1].in_use]
    assert not manifest.check()
