"""Which database is meant, and the numbers that are fixed for its life: page size, pages per chunk, and their hash.

Rules
  1. The first opening decides the page size, for ever; who asks for another one later is refused.
  2. The hash covers page size, pages per chunk and compression: a row that no longer fits it is refused, because
     every chunk would be read at the wrong places.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from quire.core.errors import ConfigMismatch, InvalidInput
from quire.core.limits import CHUNK_BYTES, PAGE_SIZE_MAX, PAGE_SIZE_MIN
from quire.manifest.ops.databases import SetDbPageSize
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, DbRecord, DbStatus
from quire.manifest.store import ManifestStore


class Shape(NamedTuple):
    """What is fixed for the life of a database."""

    page_size: int
    pages_per_chunk: int


def find_database(txn: ReadTxn, db: int | str) -> tuple[int, DbRecord]:
    """A live page database by id or name."""
    return txn.live(db, DbKind.PAGES)


def fix_shape(manifest: ManifestStore, db_id: int, record: DbRecord, asked: int, default: int) -> Shape:
    """The database's shape, decided now if it never was (rule 1)."""
    shape = shape_of(db_id, record, asked, default)
    expected = config_hash(shape, record)
    if not record.page_size or (not record.config_hash and record.status is DbStatus.ACTIVE):
        manifest.submit([SetDbPageSize(db_id, *shape, expected)]).result()
    return shape


def shape_of(db_id: int, record: DbRecord, asked: int, default: int) -> Shape:
    """The same for who only reads: of a database that was never opened, what it would be."""
    size = record.page_size or asked or default
    if asked and asked != size:
        raise InvalidInput("the page size is fixed", db_id=db_id, page_size=size, asked=asked)
    if not PAGE_SIZE_MIN <= size <= PAGE_SIZE_MAX or size & (size - 1):
        raise InvalidInput("a page size is a power of two from 512 to 65536", page_size=size)
    shape = Shape(size, record.pages_per_chunk or CHUNK_BYTES // size)
    if record.page_size and record.config_hash not in (b"", config_hash(shape, record)):
        raise ConfigMismatch(
            "the database's page size, chunk size or compression is not what it was made with",
            hint="open it with the quire that made it",
            db_id=db_id,
            page_size=shape.page_size,
            pages_per_chunk=shape.pages_per_chunk,
            compression=record.compression.name,
        )
    return shape


def config_hash(shape: Shape, record: DbRecord) -> bytes:
    """Hash of page size, pages per chunk and compression: what every chunk depends on (rule 2)."""
    text = f"pages:{shape.page_size}:{shape.pages_per_chunk}:{int(record.compression)}"
    return hashlib.sha256(text.encode()).digest()[:16]
