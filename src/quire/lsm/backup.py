"""Backs up a key-value database to an object store, and restores it.

A backup is a list (`backups/<lsn>.json`) and the tables that it names, under a label. Tables are uploaded first, the list last,
so a backup is complete or absent. Tables are immutable: one that exists already is not uploaded again. Objects:
`<home>/<label>/tables/<sst_id:06d>-<crc64:016x>.sst` and `<home>/<label>/backups/<lsn:016x>.json`. The home of a store's
backups contains its identity (`object_names.kv_backups_prefix`), so that two stores in one bucket can use the same label.

Threads: any. Raises `ObjectNotFound`, `ChecksumMismatch`, `AlreadyExists`, `Corruption`, and the object store's errors.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire.core.checked_read import checked_read
from quire.core.decoding import UNDECODABLE, described
from quire.core.errors import ChecksumMismatch, Corruption, InvalidInput, NotFound
from quire.core.events import emit
from quire.core.ids import U64_MAX
from quire.core.limits import MIB
from quire.durable.checksums import crc64
from quire.durable.failpoints import hit
from quire.durable.files import Disk, write_new
from quire.durable.names import sst_entry_path
from quire.lsm.manifest_data import ManifestData, ManifestSstEntry
from quire.lsm.snapshots import write_manifest
from quire.lsm.sst_reader import SSTable
from quire.manifest.records import LsmTableRecord
from quire.objects.api import ExistingObject, ObjectStore, list_objects

if TYPE_CHECKING:
    from quire.lsm.kv import Kv

READ_BYTES = 4 * MIB
LIST_BYTES_MAX = 256 * MIB
"""Largest list that is read: about two million tables."""

UNDER_WAY_MS = 3_600_000
"""Tables younger than this are not pruned: they may belong to a backup in progress, whose list is not written yet."""

Delete = Callable[[Sequence[str]], None]
"""Removes objects by their keys."""

_ONE_AT_A_TIME = threading.Lock()
"""A backup relies on tables that exist already, so none may be pruned meanwhile. A lock in the process is enough: only the
store's owner backs up and prunes."""

_OTHER = "restore an earlier backup: `quire kv backups LABEL` lists them"
NO_CRC = "0" * 16
_LIST_NAME = re.compile(r"([0-9a-f]{16})\.json")
FORMER_HOME = "kv"
"""Home of backups from before names contained the store's identity; they can still be restored."""


class TableObject(msgspec.Struct, frozen=True):
    """A table in the object store."""

    sst_id: int
    key: str
    size_bytes: int
    sha256: str


class Backup(msgspec.Struct, frozen=True):
    """A backup, as its list describes it."""

    label: str
    lsn: int
    created_at_ms: int
    next_sst_id: int
    tables: tuple[TableObject, ...]
    crc64: str = ""
    """Checksum of the list, with sixteen zeros in place of this field; empty in lists written by an older quire."""

    @property
    def size_bytes(self) -> int:
        """Total bytes of its tables."""
        return sum(table.size_bytes for table in self.tables)


def back_up(kv: Kv, store: ObjectStore, label: str, home: str = FORMER_HOME) -> Backup:
    """Back up everything written so far to the object store."""
    with _ONE_AT_A_TIME:
        lsn = kv.last_lsn
        kv.flush()
        with kv.upkeep.paused():
            # Both of one moment. The view keeps the files of its tables until they are uploaded.
            view, state = kv.view, kv.manifest.state()
        tables = tuple(_send(kv.disk, store, f"{home}/{label}", table) for table in view.levels)
        lsn = max(lsn, view.levels.lsn_max)
        backup = Backup(label, lsn, kv.clock.now_ms(), state.next_sst_id, tables)
        store.put(_list_key(f"{home}/{label}", lsn), encode_list(backup))
    return backup


def encode_list(backup: Backup) -> bytes:
    """Encode a backup's list with its checksum."""
    zeroed = msgspec.json.encode(msgspec.structs.replace(backup, crc64=NO_CRC))
    return zeroed.replace(_crc_field(NO_CRC), _crc_field(f"{crc64(zeroed):016x}"))


