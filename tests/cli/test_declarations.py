"""Parsing of command lines by the commands' declarations; and the imports of a command before it starts."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from typing import Annotated, Any

import pytest

from quire.cli.command import Cli
from quire.cli.declarations import Argument, Group, Option, command, run_program
from quire.cli.errors import OK, USAGE
from quire.cli.main import COMMANDS as FIRST_WORDS
from quire.cli.main import Program, perform_command
from quire.cli.output import Note
from tests.cli.commands import COMMANDS
from tests.rules.tree import SRC

Call = tuple[Cli, dict[str, Any], bool]


def paint(
    cli: Cli,
    wall: Annotated[str, Argument(metavar="WALL", help="What to paint.")],
    colours: Annotated[list[str] | None, Argument(metavar="[COLOUR]...", help="In this order.")] = None,
    coats: Annotated[int, Option("--coats", "-c", min=1, help="How often.")] = 2,
    thinned: Annotated[float, Option(min=0, help="With how much water.")] = 0.0,
    tag: Annotated[list[str], Option("--tag", metavar="KEY=VALUE", help="Repeatable.")] = [],  # noqa: B006
    dry: Annotated[bool, Option("--dry/--wet", help="Wait until it is dry.")] = True,
) -> Note:
    """Paint a wall. It stays as it is otherwise.

    A second paragraph.
    """
    raise NotImplementedError


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The arguments that commands were called with; they are not run."""
    recorded: list[Call] = []

    def note(_: object, cli: Cli, arguments: dict[str, Any], _at_owner: object, *, debug: bool) -> int:
        recorded.append((cli, arguments, debug))
        return OK

    monkeypatch.delenv("QUIRE_STORE", raising=False)
    monkeypatch.setattr("quire.cli.command.perform", note)
    return recorded


def paint_group() -> Group:
    group = Group()
    command("paint", group, example="quire paint north red")(paint)
    return group


DEFAULTS = {"wall": "north", "colours": [], "coats": 2, "thinned": 0.0, "tag": [], "dry": True}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("north", {}),
        ("north red blue -c 3", {"colours": ["red", "blue"], "coats": 3}),
        ("--wet --coats=1 north", {"coats": 1, "dry": False}),
        ("north --thinned 1.5 --tag a=b --tag c", {"thinned": 1.5, "tag": ["a=b", "c"]}),
        ("-- --json", {"wall": "--json"}),
    ],
)
def test_a_function_is_called_with_the_arguments_of_its_signature(
    calls: list[Call], line: str, expected: dict[str, Any]
) -> None:
    assert run_program(paint_group(), ["paint", *shlex.split(line)], perform_command) == OK
    assert calls == [(Cli(".", False), DEFAULTS | expected, False)]


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("", "missing argument 'WALL'"),
        ("north -c 0", "invalid value for '--coats' / '-c': 0 is less than 1"),
        ("north -c 1.5", "invalid value for '--coats' / '-c': '1.5' is not a whole number"),
        ("north --thinned much", "invalid value for '--thinned': 'much' is not a number"),
        ("north --thinned nan", "invalid value for '--thinned': 'nan' is not a number"),
        ("north --thinned inf", "invalid value for '--thinned': 'inf' is not a number"),
        ("north --thinned 1e300", "invalid value for '--thinned': '1e300' is too large"),
        (f"north -c {2**63 - 1}", f"invalid value for '--coats' / '-c': '{2**63 - 1}' is too large"),
        ("north --coat 3", "no such option '--coat'"),
    ],
)
def test_invalid_command_lines_are_refused(
    calls: list[Call], capsys: pytest.CaptureFixture[str], line: str, refusal: str
) -> None:
    assert run_program(paint_group(), ["paint", *shlex.split(line)], perform_command) == USAGE
    assert calls == []
    assert capsys.readouterr().err.startswith(f"error: {refusal}")


@pytest.mark.parametrize(
    ("variable", "options", "path"),
    [(None, (), "."), ("", (), "."), ("there", (), "there"), ("there", ("-s", "here"), "here")],
)
def test_the_named_store_is_used(
    calls: list[Call], monkeypatch: pytest.MonkeyPatch, variable: str | None, options: tuple[str, ...], path: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("QUIRE_STORE", variable)
    assert run_program(paint_group(), ["paint", "north", *options, "--json", "--debug"], perform_command) == OK
    assert [(cli, debug) for cli, _, debug in calls] == [(Cli(path, True), True)]


def test_help_shows_the_declarations(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(paint_group(), ["paint", "-h"], perform_command) == OK
    shown = capsys.readouterr().out
    for part in (
        "Usage: quire paint [OPTIONS] WALL [COLOUR]...", "  WALL         What to paint.  [required]",
        "-c, --coats N", "How often.  [default: 2]", "--dry / --wet", "A second paragraph.", "Example: quire paint north red",
    ):  # fmt: skip
        assert part in shown
    assert run_program(paint_group(), ["-h"], perform_command) == OK
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "  paint  Paint a wall.",
        "",
        "  Example: quire paint north red",
    ]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_example_of_every_command_is_parsed(calls: list[Call], words: tuple[str, ...]) -> None:
    example = shlex.split(COMMANDS[words].example)
    assert tuple(example[: 1 + len(words)]) == ("quire", *words)
    assert run_program(Program(), example[1:], perform_command) == OK
    assert len(calls) == 1


def test_the_list_of_commands_is_what_their_modules_declare() -> None:
    """`quire --help` imports none of them."""
    program = Program().load_all()
    assert set(program.commands) == set(FIRST_WORDS)
    lines = {word: program.commands[word].get_short_help_str() for word in FIRST_WORDS}
    assert lines == {word: line for word, (_, line) in FIRST_WORDS.items()}


# ── imports before a command starts ───────────────────────────────────────────────────────────────────────────────────
HEAVY = (
    "rich", "asyncio", "pandas", "pyarrow", "pyspark", "obstore", "awscrt", "structlog",
    "prometheus_client", "opentelemetry", "starlette", "uvicorn",
)  # fmt: skip
"""Packages that a command imports while it runs, not before."""

ENGINES = ("numpy", "apsw", "zstandard")
"""Packages that every owner of a store imports: help does not need them."""

PRINT_IMPORTS = """
import sys
from quire.cli.main import Program
program = Program(){load_all}
print([name for name in {heavy!r} if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("load_all", "unneeded"), [("", ("quire.manifest", *ENGINES, *HEAVY)), (".load_all()", HEAVY)], ids=["help", "all"]
)
def test_no_heavy_package_is_imported_before_a_command_starts(load_all: str, unneeded: tuple[str, ...]) -> None:
    """Start-up time is a promise (`python -m bench cli` measures it)."""
    result = subprocess.run(
        [sys.executable, "-c", PRINT_IMPORTS.format(heavy=unneeded, load_all=load_all)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert result.returncode == 0, result.stderr
    assert ast.literal_eval(result.stdout) == []
