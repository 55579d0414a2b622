"""Runs jobs from a command: in threads, with progress on the terminal, stopped cleanly by Ctrl-C.

Threads: the work runs in other threads and the main thread watches it. An interrupt stops the worker, which returns its jobs to
the queue without counting a failure, and the store is closed properly; a second interrupt does not wait for that. The owner
runs all jobs of a store, so a job whose attempt has risen since the work began was run here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from quire.cli.formatting import visible
from quire.cli.lookup import names_of
from quire.cli.prompts import on_terminal
from quire.core import errors
from quire.core.clock import SystemClock
from quire.core.errors import InternalError, QuireError, Unavailable
from quire.manifest import tables as t
from quire.manifest.jobqueue import Job
from quire.manifest.ops.base import Counter
from quire.manifest.records import TERMINAL_JOB_STATES, JobKind, JobState

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from quire.manifest.store import ManifestStore
    from quire.store.store import Store

QUIET_SECONDS = 0.5
LOOK_SECONDS = 0.1
CLOCK = SystemClock()


class JobSession:
    """A store on which a command runs jobs, and the jobs that were outstanding at construction."""

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
        """Return the jobs that were run since construction, in their current state, except those whose rows were removed."""
        jobs = []
        with self.store.manifest.read() as txn:
            older = ((job_id, txn.job(job_id)) for job_id in sorted(self._attempts))
            newer = ((key[0], record) for key, record in txn.scan(t.JOB_QUEUE, start=(self._last_id + 1,)))
            for job_id, record in (*older, *newer):
                if record is not None and record.attempt > self._attempts.get(job_id, 0):
                    jobs.append(Job(job_id, record, txn.get(t.JOB_LEASES, job_id)))
        return jobs

    # ── running ───────────────────────────────────────────────────────────────────────────────────────────────────────
    def watch(self, work: Callable[[], object]) -> None:
        """Call `work` in a thread and show its progress. Raises what it raises."""
        failure: list[BaseException] = []
        over = threading.Event()  # not `join`: after an interrupted join the thread counts as ended

        def body() -> None:
            try:
                work()
            except BaseException as error:
                failure.append(error)
            finally:
                over.set()

        threading.Thread(target=body, name="quire-work", daemon=True).start()
        with Display(self.store.manifest) as display:
            try:
                while not over.wait(LOOK_SECONDS):
                    display.refresh()
            except KeyboardInterrupt:
                display.stopping()
                self.store.worker.stop()
                over.wait()
                raise
        if failure:
            raise failure[0]

    def serve(self, stop: threading.Event) -> None:
        """Run jobs as they become due until `stop` is set; then return running jobs to the queue."""
        worker = self.store.worker
        worker.start()
        with Display(self.store.manifest) as display:
            try:
                while not stop.is_set():  # not `wait`: the signal handler that sets it runs in this thread
                    time.sleep(LOOK_SECONDS)
                    display.refresh()
            finally:
                display.stopping()
                worker.stop()

    def run(self, kind: JobKind, db_id: int, runner: str = "") -> Job:
        """Run a job of an exclusive kind for a database now, the outstanding one or a new one, and return it finished."""
        job_id = self.store.heavy.start(kind, db_id, runner=runner)
        self.watch(lambda: self.store.worker.run_or_wait(job_id))
        return self.store.manifest.jobs.get(job_id)


def failure_of(job: Job, what: str) -> QuireError | None:
    """Return the error of a job that failed or waits for a retry, `None` if it succeeded. It has the type that was raised."""
    if job.state is JobState.SUCCEEDED or (job.state is JobState.PENDING and not job.record.error):
        return None
    name, _, text = job.record.error.partition(": ")
    kind = getattr(errors, name, InternalError if text else Unavailable)  # texts of the queue itself name no error type
    group = kind if isinstance(kind, type) and issubclass(kind, QuireError) else InternalError
    reason = (text or name).partition("; ")[0]
    if job.state is JobState.CANCELLED:
        return errors.Conflict(f"{what} was cancelled", hint="run it again", job_id=job.job_id)
    if job.state is JobState.PENDING:
        hint = f"the job will be retried: run `quire jobs work`, or see `quire jobs show {job.job_id}`"
    else:
        hint = f"`quire jobs show {job.job_id}` shows the full error; `quire jobs retry {job.job_id}` runs it again"
    return group(f"{what} failed: {reason}", hint=hint, job_id=job.job_id)


# ── progress on the terminal ──────────────────────────────────────────────────────────────────────────────────────────
class Bars:
    """Progress bars on stderr, removed at the end. Does nothing without a terminal. Use it as a context manager.

    Called with (title, done, total) it is a `quire.sqlite.importing.Progress`: a bar that is full is removed.
    """

    def __init__(self, *, in_bytes: bool = False) -> None:
        self._in_bytes = in_bytes
        self._wanted = on_terminal()
        self._closing = ExitStack()
        self._progress: Progress | None = None
        self._bars: dict[object, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def __call__(self, title: str, done: int, total: int) -> None:
        self.update(title, title, done, total)
        if done >= total:
            self.keep(self._bars.keys() - {title})

    def update(self, key: object, title: str, done: int, total: int) -> None:
        """Show the progress of a bar, creating it if necessary. `total` is 0 if it is not known."""
        if self._wanted:
            progress = self._progress or self._start()
            if key not in self._bars:
                self._bars[key] = progress.add_task(visible(title), total=None)
            progress.update(self._bars[key], completed=done, total=total or None)

    def keep(self, keys: Collection[object]) -> None:
        """Remove all other bars."""
        for key in [key for key in self._bars if key not in keys]:
            assert self._progress is not None, "bars are made after it"
            self._progress.remove_task(self._bars.pop(key))

    def _start(self) -> Progress:
        from rich import progress as rich
        from rich.console import Console

        amount = (rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn())
        columns = (
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(bar_width=20),
            *(amount if self._in_bytes else (rich.MofNCompleteColumn(), rich.TimeElapsedColumn())),
            rich.TimeRemainingColumn(),
        )
        self._progress = rich.Progress(*columns, console=Console(stderr=True), transient=True)
        return self._closing.enter_context(self._progress)


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show one bar; yield the function to call with (done, total)."""
    with Bars() as bars:
        yield lambda done, total: bars.update(title, title, done, total)


class Display:
    """Shows bars for the running jobs, after `QUIET_SECONDS`. Use it as a context manager."""

    def __init__(self, manifest: ManifestStore) -> None:
        self._manifest = manifest
        self._began = CLOCK.monotonic()
        self._bars = Bars()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.__exit__()

    def refresh(self) -> None:
        """Update the bars to the jobs that are running now."""
        if not on_terminal() or CLOCK.monotonic() - self._began < QUIET_SECONDS:
            return
        running = self._manifest.jobs.jobs(JobState.IN_FLIGHT)
        self._bars.keep({job.job_id for job in running})
        for job in running:
            lease = job.lease
            self._bars.update(job.job_id, self._title(job), lease.done if lease else 0, lease.total if lease else 0)

    def stopping(self) -> None:
        """Report that running jobs are being stopped."""
        if on_terminal():
            self._bars.__exit__()
            sys.stderr.write("stopping: running jobs return to the queue …\n")
            sys.stderr.flush()

    def _title(self, job: Job) -> str:
        name = names_of(self._manifest, [job]).get(job.db_id, "")
        return f"{job.kind.name.lower()} {name or (f'#{job.db_id}' if job.db_id else '')}".strip()
