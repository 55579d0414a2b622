"""Reference counts: what holds an artifact, and what zero means (M8).

A count row appears with the first reference and disappears only with the artifact itself. At in_use = pending_upload =
0 the row is doomed: it enters `gc_zero` with the time, and never rises again. A count never falls below zero: a batch
that attempts it fails.

A LEAF row holds references on the artifacts of its chains while it exists, so only collecting the leaf releases them;
in the same way, artifacts with bytes hold a reference on their namespace.
"""

from msgspec.structs import astuple, replace

from quire.core.errors import ArtifactGone, RefcountUnderflow, StillReferenced, UnknownArtifact, UnknownNamespace
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.manifest.ops.base import Component, Op
from quire.manifest.overlay import Overlay
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
    """Return the packed key of `gc_refcounts` and `gc_zero`: the fields of `ArtifactKey`, in order."""
    return t.GC_REFCOUNTS.key.pack(*astuple(key))


def leaf_count_key(origin_db_id: int, leaf: int, generation: int) -> bytes:
    """Return the count key of a leaf."""
    return t.GC_REFCOUNTS.key.pack(origin_db_id, ArtifactKind.LEAF, leaf, generation, 0)


def wal_count_key(origin_db_id: int, segment_id: int) -> bytes:
    """Return the count key of a WAL segment."""
    return t.GC_REFCOUNTS.key.pack(origin_db_id, ArtifactKind.WAL, segment_id, 0, 0)


def namespace_key(namespace_id: int) -> bytes:
    """Return the count key of a remote namespace."""
    return t.GC_REFCOUNTS.key.pack(0, ArtifactKind.NAMESPACE, namespace_id, 0, 0)


def unpack_artifact(raw: bytes) -> ArtifactKey:
    """Invert `artifact_key`."""
    origin, kind, number, generation, delta = t.GC_REFCOUNTS.key.unpack(raw)
    return ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)


def retain(tables: Overlay, key: bytes) -> None:
    """Add a reference."""
    row = tables.gc_refcounts.get(key)
    if row is None:
        # No row: nothing has held it yet. An artifact at zero still has its row, and is refused below.
        tables.gc_refcounts.put(key, FIRST)
        return
    _refuse_doomed(row, key)
    tables.gc_refcounts.put(key, RefcountRecord(row.in_use + 1, row.pending_upload))


def release(tables: Overlay, key: bytes, at_ms: int, count: int = 1) -> None:
    """Drop references; at zero the artifact is left to the collector."""
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
    """Hold an artifact's bytes for an upload job until the job ends."""
    row = tables.gc_refcounts.get(key)
    if row is None:
        raise UnknownArtifact("the artifact is not referenced, so it is not uploaded", artifact=unpack_artifact(key))
    _refuse_doomed(row, key)
    tables.gc_refcounts.put(key, RefcountRecord(row.in_use, row.pending_upload + 1))


def end_upload(tables: Overlay, key: bytes, at_ms: int) -> None:
    """Release the hold of an upload job that ended, whatever the outcome."""
    row = tables.gc_refcounts.get(key)
    if row is None or row.pending_upload == 0:
        raise RefcountUnderflow("no upload of this artifact is pending", artifact=unpack_artifact(key))
    _put_count(tables, key, row.in_use, row.pending_upload - 1, at_ms)


def require_doomed(tables: Overlay, key: bytes) -> None:
    """Refuse unless the artifact is at zero: nothing else may be removed."""
    row = tables.gc_refcounts.get(key)
    if row is None:
        raise UnknownArtifact("the artifact has no count row", artifact=unpack_artifact(key))
    if row.in_use or row.pending_upload:
        raise StillReferenced(
            "the artifact is still referenced",
            hint="`quire why` shows what refers to it",
            artifact=unpack_artifact(key),
            in_use=row.in_use,
            pending_upload=row.pending_upload,
        )


def mark_unreferenced(tables: Overlay, key: bytes, at_ms: int) -> None:
    """Set an artifact that nothing ever referred to to zero, so that the collector deletes it."""
    _put_count(tables, key, 0, 0, at_ms)


def remove_counts(tables: Overlay, key: bytes) -> None:
    """Remove the count and zero rows of an artifact that is gone."""
    tables.gc_refcounts.delete(key)
    tables.gc_zero.delete(key)


