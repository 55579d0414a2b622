"""Commands that change a store or its databases: init, create, drop, rename; and, registered here, those of `show`.

Each does one call of `Store` and says what came of it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace

from quire.cli import show
from quire.cli.command import Cli, Verdict, agreed
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.exit_codes import PROBLEMS
from quire.cli.formatting import article, count_of
from quire.cli.output import Note
from quire.core.settings import StoreSettings
from quire.durable.files import OsDisk
from quire.manifest.records import DbStatus
from quire.objects.open import open_store
from quire.store.layout import Found, check_objects_url, look
from quire.store.opening import open as open_quire

Name = Annotated[str, Argument(metavar="NAME", help="The database's name.")]


def add_to(app: Group) -> None:
    """Register these commands."""
    command(app, "init", example="quire init ./data")(init)
    command(app, "ls", example="quire ls --store ./data")(show.ls)
    command(app, "info", example="quire info --json")(show.info)
    command(app, "create", example="quire create shop --kind pages")(create)
    command(app, "drop", example="quire drop shop --yes")(drop)
    command(app, "rename", example="quire rename shop store")(rename)


def init(
    cli: Cli,
    path: Annotated[
        str,
        Argument(metavar="[PATH]", help="The directory; it is made if need be.", show_default="the one of --store"),
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
    with open_quire(target, "r" if found else "rw", settings=settings) as store:
        text = f"{store.path} is a store already" if found else f"made a store in {store.path}"
        return Note(text=text, data={"path": store.path, "created": not found, "object_store": store.objects_url})


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
    text = f"made {made.name}, {article(made.kind.name.lower())} database with id {made.db_id}"
    return Note(text=text, data=made)


def drop(
    cli: Cli,
    name: Name,
    snapshots: Annotated[bool, Option("--snapshots", help="Drop its snapshots with it.")] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
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
    old: Annotated[str, Argument(metavar="OLD", help="Its name now.")],
    new: Annotated[str, Argument(metavar="NEW", help="Its name then.")],
) -> Note:
    """Rename a database."""
    with cli.keeper() as store:
        renamed = store.rename(old, new)
    return Note(text=f"{old} is called {new} now", data=renamed)
