"""Declares commands: turns a function, whose signature defines the parameters, into a click command.

    @command("ls", example="quire ls --store ./data")
    def ls(cli: Cli, limit: Annotated[int, Option("--limit", "-n", min=0, help="…")] = 20) -> Listing:
        "List the databases of a store."

The docstring is the help text, `example` is its last line, and every command also takes `--store`, `--json` and `--debug`. A
command line that cannot be parsed is an error like any other, with the exit code of usage errors.

Threads: the main thread.
"""

from __future__ import annotations

import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Protocol, TypeVar

import click

from quire.cli.errors import OK
from quire.cli.output import output_for, report_error
from quire.core.errors import InvalidInput

F = TypeVar("F", bound=Callable[..., Any])

HERE = "."
STORE_VARIABLE = "QUIRE_STORE"
NUMBER_MAX = 2**62
"""The largest number on a command line: fields of the manifest and Python's iterators take no more than about twice that."""
COMPLETING = "_QUIRE_COMPLETE"
"""The variable in which a shell requests completions."""

HELP = ("-h", "--help")
"""The options that request help, for every command and every group."""


EXAMPLE_COLUMNS = 76
"""Width of a line of an example: help has 80 columns, an indent of two, and a backslash where the line continues."""

REGISTERED: dict[str, click.Command] = {}
"""First word → its command or group, once its module is loaded."""


class Argument:
    """A positional parameter of a command. The keywords are click's, and `min` for numbers."""

    names: tuple[str, ...] = ()

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords


