"""What all commands share: the options --store, --json and --debug, finding the store, and telling errors.

Rules
  1. A command is a function whose first parameter is a `Cli`; `command` gives it the shared options and its example.
  2. It returns what it shows (a `Shown`), or raises; `Verdict` also carries an exit code.
  3. An error is one sentence and the next step, with the exit code of its group; a traceback only with --debug.
  4. The store is the one of --store, else of QUIRE_STORE, else the current directory.

Importing this module loads typer and nothing of the store: `quire --help` is quick.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer

from quire.cli.exits import OK, exit_of
from quire.cli.output import JsonOutput, Output, Shown, TextOutput
from quire.core.errors import InternalError, QuireError

if TYPE_CHECKING:
    from quire.store.store import Store

P = ParamSpec("P")

STORE = typer.Option(
    "--store", "-s", envvar="QUIRE_STORE", help="The store's directory.", show_default="this directory"
)
JSON = typer.Option("--json", help="Write JSON (its shape: docs/cli.md).")
DEBUG = typer.Option("--debug", help="Show the traceback of an error.")

SHARED = (
    inspect.Parameter("store", inspect.Parameter.KEYWORD_ONLY, default=".", annotation=Annotated[str, STORE]),
    inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, JSON]),
    inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, DEBUG]),
)


@dataclass(frozen=True, slots=True)
class Cli:
    """What a command gets: where the store is, and whether a program reads the output."""

    path: str
    as_json: bool = False

    def reader(self) -> Store:
        """The store, for reading: works while another process owns it."""
        from quire.store.store import open as open_quire

        return open_quire(self.path, "r")

    def owner(self, *, repair: bool = False) -> Store:
        """The store, for changing it; never makes one."""
        from quire.store.store import open as open_quire

        return open_quire(self.path, create=False, repair=repair)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A value to show, if any, and the exit code to end with."""

    shown: Shown | None
    code: int


Body = Callable[Concatenate[Cli, P], Shown | Verdict]


def command(app: typer.Typer, name: str, *, example: str) -> Callable[[Body[P]], Body[P]]:
    """Register a function as a command of `app`; `example` is shown at the end of its help."""

    def register(body: Body[P]) -> Body[P]:
        def run(*, store: str, as_json: bool, debug: bool, **arguments: Any) -> None:
            output: Output = JsonOutput() if as_json else TextOutput()
            try:
                outcome = body(Cli(store, as_json), **arguments)  # type: ignore[call-arg]  # typer passes by name
                verdict = outcome if isinstance(outcome, Verdict) else Verdict(outcome, OK)
                if verdict.shown is not None:
                    output.show(verdict.shown)
            except QuireError as error:
                if debug:
                    raise
                output.fail(error)
                raise typer.Exit(exit_of(error).code) from None
            except (typer.Exit, typer.Abort, BrokenPipeError):  # typer ends them quietly
                raise
            except Exception as error:
                if debug:
                    raise
                told = InternalError(f"a bug in quire: {type(error).__name__}: {error}")
                output.fail(told)
                raise typer.Exit(exit_of(told).code) from None
            if verdict.code:
                raise typer.Exit(verdict.code)

        signature = inspect.signature(body, eval_str=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in list(signature.parameters.values())[1:]
        ]
        run.__signature__ = inspect.Signature([*own, *SHARED])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        run.__name__ = body.__name__
        app.command(name, help=body.__doc__, epilog=f"Example: {example}")(run)
        return body

    return register


def new_app(text: str) -> typer.Typer:
    """An application or a group of commands, plain: typer's rich help costs more than all the rest of a light command."""
    return typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
