"""The command `verify`: compares every byte of a store, on every tier, with the manifest; interactively or from cron.

Rules
  1. Artifacts not verified for the longest time come first, and the manifest records when each was verified: a nightly run with
     `--max-duration` covers everything over several days.
  2. The exit code is 1 if something is missing or altered now, no matter when that was found; with `--audit` also if a count, a
     head or a floor differs from what rows add up to. A run that `--max-duration` ends is no problem: it did what was asked.
  3. `--report` writes a table of all damage (and, with `--orphans`, of objects that no row refers to) as Parquet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.declarations import Option, command
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import JobSession, failure_of
from quire.cli.lookup import DryRun, Runner, need_report_path, need_runner
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Report
from quire.core.clock import moment
from quire.core.time_parsing import parse_duration
from quire.manifest.verification import file_problems

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.manifest.store import ManifestStore

LISTED = 50
"""Most damaged artifacts to show as text; `--report` and `--json` have all of them."""


@command("verify", example="quire verify --max-age 7d --max-duration 1h")
def verify(
    cli: Cli,
    max_age: Annotated[
        str, Option(metavar="AGE", help="Skip what was verified within this time: 90s, 15m, 2h, 7d.")
    ] = "",
    max_duration: Annotated[str, Option(metavar="TIME", help="Stop after this long.")] = "",
    report: Annotated[str, Option(metavar="FILE", help="Write the damage report to a Parquet file.")] = "",
    orphans: Annotated[
        bool, Option("--orphans", help="Also find orphans: objects that the manifest does not name.")
    ] = False,
    sweep: Annotated[bool, Option("--sweep", help="As --orphans, and delete them.")] = False,
    audit: Annotated[bool, Option("--audit", help="Also recompute reference counts, heads and floors.")] = False,
    runner: Runner = "",
    dry_run: DryRun = False,
) -> Report | CliResult:
    """Read every stored byte and compare it with the manifest.

    This covers chunks, deltas, WAL segments, streams and their logs, key-value tables, logs, snapshots and backups, and the
    manifest itself, on disk and in the object store. The exit code is 1 if data is missing or altered, and 0 if
    --max-duration ended the run before it found any.
    """
    need_runner(runner)
    need_report_path(report)
    age = parse_duration(max_age, "--max-age") if max_age else 0
    longest = parse_duration(max_duration, "--max-duration") if max_duration else 0
    if dry_run:
        with cli.reader() as manifest:
            return _outlook(manifest, age)

    with cli.owner(upkeep=True) as store:
        session, ran, swept = JobSession(store), [], []
        counted: list[dict[str, Any]] = []

        def work() -> None:
            ran.append(store.heavy.verify(max_age_seconds=age, max_duration_seconds=longest, runner=runner))
            if orphans or sweep:
                swept.append(store.heavy.sweep(delete=sweep, runner=runner))
            if audit:
                counted.extend(store.heavy.recount(runner=runner))

        session.watch(work)
        for job in (*ran, *swept):
            if (failure := failure_of(job, f"the {job.kind.name.lower()}")) is not None:
                raise failure
        damage = [*store.heavy.damaged(), *counted]
        strays = [{"state": "ORPHANED", **orphan} for orphan in (swept[0].result["orphans"] if swept else [])]
        if report:
            store.heavy.write_report(report, [*counted, *strays])
    return _verdict(ran[0].result, damage, strays, swept[0].result if swept else {})


def _verdict(
    result: dict[str, Any], damage: list[dict[str, Any]], strays: list[dict[str, Any]], swept: dict[str, Any]
) -> CliResult:
    facts = {
        "read": f"{count_of(result['verified'] + result['missing'] + result['altered'], 'artifact')}, "
        f"{size(result['bytes'])}",
        "verified": f"{result['verified']:,}",
        "missing": f"{result['missing']:,}",
        "altered": f"{result['altered']:,}",
        "remaining": f"{result['left']:,}",
    }
    data: dict[str, Any] = {**result, "damaged": damage}
    logs: list[str] = result.get("logs", [])
    if logs:
        facts["manifest logs"] = "; ".join(logs[:LISTED])

    files = file_problems(result)
    if not result["complete"]:
        facts["not read"] = "manifest, logs and key-value sets: `--max-duration` was reached"
    if swept:
        facts["orphaned objects"] = f"{swept['orphaned']:,} ({size(swept['bytes'])}), {swept['deleted']:,} deleted"
        data |= {"orphaned": swept["orphaned"], "deleted": swept["deleted"], "orphans": strays}
    rows = [
        ListingRow(
            [
                artifact["state"].lower(),
                artifact.get("artifact") or artifact["what"],
                size(artifact.get("size_bytes", 0)),
            ],
            artifact,
        )
        for artifact in damage[:LISTED]
    ]
    rows += [ListingRow(["damaged", line, ""], problem) for line, problem in zip(files, result.get("problems", []))][
        :LISTED
    ]
    left = len(damage) + len(files) - len(rows)
    listing = Listing(
        columns=["state", "artifact", ">size"],
        rows=rows,
        empty="no other damage found" if logs else "no damage found",
        closing=f"{left:,} more: `--report FILE` lists all" if left else "",
    )
    parts: list[Facts | Listing] = [
        Facts(lines=list(facts.items()), data=facts),
        _kinds(result.get("kinds", {})),
        listing,
    ]
    return CliResult(Report(parts=parts, data=data), PROBLEMS if damage or logs or files else OK)


def _kinds(kinds: dict[str, dict[str, int]]) -> Listing:
    """Return a listing of what was read, by kind."""
    rows = [
        ListingRow(
            [kind, f"{counts['files']:,}", size(counts["bytes"]), f"{counts['problems']:,}"], {"kind": kind, **counts}
        )
        for kind, counts in kinds.items()
    ]
    return Listing(columns=["kind", ">files", ">size", ">problems"], rows=rows, empty="nothing to read")


def _outlook(manifest: ManifestStore, age: float) -> Report:
    from quire.jobs.verify.job import plan_aged  # loads Arrow

    with manifest.read() as txn:
        aged = plan_aged(txn, manifest.clock.now_ms(), age)
    oldest = "none" if not aged.left else (moment(aged.oldest_ms) if aged.oldest_ms else "never verified")
    facts = {"to verify": count_of(aged.left, "artifact"), "size": size(aged.size_bytes), "oldest": oldest}
    data = {"left": aged.left, "bytes": aged.size_bytes, "oldest_ms": aged.oldest_ms}
    return Report(parts=[Facts(lines=list(facts.items()), data=facts)], data=data)
