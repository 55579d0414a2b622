"""Commands about a store and its databases: init, ls, info, create, drop, rename."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec.structs import replace

import quire
from quire.cli.command import Cli, Verdict, agreed
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.exit_codes import PROBLEMS
from quire.cli.formatting import article, count_of, moment, size
from quire.cli.output import Facts, Listing, Note, Row
from quire.core.reader_info import reader_text
from quire.core.settings import StoreSettings
from quire.durable.files import OsDisk
from quire.manifest.records import DbStatus
from quire.objects.open import open_store
from quire.store.info import StoreReader
from quire.store.layout import Found, check_objects_url, look

if TYPE_CHECKING:
    from quire.service.values import DatabaseInfo, StoreInfo

Name = Annotated[str, Argument(metavar="NAME", help="The database's name.")]


def add_to(app: Group) -> None:
    """Register these commands."""
    command(app, "init", example="quire init ./data")(init)
    command(app, "ls", example="quire ls --store ./data")(ls)
    command(app, "info", example="quire info --json")(info)
    command(app, "create", example="quire create shop --kind pages")(create)
    command(app, "drop", example="quire drop shop --yes")(drop)
    command(app, "rename", example="quire rename shop store")(rename)


def init(
    cli: Cli,
    path: Annotated[
        str,
        Argument(
            metavar="[PATH]", help="The directory; created if it does not exist.", show_default="the one of --store"
        ),
    ] = "",
    object_store: Annotated[
        str,
        Option(
            metavar="URL",
            help="Where objects live: a path, s3://…, gs://…, az://…",
            show_default="objects/ in the store",
        ),
    ] = "",
) -> Note:
    """Create a store, or check that one exists."""
    target = path or cli.path
    if object_store:
        check_objects_url(object_store)
        open_store(object_store).close()  # refuses what cannot work, before anything is made
    found = look(OsDisk(), target) is Found.STORE
    settings = StoreSettings(object_store=object_store) if object_store else None
    with quire.open(target, "r" if found else "rw", settings=settings) as store:
        text = f"{store.path} is already a store" if found else f"created a store in {store.path}"
        return Note(text=text, data={"path": store.path, "created": not found, "object_store": store.objects_url})


def ls(cli: Cli) -> Listing:
    """List the databases of a store."""
    with StoreReader(cli.path) as store:
        found = store.databases()
    followed = any(database.follows for database in found)  # else the column would take room from the others
    return Listing(
        columns=["name", "kind", "status", ">snapshots", "created", "forked from", *(["follows"] if followed else [])],
        rows=[Row([*_cells(database), *([database.follows] if followed else [])], database) for database in found],
        empty="no databases: create one with `quire create NAME --kind pages`",
    )


def _cells(each: DatabaseInfo) -> list[str]:
    status = each.status.name.lower().replace("_", "-")
    return [each.name, each.kind.name.lower(), status, str(each.snapshots), moment(each.created_at_ms), origin(each)]


def origin(each: DatabaseInfo) -> str:
    """What a database was forked from: a name, or the id of a parent that has none any more."""
    return each.parent or (f"#{each.parent_db_id}, dropped" if each.parent_db_id else "")


def info(cli: Cli) -> Facts:
    """Show a summary of a store."""
    with StoreReader(cli.path) as store:
        found = store.info()
    databases = ", ".join(f"{count:,} {kind}" for kind, count in found.databases.items() if count) or "none"
    changes = f"{found.oldest_change:,} to {found.newest_change:,}" if found.oldest_change else "none"
    artifacts = (
        count_of(found.chunks, "chunk"),
        count_of(found.deltas, "delta"),
        count_of(found.wal_segments, "WAL segment"),
    )
    return Facts(
        lines=[
            ("store", found.path),
            ("id", f"{found.store_id} (schema {found.schema})"),
            ("objects", found.object_store),
            ("owner", _owner_text(found)),
            ("databases", databases + (f"; {found.dropped:,} dropped" if found.dropped else "")),
            ("snapshots", f"{found.snapshots:,}"),
            ("artifacts", ", ".join(artifacts)),
            ("unreferenced", f"{count_of(found.unreferenced, 'artifact')} awaiting deletion"),
            ("jobs", f"{found.jobs:,}"),
            *([("follows", count_of(found.followed_files, "SQLite file"))] if found.followed_files else []),
            ("change feed", changes),
            ("manifest", f"{size(found.manifest_bytes)} in a map of {size(found.map_bytes)}"),
            ("readers", f"{count_of(found.readers, 'slot')} in use"),
            ("on disk", size(found.disk_bytes)),
            *[("reader", reader_text(each)) for each in found.page_readers],
        ],
        data=found,
    )


def _owner_text(found: StoreInfo) -> str:
    """Who may write the objects: an epoch, a session, and whether the bucket has confirmed them."""
    if found.owner_state == "not needed":
        return f"epoch {found.owner_epoch:,}; objects are local to the store"
    session = f", session {found.owner_session:,}" if found.owner_session else ""
    return f"epoch {found.owner_epoch:,}{session}, {found.owner_state}"


def create(
    cli: Cli,
    name: Name,
    kind: Annotated[str, Option(metavar="KIND", help="pages, stream or lsm.")] = "pages",
    namespace: Annotated[
        str, Option(metavar="NAME", help="Where all its objects go.", show_default="the store's own object store")
    ] = "",
) -> Note:
    """Create a database."""
    with cli.keeper() as store:
        made = store.create(name, kind, namespace=namespace)
    text = f"created {made.name}, {article(made.kind.name.lower())} database with id {made.db_id}"
    return Note(text=text, data=made)


def drop(
    cli: Cli,
    name: Name,
    snapshots: Annotated[bool, Option("--snapshots", help="Drop its snapshots as well.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> Note | Verdict:
    """Drop a database. Its name is free at once; its space is freed when nothing refers to it."""
    with cli.keeper() as store:
        found = store.database(name)
        if not yes:
            also = f" with {count_of(found.snapshots, 'snapshot')}" if snapshots and found.snapshots else ""
            question = f"drop {found.kind.name.lower()} database {name}{also}?"
            if not agreed(question, "nothing was dropped"):
                return Verdict(Note(text="nothing was dropped", data={"dropped": None}), PROBLEMS)
        dropped = store.drop(name, snapshots=snapshots)
    left = replace(dropped, status=DbStatus.TOMBSTONED, snapshots=0)  # a database goes with all of its snapshots
    return Note(text=f"dropped {name}", data={"dropped": left})


def rename(
    cli: Cli,
    old: Annotated[str, Argument(metavar="OLD", help="The current name.")],
    new: Annotated[str, Argument(metavar="NEW", help="The new name.")],
) -> Note:
    """Rename a database."""
    with cli.keeper() as store:
        renamed = store.rename(old, new)
    return Note(text=f"renamed {old} to {new}", data=renamed)
