"""Finds an earlier version of a database, by lsn or by time, and the snapshot, if any, from which it is read (P14).

The version is the last commit at or below the requested moment. *Live* versions, at or above `checkpointed_lsn` (and, in a
fork, the fork point), are read through a lease, like any other. An older one needs a snapshot that covers no more than it and
pins every segment up to it: the snapshot's leaves, and its pins cut at that version. A moment between the anchor of a snapshot
and the next version means the anchor itself, if the next snapshot, or the live database, is based on exactly that anchor. A
live version that a time-travel window keeps is read from there: the checkpoint for which it was kept may have been given a
floor above it, and then no lease can be taken (P9).

A version that was lost when the store was taken over raises `EpochLost`; the one before it is never returned instead (A10).

Threads: any. Raises `SnapshotGone`, `EpochLost`, `OutOfRange` for a version that does not exist yet, `InvalidInput` for a time
without a zone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from quire.core.errors import EpochLost, InvalidInput, OutOfRange, SnapshotGone
from quire.core.ids import Epoch
from quire.manifest import tables as t
from quire.manifest.reads import ReadTxn
from quire.manifest.records import WINDOW_TAG, DbRecord, SnapshotRecord, WalRecord, WalState
from quire.manifest.slots import unpack_leaf
from quire.pages.catalog import segment_place
from quire.pages.framemap import PinnedSegment, Regions
from quire.pages.page_source import Mark
from quire.pages.view_build import pinned

At = int | Epoch | datetime
"""How a caller names a version."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The requested moment: an lsn or a time in milliseconds; the other is `None`."""

    lsn: int | None
    ms: int | None

    @classmethod
    def of(cls, at: At) -> Moment:
        """Return the moment that `at` names."""
        if isinstance(at, datetime):
            if at.tzinfo is None:
                raise InvalidInput(
                    "a time needs a time zone", hint="use, for example, datetime.now(timezone.utc)", at=str(at)
                )
            return cls(None, int(at.timestamp() * 1000))
        lsn = at.lsn if isinstance(at, Epoch) else at
        if isinstance(lsn, bool) or not isinstance(lsn, int) or lsn < 0:
            raise InvalidInput("a version must be an lsn, an Epoch or a time", at=repr(at))
        return cls(lsn, None)

    def includes(self, lsn: int, ms: int) -> bool:
        """Return whether a version of this lsn and time is at or below the moment."""
        return lsn <= self.lsn if self.lsn is not None else ms <= (self.ms or 0)


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """A version, and the snapshot from which it is read; `snapshot_id` is 0 for a live version."""

    mark: Mark
    snapshot_id: int = 0
    record: SnapshotRecord | None = None


def find_version(txn: ReadTxn, regions: Regions, db_id: int, at: At, durable: Mark, objects_url: str) -> FoundVersion:
    """Return the version that was current at `at`.

    REQUIRES that everything up to `durable` is published, because index regions are searched.
    """
    lsn = Moment.of(at).lsn
    # Lsns of one takeover's range and the next are not consecutive, so a requested lsn may lie in the gap between them.
    begins = [first for first, _ in txn.timelines() if lsn is not None and first > lsn]
    if lsn is None or not begins:
        return _find_version(txn, regions, db_id, at, durable, objects_url)
    if lsn > durable.lsn:
        raise _lost(db_id, lsn, durable.lsn, begins[0])  # not "does not exist yet": new lsns are in a later range
    version = _find_version(txn, regions, db_id, at, durable, objects_url)
    if version.mark.lsn < lsn:
        # If this is also the last commit before the takeover, `lsn` was lost. If another commit follows, it was not.
        last: FoundVersion | None = None
        with suppress(SnapshotGone):  # a later commit exists, but is no longer kept
            last = _find_version(txn, regions, db_id, min(begins[0] - 1, durable.lsn), durable, objects_url)
        if last is not None and last.mark.lsn == version.mark.lsn:
            raise _lost(db_id, lsn, version.mark.lsn, begins[0])
    return version


