"""Streams: each has its own connection from a client's first request to its last; HTTP clients resume one by its baton.

A *baton* is base64 of (stream, turn, signature). The signature is an HMAC with a key that is generated when the server starts,
so a baton cannot be forged; the turn is used once, so a repeated request is refused and not executed twice. A baton belongs to
the database and the caller for which it was issued. A cursor's baton is issued with its first line, while the stream is still
working: a request with it waits for the cursor's end (`libsql` sends one as soon as it has the first line).

Limits: streams in total and per database. An unused stream is closed after `idle_seconds`. A stream that holds a transaction
open and does nothing is rolled back after `transaction_seconds`: its lock is free, and its next request gets an error. A client
that has vanished is one that does nothing, or whose socket has closed.

Threads: the event loop's. Raises `StreamRefused`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ctypes
import hmac
import secrets
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from quire.core.events import emit
from quire.service.sql.pool import SqlConnection, SqlTarget
from quire.service.sql.session import SqlSession, StoredSqls

_BATON = struct.Struct(">QQ")
_SIGNATURE_BYTES = 20
assert _BATON.size == 16

INVALID, REUSED, EXPIRED, TOO_MANY = "BATON_INVALID", "BATON_REUSED", "STREAM_EXPIRED", "TOO_MANY_STREAMS"
RELEASE_SECONDS = 1.0
"""A stream that is idle for this long between two requests releases its cached pages: hundreds of streams may be idle."""


class StreamRefused(Exception):
    """The request belongs to no stream of its caller, or there are too many streams."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Limits of the streams of a server."""

    streams_max: int = 512
    per_database_max: int = 256
    idle_seconds: float = 10.0
    transaction_seconds: float = 5.0


class SqlStream:
    """A stream. Created by `StreamRegistry.open`."""

    __slots__ = (
        "caller",
        "connection",
        "has_pages",
        "is_closed",
        "is_in_transaction",
        "is_lasting",
        "lock",
        "number",
        "session",
        "sqls",
        "target",
        "turn",
        "used_at",
    )

    def __init__(self, number: int, target: SqlTarget, caller: object, now: float) -> None:
        # constant after construction
        self.number = number
        self.target = target
        self.caller = caller
        self.is_lasting = False
        """Whether it belongs to a WebSocket: it ends with that, not by being idle."""
        self.sqls = StoredSqls()
        self.lock = asyncio.Lock()
        """Held during a request."""
        # guarded by the lock
        self.connection: SqlConnection | None = None
        self.session: SqlSession | None = None
        self.is_in_transaction = False
        self.has_pages = False
        """Whether its connection may have cached pages."""
        # used by the registry only
        self.turn = 0
        """The turn of the issued baton; 0 if there is none."""
        self.used_at = now
        self.is_closed = False

    @property
    def keeps_nothing(self) -> bool:
        """Whether its client would not notice if a new stream replaced it."""
        is_clean = self.connection is None or self.connection.is_clean
        return not self.lock.locked() and not self.is_in_transaction and not len(self.sqls) and is_clean


StreamEnd = Callable[[SqlStream], Awaitable[None]]
"""Ends a stream, or part of its state, in a thread. REQUIRES the stream's lock."""


