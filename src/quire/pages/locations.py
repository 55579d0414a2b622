"""Where the bytes of chunks and segments are, by the manifest's catalogs.

Pure reading of one transaction. Raises `Corruption` for a row that should be there.
"""

from __future__ import annotations

from typing import Any

from quire.core.errors import Corruption
from quire.core.ids import ArtifactKey, ArtifactKind, NamespaceId
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Residency
from quire.objects.namespace import RemoteNamespace
from quire.pages.sources import ChunkPlace, SegmentPlace

_HINT = "run `quire manifest check`"


def chunk_row(txn: ReadTxn, key: ArtifactKey) -> Any:
    """The catalog row of a chunk or delta."""
    row: Any
    if key.kind is ArtifactKind.BASE:
        row = txn.get(t.CHUNK_CATALOG, key.origin_db_id, key.id, key.generation)
    else:
        row = txn.get(t.CHUNK_DELTA_INDEX, key.origin_db_id, key.id, key.generation, key.delta_id)
    if row is None:
        raise Corruption("a chunk's catalog row is missing", hint=_HINT, chunk=object_key(key))
    return row


def space_of(txn: ReadTxn, namespace_id: int, objects_url: str) -> tuple[str, str]:
    """(URL, prefix) of a namespace; of the store's own object store for 0."""
    if not namespace_id:
        return objects_url, ""
    space = txn.namespace(namespace_id)
    if space is None:
        raise Corruption("an artifact's namespace is missing", hint=_HINT, namespace_id=namespace_id)
    return space.url or objects_url, RemoteNamespace(
        id=NamespaceId(namespace_id), url=space.url, prefix=space.prefix
    ).prefix


def chunk_place(txn: ReadTxn, key: ArtifactKey, objects_url: str) -> ChunkPlace:
    """Where a chunk or delta is, by its catalog row."""
    row = chunk_row(txn, key)
    url, prefix = space_of(txn, row.namespace_id, objects_url)
    name = row.suffix or object_key(key)
    return ChunkPlace(key=key, url=url, object_key=f"{prefix}/{name}" if prefix else name, size_bytes=row.size_bytes)


def segment_place(txn: ReadTxn, origin_db_id: int, segment_id: int, objects_url: str) -> SegmentPlace | None:
    """Where a sealed segment is, by its origin's row; `None` if there is none. Its file is where it always is."""
    row = txn.get(t.WAL_CATALOG, origin_db_id, segment_id)
    if row is None or row.origin_db_id != origin_db_id:
        return None
    if row.residency is Residency.LOCAL:
        return SegmentPlace(origin_db_id=origin_db_id, segment_id=segment_id, used_bytes=row.used_bytes)
    url, prefix = space_of(txn, row.namespace_id, objects_url)
    name = row.suffix or object_key(ArtifactKey(origin_db_id, ArtifactKind.WAL, segment_id, 0))
    return SegmentPlace(
        origin_db_id=origin_db_id,
        segment_id=segment_id,
        url=url,
        object_key=f"{prefix}/{name}" if prefix else name,
        used_bytes=row.used_bytes,
    )
