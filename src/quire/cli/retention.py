"""Commands about retention: show, set, clear, plan, apply.

`set` changes the rules it names and leaves the others, so that setting one rule never removes another, and with it snapshots.
`set` and `clear` drop nothing; `plan` and `--dry-run` only read.

`apply` asks first, then drops exactly what it showed: a snapshot that became droppable in the meantime stays. Each database
with snapshots to drop gets a job, and all jobs are one run (`jobs/retention.py`). For one database a failed job is an error of
the command. For all databases, one that would lose its last snapshots is skipped and listed unless `--force` is given, as is
one whose job failed; the exit code is then 1. A database that another job is working on is left to that job.
"""

from __future__ import annotations

import shlex
from array import array
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec.structs import replace

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import bar, failure_of
from quire.cli.lookup import Database, Yes, title_of
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note, Report
from quire.cli.prompts import agreed, confirm
from quire.cli.snapshots import share_clause, share_json, share_later, share_words, snapshot_json
from quire.core.clock import moment
from quire.core.errors import InvalidInput, JobAlreadyPending, UnknownDatabase, UnknownJob, WouldDropEverything
from quire.core.json_values import plain
from quire.core.time_parsing import duration, parse_duration
from quire.durable.spool import Spool
from quire.jobs.job_results import JobResults
from quire.manifest.records import JobKind, JobState, RetentionRecord
from quire.manifest.retention import RetentionPlan, check_policy, has_rules
from quire.store.exclusive_artifacts import ExclusiveShare, snapshots_share

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.jobqueue import Job
    from quire.manifest.retention import Decision
    from quire.manifest.snapshots import SnapshotInfo
    from quire.manifest.store import ManifestStore
    from quire.store.store import Store

AnyDatabase = Annotated[str, Argument(metavar="[DB]", help="The database's name.", show_default=False)]
All = Annotated[bool, Option("--all", help="All databases with retention rules, in one run.")]
DryRun = Annotated[bool, Option("--dry-run", help="Only show what would be dropped.")]


NAMED_MAX = 5
"""Most snapshots to name in a question."""

NO_POLICY = "no database has a retention policy: set one with `quire retention set`"

ENDED = "another job was applying it, and has just ended"


LISTED_MAX = 1_000
"""Most databases in the table of a run over all databases; with `--json`, all are listed."""


class _PendingDrop(msgspec.Struct, frozen=True):
    """A database that would lose snapshots."""

    database: str
    plan: RetentionPlan
    share: ExclusiveShare


group = Group("retention")


# ── the policy ────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("show", group, example="quire retention show shop")
def show(cli: Cli, database: Database) -> Facts:
    """Show the retention rules of a database."""
    with cli.reader() as manifest:
        policy_plan = manifest.retention.plan(database)
    return Facts(lines=_facts(database, policy_plan), data=_policy_json(database, policy_plan))


@command("set", group, example="quire retention set shop --hourly 24 --daily 7 --schedule hourly")
def set_(
    cli: Cli,
    database: Database,
    keep_last: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest N snapshots.")] = None,
    keep_generations: Annotated[
        int | None, Option(min=0, metavar="N", help="Keep snapshots of the newest N generations.")
    ] = None,
    hourly: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest of each of N hours.")] = None,
    daily: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest of each of N days.")] = None,
    weekly: Annotated[int | None, Option(min=0, metavar="N", help="Keep the newest of each of N weeks.")] = None,
    keep: Annotated[str | None, Option(metavar="30d", help="Keep snapshots younger than this: 90s, 2h, 7d.")] = None,
    keep_named: Annotated[bool | None, Option("--keep-named/--no-keep-named", help="Keep named snapshots.")] = None,
    schedule: Annotated[
        str | None,
        Option(
            metavar="hourly,daily",
            help="Create snapshots hourly, daily, weekly ('daily at 03:00 Europe/Zurich'), or none.",
        ),
    ] = None,
) -> Facts:
    """Change retention rules of a database; rules that are not given stay unchanged.

    A value of 0 removes a rule. A snapshot is kept if any rule keeps it; without rules all are kept. This command drops
    nothing: the owner of the store applies the rules about once a minute.
    """
    asked: dict[str, Any] = {
        "keep_last": keep_last,
        "keep_generations": keep_generations,
        "hourly": hourly,
        "daily": daily,
        "weekly": weekly,
        "keep_seconds": None if keep is None else parse_duration(keep, "--keep"),
        "keep_named": keep_named,
        "schedules": None if schedule is None else _schedules(schedule),
    }
    changes = {name: value for name, value in asked.items() if value is not None}
    if not changes:
        raise InvalidInput("no rule was given", hint="`quire retention set --help` lists them")
    if too_large := [name for name, value in changes.items() if isinstance(value, int) and value > 2**32]:
        raise InvalidInput("a rule is a number below 2³²", hint="0 ends a rule", rules=too_large)
    with cli.owner() as store:
        retention = store.manifest.retention
        policy = check_policy(replace(retention.get(database) or RetentionRecord(), **changes))
        retention.set(database, policy)
        policy_plan = retention.plan(database)
    return Facts(lines=_facts(database, policy_plan), data=_policy_json(database, policy_plan))


