"""The steps of the small world: what engines, people and the collector do to a store, in any order.

Rules
  1. A step goes through the store's public door, as an engine would: bytes first, then the rows that name them.
  2. All choices come from the `Random` that a step is given: a seed repeats a run, hypothesis shrinks one.
  3. A step that finds nothing to do does nothing.
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
from tests.machine.world import BASE, DELTA, LOCAL, WAL, Database, World, body
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


def some_database(world: World, rng: Random, step: str) -> Database | None:
    found = one_of(rng, list(world.databases.values()))
    world.doing(step, found.db_id if found else 0)
    return found


def some_namespace(world: World, rng: Random) -> int:
    """None, one that a database of ours holds, or a new one."""
    if rng.randint(0, 2):
        return 0
    with world.store.manifest.read() as txn:
        records = [txn.database(db_id) for db_id in world.databases]
    usable = sorted({record.namespace_id for record in records if record and record.namespace_id})
    if usable and rng.randint(0, 2):
        return rng.choice(usable)
    namespace_id = world.store.manifest.put_namespace(world.other_url, f"n{rng.randint(0, 1)}")
    with world.store.manifest.read() as txn:
        record = txn.namespace(namespace_id)
    assert record is not None
    world.namespaces[namespace_id] = record.prefix
    return namespace_id


# ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def create(world: World, rng: Random) -> None:
    name = rng.choice(NAMES)
    world.doing("create", 0)
    if len(world.databases) < DATABASES_MAX and not world.taken(name):
        namespace_id = some_namespace(world, rng)
        db_id = world.store.manifest.register_db(name, DbKind.PAGES, page_size=4096, namespace_id=namespace_id)
        world.databases[db_id] = Database(db_id, name)


def rename(world: World, rng: Random) -> None:
    db = some_database(world, rng, "rename")
    if db is not None:
        name = rng.choice(NAMES)
        try:
            world.store.rename(db.name, name)
            db.name = name
        except NameTaken:
            assert world.taken(name)


def drop(world: World, rng: Random) -> None:
    """With its snapshots, or without: then one that has any stays."""
    db = some_database(world, rng, "drop")
    if db is None:
        return
    snapshots = bool(rng.randint(0, 1))
    try:
        world.store.drop(db.name, snapshots=snapshots)
    except StillReferenced:
        assert db.snapshots
        assert not snapshots
        return
    assert snapshots or not db.snapshots
    world.events[AuditAction.SNAPSHOT_DROPPED] += len(db.snapshots)
    world.events[AuditAction.DATABASE_DROPPED] += 1
    world.lingering |= {key for key in world.orphans if key.origin_db_id == db.db_id}
    world.orphans -= world.lingering
    del world.databases[db.db_id]


# ── what an engine does ───────────────────────────────────────────────────────────────────────────────────────────────
def seal(world: World, rng: Random) -> None:
    """A WAL segment is full; its pages may be in the index already."""
    db = some_database(world, rng, "seal")
    if db is None:
        return
    manifest = world.store.manifest
    with manifest.read() as txn:
        wal = txn.wal_state(db.db_id)
    assert wal is not None
    key, lsn = ArtifactKey(db.db_id, WAL, wal.next_segment_id, 0), wal.lsn_reserved + 1
    assert all(key.id > inherited.id for inherited in db.segments), "numbering goes on along a line (P12)"
    world.make(key, Residency.LOCAL)
    update = WalChunkUpdate(segment_id=key.id, first_lsn=lsn, last_lsn=lsn + 2, used_bytes=len(body(key)))
    append_wal_chunk(manifest, db.db_id, update).result()
    db.segments[key] = False
    if rng.randint(0, 1):
        row = ROW.pack(rng.randint(1, 3), 0, lsn, 0, 7, key.id, db.db_id, 0, 0)
        manifest.submit([PublishPages(db.db_id, row)]).result()


def checkpoint(world: World, rng: Random) -> None:
    """Slots get new bases or deltas; what was sealed is absorbed."""
    db = some_database(world, rng, "checkpoint")
    if db is None:
        return
    manifest, db_id = world.store.manifest, db.db_id
    generation = manifest.reserve_generation(db_id)
    with manifest.read() as txn:
        wal = txn.wal_state(db_id)
    assert wal is not None
    lsn = wal.last_applied_lsn + 1
    manifest.submit([AdvanceWal(db_id, 0, lsn, lsn, lsn)]).result()
    namespace_id = some_namespace(world, rng)
    slots = sorted(set(rng.choices(SLOTS, k=rng.randint(1, 3))))
    mutations = [_mutation(world, rng, db, slot, generation, namespace_id) for slot in slots]
    checkpoint_apply(manifest, db_id, generation, mutations, covered_lsn=lsn).result()
    for each in mutations:
        if isinstance(each, FullChunk):
            db.chains[each.slot] = (ArtifactKey(db_id, BASE, each.slot, generation),)
        else:
            delta = ArtifactKey(db_id, DELTA, each.slot, generation, each.delta_id)
            db.chains[each.slot] = (*db.chains[each.slot], delta)
    for key, absorbed in db.segments.items():
        if not absorbed:
            _move_to(world, db_id, key, WalState.CHECKPOINTED)
            db.segments[key] = True


def _mutation(world: World, rng: Random, db: Database, slot: int, generation: int, namespace_id: int) -> ChunkMutation:
    chain = db.chains.get(slot, ())
    if chain and rng.randint(0, 1):
        key = ArtifactKey(db.db_id, DELTA, slot, generation, len(chain))
        world.make(key, REMOTE, namespace_id)
        delta = DeltaRecord(chain[0].generation, REMOTE, len(body(key)), 0, namespace_id=namespace_id)
        return DeltaChunk(slot=slot, delta_id=len(chain), record=delta)
    key = ArtifactKey(db.db_id, BASE, slot, generation)
    world.make(key, REMOTE, namespace_id)
    return FullChunk(slot=slot, record=ChunkRecord(REMOTE, len(body(key)), 0, namespace_id=namespace_id))


def _move_to(world: World, db_id: int, key: ArtifactKey, last: WalState) -> None:
    manifest = world.store.manifest
    with manifest.read() as txn:
        row = txn.get(t.WAL_CATALOG, db_id, key.id)
    assert row is not None
    for state in range(row.state + 1, last + 1):
        manifest.submit([MoveWalState(db_id, key.id, WalState(state))]).result()


def truncate(world: World, rng: Random) -> None:
    """Segments that a checkpoint has absorbed are let go."""
    db = some_database(world, rng, "truncate")
    if db is not None:
        for key in [key for key, absorbed in db.segments.items() if absorbed]:
            _move_to(world, db.db_id, key, WalState.TRUNCATED)
            del db.segments[key]


def shrink(world: World, rng: Random) -> None:
    """A slot behind the end of the database goes."""
    db = some_database(world, rng, "shrink")
    slot = one_of(rng, sorted(db.chains)) if db else None
    if db is None or slot is None:
        return
    manifest = world.store.manifest
    generation = manifest.reserve_generation(db.db_id)
    leaf, offset = place(slot)
    with manifest.read() as txn:
        held = txn.get(t.LIVE_LEAF, db.db_id, leaf)
    assert held is not None
    cut = SetSlots(db.db_id, leaf, generation, held.origin_db_id, held.generation, b"", bytes([offset]))
    manifest.submit([cut]).result()
    del db.chains[slot]


def abandon(world: World, rng: Random) -> None:
    """A checkpoint got as far as the catalog, and no further."""
    db = some_database(world, rng, "abandon")
    if db is not None:
        generation = world.store.manifest.reserve_generation(db.db_id)
        key = ArtifactKey(db.db_id, BASE, rng.choice(SLOTS), generation)
        world.make(key, REMOTE)
        row = ChunkRecord(REMOTE, len(body(key)), 0)
        world.store.manifest.submit([PutChunk(db.db_id, key.id, generation, row)]).result()
        world.orphans.add(key)


# ── where bytes are ───────────────────────────────────────────────────────────────────────────────────────────────────
def hold(world: World, rng: Random) -> None:
    """An upload of a segment is enqueued: it needs the bytes until it ends, whatever becomes of the database."""
    db = some_database(world, rng, "hold")
    local = [key for key in db.segments if world.artifacts[key].residency is Residency.LOCAL] if db else []
    key = one_of(rng, [key for key in sorted(local) if key not in world.held.values()])
    if key is not None:
        job_id = world.store.manifest.jobs.enqueue(
            JobKind.UPLOAD, key.origin_db_id, artifact=key, delay_seconds=NEVER_SECONDS
        )
        world.held[job_id] = key


def let_go(world: World, rng: Random) -> None:
    """An upload ends: it was cancelled, or the object is there now."""
    world.doing("let_go", 0)
    job_id = one_of(rng, sorted(world.held))
    if job_id is None:
        return
    jobs, key = world.store.manifest.jobs, world.held[job_id]
    if rng.randint(0, 1):
        jobs.cancel(job_id)
    else:
        namespace_id = some_namespace(world, rng)
        world.store.manifest.submit([StartJob(job_id, "uploader", 0)]).result()
        world.write(key, world.object_of(key, namespace_id))
        moved = UpdateArtifact(key.origin_db_id, WAL, key.id, 0, residency=BOTH, namespace_id=namespace_id)
        jobs.complete(jobs.get(job_id), ops=[moved])
        world.artifacts[key].residency, world.artifacts[key].namespace_id = BOTH, namespace_id
        world.events[AuditAction.UPLOADED] += 1
    del world.held[job_id]


def evict_or_hydrate(world: World, rng: Random) -> None:
    """A file goes because its object suffices, or comes because it is read often."""
    world.doing("evict_or_hydrate", 0)
    movable = [key for key in world.needed() if world.artifacts[key].residency is not Residency.LOCAL]
    key = one_of(rng, sorted(movable))
    if key is None:
        return
    path, artifact = world.file_of(key), world.artifacts[key]
    goes = artifact.residency is BOTH
    if not goes:
        world.write(key, (LOCAL, path))
    artifact.residency = Residency.EVICTED if goes else BOTH
    moved = UpdateArtifact(
        key.origin_db_id, key.kind, key.id, key.generation, key.delta_id, residency=artifact.residency
    )
    world.store.manifest.submit([moved]).result()
    world.events[AuditAction.EVICTED if goes else AuditAction.HYDRATED] += 1
    if goes:
        os.remove(os.path.join(world.path, path))
