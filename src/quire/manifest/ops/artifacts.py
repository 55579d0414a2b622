"""Operations on catalog rows of artifacts (chunks, deltas), on the namespaces of their objects, and on `retired`:
objects that only archived moments still need (A8).

Terms
  place   a location for objects: the store's configured object store (0), or a namespace that a user registered
  epoch   counts the takeovers of a store; every place has one namespace per epoch (A1), and the highest is the current one

An artifact's row is written once. Putting the same row again is allowed (a repeated publish), a different one is
refused. Later changes (residency, hashes learned by an upload, verification) go through `UpdateArtifact`, in the one
row that all forks and snapshots share (M6).

A namespace of the current epoch holds a reference to itself, so that it stays while it is empty; those of former epochs
stay while they contain anything. A place with a name also holds itself, until a user drops it; then the place and its
current namespace release their references together, so that neither is left over.
"""

import msgspec
from msgspec.structs import replace

from quire.core.errors import (
    AlreadyExists,
    InvalidInput,
    NameTaken,
    StalePlan,
    StillReferenced,
    UnknownArtifact,
    UnknownNamespace,
)
from quire.core.ids import ArtifactKey, ArtifactKind, some_u32
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Counter, Op, raise_watermark
from quire.manifest.ops.refs import (
    mark_unreferenced,
    namespace_key,
    note_artifact,
    release,
    release_epochs,
    retain_namespace,
)
from quire.manifest.overlay import Overlay
from quire.manifest.records import (
    AuditAction,
    ChunkRecord,
    DeltaRecord,
    NamespaceRecord,
    Residency,
    RetiredRecord,
    UInt,
    VerifyState,
)

_chunk_key = t.CHUNK_CATALOG.key.fast
_encode = msgspec.msgpack.Encoder().encode
_decode_chunks = msgspec.msgpack.Decoder(list[ChunkRecord]).decode


class PutChunk(Op, frozen=True, tag=20):
    """Add a base chunk to the catalog. Nothing refers to it until a leaf does."""

    component = int(Component.CHUNK)
    origin_db_id: UInt
    chunk_id: UInt
    generation: UInt
    record: ChunkRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        if self.origin_db_id not in tables.active_ids:
            tables.writable(self.origin_db_id, even="read_only")
        key = _chunk_key(self.origin_db_id, self.chunk_id, self.generation)
        record = self.record
        before = tables.chunk_catalog.insert(key, record)
        if before is None:
            if record.namespace_id:
                retain_namespace(tables, record.namespace_id)
        elif before != record:
            raise AlreadyExists(
                "the catalog already has a different chunk of this name",
                hint="a new body needs a new generation",
                db_id=self.origin_db_id,
                chunk_id=self.chunk_id,
                generation=self.generation,
            )


class PutDelta(Op, frozen=True, tag=21):
    """Add a delta over a base chunk to the catalog."""

    component = int(Component.CHUNK)
    origin_db_id: UInt
    chunk_id: UInt
    generation: UInt
    delta_id: UInt
    base_origin_db_id: UInt
    record: DeltaRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        tables.writable(self.origin_db_id, even="read_only")
        some_u32("delta_id", self.delta_id)
        base = t.CHUNK_CATALOG.key.pack(self.base_origin_db_id, self.chunk_id, self.record.base_generation)
        if not tables.chunk_catalog.has(base):
            raise UnknownArtifact(
                "a delta needs its base chunk",
                hint="put the base chunk first",
                db_id=self.base_origin_db_id,
                chunk_id=self.chunk_id,
                generation=self.record.base_generation,
            )
        key = t.CHUNK_DELTA_INDEX.key.pack(self.origin_db_id, self.chunk_id, self.generation, self.delta_id)
        before = tables.chunk_delta_index.insert(key, self.record)
        if before is None:
            if self.record.namespace_id:
                retain_namespace(tables, self.record.namespace_id)
        elif before != self.record:
            raise AlreadyExists(
                "the catalog already has a different delta of this name",
                hint="a new body needs a new generation",
                db_id=self.origin_db_id,
                chunk_id=self.chunk_id,
                generation=self.generation,
                delta_id=self.delta_id,
            )


