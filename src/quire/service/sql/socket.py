"""Hrana over one WebSocket: many streams, numbered requests, answers as they are ready.

Requests of one stream are executed in order; those of different streams concurrently. Stored texts belong to the socket and are
resolved when a request arrives: closing a text does not affect earlier requests. When the socket ends, for whatever reason, all
its streams are rolled back and closed. Each request is authorized by the token of the last hello, even on a stream that was
opened under an earlier one.

A cursor has its stream to itself until it is done or closed. A cursor from which nothing is fetched for the idle time of a
stream (in a transaction: the idle time of a transaction) is closed, and the next fetch gets an error: neither a lock nor a
version is held for a client that only keeps its socket open.

Limits: the streams and cursors of a socket, its requests in progress (more are not read: the client waits), the size of a
message (by the server), and the size of a fetch's answer.

Threads: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from quire.core.errors import QuireError
from quire.core.events import emit
from quire.service.grants import Grant
from quire.service.sql import protocol as p
from quire.service.sql.pool import SqlTarget
from quire.service.sql.service import SqlService
from quire.service.sql.session import StoredSqls
from quire.service.sql.streams import SqlStream, StreamRefused
from quire.sqlite.statements import StatementFailed

STREAMS_MAX = 128
CURSORS_MAX = 128
REQUESTS_MAX = 64
FETCH_BYTES = 1 << 20
"""A fetch ends with the entry that exceeds this, even if the client requested more."""
PROTOCOLS = ("hrana3", "hrana2", "hrana1")
"""In order of preference; `hrana1` if the client offers none."""


Admit = Callable[[str | None], tuple[SqlTarget, Grant]]
"""Returns the database, with whether it may be written to, and the grant of a token. Raises `QuireError`."""


class _SocketCursor:
    """A cursor and its stream, whose lock it holds from when it is opened until it is done."""

    __slots__ = ("entries", "holds_stream", "is_done", "lines", "lock", "lost", "stream", "timer")

    def __init__(self, stream: SqlStream, entries: AsyncGenerator[bytes, None]) -> None:
        self.stream = stream
        self.entries = entries
        self.lock = asyncio.Lock()
        """Held while it is opened, fetched from or closed: its requests are executed one after the other."""
        self.lines: deque[bytes] = deque()
        self.holds_stream = False
        self.is_done = False
        self.lost: StatementFailed | None = None
        """Why it was closed, if not by its client."""
        self.timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Cancel the idle timer: the cursor is in use."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class HranaSocket:
    """The state of one socket."""

    def __init__(
        self,
        service: SqlService,
        admit: Admit,
        send: Callable[[str], Awaitable[None]],
        on_limit: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_limit` counts refused requests by the name of the limit that was reached."""
        # constant after construction
        self._on_limit = on_limit
        self._service = service
        self._admit = admit
        self._send = send
        self._places = asyncio.Semaphore(REQUESTS_MAX)
        # used in the event loop only
        self._target: SqlTarget | None = None
        self._grant = Grant.NOTHING
        self._sqls = StoredSqls()
        self._streams: dict[int, SqlStream] = {}
        self._unclosed: set[SqlStream] = set()
        """`_streams`, and those that are being closed: the end of the socket may interrupt that."""
        self._cursors: dict[int, _SocketCursor] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def receive(self, text: str) -> None:
        """Handle a message. Raises `QuireError` if it cannot be decoded: the socket is then closed."""
        message = p.read_message(text)
        if isinstance(message, p.HelloMessage):
            await self._hello(message)
            return
        # Here, in the task that reads the socket: a client with too many requests in progress is not read from until
        # one of them is answered.
        await self._places.acquire()
        number = message.request_id
        try:
            answer = self._begin(message.request)
        except StatementFailed as failed:
            self._places.release()
            await self._reply(p.ResponseError(number, p.WireError.of(failed)))
            return
        self._add_task(self._finish(number, answer))

    def _add_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def is_admitted(self) -> bool:
        """Whether its client has sent a hello with a valid token."""
        return self._target is not None

    async def _hello(self, message: p.HelloMessage) -> None:
        try:
            target, self._grant = self._admit(message.jwt)
        except QuireError as error:
            self._target = None
            await self._reply(p.HelloError(p.WireError(str(error), "AUTH_FAILED")))
            return
        self._target = target
        await self._reply(p.HelloOk())

    async def _finish(self, number: int, answer: Callable[[], Awaitable[p.WireResponse]]) -> None:
        try:
            reply: p.ResponseOk | p.ResponseError = p.ResponseOk(number, await answer())
        except (StatementFailed, StreamRefused) as failed:
            extended = failed.extended_code if isinstance(failed, StatementFailed) else ""
            reply = p.ResponseError(number, p.WireError(str(failed), failed.code, extended))
        except QuireError as error:
            reply = p.ResponseError(number, p.WireError(str(error), type(error).__name__))
        except Exception as error:
            emit("error", "sql.bug", where="socket", error=error)
            reply = p.ResponseError(
                number, p.WireError(f"a bug at the owner: {type(error).__name__}", "INTERNAL_ERROR")
            )
        finally:
            self._places.release()
        await self._reply(reply)

    async def _reply(self, message: msgspec.Struct) -> None:
        with suppress(Exception):  # the socket is gone: its reader notices, and closes everything
            await self._send(p.encode(message).decode("utf-8"))

    # ── requests ──────────────────────────────────────────────────────────────────────────────────────────────────────
    def _begin(self, request: p.SocketRequest) -> Callable[[], Awaitable[p.WireResponse]]:
        """Do the part that depends on the order of messages; return a function for the rest."""
        if self._target is None:
            raise StatementFailed("send hello first, with a valid token", "AUTH_FAILED")
        if self._grant.is_expired:
            raise StatementFailed("the token has expired: send hello with a new one", "AUTH_FAILED")
        match request:
            case p.OpenStreamRequest(stream_id=stream_id):
                self._open_stream(stream_id, self._target)
                return partial(_plain, "open_stream")
            case p.CloseStreamRequest(stream_id=stream_id):
                return partial(self._close_stream, self._streams.pop(stream_id, None))
            case p.StoreSqlRequest(sql_id=sql_id, sql=sql):
                self._sqls.store(sql_id, sql)
                return partial(_plain, "store_sql")
            case p.CloseSqlRequest(sql_id=sql_id):
                self._sqls.close(sql_id)
                return partial(_plain, "close_sql")
            case p.OpenCursorRequest(stream_id=stream_id, cursor_id=cursor_id, batch=batch):
                cursor = self._new_cursor(self._stream(stream_id), cursor_id, resolved_batch(batch, self._sqls))
                return partial(self._open_cursor, cursor)
            case p.FetchCursorRequest(cursor_id=cursor_id, max_count=max_count):
                return partial(self._fetch, cursor_id, max_count)
            case p.CloseCursorRequest(cursor_id=cursor_id):
                return partial(self._close_cursor, cursor_id)
        return partial(self._on_stream, self._stream(request.stream_id), resolved(request, self._sqls))

    def _open_stream(self, stream_id: int, target: SqlTarget) -> None:
        if stream_id in self._streams:
            raise StatementFailed(f"stream {stream_id} is already open", "STREAM_EXISTS")
        if len(self._streams) >= STREAMS_MAX:
            self._on_limit("sql_streams")
            raise StatementFailed(f"a socket can have at most {STREAMS_MAX} streams", "TOO_MANY_STREAMS")
        try:
            stream = self._service.streams.open(target, self._grant, is_lasting=True)
        except StreamRefused as refused:
            self._on_limit("sql_streams")
            raise StatementFailed(str(refused), refused.code) from None
        self._streams[stream_id] = stream
        self._unclosed.add(stream)

    def _stream(self, stream_id: int) -> SqlStream:
        stream = self._streams.get(stream_id)
        if stream is None:
            raise StatementFailed(f"stream {stream_id} is not open", "STREAM_NOT_FOUND")
        assert isinstance(stream.caller, Grant), "see `_open_stream`"
        # The stream's connection keeps the rights of the hello before it was opened, and what it has attached.
        if not (
            self._grant.may(stream.target.name, write=stream.target.writable)
            and self._grant.may_attach_all_of(stream.caller)
        ):
            raise StatementFailed("the token of the last hello does not allow this stream: open another", "AUTH_FAILED")
        return stream

    async def _close_stream(self, stream: SqlStream | None) -> p.WireResponse:
        if stream is not None:
            await self._end_cursors(stream)
            async with stream.lock:
                await self._service.streams.close(stream)
            self._unclosed.discard(stream)
        return p.PlainResponse("close_stream")

    async def _on_stream(self, stream: SqlStream, request: p.StreamRequest) -> p.WireResponse:
        async with stream.lock:
            return await self._service.run(stream, lambda session: session.respond(request))

    # ── cursors ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def _new_cursor(self, stream: SqlStream, cursor_id: int, batch: p.WireBatch) -> _SocketCursor:
        """Reserve the cursor's number at once, while the cursor still waits for its stream."""
        if cursor_id in self._cursors:
            raise StatementFailed(f"cursor {cursor_id} is already open", "CURSOR_EXISTS")
        if len(self._cursors) >= CURSORS_MAX:
            self._on_limit("sql_cursors")
            raise StatementFailed(f"a socket can have at most {CURSORS_MAX} cursors", "TOO_MANY_CURSORS")
        cursor = self._cursors[cursor_id] = _SocketCursor(stream, self._service.cursor(stream, batch))
        return cursor

    async def _open_cursor(self, cursor: _SocketCursor) -> p.WireResponse:
        async with cursor.lock:
            await cursor.stream.lock.acquire()
            cursor.holds_stream = True
            self._watch(cursor)
        return p.PlainResponse("open_cursor")

    async def _fetch(self, cursor_id: int, max_count: int) -> p.WireResponse:
        cursor = self._cursors.get(cursor_id)
        if cursor is None:
            raise StatementFailed(f"cursor {cursor_id} is not open", "CURSOR_NOT_FOUND")
        async with cursor.lock:
            cursor.stop_timer()
            if cursor.lost is not None:
                raise cursor.lost
            try:
                return await self._fetched(cursor, max_count)
            finally:
                if not cursor.is_done:
                    self._watch(cursor)

    async def _fetched(self, cursor: _SocketCursor, max_count: int) -> p.WireResponse:
        entries: list[msgspec.Raw] = []
        size = 0
        while len(entries) < max_count and size < FETCH_BYTES:
            if not cursor.lines and not await self._read_on(cursor):
                break
            line = cursor.lines.popleft()
            size += len(line)
            entries.append(msgspec.Raw(line))
        return p.FetchCursorResponse(entries, cursor.is_done and not cursor.lines)

    async def _read_on(self, cursor: _SocketCursor) -> bool:
        """Read the next rows; return False if there is none."""
        if cursor.is_done:
            return False
        try:
            lines = await anext(cursor.entries)
        except BaseException as error:
            await self._end(cursor)
            if isinstance(error, StopAsyncIteration):
                return False
            raise
        cursor.lines.extend(lines.splitlines())
        return True

    async def _end(self, cursor: _SocketCursor) -> None:
        """Close a cursor and release its stream. REQUIRES the cursor's lock."""
        cursor.stop_timer()
        if not cursor.is_done:
            cursor.is_done = True
            try:
                await cursor.entries.aclose()
            finally:
                if cursor.holds_stream:
                    cursor.stream.lock.release()

    def _watch(self, cursor: _SocketCursor) -> None:
        """Start the idle timer, which closes the cursor unless it is used in time."""
        session, limits = cursor.stream.session, self._service.streams.limits
        is_idle = session is None or session.is_autocommit
        seconds = limits.idle_seconds if is_idle else limits.transaction_seconds
        cursor.timer = asyncio.get_running_loop().call_later(seconds, self._on_timeout, cursor, seconds)

    def _on_timeout(self, cursor: _SocketCursor, seconds: float) -> None:
        cursor.timer = None
        self._add_task(self._give_up(cursor, seconds))

    async def _give_up(self, cursor: _SocketCursor, seconds: float) -> None:
        async with cursor.lock:
            if cursor.is_done or cursor.timer is not None:  # it was used meanwhile
                return
            cursor.lost = StatementFailed(
                f"the cursor was closed: nothing was fetched for {seconds:g} s", "CURSOR_EXPIRED"
            )
            cursor.lines.clear()
            self._service.streams.expired += 1
            await self._end(cursor)

    async def _close_cursor(self, cursor_id: int) -> p.WireResponse:
        cursor = self._cursors.pop(cursor_id, None)
        if cursor is not None:
            async with cursor.lock:
                await self._end(cursor)
        return p.PlainResponse("close_cursor")

    async def _end_cursors(self, stream: SqlStream) -> None:
        for cursor_id, cursor in [*self._cursors.items()]:
            if cursor.stream is stream:
                self._cursors.pop(cursor_id, None)
                async with cursor.lock:
                    await self._end(cursor)

    async def close(self) -> None:
        """Roll back everything: the socket is gone."""
        for task in [*self._tasks]:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for stream in [*self._unclosed]:
            await self._close_stream(stream)
        self._streams.clear()


