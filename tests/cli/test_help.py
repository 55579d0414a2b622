"""The help of every command and group: -h and --help, and words that a user understands."""

from __future__ import annotations

import re

import pytest

from quire.cli.declarations import NUMBER_MAX
from quire.cli.errors import INTERNAL, USAGE
from quire.cli.output import width_of
from tests.cli.commands import COMMANDS, GROUPS
from tests.cli.conftest import Run, quire_program

WORDS = [(), *((name,) for name in GROUPS), *COMMANDS]

RAW = re.compile(r"<[a-z ]+>|\b(INTEGER|TEXT|FLOAT|BOOLEAN|RANGE)\b|x[<>]=|\{|range")
"""Click's names of value types."""


@pytest.mark.parametrize("words", WORDS, ids=lambda words: " ".join(words) or "quire")
def test_help_has_two_options_and_shows_no_types(run: Run, words: tuple[str, ...]) -> None:
    short, long = (run(*words, option, at=None) for option in ("-h", "--help"))
    assert (short.code, short.err) == (0, "")
    assert short == long
    assert "-h, --help" in short.out
    assert RAW.findall(short.out) == []
    assert max(map(width_of, short.out.splitlines())) <= 80
    assert not re.search(r"\w-$", short.out, re.MULTILINE), "no command is broken at a hyphen"
    example = short.out.rpartition("  Example: ")[2]
    assert "\n" not in example.replace(" \\\n", "").rstrip(), "a shell reads the example as one command"


def test_help_can_be_requested_anywhere_on_the_line(run: Run) -> None:
    help_text = run("snapshot", "create", "-h", at=None).out
    assert run("snapshot", "create", "shop", "monday", "-h", at=None).out == help_text
    assert run("snapshot", "create", "--json", "-h", "shop", at=None).out == help_text


def test_the_program_itself_accepts_it() -> None:
    assert quire_program("-h").stdout == quire_program("--help").stdout != ""


@pytest.mark.parametrize("value", ["-1", "x", "1.5", ""])
def test_an_invalid_number_is_explained(run: Run, value: str) -> None:
    result = run("stream", "tail", "clicks", "-n", value, at=None)
    assert result.code == 2
    assert "range" not in result.err
    assert result.err.splitlines()[1] == "next:  see `quire stream tail --help`"


@pytest.mark.parametrize(
    "line", [("ls", "--limit"), ("jobs", "ls", "--limit"), ("audit", "--limit"), ("kv", "scan", "x", "-n")]
)
def test_the_largest_number_is_no_bug(run: Run, line: tuple[str, ...]) -> None:
    assert run(*line, str(NUMBER_MAX)).code != INTERNAL
    assert run(*line, str(NUMBER_MAX + 1)).code == USAGE
