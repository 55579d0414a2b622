"""The program `quire`: puts the command groups together.

Importing it loads typer and the command modules; these load the store, LMDB or rich only when a command runs.
"""

from __future__ import annotations

import typer

from quire.cli import doctor, feed, manifest, stores, tour
from quire.cli.command import new_app

app = new_app("quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`.")
stores.add_to(app)
manifest.add_to(app)
feed.add_to(app)
doctor.add_to(app)
tour.add_to(app)


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


def main() -> None:
    """What the console script and `python -m quire` run."""
    app(prog_name="quire")