def decode_list(data: bytes, key: str) -> Backup:
    """Decode a backup's list. Raises unless every byte is as it was written."""
    try:
        backup = msgspec.json.decode(data, type=described(Backup))
    except UNDECODABLE as error:
        raise Corruption("the backup list cannot be decoded", hint=_OTHER, key=key, cause=str(error)) from error
    if backup.crc64:
        actual = f"{crc64(data.replace(_crc_field(backup.crc64), _crc_field(NO_CRC))):016x}"
        if actual != backup.crc64:
            text = "the backup list fails its checksum"
            raise ChecksumMismatch(text, hint=_OTHER, key=key, expected=backup.crc64, actual=actual)
    else:
        # A list without a checksum must be byte for byte what an older quire wrote; otherwise damage has removed the field.
        former = {name: getattr(backup, name) for name in Backup.__struct_fields__ if name != "crc64"}
        if msgspec.json.encode(former) != data:
            raise Corruption("the backup list differs from what was written", hint=_OTHER, key=key)
    return backup


def _crc_field(digits: str) -> bytes:
    return f'"crc64":"{digits}"'.encode()


def _send(disk: Disk, store: ObjectStore, below: str, table: SSTable) -> TableObject:
    crc, digest = 0, hashlib.sha256()
    with closing(disk.open(table.path, write=False)) as file:
        for offset in range(0, table.size_bytes, READ_BYTES):
            piece = file.read_at(READ_BYTES, offset)
            crc = crc64(piece, crc)
            digest.update(piece)
    key = f"{below}/tables/{table.meta.sst_id:06d}-{crc:016x}.sst"

    def same(existing: ExistingObject) -> bool:
        return existing.info.size_bytes == table.size_bytes  # the key contains the checksum

    store.put_file(key, table.path, create_only=True, identity=same)
    return TableObject(table.meta.sst_id, key, table.size_bytes, digest.hexdigest())


class Pruned(msgspec.Struct, frozen=True):
    """What a pruning removed, or would remove."""

    backups: tuple[int, ...]
    """Lsns of the backups removed."""
    tables: int
    size_bytes: int
    kept: int
    """Number of backups kept."""


def prune(
    store: ObjectStore,
    label: str,
    keep: int,
    *,
    delete: Delete,
    now_ms: int,
    dry_run: bool = False,
    home: str = FORMER_HOME,
) -> Pruned:
    """Remove all but the newest `keep` backups of a label, and the tables that no remaining backup needs.

    Lists are removed first, then tables: after a crash in between, the next pruning removes the tables. If a list cannot be
    read, all tables are kept.
    """
    if keep < 0:
        raise InvalidInput("the number of backups to keep must not be negative", keep=keep)
    with _ONE_AT_A_TIME:
        existing = backups(store, label, home)
        gone = existing[: max(0, len(existing) - keep)]
        kept = existing[len(gone) :]
        needed, all_readable = set[str](), True
        for lsn in kept:
            try:
                needed.update(table.key for table in read_backup(store, label, lsn, home).tables)
            except Corruption as error:
                all_readable = False
                emit("warning", "lsm.backup.unreadable", label=label, lsn=lsn, error=str(error))
        young = now_ms - UNDER_WAY_MS
        unneeded = [
            info
            for info in list_objects(store, f"{home}/{label}/tables")
            if all_readable and info.key not in needed and info.modified_ms <= young
        ]
        if not dry_run:
            delete([_list_key(f"{home}/{label}", lsn) for lsn in gone])
            hit("lsm.backup.lists_removed")
            delete([info.key for info in unneeded])
    return Pruned(tuple(gone), len(unneeded), sum(info.size_bytes for info in unneeded), len(kept))


def backups(store: ObjectStore, label: str, home: str = FORMER_HOME) -> list[int]:
    """Return the lsns of the existing backups in ascending order."""
    names = (info.key.rpartition("/")[2] for info in list_objects(store, f"{home}/{label}/backups"))
    return sorted(int(match[1], 16) for name in names if (match := _LIST_NAME.fullmatch(name)))