def _schedules(text: str) -> list[str]:
    if text in ("", "none"):
        return []
    return list(dict.fromkeys(name.strip() for name in text.split(",")))


@command("clear", group, example="quire retention clear shop")
def clear(cli: Cli, database: Database) -> Note:
    """Remove the retention rules of a database.

    Every snapshot is then kept, and none is created automatically.
    """
    with cli.owner() as store:
        before = store.manifest.retention.get(database)
        if before is not None:
            store.manifest.retention.set(database, None)
    text = f"{database} no longer has a retention policy" if before else f"{database} had no retention policy"
    return Note(text=text, data={"database": database, "cleared": plain(before)})


# ── plan ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("plan", group, example="quire retention plan shop")
def plan(cli: Cli, database: Database) -> Report:
    """Show which snapshots would be dropped now, and why."""
    with cli.reader() as manifest:
        policy_plan = manifest.retention.plan(database)
        share = _share_of(manifest, policy_plan)
    closing = [_verdict_text(policy_plan)]
    if policy_plan.dropped:
        closing.append(f"Only {'it holds' if len(policy_plan.dropped) == 1 else 'they hold'}: {share_words(share)}.")
        closing.append(
            f"Drop them now: `quire retention apply {shlex.quote(database)}{' --force' if policy_plan.needs_force else ''}`."
        )
    table = Listing(
        columns=[">id", "snapshot", "created", "verdict", "why"],
        rows=[ListingRow(_cells(decision, policy_plan), None) for decision in policy_plan.decisions],
        empty=f"{database} has no snapshots",
        closing="\n".join(closing),
    )
    data = {
        **_policy_json(database, policy_plan),
        "decisions": [_decision_json(decision, database) for decision in policy_plan.decisions],
        "share": share_json(share),
    }
    return Report(parts=[table], data=data)


def _cells(decision: Decision, policy_plan: RetentionPlan) -> list[str]:
    snapshot, why = decision.snapshot, decision.why
    if policy_plan.policy is not None and why.startswith("younger than"):
        why = f"younger than {duration(policy_plan.policy.keep_seconds)}"  # in the form in which it was typed
    verdict = "keep" if decision.keep else "drop"
    return [str(snapshot.snapshot_id), snapshot.name or "-", moment(snapshot.created_at_ms), verdict, why]


# ── apply ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("apply", group, example="quire retention apply --all --yes")
def apply(
    cli: Cli,
    database: AnyDatabase = "",
    every: All = False,
    dry_run: DryRun = False,
    force: Annotated[bool, Option("--force", help="Drop even the last snapshots of a database.")] = False,
    yes: Yes = False,
) -> Note | CliResult | Report | Listing:
    """Drop the snapshots that no rule keeps, now.

    Each database with snapshots to drop gets a job (`quire jobs ls`).
    """
    if bool(database) == every:
        raise InvalidInput("name a database, or use `--all`", hint="`quire ls` lists the databases")
    if dry_run:
        return _plan_all(cli) if every else plan(cli, database)
    return _apply_all(cli, force, yes) if every else _apply_one(cli, database, force, yes)


