"""Owner epochs: each gives the store names that no owner before it wrote, and lets go of the ones before (A1)."""

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
    """Hazard: an emptied namespace was collected, and the next chunk of it raised `ArtifactGone`."""
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
        assert row.namespace_id == namespace_id, "what the plan wrote is looked for where it was written"
        assert not [each for each in txn.scan(t.GC_REFCOUNTS, db_id) if each[1].in_use]
    assert not manifest.check()


# ── places with names ─────────────────────────────────────────────────────────────────────────────────────────────────
def rows_of(manifest: ManifestStore, place_id: int) -> set[int]:
    with manifest.read() as txn:
        rows = {key[0]: row for key, row in txn.scan(t.REMOTE_NAMESPACE)}
    return {number for number, row in rows.items() if number == place_id or row.place_id == place_id}


def doomed(manifest: ManifestStore) -> set[int]:
    with manifest.read() as txn:
        return {key[2] for key, _ in txn.scan(t.GC_ZERO, 0)}


def remove_doomed(manifest: ManifestStore) -> None:
    for number in doomed(manifest):
        manifest.submit([RemoveArtifact(0, ArtifactKind.NAMESPACE, number, 0)]).result()


@pytest.mark.parametrize("name", ["cold", ""])
@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_a_place_that_nothing_ever_referred_to_is_dropped_with_its_epochs(
    manifest: ManifestStore, name: str, epochs: int
) -> None:
    """It stayed for ever."""
    place = manifest.put_namespace("memory://cold", name=name)
    for _ in range(epochs):
        manifest.begin_owner_epoch()
    drop_namespace(manifest, place)
    assert doomed(manifest) >= rows_of(manifest, place)
    drop_namespace(manifest, place)  # a second time: nothing
    manifest.begin_owner_epoch()  # which gives the dropped place none of its own
    assert doomed(manifest) >= rows_of(manifest, place)
    remove_doomed(manifest)
    assert rows_of(manifest, place) == set()
    with pytest.raises(UnknownNamespace):
        drop_namespace(manifest, place)


def test_a_place_without_a_name_goes_with_its_last_database_and_its_epoch_with_it(manifest: ManifestStore) -> None:
    place = manifest.put_namespace("memory://old")
    manifest.begin_owner_epoch()
    db_id = manifest.register_db("shop", DbKind.PAGES, namespace_id=place)
    manifest.submit([DropDb(db_id)]).result()
    manifest.submit([RemoveDb(db_id)]).result()
    remove_doomed(manifest)
    remove_doomed(manifest)
    assert rows_of(manifest, place) == set()


def test_a_place_with_a_name_stays_without_databases_and_is_kept_by_one(manifest: ManifestStore) -> None:
    place = manifest.put_namespace("memory://cold", name="cold")
    manifest.begin_owner_epoch()
    db_id = manifest.register_db("shop", DbKind.PAGES, namespace_id=place)
    with pytest.raises(StillReferenced, match="the namespace is in use by databases"):
        drop_namespace(manifest, place)
    manifest.submit([DropDb(db_id)]).result()
    with pytest.raises(StillReferenced):
        drop_namespace(manifest, place)
    manifest.submit([RemoveDb(db_id)]).result()
    assert doomed(manifest) == set()
    drop_namespace(manifest, place)
    with pytest.raises(ArtifactGone):
        manifest.register_db("late", DbKind.PAGES, namespace_id=place)


def test_a_name_and_a_url_belong_to_one_place_until_it_is_dropped(manifest: ManifestStore) -> None:
    place = manifest.put_namespace("memory://cold", name="cold")
    with pytest.raises(NameTaken, match="with this name already exists"):
        manifest.put_namespace("memory://other", name="cold")
    with pytest.raises(NameTaken, match="already uses this location"):
        manifest.put_namespace("memory://cold", name="icy")
    drop_namespace(manifest, place)
    assert manifest.put_namespace("memory://cold", name="cold") > place


@pytest.mark.parametrize("point", ["manifest.commit.applied", "manifest.commit.flushed", "manifest.commit.durable"])
def test_a_kill_while_a_namespace_is_dropped_leaves_it_whole_or_dropped(tmp_path: Path, point: str) -> None:
    path = str(tmp_path / "manifest.lmdb")
    with ManifestStore.open(path) as manifest:
        number = manifest.allocate(Counter.NAMESPACE)
        manifest.submit([PutNamespace(number, NamespaceRecord("memory://cold", name="cold"))]).result()
        manifest.begin_owner_epoch()
    killed = os.fork()
    if not killed:  # nothing of LMDB is open here
        with ManifestStore.open(path) as manifest, armed(point, lambda _: os._exit(9)):
            manifest.submit([DropNamespace(number)]).result()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == 9
    with ManifestStore.open(path) as manifest:
        assert_clean(manifest)
        manifest.submit([DropNamespace(number)]).result()  # again, or for the first time
        with manifest.read() as txn:
            row = txn.get(t.REMOTE_NAMESPACE, number)
        assert row is not None
        assert row.dropped_at_ms
        assert held(manifest, number) == 0
        assert_clean(manifest)
