"""The command `stats`: where the bytes are, database by database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from quire.cli.bar import bar
from quire.cli.checkpoint import DryRun, Runner, need_runner
from quire.cli.command import Cli
from quire.cli.declared import Group, Option, command
from quire.cli.output import Facts, Listing, Report, Row
from quire.cli.plain import plain, size

if TYPE_CHECKING:
    from quire.jobs.stats.compute import Usage
    from quire.manifest.store import ManifestStore


def add_to(app: Group) -> None:
    """Register this command."""
    command(app, "stats", example="quire stats --snapshots")(stats)


def stats(
    cli: Cli,
    snapshots: Annotated[bool, Option("--snapshots", help="Also each snapshot by itself.")] = False,
    runner: Runner = "",
    dry_run: DryRun = False,
) -> Listing | Report:
    """Show what each database takes, alone and shared.

    Also its WAL, how well it compresses, what the last day has written, and in which tier it lies. A database is counted with
    its snapshots. `alone` is what dropping it would free.
    """
    from quire.jobs.stats.compute import usage

    need_runner(runner)
    if dry_run:
        with cli.reader() as manifest:
            return _outlook(manifest)
    if runner:
        with cli.owner() as store, bar("stats") as told:
            found = store.heavy.stats(runner=runner, progress=told)
    else:
        with cli.reader() as manifest, manifest.read() as txn:
            found = usage(txn, manifest.clock.now_ms())
    shown = [each for each in found if snapshots or not each.snapshot]
    return Listing(
        columns=["database", ">size", ">alone", ">shared", ">WAL", ">compression", ">last day", "tiers"],
        rows=[Row(_cells(each), {**plain(each), "compression": round(each.compression, 3)}) for each in shown],
        empty="there are no databases",
    )


def _outlook(manifest: ManifestStore) -> Report:
    """What there is to be added up. Nothing is changed by it anyway."""
    from quire.jobs.stats.compute import blocks

    with manifest.read() as txn:
        counts = {"fact": 0, "holding": 0}
        for block in blocks(txn, manifest.clock.now_ms()):
            counts[block.sort] += len(block.rows)
    facts = {"artifacts": f"{counts['fact']:,}", "references to them": f"{counts['holding']:,}"}
    data = {"artifacts": counts["fact"], "references": counts["holding"], "dry_run": True}
    return Report(parts=[Facts(lines=list(facts.items()), data=facts)], data=data)


def _cells(each: Usage) -> list[str]:
    tiers = ", ".join(f"{name.replace('_', ' ')} {size(amount)}" for name, amount in sorted(each.tiers.items()))
    name = f"  {each.snapshot}" if each.snapshot else each.database
    ratio = f"{each.compression:.2f}" if each.chunk_bytes else "-"
    amounts = (each.size_bytes, each.exclusive_bytes, each.shared_bytes, each.wal_bytes)
    return [name, *(size(amount) for amount in amounts), ratio, size(each.churn_bytes), tiers or "-"]
