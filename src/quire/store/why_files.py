"""Explains files and objects that are not artifacts (logs, key-value tables, backups, temporary files) for `why`.

These have no reference counts. Each belongs to a database, a backup or the store, and is removed with it or when it is
superseded. A temporary file is removed by the operation that made it, or when its database or store is next opened.

Terms
  size lookup  returns the size of a file or object, `None` if it does not exist; supplied by the caller, who has the
               directory and the object store

Reads the manifest in one transaction. Raises `UnknownArtifact` for what does not exist or has no owner.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from quire.core.clock import moment
from quire.core.errors import UnknownArtifact
from quire.core.ids import U64_MAX, ArtifactKey, ArtifactKind
from quire.durable import names, object_names
from quire.durable.object_names import parse_epoch_key
from quire.durable.space import allocated_bytes, measure_database
from quire.manifest import tables as t
from quire.manifest.ops.base import Counter
from quire.manifest.ops.snapshots import is_dropped
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WINDOW_TAG, DbStatus, SnapshotRecord

SizeLookup = Callable[[str], int | None]

ORPHANS = "`quire verify --orphans` finds objects that nothing refers to, and `quire verify --sweep` deletes them"
UNOWNED_HINT = "quire neither reads nor removes it: delete it if you know its origin"
"""The hint for a file whose database never existed or has no row any more."""
NOT_THERE = "paths are relative to the store, like pages/00000001/wal/00000001.seg or objects/KEY"

UPKEEP = "by maintenance"
_BACKUP = re.compile(r"kv/(?P<label>.+)/(tables/[^/]+|backups/[0-9a-f]{16}\.json)")
_OF_STREAM = re.compile(rf"{names.STREAMS}/(?P<id>0|[1-9][0-9]{{0,19}})/.+")
_OF_PAGES = re.compile(rf"{names.PAGES}/(?P<id>[0-9a-f]{{8}})/.+")
_OF_LSM = re.compile(rf"{names.LSM}/(?P<id>[0-9a-f]{{8}})/(?P<rest>.+)")
_SPARE = re.compile(r"/hot/spare-[0-9]+\.seg\.tmp$")
_SNAPSHOT = re.compile(r"snapshots/(?P<number>[0-9]{6,20})/.+")
_SCRATCH = re.compile(rf"{names.SCRATCH}/[0-9]+(/.+)?")
_PROBE = re.compile(rf"({names.OBJECTS}/)?doctor/[0-9a-f]{{16}}")
_STAGED = f"{names.OBJECTS}/{names.TEMPORARY}/"
_UNFINISHED = f"{names.MANIFEST}{names.TEMPORARY}-lock"
"""LMDB's lock file next to a manifest that does not have its final name yet."""

OWNER_OPENS = "when the store is next opened for writing"
WRITES = "writes it, or did when it last ran"


class Holder(msgspec.Struct, frozen=True):
    """One holder of the subject."""

    kind: str
    """"database", "snapshot", "fork", "reader", "job", "plan", "backup", "store" or "time"."""
    name: str
    what: str
    """How it holds the subject, as text for the user."""
    release: str
    """What would release the subject: a command, or an event to wait for."""


class Explanation(msgspec.Struct, frozen=True):
    """A subject and everything that keeps it."""

    subject: str
    kind: str
    """"database", "namespace", "snapshot", "page", "segment", "base" or "delta";
    "log", "table", "backup" or "file" for a subject that is not an artifact."""
    state: str
    size_bytes: int
    references: int
    """The reference count; 0 for a subject that is not an artifact."""
    holders: tuple[Holder, ...]
    disk_bytes: int = 0
    """Bytes that the file system has allocated for it in the store's directory; for a database, those of all its files,
    preallocated zeros included. 0 if it has no local file, and for a snapshot, whose files belong to its database."""


