"""The audit of an archive: checks that every restorable moment has all its objects, and reports unneeded objects (A8).

Terms
  needed    an object that some restorable moment names: log objects, parts of bases, files (tables, compressed segments), and
            the objects of rows (chunks, deltas, WAL segments, segments of streams). Rows count from the oldest moment on; names
            retired before it do not, because no moment needs them
  orphan    an object below the store's prefix that nothing names. An object younger than an hour, or than the newest base, may
            belong to a commit that is still to come, and does not count

The audit reads only the bucket. It reads the log and the oldest base in order in this process, because each object has the
digest of the object before it, and rows must be folded; rows go into a scratch manifest, so that memory does not grow with the
store. The runner reads everything else, on threads or on executors. Objects of manifest logs are named by files of their
streams, not by rows: they are not read, and are not orphans.

An owner that trims during the audit makes objects disappear: if the oldest moment has moved, the audit starts over.

Threads: the caller's, and the runner's. Raises what the object store raises; damage is reported in the result.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from quire.archive.format import (
    NONE,
    ArtifactEvent,
    BaseEvent,
    BreakEvent,
    CommitEvent,
    Position,
    decode_object,
    log_key,
)
from quire.archive.log_reader import no_archive
from quire.archive.window import ArchiveListing, Line, Oldest, list_archive
from quire.core.errors import Corruption, ObjectNotFound, QuireError
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.durable.object_names import is_log_key, parse_epoch_key, store_prefix
from quire.jobs.archive_audit.run import NamedObject, ObjectDifference, ObjectsTask, compare_objects
from quire.jobs.audit.table import as_table
from quire.jobs.locations import ArtifactLocation, local_name, remote_name
from quire.jobs.runner import Runner, Tick, no_tick
from quire.jobs.verify.run import ArtifactFinding, VerifyTask, run_task
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import Residency
from quire.manifest.row_image import RowImage
from quire.manifest.verification import artifacts, shares_bytes
from quire.objects.api import ObjectStore

GRACE_MS = 3_600_000
"""Age from which an object that no row names is an orphan: objects are put before their rows are committed."""
TASK_OBJECTS = 64
"""Objects that one task reads."""
ATTEMPTS = 3
HALF = 1_000
"""Units of progress in each half: first the log, then the objects."""
GAP = "a log object is missing; moments from it to the next base cannot be restored, those before it were not checked"
KNOWN = ("e", "archive", "owner", "standby", "clones", "keys", "backups")
"""The parts of a store below its prefix."""

ChooseRunner = Callable[[int], Runner]
"""Returns the runner for this many bytes of work."""


@dataclass(slots=True)
class ArchiveAudit:
    """The result of an audit of an archive."""

    store_id: str
    oldest_at_ms: int = 0
    newest_at_ms: int = 0
    log_objects: int = 0
    objects: int = 0
    """Objects that were read."""
    size_bytes: int = 0
    runner: str = ""
    abandoned: dict[int, int] = field(default_factory=dict)
    """Abandoned owner epoch → number of its objects, which are removed only on request by epoch."""
    problems: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the audit's table with the states MISSING and ALTERED."""
    orphans: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether every restorable moment has everything it needs."""
        return not self.problems

    def table(self) -> Any:
        """Return problems and orphans as an Arrow table, for Parquet files and DataFrames."""
        return as_table([*self.problems, *self.orphans])

    def add(self, state: str, key: str, what: str, size_bytes: int = 0) -> None:
        """Record a problem or an orphan."""
        rows = self.orphans if state == "ORPHANED" else self.problems
        rows.append({"state": state, "artifact": key, "what": what, "size_bytes": size_bytes})


def audit_archive(
    store: ObjectStore, store_id: str, choose: ChooseRunner, *, now_ms: int, progress: Tick = no_tick
) -> ArchiveAudit:
    """Audit everything below a store's prefix in a bucket."""
    for _ in range(ATTEMPTS):
        audit = ArchiveAudit(store_id)
        listing = list_archive(store, store_id)
        if not listing.epochs:
            raise no_archive(store)
        with tempfile.TemporaryDirectory(prefix="quire-audit-") as scratch:
            log_pass = _LogPass(store, store_id, audit)
            _audit(log_pass, listing, scratch, choose, now_ms, progress)
        if audit.is_sound or not _was_trimmed(listing, list_archive(store, store_id)):
            break
    progress(2 * HALF, 2 * HALF)
    return audit


