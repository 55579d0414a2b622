"""The short way in understands what typer understands, or declines."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cli import lane, typed
from quire.cli.app import app
from quire.cli.command import Cli
from quire.cli.exits import OK

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
    ["--store", "a", "--store", "b"],
    ["--store", "a", "-s", "b", "--json", "--json"],
    ["--js"],
    ["--json=1"],
    ["--help"],
    ["--nonsense"],
    ["word"],
    ["--", "--json"],
    ["--store=a=b"],
    ["--store", "größe"],
]


def as_typer_has_it(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> tuple[Cli, dict[str, Any], bool] | None:
    """What typer makes of a command line; `None` if it does not come to running the command."""
    seen: list[tuple[Cli, dict[str, Any], bool]] = []

    def note(_: object, cli: Cli, words: dict[str, Any], *, debug: bool) -> int:
        seen.append((cli, {name: each for name, each in words.items() if each}, debug))
        return OK

    monkeypatch.setattr(typed, "perform", note)
    typed.run_app(app, arguments)
    return seen[0] if seen else None


@pytest.mark.parametrize("variable", [None, "", "from the environment"])
@pytest.mark.parametrize("rest", LINES, ids=" ".join)
@pytest.mark.parametrize(
    "name", [("ls",), ("info",), ("tree",), ("snapshot", "ls"), ("snapshot", "ls", "shop")], ids=" ".join
)
def test_the_lane_agrees_with_typer(
    monkeypatch: pytest.MonkeyPatch, name: tuple[str, ...], rest: list[str], variable: str | None
) -> None:
    monkeypatch.delenv("QUIRE_STORE", raising=False)
    if variable is not None:
        monkeypatch.setenv("QUIRE_STORE", variable)
    understood = lane.understand([*name, *rest])
    if understood is not None:
        words = {"database": understood.words[0]} if understood.words else {}
        assert (understood.cli, words, understood.debug) == as_typer_has_it(monkeypatch, [*name, *rest])


def test_the_lane_takes_what_is_usual() -> None:
    for rest in LINES[:6]:
        assert lane.understand(["ls", *rest]) is not None
        assert lane.understand(["snapshot", "ls", "shop", *rest]) is not None
        assert lane.understand(["snapshot", "ls", *rest]) is None, "which database?"
        assert lane.understand(["tree", "--sizes", *rest]) is None, "that needs the whole manifest"


@pytest.mark.parametrize("arguments", [[], ["create", "x"], ["--version"], ["manifest", "tables"], ["lsx"]])
def test_the_lane_declines_everything_else(arguments: list[str]) -> None:
    assert lane.understand(arguments) is None


def test_the_lane_leaves_completion_to_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_QUIRE_COMPLETE", "complete_bash")
    assert lane.understand(["ls"]) is None
