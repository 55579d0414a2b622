"""The change feed: everything that was committed, in order, for whoever subscribes.

Terms
  cursor    a subscriber: what it has acknowledged is its position, durable across restarts; a name finds it again
  page      consecutive change records from a position on, read from a snapshot, never through the writer
  policy    when a cursor is given up: a time without acknowledgement, or a lag; both off unless asked for
  filtered  only what concerns some databases or tables (`op_effects.py`); what is left out counts as seen

A cursor sees every change after its position, in order, at least once; exactly once if it stores the sequence together with
its own effect and continues from there (`after`). Never a silent gap: whoever asks for what is no longer kept, or for what
was never given, is told.

Nothing a live cursor has not acknowledged is trimmed; one that is given up is `lost`, and says so when it is used. Without
live cursors the log is kept within `feed.retain_seconds` and `feed.retain_bytes` (M9). Pages are bounded in records looked at
and in bytes: a transaction is for a moment (M4), and memory is finite.

Threads: any. In a process that only reads, registering and acknowledging raise `ReadOnly`; fetching and waiting work. Raises
`UnknownCursor`, `CursorLost`, `OutOfRange` (beyond the head), `TimedOut`; of filters `UnknownDatabase`, `InvalidInput`.
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
from typing import TYPE_CHECKING, Protocol, Self

from quire.core.barrier import changes
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
from quire.manifest.reads import ReadTxn
from quire.manifest.records import CursorRecord, CursorState

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore

LOOK_SECONDS = 1.0
"""How often a process that only reads looks for changes although the manifest's file was not seen to be written: on a network
file system nobody hears of another machine's writes."""

FIRST_LOOK_SECONDS = 0.001
"""How soon it looks again after a write that was not yet a commit; then half as often each time."""

PIECE_SECONDS = 0.2
"""How long a thread waits for an event loop that may have lost interest."""

LAG_REPORTED = 100_000
"""Changes behind which a cursor is reported, once each time it gets there."""

SKIPPED_SECONDS = 1.0
"""How long a filtered follower may sit on changes that it skipped before it acknowledges them: a commit for each of them would
double the work of a busy writer."""

PAGE_RECORDS = 256
"""Records in a page unless asked otherwise."""

PAGE_BYTES = 16 * MIB
"""A page ends with the record that passes this: a record may have 65,536 operations."""

IN_MODIFY = 0x2
"""From <sys/inotify.h>: the file was written to."""


