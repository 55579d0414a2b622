"""A real store with artifact files and objects, and beside it a model that knows what the store must contain.

Terms
  artifact   a chunk, a delta or a WAL segment; its bytes are a function of its key, so a test can verify them
  location   where a copy of the bytes is: a file of the store, or an object, given by URL and key
  version    what one state of a database needs: a chain of artifacts for every slot, and WAL segments
  needed     artifacts of every version that can still be read, and those that an upload job holds

Rules
  1. A step changes the model by what the step means, not by reading the store. Only `load` reads the store, after a crash.
  2. `steps.py` and `snapshot_steps.py` contain the steps; `invariants.py` states what must hold after each of them.

Thread: one.
"""

from __future__ import annotations

import os
from collections import Counter as Tally
from collections.abc import Callable
from dataclasses import dataclass, field

import quire
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.settings import MaintenanceSettings, StoreSettings
from quire.durable.files import OsDisk
from quire.durable.names import CachedChunkFile, WalSegmentFile, object_key
from quire.jobs.context import JobContext
from quire.jobs.delete.job import delete_job
from quire.jobs.maintenance import Upkeep
from quire.jobs.worker import Worker
from quire.manifest import tables as t
from quire.manifest.differences import read_leaves
from quire.manifest.namespaces import collector_of
from quire.manifest.reads import ReadTxn
from quire.manifest.records import AuditAction, DbStatus, JobKind, Residency, RetentionRecord, SnapshotRecord, WalState
from quire.manifest.slots import Leaf, artifacts
from quire.objects.api import ObjectStore
from quire.objects.open import open_store
from quire.store.store import Store
from quire.testing.clock import ManualClock
from tests.manifest.batches import hold_feed

BASE, DELTA, WAL = ArtifactKind.BASE, ArtifactKind.DELTA, ArtifactKind.WAL
EPOCH_MS = 1_750_000_000_000
NEVER = 10**12
LOCAL = ""
"""Stands for the file system where a URL is expected."""

Location = tuple[str, str]
"""(URL or LOCAL, object key or path relative to the store)."""
Chains = dict[int, tuple[ArtifactKey, ...]]


def _ignore(*_: object) -> None:
    """The default callback: does nothing."""


def body(key: ArtifactKey) -> bytes:
    """The content of an artifact."""
    return f"{object_key(key)}\n".encode() * (1 + key.id % 3)


@dataclass(frozen=True, slots=True)
class Version:
    """The artifacts that one state of a database needs."""

    chains: Chains
    pins: frozenset[ArtifactKey]

    @property
    def needs(self) -> set[ArtifactKey]:
        return {key for chain in self.chains.values() for key in chain} | self.pins


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot."""

    name: str
    version: Version
    created_at_ms: int
    expires_at_ms: int = 0
    schedule: str = ""


@dataclass(slots=True)
class Database:
    """A database that has not been dropped."""

    db_id: int
    name: str
    parent: int = 0
    chains: Chains = field(default_factory=dict)
    segments: dict[ArtifactKey, bool] = field(default_factory=dict)
    """Tracked WAL segment → whether a checkpoint has absorbed it."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    policy: RetentionRecord | None = None

    @property
    def current_version(self) -> Version:
        return Version(dict(self.chains), frozenset(key for key, absorbed in self.segments.items() if not absorbed))


@dataclass(slots=True)
class Artifact:
    """An artifact that was written and whose bytes are not yet known to be deleted."""

    residency: Residency
    namespace_id: int = 0
    unneeded_since_ms: int | None = None
    """Since when nothing needs it; None while it is needed."""
    has_lost_bytes: bool = False
    """At least one copy was found to be deleted, after the grace period."""


