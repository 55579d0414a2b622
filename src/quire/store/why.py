"""Explains why something still exists: what holds a database, segment, chunk or object, and what would release it.

Terms
  subject   what the user names: a database's name, DB@SNAPSHOT, DB:PAGE, a file's path in the store, or an object's key,
            with or without `objects/` before it. `why_pages.py` explains pages, `why_files.py` what is no artifact
  holder    what keeps the subject: a database that uses it, a snapshot, a fork, a reader, a job, a running plan, or time

Holders are read from the rows that hold references, not from the counts. Where the two differ, the counts decide what is
deleted, and the explanation reports it. A segment without any other holder is reported as held by the floor (M10).

Reads the manifest in one transaction. Raises `NotFound` errors for a subject that does not exist, `InvalidInput` for one that
is not a valid subject.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from quire.core.clock import moment
from quire.core.errors import InvalidInput, UnknownArtifact, UnknownDatabase, UnknownSnapshot
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF
from quire.core.reader_info import ReaderInfo, reader_text
from quire.durable import names
from quire.manifest import tables as t
from quire.manifest.differences import read_leaves
from quire.manifest.leases import HOLDER_TAG, VIEW_TAG, is_view
from quire.manifest.ops.refs import artifact_bytes
from quire.manifest.ops.snapshots import is_dropped
from quire.manifest.reads import ReadTxn
from quire.manifest.records import (
    LABEL_TAG,
    SCHEDULE_TAG,
    TERMINAL_JOB_STATES,
    WINDOW_TAG,
    JobRecord,
    SnapshotRecord,
    WalFormat,
    WalRecord,
    WalState,
)
from quire.manifest.slots import artifacts, unpack_leaf
from quire.pages.leasefiles import UNREADABLE, live_leases
from quire.store.exclusive_artifacts import own_bytes
from quire.store.namespaces import NamespaceInfo, namespaces
from quire.store.why_files import (
    UNOWNED_HINT,
    Explanation,
    Holder,
    SizeLookup,
    drop,
    explain_file,
    explain_object,
    name_of,
    number,
    own_name,
    size_of,
    snapshot_holder,
    stray_hint,
    title,
    with_purpose,
)
from quire.store.why_pages import FORKS_MAX, ReaderLookup, explain_page

KIND_NAMES = {ArtifactKind.WAL: "segment", ArtifactKind.BASE: "base", ArtifactKind.DELTA: "delta"}
"""Kinds of artifacts as explanations name them."""


def readers_at(root: str) -> ReaderLookup:
    """Return a lookup that reads the lease files: these are the readers visible to a process that does not own the store."""

    def of(db_id: int) -> list[ReaderInfo]:
        if not os.path.isdir(folder := os.path.join(root, names.READERS)) or not os.listdir(folder):
            return []

        return [lease.info for lease in live_leases(root) if lease.db_id in (db_id, UNREADABLE)]

    return of


def why(
    txn: ReadTxn, subject: str, size_lookup: SizeLookup | None = None, reader_lookup: ReaderLookup = lambda _: []
) -> Explanation:
    """Explain what keeps a subject. `size_lookup` returns the size of a file or object that has no row, `reader_lookup` the
    readers of a database that have no row."""
    asked = subject.removeprefix("./")
    if "/" not in asked:
        with suppress(UnknownDatabase):
            return _database(txn, txn.database_id(subject), reader_lookup)

        if (page := explain_page(txn, asked, reader_lookup)) is not None:
            return page

    within = asked.removeprefix(f"{names.OBJECTS}/")
    if (retired := _retired(txn, within, size_lookup)) is not None:
        return retired
    explanation = explain_file(txn, asked, size_lookup) or explain_object(txn, within, size_lookup)
    if explanation is not None:
        return explanation
    key = names.parse_object_key(own_name(txn, within)) or _of_path(asked)
    if key is not None:
        return _artifact(txn, key, asked, reader_lookup)
    try:
        return _database(txn, txn.database_id(subject), reader_lookup)
    except UnknownDatabase as error:
        if (version := _version(txn, subject)) is not None:
            return version
        if db_id := txn.dropped_id(subject):
            return _database(txn, db_id, reader_lookup)
        for namespace in namespaces(txn):
            if namespace.name == subject:
                return _namespace(namespace)
        if "/" in subject:
            raise InvalidInput(
                "this is neither a file of the store nor an object's key",
                hint="paths are relative to the store, like pages/00000001/wal/00000001.seg or objects/KEY",
                subject=subject,
            ) from error
        raise


def _of_path(path: str) -> ArtifactKey | None:
    file = names.parse_path(path)
    if isinstance(file, names.WalSegmentFile):
        return ArtifactKey(file.db_id, ArtifactKind.WAL, file.segment_id, 0)
    if isinstance(file, names.StreamSegmentFile):
        return ArtifactKey(file.stream_id, ArtifactKind.WAL, file.segment_id, 0)
    return file.key if isinstance(file, names.CachedChunkFile) else None


# ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _database(txn: ReadTxn, db_id: int, reader_lookup: ReaderLookup) -> Explanation:
    record = txn.database(db_id)
    assert record is not None, "its name led here"
    holders = [
        *_snapshots_of(txn, db_id),
        *_forks_of(txn, db_id),
        *_readers_of(txn, db_id, reader_lookup),
        *_jobs_of(txn, db_id),
    ]
    if record.former_name:
        what = (
            f"dropped {moment(record.dropped_at_ms)}; can be restored for maintenance.undrop_seconds (a day by default)"
        )
        holders = [
            Holder("time", "undrop", what, f"quire drop {shlex.quote(f'#{db_id}')} --now"),
            *(holder for holder in holders if holder.kind != "snapshot"),  # restored or removed with the database
        ]
    status = "dropped" if record.former_name else record.status.name.lower()
    return Explanation(record.title, "database", status, own_bytes(txn, db_id), 0, tuple(holders))


def _namespace(info: NamespaceInfo) -> Explanation:
    """Explain a namespace: the databases whose objects are there keep it, and so does the store until it is dropped."""
    drop_it = f"quire namespace drop {shlex.quote(info.name)}"
    holders = [
        Holder("database", name, "has its objects there", f"quire drop {shlex.quote(name)}") for name in info.databases
    ]
    if info.dropped_databases:
        what = f"{info.dropped_databases} dropped databases have objects there"
        holders.append(Holder("time", "grace", what, "the next `quire gc`, or maintenance"))
    if info.dropped_at_ms:
        holders.append(Holder("time", "grace", "it was dropped", "the next `quire gc`, or maintenance"))
    else:
        holders.append(Holder("store", "the store", "it was registered for use", drop_it))
    state = "dropped" if info.dropped_at_ms else f"at {info.url}"
    return Explanation(info.name, "namespace", state, 0, 0, tuple(holders))


def _version(txn: ReadTxn, subject: str) -> Explanation | None:
    """Explain a snapshot given as DB@SNAPSHOT, by name or id. Return `None` if no database matches. Names may contain an @."""
    places = [at for at, letter in enumerate(subject) if letter == "@" and at]
    candidates = [
        (db.value, subject[at + 1 :]) for at in places if (db := txn.get(t.DB_NAMES, subject[:at])) is not None
    ]
    for db_id, text in candidates:
        index, digits = txn.get(t.SNAPSHOT_NAMES, db_id, text) if text else None, text.removeprefix("#")
        by_id = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 9 else 0
        snapshot_id = by_id if index is None or (text.startswith("#") and txn.snapshot(db_id, by_id)) else index.value
        if row := txn.snapshot(db_id, snapshot_id):
            return _snapshot(txn, db_id, snapshot_id, row)
    if candidates:
        hint = f"`quire snapshot ls {shlex.quote(name_of(txn, candidates[0][0]))}` lists them"
        raise UnknownSnapshot("the database has no such snapshot", hint=hint, subject=subject)
    return None


def _snapshot(txn: ReadTxn, db_id: int, snapshot_id: int, row: SnapshotRecord) -> Explanation:
    name = name_of(txn, db_id)
    release = drop(name, row, snapshot_id)
    if row.tags.get("by") == "lend":
        holder = Holder("reader", "a query", "reads it (Spark or another reader)", release)
    elif row.tags.get("by") == "fork_many":
        holder = Holder("job", "fork_many", "makes forks from it", release)
    elif WINDOW_TAG in row.tags:
        holder = Holder("time", "time travel", "serves time travel to nearby times", release)
    elif is_dropped(row):
        back = f"quire snapshot undrop {shlex.quote(name)} {shlex.quote(f'#{snapshot_id}')}"
        holder = Holder("time", "undrop", f"dropped; `{back}` brings it back", release)
    elif SCHEDULE_TAG in row.tags:
        what = f"creates and keeps snapshots automatically (quire retention show {shlex.quote(name)})"
        holder = Holder("database", name, what, f"when its retention drops it, or {release}")
    else:
        holder = Holder("snapshot", f"{name}@{title(row, snapshot_id)}", "it was created to be kept", release)
    keys = {key for number, leaf in read_leaves(txn, row.leaves) for key in artifacts(leaf, number)}
    size = sum(artifact_bytes(txn.artifact(key)) for key in keys) + sum(pin.used_bytes for pin in row.pins)
    return Explanation(f"{name}@{title(row, snapshot_id)}", "snapshot", row.kind.name.lower(), size, 0, (holder,))


def _snapshots_of(txn: ReadTxn, db_id: int) -> Iterator[Holder]:
    name = name_of(txn, db_id)
    for (_, snapshot_id), row in txn.scan(t.SNAPSHOT_INDEX, db_id):
        what = with_purpose(row, "keeps this version")
        yield Holder("snapshot", title(row, snapshot_id), what, drop(name, row, snapshot_id))


def _forks_of(txn: ReadTxn, db_id: int) -> Iterator[Holder]:
    forks = (row.name for _, row in txn.databases() if row.parent_db_id == db_id and not row.is_dropped)
    for name in islice(forks, FORKS_MAX):
        yield Holder("fork", name, "shares unchanged data", f"quire drop {shlex.quote(name)}")
    if left := sum(1 for _ in forks):
        yield Holder("forks", f"{left:,} more", "share unchanged data", "`quire tree --all --limit 0` lists them")


def _readers_of(txn: ReadTxn, db_id: int, reader_lookup: ReaderLookup) -> Iterator[Holder]:
    for info in reader_lookup(db_id):
        release = "when it closes" + ("; checkpoints continue meanwhile" if info.set_aside else ", or its process ends")
        yield Holder("reader", f"pid {info.pid}" if info.pid else info.reader, reader_text(info), release)
    for (_, reader_id), row in txn.scan(t.SNAPSHOT_READERS, db_id):
        hidden = (VIEW_TAG, HOLDER_TAG, LABEL_TAG)
        tags = ", ".join(f"{name}={value}" for name, value in sorted(row.tags.items()) if name not in hidden)
        what = f"has read version {row.snapshot_lsn} since {moment(row.opened_at_ms)}" + (f" ({tags})" if tags else "")
        release = "when it closes, or its lease expires"
        if is_view(row):
            what, release = f"is a query (Spark, for instance) that {what}", "some minutes after its last read"
        if holder := row.tags.get(HOLDER_TAG):
            what = f"is the consumer {holder} of row changes, which has read up to lsn {row.snapshot_lsn}"
            release = f"when it has read on; without it at {moment(row.expires_at_ms)} at the latest"
        yield Holder("reader", str(reader_id), what, release)


def _jobs_of(txn: ReadTxn, db_id: int) -> Iterator[Holder]:
    for (job_id,), job in txn.scan(t.JOB_QUEUE):
        if job.db_id == db_id and job.state not in TERMINAL_JOB_STATES:
            yield _job(job_id, job)


def _job(job_id: int, job: JobRecord) -> Holder:
    what = f"{job.kind.name.lower()} is {job.state.name.lower().replace('_', ' ')}"
    return Holder("job", str(job_id), what, f"when it ends (quire jobs show {job_id})")


# ── artifacts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _artifact(txn: ReadTxn, key: ArtifactKey, asked: str, reader_lookup: ReaderLookup) -> Explanation:
    counts = txn.refcount(key)
    row = txn.artifact(key)
    if row is None and counts is None:
        raise _unknown(txn, key, asked)
    holders = [*(_of_segment(txn, key, asked, reader_lookup) if key.kind is ArtifactKind.WAL else _of_chunk(txn, key))]
    holders += [_job(number, job) for number, job in _jobs_about(txn, key)]
    if counts is not None and not (counts.in_use or counts.pending_upload):
        holders += _kept_at_zero(txn, key, row)
        after = "then " if holders else ""
        release = f"{after}the next `quire gc`, or maintenance"
        holders.append(Holder("time", "grace", "nothing refers to it any more", release))
    elif counts is not None and not holders:
        what = f"its reference count is {counts.in_use + counts.pending_upload} too high: no row holds it"
        holders.append(Holder("database", name_of(txn, key.origin_db_id), what, "quire manifest check --repair"))
    return Explanation(
        names.object_key(key),
        KIND_NAMES[key.kind],
        _state(key, row),
        artifact_bytes(row),
        0 if counts is None else counts.in_use + counts.pending_upload,
        tuple(holders),
    )


def _kept_at_zero(txn: ReadTxn, key: ArtifactKey, row: Any) -> Iterator[Holder]:
    """Yield what keeps an artifact that nothing refers to (`jobs/delete`): a time that a user named, and versions of its
    database, and of forks of it, that were lent while something still referred to it."""
    if until_ms := getattr(row, "purge_after_ms", 0):
        release = f"then, or quire gc --keep {names.object_key(key)} --until 0"
        yield Holder("time", "keep", f"is kept until {moment(until_ms)} (quire gc --keep)", release)
    zero = txn.get(t.GC_ZERO, key.origin_db_id, int(key.kind), key.id, key.generation, key.delta_id)
    if zero is None:
        return
    for (db_id, reader_id), reader in txn.scan(t.SNAPSHOT_READERS):
        if is_view(reader) and reader.opened_at_ms <= zero.value and key.origin_db_id in _lineage(txn, db_id):
            what = f"is a query (Spark, for instance) of {name_of(txn, db_id)} that may need it"
            yield Holder("reader", str(reader_id), what, "some minutes after its last read")


def _lineage(txn: ReadTxn, db_id: int) -> Iterator[int]:
    """Yield a database, and those that it was forked from."""
    while db_id:
        yield db_id
        record = txn.database(db_id)
        db_id = record.parent_db_id if record is not None else 0


def _retired(txn: ReadTxn, name: str, size_lookup: SizeLookup | None) -> Explanation | None:
    """Explain an object that the store does not need any more, and that archived moments or clones do. Return `None` for any
    other object."""
    urls = {"", *(row.url for _, row in txn.scan(t.REMOTE_NAMESPACE))}
    rows = (txn.get(t.RETIRED, t.retired_digest(url, name)) for url in sorted(urls))
    row = next((row for row in rows if row is not None), None)
    if row is None:
        return None
    key = names.parse_object_key(own_name(txn, name))
    state = f"retired {moment(row.since_ms)}"
    what = "was there when they were made: archived moments of the window, or clones, read it"
    release = "when no moment of the window and no clone needs it (archive.retain_seconds), by maintenance"
    holder = Holder("time", "archive", what, release)
    size = 0 if row.url else size_of(name, size_lookup)
    return Explanation(name, KIND_NAMES[key.kind] if key is not None else "file", state, size, 0, (holder,))


def _unknown(txn: ReadTxn, key: ArtifactKey, asked: str) -> UnknownArtifact:
    record, is_file = txn.database(key.origin_db_id), names.parse_path(asked) is not None
    if record is None:
        message, hint = (
            "the manifest has no database that this could belong to",
            UNOWNED_HINT if is_file else stray_hint(asked),
        )
        return UnknownArtifact(message, hint=hint, subject=asked, database=number(key.origin_db_id))
    whose = f"{record.name}, id {number(key.origin_db_id)}"
    return UnknownArtifact("the manifest has no record of this", hint=stray_hint(asked), subject=asked, database=whose)


def _state(key: ArtifactKey, row: Any) -> str:
    if row is None:
        return "no row"
    where = str(row.residency.name.lower().replace("_", " "))
    if key.kind is not ArtifactKind.WAL:
        return where
    parts = [row.state.name.lower().replace("_", " "), where]
    if row.newest_reader_lsn:
        parts.append(f"newest reader at lsn {row.newest_reader_lsn} when its checkpoint was planned")
    if row.gc_ticket:
        parts.append(f"truncated by job {row.gc_ticket}")
    return ", ".join(parts)


def _of_segment(txn: ReadTxn, key: ArtifactKey, asked: str, reader_lookup: ReaderLookup) -> Iterator[Holder]:
    for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
        if segment_id == key.id and row.origin_db_id == key.origin_db_id and row.state is not WalState.TRUNCATED:
            yield from _tracked(txn, db_id, row, asked, reader_lookup)
    for (db_id, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX):
        if any((pin.origin_db_id, pin.segment_id) == (key.origin_db_id, key.id) for pin in snapshot.pins):
            yield snapshot_holder(txn, db_id, snapshot_id, snapshot, "needs commits in it")
    yield from _plans(txn, key)


def _tracked(txn: ReadTxn, db_id: int, row: WalRecord, asked: str, reader_lookup: ReaderLookup) -> Iterator[Holder]:
    name = name_of(txn, db_id)
    if row.format is WalFormat.APPEND_ONLY:
        kept = f"has its records {row.first_lsn:,} to {row.last_lsn:,} in it, until its retention drops them"
        yield Holder(
            "database",
            name,
            kept,
            _evicted(name, asked) + f"quire stream retention {shlex.quote(name)} --days N --apply",
        )
    elif row.state is WalState.OPEN:
        yield Holder("database", name, "writes to it", "when it is sealed: when it is full or old, or at a snapshot")
    elif row.state < WalState.CHECKPOINTED:
        holding = [info for info in reader_lookup(db_id) if info.lsn < row.last_lsn and not info.set_aside]
        if row.state is WalState.INDEXED:
            yield from _readers_of(txn, db_id, reader_lookup)
        command = f"quire checkpoint {shlex.quote(name)}"
        release = f"{command}, when its readers have closed" if holding else command
        yield Holder("database", name, "has not checkpointed it yet", release)
    else:
        floor = txn.get(t.SNAPSHOT_FLOOR, db_id)
        held = floor is not None and floor.min_snapshot_lsn <= row.last_lsn
        what = f"a reader may request lsn {floor.min_snapshot_lsn}" if floor and held else "is about to truncate it"
        yield from _readers_of(txn, db_id, reader_lookup)
        yield Holder("database", name, what, "when its readers close, by maintenance")


def _evicted(name: str, asked: str) -> str:
    """Return the command that evicts the local copy of a stream's segment; empty if the subject is an object."""
    file = names.parse_path(asked)
    if not isinstance(file, names.StreamSegmentFile):
        return ""
    if file.tier is names.Tier.HOT:
        return f"quire stream tier {shlex.quote(name)} evict, when it is in another tier too; or "
    return f"quire stream tier {shlex.quote(name)} evict --warm, when it is in the object store; or "


