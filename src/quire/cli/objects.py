"""Commands about the location and ownership of objects: takeover, objects moved, and namespaces.

`takeover` and `objects moved` open the store as its owner: a running owner must be stopped first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.formatting import count_of
from quire.cli.lookup import Yes
from quire.cli.output import Listing, ListingRow, Note
from quire.cli.prompts import confirm
from quire.core.clock import moment
from quire.store.namespaces import namespaces

if TYPE_CHECKING:
    from quire.cli.command import Cli

objects = Group("objects")
namespace = Group("namespace")

Name = Annotated[str, Argument(metavar="NAME", help="The namespace's name, as in its section of quire.toml.")]


@command("takeover", example="quire takeover --store ./restored --yes")
def takeover(
    cli: Cli,
    discard: Annotated[
        bool, Option("--discard", help="Discard changes that the archive has and this directory lacks.")
    ] = False,
    yes: Yes = False,
) -> Note:
    """Make this directory the owner of its bucket.

    Use it after a store was copied or restored from a backup. It begins a new owner epoch, in which objects get new names. The
    previous owner, if it still runs, is fenced: it deletes nothing more, and writes nothing more after a minute. Nothing in
    the bucket is overwritten or removed.

    If the archive has newer changes than this directory, the takeover is refused: `quire restore-store --takeover` includes
    them, `--discard` discards them, as after a restore to an earlier moment.
    """
    if not yes:
        lost = " Newer changes in the archive are discarded." if discard else ""
        question = (
            f"take over the objects of {cli.path}? Any other copy of the store that writes there is fenced.{lost}"
        )
        confirm(question, "nothing was taken over", {"taken_over": False})
    with cli.owner(takeover=True, discard=discard) as store:
        info = store.info()
    text = f"{info.path} now owns {info.object_store}, in owner epoch {info.owner_epoch}"
    return Note(
        text=text, data={"taken_over": True, "owner_epoch": info.owner_epoch, "object_store": info.object_store}
    )


@command("moved", objects, example="quire objects moved --yes")
def moved(cli: Cli, yes: Yes = False) -> Note:
    """Accept the new location of the objects in quire.toml.

    First copy all objects with their keys, then edit `object_store`, then run this. It checks that some of the objects in the
    manifest exist there, and changes nothing if one is missing.
    """
    if not yes:
        question = f"have all objects been copied to {cli.settings().object_store or 'objects/'}?"
        confirm(question, "nothing was changed", {"moved": False})
    with cli.owner(moved=True) as store:
        looked, place = store.moved_objects, store.objects_url
    text = f"the objects are now in {place}; {count_of(looked, 'object')} checked, none missing"
    return Note(text=text, data={"moved": True, "object_store": place, "looked_for": looked})


# ── namespaces ────────────────────────────────────────────────────────────────────────────────────────────────────────
@command("create", namespace, example="quire namespace create cold s3://cold-bucket/quire")
def create_namespace(
    cli: Cli,
    name: Name,
    url: Annotated[str, Argument(metavar="URL", help="Location of its objects: a path, s3://…, gs://…, az://…")],
) -> Note:
    """Register a location for objects. Databases use it with `quire create --namespace NAME`.

    The location is not contacted. Endpoint and credentials are set in `[namespaces.NAME]` of quire.toml.
    """
    url = url if "://" in url else os.path.abspath(url)
    with cli.owner() as store:
        created = store.namespaces.create(name, url)
    return Note(text=f"objects of databases in {created.name} go to {created.url}", data=created)


@command("ls", namespace, example="quire namespace ls")
def list_namespaces(cli: Cli) -> Listing:
    """List the namespaces and the databases that use them."""
    with cli.reader() as manifest, manifest.read() as txn:
        infos = namespaces(txn)
    rows = []
    for info in infos:
        users = ", ".join(info.databases) or "-"
        if info.dropped_at_ms:
            users = f"dropped {moment(info.dropped_at_ms)}"
        elif info.dropped_databases:
            users += f" (and {info.dropped_databases} dropped)"
        rows.append(ListingRow([info.name or str(info.namespace_id), info.url, str(info.objects), users], info))
    columns = ["name", "url", ">objects", "databases"]
    return Listing(columns=columns, rows=rows, empty="no namespaces: all objects are in the store's own object store")


@command("drop", namespace, example="quire namespace drop cold --yes")
def drop_namespace(cli: Cli, name: Name, yes: Yes = False) -> Note:
    """Drop a namespace that no database uses. Its bucket is not changed."""
    if not yes:
        confirm(f"drop the namespace {name}?", "nothing was dropped", {"dropped": None})
    with cli.owner() as store:
        dropped = store.namespaces.drop(name)
    return Note(text=f"dropped the namespace {name}", data={"dropped": dropped})
