"""A small store for tests of jobs: a manifest, real files, an object store, a worker, and time that stands still.

`assert_sound` is what must hold at any moment, after a crash too; `assert_settled` what must hold when nothing is under way.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from quire.core.errors import ObjectNotFound
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings
from quire.durable.files import Disk, OsDisk
from quire.durable.names import object_key
from quire.jobs.context import JobContext
from quire.jobs.locations import ArtifactLocation, OpenStore, StorePool
from quire.jobs.maintenance import Upkeep
from quire.jobs.registry import HANDLERS
from quire.jobs.residency import request_evict, request_upload
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.namespaces import collector_of
from quire.manifest.ops.wal import AdvanceWal
from quire.manifest.reads import ReadTxn
from quire.manifest.records import ChunkRecord, DbKind, DeltaRecord, JobKind, JobState, Residency
from quire.manifest.store import ManifestStore
from quire.objects.api import list_objects
from quire.objects.open import open_store
from quire.pages.segment import HEADER_BYTES, Geometry, SegmentHeader, encode
from quire.pages.segment_scan import entries_of, parse_heads
from quire.testing.clock import ManualClock
from quire.testing.manifest import assert_clean, assert_replays
from tests.manifest.checkpoints import (
    ChunkMutation,
    DeltaChunk,
    FullChunk,
    WalChunkUpdate,
    append_wal_chunk,
    checkpoint_apply,
)

GRACE_SECONDS = 60.0
SETTINGS = MaintenanceSettings(delete_grace_seconds=GRACE_SECONDS)
LOCAL, BOTH, ARCHIVED, EVICTED = (
    Residency.LOCAL,
    Residency.LOCAL_AND_REMOTE,
    Residency.REMOTE_ARCHIVED,
    Residency.EVICTED,
)

UNDER_WAY = (JobState.PENDING, JobState.IN_FLIGHT)

_bodies = itertools.count(1)


def body(size: int = 100) -> bytes:
    """Bytes unlike any other body's."""
    seed = next(_bodies).to_bytes(8, "big")
    return b"".join(sha256(seed + block.to_bytes(4, "big")).digest() for block in range(size // 32 + 1))[:size]


def request_verify(manifest: ManifestStore) -> int:
    """Have the whole store verified; the job."""
    return manifest.jobs.enqueue(JobKind.VERIFY, 0)


def request_retention(manifest: ManifestStore, db: int | str, *, force: bool = False) -> int:
    """Have a database's policy applied; the job."""
    with manifest.read() as txn:
        db_id = txn.database_id(db) if isinstance(db, str) else db
    return manifest.jobs.enqueue(JobKind.RETENTION, db_id, {"force": True} if force else None)


@dataclass
class World:
    """One store. `disk` and `opener` may be ones that fail."""

    root: str
    objects_url: str
    manifest_path: str = ""
    clock: ManualClock = field(default_factory=ManualClock)
    disk: Disk = field(default_factory=OsDisk)
    opener: OpenStore = open_store
    settings: MaintenanceSettings = SETTINGS
    bodies: dict[ArtifactKey, bytes] = field(default_factory=dict)
    """What the artifacts made here are made of."""
    is_damaged: bool = False
    """The test has damaged copies: that they are not what rows promise is what it is about."""

    def __post_init__(self) -> None:
        path = self.manifest_path or os.path.join(self.root, "manifest.lmdb")
        self.manifest = ManifestStore.open(path, clock=self.clock)
        self.stores = StorePool(lambda url: self.opener(url))
        self.ctx = JobContext(
            manifest=self.manifest,
            root=self.root,
            disk=self.disk,
            objects_url=self.objects_url,
            open_store=self.stores,
            collector=collector_of(self.manifest, self.objects_url, self.stores),
            settings=self.settings,
        )
        self.worker = Worker(self.ctx, HANDLERS)
        self.upkeep = Upkeep(self.ctx, self.worker)

    def worker_of(self, **more: Any) -> Worker:
        """Another worker of the same store."""
        return Worker(self.ctx, HANDLERS, **more)

    def close(self) -> None:
        self.upkeep.stop()
        self.stores.close()
        self.manifest.close()

    # ── making things ─────────────────────────────────────────────────────────────────────────────────────────────────
    def database(self, name: str = "shop", *, namespace_id: int = 0) -> int:
        return self.manifest.register_db(name, DbKind.PAGES, page_size=4096, namespace_id=namespace_id)

    def chunks(
        self, db_id: int, *slots: int, residency: Residency = LOCAL, size: int = 100, **row: Any
    ) -> list[ArtifactKey]:
        """A checkpoint that rewrites these slots, bytes and all."""
        return self._checkpoint(db_id, slots, residency, size, delta=False, row=row)

    def deltas(self, db_id: int, *slots: int, residency: Residency = LOCAL, size: int = 50) -> list[ArtifactKey]:
        """A checkpoint that overlays these slots."""
        return self._checkpoint(db_id, slots, residency, size, delta=True, row={})

    def _checkpoint(
        self, db_id: int, slots: tuple[int, ...], residency: Residency, size: int, *, delta: bool, row: dict[str, Any]
    ) -> list[ArtifactKey]:
        manifest, now = self.manifest, self.clock.now_ms()
        generation = manifest.reserve_generation(db_id)
        keys: list[ArtifactKey] = []
        mutations: list[ChunkMutation] = []
        with manifest.read() as txn:
            wal = txn.wal_state(db_id)
            chains = {slot: txn.chain(db_id, slot) for slot in slots}
        assert wal is not None
        for slot in slots:
            data = body(size)
            if delta:
                number, base = len(chains[slot]), chains[slot][0].generation
                keys.append(ArtifactKey(db_id, ArtifactKind.DELTA, slot, generation, number))
                record = DeltaRecord(base, residency, size, now, sha256=_known(residency, data))
                mutations.append(DeltaChunk(slot=slot, delta_id=number, record=record))
            else:
                keys.append(ArtifactKey(db_id, ArtifactKind.BASE, slot, generation))
                chunk = ChunkRecord(residency, size, now, sha256=_known(residency, data), **row)
                mutations.append(FullChunk(slot=slot, record=chunk))
            self.bodies[keys[-1]] = data
        lsn = wal.last_applied_lsn + 1
        manifest.submit([AdvanceWal(db_id, 0, lsn, lsn, lsn)]).result()
        checkpoint_apply(manifest, db_id, generation, mutations, covered_lsn=lsn).result()
        for key in keys:
            self.write(key)
        return keys

    def segment(self, db_id: int, size: int = 0, *, file_bytes: int = 0, crc64: int = 0) -> ArtifactKey:
        """A sealed WAL segment, in a file that may be longer than what is used of it; with a size, of bytes that are none."""
        with self.manifest.read() as txn:
            wal = txn.wal_state(db_id)
        assert wal is not None
        key = ArtifactKey(db_id, ArtifactKind.WAL, wal.next_segment_id, 0)
        lsn = wal.lsn_reserved + 1
        self.bodies[key] = body(size) if size else _segment_of_one(db_id, key.id, lsn)
        size = len(self.bodies[key])
        update = WalChunkUpdate(segment_id=key.id, first_lsn=lsn, last_lsn=lsn, used_bytes=size, crc64=crc64)
        append_wal_chunk(self.manifest, db_id, update).result()
        self.write(key, self.bodies[key].ljust(file_bytes, b"\0"))
        return key

    def write(self, key: ArtifactKey, data: bytes | None = None) -> None:
        """Make the copies that the row promises."""
        place = self.place(key)
        data = self.bodies[key] if data is None else data
        if place.has_local:
            Path(place.local).parent.mkdir(parents=True, exist_ok=True)
            Path(place.local).write_bytes(data)
        if place.has_remote:
            open_store(place.url).put(place.object_key, data)

    def artifact(self, residency: Residency, db_id: int = 0) -> ArtifactKey:
        """An artifact that has come to this residency by jobs, as far as there are jobs that lead there."""
        (key,) = self.chunks(db_id or self.database(f"db-{next(_bodies)}"), 1, residency=_ORIGIN[residency])
        if residency in (BOTH, EVICTED):
            self.done(request_upload(self.manifest, key))
        if residency is EVICTED:
            self.done(request_evict(self.manifest, key))
        assert self.row(key).residency is residency
        return key

    # ── doing things ──────────────────────────────────────────────────────────────────────────────────────────────────
    def done(self, job_id: int) -> Any:
        """Run what is due; this job must succeed. Its result."""
        self.worker.drain()
        job = self.job(job_id)
        assert job.state is JobState.SUCCEEDED, f"{job.kind.name} is {job.state.name}: {job.record.error}"
        return job.result

    def failed(self, job_id: int) -> str:
        """Run what is due; this job must fail for good. Its error."""
        self.worker.drain()
        job = self.job(job_id)
        assert job.state is JobState.FAILED_PERMANENT, f"{job.kind.name} is {job.state.name}: {job.record.error}"
        return job.record.error

    def settle(self, seconds: float = 4 * GRACE_SECONDS) -> None:
        """Maintenance, again and again, until every job has ended and nothing is to be deleted."""
        for _ in range(40):
            self.upkeep.run_once()
            with self.manifest.read() as txn:
                waiting = [job_id for state in UNDER_WAY for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, state)]
                if not waiting and not txn.count(t.GC_ZERO):
                    return
            self.clock.advance(seconds)
        raise AssertionError(f"jobs do not end: {[self.job(job_id) for job_id in waiting]}")

    # ── looking ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def job(self, job_id: int) -> Job:
        return self.manifest.jobs.get(job_id)

    def row(self, key: ArtifactKey) -> Any:
        with self.manifest.read() as txn:
            return txn.artifact(key)

    def place(self, key: ArtifactKey) -> ArtifactLocation:
        with self.manifest.read() as txn:
            place = self.ctx.place(txn, key)
        assert place is not None, key
        return place

    def file(self, key: ArtifactKey) -> bytes | None:
        path = Path(self.place(key).local)
        return path.read_bytes() if path.exists() else None

    def object(self, key: ArtifactKey) -> bytes | None:
        place = self.place(key)
        try:
            return open_store(place.url).get(place.object_key)
        except ObjectNotFound:
            return None

    def files(self) -> set[str]:
        """Every file of databases, relative to the store."""
        found = set[str]()
        for top in ("pages", "streams", "lsm"):
            for folder, _, names in os.walk(os.path.join(self.root, top)):
                found.update(os.path.relpath(os.path.join(folder, name), self.root) for name in names)
        return found

    def artifacts(self) -> dict[ArtifactKey, ArtifactLocation]:
        """Every artifact of the catalog that is not being deleted."""
        with self.manifest.read() as txn:
            return {key: self.ctx.place_of(txn, key, row) for key, row in _rows(txn) if not _is_doomed(txn, key)}

    # ── holding it to its rules ───────────────────────────────────────────────────────────────────────────────────────
    def assert_sound(self) -> None:
        """The manifest breaks no rule, and every copy that a row promises is there, whole."""
        assert_clean(self.manifest, leaks=True)
        for key, place in self.artifacts().items():
            if place.has_local:
                data = Path(place.local).read_bytes()
                assert data[: place.size_bytes] == self.bodies.get(key, data)[: place.size_bytes], f"{key}: bad file"
            if place.has_remote:
                data = open_store(place.url).get(place.object_key)
                assert data == self.bodies.get(key, data), f"{key}: bad object"

    def assert_settled(self, *stores: str) -> None:
        """Sound, and there is no byte that no row promises, and none that is to be deleted."""
        self.assert_sound()
        with self.manifest.read() as txn:
            assert not list(txn.raw_scan(t.GC_ZERO)), "something is still to be deleted"
        places = self.artifacts()
        expected = {os.path.relpath(place.local, self.root) for place in places.values() if place.has_local}
        assert self.files() == expected, "files that no row promises"
        for url in {self.objects_url, *stores}:
            promised = {place.object_key for place in places.values() if place.has_remote and place.url == url}
            assert {info.key for info in list_objects(open_store(url))} == promised, "objects that no row promises"

    def assert_replays(self) -> None:
        """The feed gives the same manifest again, if it is whole: a round of upkeep may have trimmed it."""
        with self.manifest.read() as txn:
            whole = txn.feed_bounds()[0] == 1
        if whole:
            assert_replays(self.manifest)


def epoch_name(manifest: ManifestStore, key: ArtifactKey) -> str:
    """The name that an artifact's object gets in the current owner epoch, in the store's own object store."""
    manifest.ensure_owner_epoch()
    with manifest.read() as txn:
        return f"{txn.current_namespace()[1].prefix}/{object_key(key)}"


_ORIGIN = {LOCAL: LOCAL, BOTH: LOCAL, EVICTED: LOCAL, ARCHIVED: ARCHIVED}


def _segment_of_one(db_id: int, segment_id: int, lsn: int) -> bytes:
    """A segment with one frame, and room for another."""
    header = SegmentHeader(geometry=Geometry(512, 2), db_id=db_id, segment_id=segment_id, first_lsn=lsn, salt=7)
    encoded = encode(header, 0, [(0, body(512), 0, 0)], db_size=1, durable_upto_lsn=0, commit_ms=1)
    data = bytearray(header.geometry.frame_offset(1))
    data[:HEADER_BYTES] = header.encode()
    for offset, piece in encoded.pieces:
        data[offset : offset + len(piece)] = piece
    entries = entries_of(header, parse_heads(encoded.heads)).tobytes()
    start = header.geometry.entry_offset(0)
    data[start : start + len(entries)] = entries
    return bytes(data)


def _known(residency: Residency, data: bytes) -> bytes:
    """A checkpoint that writes straight to the object store knows what it wrote."""
    return b"" if residency is LOCAL else sha256(data).digest()


def _rows(txn: ReadTxn) -> Iterator[tuple[ArtifactKey, Any]]:
    for (origin, slot, generation), chunk in txn.scan(t.CHUNK_CATALOG):
        yield ArtifactKey(origin, ArtifactKind.BASE, slot, generation), chunk
    for (origin, slot, generation, number), delta in txn.scan(t.CHUNK_DELTA_INDEX):
        yield ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, number), delta
    for (db_id, segment_id), segment in txn.scan(t.WAL_CATALOG):
        if segment.origin_db_id == db_id:
            yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0), segment


