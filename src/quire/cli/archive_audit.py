"""The command `archive audit`: whether every moment that an archive has can be restored, by reading it from its bucket."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from quire.cli.command import Cli, CliResult, on_terminal
from quire.cli.declarations import Argument, Option
from quire.cli.errors import OK, PROBLEMS
from quire.cli.formatting import count_of, moment, size
from quire.cli.lookup import Runner, need_runner
from quire.cli.output import Facts, Listing, Report, Row
from quire.jobs.audit.table import write_report
from quire.store.layout import objects_url
from quire.store.object_location import options_of

if TYPE_CHECKING:
    from quire.jobs.archive_audit.audit import ArchiveAudit

LISTED = 50
"""Differences that are shown to people; `--report` and `--json` have them all."""


def audit(
    cli: Cli,
    url: Annotated[
        str, Argument(metavar="[URL]", help="The bucket, if the store's directory is lost.", show_default="the store's")
    ] = "",
    store_id: Annotated[str, Option(metavar="ID", help="Which store, if several share the bucket.")] = "",
    report: Annotated[str, Option(metavar="FILE", help="Write the differences to a Parquet file.")] = "",
    runner: Runner = "",
) -> CliResult:
    """Read the whole archive and check that every moment in it can be restored.

    That is log objects, bases, tables, compressed segments, and the chunks and segments that rows of any restorable moment
    name, by their digests. Also lists objects that nothing names. Reads only the bucket. Exit code 1 if something is missing or
    altered; orphans do not count.
    """
    from quire.store.archive_audit import audit_bucket  # loads Arrow, which other commands about archives do without

    need_runner(runner)
    if url:
        result = audit_bucket(url, store_id=store_id, runner=runner, progress=_Percent())
    else:
        with cli.reader() as manifest, manifest.read() as txn:
            place = objects_url(cli.path, cli.settings())
            store_id, options = store_id or txn.store_id(), options_of(txn, cli.settings(), place)
        result = audit_bucket(place, store_id=store_id, options=options, runner=runner, progress=_Percent())
    if report:
        write_report(report, [*result.problems, *result.orphans])
    return _verdict(result)


class _Percent:
    """Percent on the terminal, where a person watches."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, done: int, total: int) -> None:
        percent = done * 100 // max(total, 1)
        if percent != self._shown and on_terminal():
            self._shown = percent
            sys.stderr.write(f"\r{percent} % read" + ("\n" if done >= total else ""))
            sys.stderr.flush()


def _verdict(audit: ArchiveAudit) -> CliResult:
    lines = [
        ("store", audit.store_id),
        ("restorable", f"{moment(audit.oldest_at_ms)} to {moment(audit.newest_at_ms)}" if audit.oldest_at_ms else "-"),
        ("read", f"{count_of(audit.objects, 'object')}, {size(audit.size_bytes)}; {audit.log_objects:,} of the log"),
        ("missing or altered", f"{len(audit.problems):,}"),
        ("orphans", f"{len(audit.orphans):,}, {size(sum(row['size_bytes'] for row in audit.orphans))}"),
    ]
    if audit.abandoned:
        epochs = ", ".join(f"epoch {epoch}: {count_of(n, 'object')}" for epoch, n in sorted(audit.abandoned.items()))
        lines.append(("abandoned", f"{epochs}; removed only by name"))
    differences = [*audit.problems, *audit.orphans]
    left = len(differences) - LISTED
    listing = Listing(
        columns=["state", "object", "what"],
        rows=[Row([row["state"].lower(), row["artifact"] or "-", row["what"]], row) for row in differences[:LISTED]],
        empty="every moment can be restored",
        closing=f"{left:,} more: `--report FILE` lists all" if left > 0 else "",
    )
    data = {
        "store_id": audit.store_id,
        "oldest_at_ms": audit.oldest_at_ms,
        "newest_at_ms": audit.newest_at_ms,
        "log_objects": audit.log_objects,
        "objects": audit.objects,
        "size_bytes": audit.size_bytes,
        "runner": audit.runner,
        "problems": audit.problems,
        "orphans": audit.orphans,
        "abandoned": {str(epoch): n for epoch, n in audit.abandoned.items()},
    }
    shown = Report(parts=[Facts(lines=lines, data=None), listing], data=data)
    return CliResult(shown, OK if audit.is_sound else PROBLEMS)