class RecordUploads(Op, frozen=True, tag=150):
    """Record in the audit the artifacts that entered the catalog with an object, as a checkpoint writes them."""

    component = int(Component.CHUNK)
    origin_db_id: UInt
    artifacts: list[tuple[int, int, int, int]]
    """(kind, id, generation, delta id) of each; its row is in the same batch."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        for kind, number, generation, delta_id in self.artifacts:
            key = ArtifactKey(self.origin_db_id, ArtifactKind(kind), number, generation, delta_id)
            view, packed = tables.catalog(key)
            if (row := view.get(packed)) is None:
                raise UnknownArtifact("no such artifact in the catalog", artifact=key)
            note_artifact(tables, self.component, AuditAction.UPLOADED, key, row)


class UpdateArtifact(Op, frozen=True, tag=22):
    """Change what is recorded about an artifact's bytes; `None` leaves a field as it is."""

    component = int(Component.REMOTE)
    origin_db_id: UInt
    kind: ArtifactKind
    id: UInt
    generation: UInt
    delta_id: UInt = 0
    residency: Residency | None = None
    namespace_id: UInt | None = None
    suffix: str | None = None
    sha256: bytes | None = None
    bitmap_hash: UInt | None = None
    uploaded_at_ms: UInt | None = None
    verified_at_ms: UInt | None = None
    verify_state: VerifyState | None = None
    purge_after_ms: UInt | None = None

    def apply(self, tables: Overlay, at_ms: int) -> None:
        artifact = ArtifactKey(self.origin_db_id, self.kind, self.id, self.generation, self.delta_id)
        view, key = tables.catalog(artifact)
        row = view.get(key)
        # A fork's row of an inherited segment is not the artifact's: its bytes are described once, at the origin (M6).
        if row is None or getattr(row, "origin_db_id", self.origin_db_id) != self.origin_db_id:
            raise UnknownArtifact(
                "no such artifact in the catalog",
                db_id=self.origin_db_id,
                kind=self.kind.name,
                id=self.id,
                generation=self.generation,
            )
        changes = {
            name: value for name in _CHANGEABLE if (value := getattr(self, name)) is not None and hasattr(row, name)
        }
        moved_to = changes.get("namespace_id", row.namespace_id)
        if moved_to != row.namespace_id:
            if moved_to:
                retain_namespace(tables, moved_to)
            if row.namespace_id:
                release(tables, namespace_key(row.namespace_id), at_ms)
        view.put(key, replace(row, **changes))
        action = _MOVES.get((row.residency, self.residency)) if self.residency is not None else None
        if self.verify_state in _BAD and self.verify_state is not row.verify_state:
            action = AuditAction.FOUND_DAMAGED
        if action is not None:
            note_artifact(tables, self.component, action, artifact, row)


_BAD = (VerifyState.MISSING, VerifyState.ALTERED)
_MOVES = {
    (Residency.LOCAL, Residency.LOCAL_AND_REMOTE): AuditAction.UPLOADED,
    (Residency.LOCAL, Residency.REMOTE_ARCHIVED): AuditAction.UPLOADED,
    (Residency.LOCAL_AND_REMOTE, Residency.EVICTED): AuditAction.EVICTED,
    (Residency.LOCAL_AND_REMOTE, Residency.REMOTE_ARCHIVED): AuditAction.EVICTED,
    (Residency.EVICTED, Residency.LOCAL_AND_REMOTE): AuditAction.HYDRATED,
    (Residency.REMOTE_ARCHIVED, Residency.LOCAL_AND_REMOTE): AuditAction.HYDRATED,
}
"""(residency before, residency after) → action in the audit."""

_CHANGEABLE = (
    "residency",
    "namespace_id",
    "suffix",
    "sha256",
    "bitmap_hash",
    "uploaded_at_ms",
    "verified_at_ms",
    "verify_state",
    "purge_after_ms",
)


class PutNamespace(Op, frozen=True, tag=23):
    """Register a bucket and prefix that rows may refer to. Immutable, because objects are found through it."""

    component = int(Component.REMOTE)
    namespace_id: UInt
    record: NamespaceRecord

    def apply(self, tables: Overlay, at_ms: int) -> None:
        some_u32("namespace_id", self.namespace_id)
        key = t.REMOTE_NAMESPACE.key.pack(self.namespace_id)
        before = tables.remote_namespace.get(key)
        if before is not None and before != self.record:
            raise AlreadyExists("a namespace with this id already exists", namespace_id=self.namespace_id)
        if self.record.name:
            _claim_place(tables, self.record)
        tables.remote_namespace.put(key, self.record)
        raise_watermark(tables, Counter.NAMESPACE, self.namespace_id)
        if before is None and (self.record.owner_epoch or self.record.name):
            retain_namespace(tables, self.namespace_id)  # its own reference, until its epoch ends or it is dropped


def _claim_place(tables: Overlay, record: NamespaceRecord) -> None:
    """Refuse a name or URL that another place has: quire.toml describes under that name how the place is reached."""
    if record.prefix or not record.url:
        raise InvalidInput("a named namespace needs a URL that includes its prefix", name=record.name)
    for _, row in tables.remote_namespace.scan():
        if not row.holds_itself or row == record:
            continue
        if row.name == record.name:
            raise NameTaken(
                "a namespace with this name already exists", hint="`quire namespace ls` shows it", name=row.name
            )
        if row.url == record.url:
            hint = f"use the namespace {row.name!r}, or a prefix of the bucket that no other has"
            raise NameTaken("another namespace already uses this location", hint=hint, url=row.url)


