"""Commands about retention: show, set, clear, plan, apply.

`set` changes the rules it names and leaves the others, so nobody loses a rule, and with it snapshots, by naming another.
`set` and `clear` drop nothing; `plan` and `--dry-run` only read.

`apply` asks first, then drops exactly what it showed: a snapshot that has come of age meanwhile stays. Each database with
something to drop gets a job, and all of them are one run (`jobs/retention.py`). For one database a failed job is an error of
the command. For all, a database that would lose its last snapshots is skipped without `--force` and listed, as is one whose
job failed; the exit code is then 1. A database that another job is working on is left to that job.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from quire.cli.command import Cli, Verdict, agreed
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.durations import duration, seconds_of
from quire.cli.exit_codes import OK, PROBLEMS
from quire.cli.formatting import count_of, moment, plain, size
from quire.cli.job_progress import bar, failure_of
from quire.cli.lookup import Database, Yes, names_of, title_of
from quire.cli.output import Facts, Listing, Note, Report, Row
from quire.cli.snapshots import share_clause, share_json, share_later, share_words, snapshot_json
from quire.core.errors import InvalidInput, JobAlreadyPending, UnknownDatabase, UnknownJob, WouldDropEverything
from quire.manifest.records import JobKind, RetentionRecord
from quire.manifest.retention import check_policy, has_rules
from quire.store.shares import ExclusiveShare, snapshots_share

if TYPE_CHECKING:
    from quire.manifest.jobqueue import Job
    from quire.manifest.retention import Decision, RetentionPlan
    from quire.manifest.snapshots import SnapshotInfo
    from quire.manifest.store import ManifestStore
    from quire.store.store import Store

AnyDatabase = Annotated[str, Argument(metavar="[DB]", help="The database's name.", show_default=False)]
All = Annotated[bool, Option("--all", help="Every database that has a policy, in one run.")]
DryRun = Annotated[bool, Option("--dry-run", help="Only show what would go.")]


NAMED_MAX = 5
"""Snapshots that a question names."""

NO_POLICY = "no database has a retention policy: `quire retention set` gives it one"

ENDED = "another job was at it, and has just ended"


@dataclass(frozen=True)
class _Going:
    """A database of which something would go."""

    database: str
    plan: RetentionPlan
    share: ExclusiveShare


def add_to(app: Group) -> None:
    """Register these commands, as a group."""
    group = Group("Choose which snapshots are kept and taken automatically.")
    command(group, "show", example="quire retention show shop")(show)
    command(group, "set", example="quire retention set shop --hourly 24 --daily 7 --schedule hourly")(set_)
    command(group, "clear", example="quire retention clear shop")(clear)
    command(group, "plan", example="quire retention plan shop")(plan)
    command(group, "apply", example="quire retention apply --all --yes")(apply)
    app.add("retention", group)


# ── the policy ────────────────────────────────────────────────────────────────────────────────────────────────────────
def show(cli: Cli, database: Database) -> Facts:
    """Show the rules of a database."""
    with cli.reader() as manifest:
        found = manifest.retention.plan(database)
    return Facts(lines=_facts(database, found), data=_policy_json(database, found))


def set_(
    cli: Cli,
    database: Database,
    keep_last: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest N.")] = None,
    keep_generations: Annotated[
        int | None, Option(min=0, metavar="N", help="Keep those of the newest N checkpoint generations.")
    ] = None,
    hourly: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest of N hours.")] = None,
    daily: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest of N days.")] = None,
    weekly: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest of N weeks.")] = None,
    keep: Annotated[str | None, Option(metavar="30d", help="Keep what is younger: 90s, 15m, 2h, 7d.")] = None,
    keep_named: Annotated[
        bool | None, Option("--keep-named/--no-keep-named", help="Keep those that a person named.")
    ] = None,
    schedule: Annotated[
        str | None, Option(metavar="hourly,daily", help="Make these by itself: hourly, daily, weekly; or none.")
    ] = None,
) -> Facts:
    """Change rules of a database; others stay as they are.

    0 ends a rule. Nothing is dropped yet. A snapshot is kept if any rule keeps it; without a rule every one is. The owner of
    the store applies the rules about once a minute.
    """
    asked: dict[str, Any] = {
        "keep_last": keep_last,
        "keep_generations": keep_generations,
        "hourly": hourly,
        "daily": daily,
        "weekly": weekly,
        "keep_seconds": None if keep is None else seconds_of(keep, "--keep"),
        "keep_named": keep_named,
        "schedules": None if schedule is None else _schedules(schedule),
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    if not changes:
        raise InvalidInput("no rule was named", hint="`quire retention set --help` lists them")
    if too_large := [name for name, value in changes.items() if isinstance(value, int) and value > 2**32]:
        raise InvalidInput("a rule is a number below 2³²", hint="0 ends a rule", rules=too_large)
    with cli.owner() as store:
        retention = store.manifest.retention
        policy = check_policy(replace(retention.get(database) or RetentionRecord(), **changes))
        retention.set(database, policy)
        found = retention.plan(database)
    return Facts(lines=_facts(database, found), data=_policy_json(database, found))


def _schedules(text: str) -> list[str]:
    if text in ("", "none"):
        return []
    return list(dict.fromkeys(each.strip() for each in text.split(",")))


def clear(cli: Cli, database: Database) -> Note:
    """Remove the retention rules of a database.

    Every snapshot is then kept, and none is created automatically.
    """
    with cli.owner() as store:
        before = store.manifest.retention.get(database)
        if before is not None:
            store.manifest.retention.set(database, None)
    text = f"{database} has no retention policy now" if before else f"{database} had no retention policy"
    return Note(text=text, data={"database": database, "cleared": plain(before)})


# ── what it does ──────────────────────────────────────────────────────────────────────────────────────────────────────
def plan(cli: Cli, database: Database) -> Report:
    """Show which snapshots would be dropped now, and why."""
    with cli.reader() as manifest:
        found = manifest.retention.plan(database)
        share = _share_of(manifest, found)
    closing = [_verdict_text(found)]
    if found.dropped:
        closing.append(f"Only {'it holds' if len(found.dropped) == 1 else 'they hold'}: {share_words(share)}.")
        closing.append(
            f"Drop them now: `quire retention apply {shlex.quote(database)}{' --force' if found.needs_force else ''}`."
        )
    table = Listing(
        columns=[">id", "snapshot", "created", "verdict", "why"],
        rows=[Row(_cells(each, found), None) for each in found.decisions],
        empty=f"{database} has no snapshots",
        closing="\n".join(closing),
    )
    data = {
        **_policy_json(database, found),
        "decisions": [_decision_json(each, database) for each in found.decisions],
        "share": share_json(share),
    }
    return Report(parts=[table], data=data)


def _cells(each: Decision, found: RetentionPlan) -> list[str]:
    snapshot, why = each.snapshot, each.why
    if found.policy is not None and why.startswith("younger than"):
        why = f"younger than {duration(found.policy.keep_seconds)}"  # as it was typed
    verdict = "keep" if each.keep else "drop"
    return [str(snapshot.snapshot_id), snapshot.name or "-", moment(snapshot.created_at_ms), verdict, why]


# ── doing it ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def apply(
    cli: Cli,
    database: AnyDatabase = "",
    every: All = False,
    dry_run: DryRun = False,
    force: Annotated[bool, Option("--force", help="Even if no snapshot is left.")] = False,
    yes: Yes = False,
) -> Note | Verdict | Report | Listing:
    """Drop the snapshots that no rule keeps, now.

    Of a database, or of all that have a policy: each gets a job if there is something to drop (`quire jobs ls`).
    """
    if bool(database) == every:
        raise InvalidInput("name a database, or use `--all`", hint="`quire ls` lists the databases")
    if dry_run:
        return _plan_all(cli) if every else plan(cli, database)
    return _apply_all(cli, force, yes) if every else _apply_one(cli, database, force, yes)


# ── one ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _apply_one(cli: Cli, database: str, force: bool, yes: bool) -> Note | Verdict:
    """Drop what no rule of a database keeps."""
    with cli.owner() as store:
        manifest = store.manifest
        found = manifest.retention.plan(database)
        if not found.dropped:
            return Note(text=f"nothing to drop: {_verdict_text(found)}", data={"database": database, "dropped": []})
        if found.needs_force and not force:
            raise WouldDropEverything(
                "no rule keeps any snapshot of the database; nothing was dropped",
                hint=f"keep more (`quire retention set {shlex.quote(database)} …`), or say `--force`",
                database=database,
                snapshots=len(found.dropped),
            )
        going = _Going(database, found, _share_of(manifest, found))
        if not yes and not agreed(_question(going), "nothing was dropped"):
            return Verdict(Note(text="nothing was dropped", data={"database": database, "dropped": []}), PROBLEMS)
        job = _ended(store, going, force)
        dropped = _gone(manifest, found)
    total = count_of(len(found.decisions), "snapshot")
    text = f"dropped {len(dropped):,} of {total} of {database}{share_later(going.share)}"
    data = {"database": database, "dropped": [snapshot_json(each, database) for each in dropped]}
    return Note(text=text, data={**data, "share": share_json(going.share), "job_id": job.job_id})


def _ended(store: Store, going: _Going, force: bool) -> Job:
    """The job of one database, run now; raises the error it failed with."""
    found = _run([going], store, force)
    if not found:
        job_id, worker = _holder(store.manifest, going.plan.db_id)
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


def _run(going: list[_Going], store: Store, force: bool, title: str = "") -> list[Job]:
    """Run their jobs now; each drops what was shown and no more."""
    only = {item.plan.db_id: [snapshot.snapshot_id for snapshot in item.plan.dropped] for item in going}
    if not title:
        return store.heavy.retention_all(force=force, only=only)
    with bar(title) as progress:
        return store.heavy.retention_all(force=force, only=only, progress=progress)


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
                going.append(_Going(names.get(db_id) or f"#{db_id}", found, _share_of(manifest, found)))
    return known, going


def _plan_all(cli: Cli) -> Listing:
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
            {**_policy_json(each.database, each.plan), "share": share_json(each.share)},
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


def _apply_all(cli: Cli, force: bool, yes: bool) -> Verdict:
    """Drop what no rule keeps, of every database that has a policy."""
    with cli.owner() as store:
        manifest = store.manifest
        known, going = _look(manifest)
        refused = [each for each in going if each.plan.needs_force and not force]
        chosen = [each for each in going if force or not each.plan.needs_force]
        if chosen and not yes and not agreed(_question_of_all(chosen, refused), "nothing was dropped"):
            return Verdict(_told(known, [], refused, [], {}, "nothing was dropped"), PROBLEMS)
        jobs = _run(chosen, store, force, f"retention of {count_of(len(chosen), 'database')}") if chosen else []
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


def _sum(going: Iterable[_Going]) -> ExclusiveShare:
    """What they hold alone, each database by itself: what two of them share, and nobody else, is not counted."""
    shares = [each.share for each in going]
    return ExclusiveShare(
        chunks=sum(each.chunks for each in shares),
        deltas=sum(each.deltas for each in shares),
        wal_segments=sum(each.wal_segments for each in shares),
        size_bytes=sum(each.size_bytes for each in shares),
    )


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _facts(database: str, found: RetentionPlan) -> list[tuple[str, str]]:
    rules = _rules(found.policy)
    schedules = ", ".join(found.policy.schedules) if found.policy else ""
    return [
        ("database", database),
        ("keeps", "; ".join(rules) or "every snapshot (no rules)"),
        ("makes", f"{schedules} snapshots" if schedules else "no automatic snapshots"),
        ("now", _verdict_text(found)),
    ]


def _rules(policy: RetentionRecord | None) -> list[str]:
    if policy is None or not has_rules(policy):
        return []
    rules = ["named snapshots"] if policy.keep_named else []
    if policy.keep_last:
        rules.append(f"the newest {policy.keep_last:,}")
    if policy.keep_generations:
        rules.append(f"those of the last {count_of(policy.keep_generations, 'generation')}")
    if policy.keep_seconds:
        rules.append(f"what is younger than {duration(policy.keep_seconds)}")
    units = ((policy.hourly, "hour"), (policy.daily, "day"), (policy.weekly, "week"))
    if times := [count_of(number, unit) for number, unit in units if number]:
        rules.append(f"the newest of each of the last {', '.join(times)}")
    return rules


def _verdict_text(found: RetentionPlan) -> str:
    """How many would stay, how many would go."""
    total, going = len(found.decisions), len(found.dropped)
    if not total:
        return "no snapshots"
    if not going:
        return f"{count_of(total, 'snapshot')}, all kept"
    return f"{total - going:,} of {count_of(total, 'snapshot')} kept, {going:,} would be dropped"


def _policy_json(database: str, found: RetentionPlan) -> dict[str, Any]:
    """The rules of a database, and what they would do."""
    return {
        "db_id": found.db_id,
        "database": database,
        "policy": plain(found.policy),
        "snapshots": len(found.decisions),
        "would_drop": len(found.dropped),
        "drops_everything": found.drops_everything,
    }


def _decision_json(each: Decision, database: str) -> dict[str, Any]:
    return {**snapshot_json(each.snapshot, database), "keep": each.keep, "why": each.why}


def _share_of(manifest: ManifestStore, found: RetentionPlan) -> ExclusiveShare:
    """What only those hold that would go."""
    with manifest.read() as txn:
        return snapshots_share(txn, found.db_id, [each.snapshot_id for each in found.dropped])
