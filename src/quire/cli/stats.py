"""The commands `stats`, the space used by each database, and `metrics`, the rolling metrics of each database."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import nsmallest
from typing import TYPE_CHECKING, Annotated, Any

from msgspec.structs import replace

from quire.cli.declarations import Option, command
from quire.cli.errors import OK
from quire.cli.formatting import count_of, size
from quire.cli.job_progress import bar
from quire.cli.lookup import After, DryRun, Kind, Limit, Prefix, Runner, Tag, limit_of, more_text, need_runner
from quire.cli.output import CliResult, Facts, Listing, ListingRow, Note, Report
from quire.core.errors import InvalidInput
from quire.core.json_values import plain
from quire.durable.space import measure, measure_databases
from quire.jobs.stats.job import Usage, blocks, usage, with_disk
from quire.manifest import tables as t
from quire.manifest.kv_tables import table_holders
from quire.manifest.metrics import ManifestCollector, rolling
from quire.service.values import DatabaseFilter
from quire.store.listing import matching, page_of
from quire.store.usage import usage_of

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.durable.space import Space
    from quire.manifest.metrics import RollingMetric
    from quire.manifest.reads import ReadTxn
    from quire.manifest.store import ManifestStore


@command("stats", example="quire stats --snapshots")
def stats(
    cli: Cli,
    prefix: Prefix = "",
    kind: Kind = "",
    tag: Tag = "",
    snapshots: Annotated[bool, Option("--snapshots", help="Also list each snapshot.")] = False,
    sort: Annotated[
        str,
        Option("--sort", metavar="ORDER", help="name, written; or the largest first: size, alone, wal, disk."),
    ] = "name",
    limit: Limit = None,
    after: After = "",
    runner: Runner = "",
    dry_run: DryRun = False,
) -> Listing | Report:
    """Show the space that each database uses, exclusive and shared.

    It also shows the WAL, compression, bytes written in the last day, and tiers. Snapshots count with their database.
    `alone` is what dropping the database would free; `on disk` is the space of its files, as `du` reports it.
    """
    need_runner(runner)
    if dry_run:
        with cli.reader() as manifest:
            return _outlook(manifest)
    if sort not in (*SORTS, "name", "written"):
        raise InvalidInput("unknown sort order", hint=f"name, written, {', '.join(SORTS)}", sort=sort)
    if after and sort != "name":
        raise InvalidInput("only a list by name continues after a name", hint="use --sort name", sort=sort)
    most = limit_of(limit, as_json=cli.as_json)
    wanted = DatabaseFilter(
        prefix=prefix, kind=kind, tag=tag, sort="name" if sort in SORTS else sort, limit=most, after=after
    )
    path = os.path.abspath(cli.path)
    if runner:
        with cli.owner() as store, bar("stats") as report:
            rows = store.heavy.stats(runner=runner, progress=report)
            with store.manifest.read() as txn:
                shown, closing = _of_all(txn, rows, measure(path), wanted, sort=sort, snapshots=snapshots)
    else:
        with cli.reader() as manifest, manifest.read() as txn:
            if sort in SORTS or not most or txn.count(t.DB) <= most:
                usages = usage(txn, manifest.clock.now_ms())
                shown, closing = _of_all(txn, usages, measure(path), wanted, sort=sort, snapshots=snapshots)
            else:
                shown, closing = _of_page(txn, manifest.clock.now_ms(), path, wanted, snapshots=snapshots)
    return Listing(
        columns=["database", ">size", ">alone", ">shared", ">WAL", ">on disk", ">compression", ">last day", "tiers"],
        rows=[
            ListingRow(_cells(usage_row), {**plain(usage_row), "compression": round(usage_row.compression, 3)})
            for usage_row in shown
        ],
        empty="no database matches" if prefix or kind or tag or after else "no databases",
        closing=closing,
    )


SORTS = {"size": "size_bytes", "alone": "exclusive_bytes", "wal": "wal_bytes", "disk": "disk_bytes"}
"""Sort orders that need the figures of every database → the field to sort by."""


def _of_page(
    txn: ReadTxn, now_ms: int, path: str, wanted: DatabaseFilter, *, snapshots: bool
) -> tuple[list[Usage], str]:
    """Return (rows, closing line) for one page of databases, without reading the others."""
    page, last = page_of(txn, wanted)
    given = measure_databases(path, (db_id for db_id, _ in page))
    holders = table_holders(txn)
    shown = []
    for db_id, record in page:
        rows = usage_of(txn, db_id, record, now_ms, holders)
        shown.append(replace(next(rows), disk_bytes=given[db_id]))
        if snapshots:
            shown += rows
    total = "`quire info` shows the disk usage of the store"
    return shown, f"{more_text(last, wanted.sort)}\n{total}" if last else total


def _of_all(
    txn: ReadTxn, usages: Iterable[Usage], space: Space, wanted: DatabaseFilter, *, sort: str, snapshots: bool
) -> tuple[list[Usage], str]:
    """Return (rows, closing lines) from the figures of all databases; only the rows that are shown are kept in memory."""
    counts, unlisted = {"rows": 0}, set(space.databases)
    is_chosen = wanted.sort != "name" or wanted.kind or wanted.tag or wanted.prefix or wanted.after
    matches = matching(txn, replace(wanted, limit=0)) if is_chosen else ()
    places = {db_id: place for place, (db_id, _) in enumerate(matches)}

    def chosen() -> Iterator[Usage]:
        for row in with_disk(usages, space):
            unlisted.discard(row.db_id)
            if (snapshots or not row.snapshot) and (row.db_id in places or not is_chosen):
                counts["rows"] += 1
                yield row

    order = _order(sort, places if is_chosen else None)
    shown = nsmallest(wanted.limit, chosen(), key=order) if wanted.limit else sorted(chosen(), key=order)
    closing = _on_disk(unlisted, txn.damaged_databases(), space)
    left_out = counts["rows"] - len(shown)
    return shown, f"{count_of(left_out, 'more row')}\n{closing}" if left_out else closing


def _order(sort: str, places: dict[int, int] | None) -> Callable[[Usage], Any]:
    """Return the key to sort by. Rows of one key keep their order: the snapshots of a database follow it."""
    if sort in SORTS:
        return lambda row: -getattr(row, SORTS[sort])
    if places is not None:
        return lambda row: places[row.db_id]
    return lambda row: row.database  # dropped databases have no place in the index of names


def _outlook(manifest: ManifestStore) -> Report:
    """Report how many rows `stats` would add up. The command changes nothing in any case."""
    with manifest.read() as txn:
        counts = {"fact": 0, "holding": 0}
        for block in blocks(txn, manifest.clock.now_ms()):
            counts[block.sort] += len(block.rows)
    facts = {"artifacts": f"{counts['fact']:,}", "references": f"{counts['holding']:,}"}
    data = {"artifacts": counts["fact"], "references": counts["holding"], "dry_run": True}
    return Report(parts=[Facts(lines=list(facts.items()), data=facts)], data=data)


def _on_disk(unlisted: set[int], damaged: Collection[int], space: Space) -> str:
    """Describe the space that the store's directory uses, and how much of it belongs to no listed database."""
    others = {name: amount for name, amount in sorted(space.others.items()) if name != "store"}
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
    churn = "-" if usage_row.table_bytes else size(usage_row.churn_bytes)
    return [name, *(size(amount) for amount in amounts), disk, ratio, churn, tiers or "-"]


@command("metrics", example="quire metrics")
def metrics(
    cli: Cli,
    prometheus: Annotated[bool, Option("--prometheus", help="In the Prometheus format, as `/metrics` has it.")] = False,
) -> Listing | Note | CliResult:
    """Show the rolling metrics kept in the manifest.

    These are WAL lag, the latency of checkpoints and merges, and snapshots. Each is written in the transaction that it
    measures.
    """
    with cli.reader() as manifest:
        if prometheus:
            from prometheus_client import CollectorRegistry, generate_latest

            registry = CollectorRegistry(auto_describe=False)
            registry.register(ManifestCollector(manifest))
            text = generate_latest(registry).decode()
            if cli.as_json:
                return Note(text="", data={"prometheus": text})
            sys.stdout.write(text)  # not formatted: another program reads it
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