def _was_trimmed(before: ArchiveListing, after: ArchiveListing) -> bool:
    """Return whether the log of some epoch now begins later."""
    return any(
        objects.logs and (epoch not in after.epochs or min(after.epochs[epoch].logs, default=-1) != min(objects.logs))
        for epoch, objects in before.epochs.items()
    )


@dataclass(slots=True)
class _LogPass:
    """State of the part that is read in this process, in order: the log and the rows."""

    store: ObjectStore
    store_id: str
    audit: ArchiveAudit
    named: dict[str, NamedObject] = field(default_factory=dict)
    """Parts of bases, and files."""
    places: dict[tuple[str, str], ArtifactLocation] = field(default_factory=dict)
    """Objects that rows name."""
    announced: set[tuple[str, str]] = field(default_factory=set)
    """Objects that rows only announce: they may exist."""
    retired: set[bytes] = field(default_factory=set)
    unneeded: set[bytes] = field(default_factory=set)
    """The part of `retired` that was retired at the oldest moment."""
    is_whole: bool = True
    """Whether all rows could be read; otherwise orphans cannot be determined."""
    is_broken: bool = False
    """Whether rows since the last base may be missing from the log."""


def _audit(
    log_pass: _LogPass, listing: ArchiveListing, scratch: str, choose: ChooseRunner, now_ms: int, progress: Tick
) -> None:
    audit = log_pass.audit
    try:
        line = Line(log_pass.store, listing)
        has_gaps = _report_gaps(audit, line, listing)
        oldest, newest = line.oldest(), line.newest()
    except (Corruption, ObjectNotFound) as error:
        audit.add(*_damage(error, ""))
        return
    audit.newest_at_ms = newest.at_ms if newest is not None else 0
    _report_passed_over(log_pass, line, oldest)
    if oldest is None:
        if has_gaps:
            audit.add("MISSING", "", "no base is complete after them: at most moments before them can be restored")
        elif any(objects.logs for objects in listing.epochs.values()):
            audit.add("MISSING", "", "no base is complete: nothing can be restored")
        return
    audit.oldest_at_ms = oldest.at_ms
    with RowImage(os.path.join(scratch, "manifest")) as rows:
        _read_log(log_pass, line, oldest, rows, progress)
        with rows.read() as txn:
            line_epochs = {*txn.current_namespace()[1].ancestors, txn.owner_epoch()} if log_pass.is_whole else set()
    _read_objects(log_pass, choose, progress)
    if log_pass.is_whole:
        _report_orphans(log_pass, line, listing, line_epochs, now_ms)


def _report_passed_over(log_pass: _LogPass, line: Line, oldest: Oldest | None) -> None:
    """Report damaged log objects before the oldest moment. Those after it are reported when the log is read."""
    for position, error in sorted(line.damaged.items(), key=lambda entry: entry[0]):
        log_pass.is_whole = False  # what only these objects name would be taken for orphans
        if oldest is None or position < Position(oldest.position.epoch, oldest.base.first_log):
            log_pass.audit.add(*_damage(error, ""))


def _report_gaps(audit: ArchiveAudit, line: Line, listing: ArchiveListing) -> bool:
    """Report log objects that are missing between existing ones. Return whether there are any."""
    for epoch, numbers in line.epochs:
        logs = listing.epochs[epoch].logs
        if numbers:
            for number in range(min(logs), numbers.start):
                if number not in logs:
                    key = log_key(listing.store_id, Position(epoch, number))
                    audit.add("MISSING", key, GAP)
    return bool(audit.problems)


