"""The short way in understands every command as typer does, or declines; and it loads nothing that a command does not need."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli import lane, typed
from quire.cli.app import app
from quire.cli.command import Cli
from quire.cli.declared import Command, Group, Option, Parameter
from quire.cli.exits import OK
from tests.house.tree import SRC


def declared(group: Group = app, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Every command, by its words."""
    for name, command in group.commands.items():
        yield (*before, name), command
    for name, inner in group.groups.items():
        yield from declared(inner, (*before, name))


COMMANDS = dict(declared())
PROGRAM_OF_TYPER = typed.program(app)

LINES = [
    [],
    ["--json"],
    ["--debug", "--json"],
    ["--store", "x"],
    ["-s", "x", "--json"],
    ["--store=x y"],
    ["--store="],
    ["--store", ""],
    ["--store", "--json"],
    ["--store"],
    ["-s"],
    ["-sx"],
    ["-s=x"],
    ["--store", "a", "--store", "b"],
    ["--store", "a", "-s", "b", "--json", "--json"],
    ["--js"],
    ["--json=1"],
    ["--help"],
    ["--nonsense"],
    ["word"],
    ["word", "word", "7"],
    ["7", "7"],
    ["0"],
    ["--", "--json"],
    ["--store=a=b"],
    ["--store", "größe"],
]

WORDS = (
    "word",
    "7",
    "0",
    "-1",
    "1.5",
    "x y",
    "größe",
    "",
    "-",
    "٣",
    "1_0",
    "3:4",
    "a=b",
    "-x",
    "--",
    "--help",
    "1e3",
    "+5",
)


def as_typer_has_it(arguments: list[str]) -> tuple[Any, Cli, dict[str, Any], bool] | None:
    """What typer makes of a command line; `None` if it does not come to running the command."""
    seen: list[tuple[Any, Cli, dict[str, Any], bool]] = []

    def note(body: object, cli: Cli, words: dict[str, Any], *, debug: bool) -> int:
        seen.append((body, cli, words, debug))
        return OK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed, "perform", note)
        patch.setattr(typed, "program", lambda _: PROGRAM_OF_TYPER)  # making it takes longer than running it
        typed.run_app(app, arguments)
    return seen[0] if seen else None


def agree(arguments: list[str]) -> bool:
    """Whether the lane took a command line; if so, as typer does."""
    understood = lane.understand(arguments)
    if understood is None:
        return False
    taken = (understood.command.body, understood.cli, understood.arguments, understood.debug)
    assert taken == as_typer_has_it(arguments)
    return True


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_lane_agrees_with_typer(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    for variable in (None, "", "from the environment"):
        monkeypatch.delenv("QUIRE_STORE", raising=False)
        if variable is not None:
            monkeypatch.setenv("QUIRE_STORE", variable)
        arguments = [each for each in COMMANDS[words].parameters() if not isinstance(each.declared, Option)]
        placed = ["7" if each.kind is int else "word" for each in arguments]
        for rest in LINES:
            agree([*words, *rest])
            agree([*words, *placed, *rest])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_lane_takes_the_example_of_every_command(words: tuple[str, ...]) -> None:
    example = shlex.split(COMMANDS[words].example)
    assert tuple(example[: 1 + len(words)]) == ("quire", *words)
    assert agree(example[1:])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_lane_takes_every_option(words: tuple[str, ...]) -> None:
    """Each by itself, in each of its spellings, beside what the command needs; and agrees on values that it may not have."""
    command = COMMANDS[words]
    needed = ["7" if each.kind is int else "word" for each in command.parameters() if each.default is ...]
    for option in (each for each in [*command.parameters(), *command.shared()] if isinstance(each.declared, Option)):
        for name in (part for spelling in option.names for part in spelling.split("/")):
            for given_ in spellings(option, name):
                assert agree([*words, *needed, *given_]), given_
                assert agree([*words, *given_, *needed]), given_
            for value in WORDS:
                agree([*words, *needed, name, value])
                agree([*words, *needed, f"{name}={value}"])


def spellings(option: Parameter, name: str) -> list[list[str]]:
    if option.kind is bool:
        return [[name]]
    return [[name, "7"], *([[f"{name}=7"]] if name.startswith("--") else []), [name, "7", name, "8"]]


@given(st.data())
def test_the_lane_agrees_with_typer_on_anything(data: st.DataObject) -> None:
    words = data.draw(st.sampled_from(list(COMMANDS)))
    command = COMMANDS[words]
    names = [
        part for each in [*command.parameters(), *command.shared()] for name in each.names for part in name.split("/")
    ]
    word = st.one_of(st.sampled_from(WORDS), st.sampled_from(names), st.text(max_size=3))
    joined = st.builds("{}={}".format, st.sampled_from(names), st.sampled_from(WORDS))
    agree([*words, *data.draw(st.lists(st.one_of(word, joined), max_size=5))])


@pytest.mark.parametrize(
    "arguments", [[], ["--version"], ["manifest"], ["manifest", "nonsense"], ["lsx"], ["jobs", "show", "x"]]
)
def test_the_lane_declines_everything_else(arguments: list[str]) -> None:
    assert lane.understand(arguments) is None


def test_the_lane_leaves_completion_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_QUIRE_COMPLETE", "complete_bash")
    assert lane.understand(["ls"]) is None


# ── what a command loads before it begins ─────────────────────────────────────────────────────────────────────────────
HEAVY = (
    "typer", "click", "rich", "msgspec", "dataclasses", "inspect", "typing_extensions", "json", "uuid", "socket", "subprocess",
    "logging", "asyncio", "concurrent.futures", "pathlib", "datetime", "numpy", "pandas", "pyarrow", "pyspark", "lmdb", "apsw",
    "obstore", "awscrt", "zstandard", "structlog", "prometheus_client", "opentelemetry", "starlette", "uvicorn",
    "quire.core.ids", "quire.core.plain", "quire.core.settings", "quire.durable", "quire.objects", "quire.manifest",
    "quire.pages", "quire.stream", "quire.lsm", "quire.jobs", "quire.sqlite", "quire.service", "quire.spark", "quire.store",
)  # fmt: skip
"""What costs a part of a Python start, or more: a command loads it when it works, not before."""

PROGRAM = """
import os, shlex, sys
from quire.cli.lane import understand
for line in sys.stdin.read().splitlines():
    if not os.fork():  # every command in a process that has loaded nothing yet
        assert understand(shlex.split(line)[1:]) is not None, line
        print([line, [each for each in {heavy!r} if each in sys.modules]], flush=True)
        os._exit(0)
    _, status = os.wait()
    assert not status, line
"""


def test_no_command_loads_anything_heavy_before_it_begins() -> None:
    """Start-up is a promise (`python -m bench cli` measures it): this is most of it, for every command there is."""
    lines = "\n".join(command.example for command in COMMANDS.values())
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(heavy=HEAVY)],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert ended.returncode == 0, ended.stderr
    found = dict(ast.literal_eval(line) for line in ended.stdout.splitlines())
    assert len(found) == len({command.example for command in COMMANDS.values()})
    assert {line: loaded for line, loaded in found.items() if loaded} == {}
