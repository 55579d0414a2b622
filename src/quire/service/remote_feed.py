"""The change feed of an owner, over a channel: `client.feed` has the API of `store.feed`.

Rules
  1. Waiting uses long polls. The owner bounds each poll, however long the caller waits in total.
  2. Acknowledging is idempotent and only moves a cursor forward (K4), so it may be repeated.

Threads: any. Raises what the feed raises (`UnknownCursor`, `CursorLost`, `OutOfRange`, `TimedOut`) and what a channel raises.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import suppress

from quire.core.errors import TimedOut, UnknownCursor
from quire.manifest.change import ChangePage, ChangeRecord, CursorInfo, Start
from quire.manifest.feed import PAGE_RECORDS, followed
from quire.manifest.records import CursorState
from quire.service import messages as m
from quire.service.channel import ATTEMPT_SECONDS, Channel

POLL_SECONDS = 15.0
"""The longest wait of one long poll."""

Databases = Iterable[int | str] | int | str


class RemoteFeed:
    """The change feed of a remote store. See the rules above."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def store_id(self) -> str:
        """Return the id of the store that the feed belongs to."""
        return self._channel.call("feed.store_id", m.Nothing())

    def head(self) -> int:
        """Return the sequence of the last committed change; 0 before the first one."""
        return self._channel.call("feed.head", m.Nothing())

    def cursors(self) -> list[CursorInfo]:
        """Return every cursor, lost ones included."""
        return self._channel.call("feed.cursors", m.Nothing())

    def cursor(self, cursor: int | str) -> CursorInfo:
        """Return a cursor by id or by name."""
        return self._channel.call("feed.cursor", m.OfCursor(cursor))

    def lag(self) -> dict[str | int, int]:
        """Return the number of changes that each live cursor has not acknowledged, by its name, or by its id if it has none."""
        return {info.name or info.cursor_id: info.lag for info in self.cursors() if info.state is CursorState.LIVE}

    def register(
        self, start: Start | int = Start.OLDEST, *, name: str = "", ttl_seconds: float = 0, max_lag: int = 0
    ) -> CursorInfo:
        """Create a cursor. `start` is clamped to the retained changes; `ttl_seconds` and `max_lag` are off at 0."""
        first = start.value if isinstance(start, Start) else start
        return self._channel.call("feed.register", m.Register(first, name, float(ttl_seconds), max_lag))

    def fetch(
        self,
        cursor: int | str,
        limit: int = PAGE_RECORDS,
        *,
        after: int | None = None,
        databases: Databases | None = None,
        tables: Iterable[str] | str | None = None,
    ) -> ChangePage:
        """Return at most `limit` changes after the cursor's position, or after `after`, a position that the caller keeps."""
        wanted = (databases,) if isinstance(databases, int | str) else None if databases is None else tuple(databases)
        named = (tables,) if isinstance(tables, str) else None if tables is None else tuple(tables)
        return self._channel.call("feed.fetch", m.Fetch(cursor, limit, after, wanted, named))

    def acknowledge(self, cursor: int | str, upto: int) -> None:
        """Mark every change up to `upto` as processed. The cursor only moves forward; acknowledging again has no effect."""
        self._channel.call("feed.acknowledge", m.Acknowledge(cursor, upto))

    def resume(self, cursor: int | str) -> CursorInfo:
        """Make a lost cursor live again, at its old position or at the oldest change that is retained."""
        return self._channel.call("feed.resume", m.OfCursor(cursor))

    def drop(self, cursor: int | str) -> None:
        """Drop a cursor: changes are no longer retained for it."""
        self._channel.call("feed.drop", m.OfCursor(cursor))

    def wait(self, after: int, timeout: float | None = None) -> int:
        """Block until a change above `after` is committed and return the head; raise `TimedOut` if none comes (rule 1)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            rest = POLL_SECONDS if deadline is None else min(max(deadline - time.monotonic(), 0.0), POLL_SECONDS)
            head: int = self._channel.call(
                "feed.wait",
                m.Wait(after, rest),
                timeout=rest + self._channel.call_seconds,
                attempt_seconds=rest + ATTEMPT_SECONDS,
            )
            if head > after:
                return head
            if deadline is not None and time.monotonic() >= deadline:
                raise TimedOut(
                    "timed out waiting for a change", hint="wait again: it may still arrive", seconds=timeout
                )

    def follow(
        self,
        name: str,
        *,
        start: Start | int = Start.OLDEST,
        after: int | None = None,
        limit: int = PAGE_RECORDS,
        timeout: float | None = None,
        databases: Databases | None = None,
        tables: Iterable[str] | str | None = None,
    ) -> Generator[ChangeRecord, None, None]:
        """Iterate over changes forever (or until none comes for `timeout` seconds), resuming where this name stopped.

        A change is acknowledged after the body of the loop has finished with it, page by page and when the loop ends.
        """
        names = tuple(tables) if tables is not None and not isinstance(tables, str) else tables
        wanted = databases if databases is None or isinstance(databases, int | str) else tuple(databases)

        def fetch(position: int) -> ChangePage:
            return self.fetch(name, limit, after=position, databases=wanted, tables=names)

        def enter() -> int:
            return self._enter(name, start if after is None else after)

        return followed(self, name, enter, fetch, after=after, limit=limit, timeout=timeout)

    def _enter(self, name: str, start: Start | int) -> int:
        with suppress(UnknownCursor):
            return self.cursor(name).acked_sequence
        return self.register(start, name=name).acked_sequence
