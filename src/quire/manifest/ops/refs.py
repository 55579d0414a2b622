"""Reference counts: who may hold an artifact, and what zero means (M8).

Rules
  1. A count row appears with the first reference and disappears only with the artifact itself.
  2. At in_use = pending_upload = 0 the row is doomed: it is entered in `gc_zero` with the time and never rises again.
  3. A count never goes below zero: the batch that tries fails.
  4. LEAF rows hold references on the artifacts of their chains for as long as the row exists, so collecting a leaf is
     what releases them; artifacts with bytes hold a reference on their namespace likewise.
"""

from msgspec.structs import replace

from quire.core.errors import ArtifactGone, RefcountUnderflow, StillReferenced, UnknownArtifact, UnknownNamespace
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.manifest.codec import R
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay, TableView
from quire.manifest.records import (
    AuditAction,
    ChunkRecord,
    DeltaRecord,
    IndexRecord,
    RefcountRecord,
    UInt,
    WalRecord,
)

FIRST = RefcountRecord(in_use=1)


def artifact_key(key: ArtifactKey) -> bytes:
    """The packed key of `gc_refcounts` and `gc_zero`."""
    return t.GC_REFCOUNTS.key.pack(key.origin_db_id, key.kind, key.id, key.generation, key.delta_id)


def unpack_artifact(raw: bytes) -> ArtifactKey:
    """The inverse of `artifact_key`."""
    origin, kind, number, generation, delta = t.GC_REFCOUNTS.key.unpack(raw)
    return ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)


def retain(tables: Overlay, key: bytes, count: int = 1) -> None:
    """Add references."""
    row = tables.gc_refcounts.get(key)
    if row is None:
        tables.gc_refcounts.put(key, FIRST if count == 1 else RefcountRecord(in_use=count))
        return
    _refuse_doomed(row, key)
    tables.gc_refcounts.put(key, RefcountRecord(row.in_use + count, row.pending_upload))


def release(tables: Overlay, key: bytes, at_ms: int, count: int = 1) -> None:
    """Drop references; at zero the artifact becomes work for the collector."""
    row = tables.gc_refcounts.get(key)
    if row is None or row.in_use < count:
        raise RefcountUnderflow(
            "a reference count would fall below zero",
            hint="run `quire manifest check`; `--repair` recounts",
            artifact=unpack_artifact(key),
            in_use=0 if row is None else row.in_use,
            release=count,
        )
    _put_count(tables, key, row.in_use - count, row.pending_upload, at_ms)


def hold_upload(tables: Overlay, key: bytes) -> None:
    """An upload job needs the artifact's bytes until it ends."""
    row = tables.gc_refcounts.get(key)
    if row is None:
        raise UnknownArtifact(
            "nothing refers to this artifact, so there is nothing to upload", artifact=unpack_artifact(key)
        )
    _refuse_doomed(row, key)
    tables.gc_refcounts.put(key, RefcountRecord(row.in_use, row.pending_upload + 1))


def end_upload(tables: Overlay, key: bytes, at_ms: int) -> None:
    """The upload job ended, however it ended."""
    row = tables.gc_refcounts.get(key)
    if row is None or row.pending_upload == 0:
        raise RefcountUnderflow("no upload of this artifact is pending", artifact=unpack_artifact(key))
    _put_count(tables, key, row.in_use, row.pending_upload - 1, at_ms)


def require_doomed(tables: Overlay, key: bytes) -> None:
    """The artifact's row is at zero; anything else must not be removed."""
    row = tables.gc_refcounts.get(key)
    if row is None:
        raise UnknownArtifact("the artifact has no count row", artifact=unpack_artifact(key))
    if row.in_use or row.pending_upload:
        raise StillReferenced(
            "the artifact is still referenced",
            hint="`quire why` shows by whom",
            artifact=unpack_artifact(key),
            in_use=row.in_use,
            pending_upload=row.pending_upload,
        )


def doom(tables: Overlay, key: bytes, at_ms: int) -> None:
    """Give an artifact that nothing ever referred to a count of zero: work for the collector."""
    _put_count(tables, key, 0, 0, at_ms)


def forget(tables: Overlay, key: bytes) -> None:
    """Remove count and zero rows of an artifact that is gone."""
    tables.gc_refcounts.delete(key)
    tables.gc_zero.delete(key)


