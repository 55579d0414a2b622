"""A writer lane: one-shot pipelines of many clients that write to one database share a connection and one sync per group.

Most programs send a single INSERT, or a batch that begins and commits. On separate connections, each would be a thread that
waits for its turn to write, and one more that waits for the disk. Here one thread runs the waiting pipelines as a *group*, one
after the other, without waiting for the disk in between; then one sync makes them all durable, and only then are they answered.
The next group runs during that sync, as the page engine allows (P7).

Each pipeline is independent: it has the rights of its caller, its own transactions and its own errors, and a transaction that
it leaves open is rolled back before the next one. A pipeline that finds the database locked by another connection waits, with
its group, in the database's queue, and gives up when its own time is over.

What is on disk
  group is run       appended to the WAL, not synced: a crash loses some or all of its last transactions, none was answered
  group is synced    every transaction of the group is durable, and every one that it has read: a pipeline that finds its key
                     repeats one that may not be durable yet
  answers            are sent after the sync

Threads: the event loop's, except for `_run_group` and `_sync`, which run one at a time in threads of the pool.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from quire.core.errors import Overloaded
from quire.durable.failpoints import hit
from quire.pages.transaction import PageGuard
from quire.service.sql.pool import ConnectionPool, SqlConnection, SqlTarget
from quire.service.sql.session import SqlSession, Work
from quire.service.sql.threads import LockQueue, LockWait, SqlThreads, advance, give_up
from quire.sqlite.connect import newest_commit

GROUP_MAX = 64
"""The most pipelines in a group: later ones wait for all of them."""
WAITING_MAX = 4_096
"""The most pipelines of one database that may wait; more are refused."""
SYNCS_MAX = 2
"""The most groups whose sync is in progress: more would only cause separate syncs (P7)."""

Pipeline = Callable[[SqlSession], Work[bytes]]
"""What a one-shot does with a session; its result is the encoded answer."""


class _LaneJob:
    __slots__ = ("answer", "deadline", "error", "future", "newest_commit", "pipeline", "target")

    def __init__(self, target: SqlTarget, pipeline: Pipeline, future: asyncio.Future[bytes], deadline: float) -> None:
        self.target = target
        self.pipeline = pipeline
        self.future = future
        self.deadline = deadline
        self.answer = b""
        self.error: BaseException | None = None
        self.newest_commit: PageGuard | None = None
        """The newest commit of its database after it ran."""


class WriterLane:
    """The writer of one database, for one-shots."""

    def __init__(
        self,
        pool: ConnectionPool,
        threads: SqlThreads,
        queue: LockQueue,
        wait_seconds: float,
    ) -> None:
        # constant after construction
        self._pool = pool
        self._threads = threads
        self._queue = queue
        self._wait_seconds = wait_seconds
        # used in the event loop only
        self._waiting: deque[_LaneJob] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._syncs: set[asyncio.Task[None]] = set()
        # used by the thread that runs a group; between groups, by the event loop
        self._connection: SqlConnection | None = None
        self._work: Work[bytes] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no pipeline waits or runs."""
        return self._runner is None and not self._waiting and not self._syncs

    async def run(self, target: SqlTarget, pipeline: Pipeline) -> bytes:
        """Run a one-shot of a caller with the rights of `target`; return its answer when it is durable."""
        if len(self._waiting) >= WAITING_MAX:
            raise Overloaded(
                "too many writes to this database are queued", hint="send fewer at once, or larger batches"
            )
        loop = asyncio.get_running_loop()
        job = _LaneJob(target, pipeline, loop.create_future(), loop.time() + self._wait_seconds)
        self._waiting.append(job)
        if self._runner is None:
            self._runner = loop.create_task(self._serve())
        return await job.future  # the pipeline is run even if its caller has left

    async def _serve(self) -> None:
        try:
            while self._waiting:
                while len(self._syncs) >= SYNCS_MAX:  # before the group is taken: it grows meanwhile
                    await asyncio.wait(self._syncs, return_when=asyncio.FIRST_COMPLETED)
                if len(self._queue):  # streams wait for the lock: they go first
                    await self._queue.wait(0.02)
                group = [self._waiting.popleft() for _ in range(min(len(self._waiting), GROUP_MAX))]
                await self._run(group)
        finally:
            self._runner = None
            self._queue.wake()

    async def _run(self, group: list[_LaneJob]) -> None:
        done = 0
        wait: LockWait | None = None
        while done < len(group):
            is_over = wait is not None and not await wait.pause()
            try:
                run = partial(self._run_group, group[done:], is_over)
                count = await self._threads.call(run, self._queue.share)
            except BaseException as error:  # the name has no database any more: none of these was run
                for job in group[done:]:
                    job.error = error
                break
            if count:  # the pipeline at which it stopped has its own deadline
                done, wait = done + count, None
                self._queue.wake()
            if done < len(group) and wait is None:
                wait = LockWait(self._queue, group[done].deadline)
        task = asyncio.get_running_loop().create_task(self._sync_and_answer(group))
        self._syncs.add(task)
        task.add_done_callback(self._syncs.discard)

    async def _sync_and_answer(self, group: list[_LaneJob]) -> None:
        failure: BaseException | None = None
        # One for each handle of the database: it may have been opened anew between two pipelines, after a failed sync.
        commits = {commit.wal: commit for job in group if (commit := job.newest_commit) is not None}
        try:
            if commits:
                await self._threads.call(partial(_sync, commits.values()), waits=True)
        except BaseException as error:
            failure = error
        for job in group:
            if job.future.done():
                continue
            if (problem := job.error or failure) is not None:
                job.future.set_exception(problem)
                job.future.exception()  # marks it as retrieved: the caller may have left
            else:
                job.future.set_result(job.answer)

    # ── in a thread ───────────────────────────────────────────────────────────────────────────────────────────────────
    def _run_group(self, group: list[_LaneJob], is_over: bool) -> int:
        """Run pipelines, one after the other, up to one that needs a lock; return how many are done. With `is_over` the first
        one's time to wait is over."""
        step = give_up if is_over else advance
        if (
            self._connection is not None
            and self._work is None
            and self._pool.find(group[0].target) != self._connection.key[0]
        ):
            self.close()  # the name now belongs to another database
        for number, job in enumerate(group):
            try:
                connection = self._connection or self._open(job.target)
            except Exception as error:  # not raised: earlier pipelines of the group may have committed
                job.error = error
                continue
            if self._work is None:
                # The connection was opened for another caller, whose rights this one does not have.
                self._pool.lend(connection, job.target)
                self._work = job.pipeline(self._pool.session_on(connection))
            try:
                is_done, value = step(self._work)
                if not is_done:
                    return number
                job.answer = value
                connection.runner.reset()
            except Exception as error:
                job.error = error
                connection.is_broken = True
            self._work, step = None, advance
            job.newest_commit = newest_commit(connection.runner.connection)
            if not connection.is_clean:
                self._connection = None
                connection.close()
        hit("sql.lane.run")
        return len(group)

    def _open(self, target: SqlTarget) -> SqlConnection:
        connection = self._connection = self._pool.take_unsynced(target)
        return connection

    async def finish(self) -> None:
        """Wait until every pipeline is answered."""
        while not self.is_idle:
            await asyncio.wait([task for task in (self._runner, *self._syncs) if task is not None])

    def close(self) -> None:
        """Close the connection. REQUIRES that the lane is not in use."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _sync(commits: Iterable[PageGuard]) -> None:
    """Wait until commits, and those before them, are durable here and, where the mode requires it, in the archive."""
    for commit in commits:
        commit.result()
    hit("sql.lane.synced")