# ── one database ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _apply_one(cli: Cli, database: str, force: bool, yes: bool) -> Note:
    """Drop the snapshots of a database that no rule keeps."""
    with cli.owner() as store:
        manifest = store.manifest
        policy_plan = manifest.retention.plan(database)
        if not policy_plan.dropped:
            return Note(
                text=f"nothing to drop: {_verdict_text(policy_plan)}", data={"database": database, "dropped": []}
            )
        if policy_plan.needs_force and not force:
            raise WouldDropEverything(
                "no rule keeps any snapshot of the database; nothing was dropped",
                hint=f"keep more (`quire retention set {shlex.quote(database)} …`), or use `--force`",
                database=database,
                snapshots=len(policy_plan.dropped),
            )
        pending = _PendingDrop(database, policy_plan, _share_of(manifest, policy_plan))
        if not yes:
            nothing = {"database": database, "dropped": []}
            confirm(_question(pending), "nothing was dropped", nothing, about=_snapshots_of([pending]))
        job = _ended(store, pending, force)
        dropped = _gone(manifest, policy_plan)
    total = count_of(len(policy_plan.decisions), "snapshot")
    text = f"dropped {len(dropped):,} of {total} of {database}{share_later(pending.share)}"
    data = {"database": database, "dropped": [snapshot_json(info, database) for info in dropped]}
    return Note(text=text, data={**data, "share": share_json(pending.share), "job_id": job.job_id})


def _ended(store: Store, pending: _PendingDrop, force: bool) -> Job:
    """Run the job of one database now and return it finished. Raises the error it failed with."""
    job = next(iter(_run([pending], store, force)), None)
    if job is None:
        job_id, worker = _holder(store.manifest, pending.plan.db_id)
        hint = f"`quire jobs show {job_id}` shows its progress, `quire jobs cancel {job_id}` cancels it"
        raise JobAlreadyPending(
            "another job is applying the rules of the database; nothing was dropped",
            hint=hint if job_id else "it has just ended: run the command again",
            database=pending.database,
            job_id=job_id,
            worker=worker,
        )
    if (failure := failure_of(job, f"the retention of {pending.database}")) is not None:
        raise failure
    return job


def _run(pending: Iterable[_PendingDrop], store: Store, force: bool, title: str = "") -> JobResults:
    """Run the jobs of these databases now. Each drops what was shown and no more."""
    only = {item.plan.db_id: array("Q", (info.snapshot_id for info in item.plan.dropped)) for item in pending}
    if not title:
        return store.heavy.retention_all(force=force, only=only)
    with bar(title) as progress:
        return store.heavy.retention_all(force=force, only=only, progress=progress)


def _holder(manifest: ManifestStore, db_id: int) -> tuple[int, str]:
    """Return the outstanding retention job of a database and its worker, (0, "") if it has just ended."""
    with suppress(UnknownJob):
        if job_id := manifest.jobs.outstanding(db_id, JobKind.RETENTION):
            lease = manifest.jobs.get(job_id).lease
            return job_id, lease.worker if lease is not None else ""
    return 0, ""


def _gone(manifest: ManifestStore, policy_plan: RetentionPlan) -> list[SnapshotInfo]:
    """Return the snapshots of the plan that were in fact dropped."""
    left = {info.snapshot_id for info in manifest.snapshots.of(policy_plan.db_id)}
    return [info for info in policy_plan.dropped if info.snapshot_id not in left]


def _snapshots_of(pending: Iterable[_PendingDrop]) -> str:
    """Return a digest of the snapshots that the user is asked about: the question counts them."""
    digest = sha256()
    for item in pending:
        digest.update(f"{item.plan.db_id}:{[info.snapshot_id for info in item.plan.dropped]}\n".encode())
    return digest.hexdigest()


def _question(pending: _PendingDrop) -> str:
    policy_plan = pending.plan
    names = ", ".join(title_of(info) for info in policy_plan.dropped[:NAMED_MAX])
    more = f" and {len(policy_plan.dropped) - NAMED_MAX:,} more" if len(policy_plan.dropped) > NAMED_MAX else ""
    every = "EVERY snapshot" if policy_plan.drops_everything else count_of(len(policy_plan.dropped), "snapshot")
    return (
        f"drop {every} of {pending.database} ({names}{more}), {share_clause(pending.share, len(policy_plan.dropped))}?"
    )


# ── all databases ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _pending_drops(manifest: ManifestStore) -> tuple[int, Spool[_PendingDrop]]:
    """Return how many databases have a policy, and those that would lose snapshots."""
    with_policy, pending = 0, Spool(_PendingDrop)
    for db_id, _ in manifest.retention.databases():
        with suppress(UnknownDatabase):  # it has just been dropped
            policy_plan = manifest.retention.plan(db_id)
            with_policy += 1
            if policy_plan.dropped:
                with manifest.read() as txn:
                    name = txn.database_names([db_id]).get(db_id)
                pending.append(_PendingDrop(name or f"#{db_id}", policy_plan, _share_of(manifest, policy_plan)))
    return with_policy, pending


