"""A small world over a real store: databases, snapshots, forks and bytes, with a model beside it that knows what must be there.

Terms
  artifact   a chunk, a delta or a WAL segment; its bytes follow from its key, so whoever finds a name knows what it holds
  place      where bytes are: a file of the store, or (URL, key) of an object
  version    what one moment of a database needs: a chain of artifacts for every slot, and WAL segments
  needed     artifacts of any version that somebody can ask for, and those that an upload holds

Rules
  1. The model is changed by what a step means, never by looking; only `learn` looks, after a crash.
  2. `steps.py` has the steps, `promises.py` says what must hold after each of them.

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
"""In place of a URL: the file system."""

Place = tuple[str, str]
"""(URL or LOCAL, key or path below the store)."""
Chains = dict[int, tuple[ArtifactKey, ...]]


def _nobody(*_: object) -> None:
    """Listens to nothing."""


def body(key: ArtifactKey) -> bytes:
    """The bytes of an artifact."""
    return f"{object_key(key)}\n".encode() * (1 + key.id % 3)


@dataclass(frozen=True, slots=True)
class Version:
    """What one moment of a database needs."""

    chains: Chains
    pins: frozenset[ArtifactKey]

    @property
    def needs(self) -> set[ArtifactKey]:
        return {key for chain in self.chains.values() for key in chain} | self.pins


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot."""

    name: str
    version: Version
    created_at_ms: int
    expires_at_ms: int = 0
    schedule: str = ""


@dataclass(slots=True)
class Database:
    """A database that lives."""

    db_id: int
    name: str
    parent: int = 0
    chains: Chains = field(default_factory=dict)
    segments: dict[ArtifactKey, bool] = field(default_factory=dict)
    """Tracked WAL segments → whether a checkpoint has absorbed them."""
    snapshots: dict[int, Kept] = field(default_factory=dict)
    policy: RetentionRecord | None = None

    @property
    def now(self) -> Version:
        return Version(dict(self.chains), frozenset(key for key, absorbed in self.segments.items() if not absorbed))


@dataclass(slots=True)
class Artifact:
    """Bytes that were written, until they are seen to be gone."""

    residency: Residency
    namespace_id: int = 0
    idle_since_ms: int | None = None
    """Since when nobody needs it."""
    is_going: bool = False
    """Its bytes were seen to be gone, or some of them: it was time."""