def _put_count(tables: Overlay, key: bytes, in_use: int, pending_upload: int, at_ms: int) -> None:
    if in_use or pending_upload:
        tables.gc_refcounts.put(key, RefcountRecord(in_use, pending_upload))
    else:
        tables.gc_refcounts.put(key, RefcountRecord(0, 0, at_ms))
        tables.gc_zero.put(key, IndexRecord(at_ms))


def _refuse_doomed(row: RefcountRecord, key: bytes) -> None:
    if not row.in_use and not row.pending_upload:
        raise ArtifactGone(
            "the artifact is being deleted and cannot be referenced again",
            hint="plan again from the current state",
            artifact=unpack_artifact(key),
        )


class RemoveArtifact(Op, frozen=True, tag=60):
    """The object of a doomed artifact is gone: remove its rows. Leaves are collected with `CollectLeaf` instead."""

    component = int(Component.REFCOUNT)
    audited = True
    origin_db_id: UInt
    kind: ArtifactKind
    id: UInt
    generation: UInt
    delta_id: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key = t.GC_REFCOUNTS.key.pack(self.origin_db_id, self.kind, self.id, self.generation, self.delta_id)
        require_doomed(tables, key)
        row = self._remove_row(tables, at_ms)
        forget(tables, key)
        if self.kind is not ArtifactKind.NAMESPACE:
            size = getattr(row, "size_bytes", 0) or getattr(row, "used_bytes", 0)
            subject = row_subject(row, unpack_artifact(key))
            tables.notes.append((self.component, self.origin_db_id, AuditAction.DELETED, subject, self.id, size))
        namespace_id = row.namespace_id if row is not None else 0
        if namespace_id:
            release(tables, namespace_key(namespace_id), at_ms)

    def _remove_row(self, tables: Overlay, at_ms: int) -> ChunkRecord | DeltaRecord | WalRecord | None:
        """Delete the catalog row; what it said, if it pointed at bytes."""
        if self.kind is ArtifactKind.BASE:
            key = t.CHUNK_CATALOG.key.pack(self.origin_db_id, self.id, self.generation)
            return _remove(tables.chunk_catalog, key)
        if self.kind is ArtifactKind.DELTA:
            key = t.CHUNK_DELTA_INDEX.key.pack(self.origin_db_id, self.id, self.generation, self.delta_id)
            return _remove(tables.chunk_delta_index, key)
        if self.kind is ArtifactKind.WAL:
            return _remove(tables.wal_catalog, t.WAL_CATALOG.key.pack(self.origin_db_id, self.id))
        if self.kind is ArtifactKind.NAMESPACE:
            place = _remove(tables.remote_namespace, t.REMOTE_NAMESPACE.key.pack(self.id))
            if place is not None and not place.owner_epoch:
                release_epochs(tables, self.id, at_ms)
            return None
        raise StillReferenced("a leaf holds references of its own", hint="use CollectLeaf", leaf=self.id)


def _remove(view: TableView[R], key: bytes) -> R | None:
    row = view.get(key)
    view.delete(key)
    return row


def row_subject(row: ChunkRecord | DeltaRecord | WalRecord | None, artifact: ArtifactKey) -> str:
    """The name of an artifact's object below its namespace: its own, if the row has one, else the canonical."""
    return (row.suffix if row is not None else "") or object_key(artifact)


def namespace_key(namespace_id: int) -> bytes:
    """The count key of a remote namespace."""
    return t.GC_REFCOUNTS.key.pack(0, ArtifactKind.NAMESPACE, namespace_id, 0, 0)


def retain_namespace(tables: Overlay, namespace_id: int, count: int = 1) -> None:
    """So many things with bytes, or a database, point at a namespace."""
    if not tables.remote_namespace.has(t.REMOTE_NAMESPACE.key.pack(namespace_id)):
        raise UnknownNamespace(
            "no remote namespace has this id", hint="register it with put_namespace first", namespace_id=namespace_id
        )
    retain(tables, namespace_key(namespace_id), count)


def release_epochs(tables: Overlay, place_id: int, at_ms: int) -> None:
    """A place goes: its namespaces of owner epochs hold themselves no longer, and go when nothing is in them."""
    epochs = [(key, row) for key, row in tables.remote_namespace.scan() if row.owner_epoch]
    newest = max((row.owner_epoch for _, row in epochs), default=0)
    for key, row in epochs:
        if row.place_id == place_id and row.owner_epoch == newest and not row.dropped_at_ms:
            tables.remote_namespace.put(key, replace(row, dropped_at_ms=at_ms))
            release(tables, namespace_key(t.REMOTE_NAMESPACE.key.unpack(key)[0]), at_ms)