def _is_doomed(txn: ReadTxn, key: ArtifactKey) -> bool:
    counts = txn.refcount(key)
    return counts is not None and not (counts.in_use or counts.pending_upload)


def unlike(data: bytes) -> bytes:
    """As long, and different."""
    return bytes([data[0] ^ 1]) + data[1:]


def drop(world: World, db_id: int) -> None:
    """Drop a database, with its snapshots."""
    world.manifest.drop_db(db_id, snapshots=True).result()


def is_known(world: World, db_id: int) -> bool:
    """Whether there is at least a tombstone."""
    with world.manifest.read() as txn:
        return txn.database(db_id) is not None


def delete_job(world: World, db_id: int) -> int:
    """The delete job that is outstanding for a database; 0 if none is."""
    return world.manifest.jobs.outstanding(db_id, JobKind.DELETE)


def is_renewed(manifest: ManifestStore, clock: ManualClock) -> bool:
    """Whether the lease of a job that runs now is renewed while we wait; the clock is moved, so that it shows."""
    first, *_rest = manifest.jobs.jobs(JobState.IN_FLIGHT)
    assert first.lease is not None
    clock.advance(10)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        lease = manifest.jobs.get(first.job_id).lease
        assert lease is not None
        if lease.expires_at_ms > first.lease.expires_at_ms:
            return True
        time.sleep(0.02)
    return False
