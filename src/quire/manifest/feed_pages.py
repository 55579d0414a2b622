"""Pages of the change log: what follows a position, read from one snapshot.

Rules
  1. Never a silent gap: whoever asks for what is no longer kept, or for what was never given, is told.
  2. Pages are bounded in records looked at and in bytes: a transaction is for a moment (M4), and memory is finite.

Pure functions of a read transaction. Raise `UnknownCursor`, `CursorLost`, `OutOfRange`, `InvalidInput`, `ManifestDamaged`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import islice
from typing import Protocol

from quire.core.errors import CursorLost, InvalidInput, ManifestDamaged, OutOfRange, TimedOut, UnknownCursor
from quire.core.limits import MIB, SCAN_ROWS_MAX
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangePage, ChangeRecord, decode_changes
from quire.manifest.op_effects import ChangeFilter
from quire.manifest.ops.cursors import lost
from quire.manifest.reads import ReadTxn
from quire.manifest.records import CursorRecord, CursorState

SKIPPED_SECONDS = 1.0
"""How long a filtered follower may sit on changes that it skipped before it acknowledges them: a commit for each of them would
double the work of a busy writer."""

PAGE_RECORDS = 256
"""Records in a page unless asked otherwise."""

PAGE_BYTES = 16 * MIB
"""A page ends with the record that passes this: a record may have 65,536 operations."""


def read_page(txn: ReadTxn, cursor: int | str, limit: int, after: int | None, only: ChangeFilter | None) -> ChangePage:
    """At most `limit` changes after a cursor's position, or after `after`."""
    if limit < 1 or (after is not None and after < 0):
        raise InvalidInput("a page has at least one record, and no sequence is negative", limit=limit, after=after)
    cursor_id, row = find_cursor(txn, cursor)
    if row.state is CursorState.LOST:
        raise lost(cursor_id, row)
    bounds = txn.feed_bounds()
    position = row.acked_sequence if after is None else after
    check_position(position, bounds, cursor)
    changes, following = _read(txn, position + 1, limit, only)
    if following == position + 1 <= bounds[1]:
        raise _gap(following, None)
    return ChangePage(tuple(changes), following, *bounds)


def check_position(position: int, bounds: tuple[int, int], cursor: int | str) -> None:
    """Refuse a position whose changes are no longer kept, or that the feed has not reached (rule 1)."""
    oldest, head = bounds
    if position < oldest - 1:
        raise CursorLost(
            f"the changes {position + 1:,} to {oldest - 1:,} are no longer kept",
            hint="start again from a snapshot or a copy, and follow the feed from its position",
            cursor=cursor,
            position=position,
            oldest_sequence=oldest,
        )
    if position > head:
        raise OutOfRange(
            "the feed has not come this far",
            hint="was the store restored from a backup? Then its consumers must be, too",
            position=position,
            head_sequence=head,
        )


def _read(txn: ReadTxn, first: int, limit: int, only: ChangeFilter | None) -> tuple[list[ChangeRecord], int]:
    """Changes from `first` on, and the sequence behind the last one that was looked at (rule 2)."""
    rows, changes, following, used = txn.raw_scan(CHANGE_LOG, start=(first,)), list[ChangeRecord](), first, 0
    step = min(limit if only is None else max(limit, PAGE_RECORDS), SCAN_ROWS_MAX)
    while len(changes) < limit and following - first < SCAN_ROWS_MAX and used <= PAGE_BYTES:
        keys: list[bytes] = []
        raws: list[bytes] = []
        for key, raw in islice(rows, step):
            keys.append(key)
            raws.append(raw)
            used += len(raw)
            if used > PAGE_BYTES:
                break
        if not raws:
            break
        records = decode_changes(CHANGE_LOG.rows.opened_all(keys, raws))
        following += len(records)
        if records[-1].sequence != following - 1:
            raise _gap(following - 1, records[-1].sequence)
        changes += records if only is None else [passed for passed in map(only.of, records) if passed is not None]
    if len(changes) > limit:
        del changes[limit:]
        following = changes[-1].sequence + 1
    return changes, following


def _gap(expected: int, found: int | None) -> ManifestDamaged:
    return ManifestDamaged("the log has a gap", hint="run `quire manifest check`", expected=expected, found=found)


def committed_at(txn: ReadTxn, sequence: int) -> int:
    """When a change was committed."""
    record = txn.get(CHANGE_LOG, sequence)
    if record is None:
        raise _gap(sequence, None)
    return record.committed_at_ms


def find_cursor(txn: ReadTxn, cursor: int | str) -> tuple[int, CursorRecord]:
    """Id and row of a cursor, by id or name."""
    cursor_id = cursor
    if isinstance(cursor, str):
        index = txn.get(t.CURSOR_NAMES, cursor) if cursor else None
        cursor_id = index.value if index else 0
    row = txn.get(t.CHANGE_CURSORS, cursor_id)
    if row is None:
        raise UnknownCursor(
            "no such change cursor", hint="`feed.cursors()` lists them; register one first", cursor=cursor
        )
    return int(cursor_id), row


class Follower(Protocol):
    """The feed of a store, here or at the other end of a connection."""

    def acknowledge(self, cursor: int | str, upto: int, /) -> None: ...

    def wait(self, after: int, timeout: float | None = None, /) -> int: ...


def followed(
    feed: Follower,
    name: str,
    enter: Callable[[], int],
    fetch: Callable[[int], ChangePage],
    *,
    after: int | None,
    limit: int,
    timeout: float | None,
) -> Generator[ChangeRecord, None, None]:
    """Changes for ever, or until none comes for `timeout` seconds, each acknowledged once the caller is done with it.

    `enter` registers a new follower and returns its acknowledged position, `fetch` the page behind a position. Changes that a
    filter leaves out are acknowledged now and then.
    """
    acked = enter()
    done = acked if after is None else after
    quiet_since = acked_at = time.monotonic()
    try:
        while True:
            page = fetch(done)
            for change in page.changes:
                yield change
                done = change.sequence
            done, now = page.next_sequence - 1, time.monotonic()
            if page.changes:
                quiet_since = now
            elif page.at_head and timeout is not None and now >= quiet_since + timeout:
                return
            if done > acked and (page.changes or done - acked >= limit or now >= acked_at + SKIPPED_SECONDS):
                feed.acknowledge(name, done)
                acked, acked_at = done, now
            if page.at_head:
                moments = [] if timeout is None else [quiet_since + timeout]
                moments += [acked_at + SKIPPED_SECONDS] if done > acked else []
                with suppress(TimedOut):  # the next page is empty, and says what is due
                    feed.wait(done, max(min(moments) - now, 0) if moments else None)
    finally:
        if done > acked:
            feed.acknowledge(name, done)
