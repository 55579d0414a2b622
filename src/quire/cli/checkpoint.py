"""Commands that write and move chunks of page databases: checkpoint and merge, for one or many databases in one run; evict,
hydrate, restore.

Rules
  1. The outstanding job is run, if there is one; else a new one. Each database has its own job.
  2. What a checkpoint has absorbed is released right after it, by the truncate job that it enqueues.
  3. A job that fails is an error of the command, with the exit code of the job's error; an interrupt returns the job to the
     queue. In a run over many databases those that failed are listed, and the exit code is 1.
  4. `--dry-run` only reads: it works while another process owns the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from quire.cli.declarations import Argument, Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import JobSession, bar, failure_of
from quire.cli.jobs import job_json
from quire.cli.lookup import DryRun, Runner, Snapshot, names_of, need_pages, need_runner, snapshot_named
from quire.cli.output import CliResult, Listing, ListingRow, Note, Report
from quire.cli.stream import published
from quire.core.decoding import described
from quire.core.errors import InvalidInput
from quire.core.reader_info import ReaderInfo, reader_text
from quire.jobs.checkpoint.plan import plan_merge, shape_of
from quire.manifest import tables as t
from quire.manifest.records import DbKind, JobKind, JobState, WalState

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.jobs.job_results import JobResults
    from quire.manifest.jobqueue import Job

Databases = Annotated[list[str] | None, Argument(metavar="[DB]...", help="The databases' names.", show_default=False)]
All = Annotated[bool, Option("--all", help="All page databases, in one run.")]


@command("checkpoint", example="quire checkpoint --all --runner spark")
def checkpoint(
    cli: Cli, databases: Databases = None, every: All = False, runner: Runner = "", dry_run: DryRun = False
) -> Note | CliResult | Listing:
    """Write the WAL of page databases to chunks now.

    WAL segments that no snapshot, fork or reader needs are then truncated.
    """
    names = _chosen_names(databases, every, runner)
    if dry_run:
        return _outlook(cli, names, "CHECKPOINT")
    if len(names) == 1:
        return _run(cli, names[0], "CHECKPOINT", runner, "TRUNCATE")
    return _run_many(cli, names, "CHECKPOINT", runner)


@command("merge", example="quire merge shop")
def merge(
    cli: Cli, databases: Databases = None, every: All = False, runner: Runner = "", dry_run: DryRun = False
) -> Note | CliResult | Listing:
    """Merge chunks and their deltas into new chunks now."""
    names = _chosen_names(databases, every, runner)
    if dry_run:
        return _outlook(cli, names, "MERGE")
    if len(names) == 1:
        return _run(cli, names[0], "MERGE", runner)
    return _run_many(cli, names, "MERGE", runner)


Database = Annotated[str, Argument(metavar="DB", help="The name of a page database.")]


@command("evict", example="quire evict shop")
def evict(cli: Cli, database: Database) -> Note:
    """Remove local copies that the object store also has.

    These are WAL segments that only snapshots need, which are uploaded first, and chunks that were hydrated.
    """
    return _move_copies(cli, database, "evict")


@command("hydrate", example="quire hydrate shop")
def hydrate(cli: Cli, database: Database) -> Note:
    """Fetch data that is only in the object store."""
    return _move_copies(cli, database, "hydrate")


def _move_copies(cli: Cli, database: str, move: str) -> Note:
    with cli.owner(upkeep=True) as store:
        need_pages(store.database(database), "can be evicted and hydrated here")
        jobs = store.evict(database) if move == "evict" else store.hydrate(database)
    for job in jobs:
        if (failure := failure_of(job, f"the {job.kind.name.lower()} of a part of {database}")) is not None:
            raise failure
    done = [job for job in jobs if job.kind.name.lower() == move]
    moved = sum((job.result or {}).get("moved_bytes", 0) for job in done)
    text = f"{move} of {database}: {count_of(len(done), 'artifact')}, {size(moved)}"
    return Note(text=text, data={"move": move, "artifacts": len(done), "bytes": moved})


@command("restore", example="quire restore shop monday shop-monday.db")
def restore(
    cli: Cli,
    database: Database,
    snapshot: Snapshot,
    file: Annotated[str, Argument(metavar="FILE", help="The file to write.")],
    replace: Annotated[bool, Option("--replace", help="Replace an existing file.")] = False,
    runner: Runner = "",
    dry_run: DryRun = False,
) -> Note:
    """Write a snapshot to a file.

    Slots are read and written in parallel. The file of a SQLite database can be opened by SQLite.
    """
    need_runner(runner)
    with cli.owner() as store:
        need_pages(store.database(database), "are restored page by page")
        info = snapshot_named(store, database, snapshot)
        if dry_run:
            view = store.view(database, info.snapshot_id)
            pages, plain = view.size_pages, view.size_pages * view.page_size
            planned = {"path": file, "pages": pages, "bytes": plain, "lsn": view.lsn, "dry_run": True}
            return Note(text=f"would write {file}: {count_of(pages, 'page')}, {size(plain)}", data=planned)
        with bar(f"restore of {database}") as report:
            done = store.heavy.restore(
                database, info.snapshot_id, file, runner=runner, replace=replace, progress=report
            )
    text = f"{done['path']}: {count_of(done['pages'], 'page')}, {size(done['bytes'])}, as of lsn {done['lsn']:,}"
    return Note(text=text, data=done)


def _chosen_names(databases: list[str] | None, every: bool, runner: str) -> list[str]:
    """Return the names that were given, none for `--all`."""
    need_runner(runner)
    if bool(databases) == every:
        raise InvalidInput("name databases, or use `--all`", hint="`quire ls` lists the databases")
    return list(dict.fromkeys(databases or []))


# ── one database ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _run(cli: Cli, database: str, kind: str, runner: str, then: str = "") -> Note:
    need = f"have a {kind.lower()}"
    with cli.owner(upkeep=True) as store:
        info = store.database(database)
        if kind == "CHECKPOINT" and info.kind.name == "STREAM":
            return published(store, database)
        need_pages(info, need)
        db_id, session = info.db_id, JobSession(store)
        job = session.run(JobKind[kind], db_id, runner)
        if (failure := failure_of(job, f"the {kind.lower()} of {database}")) is not None:
            raise failure
        if then and store.manifest.jobs.outstanding(db_id, JobKind[then]):
            session.run(JobKind[then], db_id)
        names = names_of(store.manifest, [job])
    return Note(text=result_text(job, database), data=job_json(job, names))


def result_text(job: Job, database: str) -> str:
    """Format the result of a checkpoint or merge."""
    if job.state.name == "PENDING":
        return f"the {job.kind.name.lower()} of {database} was postponed; see `quire jobs show {job.job_id}`"
    result = job.result or {}
    held = _held_back(result)
    if not (result.get("slots") or result.get("cleared")):
        if held:
            return f"{database} was not checkpointed: {held}"
        nothing = "the WAL is empty" if job.kind.name == "CHECKPOINT" else "its chunks have no deltas"
        return f"{database} needs no {job.kind.name.lower()}: {nothing}"
    written = (
        f"{count_of(result['slots'], 'slot')} written ({count_of(result['pages'], 'page')}, {size(result['bytes'])})"
    )
    words = [written, f"generation {result['generation']:,}", f"up to lsn {result['covered_lsn']:,}"]
    if result.get("segments"):
        words.insert(1, f"{count_of(result['segments'], 'WAL segment')} absorbed")
    if result.get("cleared"):
        words.append(f"{count_of(result['cleared'], 'slot')} beyond the end cleared")
    return f"{job.kind.name.lower()} of {database}: {', '.join(words)}" + (f"; {held}" if held else "")


def _held_back(result: dict[str, Any]) -> str:
    """Format which readers keep a checkpoint from absorbing more; empty if none does."""
    if not result.get("waiting_segments"):
        return ""

    readers = [reader_text(reader) for reader in msgspec.convert(result["readers"], described(list[ReaderInfo]))]
    wait = "waits" if result["waiting_segments"] == 1 else "wait"
    what = f"{count_of(result['waiting_segments'], 'WAL segment')} ({size(result['waiting_bytes'])})"
    return f"{what} {wait} for {'; '.join(readers)}"


# ── many ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _run_many(cli: Cli, names: list[str], kind: str, runner: str) -> CliResult:
    with cli.owner(upkeep=True) as store:
        for name in names:
            need_pages(store.database(name), f"have a {kind.lower()}")
        run = store.heavy.checkpoint_all if kind == "CHECKPOINT" else store.heavy.merge_all
        with bar(f"{kind.lower()} of {count_of(len(names), 'database') if names else 'all databases'}") as report:
            results = run(names or None, runner=runner, progress=report)
        if kind == "CHECKPOINT":
            for job in results:
                if waiting := store.manifest.jobs.outstanding(job.db_id, JobKind.TRUNCATE):
                    store.worker.run(waiting)
        with store.manifest.read() as txn:
            database_names = txn.database_names(failure.db_id for failure in results.failures)
    return CliResult(_many_report(kind, results, database_names), PROBLEMS if results.failed else OK)


def _many_report(kind: str, results: JobResults, database_names: dict[int, str]) -> Report:
    failures = [(database_names.get(failure.db_id, ""), failure) for failure in results.failures]
    counts: dict[str, Any] = {
        "databases": len(results),
        "written": results.changed,
        **{name: results.sums[name] for name in ("slots", "pages", "bytes", "segments")},
        "put_off": results.states[JobState.PENDING] - results.retried,
        "failures": results.failed,
        "failed": [{"database": name, "job_id": failure.job_id, "error": failure.error} for name, failure in failures],
    }
    text = f"{kind.lower()} of {count_of(len(results), 'database')}: {count_of(counts['slots'], 'slot')} written "
    text += f"({count_of(counts['pages'], 'page')}, {size(counts['bytes'])}) in {counts['written']:,} of them"
    if counts["put_off"]:
        text += f", {counts['put_off']:,} postponed"
    parts: list[Note | Listing] = [Note(text=text, data=None)]
    if failures:
        rows = [ListingRow([name or str(failure.db_id), failure.error], None) for name, failure in failures]
        parts.append(Listing(columns=["failed", "why"], rows=rows, closing=unlisted_failures(results)))
    return Report(parts=parts, data=counts)


def unlisted_failures(results: JobResults) -> str:
    """Format how many failures are not listed; empty if all are."""
    more = results.failed - len(results.failures)
    return f"{count_of(more, 'more failure')}: `quire jobs ls --state failed` lists them" if more else ""


# ── dry run ───────────────────────────────────────────────────────────────────────────────────────────────────────────
def _outlook(cli: Cli, names: list[str], kind: str) -> Listing:
    """Return a listing of what waits for a checkpoint or a merge."""
    rows: list[ListingRow] = []
    with cli.reader() as manifest, manifest.read() as txn:
        wanted = [txn.database_id(name) for name in names] or [
            db_id for db_id, record in txn.databases() if record.kind is DbKind.PAGES and not record.dropped_at_ms
        ]
        for db_id in wanted:
            if kind == "CHECKPOINT":
                waiting = [row for _, row in txn.scan(t.WAL_CATALOG, db_id) if row.state < WalState.CHECKPOINTED]
                number, amount = len(waiting), sum(row.used_bytes for row in waiting)
            else:
                plan = plan_merge(txn, db_id, shape_of(txn, db_id, ""))
                number, amount = (len(plan.tasks), plan.read_bytes) if plan is not None else (0, 0)
            if number:
                name = txn.database_names([db_id]).get(db_id, "")
                data = {"database": name, "db_id": db_id, "waiting": number, "bytes": amount}
                rows.append(ListingRow([name, f"{number:,}", size(amount)], data))
    what = "WAL segments" if kind == "CHECKPOINT" else "slots"
    closing = f"{count_of(len(rows), 'database')}, {size(sum(row.data['bytes'] for row in rows))}"
    empty = f"nothing to {kind.lower()}"
    return Listing(columns=["database", f">{what}", ">size"], rows=rows, empty=empty, closing=closing if rows else "")