def _damage(error: QuireError, key: str) -> tuple[str, str, str]:
    state = "MISSING" if isinstance(error, ObjectNotFound) else "ALTERED"
    return state, str(error.where.get("key", key)), str(error)


# ── the log and the rows ──────────────────────────────────────────────────────────────────────────────────────────────
def _read_log(log_pass: _LogPass, line: Line, oldest: Oldest, rows: RowImage, progress: Tick) -> None:
    """Read the oldest base and the log from its first object to the newest; take the rows from the oldest moment on."""
    epochs = [(epoch, numbers) for epoch, numbers in reversed(line.epochs) if epoch >= oldest.position.epoch]
    spans = [
        (epoch, range(oldest.base.first_log, numbers.stop) if epoch == oldest.position.epoch else numbers)
        for epoch, numbers in epochs
    ]
    total, done = sum(len(numbers) for _, numbers in spans), 0
    _take_objects(log_pass, (key for key, _, _ in oldest.base.parts), rows)
    _take_base(log_pass, oldest.base)
    for epoch, numbers in spans:
        digest: bytes | None = None
        log_pass.is_broken = epoch != oldest.position.epoch
        for number in numbers:
            position = Position(epoch, number)
            digest = _read_log_object(log_pass, position, digest, rows, is_moment=position > oldest.position)
            if position == oldest.position:
                _take_state(log_pass, rows)
            done += 1
            progress(done * HALF // max(total, 1), 2 * HALF)
    log_pass.audit.log_objects = total


def _read_log_object(
    log_pass: _LogPass, position: Position, before: bytes | None, rows: RowImage, *, is_moment: bool
) -> bytes | None:
    """Check a log object and take the objects that it names; return its digest, `None` if it is damaged."""
    key, audit = log_key(log_pass.store_id, position), log_pass.audit
    try:
        data = log_pass.store.get(key)
        header, events = decode_object(data, key)
    except (Corruption, ObjectNotFound) as error:
        audit.add(*_damage(error, key))
        log_pass.is_whole = False
        return None
    audit.objects += 1
    audit.size_bytes += len(data)
    if header.position != position:
        audit.add("ALTERED", key, f"its header says {header.position}", len(data))
    elif before is not None and header.parent_digest != before:
        audit.add("ALTERED", key, "its digest does not match the previous object", len(data))
    changed = _take(log_pass, events, rows)
    if not is_moment:
        return hashlib.sha256(data).digest()
    log_pass.is_broken = log_pass.is_broken or any(isinstance(event, BreakEvent) for event in events)
    for event in events:
        if isinstance(event, BaseEvent):  # bases named before the oldest moment have been trimmed
            _take_base(log_pass, event)
            if log_pass.is_broken:
                _begin_again(log_pass, event, position, rows)
    if changed:
        with rows.read() as txn:
            for artifact in changed:
                _take_row(log_pass, txn, artifact, txn.artifact(artifact))
            _take_retired(log_pass, txn)
    return hashlib.sha256(data).digest()


_CATALOGS = {t.CHUNK_CATALOG.name: ArtifactKind.BASE, t.CHUNK_DELTA_INDEX.name: ArtifactKind.DELTA}


def _take(log_pass: _LogPass, events: Iterable[Any], rows: RowImage) -> list[ArtifactKey]:
    """Record the objects that events name, and apply their rows; return the artifacts whose rows changed."""
    commits = []
    changed: list[ArtifactKey] = []
    for event in events:
        match event:
            case ArtifactEvent():
                log_pass.named[event.key] = NamedObject(event.key, event.size, event.sha256)
            case CommitEvent():
                commits.append(event.tables)
                changed += (key for table, puts, _ in event.tables for key in _artifacts(table, puts))
    if commits:
        rows.apply(commits)
    return changed


def _take_objects(log_pass: _LogPass, keys: Iterable[str], rows: RowImage) -> None:
    """Take the events of these objects. One object is in memory at a time: a base is as large as the manifest."""
    for key in keys:
        try:
            events = decode_object(log_pass.store.get(key), key)[1]
        except (Corruption, ObjectNotFound):  # reported when its digest is compared, or when it is read as a log object
            log_pass.is_whole = False
            continue
        _take(log_pass, events, rows)


def _begin_again(log_pass: _LogPass, base: BaseEvent, named_by: Position, rows: RowImage) -> None:
    """Replace the rows with those of a base and of the log from its first object on, as a restore does. Changes before the base
    may be missing from the log: those of a takeover, and of an owner that died or had to drop its backlog."""
    log_pass.is_broken = False
    logs = (log_key(log_pass.store_id, Position(named_by.epoch, n)) for n in range(base.first_log, named_by.number + 1))
    rows.replace(lambda: ())
    _take_objects(log_pass, (*(part for part, _, _ in base.parts), *logs), rows)
    with rows.read() as txn:
        _take_retired(log_pass, txn)
        for artifact, row in artifacts(txn):
            _take_row(log_pass, txn, artifact, row)


def _take_base(log_pass: _LogPass, base: BaseEvent) -> None:
    log_pass.named.update((key, NamedObject(key, size, digest)) for key, size, digest in base.parts)


def _artifacts(table: str, puts: Iterable[tuple[bytes, bytes]]) -> Iterator[ArtifactKey]:
    """Yield the artifacts that rows of a catalog table describe."""
    if table in _CATALOGS:
        for key, _ in puts:
            origin, slot, generation, *delta = t.TABLES[table].key.unpack(key)
            yield ArtifactKey(origin, _CATALOGS[table], slot, generation, *delta)
    elif table == t.WAL_CATALOG.name:
        for key, _ in puts:
            db_id, segment_id = t.WAL_CATALOG.key.unpack(key)
            yield ArtifactKey(db_id, ArtifactKind.WAL, segment_id, 0)


def _take_state(log_pass: _LogPass, rows: RowImage) -> None:
    """Take all objects that rows name at the oldest moment."""
    with rows.read() as txn:
        _take_retired(log_pass, txn)
        log_pass.unneeded = set(log_pass.retired)
        for key, row in artifacts(txn):
            _take_row(log_pass, txn, key, row)


def _take_retired(log_pass: _LogPass, txn: ReadTxn) -> None:
    log_pass.retired.update(key for key, _ in txn.raw_scan(t.RETIRED))


def _take_row(log_pass: _LogPass, txn: ReadTxn, key: ArtifactKey, row: Any) -> None:
    if row is None or shares_bytes(key, row) or getattr(row, "origin_db_id", key.origin_db_id) != key.origin_db_id:
        return  # removed in the same cut, or the bytes belong to another artifact
    own = log_pass.store.url
    namespace = txn.namespace(row.namespace_id) if row.namespace_id else None
    if row.namespace_id and namespace is None:
        log_pass.is_whole = False  # the namespace's row was in an object that could not be read
        return
    url, name = remote_name(key, row, namespace, own)
    is_unwritten = (
        key.kind is not ArtifactKind.WAL and not row.size_bytes
    )  # a name of an abandoned plan (`AbandonPlan`)
    if row.residency is Residency.LOCAL or is_unwritten:
        log_pass.announced.add((url, name))  # there may be an object, but nothing needs it
        return
    if t.retired_digest("" if url == own else url, name) in log_pass.unneeded:
        return
    log_pass.places[url, name] = ArtifactLocation(
        key=key,
        residency=Residency.EVICTED,
        local=os.path.join("/", local_name(key, row)),
        url=url,
        object_key=name,
        size_bytes=row.used_bytes if key.kind is ArtifactKind.WAL else row.size_bytes,
        sha256=row.sha256,
        crc64=getattr(row, "crc64", 0),
    )


# ── all other objects ─────────────────────────────────────────────────────────────────────────────────────────────────
def _read_objects(log_pass: _LogPass, choose: ChooseRunner, progress: Tick) -> None:
    """Let the runner read parts of bases, files, and the objects of rows."""
    audit = log_pass.audit
    size = sum(named.size_bytes for named in log_pass.named.values())
    size += sum(place.size_bytes for place in log_pass.places.values())
    runner = choose(size)
    audit.runner = runner.name
    audit.objects += len(log_pass.named) + len(log_pass.places)
    audit.size_bytes += size
    objects = [ObjectsTask(log_pass.store.url, some) for some in _steps(log_pass.named.values())]
    places = [VerifyTask(some) for some in _steps(log_pass.places.values())]
    total = max(len(objects) + len(places), 1)

    def tick(before: int, done: int) -> None:
        progress(HALF + (before + done) * HALF // total, 2 * HALF)

    for answer in runner.map(compare_objects, objects, tick=lambda done, _: tick(0, done)):
        for difference in answer.result():
            _add(audit, difference)
    for verdict in runner.map(run_task, places, tick=lambda done, _: tick(len(objects), done)):
        for finding in verdict.result():
            _add_finding(audit, finding)


def _steps(items: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    waiting = iter(items)
    while some := tuple(islice(waiting, TASK_OBJECTS)):
        yield some


def _add(audit: ArchiveAudit, difference: ObjectDifference) -> None:
    audit.add(difference.state, difference.key, difference.what, difference.size_bytes)


def _add_finding(audit: ArchiveAudit, finding: ArtifactFinding) -> None:
    if finding.error is not None:
        raise finding.error
    if finding.is_bad:
        place = finding.place
        audit.add(finding.state.name, place.object_key, "; ".join(finding.problems), place.size_bytes)


# ── orphans ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _report_orphans(
    log_pass: _LogPass, line: Line, listing: ArchiveListing, epochs_of_line: set[int], now_ms: int
) -> None:
    audit, own = log_pass.audit, log_pass.store.url
    audit.abandoned = {
        epoch: objects.objects()
        for epoch, objects in listing.epochs.items()
        if epoch not in epochs_of_line and objects.logs
    }
    for key, size in listing.foreign.items():
        audit.add("ORPHANED", key, "this is not the name of an archive object", size)
    newest_base = _newest_base(line)
    for epoch, objects in listing.epochs.items():
        if epoch in audit.abandoned:
            continue
        for key, (number, size) in (*objects.parts.items(), *objects.files.items()):
            if key not in log_pass.named and Position(epoch, number) < newest_base:
                audit.add("ORPHANED", key, "no log object names it; it is trimmed when it is out of the window", size)
    for page in log_pass.store.list_pages(store_prefix(log_pass.store_id)):
        for info in page:
            part = info.key.removeprefix(f"{log_pass.store_id}/").split("/", 1)[0]
            if part not in KNOWN:
                audit.add("ORPHANED", info.key, "this is not the name of a store", info.size_bytes)
            elif part == "e" and info.modified_ms <= now_ms - GRACE_MS:
                in_epoch = parse_epoch_key(info.key)
                if in_epoch is not None and in_epoch[1] not in epochs_of_line:
                    audit.abandoned[in_epoch[1]] = audit.abandoned.get(in_epoch[1], 0) + 1
                elif not _is_named(log_pass, own, info.key, in_epoch[2] if in_epoch is not None else info.key):
                    audit.add("ORPHANED", info.key, "the manifest has no row for it", info.size_bytes)


def _newest_base(line: Line) -> Position:
    """Return the first log object of the newest base: older objects that nothing names were left by a process that died."""
    newest = line.newest()
    if newest is None or newest.base == NONE:
        return Position(0, 0)
    whole = line.whole(newest.position.epoch, newest.base)
    return Position(newest.position.epoch, whole.base.first_log) if whole is not None else Position(0, 0)


def _is_named(log_pass: _LogPass, url: str, key: str, suffix: str) -> bool:
    return (
        (url, key) in log_pass.places
        or (url, key) in log_pass.announced
        or is_log_key(suffix)
        or t.retired_digest("", key) in log_pass.retired
    )