def _lost(db_id: int, lsn: int, last: int, first: int) -> EpochLost:
    return EpochLost(
        f"the versions {last + 1:,} to {lsn:,} were lost when the store was taken over",
        hint=f"the last one before them is {last}",
        db_id=db_id,
        lsn=lsn,
        last_lsn=last,
        first_lsn=first,
    )


def _refuse_before_creation(moment: Moment, record: DbRecord | None) -> None:
    if moment.ms is None or record is None or moment.ms >= record.created_at_ms:
        return
    asked, created = (
        datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds") for ms in (moment.ms, record.created_at_ms)
    )
    hint = "name a time after it was created; what a fork had before is in the database it was forked from"
    raise SnapshotGone("the database did not exist then", hint=hint, database=record.name, at=asked, created=created)


def _find_version(txn: ReadTxn, regions: Regions, db_id: int, at: At, durable: Mark, objects_url: str) -> FoundVersion:
    moment = Moment.of(at)
    if moment.lsn is not None and moment.lsn > durable.lsn:
        raise OutOfRange("this version does not exist yet", hint="open the newest", lsn=moment.lsn, newest=durable.lsn)
    wal, record = txn.wal_state(db_id), txn.database(db_id)
    if moment.includes(durable.lsn, durable.commit_ms):
        if not durable.commit_ms:  # nothing was committed yet: every time would be included
            _refuse_before_creation(moment, record)
        return FoundVersion(durable)
    checkpointed = wal.checkpointed_lsn if wal is not None else 0
    # A fork has only the newest inherited version of each page: its own history begins at the fork point.
    begins = max(checkpointed, record.parent_lsn if record is not None else 0)
    # The last absorbed segment is included while it exists, because it has the size of the version in the chunks.
    live = live_segments(
        txn, db_id, durable.lsn, lambda row: row.state is not WalState.CHECKPOINTED or row.last_lsn >= checkpointed
    )
    mark = last_commit(regions, live, moment)
    snapshots = sorted(
        ((key[1], record) for key, record in txn.scan(t.SNAPSHOT_INDEX, db_id)), key=lambda item: item[1].anchor_lsn
    )
    if mark is not None and mark.lsn >= begins:
        windows = [(number, record) for number, record in snapshots if WINDOW_TAG in record.tags]
        kept = _find_in_snapshots(txn, regions, windows, moment, objects_url)
        return kept if kept is not None and kept.mark.lsn == mark.lsn else FoundVersion(mark)
    version = _find_in_snapshots(txn, regions, snapshots, moment, objects_url, checkpointed)
    if version is None:
        _refuse_before_creation(moment, record)
        raise SnapshotGone(
            "this version is no longer kept",
            hint="open a newer one; snapshots and maintenance.time_travel_seconds keep versions for longer",
            db_id=db_id,
            at=str(at),
        )
    return version


def last_commit(regions: Regions, pins: Sequence[PinnedSegment], moment: Moment) -> Mark | None:
    """Return the last commit at or below a moment in these segments, which are ordered by first lsn."""
    # Newest first: the first segment with a commit at or below the moment has the last such commit.
    for pin in reversed(pins):
        region = regions.of(pin)
        frames = np.flatnonzero(region.entries["db_size"]).tolist()
        file = regions.sources.segment(pin.origin_db_id, pin.segment_id, pin.place)
        if moment.lsn is not None:
            lsns = region.entries["lsn"][frames].tolist()
            number = bisect_right(lsns, moment.lsn)
        else:
            number = bisect_right(frames, moment.ms or 0, key=lambda frame: file.read_head(frame).commit_ms)
        if number:
            head = file.read_head(frames[number - 1])
            return Mark(head.lsn, head.db_size, pin.segment_id, head.commit_ms)
    return None