def _plan_all(cli: Cli) -> Listing:
    """Return a listing of what each database would lose."""
    with cli.reader() as manifest:
        with_policy, pending = _pending_drops(manifest)
    rows = [
        ListingRow(
            [
                item.database,
                f"{len(item.plan.decisions):,}",
                f"{len(item.plan.dropped):,}{' (all)' if item.plan.drops_everything else ''}",
                size(item.share.size_bytes),
            ],
            {**_policy_json(item.database, item.plan), "share": share_json(item.share)},
        )
        for item in pending
    ]
    closing = [f"{len(rows):,} of {count_of(with_policy, 'database')} with a policy would lose {_number(pending)}."]
    if alone := sum(item.plan.needs_force for item in pending):
        closing.append(f"{count_of(alone, 'database')} would have none left and need `--force`.")
    closing.append("Drop them now: `quire retention apply --all`.")
    return Listing(
        columns=["database", ">snapshots", ">would drop", ">exclusive"],
        rows=rows,
        empty=_nothing(with_policy),
        closing="\n".join(closing) if rows else "",
    )


def _apply_all(cli: Cli, force: bool, yes: bool) -> CliResult:
    """Drop the snapshots that no rule keeps, in every database that has a policy."""
    with cli.owner() as store:
        with_policy, pending = _pending_drops(store.manifest)
        chosen, refused = Spool(_PendingDrop), Spool(_PendingDrop)
        for item in pending:
            (refused if item.plan.needs_force and not force else chosen).append(item)
        report = _RunReport(with_policy, refused, as_json=cli.as_json)
        if chosen and not yes:
            question = _question_of_all(chosen, refused)
            if not agreed(question, "nothing was dropped", about=_snapshots_of(chosen)):
                return CliResult(report.finished("nothing was dropped"), PROBLEMS)
        jobs = _run(chosen, store, force, f"retention of {count_of(len(chosen), 'database')}") if chosen else ()
        for item, job in _with_jobs(chosen, jobs):
            report.add(item, job, store.manifest)
    nothing = "" if chosen else "nothing was dropped" if refused else _nothing(with_policy)
    return CliResult(report.finished(nothing), PROBLEMS if refused or report.failures else OK)


def _with_jobs(chosen: Iterable[_PendingDrop], jobs: Iterable[Job]) -> Iterator[tuple[_PendingDrop, Job | None]]:
    """Yield each database with its job, which is missing if another worker holds it. Both are in the same order."""
    rest = iter(jobs)
    job = next(rest, None)
    for item in chosen:
        if job is not None and job.db_id == item.plan.db_id:
            yield item, job
            job = next(rest, None)
        else:
            yield item, None


def _question_of_all(chosen: Spool[_PendingDrop], refused: Spool[_PendingDrop]) -> str:
    every = sum(item.plan.drops_everything for item in chosen)
    words = f"drop {_number(chosen)} of {count_of(len(chosen), 'database')}"
    if every:
        words += f" (EVERY snapshot of {every:,} of them)"
    if refused:
        words += f", skipping {len(refused):,} that would have none left"
    return f"{words}, {share_clause(_sum(item.share for item in chosen), 2)}?"


class _RunReport:
    """The report of a run: a sentence, and a table of databases that were refused, failed or left alone.

    Single databases are listed only as far as they are shown.
    """

    def __init__(self, with_policy: int, refused: Spool[_PendingDrop], *, as_json: bool) -> None:
        self.failures = 0
        self._with_policy = with_policy
        self._as_json = as_json
        self._dropped = self._databases = self._unlisted = 0
        self._share = ExclusiveShare()
        self._rows: list[ListingRow] = []
        self._json: dict[str, list[dict[str, Any]]] = {"jobs": [], "refused": [], "failed": [], "taken": []}
        for item in refused:
            why = "no rule keeps any of its snapshots: use `--force`"
            self._list(item, "refused", why, snapshots=len(item.plan.dropped))

    def add(self, item: _PendingDrop, job: Job | None, manifest: ManifestStore) -> None:
        """Add what became of a database."""
        if job is None:
            job_id, worker = _holder(manifest, item.plan.db_id)
            self._list(item, "left", f"job {job_id} is applying it" if job_id else ENDED, job_id=job_id, worker=worker)
        elif job.state is JobState.SUCCEEDED:
            counts = {"dropped": job.result["dropped"], "kept": job.result["kept"]}
            self._databases += 1
            self._dropped += counts["dropped"]
            self._share = _sum((self._share, item.share))
            if self._as_json:
                self._json["jobs"].append(
                    {"database": item.database, "db_id": job.db_id, "job_id": job.job_id, **counts}
                )
        else:
            self.failures += 1
            error = job.record.error or "it was cancelled"
            self._list(item, "failed", error, job_id=job.job_id, error=error)

    def _list(self, item: _PendingDrop, verdict: str, why: str, **more: Any) -> None:
        if self._as_json:
            self._json["taken" if verdict == "left" else verdict].append({"database": item.database, **more})
        elif len(self._rows) < LISTED_MAX:
            self._rows.append(ListingRow([item.database, verdict, why], None))
        else:
            self._unlisted += 1

    def finished(self, instead: str) -> Report:
        """Return the report; `instead`, if given, replaces its sentence."""
        dropped = f"{count_of(self._dropped, 'snapshot')} of {count_of(self._databases, 'database')}"
        sentence = Note(text=instead or f"dropped {dropped}{share_later(self._share)}", data=None)
        more = f"{count_of(self._unlisted, 'more database')}; `--json` lists all" if self._unlisted else ""
        table = Listing(columns=["database", "verdict", "why"], rows=self._rows, closing=more)
        totals = {"databases": self._with_policy, "dropped": self._dropped, "share": share_json(self._share)}
        return Report(parts=[sentence, *([table] if self._rows else [])], data={**totals, **self._json})