class BeginOwnerEpoch(Op, frozen=True, tag=113):
    """Begin an owner epoch, when a store is created or taken over: one new namespace for each place."""

    component = int(Component.REMOTE)
    owner_epoch: UInt
    namespaces: list[tuple[UInt, NamespaceRecord]]
    """(id, record) of the namespace of each place in this epoch."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        some_u32("owner_epoch", self.owner_epoch)
        rows = [(key, row) for key, row in tables.remote_namespace.scan() if row.owner_epoch]
        former = max((row.owner_epoch for _, row in rows), default=0)
        if self.owner_epoch <= former:
            raise StalePlan(
                "the store has already reached this owner epoch",
                hint="read the owner epoch again and retry",
                now=former,
                asked=self.owner_epoch,
            )
        # A plan names objects of its epoch (P10): what it wrote must be garbage in the former namespaces before these
        # are released.
        if tables.checkpoint_plan.any(b""):
            raise StalePlan(
                "a plan of the previous epoch is still stored", hint="abandon it in the same batch, before this"
            )
        for namespace_id, record in self.namespaces:
            place = tables.remote_namespace.get(t.REMOTE_NAMESPACE.key.pack(record.place_id))
            if place is not None and place.dropped_at_ms:
                raise StalePlan(
                    "a namespace was dropped in the meantime",
                    hint="read the owner epoch again and retry",
                    namespace_id=record.place_id,
                )
            self._put(tables, namespace_id, record)
        for key, row in rows:
            if row.owner_epoch == former and not row.dropped_at_ms:
                release(tables, namespace_key(t.REMOTE_NAMESPACE.key.unpack(key)[0]), at_ms)

    def _put(self, tables: Overlay, namespace_id: int, record: NamespaceRecord) -> None:
        key = t.REMOTE_NAMESPACE.key.pack(some_u32("namespace_id", namespace_id))
        if record.owner_epoch != self.owner_epoch or tables.remote_namespace.has(key):
            raise InvalidInput("not a new namespace of this epoch", namespace_id=namespace_id, epoch=self.owner_epoch)
        tables.remote_namespace.put(key, record)
        raise_watermark(tables, Counter.NAMESPACE, namespace_id)
        retain_namespace(tables, namespace_id)


class DropNamespace(Op, frozen=True, tag=160):
    """Drop a place that no database uses: it is deleted after the grace period, with its namespaces of owner epochs."""

    component = int(Component.REMOTE)
    namespace_id: UInt

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key, count_key = t.REMOTE_NAMESPACE.key.pack(self.namespace_id), namespace_key(self.namespace_id)
        place = tables.remote_namespace.get(key)
        if place is None or place.owner_epoch:
            raise UnknownNamespace("no such namespace is registered", namespace_id=self.namespace_id)
        if place.dropped_at_ms:
            return
        count = tables.gc_refcounts.get(count_key)
        users = (count.in_use if count is not None else 0) - place.holds_itself
        if users > 0:
            raise StillReferenced(
                "the namespace is in use by databases",
                hint="`quire drop NAME --now` drops one; it is released when its objects are deleted (`quire namespace ls`)",
                namespace=place.name or self.namespace_id,
                users=users,
            )
        tables.remote_namespace.put(key, replace(place, dropped_at_ms=at_ms))
        if place.holds_itself:
            release(tables, count_key, at_ms)
        elif count is None:
            mark_unreferenced(tables, count_key, at_ms)
        release_epochs(tables, self.namespace_id, at_ms)


# ── retired objects ───────────────────────────────────────────────────────────────────────────────────────────────────
# A name is retired once: it is never used again (M5), so the first moment counts, however often it is retired.
class RetireObjects(Op, frozen=True, tag=180):
    """Retire objects: they are deleted when no archived moment needs them any more."""

    component = int(Component.REMOTE)
    url: str
    """URL of the place they are in; empty for the store's own object store."""
    objects: list[tuple[str, UInt]]
    """(name, database id, 0 if unknown) of each."""

    def apply(self, tables: Overlay, at_ms: int) -> None:
        for name, db_id in self.objects:
            key = t.RETIRED.key.pack(t.retired_digest(self.url, name))
            if not tables.retired.has(key):
                tables.retired.put(key, RetiredRecord(at_ms, name, self.url, db_id))


class ForgetRetired(Op, frozen=True, tag=181):
    """Remove the rows of retired objects that were deleted."""

    component = int(Component.REMOTE)
    digests: list[bytes]

    def apply(self, tables: Overlay, at_ms: int) -> None:
        for digest in self.digests:
            tables.retired.delete(t.RETIRED.key.pack(digest))