class World:
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
                checkpoint_bytes=NEVER,  # there is nothing in these segments that a checkpoint could read
                checkpoint_seconds=NEVER,
            ),
        )
        self.databases: dict[int, Database] = {}
        self.artifacts: dict[ArtifactKey, Artifact] = {}
        self.orphans: set[ArtifactKey] = set()
        """Chunks in the catalog that no slot ever named, of databases that live."""
        self.lingering: set[ArtifactKey] = set()
        """The same, of databases that were dropped: they go with the last that is held of their database."""
        self.namespaces: dict[int, str] = {}
        """Id → prefix. All of them are in one other object store."""
        self.held: dict[int, ArtifactKey] = {}
        """Outstanding upload jobs."""
        self.written: set[ArtifactKey] = set()
        self.made: dict[tuple[int, str], str] = {}
        """What the schedules of this owner have made."""
        self.events: Tally[AuditAction] = Tally()
        self.with_expiry = True
        """Whether snapshots may go by themselves."""
        self.is_quiet = False
        """The last step was a whole round of maintenance in which nothing failed."""
        self.doing: Callable[[str, int], None] = _nobody
        """Told before a step, with the one database that it changes."""
        self.writing: Callable[[Place], None] = _nobody
        """Told before bytes are written."""
        self._stores: dict[str, ObjectStore] = {}
        self.store = self.open()

    def open(self) -> Store:
        """Open the store, again if need be."""
        self.store = quire.open(self.path, settings=self.settings, clock=self.clock)
        hold_feed(self.store.manifest)
        self.upkeep = Upkeep(self._context(), self.worker())
        self.made.clear()
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
        """A worker that deletes; the bytes of this world are none that other jobs could read."""
        return Worker(self._context(), {JobKind.DELETE: delete_job})

    def maintain(self) -> None:
        """`store.maintain()`, with that worker."""
        self.upkeep.run_once()

    def taken(self, name: str) -> bool:
        """Whether a database has this name."""
        return any(db.name == name for db in self.databases.values())

    def needed(self) -> set[ArtifactKey]:
        """Artifacts that must be there, bytes and all."""
        found = set(self.held.values())
        for db in self.databases.values():
            found |= db.now.needs | db.segments.keys()
            for kept in db.snapshots.values():
                found |= kept.version.needs
        return found

    def objects(self, url: str) -> ObjectStore:
        """An object store, opened beside the store's own."""
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    # ── bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def other_url(self) -> str:
        """The object store of the namespaces."""
        return self.store.objects_url + "-other"

    def file_of(self, key: ArtifactKey) -> str:
        """The path of an artifact's file below the store."""
        if key.kind is WAL:
            return WalSegmentFile(db_id=key.origin_db_id, segment_id=key.id).path
        return CachedChunkFile(db_id=key.origin_db_id, key=key).path

    def object_of(self, key: ArtifactKey, namespace_id: int) -> Place:
        """The place of an artifact's object."""
        if namespace_id:
            return self.other_url, f"{self.namespaces[namespace_id]}/{object_key(key)}"
        return self.store.objects_url, object_key(key)

    def places(self, key: ArtifactKey) -> list[Place]:
        """Where the model says that an artifact's bytes are."""
        artifact = self.artifacts[key]
        found: list[Place] = []
        if artifact.residency in (Residency.LOCAL, Residency.LOCAL_AND_REMOTE):
            found.append((LOCAL, self.file_of(key)))
        if artifact.residency is not Residency.LOCAL:
            found.append(self.object_of(key, artifact.namespace_id))
        return found

    def make(self, key: ArtifactKey, residency: Residency, namespace_id: int = 0) -> None:
        """A new artifact, its bytes written."""
        assert key not in self.written, f"{key} names two bodies"
        self.written.add(key)
        self.artifacts[key] = Artifact(residency, namespace_id)
        for where in self.places(key):
            self.write(key, where)

    def write(self, key: ArtifactKey, place: Place) -> None:
        """Put an artifact's bytes at a place."""
        self.writing(place)
        url, name = place
        if url:
            self.objects(url).put(name, body(key), create_only=True)
            return
        path = os.path.join(self.path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(body(key))

    # ── after a crash ─────────────────────────────────────────────────────────────────────────────────────────────────
    def learn(self) -> None:
        """Take over what the store says."""
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
        """What each database is, to compare."""
        return {
            db.db_id: (db.name, db.parent, db.now, db.segments, {n: kept.version for n, kept in db.snapshots.items()})
            for db in self.databases.values()
        }


# ── what the manifest says ────────────────────────────────────────────────────────────────────────────────────────────
def chains_of(txn: ReadTxn, leaves: list[tuple[int, int, int]]) -> Chains:
    """The chains of a slot map."""
    found: Chains = {}
    for number, leaf in read_leaves(txn, leaves):
        for offset, chain in leaf.items():
            one: Leaf = {offset: chain}
            keys = tuple(artifacts(one, number))
            found[keys[0].id] = keys
    return found


def live(txn: ReadTxn, db_id: int) -> tuple[Chains, dict[ArtifactKey, bool]]:
    """Slots and tracked segments of a database."""
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
    """What a snapshot holds."""
    pins = frozenset(ArtifactKey(pin.origin_db_id, WAL, pin.segment_id, 0) for pin in record.pins)
    return Version(chains_of(txn, record.leaves), pins)


def snapshots(txn: ReadTxn, db_id: int) -> dict[int, Kept]:
    """The snapshots of a database."""
    return {
        key[1]: Kept(row.name, version_of(txn, row), row.created_at_ms, row.expires_at_ms)
        for key, row in txn.scan(t.SNAPSHOT_INDEX, db_id)
    }


def catalog(txn: ReadTxn) -> dict[ArtifactKey, Artifact]:
    """Every artifact with bytes that has a row."""
    found: dict[ArtifactKey, Artifact] = {}
    for (origin, slot, generation), chunk in txn.scan(t.CHUNK_CATALOG):
        found[ArtifactKey(origin, BASE, slot, generation)] = Artifact(chunk.residency, chunk.namespace_id)
    for (origin, slot, generation, delta_id), delta in txn.scan(t.CHUNK_DELTA_INDEX):
        found[ArtifactKey(origin, DELTA, slot, generation, delta_id)] = Artifact(delta.residency, delta.namespace_id)
    for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
        if row.origin_db_id == db_id:
            found[ArtifactKey(db_id, WAL, segment_id, 0)] = Artifact(row.residency, row.namespace_id)
    return found
