"""A small store for tests of jobs: a manifest, real files, an object store, a worker, and a clock that only tests
advance.

`assert_sound` checks what must hold at any time, also after a crash; `assert_settled` what must hold when no job is
running.
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

_body_numbers = itertools.count(1)


def body(size: int = 100) -> bytes:
    """Bytes that differ from every other body."""
    seed = next(_body_numbers).to_bytes(8, "big")
    return b"".join(sha256(seed + block.to_bytes(4, "big")).digest() for block in range(size // 32 + 1))[:size]


def request_verify(manifest: ManifestStore) -> int:
    """Enqueue a verification of the whole store; returns the job id."""
    return manifest.jobs.enqueue(JobKind.VERIFY, 0)


def request_retention(manifest: ManifestStore, db: int | str, *, force: bool = False) -> int:
    """Enqueue the retention of a database; returns the job id."""
    with manifest.read() as txn:
        db_id = txn.database_id(db) if isinstance(db, str) else db
    return manifest.jobs.enqueue(JobKind.RETENTION, db_id, {"force": True} if force else None)


@dataclass
class JobStore:
    """One store. Tests can pass a `disk` and an `opener` that fail."""

    root: str
    objects_url: str
    manifest_path: str = ""
    clock: ManualClock = field(default_factory=ManualClock)
    disk: Disk = field(default_factory=OsDisk)
    opener: OpenStore = open_store
    settings: MaintenanceSettings = SETTINGS
    bodies: dict[ArtifactKey, bytes] = field(default_factory=dict)
    """The expected content of each artifact that was created here."""
    is_damaged: bool = False
    """Set if the test damages copies on purpose; they then need not match their rows."""

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

    def worker_of(self, **options: Any) -> Worker:
        """Another worker on the same store."""
        return Worker(self.ctx, HANDLERS, **options)

    def close(self) -> None:
        self.upkeep.stop()
        self.stores.close()
        self.manifest.close()

    # ── creating ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def database(self, name: str = "shop", *, namespace_id: int = 0) -> int:
        return self.manifest.register_db(name, DbKind.PAGES, page_size=4096, namespace_id=namespace_id)

    def chunks(
        self, db_id: int, *slots: int, residency: Residency = LOCAL, size: int = 100, **row: Any
    ) -> list[ArtifactKey]:
        """A checkpoint that writes full chunks for these slots, including their bytes."""
        return self._checkpoint(db_id, slots, residency, size, delta=False, row=row)

    def deltas(self, db_id: int, *slots: int, residency: Residency = LOCAL, size: int = 50) -> list[ArtifactKey]:
        """A checkpoint that writes deltas for these slots."""
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
                record = DeltaRecord(base, residency, size, now, sha256=_recorded_hash(residency, data))
                mutations.append(DeltaChunk(slot=slot, delta_id=number, record=record))
            else:
                keys.append(ArtifactKey(db_id, ArtifactKind.BASE, slot, generation))
                chunk = ChunkRecord(residency, size, now, sha256=_recorded_hash(residency, data), **row)
                mutations.append(FullChunk(slot=slot, record=chunk))
            self.bodies[keys[-1]] = data
        lsn = wal.last_applied_lsn + 1
        manifest.submit([AdvanceWal(db_id, 0, lsn, lsn, lsn)]).result()
        checkpoint_apply(manifest, db_id, generation, mutations, covered_lsn=lsn).result()
        for key in keys:
            self.write(key)
        return keys

    def segment(self, db_id: int, size: int = 0, *, file_bytes: int = 0, crc64: int = 0) -> ArtifactKey:
        """A sealed WAL segment, in a file that can be longer than its used part; with a size, its bytes are random and
        no frames."""
        with self.manifest.read() as txn:
            wal = txn.wal_state(db_id)
        assert wal is not None
        key = ArtifactKey(db_id, ArtifactKind.WAL, wal.next_segment_id, 0)
        lsn = wal.lsn_reserved + 1
        self.bodies[key] = body(size) if size else _one_frame_segment(db_id, key.id, lsn)
        size = len(self.bodies[key])
        update = WalChunkUpdate(segment_id=key.id, first_lsn=lsn, last_lsn=lsn, used_bytes=size, crc64=crc64)
        append_wal_chunk(self.manifest, db_id, update).result()
        self.write(key, self.bodies[key].ljust(file_bytes, b"\0"))
        return key

    def write(self, key: ArtifactKey, data: bytes | None = None) -> None:
        """Create the copies that the artifact's row promises."""
        location = self.location(key)
        data = self.bodies[key] if data is None else data
        if location.has_local:
            Path(location.local).parent.mkdir(parents=True, exist_ok=True)
            Path(location.local).write_bytes(data)
        if location.has_remote:
            open_store(location.url).put(location.object_key, data)

    def artifact(self, residency: Residency, db_id: int = 0) -> ArtifactKey:
        """An artifact that reached this residency by jobs, as far as jobs exist for it."""
        (key,) = self.chunks(db_id or self.database(f"db-{next(_body_numbers)}"), 1, residency=_ORIGIN[residency])
        if residency in (BOTH, EVICTED):
            self.succeed(request_upload(self.manifest, key))
        if residency is EVICTED:
            self.succeed(request_evict(self.manifest, key))
        assert self.row(key).residency is residency
        return key

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def succeed(self, job_id: int) -> Any:
        """Run the due jobs; this job must succeed. Returns its result."""
        self.worker.drain()
        job = self.job(job_id)
        assert job.state is JobState.SUCCEEDED, f"{job.kind.name} is {job.state.name}: {job.record.error}"
        return job.result

    def fail(self, job_id: int) -> str:
        """Run the due jobs; this job must fail permanently. Returns its error."""
        self.worker.drain()
        job = self.job(job_id)
        assert job.state is JobState.FAILED_PERMANENT, f"{job.kind.name} is {job.state.name}: {job.record.error}"
        return job.record.error

    def settle(self, seconds: float = 4 * GRACE_SECONDS) -> None:
        """Run maintenance repeatedly until every job has ended and nothing waits to be deleted."""
        for _ in range(40):
            self.upkeep.run_once()
            with self.manifest.read() as txn:
                unfinished = [job_id for state in UNDER_WAY for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, state)]
                if not unfinished and not txn.count(t.GC_ZERO):
                    return
            self.clock.advance(seconds)
        raise AssertionError(f"jobs did not end: {[self.job(job_id) for job_id in unfinished]}")

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def job(self, job_id: int) -> Job:
        return self.manifest.jobs.get(job_id)

    def row(self, key: ArtifactKey) -> Any:
        with self.manifest.read() as txn:
            return txn.artifact(key)

    def location(self, key: ArtifactKey) -> ArtifactLocation:
        with self.manifest.read() as txn:
            location = self.ctx.place(txn, key)
        assert location is not None, key
        return location

    def file(self, key: ArtifactKey) -> bytes | None:
        path = Path(self.location(key).local)
        return path.read_bytes() if path.exists() else None

    def object(self, key: ArtifactKey) -> bytes | None:
        location = self.location(key)
        try:
            return open_store(location.url).get(location.object_key)
        except ObjectNotFound:
            return None

    def files(self) -> set[str]:
        """Every file of databases, relative to the store."""
        paths = set[str]()
        for directory in ("pages", "streams", "lsm"):
            for folder, _, names in os.walk(os.path.join(self.root, directory)):
                paths.update(os.path.relpath(os.path.join(folder, name), self.root) for name in names)
        return paths

    def artifacts(self) -> dict[ArtifactKey, ArtifactLocation]:
        """Every artifact of the catalog that is not being deleted, with its location."""
        with self.manifest.read() as txn:
            return {key: self.ctx.place_of(txn, key, row) for key, row in _rows(txn) if not _is_unreferenced(txn, key)}

    # ── invariants ────────────────────────────────────────────────────────────────────────────────────────────────────
    def assert_sound(self) -> None:
        """The manifest violates no rule, and every copy that a row promises exists and is complete."""
        assert_clean(self.manifest, leaks=True)
        for key, location in self.artifacts().items():
            if location.has_local:
                data = Path(location.local).read_bytes()
                assert data[: location.size_bytes] == self.bodies.get(key, data)[: location.size_bytes], (
                    f"{key}: bad file"
                )
            if location.has_remote:
                data = open_store(location.url).get(location.object_key)
                assert data == self.bodies.get(key, data), f"{key}: bad object"

    def assert_settled(self, *stores: str) -> None:
        """Sound, and no file or object exists without a row or waits to be deleted."""
        self.assert_sound()
        with self.manifest.read() as txn:
            assert not list(txn.raw_scan(t.GC_ZERO)), "an artifact still waits to be deleted"
        locations = self.artifacts()
        expected = {os.path.relpath(location.local, self.root) for location in locations.values() if location.has_local}
        assert self.files() == expected, "files without a row"
        for url in {self.objects_url, *stores}:
            promised = {
                location.object_key for location in locations.values() if location.has_remote and location.url == url
            }
            assert {info.key for info in list_objects(open_store(url))} == promised, "objects without a row"

    def assert_replays(self) -> None:
        """The feed rebuilds the same manifest, if it is complete: a maintenance round may have trimmed it."""
        with self.manifest.read() as txn:
            is_complete = txn.feed_bounds()[0] == 1
        if is_complete:
            assert_replays(self.manifest)


