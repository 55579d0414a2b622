"""What `quire retention apply` does: of one database, or of all that have a policy in one run.

Rules
  1. Each database that has something to drop gets a job; all of them are one run (`jobs/retention.py`).
  2. A job drops what was shown, no more: what has come of age while somebody thought about the answer stays.
  3. Of one database an error is an error of the command, with the exit code of what the job met. Of many, a database whose last
     snapshots would go is left alone unless forced, and told; so is one that fails. Then the exit code is 1.
  4. What another job is at is left to it, and told.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cli.command import Cli, Verdict, agreed
from quire.cli.exit_codes import OK, PROBLEMS
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import failure_of
from quire.cli.lookup import names_of, title_of
from quire.cli.output import Listing, Note, Report, Row
from quire.cli.progress_bar import bar
from quire.cli.retention import policy_json, share_of, verdict_text
from quire.cli.snapshots import share_clause, share_json, share_later, snapshot_json
from quire.core.errors import JobAlreadyPending, UnknownDatabase, UnknownJob, WouldDropEverything
from quire.manifest.records import JobKind
from quire.store.info import Share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quire.manifest.jobqueue import Job
    from quire.manifest.retention import RetentionPlan
    from quire.manifest.snapshots import SnapshotInfo
    from quire.manifest.store import ManifestStore

NAMED_MAX = 5
"""Snapshots that a question names."""

NO_POLICY = "no database has a retention policy: `quire retention set` gives it one"

ENDED = "another job was at it, and has just ended"


@dataclass(frozen=True)
class _Going:
    """A database of which something would go."""

    database: str
    plan: RetentionPlan
    share: Share


# ── one ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def apply_one(cli: Cli, database: str, force: bool, yes: bool) -> Note | Verdict:
    """Drop what no rule of a database keeps."""
    with cli.owner() as store:
        manifest = store.manifest
        found = manifest.retention.plan(database)
        if not found.dropped:
            return Note(text=f"nothing to drop: {verdict_text(found)}", data={"database": database, "dropped": []})
        if found.needs_force and not force:
            raise WouldDropEverything(
                "no rule keeps any snapshot of the database, so nothing was dropped",
                hint=f"keep more (`quire retention set {shlex.quote(database)} …`), or say `--force`",
                database=database,
                snapshots=len(found.dropped),
            )
        going = _Going(database, found, share_of(manifest, found))
        if not yes and not agreed(_question(going), "nothing was dropped"):
            return Verdict(Note(text="nothing was dropped", data={"database": database, "dropped": []}), PROBLEMS)
        job = _ended(manifest, going, force)
        dropped = _gone(manifest, found)
    total = count_of(len(found.decisions), "snapshot")
    text = f"dropped {len(dropped):,} of {total} of {database}{share_later(going.share)}"
    data = {"database": database, "dropped": [snapshot_json(each, database) for each in dropped]}
    return Note(text=text, data={**data, "share": share_json(going.share), "job_id": job.job_id})


def _ended(manifest: ManifestStore, going: _Going, force: bool) -> Job:
    """The job of one database, run now; raises what it met."""
    found = _run([going], manifest, force)
    if not found:
        job_id, worker = _holder(manifest, going.plan.db_id)
        hint = f"`quire jobs show {job_id}` says how far it is, `quire jobs cancel {job_id}` ends it"
        raise JobAlreadyPending(
            "the rules of the database are being applied by another job, so nothing was dropped here",
            hint=hint if job_id else "it has just ended: run the command again",
            database=going.database,
            job_id=job_id,
            worker=worker,
        )
    if (failure := failure_of(found[0], f"the retention of {going.database}")) is not None:
        raise failure
    return found[0]


def _run(going: list[_Going], manifest: ManifestStore, force: bool, title: str = "") -> list[Job]:
    """Their jobs, run now, each for what was shown and no more (rule 2)."""
    from quire.jobs.retention import apply_many

    only = {each.plan.db_id: [gone.snapshot_id for gone in each.plan.dropped] for each in going}
    if not title:
        return apply_many(manifest, only, force=force, only=only)
    with bar(title) as told:
        return apply_many(manifest, only, force=force, only=only, progress=told)


def _holder(manifest: ManifestStore, db_id: int) -> tuple[int, str]:
    """The job that somebody else has of a database, and who; (0, "") if it has just ended."""
    with suppress(UnknownJob):
        if job_id := manifest.jobs.outstanding(db_id, JobKind.RETENTION):
            lease = manifest.jobs.get(job_id).lease
            return job_id, lease.worker if lease is not None else ""
    return 0, ""


def _gone(manifest: ManifestStore, found: RetentionPlan) -> list[SnapshotInfo]:
    """What is gone of that which was to go."""
    left = {each.snapshot_id for each in manifest.snapshots.of(found.db_id)}
    return [each for each in found.dropped if each.snapshot_id not in left]


def _question(going: _Going) -> str:
    found = going.plan
    names = ", ".join(title_of(each) for each in found.dropped[:NAMED_MAX])
    more = f" and {len(found.dropped) - NAMED_MAX:,} more" if len(found.dropped) > NAMED_MAX else ""
    every = "EVERY snapshot" if found.drops_everything else count_of(len(found.dropped), "snapshot")
    return f"drop {every} of {going.database} ({names}{more}), {share_clause(going.share, len(found.dropped))}?"


# ── many ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _look(manifest: ManifestStore) -> tuple[int, list[_Going]]:
    """How many databases have a policy, and those of which something would go."""
    with manifest.read() as txn:
        names = names_of(txn)
    known, going = 0, []
    for db_id, _ in manifest.retention.databases():
        with suppress(UnknownDatabase):  # it has just been dropped
            found = manifest.retention.plan(db_id)
            known += 1
            if found.dropped:
                going.append(_Going(names.get(db_id) or f"#{db_id}", found, share_of(manifest, found)))
    return known, going


def outlook(cli: Cli) -> Listing:
    """The dry run of all: what would go of each database."""
    with cli.reader() as manifest:
        known, going = _look(manifest)
    rows = [
        Row(
            [
                each.database,
                f"{len(each.plan.decisions):,}",
                f"{len(each.plan.dropped):,}{' (all)' if each.plan.drops_everything else ''}",
                size(each.share.size_bytes),
            ],
            {**policy_json(each.database, each.plan), "share": share_json(each.share)},
        )
        for each in going
    ]
    closing = [f"{len(rows):,} of {count_of(known, 'database')} with a policy would lose {_number(going)}."]
    if alone := [each for each in going if each.plan.needs_force]:
        closing.append(f"{count_of(len(alone), 'database')} would have none left: only with `--force`.")
    closing.append("Drop them now: `quire retention apply --all`.")
    return Listing(
        columns=["database", ">snapshots", ">would go", ">only they hold"],
        rows=rows,
        empty=_nothing(known),
        closing="\n".join(closing) if rows else "",
    )


def apply_all(cli: Cli, force: bool, yes: bool) -> Verdict:
    """Drop what no rule keeps, of every database that has a policy."""
    with cli.owner() as store:
        manifest = store.manifest
        known, going = _look(manifest)
        refused = [each for each in going if each.plan.needs_force and not force]
        chosen = [each for each in going if force or not each.plan.needs_force]
        if chosen and not yes and not agreed(_question_of_all(chosen, refused), "nothing was dropped"):
            return Verdict(_told(known, [], refused, [], {}, "nothing was dropped"), PROBLEMS)
        jobs = _run(chosen, manifest, force, f"retention of {count_of(len(chosen), 'database')}") if chosen else []
        mine = {job.db_id for job in jobs}
        taken = {each.database: _holder(manifest, each.plan.db_id) for each in chosen if each.plan.db_id not in mine}
    nothing = "" if chosen else "nothing was dropped" if refused else _nothing(known)
    told = _told(known, chosen, refused, jobs, taken, nothing)
    return Verdict(told, PROBLEMS if refused or told.data["failed"] else OK)


def _question_of_all(chosen: list[_Going], refused: list[_Going]) -> str:
    every = sum(each.plan.drops_everything for each in chosen)
    words = f"drop {_number(chosen)} of {count_of(len(chosen), 'database')}"
    if every:
        words += f" (EVERY snapshot of {every:,} of them)"
    if refused:
        words += f", leave {len(refused):,} alone that would have none left"
    return f"{words}, {share_clause(_sum(chosen), 2)}?"


def _told(
    known: int,
    chosen: list[_Going],
    refused: list[_Going],
    jobs: list[Job],
    taken: dict[str, tuple[int, str]],
    instead: str,
) -> Report:
    """The outcome of a run: a sentence (`instead` where there was none), and a table of the databases that lost nothing."""
    names = {each.plan.db_id: each.database for each in chosen}
    done = {job.db_id: job.result for job in jobs if job.state.name == "SUCCEEDED"}
    errors = [(job, job.record.error or "it was cancelled") for job in jobs if job.db_id not in done]
    share = _sum(each for each in chosen if each.plan.db_id in done)
    dropped = sum(result["dropped"] for result in done.values())
    text = f"dropped {count_of(dropped, 'snapshot')} of {count_of(len(done), 'database')}{share_later(share)}"
    rows = [
        *([each.database, "refused", "no rule keeps any of its snapshots: say `--force`"] for each in refused),
        *([names[job.db_id], "failed", error] for job, error in errors),
        *([name, "left", f"job {job_id} is at it" if job_id else ENDED] for name, (job_id, _) in taken.items()),
    ]
    table = Listing(columns=["database", "verdict", "why"], rows=[Row(cells, None) for cells in rows])
    data = {
        "databases": known,
        "dropped": dropped,
        "jobs": [
            {"database": names[job.db_id], "db_id": job.db_id, "job_id": job.job_id, **_counts(done[job.db_id])}
            for job in jobs
            if job.db_id in done
        ],
        "refused": [{"database": each.database, "snapshots": len(each.plan.dropped)} for each in refused],
        "failed": [{"database": names[job.db_id], "job_id": job.job_id, "error": error} for job, error in errors],
        "taken": [{"database": name, "job_id": job_id, "worker": worker} for name, (job_id, worker) in taken.items()],
        "share": share_json(share),
    }
    return Report(parts=[Note(text=instead or text, data=None), *([table] if rows else [])], data=data)


def _counts(result: dict[str, Any]) -> dict[str, int]:
    return {"dropped": result["dropped"], "kept": result["kept"]}


def _nothing(known: int) -> str:
    return f"nothing to drop: {count_of(known, 'database')} with a policy, all snapshots kept" if known else NO_POLICY


def _number(going: list[_Going]) -> str:
    return count_of(sum(len(each.plan.dropped) for each in going), "snapshot")


def _sum(going: Iterable[_Going]) -> Share:
    """What they hold alone, each database by itself: what two of them share, and nobody else, is not counted."""
    shares = [each.share for each in going]
    return Share(
        chunks=sum(each.chunks for each in shares),
        deltas=sum(each.deltas for each in shares),
        wal_segments=sum(each.wal_segments for each in shares),
        size_bytes=sum(each.size_bytes for each in shares),
    )
