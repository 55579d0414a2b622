"""Reads the shape of page databases, and the locations of their chunks and segments, from the manifest.

The first open fixes the page size permanently; a later open with another size is refused. A row whose page size and chunk size
do not match their hash is refused too: every chunk would be read at wrong offsets. Compression may change: each chunk states
its own.

Everything but `fix_shape` only reads one transaction. Raises `Corruption` for a missing row, `InvalidInput`, `ConfigMismatch`.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from quire.core.errors import ConfigMismatch, Corruption, InvalidInput
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import CHUNK_BYTES, PAGE_SIZE_MAX, PAGE_SIZE_MIN
from quire.durable.names import object_key
from quire.manifest import tables as t
from quire.manifest.ops.databases import SetDbPageSize
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Compression, DbKind, DbRecord, DbStatus, Residency
from quire.manifest.store import ManifestStore
from quire.objects.api import check_prefix, key_below
from quire.pages.sources import ChunkPlace, SegmentPlace


class PageShape(NamedTuple):
    """The properties that are fixed for the life of a database."""

    page_size: int
    pages_per_chunk: int


def find_database(txn: ReadTxn, db: int | str) -> tuple[int, DbRecord]:
    """Return the id and record of a live page database, by id or name."""
    return txn.live(db, DbKind.PAGES)


def fix_shape(manifest: ManifestStore, db_id: int, record: DbRecord, requested: int, default: int) -> PageShape:
    """Return the database's shape, fixing it now if this is the first open."""
    shape = shape_of(db_id, record, requested, default)
    expected = config_hash(shape, record.compression)
    if not record.page_size or (not record.config_hash and record.status is DbStatus.ACTIVE):
        manifest.submit([SetDbPageSize(db_id, *shape, expected)]).result()
    return shape


def shape_of(db_id: int, record: DbRecord, requested: int, default: int) -> PageShape:
    """Return the database's shape without fixing it; for one that was never opened, the shape that it would get."""
    size = record.page_size or requested or default
    if requested and requested != size:
        raise InvalidInput("the page size cannot be changed", db_id=db_id, page_size=size, asked=requested)
    if not PAGE_SIZE_MIN <= size <= PAGE_SIZE_MAX or size & (size - 1):
        raise InvalidInput("a page size must be a power of two from 512 to 65536", page_size=size)
    shape = PageShape(size, record.pages_per_chunk or CHUNK_BYTES // size)
    if record.page_size:
        check_hash(db_id, record, shape)
    return shape


def config_hash(shape: PageShape, compression: Compression) -> bytes:
    """Return a hash of page size and pages per chunk, which determine where each page is in a chunk, and of the compression at
    the first open."""
    text = f"pages:{shape.page_size}:{shape.pages_per_chunk}:{int(compression)}"
    return hashlib.sha256(text.encode()).digest()[:16]


def check_hash(db_id: int, record: DbRecord, shape: PageShape) -> None:
    """Raise `ConfigMismatch` if the hash of a database is not that of its shape."""
    if record.config_hash and record.config_hash not in [
        config_hash(shape, compression) for compression in Compression
    ]:
        raise ConfigMismatch(
            "the database's page size or chunk size differs from when it was created",
            hint="open it with the version of quire that created it",
            db_id=db_id,
            page_size=shape.page_size,
            pages_per_chunk=shape.pages_per_chunk,
        )


_HINT = "run `quire manifest check`"


def chunk_row(txn: ReadTxn, key: ArtifactKey) -> Any:
    """Return the catalog row of a chunk or delta."""
    row = txn.artifact(key)
    if row is None:
        raise Corruption("a chunk's catalog row is missing", hint=_HINT, chunk=object_key(key))
    return row


def space_of(txn: ReadTxn, namespace_id: int, objects_url: str) -> tuple[str, str]:
    """Return (URL, prefix) of a namespace; 0 is the store's own object store."""
    if not namespace_id:
        return objects_url, ""
    space = txn.namespace(namespace_id)
    if space is None:
        raise Corruption("an artifact's namespace is missing", hint=_HINT, namespace_id=namespace_id)
    return space.url or objects_url, check_prefix(space.prefix)


def chunk_place(txn: ReadTxn, key: ArtifactKey, objects_url: str) -> ChunkPlace:
    """Return the location of a chunk or delta, from its catalog row."""
    row = chunk_row(txn, key)
    url, prefix = space_of(txn, row.namespace_id, objects_url)
    name = row.suffix or object_key(key)
    return ChunkPlace(key=key, url=url, object_key=key_below(prefix, name), size_bytes=row.size_bytes)


def segment_place(txn: ReadTxn, origin_db_id: int, segment_id: int, objects_url: str) -> SegmentPlace | None:
    """Return the location of a sealed segment, from its origin's row; `None` if there is no row.

    A local file's path follows from its ids, so a local place has no URL.
    """
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
        object_key=key_below(prefix, name),
        used_bytes=row.used_bytes,
    )
