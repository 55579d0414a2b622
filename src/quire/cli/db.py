"""Commands that change how a database is kept: set-status, set."""

from __future__ import annotations

from typing import Annotated

from quire.cli.command import Cli
from quire.cli.declarations import Argument, Group, Option, command
from quire.cli.formatting import tags_text
from quire.cli.lookup import Database, tags_of
from quire.cli.output import Note
from quire.core.errors import InvalidInput


def add_to(app: Group) -> None:
    """Register these commands."""
    group = Group("Change a database's status, tags and compression.")
    command(group, "set-status", example="quire db set-status shop read_only")(set_status)
    command(group, "set", example="quire db set shop --tag team=sales")(set_options)
    app.add("db", group)


def set_status(
    cli: Cli,
    database: Database,
    status: Annotated[str, Argument(metavar="STATUS", help="active, or read_only: every write is refused.")],
) -> Note:
    """Make a database read-only, or writable again.

    Applies to all kinds of databases, at once, also in programs that have it open. Maintenance continues.
    """
    with cli.keeper() as store:
        changed = store.set_status(database, status.replace("-", "_").lower())
    return Note(text=f"{changed.name} is {changed.status.name.lower()}", data=changed)


def set_options(
    cli: Cli,
    database: Database,
    tag: Annotated[list[str], Option("--tag", metavar="KEY=VALUE", help="Set a tag; repeatable.")] = [],  # noqa: B006
    untag: Annotated[list[str], Option("--untag", metavar="KEY", help="Remove a tag.")] = [],  # noqa: B006
    compression: Annotated[
        str, Option(metavar="NAME", help="none or zstd, for chunks from now on.", show_default="as it is")
    ] = "",
) -> Note:
    """Change the tags of a database or a fork, or how its chunks are compressed from now on."""
    if not (tag or untag or compression):
        raise InvalidInput("no change was given", hint="give --tag, --untag or --compression", database=database)
    with cli.keeper() as store:
        tags = None
        if tag or untag:
            tags = {key: value for key, value in store.database(database).tags.items() if key not in untag}
            tags |= tags_of(tag, reserved="")
        changed = store.set_options(database, tags=tags, compression=compression)
    return Note(text=f"{changed.name}: {tags_text(changed.tags) or 'no tags'}", data=changed)