class StoreModel:
    """A store and its model."""

    def __init__(self, path: str, *, grace_seconds: float = 0, now_ms: int = EPOCH_MS, remote: bool = False) -> None:
        self.path = path
        self.grace_ms = int(grace_seconds * 1000)
        self.clock = ManualClock(now_ms)
        self.settings = StoreSettings(
            object_store=f"memory://{path.strip('/').replace('/', '-')}" if remote else "",
            maintenance=MaintenanceSettings(
                enabled=False,
                delete_grace_seconds=grace_seconds,
                checkpoint_bytes=NEVER,  # the segments have no content that a checkpoint could read
                checkpoint_seconds=NEVER,
            ),
        )
        self.databases: dict[int, Database] = {}
        self.artifacts: dict[ArtifactKey, Artifact] = {}
        self.orphans: set[ArtifactKey] = set()
        """Chunks in the catalog that no slot ever referred to, of databases that exist."""
        self.dropped_orphans: set[ArtifactKey] = set()
        """The same, of dropped databases: they are deleted when the last reference to an artifact of their database goes."""
        self.namespaces: dict[int, str] = {}
        """Id → prefix. All namespaces are in one object store, which is not the default one."""
        self.uploads: dict[int, ArtifactKey] = {}
        """Outstanding upload job → the artifact that it holds."""
        self.written: set[ArtifactKey] = set()
        self.scheduled_snapshots: dict[tuple[int, str], str] = {}
        """(Database, schedule) → name of the newest snapshot that the schedule has created under this owner."""
        self.events: Tally[AuditAction] = Tally()
        self.with_expiry = True
        """Whether snapshots may have an expiry time."""
        self.is_settled = False
        """The last step was a complete round of maintenance that left no delete job."""
        self.on_step: Callable[[str, int], None] = _ignore
        """Called before a step with its name and the one database that it changes."""
        self.on_write: Callable[[Location], None] = _ignore
        """Called before bytes are written."""
        self._stores: dict[str, ObjectStore] = {}
        self.store = self.open()

    def open(self) -> Store:
        """Open the store, or open it again after `store.close()`."""
        self.store = quire.open(self.path, settings=self.settings, clock=self.clock)
        hold_feed(self.store.manifest)
        self.upkeep = Upkeep(self._context(), self.worker())
        self.scheduled_snapshots.clear()
        return self.store

    def _context(self) -> JobContext:
        return JobContext(
            manifest=self.store.manifest,
            root=self.path,
            disk=OsDisk(),
            objects_url=self.store.objects_url,
            open_store=self.objects,
            collector=collector_of(self.store.manifest, self.store.objects_url, self.objects),
            settings=self.settings.maintenance,
        )

    def worker(self) -> Worker:
        """A worker that runs delete jobs only: the artifacts have no content that other jobs could read."""
        return Worker(self._context(), {JobKind.DELETE: delete_job})

    def maintain(self) -> None:
        """`store.maintain()`, with that worker."""
        self.upkeep.run_once()

    def is_name_taken(self, name: str) -> bool:
        """Whether a database has this name."""
        return any(db.name == name for db in self.databases.values())

    def needed(self) -> set[ArtifactKey]:
        """Artifacts that must exist, with their bytes."""
        keys = set(self.uploads.values())
        for db in self.databases.values():
            keys |= db.current_version.needs | db.segments.keys()
            for snapshot in db.snapshots.values():
                keys |= snapshot.version.needs
        return keys

    def objects(self, url: str) -> ObjectStore:
        """A client of an object store, separate from the store's own."""
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    # ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def namespaces_url(self) -> str:
        """The object store of the namespaces."""
        return self.store.objects_url + "-other"

    def file_of(self, key: ArtifactKey) -> str:
        """The path of an artifact's file, relative to the store."""
        if key.kind is WAL:
            return WalSegmentFile(db_id=key.origin_db_id, segment_id=key.id).path
        return CachedChunkFile(db_id=key.origin_db_id, key=key).path

    def object_of(self, key: ArtifactKey, namespace_id: int) -> Location:
        """The location of an artifact's object."""
        if namespace_id:
            return self.namespaces_url, f"{self.namespaces[namespace_id]}/{object_key(key)}"
        return self.store.objects_url, object_key(key)

    def locations(self, key: ArtifactKey) -> list[Location]:
        """The locations at which the model expects an artifact's bytes."""
        artifact = self.artifacts[key]
        locations: list[Location] = []
        if artifact.residency in (Residency.LOCAL, Residency.LOCAL_AND_REMOTE):
            locations.append((LOCAL, self.file_of(key)))
        if artifact.residency is not Residency.LOCAL:
            locations.append(self.object_of(key, artifact.namespace_id))
        return locations

    def create_artifact(self, key: ArtifactKey, residency: Residency, namespace_id: int = 0) -> None:
        """Add a new artifact to the model and write its bytes."""
        assert key not in self.written, f"{key} is used for two contents"
        self.written.add(key)
        self.artifacts[key] = Artifact(residency, namespace_id)
        for location in self.locations(key):
            self.write(key, location)

    def write(self, key: ArtifactKey, location: Location) -> None:
        """Write an artifact's bytes to a location."""
        self.on_write(location)
        url, name = location
        if url:
            self.objects(url).put(name, body(key), create_only=True)
            return
        path = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(body(key))

    # ── after a crash ─────────────────────────────────────────────────────────────────────────────────────────────────
    def load(self) -> None:
        """Replace the model by the state of the store."""
        with self.store.manifest.read() as txn:
            self.namespaces = {key[0]: row.prefix for key, row in txn.scan(t.REMOTE_NAMESPACE)}
            self.databases = {
                db_id: Database(
                    db_id,
                    row.name,
                    row.parent_db_id,
                    *live(txn, db_id),
                    snapshots(txn, db_id),
                    txn.get(t.RETENTION, db_id),
                )
                for db_id, row in txn.databases()
                if row.status is not DbStatus.TOMBSTONED
            }
            self.artifacts = catalog(txn)
            self.orphans = {
                key for key in self.artifacts if txn.refcount(key) is None and key.origin_db_id in self.databases
            }
        self.written = set(self.artifacts)

    def facts(self) -> dict[int, tuple[object, ...]]:
        """A comparable description of every database."""
        return {
            db.db_id: (
                db.name,
                db.parent,
                db.current_version,
                db.segments,
                {n: snapshot.version for n, snapshot in db.snapshots.items()},
            )
            for db in self.databases.values()
        }


