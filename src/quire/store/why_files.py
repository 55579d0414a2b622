"""Why files and objects are still there that are no artifacts: manifest logs, tables and logs of key-value databases, backups.

They have no reference counts: each belongs to something, and goes with it, or when something newer stands for it. What comes
and goes by itself is in `why_temporary.py`.

Reads the manifest, one transaction. Raises `UnknownArtifact` for what is not there, or belongs to nothing.
"""

from __future__ import annotations

import re
import shlex

from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable import names, object_names
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.store.why_database_files import Look, own_name, owned, size_of
from quire.store.why_temporary import of_passing
from quire.store.why_values import Answer, Holder

UPKEEP = "by the owner's upkeep"
_BACKUP = re.compile(r"kv/(?P<label>.+)/(tables/[^/]+|backups/[0-9a-f]{16}\.json)")


def of_file(txn: ReadTxn, path: str, look: Look | None) -> Answer | None:
    """What keeps the file at a path in the store; `None` if it is none of these."""
    found = names.parse_path(path)
    if isinstance(found, names.StreamSegmentFile):
        return _stream_segment(txn, found, look)
    if isinstance(found, names.ManifestLogFile | names.ManifestLogSnapshotFile | names.ManifestLogLock):
        return owned(txn, path, "log", found.stream_id, _log_file(found), look)
    if isinstance(found, names.SstFile):
        return _table(txn, found, look)
    if isinstance(found, names.LsmWalFile):
        what = "has writes in it that may be in no table yet"
        return owned(txn, path, "log", found.db_id, (what, f"{UPKEEP}, when all of them are in tables"), look)
    if isinstance(found, names.LsmManifestLogFile | names.LsmManifestSnapshotFile):
        return owned(
            txn, path, "log", found.db_id, ("has the list of its tables in it", f"{UPKEEP}, with a newer one"), look
        )
    if isinstance(found, names.FollowFile):
        what = "remembers in it how far it has followed a SQLite file"
        return owned(txn, path, "file", found.db_id, (what, "quire drop {name}"), look)
    if isinstance(found, names.QuarantineNote | names.QuarantinedFile):
        what = "was moved there by a recovery that could not prove it to be garbage; `quire quarantine ls` says why"
        release = f"quire quarantine rm {found.number}; quire quarantine restore {found.number} puts it back"
        return Answer(
            path, "file", "in quarantine", size_of(path, look), 0, (Holder("store", "quarantine", what, release),)
        )
    if isinstance(found, names.FixedFile):
        holder = Holder("store", "the store", "is not whole without it", "never, while there is a store")
        return Answer(path, "file", "part of every store", size_of(path, look), 0, (holder,))
    return of_passing(txn, path, look)


def of_object(txn: ReadTxn, key: str, look: Look | None) -> Answer | None:
    """What keeps an object by its key; `None` if it is none of these."""
    gone, name = "with its stream: quire drop {name}", own_name(txn, key)
    if chunk := object_names.parse_manifest_log_key(name):
        what = f"has chunk {chunk[1]} of its manifest log in it: what became of its segments"
        release = f"quire manifest bundle {{name}}, when its week is over; or {gone}"
        return owned(txn, key, "log", chunk[0], (what, release), look)
    if bundle := object_names.parse_bundle_key(name):
        what = f"has chunks {bundle[1]} to {bundle[2]} of its manifest log in it, the history of its segments"
        return owned(txn, key, "log", bundle[0], (what, gone), look)
    if snapshot := object_names.parse_snapshot_key(name):
        what = f"has snapshot {snapshot[1]} of its manifest log in it"
        return owned(txn, key, "log", snapshot[0], (what, f"{UPKEEP}, when newer ones stand for it; or {gone}"), look)
    if backup := _BACKUP.fullmatch(key.removeprefix(f"{txn.store_id()}/backups/")):
        label = backup["label"]
        release = f"quire kv prune {shlex.quote(label)}, or the next quire kv backup when enough newer ones are there"
        holder = Holder("backup", label, f"quire kv restore NEW --label {shlex.quote(label)} reads it", release)
        return Answer(key, "backup", "in the object store", size_of(key, look), 0, (holder,))
    return None


def _log_file(found: names.StoreName) -> tuple[str, str]:
    """How a stream holds a file of its manifest log, and what would end that."""
    if isinstance(found, names.ManifestLogFile):
        release = f"{UPKEEP}, when its object is in tier 2 and a newer snapshot of the log stands for it"
        return f"has chunk {found.chunk_index} of its manifest log in it: what became of its segments", release
    if isinstance(found, names.ManifestLogSnapshotFile):
        return f"has snapshot {found.snapshot_id} of its manifest log in it", f"{UPKEEP}, when newer ones stand for it"
    return "locks its manifest log with it", "with the stream: quire drop {name}"


def _stream_segment(txn: ReadTxn, found: names.StreamSegmentFile, look: Look | None) -> Answer | None:
    """Only of the open segment: a sealed one has a row, and is an artifact."""
    key = ArtifactKey(found.stream_id, ArtifactKind.WAL, found.segment_id, 0)
    if found.segment_id <= 0xFFFFFFFF and txn.get(t.WAL_CATALOG, key.origin_db_id, key.id) is not None:
        return None
    what = ("writes to it, or did a moment ago", "quire stream seal {name}, then what its retention says")
    return owned(txn, found.path, "segment", found.stream_id, what, look)


def _table(txn: ReadTxn, found: names.SstFile, look: Look | None) -> Answer:
    row = txn.get(t.LSM_CATALOG, found.db_id, found.sst_id)
    if row is None:
        what = ("has it no more among its tables, or not yet", f"{UPKEEP}, when no snapshot and no reader needs it")
    else:
        what = (f"has {row.rows:,} versions of keys in it, on level {row.level}", "quire kv compact {name}")
    return owned(txn, found.path, "table", found.db_id, what, look)
