"""SQL for other programs, independent of any protocol: streams and one-shots on the databases of a store.

Terms
  one-shot   a pipeline without a baton that closes its stream. It runs on a connection of the pool; one that writes runs in its
             database's lane (`write_groups.py`)
  stream     requests of one client on one connection (`streams.py`)

Rights are checked before a request arrives here: a target states whether it may be written to.

Threads: those of the event loop that created it; SQL runs in `SqlThreads`.
Raises `QuireError` for errors of a database (it does not exist, say), `StreamRefused` for streams; errors of statements are
part of answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from quire.core.events import emit
from quire.core.settings import ServiceSettings
from quire.durable.failpoints import hit
from quire.service.api import StoreApi
from quire.service.sql import protocol as p
from quire.service.sql.idempotent_pipelines import keyed_pipeline
from quire.service.sql.pool import ConnectionPool, SqlTarget
from quire.service.sql.session import AnswerLimits, SqlSession, Work
from quire.service.sql.streams import SqlStream, StreamLimits, StreamRegistry
from quire.service.sql.threads import LockQueue, LockWait, SqlThreads, advance, drive, give_up
from quire.service.sql.write_groups import WriterLane
from quire.sqlite.statements import first_word

T = TypeVar("T")

SWEEP_SECONDS = 0.5
WRITING = frozenset({"insert", "update", "delete", "replace", "create", "drop", "alter"})
"""First words of statements that go through the lane. A heuristic: a missed statement only waits for its own sync."""


@dataclass(frozen=True, slots=True)
class SqlFigures:
    """Counters since the server started, and the current number of streams."""

    streams_now: int
    connections_opened: int
    one_shots: int
    lane_writes: int
    refused: int
    expired: int
    rolled_back: int


class SqlService:
    """Runs one-shots and streams. Created in the event loop that uses it."""

    def __init__(self, store: StoreApi, on_too_large: Callable[[], None] = lambda: None) -> None:
        """`on_too_large` counts answers and rows that exceed their limits."""
        settings = store.settings.service
        # constant after construction
        self._store = store
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._threads = SqlThreads(settings.sql_threads)
        # One thread less than there are: some SQL cannot be interrupted, and other databases must still find a
        # thread.
        self._database_threads = max(min(settings.sql_database_threads, settings.sql_threads - 1), 1)
        limits = AnswerLimits(rows_max=settings.sql_answer_rows_max, bytes_max=settings.sql_answer_bytes_max)
        self.pool = ConnectionPool(
            store,
            limits,
            default_database=settings.sql_default_database,
            statement_seconds=settings.sql_statement_seconds,
            on_too_large=on_too_large,
        )
        self.streams = StreamRegistry(
            _stream_limits(settings),
            close_stream=self._close_connection,
            roll_back=self._roll_back,
            release=self._release,
        )
        # used in the event loop only
        self._lanes: dict[str, WriterLane] = {}
        self._queues: WeakValueDictionary[str, LockQueue] = WeakValueDictionary()
        self._recent_queues: dict[str, LockQueue] = {}
        """Keeps the queues of databases in use alive: otherwise each request would create a queue that has no waiters."""
        self._sweeper = self._loop.create_task(self._sweep())
        self._one_shots = 0
        self._lane_writes = 0

    def figures(self) -> SqlFigures:
        """Return the counters."""
        streams = self.streams
        return SqlFigures(
            streams_now=len(streams),
            connections_opened=self.pool.opened,
            one_shots=self._one_shots,
            lane_writes=self._lane_writes,
            refused=streams.refused,
            expired=streams.expired,
            rolled_back=streams.rolled_back,
        )

    # ── one-shots ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def one_shot(self, target: SqlTarget, requests: Sequence[p.StreamRequest], *, key: str = "") -> bytes:
        """Run a one-shot; return its encoded answer. With a key it is executed once, however often it is sent."""
        self._one_shots += 1
        pipeline = partial(run_pipeline, requests=requests)
        if key and target.writable:
            now_ms = self._store.manifest.clock.now_ms
            return await self._in_lane(target, partial(keyed_pipeline, key=key, requests=requests, now_ms=now_ms))
        if target.writable and _is_write(requests):
            return await self._in_lane(target, pipeline)
        return await self._alone(target, pipeline)

    async def in_session(self, target: SqlTarget, function: Callable[[SqlSession], Work[T]]) -> T:
        """Run a work on a connection of the pool; a transaction that it leaves open is rolled back."""
        self._one_shots += 1
        return await self._alone(target, function)

    async def _in_lane(self, target: SqlTarget, pipeline: Callable[[SqlSession], Work[bytes]]) -> bytes:
        lane = self._lanes.get(target.name)
        if lane is None:
            lane = self._lanes[target.name] = WriterLane(
                self.pool, self._threads, self.queue(target.name), self._settings.sql_lock_seconds
            )
        self._lane_writes += 1
        return await lane.run(target, pipeline)

    async def _alone(self, target: SqlTarget, function: Callable[[SqlSession], Work[T]]) -> T:
        queue = self.queue(target.name)
        try:
            return await drive(self._threads, self._once(target, function), queue, self._settings.sql_lock_seconds)
        finally:
            if target.writable:
                queue.wake()

    def _once(self, target: SqlTarget, function: Callable[[SqlSession], Work[T]]) -> Work[T]:
        connection = self.pool.take(target)
        try:
            return (yield from function(self.pool.session_on(connection)))
        finally:
            self.pool.give(connection)

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def run(self, stream: SqlStream, function: Callable[[SqlSession], Work[T]]) -> T:
        """Run a work on a stream. REQUIRES the stream's lock."""
        queue = self.queue(stream.target.name)
        try:
            work = self._on(stream, function)
            return await drive(self._threads, work, queue, self._settings.sql_lock_seconds)
        finally:
            self._used(stream, queue)

    def _used(self, stream: SqlStream, queue: LockQueue) -> None:
        self.streams.touch(stream)
        # Otherwise it may still hold the lock, and the waiter would only be refused again.
        if not stream.is_in_transaction:
            queue.wake()

    def _on(self, stream: SqlStream, function: Callable[[SqlSession], Work[T]]) -> Work[T]:
        session = self._session(stream)
        session.begin_answer()
        try:
            return (yield from function(session))
        finally:
            stream.is_in_transaction = not session.is_autocommit

    def _session(self, stream: SqlStream) -> SqlSession:
        if stream.session is None:
            stream.connection = self.pool.take(stream.target)
            stream.session = self.pool.session_on(stream.connection, stream.sqls)
        return stream.session

    async def cursor(self, stream: SqlStream, batch: p.WireBatch) -> AsyncGenerator[bytes]:
        """Run a batch and yield its lines, a fetch at a time. REQUIRES the stream's lock; the caller closes the iterator."""
        queue = self.queue(stream.target.name)
        work = self._cursor_on(stream, batch)
        wait: LockWait | None = None
        step: Callable[..., tuple[bool, bytes | None]] = advance
        try:
            while True:
                is_done, lines = await self._threads.call(partial(step, work), queue.share)
                if is_done:
                    return
                step = advance
                if lines is None:
                    wait = wait or LockWait(queue, self._loop.time() + self._settings.sql_lock_seconds)
                    step = advance if await wait.pause() else give_up
                    continue
                wait = None
                yield lines
        finally:
            # In a thread, like all calls of SQLite: closing the work ends its statement.
            await self._threads.call(work.close)
            self._used(stream, queue)

    def _cursor_on(self, stream: SqlStream, batch: p.WireBatch) -> Work[None]:
        session = self._session(stream)
        try:
            yield from session.cursor(batch)  # type: ignore[misc]  # yields bytes and None; `cursor` distinguishes them
        finally:
            stream.is_in_transaction = not session.is_autocommit

    def queue(self, name: str) -> LockQueue:
        """Return the queue for a database's lock."""
        queue = self._recent_queues.get(name)
        if queue is not None:
            return queue
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = LockQueue(self._database_threads)
        self._recent_queues[name] = queue
        return queue

    async def _close_connection(self, stream: SqlStream) -> None:
        connection, stream.connection, stream.session = stream.connection, None, None
        stream.is_in_transaction = False
        if connection is not None:
            await self._threads.call(partial(self.pool.give, connection))
            self.queue(stream.target.name).wake()

    async def _roll_back(self, stream: SqlStream) -> None:
        if stream.session is not None:
            seconds = self._settings.sql_transaction_seconds
            await self._threads.call(partial(stream.session.runner.abandon, seconds))
        stream.is_in_transaction = False
        self.queue(stream.target.name).wake()

    async def _release(self, stream: SqlStream) -> None:
        if stream.session is not None:
            await self._threads.call(stream.session.runner.release)

    # ── lifecycle ─────────────────────────────────────────────────────────────────────────────────────────────────────
    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self._sweep_once()
            except Exception as error:  # if the loop ended, idle transactions would keep their locks
                emit("error", "service.bug", action="sql.sweep", error=error)

    async def _sweep_once(self) -> None:
        await self.streams.sweep()
        await self._threads.call(self.pool.sweep)
        self._recent_queues.clear()
        for name, lane in [*self._lanes.items()]:
            if lane.is_idle:
                del self._lanes[name]
                await self._threads.call(lane.close)

    async def close(self) -> None:
        """Roll back all transactions, and stop the threads."""
        self._sweeper.cancel()
        # Before the lanes: a transaction that a stream holds open would keep a lane waiting for the lock.
        await self.streams.close_all()
        for lane in self._lanes.values():
            await lane.finish()
            await self._threads.call(lane.close)
        await self._threads.call(self.pool.close)
        self._threads.close()