def _put_count(tables: Overlay, key: bytes, in_use: int, pending_upload: int, at_ms: int) -> None:
    if in_use or pending_upload:
        tables.gc_refcounts.put(key, RefcountRecord(in_use, pending_upload))
    else:
        tables.gc_refcounts.put(key, RefcountRecord(0, 0, at_ms))
        # In the transaction of the count: delete jobs find their work by this index alone.
        tables.gc_zero.put(key, IndexRecord(at_ms))


def _refuse_doomed(row: RefcountRecord, key: bytes) -> None:
    if not row.in_use and not row.pending_upload:
        raise ArtifactGone(
            "the artifact is being deleted and cannot be referenced again",
            hint="plan again from the current state",
            artifact=unpack_artifact(key),
        )


class RemoveArtifact(Op, frozen=True, tag=60):
    """Remove the rows of a doomed artifact whose object is gone. Leaves are removed by `CollectLeaf` instead."""

    component = int(Component.REFCOUNT)
    origin_db_id: UInt
    kind: ArtifactKind
    id: UInt
    generation: UInt
    delta_id: UInt = 0

    def apply(self, tables: Overlay, at_ms: int) -> None:
        key = t.GC_REFCOUNTS.key.pack(self.origin_db_id, self.kind, self.id, self.generation, self.delta_id)
        # The object is gone by now, which was safe only because zero is final (M8); anything else is refused.
        require_doomed(tables, key)
        if self.kind is ArtifactKind.LEAF:
            raise StillReferenced("a leaf holds references of its own", hint="use CollectLeaf", leaf=self.id)
        remove_counts(tables, key)
        if self.kind is ArtifactKind.NAMESPACE:
            row_key = t.REMOTE_NAMESPACE.key.pack(self.id)
            place = tables.remote_namespace.get(row_key)
            tables.remote_namespace.delete(row_key)
            if place is not None and not place.owner_epoch:
                release_epochs(tables, self.id, at_ms)
            return
        artifact = unpack_artifact(key)
        view, row_key = tables.catalog(artifact)
        row = view.get(row_key)
        view.delete(row_key)
        note_artifact(tables, self.component, AuditAction.DELETED, artifact, row)
        if row is not None and row.namespace_id:
            release(tables, namespace_key(row.namespace_id), at_ms)


def artifact_bytes(row: ChunkRecord | DeltaRecord | WalRecord | None) -> int:
    """Return the number of bytes of an artifact by its row; 0 without a row."""
    return 0 if row is None else row.used_bytes if isinstance(row, WalRecord) else row.size_bytes


def note_artifact(
    tables: Overlay,
    component: int,
    action: AuditAction,
    artifact: ArtifactKey,
    row: ChunkRecord | DeltaRecord | WalRecord | None,
) -> None:
    """Note for the audit what happened to an artifact's bytes, under the name of its object relative to its namespace."""
    subject = (row.suffix if row is not None else "") or object_key(artifact)
    note = (component, artifact.origin_db_id, action, subject, artifact.id, artifact_bytes(row))
    tables.notes.append(note)


def retain_namespace(tables: Overlay, namespace_id: int) -> None:
    """Add references of artifacts with bytes, or of a database, to a namespace."""
    if not tables.remote_namespace.has(t.REMOTE_NAMESPACE.key.pack(namespace_id)):
        raise UnknownNamespace(
            "no remote namespace has this id", hint="register it with put_namespace first", namespace_id=namespace_id
        )
    retain(tables, namespace_key(namespace_id))


def release_epochs(tables: Overlay, place_id: int, at_ms: int) -> None:
    """Release the current namespace of a dropped place; it no longer holds itself, and is deleted once it is empty."""
    epochs = [(key, row) for key, row in tables.remote_namespace.scan() if row.owner_epoch]
    newest = max((row.owner_epoch for _, row in epochs), default=0)
    for key, row in epochs:
        if row.place_id == place_id and row.owner_epoch == newest and not row.dropped_at_ms:
            tables.remote_namespace.put(key, replace(row, dropped_at_ms=at_ms))
            release(tables, namespace_key(t.REMOTE_NAMESPACE.key.unpack(key)[0]), at_ms)