def explain_file(txn: ReadTxn, path: str, size_lookup: SizeLookup | None) -> Explanation | None:
    """Explain the file at a path in the store. Return `None` for any other kind of file."""
    file = names.parse_path(path)
    if isinstance(file, names.StreamSegmentFile):
        return _stream_segment(txn, file, size_lookup)
    if isinstance(file, names.ManifestLogFile | names.ManifestLogSnapshotFile | names.ManifestLogLock):
        return explain_owned(txn, path, "log", file.stream_id, _log_file(file), size_lookup)
    if isinstance(file, names.SstFile):
        return _table(txn, file, size_lookup)
    if isinstance(file, names.LsmWalFile):
        what = "has writes in it that may not be in a table yet"
        return explain_owned(
            txn, path, "log", file.db_id, (what, f"{UPKEEP}, when all of them are in tables"), size_lookup
        )
    if isinstance(file, names.LsmManifestLogFile | names.LsmManifestSnapshotFile):
        return explain_owned(
            txn,
            path,
            "log",
            file.db_id,
            ("has the list of its tables in it", f"{UPKEEP}, with a newer one"),
            size_lookup,
        )
    if isinstance(file, names.FollowFile):
        what = "stores the position of a followed SQLite file in it"
        return explain_owned(txn, path, "file", file.db_id, (what, "quire drop {name}"), size_lookup)
    if isinstance(file, names.QuarantineNote | names.QuarantinedFile):
        what = "was moved there by a recovery that could not prove it to be garbage; `quire quarantine ls` shows the reason"
        release = f"quire quarantine rm {file.number}; quire quarantine restore {file.number} puts it back"
        return Explanation(
            path,
            "file",
            "in quarantine",
            size_of(path, size_lookup),
            0,
            (Holder("store", "quarantine", what, release),),
        )
    if isinstance(file, names.FixedFile):
        holder = Holder("store", "the store", "needs it", "never, while the store exists")
        return Explanation(path, "file", "part of every store", size_of(path, size_lookup), 0, (holder,))
    return explain_temporary(txn, path, size_lookup)


def explain_object(txn: ReadTxn, key: str, size_lookup: SizeLookup | None) -> Explanation | None:
    """Explain an object by its key. Return `None` for any other kind of object."""
    gone, name = "with its stream: quire drop {name}", own_name(txn, key)
    if chunk := object_names.parse_manifest_log_key(name):
        what = f"has chunk {chunk[1]} of its manifest log in it, the history of its segments"
        release = f"quire manifest bundle {{name}}, when its week is over; or {gone}"
        return explain_owned(txn, key, "log", chunk[0], (what, release), size_lookup)
    if bundle := object_names.parse_bundle_key(name):
        what = f"has chunks {bundle[1]} to {bundle[2]} of its manifest log in it, the history of its segments"
        return explain_owned(txn, key, "log", bundle[0], (what, gone), size_lookup)
    if snapshot := object_names.parse_snapshot_key(name):
        what = f"has snapshot {snapshot[1]} of its manifest log in it"
        return explain_owned(
            txn, key, "log", snapshot[0], (what, f"{UPKEEP}, when newer ones replace it; or {gone}"), size_lookup
        )
    if backup := _BACKUP.fullmatch(key.removeprefix(f"{txn.store_id()}/backups/")):
        label = backup["label"]
        release = f"quire kv prune {shlex.quote(label)}, or the next quire kv backup when enough newer ones are there"
        holder = Holder("backup", label, f"quire kv restore NEW --label {shlex.quote(label)} reads it", release)
        return Explanation(key, "backup", "in the object store", size_of(key, size_lookup), 0, (holder,))
    return None


def _log_file(file: names.StoreName) -> tuple[str, str]:
    """Return how a stream holds a file of its manifest log, and what would release it."""
    if isinstance(file, names.ManifestLogFile):
        release = f"{UPKEEP}, when its object is in tier 2 and a newer snapshot of the log stands for it"
        return f"has chunk {file.chunk_index} of its manifest log in it, the history of its segments", release
    if isinstance(file, names.ManifestLogSnapshotFile):
        return f"has snapshot {file.snapshot_id} of its manifest log in it", f"{UPKEEP}, when newer ones replace it"
    return "locks its manifest log with it", "with the stream: quire drop {name}"


