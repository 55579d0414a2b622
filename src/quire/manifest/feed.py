"""The change feed: everything that was committed, in order, for whoever subscribes (seed 000).

Terms
  cursor    a subscriber: what it has acknowledged is its position, durable across restarts; a name finds it again
  page      consecutive change records from a position on, read from a snapshot, never through the writer
  policy    when a cursor is given up: a time without acknowledgement, or a lag; both off unless asked for
  filtered  only what concerns some databases or tables (`touches.py`); what is left out counts as seen

Rules
  1. A cursor sees every change after its position, in order, at least once; exactly once if it stores the sequence together
     with its own effect and continues from there (`after`).
  2. Nothing a live cursor has not acknowledged is trimmed. A cursor that is given up is `lost`, and says so when it is used.
  3. Never a silent gap: whoever asks for what is no longer kept, or for what was never given, is told.
  4. Without live cursors the log is kept within `feed.retain_seconds` and `feed.retain_bytes` (M9), by `maintain`.
  5. Trimming goes in commits of its own, one at a time, on a thread of its own: writers interleave. What an owner left
     behind is trimmed by the next one, when it first uses its feed.
  6. Pages are bounded in records looked at and in bytes: a transaction is for a moment (M4), and memory is finite.

Threads: any. In a process that only reads, registering and acknowledging raise `ReadOnly`; fetching and waiting work.
Raises `UnknownCursor`, `CursorLost`, `OutOfRange` (beyond the head), `TimedOut`; of filters `UnknownDatabase`, `InvalidInput`.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections.abc import Generator, Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from quire.core.errors import CursorLost, InvalidInput, ManifestDamaged, OutOfRange, QuireError, TimedOut, UnknownCursor
from quire.core.events import emit
from quire.core.limits import MIB, SCAN_ROWS_MAX
from quire.core.settings import FeedSettings
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangePage, ChangeRecord, decode_changes
from quire.manifest.change import CursorInfo as CursorInfo
from quire.manifest.change import Start as Start
from quire.manifest.ops.base import Counter
from quire.manifest.ops.cursors import (
    TRIM_ROWS,
    AcknowledgeChanges,
    DropCursor,
    LoseCursor,
    RegisterCursor,
    RetainChanges,
    TrimChanges,
    lost,
)
from quire.manifest.reads import ReadTxn
from quire.manifest.records import CursorRecord, CursorState, MetaRecord
from quire.manifest.touches import ChangeFilter, Names

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore

PAGE_RECORDS = 256
"""Records in a page unless asked otherwise."""

PAGE_BYTES = 16 * MIB
"""A page ends with the record that passes this: a record may have 65,536 operations."""

POLL_SECONDS = 0.02
"""How often a process that only reads looks for changes: nobody rings for it."""

PIECE_SECONDS = 0.2
"""How long a thread waits for an event loop that may have lost interest."""

SKIPPED_SECONDS = 1.0
"""How long a filtered follower may sit on changes that it skipped before it acknowledges them: a commit for each of them would
double the work of a busy writer."""

LAG_REPORTED = 100_000
"""Changes behind which a cursor is reported, once each time it gets there."""


class ChangeFeed:
    """The feed of one manifest: `manifest.feed`."""

    def __init__(self, manifest: ManifestStore, settings: FeedSettings) -> None:
        self._manifest = manifest
        self._settings = settings
        self._lagging: set[int] = set()
        self._measured = 0
        """The head when the bytes of the log were last added up."""
        # guarded by `_trim_lock`
        self._trim_lock = threading.Lock()
        self._tail = 0
        """Rows below the oldest sequence that the trimmer has yet to remove."""
        self._trimmer: threading.Thread | None = None
        if not manifest.read_only:
            self._trim_behind()

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def store_id(self) -> str:
        """Whose feed this is."""
        with self._manifest.read() as txn:
            return (txn.get(t.META, "store_id") or MetaRecord()).text

    def head(self) -> int:
        """The last sequence that was committed; 0 before the first."""
        with self._manifest.read() as txn:
            return txn.feed_bounds()[1]

    def cursors(self) -> list[CursorInfo]:
        """Every cursor, lost ones included."""
        with self._manifest.read() as txn:
            bounds = txn.feed_bounds()
            return [CursorInfo.of(cursor_id, row, bounds) for (cursor_id,), row in txn.scan(t.CHANGE_CURSORS)]

    def cursor(self, cursor: int | str) -> CursorInfo:
        """A cursor by id or by name."""
        with self._manifest.read() as txn:
            cursor_id, row = _find(txn, cursor)
            return CursorInfo.of(cursor_id, row, txn.feed_bounds())

    def lag(self) -> dict[str | int, int]:
        """How many changes wait for each live cursor, by its name, or by its id if it has none."""
        return {each.name or each.cursor_id: each.lag for each in self.cursors() if each.state is CursorState.LIVE}

    def oldest_lag(self) -> int:
        """How many changes wait for the cursor that is furthest behind: it is the one that holds the log."""
        return max(self.lag().values(), default=0)

    def fetch(
        self,
        cursor: int | str,
        limit: int = PAGE_RECORDS,
        *,
        after: int | None = None,
        databases: Names | None = None,
        tables: Iterable[str] | str | None = None,
    ) -> ChangePage:
        """At most `limit` changes after the cursor's position, or after `after`: a position the caller has stored itself.

        With `databases` (names or ids) or `tables`, only what concerns them; the page's `next_sequence` counts the others too.
        """
        with self._manifest.read() as txn:
            return _page(txn, cursor, limit, after, ChangeFilter.resolve(txn, databases, tables))

    def wait(self, after: int, timeout: float | None = None) -> int:
        """Block until a change above `after` is committed; the head by then. `TimedOut` if there is none in time."""
        if not self._manifest.read_only:
            return self._manifest.writer.when_change(after).result(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while (head := self.head()) <= after:
            if deadline is not None and time.monotonic() >= deadline:
                raise _timed_out(timeout)
            time.sleep(POLL_SECONDS)
        return head

    async def wait_async(self, after: int, timeout: float | None = None) -> int:
        """As `wait`, in an event loop. A process that only reads waits in a thread, in pieces: cancelling leaves none."""
        import asyncio  # 40 ms that a program without an event loop need not pay

        if not self._manifest.read_only:
            try:
                async with asyncio.timeout(timeout):
                    return await self._manifest.writer.when_change(after)
            except TimeoutError:
                raise _timed_out(timeout) from None
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (rest := deadline - time.monotonic()) > PIECE_SECONDS:
            with suppress(TimedOut):
                return await asyncio.to_thread(self.wait, after, PIECE_SECONDS)
        return await asyncio.to_thread(self.wait, after, rest)

    # ── subscribing ───────────────────────────────────────────────────────────────────────────────────────────────────
    def register(
        self, start: Start | int = Start.OLDEST, *, name: str = "", ttl_seconds: float = 0, max_lag: int = 0
    ) -> CursorInfo:
        """A new cursor. `start` is clamped to what is retained; the policies are off at 0."""
        if isinstance(start, int) and start < 0:
            raise InvalidInput("a sequence is not negative", start=start)
        acked = {Start.OLDEST: 0, Start.LATEST: 2**63}[start] if isinstance(start, Start) else start
        cursor_id = self._manifest.allocate(Counter.CURSOR)
        op = RegisterCursor(cursor_id, acked, name, int(ttl_seconds * 1000), max_lag)
        self._manifest.submit([op]).result()
        return self.cursor(cursor_id)

    def acknowledge(self, cursor: int | str, upto: int) -> None:
        """Everything up to `upto` has been processed. Moves forward only; acknowledging again is harmless."""
        self._manifest.submit([AcknowledgeChanges(self.cursor(cursor).cursor_id, upto)]).result()
        self._trim_behind()

    def drop(self, cursor: int | str) -> None:
        """The subscriber leaves for good."""
        self._manifest.submit([DropCursor(self.cursor(cursor).cursor_id)]).result()
        self._trim_behind()

    def follow(
        self,
        name: str,
        *,
        start: Start | int = Start.OLDEST,
        after: int | None = None,
        limit: int = PAGE_RECORDS,
        timeout: float | None = None,
        databases: Names | None = None,
        tables: Iterable[str] | str | None = None,
    ) -> Generator[ChangeRecord, None, None]:
        """Iterate over changes for ever (or until none comes for `timeout` seconds), resuming where this name stopped.

        A change is acknowledged after the body of the loop has finished with it, page by page and when the loop ends; one
        whose body raised or left the loop is seen again. `start` says where a new name begins; `after` is a position that the
        caller has stored itself, and goes before the cursor's own. With `databases` (names or ids, resolved now) or `tables`
        only what concerns them is seen; the rest is acknowledged with it.

            for change in store.manifest.feed.follow("my-app"):
                process(change)
        """
        with self._manifest.read() as txn:
            only = ChangeFilter.resolve(txn, databases, tables)
        return self._follow(name, start, after, limit, timeout, only)

    def _follow(
        self,
        name: str,
        start: Start | int,
        after: int | None,
        limit: int,
        timeout: float | None,
        only: ChangeFilter | None,
    ) -> Generator[ChangeRecord, None, None]:
        acked = self._enter(name, start, after)
        done = acked if after is None else after
        quiet_since = acked_at = time.monotonic()
        try:
            while True:
                with self._manifest.read() as txn:
                    page = _page(txn, name, limit, done, only)
                for change in page.changes:
                    yield change
                    done = change.sequence
                done, now = page.next_sequence - 1, time.monotonic()
                if page.changes:
                    quiet_since = now
                elif page.at_head and timeout is not None and now >= quiet_since + timeout:
                    return
                if done > acked and (page.changes or done - acked >= limit or now >= acked_at + SKIPPED_SECONDS):
                    self.acknowledge(name, done)
                    acked, acked_at = done, now
                if page.at_head:
                    moments = [] if timeout is None else [quiet_since + timeout]
                    moments += [acked_at + SKIPPED_SECONDS] if done > acked else []
                    with suppress(TimedOut):  # the next page is empty, and says what is due
                        self.wait(done, max(min(moments) - now, 0) if moments else None)
        finally:
            if done > acked:
                self.acknowledge(name, done)

    def _enter(self, name: str, start: Start | int, after: int | None) -> int:
        """The acknowledged position of a follower, who is registered if new."""
        with self._manifest.read() as txn:
            if after is not None:
                _check_position(after, txn.feed_bounds(), name)  # else whoever is refused would leave a cursor behind
            with suppress(UnknownCursor):
                return _find(txn, name)[1].acked_sequence
        return self.register(start if after is None else after, name=name).acked_sequence

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def maintain(self, *, lag_reported: int = LAG_REPORTED) -> None:
        """Give up cursors as their policies say, report those that lag, keep to retention, trim; for the owner's timer."""
        now = self._manifest.clock.now_ms()
        for cursor in self.cursors():
            if cursor.state is not CursorState.LIVE:
                continue
            if reason := cursor.why_given_up(now):
                emit(
                    "warning", "feed.cursor_lost", cursor=cursor.name or cursor.cursor_id, lag=cursor.lag, reason=reason
                )
                self._manifest.submit([LoseCursor(cursor.cursor_id, reason)]).result()
            else:
                self._report_lag(cursor, lag_reported)
        if not any(cursor.state is CursorState.LIVE for cursor in self.cursors()):
            with self._manifest.read() as txn:
                keep_from = self._retained_from(txn, now)
            if keep_from:
                self._manifest.submit([RetainChanges(keep_from)]).result()
        self._trim_behind()

    def _report_lag(self, cursor: CursorInfo, threshold: int) -> None:
        """Once for each time a cursor falls behind: what it has not read cannot be trimmed."""
        if cursor.lag <= threshold:
            self._lagging.discard(cursor.cursor_id)
        elif cursor.cursor_id not in self._lagging:
            self._lagging.add(cursor.cursor_id)
            emit(
                "warning",
                "feed.cursor_lagging",
                cursor=cursor.name or cursor.cursor_id,
                lag=cursor.lag,
                acked_sequence=cursor.acked_sequence,
                hint="the log is kept for it: let it catch up, drop it, or register it with ttl_seconds or max_lag",
            )

    def _retained_from(self, txn: ReadTxn, now_ms: int) -> int:
        """The first sequence that retention keeps; 0 if it keeps all."""
        oldest, head = txn.feed_bounds()
        horizon = now_ms - int(self._settings.retain_seconds * 1000)
        log = range(oldest, head + 1)  # in which times only rise
        keep = oldest + bisect_left(log, horizon, key=lambda sequence: _committed_at(txn, sequence))
        if keep <= head:
            keep = self._within_bytes(txn, keep, head)
        return keep if keep > oldest else 0

    def _within_bytes(self, txn: ReadTxn, oldest: int, head: int) -> int:
        """The first sequence from which on the log is within its bytes. To add them up takes seconds: only if need be."""
        pages = txn._txn.stat(db=self._manifest.env.handles[CHANGE_LOG.name])
        used = (pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]) * pages["psize"]
        if used <= self._settings.retain_bytes or head - self._measured < (head - oldest) // 64:
            return oldest
        self._measured, used, keep = head, 0, head + 1
        for key, raw in islice(txn.raw_scan_back(CHANGE_LOG), head + 1 - oldest):
            used += len(key) + len(raw)
            if used > self._settings.retain_bytes:
                break
            keep -= 1
        return keep

    def has_tail(self) -> bool:
        """Whether rows below the oldest sequence are still on disk."""
        return self._tail_rows() > 0

    def _tail_rows(self) -> int:
        with self._manifest.read() as txn:
            first = next(txn.raw_scan(CHANGE_LOG), None)
            oldest = txn.feed_bounds()[0]
        return 0 if first is None else max(oldest - CHANGE_LOG.key.unpack(first[0])[0], 0)

    def _trim_behind(self) -> None:
        """Have the rest of the tail removed, if there is any (rule 5)."""
        if not (rows := self._tail_rows()):
            return
        with self._trim_lock:
            self._tail = rows
            if self._trimmer is None:
                self._trimmer = threading.Thread(target=self._trim, name="quire-feed-trimmer", daemon=True)
                self._trimmer.start()

    def _trim(self) -> None:
        """The trimmer. It counts instead of looking: a read transaction of a daemon could be in the way of `close`."""
        try:
            while True:
                with self._trim_lock:
                    if self._tail <= 0:
                        self._trimmer = None
                        return
                    self._tail -= TRIM_ROWS
                self._manifest.submit([TrimChanges()]).result()
        except QuireError as error:
            emit("debug", "feed.trim_stopped", error=str(error))  # closed, or unusable: the next open goes on
            with self._trim_lock:
                self._trimmer = None


