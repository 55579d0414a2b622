"""The option `--log` of commands that stay: what they tell of meanwhile, as lines on stderr."""

from __future__ import annotations

from typing import Annotated

from quire.cli.declarations import Option
from quire.core.logs import configure

Log = Annotated[
    str,
    Option(
        "--log", metavar="STYLE", help="Tell events on stderr: json or console.", show_default="QUIRE_LOG, or warnings"
    ),
]


def log_to(style: str) -> None:
    """Write events in this style, if one was asked for."""
    if style:
        configure(style)
