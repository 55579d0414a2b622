"""Commands about a store and its databases: init, ls, info, create, drop, rename.

Each does one call of `Store` and says what came of it. Reading commands open the store for reading.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.command import Cli, Verdict, command
from quire.cli.exits import PROBLEMS
from quire.cli.output import Facts, Listing, Note, Row
from quire.cli.plain import count_of, moment, plain, size
from quire.core.errors import InvalidInput

if TYPE_CHECKING:
    from quire.store.info import DatabaseInfo

Name = Annotated[str, typer.Argument(help="The database's name.")]


def add_to(app: typer.Typer) -> None:
    """Register these commands."""
    command(app, "init", example="quire init ./data --object-store s3://bucket/prefix")(init)
    command(app, "ls", example="quire ls --store ./data")(ls)
    command(app, "info", example="quire info --json")(info)
    command(app, "create", example="quire create shop --kind pages")(create)
    command(app, "drop", example="quire drop shop --yes")(drop)
    command(app, "rename", example="quire rename shop store")(rename)


def init(
    cli: Cli,
    path: Annotated[str, typer.Argument(help="The directory; it is made if need be.", show_default="--store")] = "",
    object_store: Annotated[
        str,
        typer.Option(help="Where objects live: a path, s3://…, gs://…, az://…", show_default="objects/ in the store"),
    ] = "",
) -> Note:
    """Make a store, or see that one is there."""
    from quire.core.settings import StoreSettings
    from quire.durable.files import OsDisk
    from quire.objects.open import open_store
    from quire.store.layout import Found, look
    from quire.store.store import open as open_quire

    target = path or cli.path
    if object_store:
        open_store(object_store).close()  # refuses what cannot work, before anything is made
    found = look(OsDisk(), target) is Found.STORE
    settings = StoreSettings(object_store=object_store) if object_store else None
    with open_quire(target, "r" if found else "rw", settings=settings) as store:
        text = f"{store.path} is a store already" if found else f"made a store in {store.path}"
        return Note(text=text, data={"path": store.path, "created": not found, "object_store": store.objects_url})


def ls(cli: Cli) -> Listing:
    """List the databases of a store."""
    with cli.reader() as store:
        found = store.databases()
    return Listing(
        columns=["name", "kind", "status", ">snapshots", "created", "forked from"],
        rows=[Row(_cells(each), each) for each in found],
        empty="no databases yet: `quire create NAME --kind pages` makes one",
    )


def _cells(each: DatabaseInfo) -> list[str]:
    status = each.status.name.lower().replace("_", "-")
    return [each.name, each.kind.name.lower(), status, str(each.snapshots), moment(each.created_at_ms), each.parent]


def info(cli: Cli) -> Facts:
    """Show a store in numbers."""
    with cli.reader() as store:
        found = store.info()
    databases = ", ".join(f"{count:,} {kind}" for kind, count in found.databases.items() if count) or "none"
    changes = f"{found.oldest_change:,} to {found.newest_change:,}" if found.oldest_change else "none"
    return Facts(
        lines=[
            ("store", found.path),
            ("id", f"{found.store_id} (schema {found.schema})"),
            ("objects", found.object_store),
            ("databases", databases + (f"; {found.dropped:,} dropped" if found.dropped else "")),
            ("snapshots", f"{found.snapshots:,}"),
            ("artifacts", f"{found.chunks:,} chunks, {found.deltas:,} deltas, {found.wal_segments:,} WAL segments"),
            ("unreferenced", f"{count_of(found.unreferenced, 'artifact')} waiting for the collector"),
            ("jobs", f"{found.jobs:,}"),
            ("change feed", changes),
            ("manifest", f"{size(found.manifest_bytes)} in a map of {size(found.map_bytes)}"),
            ("readers", f"{count_of(found.readers, 'slot')} in use"),
        ],
        data=found,
    )


def create(cli: Cli, name: Name, kind: Annotated[str, typer.Option(help="pages, stream or lsm.")] = "pages") -> Note:
    """Make a database."""
    with cli.owner() as store:
        made = store.create(name, kind)
    return Note(text=f"made {made.name}, a {made.kind.name.lower()} database with id {made.db_id}", data=made)


def drop(
    cli: Cli,
    name: Name,
    snapshots: Annotated[bool, typer.Option("--snapshots", help="Drop its snapshots with it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> Note | Verdict:
    """Drop a database. Its name is free at once; its space is freed when nothing refers to it."""
    with cli.owner() as store:
        found = store.database(name)
        if not yes:
            also = f" with {count_of(found.snapshots, 'snapshot')}" if snapshots and found.snapshots else ""
            if not _agreed(f"drop {found.kind.name.lower()} database {name}{also}?"):
                return Verdict(Note(text="nothing was dropped", data={"dropped": None}), PROBLEMS)
        store.drop(name, snapshots=snapshots)
    return Note(text=f"dropped {name}", data={"dropped": plain(found)})


def _agreed(question: str) -> bool:
    """Ask on stderr: stdout belongs to the command's value."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        sys.stderr.write("\n")
        raise InvalidInput("nobody answered, so nothing was dropped", hint="say `--yes` where nobody can answer")
    return answer.strip().lower() in ("y", "yes")


def rename(
    cli: Cli,
    old: Annotated[str, typer.Argument(help="Its name now.")],
    new: Annotated[str, typer.Argument(help="Its name then.")],
) -> Note:
    """Give a database another name."""
    with cli.owner() as store:
        renamed = store.rename(old, new)
    return Note(text=f"{old} is called {new} now", data=renamed)
