"""Finds the databases that have changed since a mirror's target was brought up to date, from the manifest.

Reads one transaction and changes nothing. Raises `NotFound` for a mirror that does not exist.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from quire.core.decoding import described
from quire.core.errors import NotFound
from quire.durable.names import matches_any
from quire.jobs.enqueue import has_open_segment
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbKind, JobKind, JobRecord, JobState, MirrorDatabaseRecord, MirrorRecord

if TYPE_CHECKING:
    from quire.pages.pagestore import PageStore

UNFINISHED = tuple(state for state in JobState if state is not JobState.SUCCEEDED)
"""States of runs that have not brought their target up to date."""


@dataclass(frozen=True, slots=True)
class LiveDatabase:
    """A database that a mirror follows."""

    db_id: int
    name: str
    lsn: int | None
    """Its newest version; `None` if that is unknown until the database is opened, because its last owner was killed."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The databases that the target must get, and those that it must lose."""

    changed: list[LiveDatabase]
    gone: dict[int, MirrorDatabaseRecord]
    followed: int
    """Number of databases that the mirror follows."""
    damaged: Collection[int]
    """Those of them that are closed because their rows are damaged, or that may be: their rows cannot be read."""


def differences(
    txn: ReadTxn, mirror: MirrorRecord, held: Mapping[int, MirrorDatabaseRecord], newest: Mapping[int, int] | None
) -> Differences:
    """Compare the databases with what the target holds of them. `newest` has the versions of open databases; without it,
    published versions are compared.

    A database that is closed because its rows are damaged stays unchanged in the target.
    """
    unreadable, damaged = txn.damaged_databases(), set[int]()
    changed, same = list[LiveDatabase](), set[int]()
    for db_id, record in txn.databases():
        is_damaged = unreadable.pop(db_id, None) is not None
        is_followed = record.kind is DbKind.PAGES and not record.is_dropped
        if not is_followed or not matches_any(record.name, mirror.databases):
            continue
        if is_damaged:
            damaged.add(db_id)
            continue
        row, lsn = held.get(db_id), newest_version(txn, db_id, newest)
        if row is not None and (row.name, row.lsn) == (record.name, lsn):
            same.add(db_id)
        else:
            changed.append(LiveDatabase(db_id, record.name, lsn))
    # The rows of the others cannot be decoded. Only the index of names says whose they are, unless it is damaged too.
    damaged.update(
        db_id for db_id, name in unreadable.items() if db_id in held or not name or matches_any(name, mirror.databases)
    )
    kept = same | damaged | {database.db_id for database in changed}
    gone = {db_id: row for db_id, row in held.items() if db_id not in kept}
    return Differences(changed, gone, len(kept), damaged)


def newest_version(txn: ReadTxn, db_id: int, newest: Mapping[int, int] | None) -> int | None:
    """Return the newest version of a database; `None` if it is unknown until the database is opened."""
    if newest is not None and db_id in newest:
        return newest[db_id]
    wal = txn.wal_state(db_id)
    if wal is None or (newest is not None and has_open_segment(txn, db_id)):
        return None
    return wal.last_applied_lsn


def find_mirror(txn: ReadTxn, name: str) -> tuple[int, MirrorRecord]:
    """Return (id, record) of a mirror by its name."""
    for (mirror_id,), record in txn.scan(t.MIRROR):
        if record.name == name:
            return mirror_id, record
    raise NotFound("no mirror has this name", hint="`quire mirror ls` lists them", mirror=name)


def newest_versions(stores: Iterable[PageStore]) -> dict[int, int]:
    """Return the newest versions of open databases, by database."""
    return {store.db_id: store.wal.written.lsn for store in stores if store.wal.failure is None}


def due_mirrors(txn: ReadTxn, now_ms: int) -> list[str]:
    """Return the mirrors that are due by their schedules and have no outstanding job."""
    due = [
        record.name
        for _, record in txn.scan(t.MIRROR)
        if record.every_ms and now_ms >= record.started_at_ms + record.every_ms
    ]
    if not due:
        return []
    waiting = {name for name, _ in _runs(txn, JobState.PENDING, JobState.IN_FLIGHT)}
    return [name for name in due if name not in waiting]


def failed_runs(txn: ReadTxn, mirror: MirrorRecord) -> tuple[int, str]:
    """Return how many runs of a mirror have failed since its target was last up to date, and the last error."""
    failed = [
        job
        for name, job in _runs(txn, *UNFINISHED)
        if name == mirror.name and job.failures and job.started_at_ms > mirror.synced_at_ms
    ]
    last = max(failed, key=lambda job: job.started_at_ms, default=None)
    return sum(job.failures for job in failed), last.error if last is not None else ""


def _runs(txn: ReadTxn, *states: JobState) -> Iterator[tuple[str, JobRecord]]:
    """Yield (mirror, job) of the runs in these states."""
    for state in states:
        for (_, job_id), _ in txn.scan(t.JOBS_BY_STATE, state):
            job = txn.job(job_id)
            if job is not None and job.kind is JobKind.MIRROR:
                yield _mirror_of(job), job


class _MirrorOnly(msgspec.Struct, frozen=True):
    """The field of a run's payload that names its mirror."""

    mirror: str = ""


def _mirror_of(job: JobRecord) -> str:
    """Return the mirror that a run names; empty if it names none: any client may enqueue a job with any payload."""
    try:
        return msgspec.msgpack.decode(job.payload, type=described(_MirrorOnly)).mirror
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def size_of(txn: ReadTxn, db_id: int) -> int:
    """Return the bytes of a database's pages according to the manifest."""
    record, wal = txn.database(db_id), txn.wal_state(db_id)
    return wal.size_pages * record.page_size if record is not None and wal is not None else 0


def held_databases(txn: ReadTxn, mirror_id: int) -> dict[int, MirrorDatabaseRecord]:
    """Return what the target holds, by database, as of the last adopted batch."""
    return {db_id: row for (_, db_id), row in txn.scan(t.MIRROR_DATABASE, mirror_id)}
