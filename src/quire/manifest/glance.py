"""A look at the manifest that loads LMDB and nothing else: for commands that list, and are over before msgspec is imported.

Terms
  familiar   a row of the version, and with the fields, that are written down here; a file that is whole

Rules
  1. Only what is familiar is told. Anything else raises `Unfamiliar`, and the caller takes the usual way, which knows all there
     is to know about older, newer and damaged stores, and says what is wrong.
  2. The fields are those of `quire.manifest.records`, in the same order; a test holds the two together.

Threads: one. Raises `Unfamiliar`, and what LMDB and the file system raise: to a caller they mean the same.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Self

import lmdb

from quire.core.limits import GIB
from quire.manifest.kinds import DbKind, DbStatus, SnapshotKind

MAP_BYTES = 256 * GIB
READERS_MAX = 1024
TABLES_MAX = 96
SCHEMA = 3
STEPS = (b"owner_epochs", b"row_checksums")
"""What stores are that today's code has made or migrated: another schema, or another step, is unfamiliar."""

_REQUIRED = object()

DB: Mapping[str, Any] = {
    "name": _REQUIRED, "kind": _REQUIRED, "created_at_ms": _REQUIRED, "status": DbStatus.ACTIVE, "config_hash": b"",
    "page_size": 0, "pages_per_chunk": 0, "compression": 1, "namespace_id": 0, "parent_db_id": 0, "parent_snapshot_id": 0,
    "parent_generation": 0, "parent_lsn": 0, "next_generation": 1, "next_snapshot_id": 1, "dropped_at_ms": 0, "tags": {},
}  # fmt: skip
SNAPSHOT: Mapping[str, Any] = {
    "name": _REQUIRED, "kind": _REQUIRED, "created_at_ms": _REQUIRED, "generation": _REQUIRED, "anchor_lsn": 0,
    "anchor_segment_id": 0, "size_pages": 0, "page_size": 0, "leaves": [], "pins": [], "expires_at_ms": 0,
    "anchor_time_ms": 0, "tags": {},
}  # fmt: skip
NAMESPACE: Mapping[str, Any] = {
    "url": _REQUIRED, "prefix": "", "encryption_profile": "", "created_at_ms": 0, "owner_epoch": 0,
}  # fmt: skip
META: Mapping[str, Any] = {"number": 0, "text": ""}

_HEAD = b"\x01\x80"
"""Version 1 of a record, with the mark of a row that ends with its checksum, as it stands before its body."""
_RESIDUE = 0x2144DF1C
"""See `quire.manifest.rows`."""


class Unfamiliar(Exception):
    """Something here is for the usual way (rule 1)."""