async def _plain(kind: str) -> p.WireResponse:
    return p.PlainResponse(kind)


def resolved_statement(stmt: p.WireStatement, sqls: StoredSqls) -> p.WireStatement:
    """Return a statement with its text instead of the number of a stored one."""
    if stmt.sql_id is None:
        return stmt
    return msgspec.structs.replace(stmt, sql=sqls.get(stmt.sql_id), sql_id=None)


def resolved_batch(batch: p.WireBatch, sqls: StoredSqls) -> p.WireBatch:
    """Resolve stored texts in a batch."""
    if all(step.stmt.sql_id is None for step in batch.steps):
        return batch
    return p.WireBatch([p.BatchStep(resolved_statement(step.stmt, sqls), step.condition) for step in batch.steps])


def resolved(request: p.StreamRequest, sqls: StoredSqls) -> p.StreamRequest:
    """Resolve stored texts in a request."""
    match request:
        case p.ExecuteRequest(stmt=stmt):
            return p.ExecuteRequest(resolved_statement(stmt, sqls))
        case p.BatchRequest(batch=batch):
            return p.BatchRequest(resolved_batch(batch, sqls))
        case p.SequenceRequest(sql_id=int(sql_id)):
            return p.SequenceRequest(sqls.get(sql_id))
        case p.DescribeRequest(sql_id=int(sql_id)):
            return p.DescribeRequest(sqls.get(sql_id))
    return request
