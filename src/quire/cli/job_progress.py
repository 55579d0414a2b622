"""Running jobs from a command: in threads, with progress on the terminal, stopped cleanly by Ctrl-C.

Terms
  bench     a store that somebody works for, with what was outstanding when the work began

Rules
  1. The work is in threads, the main thread watches: so an interrupt stops the worker, which puts its jobs back, unfailed,
     and the store is closed in order. A second interrupt does not wait for that.
  2. Progress is on stderr, only on a terminal, and only for what takes longer than `QUIET_SECONDS`: it is gone at the end.
     What a job says of itself is what the manifest says (`job_leases`): at most a second old.
  3. Whoever owns the store runs all of its jobs: those whose attempt has moved since the work began were run here.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from quire.cli.command import on_terminal
from quire.cli.formatting import visible
from quire.cli.lookup import names_of
from quire.core import errors
from quire.core.clock import SystemClock
from quire.core.errors import InternalError, QuireError, Unavailable
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Counter
from quire.manifest.records import TERMINAL_JOB_STATES, JobKind, JobState

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from quire.jobs.worker import Worker
    from quire.store.store import Store

QUIET_SECONDS = 0.5
LOOK_SECONDS = 0.1
CLOCK = SystemClock()


def worker_of(store: Store) -> Worker:
    """The worker of a store that this process owns."""
    return store.worker


class Bench:
    """A store, and what was outstanding when this was made (rule 3)."""

    def __init__(self, store: Store) -> None:
        self.store = store
        with store.manifest.read() as txn:
            self._last_id = txn.next_id(Counter.JOB) - 1
            jobs = {
                key[1]: txn.job(key[1])
                for state in JobState
                if state not in TERMINAL_JOB_STATES
                for key, _ in txn.scan(t.JOBS_BY_STATE, state)
            }
        self._attempts = {job_id: record.attempt for job_id, record in jobs.items() if record is not None}

    def ran(self) -> list[Job]:
        """The jobs that were worked on since, as they are now; those that were forgotten meanwhile are not among them."""
        found = []
        with self.store.manifest.read() as txn:
            older = ((job_id, txn.job(job_id)) for job_id in sorted(self._attempts))
            newer = ((key[0], record) for key, record in txn.scan(t.JOB_QUEUE, start=(self._last_id + 1,)))
            for job_id, record in (*older, *newer):
                if record is not None and record.attempt > self._attempts.get(job_id, 0):
                    found.append(Job(job_id, record, txn.get(t.JOB_LEASES, job_id)))
        return found

    # ── working ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def watch(self, work: Callable[[], object]) -> None:
        """Do the work in a thread and watch it (rules 1 and 2); raises what it raises."""
        failure: list[BaseException] = []
        over = (
            threading.Event()
        )  # waiting for the thread itself is not safe: an interrupted join believes that it has ended

        def body() -> None:
            try:
                work()
            except BaseException as error:
                failure.append(error)
            finally:
                over.set()

        threading.Thread(target=body, name="quire-work", daemon=True).start()
        with Display(self.store) as display:
            try:
                while not over.wait(LOOK_SECONDS):
                    display.look()
            except KeyboardInterrupt:
                display.stopping()
                worker_of(self.store).stop()
                over.wait()
                raise
        if failure:
            raise failure[0]

    def serve(self, stop: threading.Event) -> None:
        """Run jobs as they come, until `stop` is set; then put back what is running, and return."""
        worker = worker_of(self.store)
        worker.start()
        with Display(self.store) as display:
            try:
                while not stop.is_set():  # not `wait`: the handler that sets it runs in this very thread
                    time.sleep(LOOK_SECONDS)
                    display.look()
            finally:
                display.stopping()
                worker.stop()

    def run(self, kind: JobKind, db_id: int, runner: str = "") -> Job:
        """The job of an exclusive kind for a database, run now: the outstanding one, else a new one. As it ended."""
        jobs, worker = self.store.manifest.jobs, worker_of(self.store)
        job_id = self.store.heavy.start(kind, db_id, runner=runner)

        def work() -> None:
            if not worker.run(job_id):
                while jobs.get(job_id).state is JobState.IN_FLIGHT:  # the owner's upkeep was quicker
                    time.sleep(LOOK_SECONDS)

        self.watch(work)
        return jobs.get(job_id)


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of what they do otherwise; the second time they do that.

    What is ignored stays ignored: whoever starts a command with `nohup … &` wants it to go on when others are interrupted.
    """
    stop = threading.Event()

    def note(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure_of(job: Job, what: str) -> QuireError | None:
    """The error that a job ended with, or waits after; `None` if it succeeded. Its group is that of what was raised."""
    if job.state is JobState.SUCCEEDED or (job.state is JobState.PENDING and not job.record.error):
        return None
    name, _, text = job.record.error.partition(": ")
    kind = getattr(errors, name, InternalError if text else Unavailable)  # the queue's own words name no error
    group = kind if isinstance(kind, type) and issubclass(kind, QuireError) else InternalError
    told = (text or name).partition("; ")[0]
    if job.state is JobState.CANCELLED:
        return errors.Conflict(f"{what} was cancelled", hint="run it again", job_id=job.job_id)
    if job.state is JobState.PENDING:
        hint = f"the job is tried again: `quire jobs work`, or see `quire jobs show {job.job_id}`"
    else:
        hint = f"`quire jobs show {job.job_id}` has the whole error; `quire jobs retry {job.job_id}` tries once more"
    return group(f"{what} failed: {told}", hint=hint, job_id=job.job_id)


# ── what people see meanwhile ─────────────────────────────────────────────────────────────────────────────────────────
class Display:
    """Bars of the jobs that are running (rule 2). Use it as a context manager."""

    def __init__(self, store: Any) -> None:
        """Of `store` only the manifest is looked at."""
        self._store = store
        self._began = CLOCK.monotonic()
        self._wanted = on_terminal()
        self._progress: Progress | None = None
        self._bars: dict[int, TaskID] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def look(self) -> None:
        """Show what is running now."""
        if not self._wanted or CLOCK.monotonic() - self._began < QUIET_SECONDS:
            return
        running = {each.job_id: each for each in self._store.manifest.jobs.jobs(JobState.IN_FLIGHT)}
        if not running and self._progress is None:
            return
        progress = self._progress or self._start()
        for job_id in self._bars.keys() - running.keys():
            progress.remove_task(self._bars.pop(job_id))
        for job_id, job in running.items():
            if job_id not in self._bars:
                self._bars[job_id] = progress.add_task(self._title(job), total=None)
            if job.lease is not None:
                progress.update(self._bars[job_id], completed=job.lease.done, total=job.lease.total or None)

    def stopping(self) -> None:
        """Say that the end is awaited."""
        if self._wanted:
            self._closing.close()
            sys.stderr.write("stopping: running jobs return to the queue …\n")
            sys.stderr.flush()

    def _title(self, job: Job) -> str:
        with self._store.manifest.read() as txn:
            name = names_of(txn).get(job.db_id, "")
        return visible(f"{job.kind.name.lower()} {name or (f'#{job.db_id}' if job.db_id else '')}".strip())

    def _start(self) -> Progress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        return self._closing.enter_context(self._progress)


Told = Callable[[int, int], None]
"""`told(done, total)`; total 0 if it is not known."""


@contextmanager
def bar(title: str) -> Iterator[Told]:
    """Gives what is to be told how far the work is. An interrupt comes out of the work itself."""
    if not on_terminal():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
