"""The steps of the state machine: what engines, users and the collector do to a store, in any order.

Rules
  1. A step uses the store as an engine does: it writes bytes first, then the rows that refer to them.
  2. All choices come from the `Random` that is passed to a step, so that a seed repeats a run and hypothesis can shrink one.
  3. A step that is not applicable does nothing.
"""

from __future__ import annotations

import os
from random import Random
from typing import TypeVar

from quire.core.errors import NameTaken, StillReferenced
from quire.core.ids import ArtifactKey
from quire.manifest import tables as t
from quire.manifest.ops.artifacts import PutChunk, UpdateArtifact
from quire.manifest.ops.jobs import StartJob
from quire.manifest.ops.pageindex import ROW, PublishPages
from quire.manifest.ops.slots import SetSlots
from quire.manifest.ops.wal import AdvanceWal, MoveWalState
from quire.manifest.records import (
    AuditAction,
    ChunkRecord,
    DbKind,
    DeltaRecord,
    JobKind,
    Residency,
    WalState,
)
from quire.manifest.slots import place
from tests.machine.model import BASE, DELTA, LOCAL, WAL, Database, StoreModel, body
from tests.manifest.checkpoints import (
    ChunkMutation,
    DeltaChunk,
    FullChunk,
    WalChunkUpdate,
    append_wal_chunk,
    checkpoint_apply,
)

NAMES = ("ash", "birch", "cedar", "élan", "fir")
SLOTS = (0, 1, 255, 256)
DATABASES_MAX = 6
NEVER_SECONDS = 1e9
REMOTE, BOTH = Residency.REMOTE_ARCHIVED, Residency.LOCAL_AND_REMOTE
T = TypeVar("T")


def one_of(rng: Random, items: list[T]) -> T | None:
    return rng.choice(items) if items else None


def some_database(model: StoreModel, rng: Random, step: str) -> Database | None:
    db = one_of(rng, list(model.databases.values()))
    model.on_step(step, db.db_id if db else 0)
    return db


def some_namespace(model: StoreModel, rng: Random) -> int:
    """The default namespace, one that an existing database uses, or a new one."""
    if rng.randint(0, 2):
        return 0
    with model.store.manifest.read() as txn:
        records = [txn.database(db_id) for db_id in model.databases]
    usable = sorted({record.namespace_id for record in records if record and record.namespace_id})
    if usable and rng.randint(0, 2):
        return rng.choice(usable)
    namespace_id = model.store.manifest.put_namespace(model.namespaces_url, f"n{rng.randint(0, 1)}")
    with model.store.manifest.read() as txn:
        record = txn.namespace(namespace_id)
    assert record is not None
    model.namespaces[namespace_id] = record.prefix
    return namespace_id


# ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def create(model: StoreModel, rng: Random) -> None:
    name = rng.choice(NAMES)
    model.on_step("create", 0)
    if len(model.databases) < DATABASES_MAX and not model.is_name_taken(name):
        namespace_id = some_namespace(model, rng)
        db_id = model.store.manifest.register_db(name, DbKind.PAGES, page_size=4096, namespace_id=namespace_id)
        model.databases[db_id] = Database(db_id, name)


def rename(model: StoreModel, rng: Random) -> None:
    db = some_database(model, rng, "rename")
    if db is not None:
        name = rng.choice(NAMES)
        try:
            model.store.rename(db.name, name)
            db.name = name
        except NameTaken:
            assert model.is_name_taken(name)


def drop(model: StoreModel, rng: Random) -> None:
    """With or without its snapshots; a database that has snapshots is not dropped without them."""
    db = some_database(model, rng, "drop")
    if db is None:
        return
    snapshots = bool(rng.randint(0, 1))
    try:
        model.store.drop(db.name, snapshots=snapshots)
    except StillReferenced:
        assert db.snapshots
        assert not snapshots
        return
    assert snapshots or not db.snapshots
    model.events[AuditAction.SNAPSHOT_DROPPED] += len(db.snapshots)
    model.events[AuditAction.DATABASE_DROPPED] += 1
    model.dropped_orphans |= {key for key in model.orphans if key.origin_db_id == db.db_id}
    model.orphans -= model.dropped_orphans
    del model.databases[db.db_id]


