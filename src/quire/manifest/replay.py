"""Replaying a change feed into another environment: the proof that the feed says everything, and the heart of a replica.

Terms
  feed      change records in order of their sequences, as `ReadTxn.changes` or a subscriber gives them
  position  the last sequence an environment has applied: the end of its own change log

Rules
  1. Replaying a whole feed into an empty environment gives its logged tables byte for byte (M2), generation watermarks
     included, and the change log itself: what was replayed can be replayed from.
  2. Records at or below the position are skipped, so a feed may be delivered twice; a gap is refused.
  3. A record that does not apply means that these tables did not come from this feed: nothing of its step is kept.
  4. A step is one transaction: rows, generations and change records together, so a position never lies. Each step looks
     whether the environment still stands where the last one left it.

Thread: the caller's; it must be the only writer of the environment. Raises `InvalidInput`, `ManifestDamaged`, `DiskFull`, and
`StalePlan` if somebody else writes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import lmdb

from quire.core.errors import InvalidInput, ManifestDamaged, QuireError, StalePlan
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.env import ManifestEnv, translate
from quire.manifest.ops.cursors import sequence_bounds
from quire.manifest.overlay import Overlay
from quire.manifest.reads import ReadTxn
from quire.manifest.records import GenerationRecord

STEP_RECORDS = 1024
"""Change records applied in one transaction."""


def replay(changes: Iterable[ChangeRecord], env: ManifestEnv, *, step: int = STEP_RECORDS) -> int:
    """Apply a feed to `env`; the position afterwards."""
    overlay, feed = Overlay(env.handles), iter(changes)
    position = overlay.head = position_of(env)
    while records := list(islice(feed, step)):
        fresh = list(_continuing(records, position))
        if fresh:
            _apply(overlay, env, fresh)
            position = overlay.head = fresh[-1].sequence
    return position


def position_of(env: ManifestEnv) -> int:
    """The last sequence an environment has applied."""
    with ReadTxn(env) as txn:
        return txn.feed_bounds()[1]


def _continuing(records: list[ChangeRecord], position: int) -> Iterator[ChangeRecord]:
    for record in records:
        if record.sequence <= position:
            continue
        if record.sequence != position + 1:
            raise InvalidInput(
                "the feed has a gap",
                hint="replay from an earlier sequence, or start from a copy",
                expected=position + 1,
                found=record.sequence,
            )
        position = record.sequence
        yield record


def _apply(overlay: Overlay, env: ManifestEnv, records: list[ChangeRecord]) -> None:
    txn = env.begin_write()
    try:
        overlay.begin(txn)
        overlay.switch(strict=True)
        _refuse_moved(overlay, env)
        for record in records:
            _apply_one(overlay, record)
        txn = _flush(overlay, env, txn, records)
        txn.commit()
    except (lmdb.Error, OSError) as error:
        _give_up(overlay, txn)
        raise translate(error, env.path) from error
    except BaseException:
        _give_up(overlay, txn)
        raise
    overlay.settle()


def _refuse_moved(overlay: Overlay, env: ManifestEnv) -> None:
    """Rule 4: what `position_of` says of a snapshot, asked of the transaction."""
    with overlay.txn.cursor(db=env.handles[CHANGE_LOG.name]) as cursor:
        last = CHANGE_LOG.key.unpack(cursor.key())[0] if cursor.last() else 0
    last_applied = max(last, sequence_bounds(overlay)[0] - 1)
    if last_applied != overlay.head:
        raise StalePlan(
            "somebody else writes to this environment",
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


def _flush(overlay: Overlay, env: ManifestEnv, txn: lmdb.Transaction, records: list[ChangeRecord]) -> lmdb.Transaction:
    """Write the step; a full map is grown and the step written again, as the writer does."""
    rows = CHANGE_LOG.rows.encode_all([(CHANGE_LOG.key.pack(record.sequence), record) for record in records])
    while True:
        try:
            overlay.flush()
            with txn.cursor(db=env.handles[CHANGE_LOG.name]) as cursor:
                cursor.putmulti(rows)
            return txn
        except lmdb.MapFullError:
            txn.abort()
            env.grow()
            txn = env.begin_write()
            overlay.begin(txn)


def _give_up(overlay: Overlay, txn: lmdb.Transaction) -> None:
    txn.abort()
    overlay.discard()
