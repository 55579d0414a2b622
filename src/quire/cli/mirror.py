"""Commands about mirrors: create, run, status, ls, drop.

A mirror is run by the store's owner; `status` and `ls` read alongside it and see what the owner has published, which is at most
a second old.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.formatting import behind_text, count_of, size
from quire.cli.job_progress import JobSession
from quire.cli.lookup import Runner, Yes, need_runner, tags_of
from quire.cli.output import Facts, Listing, ListingRow, Note, Report
from quire.cli.prompts import confirm
from quire.core.clock import SystemClock, moment
from quire.core.errors import InvalidInput
from quire.core.time_parsing import duration, parse_duration
from quire.jobs.mirror.change_detection import find_mirror
from quire.store.mirrors import mirror_status, mirror_statuses

if TYPE_CHECKING:
    from quire.cli.command import Cli
    from quire.service.values import MirrorRun, MirrorStatus

group = Group("mirror")

Name = Annotated[str, Argument(metavar="NAME", help="The mirror's name.")]


@command("create", group, example="quire mirror create lake --databases 'tenant-*' --table orders --to delta:./lake")
def create(
    cli: Cli,
    name: Name,
    databases: Annotated[
        list[str] | None,
        Option(
            "--databases",
            metavar="PATTERN",
            help="Databases to follow, as patterns separated by commas; repeatable.  [required]",
        ),
    ] = None,
    table: Annotated[str, Option("--table", metavar="TABLE", help="The table to mirror.  [required]")] = "",
    to: Annotated[
        str,
        Option("--to", metavar="TARGET", help="delta:URL, iceberg:CATALOG.NAMESPACE.TABLE or parquet:URL.  [required]"),
    ] = "",
    every: Annotated[str, Option("--every", metavar="15m", help="How often the owner runs it.")] = "",
    option: Annotated[
        list[str] | None,
        Option("--option", metavar="KEY=VALUE", help="An option of the mirror or its target; repeatable."),
    ] = None,
) -> Report:
    """Define a lakehouse table that follows a table of many databases.

    Nothing is written before its first run. Databases that match later are included.
    """
    if not databases or not table or not to:
        hint = "quire mirror create NAME --databases 'tenant-*' --table orders --to delta:URL"
        raise InvalidInput("a mirror needs --databases, --table and --to", hint=hint)
    seconds = parse_duration(every, "--every") if every else 0
    options = tags_of(option or [], what="option")
    with cli.owner() as store:
        facts = _facts(store.mirrors.create(name, databases, table, to, every_seconds=seconds, options=options))
    when = "the owner runs it on its schedule, or " if every else ""
    loads = Note(text=f"{when}`quire mirror run {shlex.quote(name)}` loads it", data=None)
    return Report(parts=[facts, loads], data=facts.data)


@command("run", group, example="quire mirror run lake")
def run(
    cli: Cli,
    name: Name,
    full: Annotated[bool, Option("--full", help="Write everything again.")] = False,
    runner: Runner = "",
) -> Note:
    """Bring the target of a mirror up to date, with one commit."""
    need_runner(runner)
    with cli.owner(upkeep=True) as store:
        ended: list[MirrorRun] = []
        JobSession(store).watch(lambda: ended.append(store.mirrors.run(name, runner=runner, full=full)))
        text = _sentence(ended[0], store.mirrors.status(name))
    return Note(text=text, data=ended[0])


@command("status", group, example="quire mirror status lake")
def status(cli: Cli, name: Name) -> Facts:
    """Show a mirror and how far its target is behind."""
    with cli.reader() as manifest, manifest.read() as txn:
        return _facts(mirror_status(txn, *find_mirror(txn, name), SystemClock().now_ms()))


@command("ls", group, example="quire mirror ls")
def list_(cli: Cli) -> Listing:
    """List the mirrors."""
    with cli.reader() as manifest, manifest.read() as txn:
        statuses = mirror_statuses(txn, SystemClock().now_ms())
    rows = [
        ListingRow(
            [
                status.name,
                ", ".join(status.databases),
                status.table,
                status.target,
                f"{status.rows:,}",
                f"{status.changed + status.dropped:,}",
                _when(status),
            ],
            status,
        )
        for status in statuses
    ]
    columns = ["name", "databases", "table", "target", ">rows", ">behind", "synced"]
    return Listing(columns=columns, rows=rows, empty="no mirrors: `quire mirror create` defines one")


@command("drop", group, example="quire mirror drop lake --yes")
def drop(cli: Cli, name: Name, yes: Yes = False) -> Note:
    """Drop a mirror. Its target is not changed."""
    if not yes:
        confirm(f"drop the mirror {name}? Its target is not deleted.", "nothing was dropped", {"dropped": None})
    with cli.owner() as store:
        dropped = store.mirrors.drop(name)
    return Note(text=f"dropped the mirror {name}; {dropped.target} is not deleted", data={"dropped": dropped})


def _facts(status: MirrorStatus) -> Facts:
    lines = [
        ("mirror", status.name),
        ("databases", f"{', '.join(status.databases)} ({status.followed:,} now)"),
        ("table", status.table),
        ("target", status.target),
        ("runs", f"every {duration(int(status.every_seconds))}" if status.every_seconds else "on request"),
        ("holds", f"{count_of(status.rows, 'row')} of {count_of(status.held, 'database')}, {size(status.size_bytes)}"),
        ("synced", _when(status)),
        ("behind", behind_text(status) or "nothing"),
        *([("failed", f"{count_of(status.failures, 'run')}; the last: {status.error}")] if status.failures else []),
    ]
    return Facts(lines=lines, data=status)


def _when(status: MirrorStatus) -> str:
    return moment(status.synced_at_ms) if status.synced_at_ms else "never"


def _sentence(run: MirrorRun, status: MirrorStatus) -> str:
    if not run.databases and not run.dropped:
        return f"{run.mirror} has nothing to follow: no database matches {', '.join(status.databases)} yet"
    if not run.changed and not run.dropped:
        return f"{run.mirror} is up to date: none of {count_of(run.databases, 'database')} has changed"
    what = "loaded" if run.full else "updated"
    gone = f", {count_of(run.dropped, 'database')} removed" if run.dropped else ""
    return (
        f"{what} {run.mirror}: {count_of(run.changed, 'database')} of {run.databases:,} written{gone}; "
        f"{count_of(run.rows_written, 'row')}, {size(run.bytes_written)} in {count_of(run.files_added, 'file')}"
        f"{'' if status.rows else f'; none of them has a row in a table {status.table}'}"
    )
