"""The commands of `quire`, put together.

Importing it loads typer and the command modules; these load the store, LMDB or rich only when a command runs.
"""

from __future__ import annotations

import typer

from quire.cli import (
    audit,
    checkpoint,
    doctor,
    feed,
    gc,
    jobs,
    kv,
    manifest,
    restore,
    retention,
    serve,
    snapshots,
    sqlite,
    stats,
    stores,
    stream,
    tour,
    tree,
    verify,
    why,
)
from quire.cli.typed import new_app

app = new_app("quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`.")
for each in (
    stores,
    tree,
    why,
    snapshots,
    sqlite,
    kv,
    stream,
    retention,
    checkpoint,
    restore,
    verify,
    stats,
    gc,
    jobs,
    audit,
    feed,
    manifest,
    serve,
    doctor,
    tour,
):
    each.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"quire {version('quire')}")
        raise typer.Exit


@app.callback(epilog="Example: quire tour --store ./quire-data")
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`."""
