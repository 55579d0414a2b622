"""The change feed: every committed change, in order, for its subscribers.

Terms
  cursor    a subscriber; its position is what it has acknowledged, durable across restarts, and found again by its name
  page      consecutive change records from a position on, read from a snapshot, never through the writer
  policy    when a cursor is given up: after a time without acknowledgement, or at a lag; both off by default
  filtered  only changes that concern some databases or tables (`op_effects.py`); those left out count as seen

A cursor sees every change after its position, in order, at least once; exactly once if it stores the sequence together
with its own effect and continues from there (`after`). There is never a silent gap: requesting changes that are no
longer kept, or that were never assigned, raises.

Nothing that a live cursor has not acknowledged is trimmed. A cursor that is given up is `lost`, and using it raises.
Without live cursors the log is kept within `feed.retain_seconds` and `feed.retain_bytes` (M9). Pages are bounded in
records examined and in bytes, because transactions must be short (M4) and memory is finite.

Threads: any. In a read-only process, registering and acknowledging raise `ReadOnly`; fetching and waiting work. Raises
`UnknownCursor`, `CursorLost`, `OutOfRange` (beyond the head), `TimedOut`; for filters `UnknownDatabase`,
`InvalidInput`.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from quire.core.barrier import changes
from quire.core.closing import ClosedOnExit
from quire.core.errors import (
    CursorLost,
    InvalidInput,
    ManifestDamaged,
    OutOfRange,
    QuireError,
    TimedOut,
    UnknownCursor,
)
from quire.core.events import emit
from quire.core.limits import MIB, SCAN_ROWS_MAX
from quire.core.settings import FeedSettings
from quire.core.timeline import distance, preceding, step
from quire.core.waiting import SLEEP_SECONDS_MAX
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangePage, ChangeRecord, decode_changes
from quire.manifest.change import CursorInfo as CursorInfo
from quire.manifest.change import Start as Start
from quire.manifest.op_effects import ChangeFilter, Names
from quire.manifest.ops.base import Counter
from quire.manifest.ops.cursors import (
    TRIM_ROWS,
    AcknowledgeChanges,
    DropCursor,
    LoseCursor,
    RegisterCursor,
    ResumeCursor,
    RetainChanges,
    TrimChanges,
    lost,
    refuse_lost,
)
from quire.manifest.overlay import trimmed_below
from quire.manifest.reads import ReadTxn
from quire.manifest.records import CursorRecord, CursorState

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore

LOOK_SECONDS = 1.0
"""Interval at which a read-only process looks for changes even if it saw no write to the manifest's file, in seconds:
on a network file system, writes of other machines cause no notification."""

FIRST_LOOK_SECONDS = 0.001
"""How soon it looks again after a write that was not yet a commit, in seconds; the interval doubles each time."""

PIECE_SECONDS = 0.2
"""How long a thread waits, in seconds, for an event loop that may have cancelled the wait."""

LAG_REPORTED = 100_000
"""Lag, in changes, at which a cursor is reported: once each time it is reached."""

SKIPPED_SECONDS = 1.0
"""How long a filtered follower may delay acknowledging changes that it skipped, in seconds: a commit for each of them
would double the work of a busy writer."""

PAGE_RECORDS = 256
"""Default number of records in a page."""

PAGE_BYTES = 16 * MIB
"""A page ends with the record that exceeds this size: a record may have 65,536 operations."""

IN_MODIFY = 0x2
"""From <sys/inotify.h>: the file was modified."""


class ChangeFeed:
    """The feed of one manifest: `manifest.feed`."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest
        self.settings = FeedSettings()
        """Set once, when the store is opened."""
        self._lagging: set[int] = set()
        self._measured = 0
        """The head when the bytes of the log were last summed."""
        # guarded by `_trim_lock`
        self._trim_lock = threading.Lock()
        self._tail = 0
        """Rows below the oldest sequence that the trimmer still has to remove."""
        self._trimmer: threading.Thread | None = None

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def store_id(self) -> str:
        """Return the identity of the store."""
        with self._manifest.read() as txn:
            return txn.store_id()

    def head(self) -> int:
        """Return the last committed sequence; 0 before the first."""
        with self._manifest.read() as txn:
            return txn.feed_bounds()[1]

    def cursors(self) -> list[CursorInfo]:
        """Return every cursor, lost ones included."""
        with self._manifest.read() as txn:
            bounds, gaps = txn.feed_bounds(), txn.gaps()
            return [CursorInfo.of(cursor_id, row, bounds, gaps) for (cursor_id,), row in txn.scan(t.CHANGE_CURSORS)]

    def cursor(self, cursor: int | str) -> CursorInfo:
        """Return a cursor by id or by name."""
        with self._manifest.read() as txn:
            cursor_id, row = find_cursor(txn, cursor)
            return CursorInfo.of(cursor_id, row, txn.feed_bounds(), txn.gaps())

    def lag(self) -> dict[str | int, int]:
        """Return the number of changes that each live cursor has yet to acknowledge, by name, or by id if it has none."""
        return {
            cursor.name or cursor.cursor_id: cursor.lag for cursor in self.cursors() if cursor.state is CursorState.LIVE
        }

    def fetch(
        self,
        cursor: int | str,
        limit: int = PAGE_RECORDS,
        *,
        after: int | None = None,
        databases: Names | None = None,
        tables: Iterable[str] | str | None = None,
    ) -> ChangePage:
        """Return at most `limit` changes after the cursor's position, or after `after`, a position that the caller has
        stored itself.

        With `databases` (names or ids) or `tables`, only changes that concern them; the page's `next_sequence` counts
        the others too.
        """
        with self._manifest.read() as txn:
            return read_page(txn, cursor, limit, after, ChangeFilter.resolve(txn, databases, tables))

    def wait(self, after: int, timeout: float | None = None) -> int:
        """Block until a change above `after` is committed; return the head. Raises `TimedOut` if none is committed in time."""
        if not self._manifest.read_only:
            return self._manifest.writer.when_change(after).result(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        # Watching begins before the first look: a commit in between would otherwise be noticed a second later.
        with FileWatch(self._manifest.env.path) as written:
            pause = LOOK_SECONDS
            while (head := self.head()) <= after:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise _timed_out(timeout)
                # A write is noticed before its transaction is visible: hence some checks in quick succession.
                pause = FIRST_LOOK_SECONDS if written.sleep(min(pause, rest)) else min(2 * pause, LOOK_SECONDS)
            return head

    async def wait_async(self, after: int, timeout: float | None = None) -> int:
        """Wait as `wait` does, in an event loop.

        A read-only process waits in a thread, in short pieces, so that cancelling leaves none running.
        """
        import asyncio  # takes 40 ms, which programs without an event loop need not pay

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
    @changes
    def register(
        self, start: Start | int = Start.OLDEST, *, name: str = "", ttl_seconds: float = 0, max_lag: int = 0
    ) -> CursorInfo:
        """Register a cursor. `start` is clamped to the retained range; a policy of 0 is off."""
        if isinstance(start, int) and start < 0:
            raise InvalidInput("a sequence must not be negative", start=start)
        # The operation clamps these to the retained range: bounds read here could be outdated when it is applied.
        acked = {Start.OLDEST: 0, Start.LATEST: 2**63}[start] if isinstance(start, Start) else start
        cursor_id = self._manifest.allocate(Counter.CURSOR)
        op = RegisterCursor(cursor_id, acked, name, int(ttl_seconds * 1000), max_lag)
        self._manifest.submit([op]).result()
        return self.cursor(cursor_id)

    @changes
    def acknowledge(self, cursor: int | str, upto: int) -> None:
        """Acknowledge everything up to `upto`. Only moves forward; acknowledging again is harmless."""
        cursor_id = cursor if isinstance(cursor, int) else self.cursor(cursor).cursor_id  # the op looks up the row
        self._manifest.submit([AcknowledgeChanges(cursor_id, upto)]).result()
        self.trim_behind()

    @changes
    def drop(self, cursor: int | str) -> None:
        """Drop a cursor permanently."""
        self._manifest.submit([DropCursor(self.cursor(cursor).cursor_id)]).result()
        self.trim_behind()

    @changes
    def resume(self, cursor: int | str) -> CursorInfo:
        """Resume a lost cursor where it was, or at the oldest change that is kept. It misses the changes in between."""
        cursor_id = self.cursor(cursor).cursor_id
        self._manifest.submit([ResumeCursor(cursor_id)]).result()
        return self.cursor(cursor_id)

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
        """Iterate over changes forever (or until none arrives for `timeout` seconds), resuming where this name stopped.

        A change is acknowledged after the body of the loop has finished with it: page by page, and when the loop ends.
        A change whose body raised or left the loop is seen again. `start` is where a new name begins; `after` is a
        position that the caller has stored itself, and takes precedence over the cursor's own. With `databases` (names
        or ids, resolved now) or `tables`, only changes that concern them are seen; the others are acknowledged along
        with them.

            for change in store.manifest.feed.follow("my-app"):
                process(change)
        """
        with self._manifest.read() as txn:
            only = ChangeFilter.resolve(txn, databases, tables)

        def fetch(position: int) -> ChangePage:
            with self._manifest.read() as txn:
                return read_page(txn, name, limit, position, only)

        def enter() -> int:
            return self._enter(name, start, after)

        return followed(self, name, enter, fetch, after=after, limit=limit, timeout=timeout)

    def _enter(self, name: str, start: Start | int, after: int | None) -> int:
        """Return the acknowledged position of a follower; register it if it is new."""
        with self._manifest.read() as txn:
            if after is not None:
                check_position(txn, after, name)  # before registering: a refused caller must not leave a cursor behind
            with suppress(UnknownCursor):
                return find_cursor(txn, name)[1].acked_sequence
        return self.register(start if after is None else after, name=name).acked_sequence

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def maintain(self, *, lag_reported: int = LAG_REPORTED) -> None:
        """Give up cursors by their policies, report lagging ones, apply retention, trim. Called by the owner's timer."""
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
        self.prune()

    def prune(self) -> None:
        """Trim what live cursors have acknowledged or, without any, what retention does not keep. Also called at open."""
        try:
            with self._manifest.read() as txn:
                acked = [row.acked_sequence for _, row in txn.scan(t.CHANGE_CURSORS) if row.state is CursorState.LIVE]
                keep_from = min(acked) + 1 if acked else self._retained_from(txn, self._manifest.clock.now_ms())
                oldest = txn.feed_bounds()[0]
        except ManifestDamaged:
            return  # the position of a cursor is unknown: keep everything until it is repaired
        if keep_from > oldest:
            # Only a proposal: the operation looks at the cursors again, so one registered meanwhile is safe.
            self._manifest.submit([RetainChanges(keep_from)]).result()
        self.trim_behind()

    def _report_lag(self, cursor: CursorInfo, threshold: int) -> None:
        """Report a cursor once each time it falls behind: what it has not read cannot be trimmed."""
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
                hint="the change log is retained for it: let it catch up, drop it, or register it with ttl_seconds or max_lag",
            )

    def _retained_from(self, txn: ReadTxn, now_ms: int) -> int:
        """Return the first sequence that retention keeps; 0 if it keeps all."""
        oldest, head = txn.feed_bounds()
        horizon = now_ms - int(self.settings.retain_seconds * 1000)
        gaps = txn.gaps()
        log = range(1, distance(gaps, oldest - 1, head) + 1)  # commit times only rise in it
        older = bisect_left(log, horizon, key=lambda nth: committed_at(txn, step(gaps, oldest - 1, nth)))
        keep = step(gaps, oldest - 1, older) + 1
        if keep <= head:
            keep = self._within_bytes(txn, keep, head)
        return keep if keep > oldest else 0

    def _within_bytes(self, txn: ReadTxn, oldest: int, head: int) -> int:
        """Return the first sequence from which the log fits `retain_bytes`. Summing takes seconds: only done if necessary."""
        pages = txn._txn.stat(db=self._manifest.env.handles[CHANGE_LOG.name])
        used = (pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]) * pages["psize"]
        gaps = txn.gaps()
        kept = distance(gaps, oldest - 1, head)
        # The pages only show whether summing is worth while: they include the tail. It reads the whole log, and is
        # repeated after a 64th more changes.
        if used <= self.settings.retain_bytes or distance(gaps, self._measured, head) < (kept - 1) // 64:
            return oldest
        self._measured, used, keep = head, 0, head + 1
        for key, raw in islice(txn.raw_scan_back(CHANGE_LOG), kept):
            used += len(key) + len(raw)
            if used > self.settings.retain_bytes:
                break
            keep = CHANGE_LOG.key.unpack(key)[0]
        return preceding(gaps, keep) + 1  # a cursor at the end of a former range has missed nothing

    def tail_rows(self) -> int:
        """Return how many rows below the oldest sequence are still on disk and can be removed."""
        with self._manifest.read() as txn:
            first = next(txn.raw_scan(CHANGE_LOG), None)
            (oldest, head), gaps = txn.feed_bounds(), txn.gaps()
        below = trimmed_below(oldest, self._manifest.env.checked_sequence, head)
        return 0 if first is None else distance(gaps, CHANGE_LOG.key.unpack(first[0])[0] - 1, below - 1)

    def trim_behind(self) -> None:
        """Remove the rest of the tail in the background, if there is any."""
        if not (rows := self.tail_rows()):
            return
        with self._trim_lock:
            self._tail = rows
            if self._trimmer is None:
                # Under the lock in which the trimmer ends: it sees the new number, or has cleared `_trimmer`.
                trimmer = threading.Thread(target=self._trim, name="quire-feed-trimmer", daemon=True)
                trimmer.start()
                self._trimmer = trimmer  # after start(): otherwise a failed start would count as running

    def _trim(self) -> None:
        """Run the trimmer thread. It counts rows instead of reading: a daemon's read transaction could obstruct `close`."""
        try:
            while True:
                with self._trim_lock:
                    if self._tail <= 0:
                        self._trimmer = None
                        return
                    # Before the commit, during which `trim_behind` may set a new number.
                    self._tail -= TRIM_ROWS
                self._manifest.submit([TrimChanges()]).result()
        except QuireError as error:
            emit("debug", "feed.trim_stopped", error=str(error))  # closed, or unusable: the next open continues
            with self._trim_lock:
                self._trimmer = None


