"""sqlite-utils plugin: its commands accept a database of a store wherever they accept the path of a file.

    sqlite-utils tables quire:///store/shop
    sqlite-utils rows 'quire:///store/shop?at=monday' orders
    sqlite-utils quire store                            # the URLs of its databases and snapshots

sqlite-utils finds it by an entry point. Nothing of quire is loaded unless a URL or that command is given. Programs need no
plugin: `sqlite_utils.Database(dbapi.connect("store/shop"))`.
"""

from __future__ import annotations

from typing import Any

import click
from sqlite_utils import hookimpl

from quire.core.lazy import lazy_names

SCHEME = "quire:"
_load, _ = lazy_names(
    __name__,
    {
        "connect": "quire.sqlite.pep249.connection",
        "open_for_reading": "quire.store.sqlite_urls",
        "list_versions": "quire.integrations.database_versions",
        "QuireError": "quire.core.errors",
    },
)


class DatabaseArgument(click.ParamType[Any]):
    """A path as before, or the URL of a database, which becomes a connection."""

    name = "path"

    def __init__(self, path: click.Path) -> None:
        self.path = path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value to pass to the command."""
        if not isinstance(value, str) or not value.startswith(SCHEME):
            return self.path.convert(value, param, ctx)
        try:
            return _load("connect")(value)
        except Exception as error:
            self.fail(str(error), param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        """Complete as for paths."""
        return self.path.shell_complete(ctx, param, incomplete)


@hookimpl
def register_commands(cli: click.Group) -> None:
    """Make the commands accept URLs, and add one that lists them."""
    for command in cli.commands.values():
        for parameter in command.params:
            if isinstance(parameter, click.Argument) and isinstance(parameter.type, click.Path):
                parameter.type = DatabaseArgument(parameter.type)

    @cli.command(name="quire")
    @click.argument("store", type=click.Path(exists=True, file_okay=False))
    def databases(store: str) -> None:
        """List the databases and snapshots of a quire store, as the other commands take them."""
        try:
            opened, release = _load("open_for_reading")(store)
        except _load("QuireError") as error:
            raise click.ClickException(str(error)) from error
        try:
            for version in _load("list_versions")(opened):
                click.echo(version.url(store))
        finally:
            release()
