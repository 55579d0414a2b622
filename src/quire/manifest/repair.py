"""Repair damaged rows: restore them from the change log, or give them up where one subscriber, reader or policy depends
on them.

A logged row is restored by replaying the change log, if the log still begins with the first change. A retention policy
is restored from its last change, if the log still has that. A row that cannot be restored is removed only where its
absence deletes nothing and breaks no promise (`GIVEN_UP`). A cursor becomes a lost one, so that its subscriber gets an
error; a counter continues above every id that any row contains. Everything else has no fix here: the manifest has to be
restored from a backup.

Called only where a check has found a damaged row (K1). Threads: the caller's. Raises the errors of reading.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb

from quire.core.errors import ManifestDamaged, QuireError
from quire.core.settings import ManifestSettings
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG
from quire.manifest.check import CONTAINED, Problem, highest_id
from quire.manifest.env import ManifestEnv
from quire.manifest.ops.base import Counter, Op
from quire.manifest.ops.corrections import RESTORED, RestoreLocalRow, RestoreRow
from quire.manifest.ops.databases import SetRetention
from quire.manifest.reads import ReadTxn
from quire.manifest.records import CursorRecord, CursorState, WatermarkRecord
from quire.manifest.replay import replay

STEP_ROWS = 8_192

GIVEN_UP: dict[t.Table[Any], str] = {
    t.RETENTION: "the policy is no longer in the change log: nothing is dropped until you set it again",
    t.AUDIT: "an entry of the audit log is lost",
    t.RETIRED: "an object due for deletion is forgotten: `quire verify --sweep` finds it",
    t.SNAPSHOT_READERS: "the lease of a reader is lost: it must start again",
    t.METRICS: "a rolling metric is reset",
    t.IDEMPOTENCY: "the result of a keyed batch is lost: a retry would apply it again",
    t.REPLICA_POSITIONS: "an embedded replica fetches the whole database again",
}
"""Tables whose rows may be removed because their absence deletes and promises nothing, and what the removal means."""


def propose(txn: ReadTxn, problems: list[Problem]) -> list[Problem]:
    """Return the problems, with every damaged row named, and with fixes for the rows that can be restored.

    Damaged rows hide further problems: check again after repairing them.
    """
    if not any(problem.rule == "K1" for problem in problems):
        return problems
    rows = list(_restorations(txn, list(damaged_rows(txn))))
    if not rows:
        return problems  # LMDB itself cannot be read
    others = [problem for problem in problems if problem.rule != "K1"]
    if all(problem.fix is not None for problem in rows):
        return [*rows, *(problem for problem in others if problem.fix is not None or problem.leak)]
    return [*rows, *others]


def damaged_rows(txn: ReadTxn) -> Iterator[tuple[t.Table[Any], bytes, str]]:
    """Yield (table, key, what is wrong) of every damaged row; derived tables are rebuilt by their own rules."""
    for table in dict.fromkeys((*t.TABLES.values(), CHANGE_LOG)):
        if table.policy is t.Policy.DERIVED or table in (t.GC_REFCOUNTS, t.JOB_PENDING_INDEX):
            continue
        for keys, values in txn.steps(table, STEP_ROWS):
            for key, raw in zip(keys, values, strict=True):
                try:
                    table.key.unpack(key)
                    table.rows.decode(key, raw)
                except (QuireError, ValueError, struct.error) as error:
                    yield table, key, error.what if isinstance(error, QuireError) else str(error)


def _restorations(txn: ReadTxn, damaged: list[tuple[t.Table[Any], bytes, str]]) -> Iterator[Problem]:
    wanted = [(table, key) for table, key, _ in damaged if table in RESTORED]
    known = _replayed(txn, wanted) if wanted else {}
    for table, key, what in damaged:
        fix, remark = _restoration(txn, table, key, known)
        where = {"table": table.name, "key": table.rows.key_of(key)}
        yield Problem("K1", f"{what}; {remark}" if remark else what, where, fix, contained=table in CONTAINED)


def _restoration(
    txn: ReadTxn, table: t.Table[Any], key: bytes, known: dict[tuple[str, bytes], bytes | None]
) -> tuple[Op | None, str]:
    """Return the operation that repairs a row, and what it means; `None` if there is no such operation."""
    if (table.name, key) in known:
        return RestoreRow(table.name, key, known[table.name, key]), "the change log has its contents"
    if table is t.RETENTION:
        for change in txn.changes(txn.feed_bounds()[0]) if _is_readable(txn) else ():
            for op in change.operations:
                if isinstance(op, SetRetention) and t.RETENTION.key.pack(op.db_id) == key:
                    row = None if op.record is None else t.RETENTION.codec.encode(op.record)
                    known[table.name, key] = row
        if (table.name, key) in known:
            return RestoreRow(table.name, key, known[table.name, key]), "the change log has its contents"
    if table is t.CHANGE_CURSORS:
        row = t.CHANGE_CURSORS.codec.encode(_lost_cursor(txn, key))
        return RestoreLocalRow(table.name, key, row), "its position is unknown: its subscriber must start again"
    if table is t.ID_WATERMARKS:
        (counter,) = table.key.unpack(key)
        used = highest_id(txn, Counter(counter))
        row = table.codec.encode(WatermarkRecord(used + 1))
        return RestoreRow(table.name, key, row), f"it is set above the highest id in use, {used}"
    if table in GIVEN_UP:
        kind = RestoreRow if table.policy is t.Policy.LOGGED else RestoreLocalRow
        return kind(table.name, key, None), GIVEN_UP[table]
    return None, ""


def _lost_cursor(txn: ReadTxn, key: bytes) -> CursorRecord:
    (cursor_id,) = t.CHANGE_CURSORS.key.unpack(key)
    named = [name for (name,), row in txn.scan(t.CURSOR_NAMES) if row.value == cursor_id]
    return CursorRecord(
        0, 0, 0, named[0] if named else "", state=CursorState.LOST, lost_reason="its row in the manifest was damaged"
    )


def _is_readable(txn: ReadTxn) -> bool:
    """Return whether every change of the log can be decoded."""
    try:
        return all(True for _ in txn.changes(txn.feed_bounds()[0]))
    except QuireError:
        return False


def _replayed(txn: ReadTxn, wanted: list[tuple[t.Table[Any], bytes]]) -> dict[tuple[str, bytes], bytes | None]:
    """Return what replaying the whole change log makes of these rows; empty if the log is no longer complete."""
    try:
        # The changes of a trimmed log apply to rows that it does not contain.
        if txn.feed_bounds()[0] != 1:
            return {}
        with (
            tempfile.TemporaryDirectory(prefix="quire-replay-") as directory,
            closing(ManifestEnv(str(Path(directory) / "manifest.lmdb"), ManifestSettings(), write=True)) as env,
        ):
            replay(txn.changes(1), env)
            with ReadTxn(env) as replayed:
                return {(table.name, key): _plain(replayed, table, key) for table, key in wanted}
    except (ManifestDamaged, lmdb.Error):
        return {}  # the log is damaged too


def _plain(txn: ReadTxn, table: t.Table[Any], key: bytes) -> bytes | None:
    record = txn.get(table, *table.key.unpack(key))
    return None if record is None else table.codec.encode(record)