def labels(store: ObjectStore, home: str = FORMER_HOME) -> list[str]:
    """Return the labels that have backups, sorted."""
    names = [info.key.removeprefix(f"{home}/") for info in list_objects(store, home)]
    return sorted({name.split("/")[0] for name in names if "/backups/" in name})


def read_backup(store: ObjectStore, label: str, lsn: int | None = None, home: str = FORMER_HOME) -> Backup:
    """Read the list of the backup at `lsn`, or of the newest backup."""
    existing = backups(store, label, home)
    if not existing or (lsn is not None and lsn not in existing):
        raise NotFound(
            "no such backup", hint=f"`quire kv backups {shlex.quote(label)}` lists them", label=label, lsn=lsn
        )
    key = _list_key(f"{home}/{label}", existing[-1] if lsn is None else lsn)
    size = store.head(key).size_bytes
    if size > LIST_BYTES_MAX:
        raise Corruption("the backup list is too large", hint=_OTHER, key=key, size=size)
    backup = checked_read(lambda: decode_list(store.get(key), key))
    ids = {table.sst_id for table in backup.tables}
    fits = 0 <= backup.lsn <= U64_MAX and 0 < backup.next_sst_id <= U64_MAX and len(ids) == len(backup.tables)
    if not fits or not all(0 < sst_id < backup.next_sst_id for sst_id in ids):
        raise Corruption("the backup list is inconsistent", hint=_OTHER, key=key)
    return backup


def find_table(
    store: ObjectStore, label: str, home: str, sst_id: int, row: LsmTableRecord
) -> tuple[str, Callable[[], bytes]] | None:
    """Find a table in the backups of a database, newest first. Return a description of the place, and a function that reads
    the table; `None` if no backup has it. Used by repairs."""
    candidates = [(place, lsn) for place in (home, FORMER_HOME) for lsn in reversed(backups(store, label, place))]
    for place, lsn in candidates:
        try:
            backup = read_backup(store, label, lsn, place)
        except Corruption:
            continue
        for table in backup.tables:
            if (table.sst_id, table.size_bytes) == (sst_id, row.size_bytes):
                return f"the backup at lsn {lsn}", partial(_fetch, store, table)
    return None


def restore(store: ObjectStore, backup: Backup, disk: Disk, target: str) -> None:
    """Restore the files of a database to the directory `target`."""
    for part in ("sst", "wal", "manifest"):
        disk.make_dirs(f"{target}/{part}")
    tables: dict[int, ManifestSstEntry] = {}
    for table in backup.tables:
        size = store.head(table.key).size_bytes
        if size != table.size_bytes:  # checked before the whole object is read
            text = "a table of the backup has the wrong size"
            raise Corruption(text, hint=_OTHER, key=table.key, size=size, expected=table.size_bytes)
        data = _fetch(store, table)
        entry = ManifestSstEntry(table.sst_id, sst_entry_path(table.sst_id))
        write_new(disk, f"{target}/{entry.path}", data)
        _verify(disk, f"{target}/{entry.path}", table.sst_id)
        tables[table.sst_id] = entry
    disk.sync_dir(f"{target}/sst")
    state = ManifestData(tables=tables, next_sst_id=backup.next_sst_id)
    write_manifest(disk, target, state, backup.lsn)


def _fetch(store: ObjectStore, table: TableObject) -> bytes:
    def read() -> bytes:
        data = store.get(table.key)
        digest = hashlib.sha256(data).hexdigest()
        if len(data) != table.size_bytes or digest != table.sha256:
            text = "a table of the backup differs from what was backed up"
            raise ChecksumMismatch(text, hint=_OTHER, key=table.key, expected=table.sha256, actual=digest)
        return data

    return checked_read(read)


def _verify(disk: Disk, path: str, sst_id: int) -> None:
    """Verify every block of a restored table once: its checksums do not prove that quire wrote it."""
    with closing(SSTable.open(disk, path, sst_id)) as table:
        for problem in table.verify():
            raise Corruption("a table of the backup is damaged", hint=_OTHER, path=path, cause=problem)


def _list_key(below: str, lsn: int) -> str:
    return f"{below}/backups/{lsn:016x}.json"
