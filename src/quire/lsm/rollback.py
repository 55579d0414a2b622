"""Rolls a key-value set back to one of its snapshots, as a new version; the state before the rollback is kept.

    1. A bulk load begins; its lsn is that of the new version. Writes from here on are newer, and survive the rollback.
    2. Keys whose values differ are written to tables of the load, with their values at the snapshot, or deleted if they had
       none.
    3. The current state is kept as the snapshot `before-rollback-LSN`, with which the rollback can be undone.
    4. The load is published atomically, and recorded in the audit.

A crash before step 4 leaves the set as it was, at most with the new snapshot; the next open removes the tables. If step 4
fails, the new snapshot is dropped, unless the load may have been published.

Threads: any. Raises `UnknownSnapshot`, `InvalidInput` for a version that is not a snapshot, and the errors of loads.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from quire.core.decoding import described
from quire.core.errors import InvalidInput, UnknownSnapshot
from quire.core.limits import MIB
from quire.durable.failpoints import hit
from quire.lsm.bulk import BulkWriter, begin_load
from quire.manifest.ops.databases import RecordRollback
from quire.manifest.snapshots import RolledBack, SnapshotInfo, before_rollback

if TYPE_CHECKING:
    from quire.lsm.engine import KvEngine
    from quire.lsm.short_scan import Pair
    from quire.manifest.store import ManifestStore

STEP_BYTES = 4 * MIB
"""Keys and values that are passed to the writer at once."""

SNAPSHOT_TAGS = {"by": "rollback"}


def roll_back(manifest: ManifestStore, engine: KvEngine, name: str, to: object) -> RolledBack:
    """Roll a key-value set back to a snapshot, atomically; durable on return."""
    target = _snapshot(manifest, name, to)
    kv, db_id = engine.open(name), target.db_id
    with engine.open_snapshot(db_id, target.snapshot_id) as then, begin_load(kv) as load:
        writer, changed = BulkWriter.of(kv, load), 0
        # After the load has its lsn: a write between the two would be older than the rollback and not be undone by it.
        with kv.snapshot() as now:
            for keys, values in _steps(differing(now.scan(), then.scan())):
                writer.add(pa.array(keys, pa.binary()), pa.array(values, pa.binary()))
                changed += len(keys)
        done = RolledBack(
            database=name,
            db_id=db_id,
            to_lsn=target.anchor_lsn,
            to_ms=target.created_at_ms,
            lsn=load.lsn,
            before_lsn=load.lsn - 1,
            snapshot=before_rollback(load.lsn - 1) if changed else "",
            changed_pages=0,
            changed_keys=changed,
        )
        if not changed:
            return done
        tables = writer.finish()
        kept = engine.snapshot(db_id, done.snapshot, tags=SNAPSHOT_TAGS)
        hit("lsm.rollback.kept")
        try:
            load.publish(tables)
        except BaseException:
            # If the rollback may have happened, only this snapshot can undo it.
            if not kv.upkeep.may_be_live(tables):
                with suppress(UnknownSnapshot):
                    manifest.snapshots.drop(db_id, kept.snapshot_id)
            raise
    hit("lsm.rollback.published")
    manifest.submit([msgspec.convert(done, described(RecordRollback), from_attributes=True)]).result()
    return done


def _snapshot(manifest: ManifestStore, name: str, to: object) -> SnapshotInfo:
    """Return the snapshot with this name or lsn."""
    if isinstance(to, str) and isinstance(snapshot := manifest.snapshots.find(name, to), SnapshotInfo):
        return snapshot
    for info in manifest.snapshots.of(name):
        if info.anchor_lsn == to:
            return info
    hint = f"`quire snapshot ls {shlex.quote(name)}` lists them"
    raise InvalidInput(
        "a key-value database can only be rolled back to one of its snapshots", hint=hint, name=name, to=str(to)
    )


def differing(now: Iterator[Pair], then: Iterator[Pair]) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the keys whose values differ, with their values in `then`, or `None` if they have none. Both inputs are sorted.

    >>> list(differing(iter([(b"a", b"1"), (b"b", b"2")]), iter([(b"b", b"3"), (b"c", b"4")])))
    [(b'a', None), (b'b', b'3'), (b'c', b'4')]
    """
    ours, theirs = next(now, None), next(then, None)
    while ours is not None and theirs is not None:
        if ours[0] < theirs[0]:
            yield ours[0], None
            ours = next(now, None)
        elif ours[0] > theirs[0]:
            yield theirs
            theirs = next(then, None)
        else:
            if ours[1] != theirs[1]:
                yield theirs
            ours, theirs = next(now, None), next(then, None)
    if ours is not None:
        yield from ((key, None) for key, _ in chain([ours], now))
    if theirs is not None:
        yield from chain([theirs], then)


def _steps(pairs: Iterator[tuple[bytes, bytes | None]]) -> Iterator[tuple[list[bytes], list[bytes | None]]]:
    """Yield the pairs as columns, in groups of about `STEP_BYTES`."""
    keys, values, size = list[bytes](), list[bytes | None](), 0
    for key, value in pairs:
        keys.append(key)
        values.append(value)
        size += len(key) + len(value or b"")
        if size >= STEP_BYTES:
            yield keys, values
            keys, values, size = [], [], 0
    if keys:
        yield keys, values