class ChangeFeed:
    """The feed of one manifest: `manifest.feed`."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest
        self.settings = FeedSettings()
        """Set once, by whoever opens the store."""
        self._lagging: set[int] = set()
        self._measured = 0
        """The head when the bytes of the log were last added up."""
        # guarded by `_trim_lock`
        self._trim_lock = threading.Lock()
        self._tail = 0
        """Rows below the oldest sequence that the trimmer has yet to remove."""
        self._trimmer: threading.Thread | None = None

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def store_id(self) -> str:
        """Whose feed this is."""
        with self._manifest.read() as txn:
            return txn.store_id()

    def head(self) -> int:
        """The last sequence that was committed; 0 before the first."""
        with self._manifest.read() as txn:
            return txn.feed_bounds()[1]

    def cursors(self) -> list[CursorInfo]:
        """Every cursor, lost ones included."""
        with self._manifest.read() as txn:
            bounds, gaps = txn.feed_bounds(), txn.gaps()
            return [CursorInfo.of(cursor_id, row, bounds, gaps) for (cursor_id,), row in txn.scan(t.CHANGE_CURSORS)]

    def cursor(self, cursor: int | str) -> CursorInfo:
        """A cursor by id or by name."""
        with self._manifest.read() as txn:
            cursor_id, row = find_cursor(txn, cursor)
            return CursorInfo.of(cursor_id, row, txn.feed_bounds(), txn.gaps())

    def lag(self) -> dict[str | int, int]:
        """How many changes wait for each live cursor, by its name, or by its id if it has none."""
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
        """At most `limit` changes after the cursor's position, or after `after`: a position the caller has stored itself.

        With `databases` (names or ids) or `tables`, only what concerns them; the page's `next_sequence` counts the others too.
        """
        with self._manifest.read() as txn:
            return read_page(txn, cursor, limit, after, ChangeFilter.resolve(txn, databases, tables))

    def wait(self, after: int, timeout: float | None = None) -> int:
        """Block until a change above `after` is committed; the head by then. `TimedOut` if there is none in time."""
        if not self._manifest.read_only:
            return self._manifest.writer.when_change(after).result(timeout)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with FileWatch(self._manifest.env.path) as written:
            pause = LOOK_SECONDS
            while (head := self.head()) <= after:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise _timed_out(timeout)
                # A write is heard of before its transaction is seen: hence some looks in short order.
                pause = FIRST_LOOK_SECONDS if written.sleep(min(pause, rest)) else min(2 * pause, LOOK_SECONDS)
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
    @changes
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

    @changes
    def acknowledge(self, cursor: int | str, upto: int) -> None:
        """Everything up to `upto` has been processed. Moves forward only; acknowledging again is harmless."""
        cursor_id = cursor if isinstance(cursor, int) else self.cursor(cursor).cursor_id  # the op looks for the row
        self._manifest.submit([AcknowledgeChanges(cursor_id, upto)]).result()
        self.trim_behind()

    @changes
    def drop(self, cursor: int | str) -> None:
        """The subscriber leaves for good."""
        self._manifest.submit([DropCursor(self.cursor(cursor).cursor_id)]).result()
        self.trim_behind()

    @changes
    def resume(self, cursor: int | str) -> CursorInfo:
        """Let a lost cursor go on where it stood, or with the oldest change that is kept. What is between, it misses."""
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

        def fetch(position: int) -> ChangePage:
            with self._manifest.read() as txn:
                return read_page(txn, name, limit, position, only)

        def enter() -> int:
            return self._enter(name, start, after)

        return followed(self, name, enter, fetch, after=after, limit=limit, timeout=timeout)

    def _enter(self, name: str, start: Start | int, after: int | None) -> int:
        """The acknowledged position of a follower, who is registered if new."""
        with self._manifest.read() as txn:
            if after is not None:
                check_position(txn, after, name)  # else whoever is refused would leave a cursor behind
            with suppress(UnknownCursor):
                return find_cursor(txn, name)[1].acked_sequence
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
        self.prune()

    def prune(self) -> None:
        """Trim what live cursors have acknowledged; without any, what retention does not keep. When a store is opened, too."""
        try:
            with self._manifest.read() as txn:
                acked = [row.acked_sequence for _, row in txn.scan(t.CHANGE_CURSORS) if row.state is CursorState.LIVE]
                keep_from = min(acked) + 1 if acked else self._retained_from(txn, self._manifest.clock.now_ms())
                oldest = txn.feed_bounds()[0]
        except ManifestDamaged:
            return  # where a cursor stands is not known: until it is mended everything stays
        if keep_from > oldest:
            self._manifest.submit([RetainChanges(keep_from)]).result()
        self.trim_behind()

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
        horizon = now_ms - int(self.settings.retain_seconds * 1000)
        gaps = txn.gaps()
        log = range(1, distance(gaps, oldest - 1, head) + 1)  # in which times only rise
        older = bisect_left(log, horizon, key=lambda nth: committed_at(txn, step(gaps, oldest - 1, nth)))
        keep = step(gaps, oldest - 1, older) + 1
        if keep <= head:
            keep = self._within_bytes(txn, keep, head)
        return keep if keep > oldest else 0

    def _within_bytes(self, txn: ReadTxn, oldest: int, head: int) -> int:
        """The first sequence from which on the log is within its bytes. To add them up takes seconds: only if need be."""
        pages = txn._txn.stat(db=self._manifest.env.handles[CHANGE_LOG.name])
        used = (pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]) * pages["psize"]
        gaps = txn.gaps()
        kept = distance(gaps, oldest - 1, head)
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
        """How many rows below the oldest sequence are still on disk."""
        with self._manifest.read() as txn:
            first = next(txn.raw_scan(CHANGE_LOG), None)
            oldest, gaps = txn.feed_bounds()[0], txn.gaps()
        return 0 if first is None else distance(gaps, CHANGE_LOG.key.unpack(first[0])[0] - 1, oldest - 1)

    def trim_behind(self) -> None:
        """Have the rest of the tail removed, if there is any."""
        if not (rows := self.tail_rows()):
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


def _timed_out(seconds: float | None) -> TimedOut:
    return TimedOut("timed out waiting for a change", hint="it may still come", seconds=seconds)


# ── pages of the log ──────────────────────────────────────────────────────────────────────────────────────────────────
def read_page(txn: ReadTxn, cursor: int | str, limit: int, after: int | None, only: ChangeFilter | None) -> ChangePage:
    """At most `limit` changes after a cursor's position, or after `after`."""
    if limit < 1 or (after is not None and after < 0):
        raise InvalidInput("a page has at least one record, and no sequence is negative", limit=limit, after=after)
    cursor_id, row = find_cursor(txn, cursor)
    if row.state is CursorState.LOST:
        raise lost(cursor_id, row)
    bounds = txn.feed_bounds()
    position = row.acked_sequence if after is None else after
    check_position(txn, position, cursor)
    changes, reached = _read(txn, position, limit, only)
    if reached == position < bounds[1]:
        raise _gap(position + 1, None)
    return ChangePage(tuple(changes), reached + 1, *bounds)


def check_position(txn: ReadTxn, position: int, cursor: int | str) -> None:
    """Refuse a position whose changes are no longer kept, or that the feed has not reached, or only in what was lost."""
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
            "the feed has not come this far",
            hint="was the store restored from a backup? Then its consumers must be, too",
            position=position,
            head_sequence=head,
        )


def _read(txn: ReadTxn, position: int, limit: int, only: ChangeFilter | None) -> tuple[list[ChangeRecord], int]:
    """Changes behind a position, and the last sequence that was looked at."""
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


class FollowedFeed(Protocol):
    """The feed of a store, here or at the other end of a connection."""

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


class FileWatch:
    """Wakes its owner when any process of this machine writes to a file. Use it as a context manager.

    Where inotify cannot be had (another system, no watches left) it only sleeps: whoever waits looks now and then anyway.
    """

    def __init__(self, path: str) -> None:
        self._fd = -1
        libc = ctypes.CDLL(None)
        with suppress(AttributeError):
            self._fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
            if self._fd >= 0 and libc.inotify_add_watch(self._fd, os.fsencode(path), IN_MODIFY) < 0:
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hear no more; again does no harm."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def sleep(self, timeout: float) -> bool:
        """Until the file is written to; False if the timeout ended first."""
        if self._fd < 0:
            time.sleep(timeout)
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(min(max(timeout, 0), SLEEP_SECONDS_MAX) * 1000):
            return False
        with suppress(BlockingIOError):
            os.read(self._fd, 65_536)  # what happened does not matter, only that it did
        return True