# ── reading the manifest ──────────────────────────────────────────────────────────────────────────────────────────────
def chains_of(txn: ReadTxn, leaves: list[tuple[int, int, int]]) -> Chains:
    """The chains of a slot map."""
    chains: Chains = {}
    for number, leaf in read_leaves(txn, leaves):
        for offset, chain in leaf.items():
            single: Leaf = {offset: chain}
            keys = tuple(artifacts(single, number))
            chains[keys[0].id] = keys
    return chains


def live(txn: ReadTxn, db_id: int) -> tuple[Chains, dict[ArtifactKey, bool]]:
    """The slots and the tracked segments of a database."""
    leaves = [(key[1], row.origin_db_id, row.generation) for key, row in txn.scan(t.LIVE_LEAF, db_id)]
    wal = txn.wal_state(db_id)
    assert wal is not None
    segments = {
        ArtifactKey(row.origin_db_id, WAL, key[1], 0): row.last_lsn <= wal.checkpointed_lsn
        for key, row in txn.scan(t.WAL_CATALOG, db_id)
        if row.state is not WalState.TRUNCATED
    }
    return chains_of(txn, leaves), segments


def version_of(txn: ReadTxn, record: SnapshotRecord) -> Version:
    """The version that a snapshot holds."""
    pins = frozenset(ArtifactKey(pin.origin_db_id, WAL, pin.segment_id, 0) for pin in record.pins)
    return Version(chains_of(txn, record.leaves), pins)


def snapshots(txn: ReadTxn, db_id: int) -> dict[int, Snapshot]:
    """The snapshots of a database."""
    return {
        key[1]: Snapshot(row.name, version_of(txn, row), row.created_at_ms, row.expires_at_ms)
        for key, row in txn.scan(t.SNAPSHOT_INDEX, db_id)
    }


def catalog(txn: ReadTxn) -> dict[ArtifactKey, Artifact]:
    """Every artifact that has bytes and a row in the manifest."""
    artifacts: dict[ArtifactKey, Artifact] = {}
    for (origin, slot, generation), chunk in txn.scan(t.CHUNK_CATALOG):
        artifacts[ArtifactKey(origin, BASE, slot, generation)] = Artifact(chunk.residency, chunk.namespace_id)
    for (origin, slot, generation, delta_id), delta in txn.scan(t.CHUNK_DELTA_INDEX):
        artifacts[ArtifactKey(origin, DELTA, slot, generation, delta_id)] = Artifact(
            delta.residency, delta.namespace_id
        )
    for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
        if row.origin_db_id == db_id:
            artifacts[ArtifactKey(db_id, WAL, segment_id, 0)] = Artifact(row.residency, row.namespace_id)
    return artifacts