def _nothing(with_policy: int) -> str:
    return (
        f"nothing to drop: {count_of(with_policy, 'database')} with a policy, all snapshots kept"
        if with_policy
        else NO_POLICY
    )


def _number(pending: Iterable[_PendingDrop]) -> str:
    return count_of(sum(len(item.plan.dropped) for item in pending), "snapshot")


def _sum(shares: Iterable[ExclusiveShare]) -> ExclusiveShare:
    """Sum up exclusive shares. What only two databases share with each other is not counted."""
    sums: Tally[str] = Tally()
    for share in shares:
        sums.update(msgspec.structs.asdict(share))
    return ExclusiveShare(**sums)


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _facts(database: str, policy_plan: RetentionPlan) -> list[tuple[str, str]]:
    rules = _rules(policy_plan.policy)
    schedules = ", ".join(policy_plan.policy.schedules) if policy_plan.policy else ""
    return [
        ("database", database),
        ("keeps", "; ".join(rules) or "every snapshot (no rules)"),
        ("creates", f"snapshots {schedules}" if schedules else "no automatic snapshots"),
        ("now", _verdict_text(policy_plan)),
    ]


def _rules(policy: RetentionRecord | None) -> list[str]:
    if policy is None or not has_rules(policy):
        return []
    rules = ["named snapshots"] if policy.keep_named else []
    if policy.keep_last:
        rules.append(f"the newest {policy.keep_last:,}")
    if policy.keep_generations:
        rules.append(f"snapshots of the last {count_of(policy.keep_generations, 'generation')}")
    if policy.keep_seconds:
        rules.append(f"snapshots younger than {duration(policy.keep_seconds)}")
    units = ((policy.hourly, "hour"), (policy.daily, "day"), (policy.weekly, "week"))
    if times := [count_of(number, unit) for number, unit in units if number]:
        rules.append(f"the newest of each of the last {', '.join(times)}")
    return rules


def _verdict_text(policy_plan: RetentionPlan) -> str:
    """Format how many snapshots would be kept and how many dropped."""
    total, dropped = len(policy_plan.decisions), len(policy_plan.dropped)
    if not total:
        return "no snapshots"
    if not dropped:
        return f"{count_of(total, 'snapshot')}, all kept"
    return f"{total - dropped:,} of {count_of(total, 'snapshot')} kept, {dropped:,} would be dropped"


def _policy_json(database: str, policy_plan: RetentionPlan) -> dict[str, Any]:
    """Return the rules of a database and their effect, as JSON."""
    return {
        "db_id": policy_plan.db_id,
        "database": database,
        "policy": plain(policy_plan.policy),
        "snapshots": len(policy_plan.decisions),
        "would_drop": len(policy_plan.dropped),
        "drops_everything": policy_plan.drops_everything,
    }


def _decision_json(decision: Decision, database: str) -> dict[str, Any]:
    return {**snapshot_json(decision.snapshot, database), "keep": decision.keep, "why": decision.why}


def _share_of(manifest: ManifestStore, policy_plan: RetentionPlan) -> ExclusiveShare:
    """Return what only the snapshots that would be dropped hold."""
    with manifest.read() as txn:
        return snapshots_share(txn, policy_plan.db_id, [info.snapshot_id for info in policy_plan.dropped])