def _stream_segment(txn: ReadTxn, file: names.StreamSegmentFile, size_lookup: SizeLookup | None) -> Explanation | None:
    """Explain an open segment. Return `None` for a sealed one: it has a row and is an artifact."""
    key = ArtifactKey(file.stream_id, ArtifactKind.WAL, file.segment_id, 0)
    if file.segment_id <= 0xFFFFFFFF and txn.get(t.WAL_CATALOG, key.origin_db_id, key.id) is not None:
        return None
    what = ("writes to it, or did recently", "quire stream seal {name}, then its retention")
    return explain_owned(txn, file.path, "segment", file.stream_id, what, size_lookup)


def _table(txn: ReadTxn, file: names.SstFile, size_lookup: SizeLookup | None) -> Explanation:
    row = txn.get(t.LSM_CATALOG, file.db_id, file.sst_id)
    if row is None:
        what = (
            "does not list it among its tables, any more or yet",
            f"{UPKEEP}, when no snapshot and no reader needs it",
        )
    else:
        what = (f"has {row.rows:,} versions of keys in it, on level {row.level}", "quire kv compact {name}")
    return explain_owned(txn, file.path, "table", file.db_id, what, size_lookup)


# ── temporary files ───────────────────────────────────────────────────────────────────────────────────────────────────
def explain_temporary(txn: ReadTxn, path: str, size_lookup: SizeLookup | None) -> Explanation | None:
    """Explain a temporary file. Return `None` if it is not one."""
    stem = names.parse_path(path.removesuffix(names.TEMPORARY))
    if isinstance(stem, names.LeaseFile):
        what, release = "records the version that it reads in it", "when it closes; the owner removes leftovers"
        return _temporary(path, size_lookup, Holder("reader", str(stem.reader), what, release))
    if _SCRATCH.fullmatch(path):
        what = "has rows of a load in it, or pages of a large transaction"
        return _temporary(
            path, size_lookup, Holder("store", "the owner", what, f"when that is done; leftovers {OWNER_OPENS}")
        )
    if path.startswith(_STAGED):
        what = "puts an object there before it gets its name"
        release = "when it is complete; maintenance or `quire verify --sweep` removes it after an hour"
        return _temporary(path, size_lookup, Holder("store", "a writer", what, release))
    if _PROBE.fullmatch(path):
        what, release = "wrote it as a test object", "when it ends; a leftover may be deleted"
        return _temporary(path, size_lookup, Holder("store", "quire doctor", what, release))
    if path == names.MODE_FILE:
        what = "stores the mode of all manifest logs in it (quire manifest mode)"
        release = "quire manifest mode changes it; without it, quire.toml decides"
        return Explanation(
            path, "file", "in use", size_of(path, size_lookup), 0, (Holder("store", "the store", what, release),)
        )
    is_part = isinstance(stem, names.FixedFile) or path.startswith(names.MODE_FILE)
    if path == _UNFINISHED or (is_part and path.endswith(names.TEMPORARY)):
        return _temporary(
            path, size_lookup, Holder("store", "the owner", WRITES, f"when it is complete; leftovers {OWNER_OPENS}")
        )
    return _of_stream(txn, path, size_lookup) or _of_lsm(txn, path, size_lookup) or _of_pages(txn, path, size_lookup)


def _temporary(path: str, size_lookup: SizeLookup | None, holder: Holder) -> Explanation:
    return Explanation(path, "file", "temporary", size_of(path, size_lookup), 0, (holder,))


def _of_stream(txn: ReadTxn, path: str, size_lookup: SizeLookup | None) -> Explanation | None:
    if (match := _OF_STREAM.fullmatch(path)) is None:
        return None
    stream_id = int(match["id"])
    if stream_id <= U64_MAX and path == names.state_path(stream_id):
        what = "stores its consumers, retention and last mode in it"
        return explain_owned(txn, path, "file", stream_id, (what, "quire drop {name}"), size_lookup)
    if _SPARE.search(path):
        words = ("has preallocated it as its next segment", "when the stream is closed or next opened")
        return explain_owned(txn, path, "file", stream_id, words, size_lookup)
    if path.endswith(names.TEMPORARY):
        return explain_owned(txn, path, "file", stream_id, (WRITES, _opened("stream")), size_lookup)
    return None