def _timed_out(seconds: float | None) -> TimedOut:
    return TimedOut("timed out waiting for a change", hint="wait again: it may still arrive", seconds=seconds)


# ── pages of the log ──────────────────────────────────────────────────────────────────────────────────────────────────
def read_page(txn: ReadTxn, cursor: int | str, limit: int, after: int | None, only: ChangeFilter | None) -> ChangePage:
    """Return at most `limit` changes after a cursor's position, or after `after`."""
    if limit < 1 or (after is not None and after < 0):
        raise InvalidInput(
            "a page must have at least one record, and a sequence must not be negative", limit=limit, after=after
        )
    cursor_id, row = find_cursor(txn, cursor)
    if row.state is CursorState.LOST:
        raise lost(cursor_id, row)
    bounds = txn.feed_bounds()
    position = row.acked_sequence if after is None else after
    check_position(txn, position, cursor)
    changes, reached = _read(txn, position, limit, only)
    # The head lies beyond the position, but no row follows it.
    if reached == position < bounds[1]:
        raise _gap(position + 1, None)
    return ChangePage(tuple(changes), reached + 1, *bounds)


def check_position(txn: ReadTxn, position: int, cursor: int | str) -> None:
    """Refuse a position whose changes are no longer kept, that the feed has not reached, or that lies in lost changes."""
    oldest, head = txn.feed_bounds()
    refuse_lost(txn.gaps(), position, cursor=cursor)
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
            "the feed has not reached this sequence yet",
            hint="if the store was restored from a backup, restore its consumers from the same time",
            position=position,
            head_sequence=head,
        )


