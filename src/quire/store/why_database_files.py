"""Answers for files and objects that belong to one database, and for those that belong to none.

Terms
  look   says how many bytes something takes, `None` if it is not there; whoever asks has the directory and the object store

Reads the manifest, one transaction. Raises `UnknownArtifact` for what is not there, or belongs to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from msgspec.structs import replace

from quire.core.errors import UnknownArtifact
from quire.durable import names
from quire.durable.object_names import parse_epoch_key
from quire.durable.space import given_bytes, measure_database
from quire.manifest.ops.base import Counter
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbStatus
from quire.store.why_text import number, quoted
from quire.store.why_values import Answer, Holder

Look = Callable[[str], int | None]

ORPHANS = "`quire verify --orphans` finds objects that nothing speaks of, and `quire verify --sweep` deletes them"
NOBODYS = "if it is there, nothing here reads it or removes it: delete it if you know where it comes from"
"""Of a file whose database never was, or is gone altogether."""
NOT_THERE = "paths are relative to the store, like pages/00000001/wal/00000001.seg or objects/KEY"


def owned(txn: ReadTxn, path: str, kind: str, db_id: int, told: tuple[str, str], look: Look | None) -> Answer:
    """The answer for what belongs to one database: how that holds it, and what would end it."""
    size = size_of(path, look)
    record = txn.database(db_id) if 0 < db_id <= 0xFFFFFFFF else None
    if record is None:
        whose = number(db_id) if path.startswith((names.PAGES, names.LSM)) else str(db_id)
        message = "the manifest has no database that this could be of"
        raise UnknownArtifact(message, hint=_nobodys(txn, path, db_id), path=path, database=whose)
    if record.status is DbStatus.TOMBSTONED:
        gone = Holder("time", "sweep", f"{record.name or f'#{db_id}'} was dropped", _swept(path))
        return Answer(path, kind, "left over", size, 0, (gone,))
    what, release = told
    holder = Holder("database", record.name, what, release.replace("{name}", quoted(record.name)))
    return Answer(path, kind, "in use", size, 0, (holder,))


def own_name(txn: ReadTxn, key: str) -> str:
    """An object's name below the prefix of the owner epoch that wrote it; another store's is left as it is."""
    found = parse_epoch_key(key)
    return found[2] if found is not None and found[0] == txn.store_id() else key


def on_disk(txn: ReadTxn, root: str, asked: str, answer: Answer) -> Answer:
    """The answer with what the file system has given for the subject in the store at `root`."""
    if answer.kind == "database":
        given = measure_database(root, txn.database_id(answer.subject))
    elif answer.kind == "snapshot":
        return answer
    else:
        path = os.path.join(root, asked.removeprefix("./"))
        given = given_bytes(path) or given_bytes(os.path.join(root, names.OBJECTS, asked))
    return replace(answer, disk_bytes=given)


def size_of(path: str, look: Look | None) -> int:
    """The bytes of what is there."""
    if look is None:
        return 0
    size = look(path)
    if size is None:
        raise UnknownArtifact("there is no such file or object", hint=NOT_THERE, path=path)
    return size


def stray_hint(path: str) -> str:
    """What finds or removes something that could be an artifact and is none: an object, or a file at a path in the store."""
    found = names.parse_path(path)
    if isinstance(found, names.WalSegmentFile):
        return (
            "if there is such a file, the owner looks at it when it opens the database the next time: without a commit in it "
            "it is removed, else moved to quarantine"
        )
    if isinstance(found, names.StreamSegmentFile):
        return "if there is such a file, the owner removes it or moves it to quarantine when it opens the stream the next time"
    return NOBODYS if isinstance(found, names.CachedChunkFile) else ORPHANS


def _nobodys(txn: ReadTxn, path: str, db_id: int) -> str:
    if 0 < db_id < txn.next_id(Counter.DB):
        return f"the database of this id was dropped long ago; what removes its files: {_swept(path)}"
    return NOBODYS


def _swept(path: str) -> str:
    """What removes the files of a database that was dropped."""
    if path.startswith(names.LSM):
        return "the next use of a key-value database, or the owner's upkeep"
    if path.startswith(names.PAGES):
        return "the owner's upkeep, within an hour"
    return "the owner's upkeep, or when the next stream is dropped"