def _of_lsm(txn: ReadTxn, path: str, size_lookup: SizeLookup | None) -> Explanation | None:
    if (match := _OF_LSM.fullmatch(path)) is None:
        return None
    db_id, rest = int(match["id"], 16), match["rest"]
    if version := _SNAPSHOT.fullmatch(rest):
        return _of_version(txn, path, db_id, int(version["number"]), size_lookup)
    folder, _, name = rest.partition("/")
    if folder == "loads" and names.load_number(name) is not None:
        what = "stores the result of a bulk load in it, for a client that repeats the call"
        return explain_owned(txn, path, "file", db_id, (what, "after a thousand newer loads"), size_lookup)
    if path.endswith(names.TEMPORARY):
        return explain_owned(txn, path, "file", db_id, (WRITES, _opened("database")), size_lookup)
    return None


def _of_version(txn: ReadTxn, path: str, db_id: int, number: int, size_lookup: SizeLookup | None) -> Explanation:
    """Explain a file of a key-value snapshot: usually a hard link to a table that the database has or had."""
    held = [
        snapshot_holder(txn, db_id, snapshot_id, row, "needs it for its version of the database")
        for (_, snapshot_id), row in txn.scan(t.SNAPSHOT_INDEX, db_id)
        if row.anchor_segment_id == number
    ]
    if not held:
        words = (
            "had it for a dropped snapshot",
            "maintenance, or the next use of a key-value database",
        )
        return explain_owned(txn, path, "file", db_id, words, size_lookup)
    return Explanation(path, "file", "in use", size_of(path, size_lookup), 0, tuple(held))


def _of_pages(txn: ReadTxn, path: str, size_lookup: SizeLookup | None) -> Explanation | None:
    if (match := _OF_PAGES.fullmatch(path)) is None or not path.endswith(names.TEMPORARY):
        return None
    words = (WRITES, "when it is complete; leftovers by maintenance after an hour")
    return explain_owned(txn, path, "file", int(match["id"], 16), words, size_lookup)


def _opened(what: str) -> str:
    return f"when it is complete; leftovers when the {what} is next opened"


# ── shared ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def explain_owned(
    txn: ReadTxn, path: str, kind: str, db_id: int, words: tuple[str, str], size_lookup: SizeLookup | None
) -> Explanation:
    """Explain a file or object of one database. `words` are how the database holds it, and what would release it."""
    size = size_of(path, size_lookup)
    record = txn.database(db_id) if 0 < db_id <= 0xFFFFFFFF else None
    if record is None:
        whose = number(db_id) if path.startswith((names.PAGES, names.LSM)) else str(db_id)
        message = "the manifest has no database that this could belong to"
        raise UnknownArtifact(message, hint=_unowned_hint(txn, path, db_id), path=path, database=whose)
    if record.status is DbStatus.TOMBSTONED:
        gone = Holder("time", "sweep", f"{record.name or f'#{db_id}'} was dropped", _swept(path))
        return Explanation(path, kind, "left over", size, 0, (gone,))
    what, release = words
    holder = Holder("database", record.name, what, release.replace("{name}", shlex.quote(record.name)))
    return Explanation(path, kind, "in use", size, 0, (holder,))


def own_name(txn: ReadTxn, key: str) -> str:
    """Return an object's name without the prefix of its owner epoch; the key of another store is returned unchanged."""
    parsed = parse_epoch_key(key)
    return parsed[2] if parsed is not None and parsed[0] == txn.store_id() else key