# ── engines ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def seal(model: StoreModel, rng: Random) -> None:
    """Add a sealed WAL segment. Its pages may be in the page index already."""
    db = some_database(model, rng, "seal")
    if db is None:
        return
    manifest = model.store.manifest
    with manifest.read() as txn:
        wal = txn.wal_state(db.db_id)
    assert wal is not None
    key, lsn = ArtifactKey(db.db_id, WAL, wal.next_segment_id, 0), wal.lsn_reserved + 1
    assert all(key.id > earlier.id for earlier in db.segments), (
        "segment numbers keep rising from a database to its forks (P12)"
    )
    model.create_artifact(key, Residency.LOCAL)
    update = WalChunkUpdate(segment_id=key.id, first_lsn=lsn, last_lsn=lsn + 2, used_bytes=len(body(key)))
    append_wal_chunk(manifest, db.db_id, update).result()
    db.segments[key] = False
    if rng.randint(0, 1):
        row = ROW.pack(rng.randint(1, 3), 0, lsn, 0, 7, key.id, db.db_id, 0, 0)
        manifest.submit([PublishPages(db.db_id, row)]).result()


def checkpoint(model: StoreModel, rng: Random) -> None:
    """Give some slots new bases or deltas; the checkpoint absorbs all sealed segments."""
    db = some_database(model, rng, "checkpoint")
    if db is None:
        return
    manifest, db_id = model.store.manifest, db.db_id
    generation = manifest.reserve_generation(db_id)
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
    assert wal is not None
    lsn = wal.last_applied_lsn + 1
    manifest.submit([AdvanceWal(db_id, 0, lsn, lsn, lsn)]).result()
    namespace_id = some_namespace(model, rng)
    slots = sorted(set(rng.choices(SLOTS, k=rng.randint(1, 3))))
    mutations = [_mutation(model, rng, db, slot, generation, namespace_id) for slot in slots]
    checkpoint_apply(manifest, db_id, generation, mutations, covered_lsn=lsn).result()
    for mutation in mutations:
        if isinstance(mutation, FullChunk):
            db.chains[mutation.slot] = (ArtifactKey(db_id, BASE, mutation.slot, generation),)
        else:
            delta = ArtifactKey(db_id, DELTA, mutation.slot, generation, mutation.delta_id)
            db.chains[mutation.slot] = (*db.chains[mutation.slot], delta)
    for key, absorbed in db.segments.items():
        if not absorbed:
            _move_to(model, db_id, key, WalState.CHECKPOINTED)
            db.segments[key] = True


def _mutation(
    model: StoreModel, rng: Random, db: Database, slot: int, generation: int, namespace_id: int
) -> ChunkMutation:
    chain = db.chains.get(slot, ())
    if chain and rng.randint(0, 1):
        key = ArtifactKey(db.db_id, DELTA, slot, generation, len(chain))
        model.create_artifact(key, REMOTE, namespace_id)
        delta = DeltaRecord(chain[0].generation, REMOTE, len(body(key)), 0, namespace_id=namespace_id)
        return DeltaChunk(slot=slot, delta_id=len(chain), record=delta)
    key = ArtifactKey(db.db_id, BASE, slot, generation)
    model.create_artifact(key, REMOTE, namespace_id)
    return FullChunk(slot=slot, record=ChunkRecord(REMOTE, len(body(key)), 0, namespace_id=namespace_id))


def _move_to(model: StoreModel, db_id: int, key: ArtifactKey, last: WalState) -> None:
    manifest = model.store.manifest
    with manifest.read() as txn:
        row = txn.get(t.WAL_CATALOG, db_id, key.id)
    assert row is not None
    for state in range(row.state + 1, last + 1):
        manifest.submit([MoveWalState(db_id, key.id, WalState(state))]).result()


def truncate(model: StoreModel, rng: Random) -> None:
    """Release the segments that a checkpoint has absorbed."""
    db = some_database(model, rng, "truncate")
    if db is not None:
        for key in [key for key, absorbed in db.segments.items() if absorbed]:
            _move_to(model, db.db_id, key, WalState.TRUNCATED)
            del db.segments[key]