def _read(txn: ReadTxn, position: int, limit: int, only: ChangeFilter | None) -> tuple[list[ChangeRecord], int]:
    """Return changes after a position, and the last sequence examined."""
    rows, changes, reached, used = txn.raw_scan(CHANGE_LOG, start=(position + 1,)), list[ChangeRecord](), position, 0
    gaps, looked = txn.gaps(), 0
    portion = min(limit if only is None else max(limit, PAGE_RECORDS), SCAN_ROWS_MAX)
    while len(changes) < limit and looked < SCAN_ROWS_MAX and used <= PAGE_BYTES:
        keys: list[bytes] = []
        raws: list[bytes] = []
        for key, raw in islice(rows, portion):
            keys.append(key)
            raws.append(raw)
            used += len(raw)
            if used > PAGE_BYTES:
                break
        if not raws:
            break
        records = decode_changes(CHANGE_LOG.rows.opened_all(keys, raws))
        looked += len(records)
        # One comparison per portion finds every gap: sequences rise, so a missing row makes the last one too high.
        reached = step(gaps, reached, len(records))
        if records[-1].sequence != reached:
            raise _gap(reached, records[-1].sequence)
        changes += records if only is None else [passed for passed in map(only.of, records) if passed is not None]
    if len(changes) > limit:
        del changes[limit:]
        reached = changes[-1].sequence
    return changes, reached


