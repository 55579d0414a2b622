"""Commands about jobs: ls, show, retry, cancel, work.

Rules
  1. `ls` and `show` need a reader; the others need the owner, because the owner runs the jobs.
  2. `work` ends when no job is due (`--once`), or on Ctrl-C or SIGTERM; a job that is running then returns to the queue, and
     its attempt does not count as a failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import INTERRUPTED, OK, PROBLEMS
from quire.cli.formatting import count_of, in_words, pairs, size, span
from quire.cli.job_progress import JobSession
from quire.cli.lookup import Log, any_database, log_to, names_of
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note, Report, until_interrupted
from quire.core.clock import moment
from quire.core.errors import IllegalTransition, InvalidInput
from quire.core.ids import ArtifactKey, ArtifactKind
from quire.core.json_values import plain
from quire.manifest.records import JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire.cli.command import Cli
    from quire.manifest.jobqueue import Job
    from quire.manifest.store import ManifestStore
    from quire.store.store import Store

JobId = Annotated[int, Argument(metavar="ID", min=1, help="The job's id.")]

STATES = {"in_flight": "running", "failed_permanent": "failed"}
"""State → a shorter name for it. Both are accepted."""

LEASE_FIELDS = ("worker", "expires_at_ms", "heartbeat_at_ms", "done", "total")

SHOWN_MAX = 200
"""Most jobs that `work` lists when it ends: one that ran for a week has many."""


group = Group("jobs")


# ── listing ───────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("ls", group, example="quire jobs ls --state failed --db shop")
def ls(
    cli: Cli,
    state: Annotated[str, Option(metavar="STATE", help="pending, running, succeeded, failed or cancelled.")] = "",
    database: Annotated[str, Option("--db", metavar="DB", help="Only jobs of this database.")] = "",
    limit: Annotated[int, Option(min=0, metavar="N", help="Only the newest N; 0 for all.")] = 50,
) -> Listing:
    """List jobs, oldest first."""
    wanted = _state_named(state) if state else None
    with cli.reader() as manifest:
        now = manifest.clock.now_ms()
        with manifest.read() as txn:
            only = any_database(txn, database) if database else None
        jobs = manifest.jobs.jobs(wanted, db_id=only, newest=limit + 1 if limit else 0)
        shown = jobs[-limit:] if limit else jobs
        names = names_of(manifest, shown)
    of_kind = f" {state}" if state else ""
    return Listing(
        columns=[">id", "kind", "database", "state", "created", "what"],
        rows=[ListingRow(_cells(job, names, now), job_json(job, names)) for job in shown],
        empty=f"no{of_kind} jobs",
        closing="there are older jobs: `--limit 0` lists all" if len(shown) < len(jobs) else "",
    )


def _state_named(text: str) -> JobState:
    states = {state.name.lower(): state for state in JobState}
    for name, shorter in STATES.items():
        states[shorter] = states[name]
    state = states.get(text.lower().replace("-", "_"))
    if state is None:
        listed = ", ".join(STATES.get(member.name.lower(), member.name.lower()) for member in JobState)
        raise InvalidInput("unknown job state", hint=f"states: {listed}", state=text)
    return state


def _cells(job: Job, names: dict[int, str], now: int) -> list[str]:
    age = f"{span(now - job.record.created_at_ms)} ago"
    return [str(job.job_id), job.kind.name.lower(), _database(job, names), state_text(job), age, summary(job, now)]


def state_text(job: Job) -> str:
    """Return the state of a job in one word."""
    name = job.state.name.lower()
    return STATES.get(name, name)


def _database(job: Job, names: dict[int, str]) -> str:
    return names.get(job.db_id) or (f"#{job.db_id}" if job.db_id else "-")


def summary(job: Job, now: int) -> str:
    """Summarise a job in one line: its progress, result or error, or how long it waits."""
    record = job.record
    if job.lease is not None:
        done, total = job.lease.done, job.lease.total
        return f"{done:,} of {total:,}" if total else f"{done:,} done" if done else "started"
    words = []
    if job.state.name == "PENDING" and record.not_before_ms > now:
        failed = f", failed {_times(record.failures)}" if record.failures else ""
        words.append(f"due in {span(record.not_before_ms - now)}{failed}")
    if record.error:
        words.append(record.error)
    if (result := _decoded(record.result)) is not None:
        words.append(result_text(result))
    return "; ".join(words) or "-"


def result_text(result: Any) -> str:
    """Format the result of a job, without values that are zero or empty.

    >>> result_text({"slots": 3, "left": 0, "freed_bytes": 12_288, "full": False}), result_text({"complete": False})
    ('slots 3, freed 12.0 KiB', 'not complete')
    """
    if not isinstance(result, dict):
        return in_words(result)
    telling = {
        key: value
        for key, value in result.items()
        # Nested values are only in JSON. Of what is false, only that a job is not complete says something.
        if (value is False and key == "complete") or (value not in (0, "", []) and not isinstance(value, dict))
    } or result
    return ", ".join(_answered(key.replace("_", " "), value) for key, value in telling.items())


def _answered(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, int):
        return f"{name.removesuffix(' bytes')} {size(value) if name.endswith('bytes') else f'{value:,}'}"
    return f"{name} {in_words(value)}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


@command("show", group, example="quire jobs show 12")
def show(cli: Cli, job_id: JobId) -> Facts:
    """Show a job: its state, attempts, progress, result or error."""
    with cli.reader() as manifest:
        job = manifest.jobs.get(job_id)
        now = manifest.clock.now_ms()
        names = names_of(manifest, [job])
    return Facts(lines=_facts(job, names, now), data=job_json(job, names))


def _facts(job: Job, names: dict[int, str], now: int) -> list[tuple[str, str]]:
    record, lease = job.record, job.lease
    of = f" of {_database(job, names)}" if job.db_id else ""
    failures = record.failures
    failed = f"{failures:,} of {record.max_attempts}" if record.max_attempts else _times(failures)
    lines = [
        ("job", f"{job.job_id}: {job.kind.name.lower()}{of}"),
        ("state", state_text(job)),
        ("created", _when(record.created_at_ms, now)),
        ("attempts", f"{record.attempt:,}" + (f", failed {failed}" if failures else "")),
    ]
    if record.started_at_ms:
        lines.append(("started", _when(record.started_at_ms, now)))
    if record.finished_at_ms:
        took = f", after {(record.finished_at_ms - record.started_at_ms) / 1000:.1f} s" if record.started_at_ms else ""
        lines.append(("ended", f"{_when(record.finished_at_ms, now)}{took}"))
    elif lease is None and record.not_before_ms > now:
        lines.append(("due", f"{moment(record.not_before_ms)}, in {span(record.not_before_ms - now)}"))
    if lease is not None:
        total = f" of {lease.total:,}" if lease.total else ""
        lines.append(("worker", f"{lease.worker}, last heartbeat {span(now - lease.heartbeat_at_ms)} ago"))
        lines.append(("progress", f"{lease.done:,}{total}"))
    if (artifact := _artifact(job)) is not None:
        lines.append(("artifact", in_words(artifact)))
    payload = _decoded(record.payload)
    if payload is not None:
        lines.append(("payload", pairs(plain(payload)) if isinstance(payload, dict) else str(plain(payload))))
    if (result := _decoded(record.result)) is not None:
        lines.append(("result", result_text(result)))
    if record.error:
        lines.append(("error", record.error))
    return lines


def _when(at_ms: int, now: int) -> str:
    return f"{moment(at_ms)}, {span(now - at_ms)} ago"


def _artifact(job: Job) -> ArtifactKey | None:
    if job.record.artifact is None:
        return None

    origin, kind, number, generation, delta = job.record.artifact
    return ArtifactKey(origin, ArtifactKind(kind), number, generation, delta)


def _decoded(packed: bytes) -> Any:
    """Decode a job's payload or result; return the bytes themselves if they are not msgpack."""
    if not packed:
        return None

    try:
        return msgspec.msgpack.decode(packed)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return packed