class StreamRegistry:
    """All streams of a server."""

    def __init__(
        self,
        limits: StreamLimits,
        *,
        close_stream: StreamEnd,
        roll_back: StreamEnd,
        release: StreamEnd,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # constant after construction
        self.limits = limits
        self._close_stream = close_stream
        self._roll_back = roll_back
        self._release = release
        self._clock = clock
        self._key = secrets.token_bytes(32)
        # used in the event loop only
        self._streams: dict[int, SqlStream] = {}
        self._of_database: dict[str, int] = {}
        self._closing: set[asyncio.Future[None]] = set()
        self._has_freed = False
        """Whether a connection has released pages since the last `sweep` returned memory."""
        self.refused = 0
        self.expired = 0
        self.rolled_back = 0

    def __len__(self) -> int:
        return len(self._streams)

    # ── opening and closing ───────────────────────────────────────────────────────────────────────────────────────────
    def open(self, target: SqlTarget, caller: object, *, is_lasting: bool = False) -> SqlStream:
        """Open a stream, without a connection yet."""
        if self._of_database.get(target.name, 0) >= self.limits.per_database_max:
            self._make_room(target.name)
        elif len(self._streams) >= self.limits.streams_max:
            self._make_room(None)
        count = self._of_database.get(target.name, 0)
        number = secrets.randbits(63) | 1
        stream = self._streams[number] = SqlStream(number, target, caller, self._clock())
        stream.is_lasting = is_lasting
        self._of_database[target.name] = count + 1
        return stream

    def _make_room(self, database: str | None) -> None:
        """Close the longest idle stream that keeps nothing: many clients never close theirs, and do not need the baton of a
        stream without a transaction."""
        idle = (
            stream
            for stream in self._streams.values()
            if database in (None, stream.target.name) and not stream.is_lasting and stream.keeps_nothing
        )
        stream = min(idle, key=lambda stream: stream.used_at, default=None)
        if stream is None:
            self.refused += 1
            which = "the server" if database is None else "this database"
            raise StreamRefused(f"{which} has too many open streams: close some, or try again later", TOO_MANY)
        self.expired += 1
        self._forget(stream)
        # Not awaited, so that `open` stays synchronous. No request finds the stream any more.
        task = asyncio.ensure_future(self._close_stream(stream))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, stream: SqlStream) -> None:
        """Roll back, and return the connection to the pool. REQUIRES the stream's lock."""
        if stream.is_closed:
            return
        # Before the rollback, which runs in a thread: a request that arrives meanwhile finds no stream, instead of
        # one whose connection is about to be given to another client.
        self._forget(stream)
        await self._close_stream(stream)

    def _forget(self, stream: SqlStream) -> None:
        stream.is_closed = True
        self._streams.pop(stream.number, None)
        name = stream.target.name
        self._of_database[name] -= 1
        if not self._of_database[name]:
            del self._of_database[name]

    # ── batons ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def baton(self, stream: SqlStream) -> str:
        """Issue the baton for the next request; the previous one becomes invalid."""
        stream.turn = secrets.randbits(63) | 1  # never 0, which means none
        body = _BATON.pack(stream.number, stream.turn)
        return base64.urlsafe_b64encode(body + self._signature(body)).decode("ascii").rstrip("=")

    def _signature(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")[:_SIGNATURE_BYTES]

    def resume(self, baton: str, target: SqlTarget, caller: object) -> SqlStream:
        """Return the stream of a baton, which is used up. The stream's lock may be held: the caller waits for it."""
        number, turn = self._read(baton)
        stream = self._streams.get(number)
        if stream is None:
            self.refused += 1
            limits = self.limits
            idle = f"{limits.idle_seconds:g} s, in a transaction {limits.transaction_seconds:g} s"
            raise StreamRefused(f"the stream is closed: it was idle ({idle}), or the server restarted", EXPIRED)
        if stream.turn != turn:
            self.refused += 1
            raise StreamRefused("the baton was already used: each response has the baton for the next request", REUSED)
        if stream.target != target or stream.caller != caller:
            self.refused += 1
            raise StreamRefused("the baton belongs to another database or caller", INVALID)
        # After the checks: a refused request does not use up the baton. Before the request runs: a repeat is refused
        # meanwhile.
        stream.turn = 0
        return stream

    def _read(self, baton: str) -> tuple[int, int]:
        try:
            raw = base64.b64decode(baton + "=" * (-len(baton) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        body = raw[: _BATON.size]
        if len(raw) != _BATON.size + _SIGNATURE_BYTES or not hmac.compare_digest(
            raw[_BATON.size :], self._signature(body)
        ):
            self.refused += 1
            raise StreamRefused("the baton was not issued by this server", INVALID)
        number, turn = _BATON.unpack(body)
        return number, turn

    # ── expiry ────────────────────────────────────────────────────────────────────────────────────────────────────────
    def touch(self, stream: SqlStream) -> None:
        """Record the end of a request: the stream is idle from now on."""
        stream.used_at = self._clock()
        stream.has_pages = True

    async def sweep(self) -> None:
        """Close idle streams, roll back idle transactions, and release cached pages."""
        now = self._clock()
        for stream in [*self._streams.values()]:
            if stream.lock.locked():
                continue
            try:
                await self._sweep_stream(stream, now - stream.used_at)
            except Exception as error:  # of this stream: the transactions of the next ones are still rolled back
                emit("error", "service.bug", action="sql.sweep", error=error)
        if self._has_freed:
            self._has_freed = False
            await asyncio.to_thread(_return_freed_memory)

    async def _sweep_stream(self, stream: SqlStream, idle_seconds: float) -> None:
        limits = self.limits
        if stream.is_in_transaction and idle_seconds >= limits.transaction_seconds:
            await self._end_transaction(stream)
        elif idle_seconds >= limits.idle_seconds and not stream.is_lasting:
            self.expired += 1
            async with stream.lock:
                await self.close(stream)
        elif idle_seconds >= RELEASE_SECONDS and stream.has_pages:
            async with stream.lock:
                stream.has_pages = False
                await self._release(stream)
                self._has_freed = True

    async def _end_transaction(self, stream: SqlStream) -> None:
        """Roll back a transaction whose client does nothing. Over HTTP the stream ends with it."""
        self.rolled_back += 1
        emit("warning", "sql.transaction_timeout", database=stream.target.name)
        async with stream.lock:
            if stream.is_closed:
                return
            if not stream.is_lasting:
                await self.close(stream)
                return
            await self._roll_back(stream)

    async def close_all(self) -> None:
        """Close every stream, with a rollback: the server stops."""
        for stream in [*self._streams.values()]:
            async with stream.lock:
                await self.close(stream)
        if self._closing:
            await asyncio.wait(self._closing)


def _return_freed_memory() -> None:
    """Return memory that SQLite has freed to the system: glibc keeps it as long as anything after it in the heap is used."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
