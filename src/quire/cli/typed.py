"""Commands as typer has them, made of their declarations: help, completion, and the errors of usage.

Rules
  1. The lane (`quire.cli.lane`) runs what is written as it should be; typer is loaded for everything else.
  2. A command line that cannot be understood is an error like any other: told in two lines, or as JSON if `--json` is
     anywhere in it, with the exit code of usage.

Importing this module loads typer, and nothing of the store.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any

import typer

from quire.cli.command import Cli, output_for, perform, tell
from quire.cli.declared import HELP, REQUIRED, Command, Group, Option, Parameter
from quire.cli.exits import OK
from quire.core.errors import InvalidInput

USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""What typer raises for a wrong command line; it has no public name of its own."""

COMPLETING = "_QUIRE_COMPLETE"
"""In the environment while a shell asks what could come next."""

EXAMPLE = "quire tour --store ./quire-data"


class _Command(typer.core.TyperCommand):
    """A command whose usage names what it needs as everybody writes it: `DB NEW`, not `{DB} {NEW}`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


def program(group: Group) -> Any:
    """The whole program, as typer runs it."""
    app = _typed(group)
    app.callback(epilog=f"Example: {EXAMPLE}")(_options)
    return typer.main.get_command(app)


def _typed(group: Group) -> typer.Typer:
    """A group, plain: typer's rich help costs more than all the rest of a light command."""
    app = typer.Typer(
        help=group.text,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": list(HELP)},
    )
    for each in group.commands.values():
        made = app.command(each.name, cls=_Command, help=each.body.__doc__, epilog=f"Example: {each.example}")
        made(_runner(each))
    for name, inner in group.groups.items():
        app.add_typer(_typed(inner), name=name)
    return app


def _runner(command: Command) -> Callable[..., None]:
    """A function with the signature that typer looks at."""

    def run(*, ctx: typer.Context, store: str, as_json: bool, debug: bool, **arguments: Any) -> None:
        for each in parameters:
            _need_enough(each, arguments.get(each.name), ctx)
        if code := perform(command.body, Cli(store, as_json), arguments, debug=debug):
            raise typer.Exit(code)

    parameters = [*command.parameters(), *command.shared()]
    asked = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__signature__ = inspect.Signature([asked, *map(_for_typer, parameters)])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    run.__name__ = command.body.__name__
    return run


def _need_enough(each: Parameter, value: Any, ctx: typer.Context) -> None:
    """Typer would do this, and show `x>=0` to people for it."""
    least = each.declared.said.get("min")
    if least is not None and value is not None and value < least:
        name = each.names[0] if each.names else each.declared.said["metavar"]
        raise typer.BadParameter(f"{value} is less than {least}", ctx=ctx, param_hint=f"'{name}'")


def _for_typer(each: Parameter) -> inspect.Parameter:
    kind: Any = list[each.kind] if each.many else each.kind  # type: ignore[name-defined]
    if each.default is None:
        kind = kind | None
    is_option = isinstance(each.declared, Option)
    said = {name: value for name, value in each.declared.said.items() if name != "min"}
    if is_option and each.kind in (int, float):
        said.setdefault("metavar", "N")  # typer's own word is "<int>"
    if COMPLETING in os.environ and "metavar" in said:
        from quire.cli.completing import completer

        said["autocompletion"] = completer(said["metavar"])
    declared = typer.Option(*each.declared.names, **said) if is_option else typer.Argument(**said)
    default = inspect.Parameter.empty if each.default is REQUIRED else each.default
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"quire {version('quire')}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """quire: a versioned, tiered storage engine. Start with `quire tour`, or `quire init`."""


def run_app(app: Group, arguments: Sequence[str]) -> int:
    """Run the program on a command line; its exit code."""
    try:
        code = program(app).main(list(arguments), prog_name="quire", standalone_mode=False)
    except USAGE_ERROR as error:
        return _wrong_usage(error, arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's own way of ending, with 1
            raise end.__context__ from None
        raise
    return code if isinstance(code, int) else OK


def _number(found: re.Match[str]) -> str:
    """Typer says "a valid int", which is no word of people's."""
    return "is not a valid whole number" if found[1] == "int" else "is not a valid number"


def _wrong_usage(error: Any, arguments: Sequence[str]) -> int:
    """Rule 2. A bare `quire` or `quire feed` is no error to tell: it gets the help."""
    text = error.format_message()
    if text.startswith("Usage:"):
        error.show()
        return int(error.exit_code)
    words = takewhile(lambda each: not each.startswith("-"), arguments)  # some errors do not say whose they are
    asked = error.ctx.command_path if error.ctx is not None else " ".join(["quire", *words])
    what = text[:1].lower() + text[1:].rstrip(".")
    what = re.sub(r"is not a valid (int|float)\w*$", _number, what)
    hint = f"`{asked} --help` shows how it is called"
    if text.startswith("No such option") and hasattr(getattr(error.ctx, "command", None), "commands"):
        hint = f"options stand behind the command, as in `quire ls --store DIR --json`; {hint}"
    wrong = InvalidInput(what, hint=hint)
    return tell(output_for("--json" in arguments), wrong)
