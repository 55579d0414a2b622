"""The change feed of an owner, for its clients: `client.feed` does what `store.feed` does.

Rules
  1. Waiting is by long polls that the owner bounds; however long the caller waits, each of them is short.
  2. Acknowledging is idempotent and moves forward only (K4): it may be repeated.

Threads: any. Raises what the feed raises (`UnknownCursor`, `CursorLost`, `OutOfRange`, `TimedOut`), and what a channel raises.
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
"""One long poll."""

Databases = Iterable[int | str] | int | str


class RemoteFeed:
    """See the rules above."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def store_id(self) -> str:
        """Whose feed this is."""
        return self._channel.call("feed.store_id", m.Nothing())

    def head(self) -> int:
        """The last sequence that was committed; 0 before the first."""
        return self._channel.call("feed.head", m.Nothing())

    def cursors(self) -> list[CursorInfo]:
        """Every cursor, lost ones included."""
        return self._channel.call("feed.cursors", m.Nothing())

    def cursor(self, cursor: int | str) -> CursorInfo:
        """A cursor by id or by name."""
        return self._channel.call("feed.cursor", m.OfCursor(cursor))

    def lag(self) -> dict[str | int, int]:
        """How many changes wait for each live cursor, by its name, or by its id if it has none."""
        return {info.name or info.cursor_id: info.lag for info in self.cursors() if info.state is CursorState.LIVE}

    def register(
        self, start: Start | int = Start.OLDEST, *, name: str = "", ttl_seconds: float = 0, max_lag: int = 0
    ) -> CursorInfo:
        """A new cursor. `start` is clamped to what is retained; the policies are off at 0."""
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
        """At most `limit` changes after the cursor's position, or after `after`: a position the caller has stored itself."""
        wanted = (databases,) if isinstance(databases, int | str) else None if databases is None else tuple(databases)
        named = (tables,) if isinstance(tables, str) else None if tables is None else tuple(tables)
        return self._channel.call("feed.fetch", m.Fetch(cursor, limit, after, wanted, named))

    def acknowledge(self, cursor: int | str, upto: int) -> None:
        """Everything up to `upto` has been processed. Moves forward only; acknowledging again is harmless."""
        self._channel.call("feed.acknowledge", m.Acknowledge(cursor, upto))

    def resume(self, cursor: int | str) -> CursorInfo:
        """Let a cursor that was lost go on where it stood, or with the oldest change that is kept."""
        return self._channel.call("feed.resume", m.OfCursor(cursor))

    def drop(self, cursor: int | str) -> None:
        """The subscriber leaves for good."""
        self._channel.call("feed.drop", m.OfCursor(cursor))

    def wait(self, after: int, timeout: float | None = None) -> int:
        """Block until a change above `after` is committed; the head by then. `TimedOut` if there is none in time (rule 1)."""
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
                raise TimedOut("timed out waiting for a change", hint="it may still come", seconds=timeout)

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
        """Iterate over changes for ever (or until none comes for `timeout` seconds), resuming where this name stopped.

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
