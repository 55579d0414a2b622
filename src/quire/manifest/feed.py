"""The change feed: everything that was committed, in order, for whoever subscribes (seed 000).

Terms
  cursor   a subscriber: what it has acknowledged is its position, durable across restarts; a name finds it again
  page     consecutive change records from a position on, read from a snapshot, never through the writer
  policy   when a cursor is given up: a time without acknowledgement, or a lag; both off unless asked for

Rules
  1. A cursor sees every change after its position, in order, at least once; exactly once if it stores the sequence together
     with its own effect and continues from there.
  2. Nothing a live cursor has not acknowledged is trimmed. A cursor that is given up is `lost`, and says so when it is used.
  3. Without live cursors the log is kept within `feed.retain_seconds` and `feed.retain_bytes` (M9), by `maintain`.
  4. Trimming goes in commits of its own, one at a time, on a thread of its own: writers interleave.

Threads: any. In a process that only reads, registering and acknowledging raise `ReadOnly`; fetching and waiting work.
Raises `UnknownCursor`, `CursorLost`, `OutOfRange` (acknowledged beyond the head), `TimedOut`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from quire.core.errors import InvalidInput, QuireError, TimedOut, UnknownCursor
from quire.core.events import emit
from quire.core.settings import FeedSettings
from quire.manifest import tables as t
from quire.manifest.change import CHANGE_LOG, ChangeRecord
from quire.manifest.ops.base import Counter
from quire.manifest.ops.cursors import (
    AcknowledgeChanges,
    DropCursor,
    LoseCursor,
    RegisterCursor,
    RetainChanges,
    TrimChanges,
    lost,
)
from quire.manifest.reads import ReadTxn
from quire.manifest.records import CursorRecord, CursorState

if TYPE_CHECKING:
    from quire.manifest.store import ManifestStore

PAGE_RECORDS = 256
"""Records in a page unless asked otherwise."""

POLL_SECONDS = 0.02
"""How often a process that only reads looks for changes: nobody rings for it."""


class Start(Enum):
    """Where a new cursor begins; a number means: after this sequence."""

    OLDEST = "oldest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CursorInfo:
    """A cursor and the bounds of the feed, in one snapshot (the seed's `ChangeCursorSnapshot`)."""

    cursor_id: int
    name: str
    state: CursorState
    acked_sequence: int
    oldest_sequence: int
    head_sequence: int
    created_at_ms: int
    updated_at_ms: int
    ttl_ms: int
    max_lag: int
    lost_reason: str

    @property
    def next_sequence(self) -> int:
        """The first sequence a fetch returns."""
        return max(self.acked_sequence + 1, self.oldest_sequence)

    @property
    def lag(self) -> int:
        """Changes that wait for this cursor."""
        return max(self.head_sequence - self.acked_sequence, 0)


@dataclass(frozen=True, slots=True)
class ChangePage:
    """Consecutive changes, and where the feed stood when they were read."""

    changes: tuple[ChangeRecord, ...]
    next_sequence: int
    """What the next page begins with."""
    oldest_sequence: int
    head_sequence: int

    @property
    def at_head(self) -> bool:
        """Whether nothing follows, as of this snapshot."""
        return self.next_sequence > self.head_sequence


class ChangeFeed:
    """The feed of one manifest: `manifest.feed`."""

    def __init__(self, manifest: ManifestStore, settings: FeedSettings) -> None:
        self._manifest = manifest
        self._settings = settings
        self._trim_lock = threading.Lock()
        self._trimmer: threading.Thread | None = None

    # ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def head(self) -> int:
        """The last sequence that was committed; 0 before the first."""
        with self._manifest.read() as txn:
            return txn.feed_bounds()[1]

    def cursors(self) -> list[CursorInfo]:
        """Every cursor, lost ones included."""
        with self._manifest.read() as txn:
            bounds = txn.feed_bounds()
            return [_info(cursor_id, row, bounds) for (cursor_id,), row in txn.scan(t.CHANGE_CURSORS)]

    def cursor(self, cursor: int | str) -> CursorInfo:
        """A cursor by id or by name."""
        with self._manifest.read() as txn:
            cursor_id, row = _find(txn, cursor)
            return _info(cursor_id, row, txn.feed_bounds())

    def fetch(self, cursor: int | str, limit: int = PAGE_RECORDS, *, after: int | None = None) -> ChangePage:
        """The changes after the cursor's position, or after `after` if that is further on; at most `limit`."""
        if limit < 1:
            raise InvalidInput("a page has at least one record", limit=limit)
        with self._manifest.read() as txn:
            cursor_id, row = _find(txn, cursor)
            if row.state is CursorState.LOST:
                raise lost(cursor_id, row)
            oldest, head = txn.feed_bounds()
            first = max(row.acked_sequence + 1, oldest, (after or 0) + 1)
            changes = tuple(islice(txn.changes(first), limit))
        return ChangePage(changes, changes[-1].sequence + 1 if changes else first, oldest, head)

    def wait(self, after: int, timeout: float | None = None) -> int:
        """Block until a change above `after` is committed; the head by then. `TimedOut` if there is none in time."""
        if not self._manifest.read_only:
            return self._manifest.writer.when_change(after).result(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while (head := self.head()) <= after:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut("timed out waiting for a change", hint="it may still come", seconds=timeout)
            time.sleep(POLL_SECONDS)
        return head

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
        self._manifest.submit([AcknowledgeChanges(self._id(cursor), upto)]).result()
        self._trim_behind()

    def drop(self, cursor: int | str) -> None:
        """The subscriber leaves for good."""
        self._manifest.submit([DropCursor(self._id(cursor))]).result()
        self._trim_behind()

    def follow(
        self,
        name: str,
        *,
        start: Start | int = Start.OLDEST,
        limit: int = PAGE_RECORDS,
        timeout: float | None = None,
    ) -> Generator[ChangeRecord, None, None]:
        """Iterate over changes for ever (or until none comes for `timeout` seconds), resuming where this name stopped.

        A change is acknowledged after the body of the loop has finished with it, page by page and when the loop ends; one
        whose body raised or left the loop is seen again.

            for change in store.manifest.feed.follow("my-app"):
                process(change)
        """
        try:
            position = self.cursor(name).acked_sequence
        except UnknownCursor:
            position = self.register(start, name=name).acked_sequence
        done = acked = position
        try:
            while True:
                page = self.fetch(name, limit, after=done)
                for change in page.changes:
                    yield change
                    done = change.sequence
                if done > acked:
                    self.acknowledge(name, done)
                    acked = done
                if page.at_head:
                    try:
                        self.wait(max(done, page.head_sequence), timeout)
                    except TimedOut:
                        return
        finally:
            if done > acked:
                self.acknowledge(name, done)

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def maintain(self) -> None:
        """Give up cursors whose policy says so, keep the log within retention, trim. The owner calls this now and then."""
        now = self._manifest.clock.now_ms()
        for cursor in self.cursors():
            if cursor.state is CursorState.LIVE and (reason := _why_given_up(cursor, now)):
                emit(
                    "warning", "feed.cursor_lost", cursor=cursor.name or cursor.cursor_id, lag=cursor.lag, reason=reason
                )
                self._manifest.submit([LoseCursor(cursor.cursor_id, reason)]).result()
        if not any(cursor.state is CursorState.LIVE for cursor in self.cursors()):
            with self._manifest.read() as txn:
                keep_from = self._retained_from(txn, now)
            if keep_from:
                self._manifest.submit([RetainChanges(keep_from)]).result()
        self._trim_behind()

    def _retained_from(self, txn: ReadTxn, now_ms: int) -> int:
        """The first sequence that retention keeps; 0 if it keeps all."""
        oldest, head = txn.feed_bounds()
        horizon, used, keep = now_ms - int(self._settings.retain_seconds * 1000), 0, head + 1
        for key, raw in txn.raw_scan_back(CHANGE_LOG):
            sequence = CHANGE_LOG.key.unpack(key)[0]
            used += len(key) + len(raw)
            if sequence < oldest or used > self._settings.retain_bytes:
                break
            if CHANGE_LOG.codec.decode(raw).committed_at_ms < horizon:
                break
            keep = sequence
        return keep if keep > oldest else 0

    def has_tail(self) -> bool:
        """Whether rows below the oldest sequence are still on disk."""
        with self._manifest.read() as txn:
            first = next(txn.raw_scan(CHANGE_LOG), None)
            return first is not None and CHANGE_LOG.key.unpack(first[0])[0] < txn.feed_bounds()[0]

    def _trim_behind(self) -> None:
        """Have the rest of the tail removed, if there is any (rule 4)."""
        if not self.has_tail():
            return
        with self._trim_lock:
            if self._trimmer is None or not self._trimmer.is_alive():
                self._trimmer = threading.Thread(target=self._trim, name="quire-feed-trimmer", daemon=True)
                self._trimmer.start()

    def _trim(self) -> None:
        try:
            while self.has_tail():
                self._manifest.submit([TrimChanges()]).result()
        except QuireError as error:
            emit("debug", "feed.trim_stopped", error=str(error))  # closed, or unusable: the next open goes on

    def _id(self, cursor: int | str) -> int:
        if isinstance(cursor, int):
            return cursor
        with self._manifest.read() as txn:
            return _find(txn, cursor)[0]


def _why_given_up(cursor: CursorInfo, now_ms: int) -> str:
    if cursor.ttl_ms and cursor.lag and now_ms - cursor.updated_at_ms > cursor.ttl_ms:
        return f"no acknowledgement for {(now_ms - cursor.updated_at_ms) / 1000:.0f} s, allowed are {cursor.ttl_ms / 1000:g} s"
    if cursor.max_lag and cursor.lag > cursor.max_lag:
        return f"{cursor.lag:,} changes behind, allowed are {cursor.max_lag:,}"
    return ""


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


def _info(cursor_id: int, row: CursorRecord, bounds: tuple[int, int]) -> CursorInfo:
    return CursorInfo(
        cursor_id,
        row.name,
        row.state,
        row.acked_sequence,
        *bounds,
        row.created_at_ms,
        row.updated_at_ms,
        row.ttl_ms,
        row.max_lag,
        row.lost_reason,
    )
