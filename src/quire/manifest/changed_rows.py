"""What changed since a checked point: the databases and jobs that the change log names, and a view of their rows (N3).

After a crash an open checks these rows and the rows of the store itself; the recount checks all others. A commit is
atomic, so a crash leaves the rows of whole batches, and the log names what each batch was about. Rows that are in the
view:

  databases   those that an operation names, those of the jobs that it names, and all that these were forked from, whose
              artifacts they hold and release
  jobs        those that an operation names, those with a lease (leases are not in the log), and those in a gate of one of
              these databases
  names       those of these databases, and the databases that have such a name now; a name that a database had before it
              was renamed is not known

Rows of `CONTAINED` tables are not in it: they can close nothing, and reading a damaged one raises.

The log names everything only if it has every change since the point, which is why trimming keeps them
(`overlay.trimmed_below`). If it does not, or names so many databases that a walk over all rows is faster, `changed_since`
returns `None`. That it is the log of this point, and not that of a copy of the store with another history, is shown by the
generations, which the check compares (G1).

Threads: a transaction belongs to its thread. Raises the errors of reading.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import dropwhile, islice
from typing import Any

import lmdb
import msgspec

from quire.core.errors import QuireError
from quire.core.timeline import following, preceding
from quire.manifest import tables as t
from quire.manifest.check import CONTAINED
from quire.manifest.checked_point import CheckedPoint
from quire.manifest.env import ManifestEnv
from quire.manifest.keys import prefix_end
from quire.manifest.op_effects import TOUCHES
from quire.manifest.ops.corrections import RestoreRow
from quire.manifest.ops.databases import hidden_name
from quire.manifest.reads import ReadTxn
from quire.manifest.records import DbRecord, JobState

STORE_WIDE = 0
"""In place of a database: the counts of namespaces, and the gates of jobs about the whole store."""


FEW_DATABASES = 1_000
"""So many changed databases are always read by seeks: a tenth of a second."""

SEEK_COST = 4
"""How many times as long the rows of one database take that are found by seeks, compared with a walk over all rows."""


class Changed(msgspec.Struct, frozen=True):
    """The databases and jobs whose rows may have changed since a point."""

    databases: frozenset[int]
    jobs: frozenset[int]


def changed_since(txn: ReadTxn, point: CheckedPoint) -> Changed | None:
    """Return what changed since the point; `None` if that is not known, so that everything has to be checked."""
    try:
        named = _named_since(txn, point)
        return None if named is None else _with_relatives(txn, *named)
    except (QuireError, lmdb.Error, ValueError, struct.error):
        return None  # a row does not decode: the check of everything names it


def _named_since(txn: ReadTxn, point: CheckedPoint) -> tuple[set[int], set[int]] | None:
    """Return the databases and jobs that operations since the point name."""
    databases, jobs, gaps = {STORE_WIDE}, set(), txn.gaps()
    expected = following(gaps, point.sequence)
    for change in txn.changes(point.sequence + 1):
        if change.sequence != expected:
            return None
        expected = following(gaps, change.sequence)
        for op in change.operations:
            effects = TOUCHES.get(type(op))
            if effects is None or isinstance(op, RestoreRow):
                return None  # an unknown operation, or a repair of any row
            databases.update(effects.databases(op))
            jobs.add(getattr(op, "job_id", 0))
    return (databases, jobs) if preceding(gaps, expected) == txn.feed_bounds()[1] else None


def _with_relatives(txn: ReadTxn, databases: set[int], jobs: set[int]) -> Changed | None:
    """Return these databases and jobs and those related to them; `None` if reading everything is faster."""
    jobs |= {job_id for (job_id,), _ in txn.scan(t.JOB_LEASES)}
    for job in map(txn.job, jobs):
        if job is not None:
            databases |= {job.db_id, job.artifact[0] if job.artifact is not None else STORE_WIDE}
    unseen = set(databases)
    while unseen:
        record = txn.database(db_id := unseen.pop())
        if record is not None:
            holders = [txn.get(t.DB_NAMES, name) for name in known_names(db_id, record)]
            unseen |= {record.parent_db_id, *(row.value for row in holders if row is not None)} - databases
            databases |= unseen
    if len(databases) > FEW_DATABASES and SEEK_COST * len(databases) > txn.count(t.DB):
        return None
    jobs |= {row.value for db_id in databases for _, row in txn.scan(t.JOB_PENDING_INDEX, db_id)}
    return Changed(frozenset(databases), frozenset(jobs))


def known_names(db_id: int, record: DbRecord) -> set[str]:
    """Return the names that a database has, or had before it was dropped or undropped."""
    return {record.name, hidden_name(db_id)} | ({record.former_name} if record.former_name else set())


class ChangedRows(ReadTxn):
    """A snapshot in which a walk over a whole table sees only the rows of changed databases and jobs.

    Single rows, and walks below a prefix, are those of the manifest: whatever a changed row refers to can be read.
    """

    __slots__ = ("_changed", "_prefixes")

    def __init__(self, env: ManifestEnv, changed: Changed) -> None:
        super().__init__(env)
        self._changed = changed
        self._prefixes = [t.DB.key.pack(db_id) for db_id in sorted(changed.databases)]

    def raw_scan(
        self, table: t.Table[Any], *prefix: Any, start: tuple[Any, ...] | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Return the rows of changed databases and jobs, in key order; below a prefix, all rows."""
        if prefix or start is not None:
            return super().raw_scan(table, *prefix, start=start)
        if table in CONTAINED:
            return iter(())
        if table in t.OWNED:
            return self._owned(table)
        if table in (t.JOB_QUEUE, t.JOB_LEASES):
            return self._present(table, [(job_id,) for job_id in sorted(self._changed.jobs)])
        if table is t.JOBS_BY_STATE:
            return self._present(
                table, [(state, job_id) for state in JobState for job_id in sorted(self._changed.jobs)]
            )
        if table is t.DB_NAMES:
            names = {name for db_id, record in self.every_database() for name in known_names(db_id, record)}
            return self._present(table, [(name,) for name in sorted(names)])
        return super().raw_scan(table)  # the rows of the store itself: few

    def steps(self, table: t.Table[Any], rows: int, *, start: bytes = b"") -> Iterator[tuple[list[bytes], list[bytes]]]:
        """Yield the rows of `raw_scan` from the key `start` on, `rows` at a time."""
        walk = dropwhile(lambda row: row[0] < start, self.raw_scan(table))
        while step := list(islice(walk, rows)):
            yield [key for key, _ in step], [raw for _, raw in step]

    def owners(self, table: t.Table[Any], *, start: int = 0) -> Iterator[int]:
        """Yield the changed databases that have rows in a table."""
        for db_id in sorted(self._changed.databases):
            if db_id >= start and next(super().raw_scan(table, db_id), None) is not None:
                yield db_id

    def _owned(self, table: t.Table[Any]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows of changed databases; databases without rows are passed over with one seek."""
        cursor, next_owner = self._cursor(table.name), b""
        for prefix in self._prefixes if cursor is not None else ():
            if prefix < next_owner:
                continue
            try:
                if not cursor.set_range(prefix):
                    return
                next_owner = cursor.key()[:4]
            except lmdb.Error as error:
                raise self._explain(error) from error
            if next_owner == prefix:
                yield from self._rows(cursor.iternext(), prefix_end(prefix))

    def _present(self, table: t.Table[Any], keys: list[tuple[Any, ...]]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows of these keys that exist."""
        for key in keys:
            row = next(super().raw_scan(table, *key), None)
            if row is not None and row[0] == table.key.pack(*key):  # a name may be the beginning of another
                yield row