def _page(txn: ReadTxn, cursor: int | str, limit: int, after: int | None, only: ChangeFilter | None) -> ChangePage:
    if limit < 1 or (after is not None and after < 0):
        raise InvalidInput("a page has at least one record, and no sequence is negative", limit=limit, after=after)
    cursor_id, row = _find(txn, cursor)
    if row.state is CursorState.LOST:
        raise lost(cursor_id, row)
    bounds = txn.feed_bounds()
    position = row.acked_sequence if after is None else after
    _check_position(position, bounds, cursor)
    changes, following = _read(txn, position + 1, limit, only)
    if following == position + 1 <= bounds[1]:
        raise _gap(following, None)
    return ChangePage(tuple(changes), following, *bounds)


def _check_position(position: int, bounds: tuple[int, int], cursor: int | str) -> None:
    """Rule 3."""
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
    """Changes from `first` on, and the sequence behind the last one that was looked at (rule 6)."""
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


def _committed_at(txn: ReadTxn, sequence: int) -> int:
    record = txn.get(CHANGE_LOG, sequence)
    if record is None:
        raise _gap(sequence, None)
    return record.committed_at_ms


def _timed_out(seconds: float | None) -> TimedOut:
    return TimedOut("timed out waiting for a change", hint="it may still come", seconds=seconds)


def _find(txn: ReadTxn, cursor: int | str) -> tuple[int, CursorRecord]:
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