def job_json(job: Job, names: dict[int, str]) -> dict[str, Any]:
    """Return a job as JSON, with its lease if a worker is running it."""
    record, lease = job.record, job.lease
    return {
        "job_id": job.job_id,
        "kind": job.kind.name.lower(),
        "db_id": job.db_id,
        "database": names.get(job.db_id, ""),
        "state": job.state.name.lower(),
        "created_at_ms": record.created_at_ms,
        "not_before_ms": record.not_before_ms,
        "started_at_ms": record.started_at_ms,
        "finished_at_ms": record.finished_at_ms,
        "attempt": record.attempt,
        "failures": record.failures,
        "max_attempts": record.max_attempts,
        "error": record.error,
        "payload": plain(_decoded(record.payload)),
        "result": plain(_decoded(record.result)),
        "artifact": plain(_artifact(job)),
        "lease": None if lease is None else {name: getattr(lease, name) for name in LEASE_FIELDS},
    }


# ── retry and cancel ──────────────────────────────────────────────────────────────────────────────────────────────────
@command("retry", group, example="quire jobs retry 12")
def retry(cli: Cli, job_id: JobId) -> Note:
    """Retry a job that failed or was cancelled.

    The retry is a new job with its own id; the old one stays on record.
    """
    with cli.owner() as store:
        job = store.manifest.jobs.get(job_id)
        if state_text(job) not in ("failed", "cancelled"):
            ended = job.record.finished_at_ms > 0
            raise IllegalTransition(
                "only a failed or cancelled job can be retried",
                hint=f"`quire jobs show {job_id}` shows how it ended" if ended else "`quire jobs work --once` runs it",
                job_id=job_id,
                state=state_text(job),
            )
        again = store.manifest.jobs.retry(job_id)
        data = _job_data(store, again)
    text = f"job {job_id} queued again as job {again}; run it with `quire jobs work --once`"
    return Note(text=text, data={"retried": job_id, "job": data})