def epoch_name(manifest: ManifestStore, key: ArtifactKey) -> str:
    """The name of an artifact's object in the current owner epoch, in the store's own object store."""
    manifest.ensure_owner_epoch()
    with manifest.read() as txn:
        return f"{txn.current_namespace()[1].prefix}/{object_key(key)}"


_ORIGIN = {LOCAL: LOCAL, BOTH: LOCAL, EVICTED: LOCAL, ARCHIVED: ARCHIVED}


def _one_frame_segment(db_id: int, segment_id: int, lsn: int) -> bytes:
    """A segment with one frame and space for another."""
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


def _recorded_hash(residency: Residency, data: bytes) -> bytes:
    """The hash in the row: a checkpoint that writes directly to the object store records it, a local one does not."""
    return b"" if residency is LOCAL else sha256(data).digest()


def _rows(txn: ReadTxn) -> Iterator[tuple[ArtifactKey, Any]]:
    for (origin, slot, generation), chunk in txn.scan(t.CHUNK_CATALOG):
        yield ArtifactKey(origin, ArtifactKind.BASE, slot, generation), chunk
    for (origin, slot, generation, number), delta in txn.scan(t.CHUNK_DELTA_INDEX):
        yield ArtifactKey(origin, ArtifactKind.DELTA, slot, generation, number), delta
    for (db_id, segment_id), segment in txn.scan(t.WAL_CATALOG):
        if segment.origin_db_id == db_id:
            yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0), segment


def _is_unreferenced(txn: ReadTxn, key: ArtifactKey) -> bool:
    counts = txn.refcount(key)
    return counts is not None and not (counts.in_use or counts.pending_upload)


def altered(data: bytes) -> bytes:
    """Different bytes of the same length."""
    return bytes([data[0] ^ 1]) + data[1:]


def drop(job_store: JobStore, db_id: int) -> None:
    """Drop a database, with its snapshots."""
    job_store.manifest.drop_db(db_id, snapshots=True).result()


def is_known(job_store: JobStore, db_id: int) -> bool:
    """Whether the database has a row, which can be a tombstone."""
    with job_store.manifest.read() as txn:
        return txn.database(db_id) is not None


def delete_job(job_store: JobStore, db_id: int) -> int:
    """The outstanding delete job of a database, or 0."""
    return job_store.manifest.jobs.outstanding(db_id, JobKind.DELETE)


def is_renewed(manifest: ManifestStore, clock: ManualClock) -> bool:
    """Whether the lease of the running job is renewed within a minute. Advances the clock, so that a renewal changes
    the lease."""
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
