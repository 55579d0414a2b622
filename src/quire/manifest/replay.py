"""Replay a change feed into another environment: the proof that the feed is complete, and the core of a replica.

Terms
  feed      change records in order of their sequences, as `ReadTxn.changes` or a subscriber delivers them
  position  the last sequence that an environment has applied: the end of its own change log

Replaying a whole feed into an empty environment gives its logged tables byte for byte (M2), generation watermarks
included, and the change log itself, from which it can be replayed again. Records at or below the position are skipped,
so a feed may be delivered twice; a gap is refused. A step is one transaction of rows, generations and change records,
so the position always matches the rows.

Threads: the caller's, which must be the only writer of the environment. Raises `InvalidInput`, `ManifestDamaged`,
`DiskFull`, and `StalePlan` if the environment has another writer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from quire.core.errors import InvalidInput, ManifestDamaged, QuireError, StalePlan
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.env import ManifestEnv
from quire.manifest.ops.cursors import sequence_bounds
from quire.manifest.ops.timeline import Timeline
from quire.manifest.overlay import Overlay
from quire.manifest.reads import ReadTxn
from quire.manifest.records import GenerationRecord

STEP_RECORDS = 1024
"""Change records applied per transaction."""


def replay(changes: Iterable[ChangeRecord], env: ManifestEnv, *, step: int = STEP_RECORDS) -> int:
    """Apply a feed to `env`; return the position afterwards."""
    overlay, feed = Overlay(env.handles), iter(changes)
    position = overlay.head = position_of(env)
    while records := list(islice(feed, step)):
        fresh = list(_continuing(records, position))
        if fresh:
            _apply(overlay, env, fresh)
            position = overlay.head = fresh[-1].sequence
    return position


def position_of(env: ManifestEnv) -> int:
    """Return the last sequence that an environment has applied."""
    with ReadTxn(env) as txn:
        return txn.feed_bounds()[1]


def _continuing(records: list[ChangeRecord], position: int) -> Iterator[ChangeRecord]:
    for record in records:
        if record.sequence <= position:
            continue
        if record.sequence != position + 1 and not _continues(record, position):
            raise InvalidInput(
                "the feed has a gap",
                hint="replay from an earlier sequence, or start from a copy",
                expected=position + 1,
                found=record.sequence,
            )
        position = record.sequence
        yield record


def _continues(record: ChangeRecord, position: int) -> bool:
    """Return whether a takeover states that this change follows that position."""
    return any(
        isinstance(op, Timeline) and (op.last_sequence, op.first_number) == (position, record.sequence)
        for op in record.operations
    )


def _apply(overlay: Overlay, env: ManifestEnv, records: list[ChangeRecord]) -> None:
    rows = CHANGE_LOG.rows.encode_all([(CHANGE_LOG.key.pack(record.sequence), record) for record in records])

    position = overlay.head

    def apply(txn: Any) -> None:
        overlay.discard()  # left by an attempt that found the map full
        overlay.head = position
        overlay.begin(txn)
        # Inserts look keys up: nothing here repeats the step after `KeysTaken`, as the writer does.
        overlay.switch(strict=True)
        # Inside the write transaction, which excludes other writers until the commit.
        _refuse_moved(overlay, env)
        for record in records:
            _apply_one(overlay, record)
            overlay.head = record.sequence
        overlay.flush()
        with txn.cursor(db=env.handles[CHANGE_LOG.name]) as cursor:
            cursor.putmulti(rows)

    env.transact(apply)
    overlay.settle()


def _refuse_moved(overlay: Overlay, env: ManifestEnv) -> None:
    """Refuse if the environment is not at the position where the last step left it."""
    with overlay.txn.cursor(db=env.handles[CHANGE_LOG.name]) as cursor:
        last = CHANGE_LOG.key.unpack(cursor.key())[0] if cursor.last() else 0
    last_applied = max(last, sequence_bounds(overlay)[0] - 1)
    if last_applied != overlay.head:
        raise StalePlan(
            "another process writes to this environment",
            hint="let one process replay",
            expected=overlay.head,
            found=last_applied,
        )


def _apply_one(overlay: Overlay, record: ChangeRecord) -> None:
    try:
        for op in record.operations:
            op.apply(overlay, record.committed_at_ms)
        overlay.write_notes(record.sequence, record.generation_updates, record.committed_at_ms)
    except QuireError as error:
        raise ManifestDamaged(
            f"a change does not apply: {error}",
            hint="these tables did not come from this feed: start from an empty environment or a copy",
            sequence=record.sequence,
        ) from error
    for component, generation in record.generation_updates:
        overlay.generation_watermarks.put(
            t.GENERATION_WATERMARKS.key.pack(component), GenerationRecord(generation, record.committed_at_ms)
        )
