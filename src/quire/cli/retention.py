"""Commands about retention: show, set, clear, plan, apply.

Rules
  1. `set` changes the rules it names and leaves the others: nobody loses a rule, and with it snapshots, by naming another one.
  2. `set` and `clear` drop nothing. `plan` shows what would go and why; `apply` drops exactly that, after asking: what has
     come of age while somebody thought about the answer stays.
  3. `--dry-run` only reads: it works while another process owns the store.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from quire.cli.command import Cli, Verdict
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.durations import duration, seconds_of
from quire.cli.formatting import count_of, moment, plain
from quire.cli.lookup import Database, Yes
from quire.cli.output import Facts, Listing, Note, Report, Row
from quire.cli.snapshots import share_json, share_words, snapshot_json
from quire.core.errors import InvalidInput
from quire.manifest.records import RetentionRecord
from quire.manifest.retention import check_policy, has_rules
from quire.store.info import snapshots_share

if TYPE_CHECKING:
    from quire.manifest.retention import Decision, RetentionPlan
    from quire.manifest.store import ManifestStore
    from quire.store.info import Share

AnyDatabase = Annotated[str, Argument(metavar="[DB]", help="The database's name.", show_default=False)]
All = Annotated[bool, Option("--all", help="Every database that has a policy, in one run.")]
DryRun = Annotated[bool, Option("--dry-run", help="Only show what would go.")]


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
    return Facts(lines=_facts(database, found), data=policy_json(database, found))


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
    return Facts(lines=_facts(database, found), data=policy_json(database, found))


def _schedules(text: str) -> list[str]:
    if text in ("", "none"):
        return []
    return list(dict.fromkeys(each.strip() for each in text.split(",")))


def clear(cli: Cli, database: Database) -> Note:
    """Take the rules of a database away.

    Every snapshot is kept then, and none is made by itself.
    """
    with cli.owner() as store:
        before = store.manifest.retention.get(database)
        if before is not None:
            store.manifest.retention.set(database, None)
    text = f"{database} has no retention policy now" if before else f"{database} had no retention policy"
    return Note(text=text, data={"database": database, "cleared": plain(before)})


# ── what it does ──────────────────────────────────────────────────────────────────────────────────────────────────────
def plan(cli: Cli, database: Database) -> Report:
    """Show what would go now, and why; nothing is dropped."""
    with cli.reader() as manifest:
        found = manifest.retention.plan(database)
        share = share_of(manifest, found)
    closing = [verdict_text(found)]
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
        **policy_json(database, found),
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
        raise InvalidInput("name a database, or say `--all`", hint="`quire ls` lists the databases")
    from quire.cli.retention_apply import apply_all, apply_one, outlook

    if dry_run:
        return outlook(cli) if every else plan(cli, database)
    return apply_all(cli, force, yes) if every else apply_one(cli, database, force, yes)


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────
def _facts(database: str, found: RetentionPlan) -> list[tuple[str, str]]:
    rules = _rules(found.policy)
    schedules = ", ".join(found.policy.schedules) if found.policy else ""
    return [
        ("database", database),
        ("keeps", "; ".join(rules) or "every snapshot: there is no rule"),
        ("makes", f"{schedules} snapshots" if schedules else "no snapshots by itself"),
        ("now", verdict_text(found)),
    ]


def _rules(policy: RetentionRecord | None) -> list[str]:
    if policy is None or not has_rules(policy):
        return []
    rules = ["those that a person named"] if policy.keep_named else []
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


def verdict_text(found: RetentionPlan) -> str:
    """How many would stay, how many would go."""
    total, going = len(found.decisions), len(found.dropped)
    if not total:
        return "there are no snapshots"
    if not going:
        return f"{count_of(total, 'snapshot')}, all kept"
    return f"{total - going:,} of {count_of(total, 'snapshot')} kept, {going:,} would go"


def policy_json(database: str, found: RetentionPlan) -> dict[str, Any]:
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


def share_of(manifest: ManifestStore, found: RetentionPlan) -> Share:
    """What only those hold that would go."""
    with manifest.read() as txn:
        return snapshots_share(txn, found.db_id, [each.snapshot_id for each in found.dropped])
