"""Commands that rewrite a page database's chunks: checkpoint and merge. Each is one job, run now.

Rules
  1. The job that is outstanding is run, if there is one; else a new one.
  2. What a checkpoint absorbed is let go right after it, by the truncate job that it leads to.
  3. A job that fails is an error of the command, with the exit code of what the job met; an interrupt puts the job back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from quire.cli.command import Cli
from quire.cli.jobs import job_json
from quire.cli.named import Database, names_of, need_pages, settled
from quire.cli.output import Note
from quire.cli.plain import count_of, size
from quire.cli.typed import command

if TYPE_CHECKING:
    from quire.manifest.jobqueue import Job


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    command(app, "checkpoint", example="quire checkpoint shop")(checkpoint)
    command(app, "merge", example="quire merge shop")(merge)


def checkpoint(cli: Cli, database: Database) -> Note:
    """Bring the WAL of a page database into chunks, now.

    The WAL that no snapshot, fork or reader needs any more is let go.
    """
    return _run(cli, database, "CHECKPOINT", "TRUNCATE")


def merge(cli: Cli, database: Database) -> Note:
    """Rewrite chunks that many deltas lie over, now."""
    return _run(cli, database, "MERGE")


def _run(cli: Cli, database: str, kind: str, then: str = "") -> Note:
    from quire.cli.working import Bench, failure_of
    from quire.manifest.records import JobKind

    need = f"have a {kind.lower()}"
    with cli.owner(upkeep=True) as store:
        need_pages(store.database(database), need)
        db_id = settled(store, database).db_id
        bench = Bench(store)
        job = bench.run(JobKind[kind], db_id)
        if (failure := failure_of(job, f"the {kind.lower()} of {database}")) is not None:
            raise failure
        if then and store.manifest.jobs.outstanding(db_id, JobKind[then]):
            bench.run(JobKind[then], db_id)
        with store.manifest.read() as txn:
            names = names_of(txn)
    return Note(text=sentence(job, database), data=job_json(job, names))


def sentence(job: Job, database: str) -> str:
    """What a checkpoint or merge did."""
    if job.state.name == "PENDING":
        return f"the {job.kind.name.lower()} of {database} was put off: `quire jobs show {job.job_id}` says until when"
    result = job.result or {}
    if not (result.get("slots") or result.get("cleared")):
        nothing = "nothing in the WAL to absorb" if job.kind.name == "CHECKPOINT" else "no deltas lie over its chunks"
        return f"{database} needs no {job.kind.name.lower()}: {nothing}"
    written = (
        f"{count_of(result['slots'], 'slot')} written ({count_of(result['pages'], 'page')}, {size(result['bytes'])})"
    )
    words = [written, f"generation {result['generation']:,}", f"up to lsn {result['covered_lsn']:,}"]
    if result.get("segments"):
        words.insert(1, f"{count_of(result['segments'], 'WAL segment')} absorbed")
    if result.get("cleared"):
        words.append(f"{count_of(result['cleared'], 'slot')} beyond the end cleared")
    return f"{job.kind.name.lower()} of {database}: {', '.join(words)}"