class Option(Argument):
    """A named option of a command: `Option("--limit", "-n", min=0)`. The default name is that of the parameter."""

    def __init__(self, *names: str, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.names = names


class Number(click.ParamType[Any]):
    """A number, with error messages in plain words."""

    def __init__(self, kind: type, least: float | None) -> None:
        self.kind, self.least = kind, least
        self.name = "whole number" if kind is int else "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = self.kind(value)
        except ValueError:
            self.fail(f"{value!r} is not a {self.name}", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a {self.name}", param, ctx)
        if abs(number) > NUMBER_MAX:
            self.fail(f"{value!r} is too large", param, ctx)
        if self.least is not None and number < self.least:
            self.fail(f"{number} is less than {self.least}", param, ctx)
        return number


class Perform(Protocol):
    """Runs the function of a command, shows its result, and returns the exit code."""

    def __call__(
        self, body: Callable[..., Any], store: str, arguments: dict[str, Any], *, as_json: bool, debug: bool
    ) -> int: ...


class CliCommand(click.Command):
    """A declared function as a click command."""

    def __init__(self, name: str, body: Callable[..., Any], example: str, store: str) -> None:
        _cli, *parameters = inspect.signature(body).parameters.values()
        declared = [_parameter(parameter, body.__globals__) for parameter in parameters]
        super().__init__(
            name,
            params=[*declared, *_shared(store)],
            callback=self._run,
            help=inspect.cleandoc(body.__doc__ or ""),
            epilog=f"Example: {example}",
            context_settings={"help_option_names": list(HELP)},
        )
        self.body = body
        self.example = example

    def _run(self, store: str, as_json: bool, debug: bool, **arguments: Any) -> int:
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}
        perform: Perform = click.get_current_context().obj
        return perform(self.body, store or HERE, given, as_json=as_json, debug=debug)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """Write the example."""
        _write_example(formatter, self.epilog or "")

    def get_short_help_str(self, limit: int = 45) -> str:  # noqa: ARG002 - click's signature
        """Return the whole first sentence, uncut."""
        paragraph = (self.help or "").partition("\n\n")[0]
        return f"{paragraph.partition('. ')[0].rstrip('.')}."


class Group(click.Group):
    """Commands that share their first word. Its help is the word's line in `main.COMMANDS`."""

    def __init__(self, word: str = "") -> None:
        super().__init__(context_settings={"help_option_names": list(HELP)})
        if word:
            REGISTERED[word] = self

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of the commands in order of declaration, single commands first."""
        return sorted(self.commands, key=lambda name: isinstance(self.commands[name], click.Group))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example of the group, or else that of its first command."""
        commands = (self.commands[name] for name in self.list_commands(ctx) if name in self.commands)
        first = next((command for command in commands if isinstance(command, CliCommand)), None)
        if self.epilog is None and first is not None:
            self.epilog = f"Example: {first.example}"
        _write_example(formatter, self.epilog or "")

    def get_short_help_str(self, limit: int = 45) -> str:  # noqa: ARG002 - click's signature
        """Return the whole text, uncut."""
        return self.help or ""


def command(name: str, group: Group | None = None, *, example: str, store: str = HERE) -> Callable[[F], F]:
    """Declare a function as a command, in a group or at the top level. `store` is the default of its `--store`."""

    def register(body: F) -> F:
        commands = REGISTERED if group is None else group.commands
        commands[name] = CliCommand(name, body, example, store)
        return body

    return register


def _write_example(formatter: click.HelpFormatter, text: str) -> None:
    """Write an example. One that needs two lines can be copied into a shell as it is displayed."""
    lines = textwrap.wrap(text, EXAMPLE_COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    formatter.write_paragraph()
    formatter.write("  " + " \\\n  ".join(lines) + "\n")


def run_program(program: click.Group, arguments: Sequence[str], perform: Perform) -> int:
    """Run the program on a command line and return the exit code. `perform` runs the command that the line selects."""
    try:
        with program.make_context("quire", list(arguments), obj=perform) as context:
            code = program.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        return _wrong_usage(error, arguments)
    return code if isinstance(code, int) else OK


# ── parameters ────────────────────────────────────────────────────────────────────────────────────────────────────────
def _parameter(parameter: inspect.Parameter, names_in_scope: dict[str, Any]) -> click.Parameter:
    hint: Any = eval(parameter.annotation, names_in_scope)  # `from __future__ import annotations` keeps it as text
    declared: Argument = hint.__metadata__[0]
    kind, many = _kind_of(hint.__origin__)
    keywords: dict[str, Any] = dict(declared.keywords)
    keywords["type"] = Number(kind, keywords.pop("min", None)) if kind in (int, float) else kind
    required = parameter.default is inspect.Parameter.empty
    if not required:
        keywords["default"] = parameter.default
    keywords["shell_complete"] = partial(_complete, keywords.get("metavar", ""))
    if isinstance(declared, Option):
        if kind is bool:
            keywords["is_flag"] = True
        elif kind is not str:
            keywords.setdefault("metavar", "N")
        keywords.setdefault("show_default", kind is not bool and parameter.default not in (None, ""))
        names = declared.names or (f"--{parameter.name.replace('_', '-')}",)
        return click.Option([*names, parameter.name], multiple=many, required=required, **keywords)
    if note := "required" if required else keywords.pop("show_default", ""):
        keywords["help"] += f"  [{note}]"
    return click.Argument([parameter.name], required=required, nargs=-1 if many else 1, **keywords)


def _kind_of(hint: Any) -> tuple[type, bool]:
    """Return the type of one value, and whether there may be many: `list[int] | None` → `int`, True."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (inner for inner in typing.get_args(hint) if inner is not types.NoneType)
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0], True
    return hint, False


def _complete(metavar: str, ctx: click.Context, _: click.Parameter, incomplete: str) -> list[Any]:
    candidates: list[Any] = ctx.obj(metavar, ctx, incomplete)  # `candidates.answer` sets it
    return candidates


def _shared(store: str) -> list[click.Parameter]:
    """Return the options that every command takes: the store, and the form of the output."""
    shown = "this directory" if store == HERE else store
    return [
        click.Option(
            ["--store", "-s"],
            envvar=STORE_VARIABLE,
            metavar="DIR",
            default=store,
            help="The store's directory.",
            show_default=shown,
            show_envvar=True,
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="Write JSON (format: docs/cli.md)."),
        click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
    ]


def _wrong_usage(error: click.UsageError, arguments: Sequence[str]) -> int:
    text = error.format_message()
    words = takewhile(lambda word: not word.startswith("-"), arguments)  # some errors have no context
    path = error.ctx.command_path if error.ctx is not None else " ".join(["quire", *words])
    hint = f"see `{path} --help`"
    if isinstance(error, click.NoSuchOption) and error.ctx is not None and isinstance(error.ctx.command, click.Group):
        hint = f"options go after the command, as in `quire ls --store DIR --json`; {hint}"
    return report_error(
        output_for("--json" in arguments), InvalidInput(text[:1].lower() + text[1:].rstrip("."), hint=hint)
    )