def shrink(model: StoreModel, rng: Random) -> None:
    """Remove a slot, as after a VACUUM."""
    db = some_database(model, rng, "shrink")
    slot = one_of(rng, sorted(db.chains)) if db else None
    if db is None or slot is None:
        return
    manifest = model.store.manifest
    generation = manifest.reserve_generation(db.db_id)
    leaf, offset = place(slot)
    with manifest.read() as txn:
        live_leaf = txn.get(t.LIVE_LEAF, db.db_id, leaf)
    assert live_leaf is not None
    removal = SetSlots(db.db_id, leaf, generation, live_leaf.origin_db_id, live_leaf.generation, b"", bytes([offset]))
    manifest.submit([removal]).result()
    del db.chains[slot]


def abandon(model: StoreModel, rng: Random) -> None:
    """Leave a checkpoint unfinished after its first chunk is in the catalog."""
    db = some_database(model, rng, "abandon")
    if db is not None:
        generation = model.store.manifest.reserve_generation(db.db_id)
        key = ArtifactKey(db.db_id, BASE, rng.choice(SLOTS), generation)
        model.create_artifact(key, REMOTE)
        row = ChunkRecord(REMOTE, len(body(key)), 0)
        model.store.manifest.submit([PutChunk(db.db_id, key.id, generation, row)]).result()
        model.orphans.add(key)


# ── residency ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def start_upload(model: StoreModel, rng: Random) -> None:
    """Enqueue the upload of a segment. The job needs the bytes until it ends, even if the database is dropped."""
    db = some_database(model, rng, "start_upload")
    local = [key for key in db.segments if model.artifacts[key].residency is Residency.LOCAL] if db else []
    key = one_of(rng, [key for key in sorted(local) if key not in model.uploads.values()])
    if key is not None:
        job_id = model.store.manifest.jobs.enqueue(
            JobKind.UPLOAD, key.origin_db_id, artifact=key, delay_seconds=NEVER_SECONDS
        )
        model.uploads[job_id] = key


def finish_upload(model: StoreModel, rng: Random) -> None:
    """End an upload: it is cancelled, or its object is written."""
    model.on_step("finish_upload", 0)
    job_id = one_of(rng, sorted(model.uploads))
    if job_id is None:
        return
    jobs, key = model.store.manifest.jobs, model.uploads[job_id]
    if rng.randint(0, 1):
        jobs.cancel(job_id)
    else:
        namespace_id = some_namespace(model, rng)
        model.store.manifest.submit([StartJob(job_id, "uploader", 0)]).result()
        model.write(key, model.object_of(key, namespace_id))
        update = UpdateArtifact(key.origin_db_id, WAL, key.id, 0, residency=BOTH, namespace_id=namespace_id)
        jobs.complete(jobs.get(job_id), ops=[update])
        model.artifacts[key].residency, model.artifacts[key].namespace_id = BOTH, namespace_id
        model.events[AuditAction.UPLOADED] += 1
    del model.uploads[job_id]


def evict_or_hydrate(model: StoreModel, rng: Random) -> None:
    """Delete the file of an artifact that has an object, or restore it."""
    model.on_step("evict_or_hydrate", 0)
    movable = [key for key in model.needed() if model.artifacts[key].residency is not Residency.LOCAL]
    key = one_of(rng, sorted(movable))
    if key is None:
        return
    path, artifact = model.file_of(key), model.artifacts[key]
    is_eviction = artifact.residency is BOTH
    if not is_eviction:
        model.write(key, (LOCAL, path))
    artifact.residency = Residency.EVICTED if is_eviction else BOTH
    update = UpdateArtifact(
        key.origin_db_id, key.kind, key.id, key.generation, key.delta_id, residency=artifact.residency
    )
    model.store.manifest.submit([update]).result()
    model.events[AuditAction.EVICTED if is_eviction else AuditAction.HYDRATED] += 1
    if is_eviction:
        os.remove(os.path.join(model.path, path))