class Glance:
    """A manifest, open for reading. Use it as a context manager."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._env = lmdb.open(
            path,
            subdir=False,
            readonly=True,
            create=False,
            map_size=MAP_BYTES,
            max_dbs=TABLES_MAX,
            max_readers=READERS_MAX,
            meminit=False,
        )
        try:
            self.figures: dict[str, Any] = {**self._env.info()}
            self.file_bytes = os.stat(path).st_size
            if self.file_bytes < (self.figures["last_pgno"] + 1) * self._env.stat()["psize"]:
                raise Unfamiliar("the file ends too early")
            self._env.reader_check()
            self._tables: dict[str, Any] = {}
            self._txn = self._env.begin()
            if self.meta("schema").number != SCHEMA or tuple(key for key, _ in self._rows("migrations")) != STEPS:
                raise Unfamiliar("another schema")
        except BaseException:
            self._env.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._txn.abort()
        self._env.close()

    def _table(self, name: str) -> Any:
        if name not in self._tables:
            self._tables[name] = self._env.open_db(name.encode(), txn=self._txn, create=False)
        return self._tables[name]

    def readers(self) -> int:
        """Reader slots in use, over all processes."""
        return int(self._env.info()["num_readers"])

    def count(self, table: str) -> int:
        """How many rows a table has."""
        return int(self._txn.stat(db=self._table(table))["entries"])

    def count_of(self, table: str, owner: int) -> int:
        """How many rows of a table belong to a database."""
        return sum(1 for _ in self._rows(table, owner))

    def databases(self) -> dict[int, SimpleNamespace]:
        """Every database by its id, dropped ones included."""
        found = {int.from_bytes(key, "big"): record("db", key, raw, DB) for key, raw in self._rows("db")}
        for each in found.values():
            each.kind, each.status = DbKind(each.kind), DbStatus(each.status)
        return found

    def snapshots(self, db_id: int) -> list[SimpleNamespace]:
        """The snapshots of a database, oldest first, as `SnapshotInfo` tells them."""
        return [
            _snapshot(db_id, int.from_bytes(key[4:], "big"), record("snapshot_index", key, raw, SNAPSHOT))
            for key, raw in self._rows("snapshot_index", db_id)
        ]

    def meta(self, name: str) -> SimpleNamespace:
        """A fact about the environment."""
        raw = self._txn.get(name.encode(), db=self._table("meta"))
        return SimpleNamespace(**META) if raw is None else record("meta", name.encode(), raw, META)

    def owner_epoch(self) -> int:
        """As `ReadTxn.owner_epoch`."""
        rows = (record("remote_namespace", key, raw, NAMESPACE) for key, raw in self._rows("remote_namespace"))
        return max((row.owner_epoch for row in rows), default=0)

    def feed_bounds(self) -> tuple[int, int]:
        """As `ReadTxn.feed_bounds`."""
        oldest = self.meta("oldest_sequence").number or 1
        with self._txn.cursor(db=self._table("change_log")) as cursor:
            last = int.from_bytes(cursor.key(), "big") if cursor.last() else 0
        return oldest, max(last, oldest - 1)

    def _rows(self, table: str, owner: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        first = b"" if owner is None else owner.to_bytes(4, "big")
        with self._txn.cursor(db=self._table(table)) as cursor:
            if not cursor.set_range(first):
                return
            for key, raw in cursor:
                if not key.startswith(first):
                    return
                yield key, raw


def _snapshot(db_id: int, snapshot_id: int, row: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        db_id=db_id,
        snapshot_id=snapshot_id,
        name=row.name,
        kind=SnapshotKind(row.kind),
        created_at_ms=row.created_at_ms,
        generation=row.generation,
        anchor_lsn=row.anchor_lsn,
        size_pages=row.size_pages,
        page_size=row.page_size,
        leaves=len(row.leaves),
        pins=len(row.pins),
        expires_at_ms=row.expires_at_ms,
        anchor_time_ms=row.anchor_time_ms,
        tags=row.tags,
    )


def record(table: str, key: bytes, raw: bytes, fields: Mapping[str, Any]) -> SimpleNamespace:
    """A row: its fields by name, with defaults for those that older bytes do not have; newer ones are left out.

    >>> record("meta", b"x", b"\\x01\\x80\\x91\\x07" + bytes.fromhex("00000000"), META)
    Traceback (most recent call last):
    quire.manifest.glance.Unfamiliar: another version of a record, or a damaged one
    """
    if raw[:2] != _HEAD or zlib.crc32(raw, zlib.crc32(key, zlib.crc32(table.encode()))) != _RESIDUE:
        raise Unfamiliar("another version of a record, or a damaged one")
    values, end = unpacked(raw, 2)
    if type(values) is not list or end != len(raw) - 4:
        raise Unfamiliar("no record")
    found = {**fields, **dict(zip(fields, values))}
    if _REQUIRED in found.values():
        raise Unfamiliar("a record is too short")
    return SimpleNamespace(**found)


_SIZED = {0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4), 0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4),
          0xDC: ("array", 2), 0xDD: ("array", 4), 0xDE: ("map", 2), 0xDF: ("map", 4)}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpacked(raw: bytes, at: int) -> tuple[Any, int]:
    """A msgpack value and where it ends; of the types that records have.

    >>> unpacked(b"\\x93\\x01\\xa2hi\\x80", 0)
    ([1, 'hi', {}], 6)
    """
    tag = raw[at]
    at += 1
    if tag < 0x80:
        return tag, at
    if tag < 0xC0:
        kind, size = ("map", tag & 15) if tag < 0x90 else ("array", tag & 15) if tag < 0xA0 else ("str", tag & 31)
    elif 0xCC <= tag <= 0xCF:
        end = at + (1 << (tag - 0xCC))
        return int.from_bytes(raw[at:end], "big"), end
    elif tag in _SIZED:
        kind, width = _SIZED[tag]
        size = int.from_bytes(raw[at : at + width], "big")
        at += width
    elif tag in _CONSTANTS:
        return _CONSTANTS[tag], at
    else:
        raise Unfamiliar("another type of value")
    return _filled(raw, at, kind, size)


def _filled(raw: bytes, at: int, kind: str, size: int) -> tuple[Any, int]:
    if kind in ("str", "bin"):
        body = raw[at : at + size]
        if len(body) != size:
            raise Unfamiliar("a value is cut off")
        return (body.decode() if kind == "str" else body), at + size
    values = []
    for _ in range(size if kind == "array" else 2 * size):
        value, at = unpacked(raw, at)
        values.append(value)
    return (values if kind == "array" else dict(zip(values[::2], values[1::2]))), at
