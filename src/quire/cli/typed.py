"""Commands as typer has them: the shared options, the example at the end of the help, errors of usage.

Rules
  1. `command` gives a function (see `quire.cli.command`) the options --store, --json and --debug, and its example.
  2. A command line that cannot be understood is an error like any other: told in two lines, or as JSON if `--json` is
     anywhere in it, with the exit code of usage.

Importing this module loads typer, and nothing of the store.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from quire.cli.command import HERE, STORE_VARIABLE, Cli, Verdict, output_for, perform, tell
from quire.cli.exits import OK
from quire.cli.output import Shown
from quire.core.errors import InvalidInput

P = ParamSpec("P")
Body = Callable[Concatenate[Cli, P], Shown | Verdict]

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; it has no public name of its own."""

JSON = typer.Option("--json", help="Write JSON (its shape: docs/cli.md).")
DEBUG = typer.Option("--debug", help="Show the traceback of an error.")


def command(app: typer.Typer, name: str, *, example: str, store: str = HERE) -> Callable[[Body[P]], Body[P]]:
    """Register a function as a command of `app`; `example` ends its help, `store` is where it goes unless told."""

    def register(body: Body[P]) -> Body[P]:
        def run(*, store: str, as_json: bool, debug: bool, **arguments: Any) -> None:
            if code := perform(body, Cli(store, as_json), arguments, debug=debug):
                raise typer.Exit(code)

        signature = inspect.signature(body, eval_str=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in list(signature.parameters.values())[1:]
        ]
        run.__signature__ = inspect.Signature([*own, *_shared(store)])  # type: ignore[attr-defined]
        run.__annotations__ = {}
        run.__name__ = body.__name__
        app.command(name, help=body.__doc__, epilog=f"Example: {example}")(run)
        return body

    return register


def _shared(store: str) -> list[inspect.Parameter]:
    where = typer.Option(
        "--store",
        "-s",
        envvar=STORE_VARIABLE,
        metavar="DIR",
        help="The store's directory.",
        show_default="this directory" if store == HERE else store,
    )
    options = (
        ("store", store, Annotated[str, where]),
        ("as_json", False, Annotated[bool, JSON]),
        ("debug", False, Annotated[bool, DEBUG]),
    )
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in options
    ]


def new_app(text: str) -> typer.Typer:
    """An application or a group of commands, plain: typer's rich help costs more than all the rest of a light command."""
    return typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


def run_app(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run the program on a command line; its exit code."""
    try:
        code = typer.main.get_command(app).main(list(arguments), prog_name="quire", standalone_mode=False)
    except USAGE_ERROR as error:
        return _wrong_usage(error, arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's own way of ending, with 1
            raise end.__context__ from None
        raise
    return code if isinstance(code, int) else OK


def _wrong_usage(error: Any, arguments: Sequence[str]) -> int:
    """Rule 2. A bare `quire` or `quire feed` is no error to tell: it gets the help."""
    text = error.format_message()
    if text.startswith("Usage:"):
        error.show()
        return int(error.exit_code)
    words = takewhile(lambda each: not each.startswith("-"), arguments)  # some errors do not say whose they are
    asked = error.ctx.command_path if error.ctx is not None else " ".join(["quire", *words])
    what = text[:1].lower() + text[1:].rstrip(".")
    wrong = InvalidInput(what, hint=f"`{asked} --help` shows how it is called")
    return tell(output_for("--json" in arguments), wrong)
