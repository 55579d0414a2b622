"""Commands about namespaces, places beside the store's own for the objects of some databases: create, ls, drop."""

from __future__ import annotations

import os
from typing import Annotated

from quire.cli.command import Cli, Verdict, agreed
from quire.cli.declarations import Argument, Group, command
from quire.cli.exit_codes import PROBLEMS
from quire.cli.formatting import moment
from quire.cli.lookup import Yes
from quire.cli.output import Listing, Note, Row
from quire.store.namespaces import namespaces

Name = Annotated[str, Argument(metavar="NAME", help="The namespace's name, as its section in quire.toml has it.")]


def add_to(app: Group) -> None:
    """Register these commands."""
    group = Group("Manage places for objects besides the store's own.")
    command(group, "create", example="quire namespace create cold s3://cold-bucket/quire")(create)
    command(group, "ls", example="quire namespace ls")(ls)
    command(group, "drop", example="quire namespace drop cold --yes")(drop)
    app.add("namespace", group)


def create(
    cli: Cli,
    name: Name,
    url: Annotated[str, Argument(metavar="URL", help="Where its objects go: a path, s3://…, gs://…, az://…")],
) -> Note:
    """Register a place for the objects of databases that are created with `--namespace NAME`.

    Nothing is contacted. Endpoint and credentials are set in `[namespaces.NAME]` of quire.toml.
    """
    url = url if "://" in url else os.path.abspath(url)
    with cli.owner() as store:
        made = store.namespaces.create(name, url)
    return Note(text=f"objects of databases in {made.name} go to {made.url}", data=made)


def ls(cli: Cli) -> Listing:
    """List the namespaces, and who uses them."""
    with cli.reader() as manifest, manifest.read() as txn:
        found = namespaces(txn)
    rows = []
    for info in found:
        users = ", ".join(info.databases) or "-"
        if info.dropped_at_ms:
            users = f"dropped {moment(info.dropped_at_ms)}"
        elif info.dropped_databases:
            users += f" (and {info.dropped_databases} dropped)"
        rows.append(Row([info.name or str(info.namespace_id), info.url, str(info.objects), users], info))
    columns = ["name", "url", ">objects", "databases"]
    return Listing(columns=columns, rows=rows, empty="no namespaces: all objects are in the store's own object store")


def drop(cli: Cli, name: Name, yes: Yes = False) -> Note | Verdict:
    """Drop a namespace that no database uses. Nothing in its bucket is touched."""
    if not yes and not agreed(f"drop the namespace {name}?", "nothing was dropped"):
        return Verdict(Note(text="nothing was dropped", data={"dropped": None}), PROBLEMS)
    with cli.owner() as store:
        dropped = store.namespaces.drop(name)
    return Note(text=f"dropped the namespace {name}", data={"dropped": dropped})