def on_disk(txn: ReadTxn, root: str, asked: str, answer: Explanation) -> Explanation:
    """Return the explanation with `disk_bytes` set to what the file system has allocated in the store at `root`."""
    if answer.kind == "database":
        db_id = txn.dropped_id(asked) if answer.state == "dropped" else txn.database_id(answer.subject)
        given = measure_database(root, db_id)
    elif answer.kind in ("snapshot", "page"):
        return answer
    else:
        path = os.path.join(root, asked.removeprefix("./"))
        given = allocated_bytes(path) or allocated_bytes(os.path.join(root, names.OBJECTS, asked))
    return replace(answer, disk_bytes=given)


def size_of(path: str, size_lookup: SizeLookup | None) -> int:
    """Return the size of a file or object in bytes, 0 without a lookup. Raises `UnknownArtifact` if it does not exist."""
    if size_lookup is None:
        return 0
    size = size_lookup(path)
    if size is None:
        raise UnknownArtifact("no such file or object", hint=NOT_THERE, path=path)
    return size


def stray_hint(path: str) -> str:
    """Return the hint for an object or file that is named like an artifact and has no row: what finds or removes it."""
    file = names.parse_path(path)
    if isinstance(file, names.WalSegmentFile):
        return (
            "if there is such a file, the owner checks it when it next opens the database: without a commit "
            "it is removed, else moved to quarantine"
        )
    if isinstance(file, names.StreamSegmentFile):
        return "if there is such a file, the owner removes it or moves it to quarantine when it next opens the stream"
    return UNOWNED_HINT if isinstance(file, names.CachedChunkFile) else ORPHANS


def _unowned_hint(txn: ReadTxn, path: str, db_id: int) -> str:
    if 0 < db_id < txn.next_id(Counter.DB):
        return f"the database of this id was dropped long ago; what removes its files: {_swept(path)}"
    return UNOWNED_HINT


def _swept(path: str) -> str:
    """Return what removes the files of a dropped database."""
    if path.startswith(names.LSM):
        return "the next use of a key-value database, or maintenance"
    if path.startswith(names.PAGES):
        return "maintenance, within an hour"
    return "maintenance, or when the next stream is dropped"


# ── text of holders ───────────────────────────────────────────────────────────────────────────────────────────────────
def snapshot_holder(txn: ReadTxn, db_id: int, snapshot_id: int, row: SnapshotRecord, what: str) -> Holder:
    """Return the holder for a snapshot; `what` is how it holds the subject."""
    name = name_of(txn, db_id)
    return Holder(
        "snapshot", f"{name}@{title(row, snapshot_id)}", with_purpose(row, what), drop(name, row, snapshot_id)
    )


def title(row: SnapshotRecord, snapshot_id: int) -> str:
    """Return a snapshot's name, or `#` and its id if it has none."""
    return row.name or f"#{snapshot_id}"


def drop(name: str, row: SnapshotRecord, snapshot_id: int) -> str:
    """Return what would release a snapshot: its expiry, if it has one, and the command that drops it."""
    command = f"quire snapshot drop {shlex.quote(name)} {shlex.quote(row.name or str(snapshot_id))} --now"
    if row.expires_at_ms:
        return f"by itself {moment(row.expires_at_ms)}, or {command}"
    return command


def with_purpose(row: SnapshotRecord, what: str) -> str:
    """Return `what`, preceded by the purpose of a snapshot that no user named: a query, time travel, or a pending undrop."""
    if row.tags.get("by") == "lend":
        return f"is held by a query (Spark or another reader) that {what}"
    if row.tags.get("by") == "fork_many":
        return f"is there for forks that are being made, and {what}"
    if WINDOW_TAG in row.tags:
        return f"is there for time travel, and {what}"
    if is_dropped(row):
        return f"was dropped, can be brought back, and {what}"
    return what


def name_of(txn: ReadTxn, db_id: int) -> str:
    """Return a database's name, or `#` and its id if it has none any more."""
    record = txn.database(db_id)
    return record.title if record is not None and record.name else f"#{db_id}"


def number(db_id: int) -> str:
    """Format a database's id in decimal, and in hexadecimal as directories and keys have it.

    >>> number(153)
    '153 (0x99)'
    """
    return f"{db_id} (0x{db_id:x})"