def newest_sealed(txn: ReadTxn, regions: Regions, db_id: int, objects_url: str) -> Mark | None:
    """Return the newest version up to which all segments are sealed and indexed, if chunks do not contain it yet."""
    wal = txn.wal_state(db_id)
    after, pins = wal.checkpointed_lsn if wal is not None else 0, list[PinnedSegment]()
    rows = [(key[1], row) for key, row in txn.scan(t.WAL_CATALOG, db_id) if row.state < WalState.CHECKPOINTED]
    for segment_id, row in sorted(rows, key=lambda item: item[1].first_lsn):
        if row.state not in (WalState.INDEXED, WalState.CHECKPOINT_READY):
            break
        place = segment_place(txn, row.origin_db_id, segment_id, objects_url)
        pins.append(PinnedSegment(row.origin_db_id, segment_id, row.last_lsn, place))
    mark = last_commit(regions, pins, Moment(pins[-1].upto_lsn, None)) if pins else None
    return mark if mark is not None and mark.lsn > after else None


def live_segments(
    txn: ReadTxn, db_id: int, upto_lsn: int, is_needed: Callable[[WalRecord], bool]
) -> list[PinnedSegment]:
    """Return the segments of the live database that have versions up to an lsn, oldest first, as far as they have them."""
    segments: list[tuple[int, PinnedSegment]] = []
    for (_, segment_id), row in txn.scan(t.WAL_CATALOG, db_id):
        if row.state is WalState.TRUNCATED or row.first_lsn > upto_lsn or not is_needed(row):
            continue
        last = upto_lsn if row.state is WalState.OPEN else min(row.last_lsn, upto_lsn)
        segments.append((row.first_lsn, PinnedSegment(row.origin_db_id, segment_id, last)))
    segments.sort(key=lambda item: item[0])
    # An open segment ends where the next one begins: it may have ended with room left, and not be sealed yet.
    ends = [first - 1 for first, _ in segments[1:]] + [upto_lsn]
    return [pin._replace(upto_lsn=min(pin.upto_lsn, end)) for (_, pin), end in zip(segments, ends)]


def _find_in_snapshots(
    txn: ReadTxn,
    regions: Regions,
    snapshots: list[tuple[int, SnapshotRecord]],
    moment: Moment,
    objects_url: str,
    checkpointed_lsn: int = -1,
) -> FoundVersion | None:
    """Find a snapshot that covers no more than the moment and pins every segment up to it."""
    before: tuple[int, SnapshotRecord] | None = None
    for snapshot_id, record in snapshots:
        if moment.includes(record.anchor_lsn, record.anchor_time_ms or record.created_at_ms):
            before = (snapshot_id, record)
            continue
        pins = pinned(txn, record.pins, objects_url, upto_lsn=record.anchor_lsn)
        mark, covered = last_commit(regions, pins, moment), _covered(txn, record)
        # Leaves that cover more than the version would mix later pages into it.
        if mark is not None and covered <= mark.lsn:
            return FoundVersion(mark, snapshot_id, record)
        # Chunks that a checkpoint added to this snapshot while it was published may contain more than this version; those of
        # a later snapshot may not.
        if mark is None and before is not None and before[1].anchor_lsn == covered:
            return _version_of(*before)
    if before is not None and before[1].anchor_lsn in (moment.lsn, checkpointed_lsn):
        return _version_of(*before)
    return None


def _version_of(snapshot_id: int, record: SnapshotRecord) -> FoundVersion:
    mark = Mark(record.anchor_lsn, record.size_pages, record.anchor_segment_id, record.anchor_time_ms)
    return FoundVersion(mark, snapshot_id, record)


def _covered(txn: ReadTxn, record: SnapshotRecord) -> int:
    """Return the highest lsn that a snapshot's chunks cover."""
    covered = 0
    for number, origin, generation in record.leaves:
        leaf = txn.get(t.SLOT_LEAF, origin, number, generation)
        if leaf is not None:
            chains = unpack_leaf(leaf.entries).values()
            covered = max(covered, max((chain[-1].covered_lsn for chain in chains), default=0))
    return covered