def run_pipeline(session: SqlSession, requests: Sequence[p.StreamRequest]) -> Work[bytes]:
    """Run a one-shot's requests and return the encoded answer."""
    results = []
    for request in requests:
        results.append((yield from session.answer(request)))
        hit("sql.pipeline_request")
    return p.encode(p.PipelineAnswer(None, None, results))


def is_one_shot(body: p.PipelineBody) -> bool:
    """Return whether a pipeline closes the stream that it opens."""
    return body.baton is None and bool(body.requests) and isinstance(body.requests[-1], p.CloseRequest)


def _is_write(requests: Sequence[p.StreamRequest]) -> bool:
    """Return whether a one-shot is a single statement that writes, or a batch with one."""
    if len(requests) != 2:
        return False
    match requests[0]:
        case p.ExecuteRequest(stmt=stmt):
            return first_word(stmt.sql or "") in WRITING
        case p.BatchRequest(batch=batch):
            return any(first_word(step.stmt.sql or "") in WRITING for step in batch.steps)
    return False


def _stream_limits(settings: ServiceSettings) -> StreamLimits:
    return StreamLimits(
        streams_max=settings.sql_streams_max,
        per_database_max=settings.sql_database_streams_max,
        idle_seconds=settings.sql_idle_seconds,
        transaction_seconds=settings.sql_transaction_seconds,
    )
