"""Why something is still there: what holds a database, a segment, a chunk or an object, and what would let it go.

Terms
  subject   what is asked about: a database, or an artifact with bytes
  holder    what keeps it: a database that uses it, a snapshot, a fork, a reader, a job, a plan that runs, or time

Rules
  1. What is asked about may be given as people meet it: a database's name, a file's path in the store, an object's key, also
     with `objects/` before it, as a store without a bucket has it on disk. What is no artifact is in `why_files.py`.
  2. Holders are read from the rows that hold references, not from the counts; where the two differ, the counts decide what is
     deleted, and that is said.
  3. Readers inside the owner's process are in its memory only (M10): a segment that nothing else explains is told as held by
     the floor.

Reads the manifest, one transaction. Raises `NotFound` errors for what is not there, `InvalidInput` for what is nothing.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import Any

from quire.core.errors import InvalidInput, UnknownArtifact, UnknownDatabase
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.limits import SLOTS_PER_LEAF
from quire.durable import names
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import (
    TERMINAL_JOB_STATES,
    DbStatus,
    JobRecord,
    SnapshotKind,
    SnapshotRecord,
    WalFormat,
    WalRecord,
    WalState,
)
from quire.manifest.retention import WINDOW_TAG
from quire.manifest.slots import artifacts, unpack_leaf
from quire.store.why_files import Look, of_file, of_object
from quire.store.why_values import Answer as Answer
from quire.store.why_values import Holder as Holder


def why(txn: ReadTxn, subject: str, look: Look | None = None) -> Answer:
    """What keeps a subject, given as in rule 1. `look` says of files and objects without a row whether they are there."""
    asked = subject.removeprefix("./")
    within = asked.removeprefix(f"{names.OBJECTS}/")
    found = of_file(txn, asked, look) or of_object(txn, within, look)
    if found is not None:
        return found
    key = names.parse_object_key(within) or _of_path(asked)
    if key is not None:
        return _artifact(txn, key)
    try:
        return _database(txn, txn.database_id(subject))
    except UnknownDatabase as error:
        if "/" in subject:
            raise InvalidInput(
                "this is neither a file of a store nor the key of an object",
                hint="paths are relative to the store, like pages/00000001/wal/00000001.seg or objects/KEY",
                subject=subject,
            ) from error
        raise


def _of_path(path: str) -> ArtifactKey | None:
    found = names.parse_path(path)
    if isinstance(found, names.WalSegmentFile):
        return ArtifactKey(found.db_id, ArtifactKind.WAL, found.segment_id, 0)
    if isinstance(found, names.StreamSegmentFile):
        return ArtifactKey(found.stream_id, ArtifactKind.WAL, found.segment_id, 0)
    return found.key if isinstance(found, names.CachedChunkFile) else None


# ── databases ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _database(txn: ReadTxn, db_id: int) -> Answer:
    record = txn.database(db_id)
    assert record is not None, "its name led here"
    holders = [*_snapshots_of(txn, db_id), *_forks_of(txn, db_id), *_readers_of(txn, db_id), *_jobs_of(txn, db_id)]
    size = sum(row.size_bytes for _, row in txn.scan(t.CHUNK_CATALOG, db_id))
    size += sum(row.size_bytes for _, row in txn.scan(t.CHUNK_DELTA_INDEX, db_id))
    size += sum(row.used_bytes for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.origin_db_id == db_id)
    size += sum(row.size_bytes for _, row in txn.scan(t.LSM_CATALOG, db_id))
    return Answer(record.name, "database", record.status.name.lower(), size, 0, tuple(holders))


def _snapshots_of(txn: ReadTxn, db_id: int) -> Iterator[Holder]:
    name = _name(txn, db_id)
    for (_, snapshot_id), row in txn.scan(t.SNAPSHOT_INDEX, db_id):
        what = _lent(row, "keeps it as it was")
        yield Holder("snapshot", _title(row, snapshot_id), what, _drop(name, row, snapshot_id))


def _forks_of(txn: ReadTxn, db_id: int) -> Iterator[Holder]:
    for _, row in txn.databases():
        if row.parent_db_id == db_id and row.status is not DbStatus.TOMBSTONED:
            yield Holder("fork", row.name, "shares what neither has changed", f"quire drop {_quoted(row.name)}")


def _readers_of(txn: ReadTxn, db_id: int) -> Iterator[Holder]:
    for (_, reader_id), row in txn.scan(t.SNAPSHOT_READERS, db_id):
        who = ", ".join(f"{name}={value}" for name, value in sorted(row.tags.items()))
        what = f"reads at lsn {row.snapshot_lsn}" + (f" ({who})" if who else "")
        yield Holder("reader", str(reader_id), what, "when it closes, or its lease runs out")


def _jobs_of(txn: ReadTxn, db_id: int) -> Iterator[Holder]:
    for (job_id,), job in txn.scan(t.JOB_QUEUE):
        if job.db_id == db_id and job.state not in TERMINAL_JOB_STATES:
            yield _job(job_id, job)


def _job(job_id: int, job: JobRecord) -> Holder:
    what = f"{job.kind.name.lower()} is {job.state.name.lower().replace('_', ' ')}"
    return Holder("job", str(job_id), what, f"when it has run: quire jobs show {job_id}")


# ── artifacts ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _artifact(txn: ReadTxn, key: ArtifactKey) -> Answer:
    counts = txn.refcount(key)
    row = _row(txn, key)
    if row is None and counts is None:
        raise UnknownArtifact(
            "the manifest knows nothing of this",
            hint="`quire gc --dry-run` finds files that nothing names",
            artifact=key,
        )
    holders = [*(_of_segment(txn, key) if key.kind is ArtifactKind.WAL else _of_chunk(txn, key))]
    holders += [_job(number, job) for number, job in _jobs_about(txn, key)]
    if counts is not None and not (counts.in_use or counts.pending_upload):
        holders.append(
            Holder("time", "grace", "nothing holds it any more", "the next `quire gc`, or the owner's upkeep")
        )
    elif counts is not None and not holders:
        what = f"{counts.in_use + counts.pending_upload} references are counted that no row holds"
        holders.append(Holder("database", _name(txn, key.origin_db_id), what, "quire manifest check --repair"))
    kind = {ArtifactKind.WAL: "segment", ArtifactKind.BASE: "base", ArtifactKind.DELTA: "delta"}[key.kind]
    return Answer(
        names.object_key(key),
        kind,
        _state(key, row),
        0 if row is None else row.used_bytes if key.kind is ArtifactKind.WAL else row.size_bytes,
        0 if counts is None else counts.in_use + counts.pending_upload,
        tuple(holders),
    )


def _row(txn: ReadTxn, key: ArtifactKey) -> Any:
    if key.kind is ArtifactKind.BASE:
        return txn.get(t.CHUNK_CATALOG, key.origin_db_id, key.id, key.generation)
    if key.kind is ArtifactKind.DELTA:
        return txn.get(t.CHUNK_DELTA_INDEX, key.origin_db_id, key.id, key.generation, key.delta_id)
    return txn.get(t.WAL_CATALOG, key.origin_db_id, key.id)


def _state(key: ArtifactKey, row: Any) -> str:
    if row is None:
        return "no row"
    where = str(row.residency.name.lower().replace("_", " "))
    return f"{row.state.name.lower().replace('_', ' ')}, {where}" if key.kind is ArtifactKind.WAL else where


def _of_segment(txn: ReadTxn, key: ArtifactKey) -> Iterator[Holder]:
    for (db_id, segment_id), row in txn.scan(t.WAL_CATALOG):
        if segment_id == key.id and row.origin_db_id == key.origin_db_id and row.state is not WalState.TRUNCATED:
            yield from _tracked(txn, db_id, row)
    for (db_id, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX):
        if any((pin.origin_db_id, pin.segment_id) == (key.origin_db_id, key.id) for pin in snapshot.pins):
            yield _snapshot(txn, db_id, snapshot_id, snapshot, "needs what was committed in it")
    yield from _plans(txn, key)


def _tracked(txn: ReadTxn, db_id: int, row: WalRecord) -> Iterator[Holder]:
    name = _name(txn, db_id)
    if row.format is WalFormat.APPEND_ONLY:
        kept = f"has its records {row.first_lsn:,} to {row.last_lsn:,} in it, until its retention lets them go"
        yield Holder("database", name, kept, f"quire stream retention {_quoted(name)} --days N --apply")
    elif row.state is WalState.OPEN:
        yield Holder("database", name, "writes to it", "when it is sealed: full, after its time, or at a snapshot")
    elif row.state < WalState.CHECKPOINTED:
        yield from (each for each in _readers_of(txn, db_id) if row.state is WalState.INDEXED)
        yield Holder("database", name, "has not brought it into chunks", f"quire checkpoint {_quoted(name)}")
    else:
        floor = txn.get(t.SNAPSHOT_FLOOR, db_id)
        held = floor is not None and floor.min_snapshot_lsn <= row.last_lsn
        what = f"a reader may ask for lsn {floor.min_snapshot_lsn}" if floor and held else "is about to truncate it"
        yield from _readers_of(txn, db_id)
        yield Holder("database", name, what, "when its readers close, by the owner's upkeep")


def _plans(txn: ReadTxn, key: ArtifactKey) -> Iterator[Holder]:
    for (db_id, generation), plan in txn.scan(t.CHECKPOINT_PLAN):
        if db_id == key.origin_db_id and key.id in plan.segments:
            yield Holder("plan", f"{_name(txn, db_id)}:{generation}", "is bringing it into chunks", "when it has run")


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
            name = _name(txn, db_id)
            release = f"quire merge {_quoted(name)}, or quire drop {_quoted(name)}"
            yield Holder("database", name, f"has slot {key.id} in it", release)
    for (db_id, snapshot_id), snapshot in txn.scan(t.SNAPSHOT_INDEX):
        used = {(origin, made) for leaf, origin, made in snapshot.leaves if leaf == number} & naming
        if used:
            unheld -= used
            yield _snapshot(txn, db_id, snapshot_id, snapshot, f"has slot {key.id} in it")
    if unheld:  # collected later than what held them (docs/decisions/003)
        what = "a version of the slot map names it that nothing holds any more"
        yield Holder("time", "slot map", what, "the next `quire gc`, or the owner's upkeep")


def _jobs_about(txn: ReadTxn, key: ArtifactKey) -> Iterator[tuple[int, JobRecord]]:
    wanted = (key.origin_db_id, int(key.kind), key.id, key.generation, key.delta_id)
    for (job_id,), job in txn.scan(t.JOB_QUEUE):
        if job.artifact == wanted and job.state not in TERMINAL_JOB_STATES:
            yield job_id, job


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _snapshot(txn: ReadTxn, db_id: int, snapshot_id: int, row: SnapshotRecord, what: str) -> Holder:
    name = _name(txn, db_id)
    title = f"{name}@{_title(row, snapshot_id)}"
    return Holder("snapshot", title, _lent(row, what), _drop(name, row, snapshot_id))


def _title(row: SnapshotRecord, snapshot_id: int) -> str:
    return row.name or f"#{snapshot_id}"


def _drop(name: str, row: SnapshotRecord, snapshot_id: int) -> str:
    command = f"quire snapshot drop {_quoted(name)} {_quoted(row.name or str(snapshot_id))}"
    if row.expires_at_ms:
        return f"by itself {_moment(row.expires_at_ms)}, or {command}"
    return "when it expires" if row.kind is SnapshotKind.LEASED else command


def _lent(row: SnapshotRecord, what: str) -> str:
    """How a snapshot holds on that nobody has named: for whom it is there."""
    if row.tags.get("by") == "lend":
        return f"is lent to a query (Spark, or another reader), and {what}"
    if WINDOW_TAG in row.tags:
        return f"is there for time travel, and {what}"
    return what


def _moment(at_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at_ms / 1000))


def _quoted(name: str) -> str:
    """A name as a command takes it: most are as they are."""
    return shlex.quote(name)


def _name(txn: ReadTxn, db_id: int) -> str:
    record = txn.database(db_id)
    return record.name if record is not None and record.name else f"#{db_id}"