def _gap(expected: int, read: int | None) -> ManifestDamaged:
    return ManifestDamaged("the log has a gap", hint="run `quire manifest check`", expected=expected, found=read)


def committed_at(txn: ReadTxn, sequence: int) -> int:
    """Return when a change was committed."""
    record = txn.get(CHANGE_LOG, sequence)
    if record is None:
        raise _gap(sequence, None)
    return record.committed_at_ms


def find_cursor(txn: ReadTxn, cursor: int | str) -> tuple[int, CursorRecord]:
    """Return id and row of a cursor, by id or name."""
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


class FollowedFeed(Protocol):
    """The feed of a store, local or remote."""

    def acknowledge(self, cursor: int | str, upto: int, /) -> None: ...

    def wait(self, after: int, timeout: float | None = None, /) -> int: ...


def followed(
    feed: FollowedFeed,
    name: str,
    enter: Callable[[], int],
    fetch: Callable[[int], ChangePage],
    *,
    after: int | None,
    limit: int,
    timeout: float | None,
) -> Generator[ChangeRecord, None, None]:
    """Yield changes forever, or until none arrives for `timeout` seconds; each is acknowledged once the caller is done
    with it.

    `enter` registers a new follower and returns its acknowledged position; `fetch` returns the page after a position.
    Changes that a filter leaves out are acknowledged from time to time.
    """
    acked = enter()
    done = acked if after is None else after
    quiet_since = acked_at = time.monotonic()
    try:
        while True:
            page = fetch(done)
            for change in page.changes:
                yield change
                # After the `yield`: a change whose body raised is not done, and is delivered again.
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
                with suppress(TimedOut):  # then the next page is empty, and the checks above find what is due
                    feed.wait(done, max(min(moments) - now, 0) if moments else None)
    finally:
        if done > acked:
            feed.acknowledge(name, done)


class FileWatch(ClosedOnExit):
    """Wakes its caller when any process of this machine writes to a file. Use as a context manager.

    Where inotify is not available (another system, no watches left) it only sleeps: callers look from time to time anyway.
    """

    def __init__(self, path: str) -> None:
        self._fd = -1
        libc = ctypes.CDLL(None)
        with suppress(AttributeError):
            self._fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if self._fd >= 0 and libc.inotify_add_watch(self._fd, os.fsencode(path), IN_MODIFY) < 0:
                self.close()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def sleep(self, timeout: float) -> bool:
        """Sleep until the file is written to; return False if the timeout ended first."""
        if self._fd < 0:
            time.sleep(timeout)
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(min(max(timeout, 0), SLEEP_SECONDS_MAX) * 1000):
            return False
        with suppress(BlockingIOError):
            os.read(self._fd, 65_536)  # drain: which events they were does not matter
        return True