def _plans(txn: ReadTxn, key: ArtifactKey) -> Iterator[Holder]:
    for (db_id, generation), plan in txn.scan(t.CHECKPOINT_PLAN):
        if db_id == key.origin_db_id and key.id in plan.segments:
            yield Holder("plan", f"{name_of(txn, db_id)}:{generation}", "is checkpointing it", "when it has run")


def _of_chunk(txn: ReadTxn, key: ArtifactKey) -> Iterator[Holder]:
    number = key.id // SLOTS_PER_LEAF
    naming = {
        (origin, generation)
        for (origin, leaf, generation), row in txn.scan(t.SLOT_LEAF)
        if leaf == number and key in artifacts(unpack_leaf(row.entries), leaf)
    }
    unheld = set(naming)
    for (db_id, leaf), live in txn.scan(t.LIVE_LEAF):
        if leaf == number and (live.origin_db_id, live.generation) in naming:
            unheld.discard((live.origin_db_id, live.generation))
            name = name_of(txn, db_id)
            release = f"quire merge {shlex.quote(name)}, or quire drop {shlex.quote(name)}"
            yield Holder("database", name, f"has slot {key.id} in it", release)
    for (db_id, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX):
        used = {(origin, generation) for leaf, origin, generation in snapshot.leaves if leaf == number} & naming
        if used:
            unheld -= used
            yield snapshot_holder(txn, db_id, snapshot_id, snapshot, f"has slot {key.id} in it")
    if unheld:  # leaves at zero keep their references until they are collected (docs/decisions/003)
        what = "an unreferenced version of the slot map refers to it"
        yield Holder("time", "slot map", what, "the next `quire gc`, or maintenance")


def _jobs_about(txn: ReadTxn, key: ArtifactKey) -> Iterator[tuple[int, JobRecord]]:
    wanted = (key.origin_db_id, int(key.kind), key.id, key.generation, key.delta_id)
    for (job_id,), job in txn.scan(t.JOB_QUEUE):
        if job.artifact == wanted and job.state not in TERMINAL_JOB_STATES:
            yield job_id, job