@command("cancel", group, example="quire jobs cancel 12")
def cancel(cli: Cli, job_id: JobId) -> Note:
    """Cancel a job that has not ended. Work it has already done is kept."""
    with cli.owner() as store:
        job = store.manifest.jobs.get(job_id)
        if job.record.finished_at_ms:
            hint = f"`quire jobs show {job_id}` shows how"
            raise IllegalTransition("the job has already ended", hint=hint, job_id=job_id, state=state_text(job))
        store.manifest.jobs.cancel(job_id)
        data = _job_data(store, job_id)
    return Note(text=f"cancelled job {job_id}, {data['kind']}", data={"cancelled": data})


def _job_data(store: Store, job_id: int) -> dict[str, Any]:
    job = store.manifest.jobs.get(job_id)
    return job_json(job, names_of(store.manifest, [job]))


# ── work ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("work", group, example="quire jobs work --once")
def work(
    cli: Cli,
    once: Annotated[bool, Option("--once", help="Exit when no job is due.")] = False,
    log: Log = "",
) -> CliResult:
    """Run jobs until Ctrl-C, or until none is due.

    While it runs, this process owns the store, and without --once also runs its maintenance. A job that is interrupted
    returns to the queue.
    """
    log_to(log)
    stopped = False
    with cli.owner(upkeep=not once) as store:
        session = JobSession(store)
        if once:
            try:
                session.watch(store.worker.drain)
            except KeyboardInterrupt:
                stopped = True
        else:
            with until_interrupted() as stop:
                session.serve(stop)
        ran = session.ran()
        shown = work_report(store.manifest, ran, interrupted=stopped)
    if stopped:
        return CliResult(shown, INTERRUPTED)
    return CliResult(shown, PROBLEMS if once and failed_jobs(ran) else OK)


def failed_jobs(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs whose last attempt failed, whether or not they will be retried."""
    return [job for job in jobs if job.record.error and job.state is not JobState.CANCELLED]


def work_report(manifest: ManifestStore, ran: Sequence[Job], *, interrupted: bool = False) -> Report:
    """Return a report of the jobs that ran and of those that wait."""
    now = manifest.clock.now_ms()
    waiting = manifest.jobs.jobs(JobState.PENDING)
    shown = ran[-SHOWN_MAX:]
    names = names_of(manifest, shown)
    table = Listing(
        columns=[">id", "kind", "database", "state", "what"],
        rows=[
            ListingRow(
                [
                    str(job.job_id),
                    job.kind.name.lower(),
                    _database(job, names),
                    state_text(job),
                    summary(job, now),
                ],
                None,
            )
            for job in shown
        ],
        empty="no job was due" if not interrupted else "no job ran",
    )
    left = Note(text=waiting_text(len(waiting), _due(waiting), now), data=None)
    data = {
        "ran": len(ran),
        "succeeded": sum(job.state is JobState.SUCCEEDED for job in ran),
        "failed": len(failed_jobs(ran)),
        "waiting": len(waiting),
        "next_due_at_ms": _due(waiting),
        "interrupted": interrupted,
        "jobs": [job_json(job, names) for job in shown],
    }
    return Report(parts=[table, left], data=data)


def _due(waiting: Sequence[Job]) -> int:
    """Return when the first waiting job is due, 0 if none waits."""
    return min((job.record.not_before_ms or job.record.created_at_ms for job in waiting), default=0)


def waiting_text(number: int, due_at_ms: int, now: int) -> str:
    """Format how many jobs wait, and how long until the first is due."""
    if not number:
        return "no jobs waiting"
    when = f"due in {span(due_at_ms - now)}" if due_at_ms > now else "due now"
    return f"{count_of(number, 'job')} waiting, the first is {when}"
