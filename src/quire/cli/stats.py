"""The commands `stats`, where the bytes are, and `metrics`, what was observed, database by database."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

from quire.cli.command import Cli, CliResult
from quire.cli.declarations import Argument, Option, command
from quire.cli.errors import OK
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import bar
from quire.cli.lookup import DryRun, Runner, need_runner
from quire.cli.output import Facts, Listing, ListingRow, Note, Report
from quire.core.errors import InvalidInput
from quire.core.json_values import plain
from quire.durable.space import measure
from quire.jobs.stats.job import Usage, blocks, usage, with_disk
from quire.manifest.metrics import ManifestCollector, rolling

if TYPE_CHECKING:
    from quire.durable.space import Space
    from quire.manifest.metrics import RollingMetric
    from quire.manifest.store import ManifestStore


@command("stats", example="quire stats --snapshots")
def stats(
    cli: Cli,
    prefix: Annotated[str, Argument(metavar="[PREFIX]", help="Only names with this prefix.")] = "",
    snapshots: Annotated[bool, Option("--snapshots", help="Also list each snapshot.")] = False,
    sort: Annotated[
        str, Option("--sort", metavar="ORDER", help="name; or the largest first: size, alone, wal, disk.")
    ] = "",
    limit: Annotated[int, Option("--limit", "-n", min=0, help="Maximum number of rows; 0 for all.")] = 0,
    runner: Runner = "",
    dry_run: DryRun = False,
) -> Listing | Report:
    """Show the space that each database uses, exclusive and shared.

    Also its WAL, its compression, what was written in the last day, and its tiers. Snapshots count with their database.
    `alone` is what dropping the database would free; `on disk` is the space of its files, as `du` reports it.
    """
    need_runner(runner)
    if dry_run:
        with cli.reader() as manifest:
            return _outlook(manifest)
    if runner:
        with cli.owner() as store, bar("stats") as report:
            usages = store.heavy.stats(runner=runner, progress=report)
            with store.manifest.read() as txn:
                damaged = txn.damaged_databases()
    else:
        with cli.reader() as manifest, manifest.read() as txn:
            usages, damaged = usage(txn, manifest.clock.now_ms()), txn.damaged_databases()
    space = measure(os.path.abspath(cli.path))
    usages = with_disk(usages, space)
    shown = [row for row in usages if (snapshots or not row.snapshot) and row.database.startswith(prefix)]
    if sort:
        shown = _in_order(shown, sort)
    left_out = len(shown) - limit if limit else 0
    shown = shown[:limit] if limit else shown
    return Listing(
        columns=["database", ">size", ">alone", ">shared", ">WAL", ">on disk", ">compression", ">last day", "tiers"],
        rows=[
            ListingRow(_cells(usage_row), {**plain(usage_row), "compression": round(usage_row.compression, 3)})
            for usage_row in shown
        ],
        empty="no databases",
        closing=(f"{count_of(left_out, 'more row')}\n" if left_out > 0 else "") + _on_disk(usages, damaged, space),
    )


SORTS = {"size": "size_bytes", "alone": "exclusive_bytes", "wal": "wal_bytes", "disk": "disk_bytes"}


def _in_order(usages: list[Usage], sort: str) -> list[Usage]:
    if sort == "name":
        return sorted(usages, key=lambda row: (row.database, row.snapshot))
    if sort not in SORTS:
        raise InvalidInput("unknown sort order", hint=f"name, {', '.join(SORTS)}", sort=sort)
    return sorted(usages, key=lambda row: getattr(row, SORTS[sort]), reverse=True)


def _outlook(manifest: ManifestStore) -> Report:
    """What there is to be added up. Nothing is changed by it anyway."""
    with manifest.read() as txn:
        counts = {"fact": 0, "holding": 0}
        for block in blocks(txn, manifest.clock.now_ms()):
            counts[block.sort] += len(block.rows)
    facts = {"artifacts": f"{counts['fact']:,}", "references": f"{counts['holding']:,}"}
    data = {"artifacts": counts["fact"], "references": counts["holding"], "dry_run": True}
    return Report(parts=[Facts(lines=list(facts.items()), data=facts)], data=data)


def _on_disk(usages: list[Usage], damaged: Collection[int], space: Space) -> str:
    """What the store's directory takes, and how much of it belongs to no listed database."""
    others = {name: amount for name, amount in sorted(space.others.items()) if name != "store"}
    unlisted = space.databases.keys() - {usage_row.db_id for usage_row in usages}
    others["damaged databases"] = sum(space.databases[db_id] for db_id in unlisted.intersection(damaged))
    others["dropped databases"] = sum(space.databases[db_id] for db_id in unlisted.difference(damaged))
    others["other files"] = space.others.get("store", 0)
    parts = ", ".join(f"{name} {size(amount)}" for name, amount in others.items() if amount)
    return f"on disk: {size(space.total_bytes)} in total; outside the databases: {parts}"


def _cells(usage_row: Usage) -> list[str]:
    tiers = ", ".join(f"{name.replace('_', ' ')} {size(amount)}" for name, amount in sorted(usage_row.tiers.items()))
    name = f"  {usage_row.snapshot}" if usage_row.snapshot else usage_row.database
    ratio = f"{usage_row.compression:.2f}" if usage_row.chunk_bytes else "-"
    amounts = (usage_row.size_bytes, usage_row.exclusive_bytes, usage_row.shared_bytes, usage_row.wal_bytes)
    disk = "-" if usage_row.snapshot else size(usage_row.disk_bytes)
    return [name, *(size(amount) for amount in amounts), disk, ratio, size(usage_row.churn_bytes), tiers or "-"]


@command("metrics", example="quire metrics")
def metrics(
    cli: Cli,
    prometheus: Annotated[bool, Option("--prometheus", help="In the Prometheus format, as `/metrics` has it.")] = False,
) -> Listing | Note | CliResult:
    """Show the rolling metrics kept in the manifest.

    That is WAL lag, the latency of checkpoints and merges, and snapshots. Each is written in the transaction that it measures.
    """
    with cli.reader() as manifest:
        if prometheus:
            from prometheus_client import CollectorRegistry, generate_latest

            registry = CollectorRegistry(auto_describe=False)
            registry.register(ManifestCollector(manifest))
            text = generate_latest(registry).decode()
            if cli.as_json:
                return Note(text="", data={"prometheus": text})
            sys.stdout.write(text)  # as it is: this is for a program
            return CliResult(None, OK)
        with manifest.read() as txn:
            kept = rolling(txn)
    return Listing(
        columns=["database", "metric", ">count", ">mean", ">min", ">max", ">last"],
        rows=[ListingRow(_metric_cells(metric), {**plain(metric), "mean": metric.mean}) for metric in kept],
        empty="no metrics yet",
    )


def _metric_cells(metric: RollingMetric) -> list[str]:
    record = metric.record
    shown = [f"{value:,.0f}" for value in (metric.mean, record.min, record.max, record.last)]
    return [
        metric.database or (f"database {metric.db_id}" if metric.db_id else "-"),
        metric.metric,
        f"{record.count:,}",
        *shown,
    ]
